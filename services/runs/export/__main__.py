"""``gspo export RUN``: write a checkpoint of a run as an ordinary Hugging Face model."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from gspo_protocol.digests import VERSION_KIND, version_kind
from gspo_services.broker.rows import VersionRow
from gspo_services.broker.store import LEDGER_FILE, NoLedger, Reader, ReaderGaveWay, StoreCorrupt, reading, refusing_damage
from gspo_services.runs.audit import read_checkpoints
from gspo_services.runs.export.choice import ChosenCheckpoint, choose, wanted_checkpoint
from gspo_services.runs.learning import outcome_of
from gspo_services.runs.metrics import NoMetrics, RunMetrics, read_metrics
from gspo_services.shared.runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_ROOM,
    ConfigurationError,
    NoRoomError,
    ServiceError,
)
from gspo_services.shared.runtime.operations import operation_on
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.plain_text import indented_lines, one_line
from gspo_services.shared.settings import Settings, load_settings, override_settings, read_run_settings

_ATTEMPTS: Final = 5
DESCRIPTION: Final = """\
Write a checkpoint of a run as an ordinary Hugging Face model: weights, configuration, tokenizer, and a model card
(README.md) on how it was trained. The run may be finished, active or interrupted, and any number of ranks may have written
the checkpoint. Reading it needs no GPU and no ranks; every bit is compared with the digest that the learner took. The
command does not change the run.

  gspo export runs/arithmetic                            the newest checkpoint, to runs/arithmetic-batch-60
  gspo export runs/arithmetic --checkpoint best          the one with the best held-out reward (eval/reward)
  gspo export runs/arithmetic --checkpoint 40 --to DIR   the one after 40 batches
  gspo export runs/lora                                  of a run with adapters: the model with the adapters merged
  gspo export runs/lora --adapter                        the adapters alone, as peft reads them

The learner keeps learner.keep_checkpoints checkpoints and, with learner.keep_best_checkpoint, the best one.

Status 0: written; 1: the checkpoint is damaged, or cannot be written; 2: no such run or checkpoint, or DIR already exists;
5: no room.
"""


def main() -> int:
    """Parse the command line and act. Returns the exit status."""
    begin_command()
    return export_command(sys.argv[1:])


def export_command(words: Sequence[str]) -> int:
    """Parse ``words`` and act. Returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        _export(arguments)
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", EXIT_INTERRUPTED)
    except NoRoomError as error:
        return _fail(error, EXIT_NO_ROOM)
    except (ConfigurationError, NoLedger) as error:
        return _fail(error, EXIT_CONFIGURATION)
    except (ServiceError, OSError, StoreCorrupt, ReaderGaveWay) as error:
        return _fail(error, EXIT_FAILED)


def _fail(error: object, status: int) -> int:
    sys.stderr.write(indented_lines(f"gspo export: {error}") + "\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's directory, or its TOML file if the directory has no settings.json")
    parser.add_argument("--checkpoint", metavar="N|best", help="after N batches, or the best one (default: the newest)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="a new directory for the model (default: RUN-batch-N)")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="the starting model's directory, if it is no longer at model.path"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with lora.rank: write the adapters alone, in peft's format; each of several in a folder of its own",
    )
    return parser


