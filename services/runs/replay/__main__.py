"""``gspo replay RUN_DIR``: train a recorded run's batches again, and compare the weights bit by bit."""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gspo_protocol.digests import VERSION_KIND
from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import NoLedger
from gspo_services.learner.start import is_rank, require_teacher, run_ranks
from gspo_services.shared.runtime.config_arguments import add_override_argument
from gspo_services.shared.runtime.errors import EXIT_CONFIGURATION, EXIT_FAILED, ConfigurationError, ServiceError
from gspo_services.shared.runtime.lifecycle import leave
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.operations import only_operation, operation_on
from gspo_services.shared.runtime.output import begin_command, protect_result
from gspo_services.shared.runtime.plain_text import indented_lines
from gspo_services.shared.settings import (
    SCHEDULED,
    SCORES_DIRECTORY,
    Learner,
    Settings,
    override_settings,
    read_run_settings,
    require_model,
)

RESULT_FILE: Final = "replay.json"
WITHOUT_EFFECT: Final = ("model.path", "learner.dump_tokens")
"""Settings that change no weight."""
RESCHEDULES: Final = ("run.num_batches", *SCHEDULED.values())
"""Settings with which the recorded values of schedules are not those that are asked for."""
DESCRIPTION: Final = """\
Train the batches of a run again from its ledger, in their recorded order, without engines and without a broker. With the
same settings, on the same machine and number of ranks, the weights after each batch equal those that the run published, bit
for bit: the digests are compared. The ranks of several machines are all started on this one. With other settings (--set
objective.eps_low=0.001) it is a different training on the same data.

A directory made by `gspo generate` has groups but no batches: the groups are taken in their order, each batch one version
later. The result has its own directory: metrics.jsonl (which `gspo plot` draws), checkpoints, and the model in export/.

Status 0: the same weights, or settings were changed; 1: other weights; 2: it cannot be replayed.
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The batches to train, and the directory for the result."""

    source: Path
    out: Path
    settings: Settings
    first: int
    end: int
    changed: bool
    rescheduled: bool
    """The schedules are computed again, because a setting that affects them was changed."""


def main() -> int:
    # As ``gspo run`` sets it for a learner: sums depend on the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_rank():
        protect_result()  # SIGTERM ends a rank as its launcher expects.
    else:
        begin_command()
    configure_logging("replay")
    return replay_command(sys.argv[1:])


def replay_command(words: Sequence[str]) -> int:
    """Parse ``words`` and act. Returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        plan = _plan(arguments)
        if is_rank():
            _train(plan)
            return 0
        ranks = ranks_of(plan.settings.learner, _num_gpus())
        way_out = "wait for it, or name another directory with --out"
        with operation_on(plan.source, "replay"), only_operation(plan.out, "replay", way_out):
            _prepare(plan, arguments.from_checkpoint)
            if ranks > 1:
                status = run_ranks("gspo_services.runs.replay", words, ranks)
                if status:
                    return status
            else:
                _train(plan)
            return _verdict(plan)
    except (ConfigurationError, NoLedger) as error:
        sys.stderr.write(indented_lines(f"gspo replay: {error}") + "\n")
        return EXIT_CONFIGURATION
    except (ServiceError, OSError) as error:
        sys.stderr.write(indented_lines(f"gspo replay: {error}") + "\n")
        return EXIT_FAILED


def ranks_of(learner: Learner, num_gpus: int) -> int:
    """Return as many ranks as the run had on all its machines: sums depend on their number.

    Raises: ConfigurationError when each needs its own GPU and this machine has fewer.
    """
    ranks = learner.num_ranks * learner.num_nodes
    if 0 < num_gpus < ranks:
        raise ConfigurationError(
            f"the run was trained by {learner.num_ranks} ranks on each of {learner.num_nodes} machines, but this one has "
            f"{num_gpus} GPUs for {ranks} ranks: replay it on a machine with enough, or train its batches again on fewer, "
            f"where weights differ by rounding: --set learner.num_nodes=1 --set learner.num_ranks={num_gpus}"
        )
    return ranks


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo replay", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="the run's directory")
    parser.add_argument(
        "--from-checkpoint",
        type=int,
        metavar="N",
        help="start after N batches, from the checkpoint there (default: from the model)",
    )
    parser.add_argument("--batches", type=int, metavar="K", help="train K batches (default: all)")
    parser.add_argument("--out", type=Path, help="a new directory for the result (default: RUN_DIR-replay)")
    add_override_argument(parser, "change a setting of the run; can be repeated")
    return parser


def what_changes(overrides: Sequence[str]) -> tuple[bool, bool]:
    """Whether ``--set`` changes the training, and whether it changes what schedules gave."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    rescheduled = any(key in RESCHEDULES or key.startswith("schedule.") for key in keys)
    return any(key not in WITHOUT_EFFECT for key in keys), rescheduled


