"""Says what is wrong with a run and what to do: a pure function of the observation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gspo_services.cli.doctor.damage import Holder
from gspo_services.cli.doctor.observe import RECENT_LINES_S, Observation
from gspo_services.runs.pace import pace_of
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.runtime.private_files import open_to_all

FREE_LEAST_BYTES: Final = 1 << 30
SILENT_S: Final = 10.0
QUIET_LEAST_S: Final = 120.0
QUIET_FACTOR: Final = 10.0
"""A batch that takes more than this many times its usual time gets a remark."""
QUIET_START_S: Final = 300.0
"""A first batch may take this long while no rollout serves: rollouts are loading their models."""
REPEATED: Final = 6
"""A warning that comes this often within RECENT_LINES_S gets a remark."""
FOR_ANOTHER: Final = "message_for_another_session"
SAID_CHARACTERS: Final = 500
"""The most characters quoted from a process: the advice follows the quotation."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One sentence. ``wrong``: somebody has to act; otherwise it explains."""

    text: str
    wrong: bool = True


def diagnose(seen: Observation) -> list[Remark]:
    """Remarks on a run, the cause first where it is known."""
    remarks = [*_disk(seen), *_damage(seen), *_quarantined(seen)]
    if seen.status is None:
        return [*remarks, *_without_broker(seen), *_learning(seen)]
    return [*remarks, *_with_broker(seen, seen.status), *_learning(seen)]


def unseen(seen: Observation) -> list[str]:
    """List what could not be checked, and may be right or wrong."""
    down = seen.status is None and not seen.turned_away  # Then nothing listens where nothing runs.
    found = [
        f"{name}'s page: {_said(page.text)}"
        for name, page in seen.pages.items()
        if not page.up and not (down and page.nobody)
    ]
    # Rollouts that take any free port, or run elsewhere, have addresses that are unknown here.
    rollouts = [] if seen.status is None else [rollout["peer"] for rollout in seen.status["rollouts"]]
    found += [f"{_said(name)}'s page: its address is not known here" for name in rollouts if name not in seen.pages]
    if seen.ledger is None:
        found.append(f"the ledger: {_said(seen.no_ledger)}")
    return [*found, *map(_said, seen.unread)]