def _export(arguments: argparse.Namespace) -> None:
    """Export. Raises: ConfigurationError, ServiceError, OSError, and what reading a ledger raises."""
    wanted = wanted_checkpoint(arguments.checkpoint)
    settings = _settings(arguments.run)
    directory, metrics = settings.run.directory, _metrics(settings.run.directory)
    evaluations = [] if metrics is None else metrics.evaluations
    choice = choose(directory, read_checkpoints(directory), evaluations, wanted)
    named = directory if directory.name not in ("", "..") else directory.resolve()
    suffix = "-adapter" if arguments.adapter else ""
    destination = arguments.to or named.with_name(f"{named.name}-batch-{choice.checkpoint.batch_position}{suffix}")
    _require_outside(destination, directory / "checkpoints")
    model_dir: Path = arguments.model or settings.model.path

    # torch and transformers take seconds to import: only once everything else is known to be good.
    from gspo_services.runs.export.adapted import AdaptedCheckpointWeights, open_checkpoint
    from gspo_services.runs.export.card import CardFacts, model_card
    from gspo_services.runs.export.writer import require_free, write_adapter, write_export

    require_free(destination)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with operation_on(directory, "export"), ExitStack() as hold:
        for attempt in range(_ATTEMPTS):
            path = directory / "checkpoints" / choice.checkpoint.name
            try:
                weights = open_checkpoint(path, model_dir, hold)
                break
            except ServiceError:
                if path.is_dir() or attempt == _ATTEMPTS - 1:
                    raise
            # The learner has removed it meanwhile; a newer one exists.
            choice = choose(directory, read_checkpoints(directory), evaluations, wanted)
        published = None if arguments.adapter else _published(directory, settings, choice)
        facts = CardFacts(
            settings=settings,
            choice=choice,
            metrics=metrics,
            num_parameters=weights.num_parameters,
            published=published is not None or None,
            adapter=arguments.adapter,
            outcome=None if metrics is None or not metrics.batches else outcome_of(directory, metrics.learning),
        )
        if not arguments.adapter:
            write_export(
                weights,
                destination,
                dtype=settings.model.dtype,
                model_dir=model_dir,
                card=model_card(facts),
                published=published,
            )
        elif isinstance(weights, AdaptedCheckpointWeights):
            write_adapter(weights, destination, card=model_card(facts))
        else:
            raise ConfigurationError(
                f"--adapter: {weights.path} holds all weights of the model, not adapters: leave it out to export the model"
            )
    _say(destination, choice, metrics)


def _say(destination: Path, choice: ChosenCheckpoint, metrics: RunMetrics | None) -> None:
    checkpoint, evaluation = choice.checkpoint, choice.evaluation
    reward = "not evaluated" if evaluation is None else f"held-out reward {evaluation.reward:.4g}"
    text = f"{destination}: policy version {checkpoint.policy_version}, after {checkpoint.batch_position} batches, {reward}"
    sys.stdout.write(one_line(text) + "\n")
    damage = () if metrics is None else metrics.damage
    for note in filter(None, (choice.remark, *map(str, damage))):
        sys.stdout.write(one_line(f"note: {note}") + "\n")


def _settings(run: Path) -> Settings:
    """Read a run's settings from its directory, which may have moved, or from a TOML file. Raises: ConfigurationError."""
    if run.is_dir():
        return override_settings(read_run_settings(run), [f"run.directory={run}"])
    if not run.exists():
        raise ConfigurationError(f"{run}: there is no such run")
    return load_settings(run, [])


def _metrics(directory: Path) -> RunMetrics | None:
    try:
        return read_metrics(directory)
    except NoMetrics:
        return None  # A learner's own directory on another machine has none.


def _published(directory: Path, settings: Settings, choice: ChosenCheckpoint) -> str | None:
    """The digest under which these weights were served; None where it is not known, or not comparable (of another kind; of
    adapters that were published as such the ledger has their own)."""
    if settings.lora.publish == "adapter" or not choice.checkpoint.policy_version:
        return None
    path = directory / LEDGER_FILE
    if not path.is_file():
        return None
    with refusing_damage(path), reading(directory) as connection:
        version = choice.checkpoint.policy_version
        rows = Reader(path, connection).rows(VersionRow, "WHERE policy_version = ?", (version,))
    return rows[0].digest if rows and version_kind(rows[0].digest) == VERSION_KIND else None


def _require_outside(destination: Path, checkpoints: Path) -> None:
    if destination.resolve() == checkpoints.with_name("export").resolve():
        raise ConfigurationError(f"{destination} is where the run's learner exports: choose another directory")
    if destination.resolve().is_relative_to(checkpoints.resolve()):
        raise ConfigurationError(
            f"{destination} is among the run's checkpoints, which the learner removes: choose another directory"
        )


if __name__ == "__main__":
    sys.exit(main())