def _plan(arguments: argparse.Namespace) -> Plan:
    """Raises: ConfigurationError; NoLedger."""
    from gspo_services.runs.replay.batches import RecordedRun

    source: Path = arguments.directory
    out: Path = arguments.out or source.with_name(f"{source.name}-replay")
    settings = override_settings(read_run_settings(source), [*arguments.overrides, f"run.directory={out}"])
    require_model(settings.model.path)
    try:
        require_teacher(settings, settings.model.path)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    recorded = RecordedRun(source, settings)
    num_batches = recorded.num_batches
    first: int = arguments.from_checkpoint or 0
    if arguments.batches is not None and arguments.batches < 1:
        raise ConfigurationError(f"--batches is {arguments.batches}: use at least 1")
    end = num_batches if arguments.batches is None else min(num_batches, first + arguments.batches)
    if first >= end:
        raise ConfigurationError(f"{source} has {num_batches} batches, and --from-checkpoint is {first}: none is left")
    changed, rescheduled = what_changes(arguments.overrides)
    kinds = recorded.other_kinds_of_digests(first, end)
    if kinds and not changed:
        raise ConfigurationError(
            f"{source} has versions with digests of kind {kinds[0]}, and this release makes those of kind {VERSION_KIND}: "
            "it cannot tell whether weights are the same. Replay it with the release that recorded it (gspo 0.1.0 made "
            "kind 1); or train on the same data anew: --set "
            f"learner.learning_rate={settings.learner.learning_rate}, or any other setting"
        )
    others = recorded.trained_in_another_order(first, end)
    if others and not changed:
        raise ConfigurationError(
            f"{source} has {len(others)} batches, from batch {others[0]} on, that a learner of another release trained: it "
            "took their groups in another order, which gives other weights. Replay them with that release; or train "
            f"on the same data anew: --set learner.learning_rate={settings.learner.learning_rate}, or any other setting"
        )
    return Plan(source=source, out=out, settings=settings, first=first, end=end, changed=changed, rescheduled=rescheduled)


def _prepare(plan: Plan, from_checkpoint: int | None) -> None:
    """Make the result's directory, with the checkpoint to start from. Raises: ConfigurationError."""
    if plan.out.exists() and any(plan.out.iterdir()):
        raise ConfigurationError(f"{plan.out} is not empty: name another directory with --out, or remove it")
    checkpoint = None if from_checkpoint is None else _checkpoint(plan.source, from_checkpoint)
    plan.out.mkdir(parents=True, exist_ok=True)
    if checkpoint is not None:
        # Hard links if possible: a checkpoint's files are never rewritten.
        shutil.copytree(checkpoint, plan.out / "checkpoints" / checkpoint.name, copy_function=_link_or_copy)


def _checkpoint(source: Path, position: int) -> Path:
    found = sorted(source.glob("checkpoints/version-*-batch-*/checkpoint.json"))
    positions = {int(path.parent.name.rpartition("-")[2]): path.parent for path in found}
    if position not in positions:
        there = ", ".join(str(each) for each in sorted(positions)) or "none"
        raise ConfigurationError(f"--from-checkpoint is {position}: {source} has checkpoints after these batches: {there}")
    return positions[position]


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)