def _disk(seen: Observation) -> Iterator[Remark]:
    if said := open_to_all(seen.settings.run.directory):
        yield Remark(text=said, wrong=False)
    for place, (free, total) in seen.free_bytes.items():
        if free < min(FREE_LEAST_BYTES, total // 20):
            yield Remark(text=f"{place} has {free / 2**20:,.0f} MiB free: make room, or the run stops making progress")


def _damage(seen: Observation) -> Iterator[Remark]:
    if seen.damage:
        yield Remark(text=f"the run's files are damaged: {_said(seen.damage)}")
    page = seen.pages.get("broker")
    metrics = {} if page is None else page.metrics
    if metrics.get("gspo_broker_damaged_rows", 0.0) > 0:
        yield Remark(
            text=f"the broker found {metrics['gspo_broker_damaged_rows']:.0f} rows or archive files that were changed on "
            f"the disk (damage_found in its log): `gspo audit {seen.settings.run.directory}` shows what depends on them. "
            "Check the disk, and restore a backup if the run needs them"
        )
    if metrics.get("gspo_broker_mark_failing", 0.0) > 0:
        yield Remark(text="the ledger's high-water mark cannot be written (mark_not_written in the broker's log)")


def _stuck(seen: Observation, holder: Holder) -> Remark:
    who = f"process {holder.pid}" if holder.pid else "a process"
    if holder.suspended:
        return Remark(
            text=f"the broker is suspended: {who} holds the ledger's lock and is stopped. Let it continue "
            f"(kill -CONT {holder.pid}), or end it (kill -KILL {holder.pid}) and start the run again: nothing "
            "acknowledged is lost"
        )
    return Remark(
        text=f"the broker does not answer, but {who} holds the ledger's lock: it is starting, stuck, or on another address "
        f"than {seen.settings.broker.batch_endpoint}. {seen.settings.run.directory}/logs/broker.log may say why; "
        "if it is stuck, end it and start the run again: nothing acknowledged is lost"
    )


def _learning(seen: Observation) -> Iterator[Remark]:
    """Say what keeps the run from learning, with some answers, and whether it has learned."""
    findings = seen.learning.findings
    for each in findings:
        yield Remark(text=one_line(each), wrong=each.is_wrong)
    for answer in seen.answers:
        yield Remark(text=f"an answer of the newest batch: {_said(answer)}", wrong=False)
    if findings:
        yield Remark(text=f"not measured: {', '.join(seen.learning.not_measured)}", wrong=False)
    if seen.outcome:
        yield Remark(text=seen.outcome, wrong=False)


def _quarantined(seen: Observation) -> Iterator[Remark]:
    waiting = [] if seen.ledger is None else [each for each in seen.ledger.quarantined if each.waiting]
    if not waiting:
        return
    directory = seen.settings.run.directory
    last = waiting[-1]
    others = f" So were {len(waiting) - 1} others: `gspo requeue {directory}` lists them." if len(waiting) > 1 else ""
    yield Remark(
        text=f"batch {last.batch} ({last.waiting} groups) was quarantined at version {last.policy_version}, and the run "
        f"goes on without it: {_said(last.reason)}.{others} "
        f"Find the cause; then `gspo requeue {directory} all` requeues them"
    )


def _without_broker(seen: Observation) -> Iterator[Remark]:
    goal = seen.settings.run.num_batches
    if seen.turned_away:
        yield Remark(text=f"the broker turns this command away: {_said(seen.no_status)}")
        return
    page = seen.pages.get("broker")
    nobody = seen.holder is None and (page is None or not page.up)
    if nobody and not seen.damage and seen.ledger is not None and seen.ledger.trained >= goal:
        text = f"the run is complete: {seen.ledger.trained} of {goal} batches are trained, and no process is running"
        yield Remark(text=text, wrong=False)
        return
    yield from _silent(seen)


def _silent(seen: Observation) -> Iterator[Remark]:
    """Return remarks on a broker that does not answer."""
    goal, ledger = seen.settings.run.num_batches, seen.ledger
    log, page = seen.logs.get("broker"), seen.pages.get("broker")
    if page is not None and page.up:
        yield Remark(
            text=f"a process serves {page.url} but does not answer on {seen.settings.broker.batch_endpoint}: "
            "another run's broker, a broker that is stuck (its log says why), or one with other keys (security.keys)"
        )
        return
    if seen.holder is not None:
        yield _stuck(seen, seen.holder)
        return
    if seen.damage:
        return
    if ledger is None:
        yield Remark(text=f"there is no broker, and no ledger: {_said(seen.no_ledger)}")
        return
    error = f" It ended with: {_said(log.error)}." if log is not None and log.error else ""
    yield Remark(
        text=f"the broker is not running.{error} {ledger.trained} of {goal} batches are trained, and the ledger "
        "holds everything that was acknowledged: start it "
        f"(`gspo run CONFIG`, or `gspo broker CONFIG`), and the run continues"
    )


def _with_broker(seen: Observation, status: dict[str, Any]) -> Iterator[Remark]:
    if status["error"]:
        yield Remark(text=f"the run has failed: {_said(status['error'])}")
    if status["finished"]:
        why = _said(status["stopping"] or "all are trained")
        text = f"the run has ended after {status['batches_trained']} batches ({why})"
        yield Remark(text=text, wrong=False)
        return
    if status["stopping"]:
        yield Remark(text=f"the run is stopping: {_said(status['stopping'])}", wrong=False)
    yield from _processes(seen, status)
    yield from _limited(status)
    yield from _warnings(seen)
    yield from _progress(seen, status)


def _processes(seen: Observation, status: dict[str, Any]) -> Iterator[Remark]:
    if status["learner"] is None:
        yield Remark(text=f"no learner is connected{_ended(seen, 'learner')}: start it (`gspo learner CONFIG`)")
    yield from _learner(status)
    broker = seen.pages.get("broker")
    if broker is not None and broker.ready is False:
        yield Remark(text=f"the broker is not ready: {_said(broker.text)}")
    learner = seen.pages.get("learner")
    if learner is not None and learner.ready is False and status["learner"] is not None:
        yield Remark(text=f"the learner is not ready: {_said(learner.text)}")
    rollouts = {rollout["peer"]: rollout for rollout in status["rollouts"]}
    if not rollouts and not seen.settings.rollout.num_servers:
        yield Remark(text="no rollout is connected: start one (`gspo rollout CONFIG --name rollout-0`)")
    for index in range(seen.settings.rollout.num_servers):
        name = f"rollout-{index}"
        if name not in rollouts:
            page = seen.pages.get(name)
            starting = f"; it says: {_said(page.text)}" if page is not None and page.up else ""
            yield Remark(
                text=f"{name} is not connected{starting or _ended(seen, name)}: it joins by itself once you start it "
                f"(`gspo rollout CONFIG --name {name}`); SGLang takes about a minute to start"
            )
    for name, rollout in rollouts.items():
        yield from _rollout(seen, status, name, rollout)


def _learner(status: dict[str, Any]) -> Iterator[Remark]:
    silent_s = status.get("learner_silent_s")
    if silent_s is not None and silent_s > SILENT_S:
        yield Remark(
            text=f"the learner has been silent for {silent_s:.0f} s: its process, host or network is stuck. If it does not "
            "come back, start another one: it takes over at once, and the broker then refuses the old one"
        )
    if status.get("learner_waiting"):
        yield Remark(
            text=f"a second learner (session {_said(status['learner_waiting'])}) waits while session "
            f"{status['learner_session']} has the run; it ends by itself after 30 s. Stop one of them unless you want both"
        )


def _limited(status: dict[str, Any]) -> Iterator[Remark]:
    for each in status.get("limited", ()):
        name, faults = each["peer"], f"{each['per_minute']} {each['what']} within the last minute"
        if each["standing"] == "shut_out":
            yield Remark(
                text=f"{name} is shut out for {each['seconds']:.0f} s: {faults}. It says Hello again by itself; if this "
                "goes on, its release differs or it lies: stop it, or remove its public key from security.keys"
            )
        else:
            effect = "requests above the limit are not answered" if each["reason"] == "messages" else "it gets few leases"
            yield Remark(text=f"{name} is slowed: {faults}; {effect} until it has behaved for a while. Its log says why")


def _rollout(seen: Observation, status: dict[str, Any], name: str, rollout: dict[str, Any]) -> Iterator[Remark]:
    page = seen.pages.get(name)
    why = f": {_said(page.text)}" if page is not None and page.ready is False else ""
    lag = status["policy_version"] - rollout["policy_version"]
    if rollout["silent_s"] > SILENT_S:
        yield Remark(
            text=f"{name} has been silent for {rollout['silent_s']:.0f} s{why}: its process, host or network is stuck; "
            f"other rollouts continue its {rollout['leases']} trajectories after broker.lease_s = "
            f"{seen.settings.broker.lease_s:g} s. Restart it: it cannot disturb what others took over"
        )
    elif rollout["status"] == "quarantined":
        yield Remark(
            text=f"{name} is quarantined{why}: its weights differ from what the learner sent, so it gets no work. It "
            f"tries again and ends after three failures; logs/{name}.log and logs/{name}-sglang.log say more. If every "
            "version fails, check that the engine loads model.path and that its release is supported"
        )
    elif rollout["status"] in ("starting", "verifying"):
        yield Remark(text=f"{name} is {rollout['status']} and takes no work yet{why}", wrong=False)
    elif rollout["status"] == "serving" and lag > seen.settings.batch.max_lag:
        yield Remark(
            text=f"{name} serves version {rollout['policy_version']}, but the newest is {status['policy_version']}: too old "
            f"for new work (batch.max_lag = {seen.settings.batch.max_lag}){why}. Check that it reaches the learner at "
            f"{seen.settings.learner.advertised_weights_endpoint or seen.settings.learner.weights_endpoint}"
        )
    elif page is not None and page.ready is False:
        yield Remark(text=f"{name} is not ready{why}")


def _filtered(seen: Observation, status: dict[str, Any]) -> Iterator[Remark]:
    number, limit = status["filtered"]["groups"], status["filtered"]["limit"]
    if status["groups"]["filtered"]:
        text = f"{status['groups']['filtered']} zero-advantage groups were filtered out (data.dynamic_sampling)"
        yield Remark(text=text, wrong=False)
    if limit and number >= limit:
        yield Remark(
            text=f"batch {status['batches_assembled']} has filtered out {number} zero-advantage groups, the most that "
            f"data.max_filtered = {seen.settings.data.max_filtered:g} allows, and takes what there is: nearly all tasks are "
            "solved always or never; choose others, or let such tasks rest"
        )


def _progress(seen: Observation, status: dict[str, Any]) -> Iterator[Remark]:
    for reason, number in status["dropped"].items():
        ways = {
            "failed": "the rollouts' logs say why attempts fail (environment, reward, or engine)",
            "stale": "the learner restarted with other weights, so older groups were left behind",
        }
        yield Remark(text=f"{number} groups were dropped as {_said(reason)}: {ways.get(reason, 'see the log')}", wrong=False)
    yield from _filtered(seen, status)
    if status["waiting_for"]:
        batch, total = status["batches_assembled"], status["batches_total"]
        text = f"batch {batch} of {total} waits for {_said(status['waiting_for'])}"
        yield Remark(text=text, wrong=False)
    if status["batches_trained"] < status["batches_total"] and not status["stopping"]:
        yield from _quiet(seen, status)
        pace = pace_of(seen.batches)
        if pace is not None:
            yield Remark(text=pace.advice(max_lag=seen.settings.batch.max_lag), wrong=False)


def _quiet(seen: Observation, status: dict[str, Any]) -> Iterator[Remark]:
    """Remark that no batch was trained for long, compared with the usual pace or, before there is one, a fixed time."""
    times, quiet_s = [row["time_s"] for row in seen.batches], status["quiet_s"]
    if len(times) > 1:
        usual = (times[-1] - times[0]) / (len(times) - 1)
        if quiet_s > max(QUIET_LEAST_S, QUIET_FACTOR * usual):
            yield Remark(text=f"no batch was trained for {quiet_s:.0f} s; earlier batches took {usual:.0f} s each")
        return
    serves = any(rollout["status"] == "serving" for rollout in status["rollouts"])
    if quiet_s > (QUIET_LEAST_S if serves else QUIET_START_S):
        yield Remark(
            text=f"no batch was trained for {quiet_s:.0f} s, and there is no earlier pace to compare with: unless batches "
            f"really take that long, look in {seen.settings.run.directory}/logs for the process that logs nothing new"
        )


def _warnings(seen: Observation) -> Iterator[Remark]:
    for name, log in seen.logs.items():
        for event, number in log.warnings.items():
            if event == FOR_ANOTHER:
                text = (
                    f"{name} gets answers that are meant for another process with its name ({event}, {number} times within "
                    f"{RECENT_LINES_S:.0f} s), and its own answers get lost too. Stop the other one, and restart this one"
                )
                yield Remark(text=text)
            elif number >= REPEATED:
                often = f"{number} times within {RECENT_LINES_S:.0f} s"
                text = f"{name} keeps warning: {_said(event)}, {often}; see its log"
                yield Remark(text=text, wrong=False)


def _ended(seen: Observation, name: str) -> str:
    log = seen.logs.get(name)
    return f" (it ended with: {_said(log.error)})" if log is not None and log.error else ""


def _said(text: object) -> str:
    return one_line(text, SAID_CHARACTERS)
