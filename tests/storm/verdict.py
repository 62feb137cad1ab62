"""What was measured of one part of the storm, and what did not hold."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from benchmarks.random_kills.memory import Watch
from gspo_services.runs.audit import audit_run
from tests.storm.attacker import BREACH, DAEMON
from tests.storm.losses import honest, losses
from tests.storm.measure import Files, largest_median, memory_by_role, trajectories_per_s
from tests.storm.parts import KEEP_CHECKPOINTS, Part, notes
from tests.storm.run import StormRun, counted
from tests.storm.weather import Weather, never_hit

PACE: Final = 0.7
RISE: Final = 0.1
FILES: Final = 16
FILES_GROWTH: Final = 1.3


@dataclass(frozen=True, kw_only=True)
class Times:
    """When the parts of a run began and ended: Unix times, and seconds since the watch began."""

    quiet_from: float
    storm_from: float
    storm_to: float
    watched_from_s: float
    watched_to_s: float


def verdict(
    part: Part, run: StormRun, weather: Weather, watch: Watch, files: Sequence[Files], times: Times, status: int
) -> tuple[list[str], list[str]]:
    """Lines of figures, and what did not hold. The run has ended with ``status``."""
    batches = run.trained()
    quiet = trajectories_per_s(batches, times.quiet_from, times.storm_from)
    storm = trajectories_per_s(batches, times.storm_from, times.storm_to)
    audit = audit_run(run.directory)
    rewards = [row["eval/reward"] for row in run.rows("eval") if row["eval/reward"] is not None]
    dropped = run.rows("dropped")
    reasons = Counter(row["reason"] for row in dropped)
    unjust = honest(losses(dropped, run.logged("attempt_failed", "group_dropped")), part.is_hostile)
    memory = memory_by_role(list(watch.lives.values()), times.watched_from_s, times.watched_to_s)
    before, after = largest_median(files)
    acts, breaches = _acts(run)
    left = [*watch.leftovers(), *_daemons()]
    missed = never_hit(weather.deck, weather.events)
    lines = [
        weather.counts(),
        f"batches {audit.num_batches}, trained again {audit.num_trained_again}, dropped groups {dict(reasons)}, "
        f"of them lost by others than attackers {len(unjust)}",
        f"pace: {quiet:.1f} trajectories/s quiet, {storm:.1f} in the storm: {storm / quiet:.2f}",
        f"held-out reward: first {rewards[0]:.2f}, best {max(rewards):.2f}, last {rewards[-1]:.2f}",
        f"files: {before}, at the end {after}",
        *(str(each) for each in memory),
        f"acts of agents: {counted(acts)}" if acts else "no attackers among agents",
    ]
    checks = [
        (f"gspo run ended with status {status}:\n{run.tail()}", status != 0),
        (f"the audit objects: {audit.problems[:3]}", not audit.clean),
        (f"the reward did not rise by {RISE}: {rewards[0]:.2f}, then {rewards[-1]:.2f}", rewards[-1] < rewards[0] + RISE),
        (f"{reasons['stale']} groups were dropped as stale", bool(reasons["stale"])),
        (f"{len(unjust)} groups were lost that are no attacker's: {unjust[:3]}", bool(unjust)),
        (f"attackers got what none may get: {breaches[:3]}", bool(breaches)),
        (f"the pace is {storm / quiet:.2f} of the quiet one", storm < PACE * quiet),
        (f"never happened: {', '.join(missed)}", bool(missed)),
        *((f"the memory of the {each.role} grew", each.grew) for each in memory),
        *((f"the {each.role} held {each.largest / 2**20:.0f} MiB at once", each.burst) for each in memory),
        (
            f"files grew from {before} to {after}",
            after.number > before.number + FILES
            or after.num_bytes > FILES_GROWTH * before.num_bytes
            or after.checkpoints > KEEP_CHECKPOINTS + 1,
        ),
        (f"processes are left: {left}", bool(left)),
        (f"weights are left: {sorted(run.weights.iterdir())}", any(run.weights.iterdir())),
    ]
    return lines, [text for text, wrong in checks if wrong]


def _acts(run: StormRun) -> tuple[list[str], list[str]]:
    """What attackers among the agents did, and their breaches."""
    path = notes(run.place)
    said = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    return [line for line in said if not line.startswith(BREACH)], [line for line in said if line.startswith(BREACH)]


def _daemons() -> list[str]:
    """Attackers' processes that are still there."""
    return [
        f"a daemon of an attacker (pid {each.pid})"
        for each in psutil.process_iter(["cmdline"])
        if (each.info["cmdline"] or [""])[0] == DAEMON
    ]