def _train(plan: Plan) -> None:
    """Train on this rank; rank 0 writes the result. Raises: ServiceError."""
    import torch
    from prometheus_client import CollectorRegistry

    from gspo_services.learner.broker import NoBroker
    from gspo_services.learner.engine import LearnerEngine
    from gspo_services.learner.metrics import LearnerMetrics
    from gspo_services.learner.service import LearnerService
    from gspo_services.learner.start import engine_settings_of
    from gspo_services.runs.replay.batches import RecordedBroker, RecordedRun
    from gspo_services.shared.runtime.clock import MonotonicClock
    from gspo_services.shared.runtime.telemetry import Health

    stop = threading.Event()
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    clock = MonotonicClock()
    recorded = None
    if os.environ.get("RANK", "0") == "0":
        run = RecordedRun(plan.source, plan.settings, rescheduled=plan.rescheduled)
        recorded = RecordedBroker(run, plan.end, plan.out / METRICS_FILE, stop, _show)
    engine_settings = engine_settings_of(plan.settings, "cuda" if torch.cuda.is_available() else "cpu")
    if engine_settings.teacher_server is not None:
        known = replace(engine_settings.teacher_server, earlier=plan.source / SCORES_DIRECTORY)
        engine_settings = replace(engine_settings, teacher_server=known)
    engine = LearnerEngine.create(plan.settings.model.path, engine_settings)
    try:
        LearnerService(
            plan.settings,
            engine,
            NoBroker() if recorded is None else recorded,
            clock=clock,
            health=Health(clock, float("inf")),
            metrics=LearnerMetrics(CollectorRegistry()),
            stop=stop,
        ).run()
    finally:
        engine.close()
    if interrupted.is_set():
        raise ServiceError(f"interrupted; {plan.out} holds what was trained so far")
    if recorded is not None:
        _write_result(plan, recorded.comparisons)


def _show(line: dict[str, Any]) -> None:
    sys.stdout.write(
        f"batch {line['batch']}  loss {line['loss']:.6g}  reward {line['reward_mean']:.3f}  "
        f"weights {line['weights_digest'][:16]}: {line['weights']}\n"
    )
    sys.stdout.flush()


def _write_result(plan: Plan, comparisons: dict[int, str]) -> None:
    content = {
        "source": str(plan.source),
        "first_batch": plan.first,
        "next_batch": plan.end,
        "settings_changed": plan.changed,
        "weights": comparisons,
    }
    (plan.out / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _verdict(plan: Plan) -> int:
    from gspo_services.runs.replay.batches import DIFFERENT, SAME

    weights: dict[str, str] = json.loads((plan.out / RESULT_FILE).read_text(encoding="utf-8"))["weights"]
    trained = {after: found for after, found in weights.items() if int(after) > plan.first}
    different = [after for after, found in weights.items() if found == DIFFERENT]
    sys.stdout.write(f"trained batches {plan.first} to {plan.end - 1}; the result is in {plan.out}\n")
    if plan.changed:
        others = sum(1 for found in trained.values() if found == DIFFERENT)
        sys.stdout.write(f"settings were changed: other weights than the run's after {others} of {len(trained)} batches\n")
        return 0
    if different:
        sys.stdout.write(
            f"DIFFERENT from the run, first after {different[0]} batches: another machine, number of ranks, release, model "
            "or OMP_NUM_THREADS\n"
        )
        return EXIT_FAILED
    num_same = sum(1 for found in trained.values() if found == SAME)
    if not num_same:
        sys.stdout.write("the run published no weights after these batches: there is nothing to compare with\n")
        return 0
    sys.stdout.write(f"bit for bit the same as published by the run, after each of {num_same} of {len(trained)} batches\n")
    return 0


if __name__ == "__main__":
    leave(main())
