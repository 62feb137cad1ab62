"""``gspo eval CONFIG``: score models on the sets of a configuration."""

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import structlog

from gspo.files import replace_file
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.eval.models import ScoredModel, scored_models, served_directory
from gspo_services.runs.eval.picture import PLOT_FILE, write_picture
from gspo_services.runs.eval.progress import SamplingProgress, progress_console
from gspo_services.runs.eval.report import cost_lines, results_table
from gspo_services.runs.eval.results import SetResult, known_samples, result_of
from gspo_services.runs.eval.sample_maker import open_maker
from gspo_services.runs.eval.samples import SampleFile, ScoredSample
from gspo_services.runs.eval.sets import ScoredSet, ScoredTask, chosen_sets, open_set
from gspo_services.runs.eval.sglang_server import open_served
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.config_arguments import add_configuration_arguments
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    EndpointError,
    ServiceError,
    tell,
)
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.operations import only_operation, operation_on
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.settings import Settings, load_settings

RESULTS_FILE: Final = "results.jsonl"
DESCRIPTION: Final = """\
Score models on the evaluation sets of CONFIG, with real SGLang and the same chat template, environment or agent, rewards and
limits as in a run. The command does not touch the run, which need not exist.

  gspo eval my.toml                                  the starting model (model.path)
  gspo eval my.toml --model models/a models/b        any model directories
  gspo eval my.toml --checkpoint 20 40 60            checkpoints of the run in run.directory; all: every one it has kept
  gspo eval my.toml --samples 32 --metrics avg@32,pass@8,maj@8 --temperature 0.6 --top-p 0.95

The sets are those in [evaluation.sets.NAME] (docs/settings.md); without any, the environment's first evaluation.num_tasks
held-out tasks. The options below change all sets.

  reward    the mean reward of a sample
  avg@k     the share of samples that are solved (reward of at least solved_at; 1 by default)
  pass@k    the probability that one of k samples is solved: unbiased, from all samples taken
  maj@k     how often the most frequent answer of k samples is right
  elo       the rating of a solver that would solve this share of tasks with ratings (the task's field "rating")

Intervals are 95 % intervals for other tasks of the same kind: samples of one task count as related. A sample without a
reward, for a fault that is not the model's, counts in no metric and is reported.

Each sample is on the disk before the next step (OUT/MODEL/SET.jsonl). After an interruption or a kill, the same command
continues and takes no sample twice; with more --samples or --tasks it adds what is missing. Results: a table,
OUT/results.jsonl (a line for each model, set and metric) and OUT/plot.png.

Status 0: every sample has a reward; 1: some have none, or the engine failed; 2: the configuration, a model, a checkpoint or
the command line cannot be used; 130: interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and score. Returns the exit status."""
    begin_command()
    arguments = _parser().parse_args(argv)
    _quiet_logs()
    try:
        return _evaluate(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\ngspo eval: interrupted; the same command continues from here\n")
        return EXIT_INTERRUPTED
    except (ConfigurationError, EndpointError, ServiceError, OSError, BaseExceptionGroup) as error:
        return _explained(error)


def _explained(error: BaseException) -> int:
    """Say what ended the command. Returns its exit status; a bug is raised."""
    known = tell(error, "gspo eval")
    is_failure = all(isinstance(leaf, ServiceError | OSError) for leaf in known)
    if is_failure:
        sys.stderr.write("gspo eval: all samples taken so far are kept: the same command continues from here\n")
    return EXIT_FAILED if is_failure else EXIT_CONFIGURATION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration_arguments(parser)
    parser.add_argument(
        "--model", type=Path, nargs="+", action="extend", default=[], metavar="DIR", help="model directories"
    )
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="checkpoints after N batches; all: every one",
    )
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="SET", help="these sets (default: all)")
    parser.add_argument("--tasks", type=_number(1), metavar="N", help="use the first N tasks of each set")
    parser.add_argument("--samples", type=_number(1), metavar="K", help="samples of each task")
    parser.add_argument("--metrics", metavar="NAMES", help="separated by commas: reward, avg@k, pass@k, maj@k, elo")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=_number(-1), metavar="N", help="-1: all tokens")
    parser.add_argument("--max-turn-tokens", type=_number(1), metavar="N", help="the longest answer")
    parser.add_argument("--max-tokens", type=_number(2), metavar="N", help="the longest conversation")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for results (default: evaluations/CONFIG's name)")
    return parser


def _number(lowest: int) -> Callable[[str], int]:
    """Make the type of a whole number on the command line."""

    def number(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {lowest}")
        return int(text)

    return number


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of every set that the command line changes."""
    keys = {
        "num_tasks": arguments.tasks, "samples": arguments.samples, "temperature": arguments.temperature,
        "top_p": arguments.top_p, "top_k": arguments.top_k, "max_turn_tokens": arguments.max_turn_tokens,
        "max_tokens": arguments.max_tokens,
        "metrics": None if arguments.metrics is None else [each.strip() for each in arguments.metrics.split(",")],
    }  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}


def _evaluate(arguments: argparse.Namespace) -> int:
    """Score and report. Returns the exit status. Raises: what main explains."""
    settings = load_settings(arguments.config, arguments.overrides, fetch=True)
    out: Path = arguments.out or Path("evaluations") / arguments.config.stem
    models = scored_models(settings, arguments.model, arguments.checkpoint)
    terms = chosen_sets(settings, arguments.only, _changes(arguments))
    sets = [open_set(_without_a_run(settings, out), name, each) for name, each in terms.items()]
    with ExitStack() as owning:
        owning.enter_context(only_operation(out, "eval", "let it end, or name another directory with --out"))
        if arguments.checkpoint:
            owning.enter_context(operation_on(settings.run.directory, "eval"))
        results = [result for model in models for result in _score(model, sets, out)]
        lines = [json.dumps(line) for result in results for line in result.lines()]
        replace_file(out / RESULTS_FILE, "\n".join(lines) + "\n")
        write_picture(results, out / PLOT_FILE)
    console = PlainConsole()
    console.print(results_table(results))
    for line in cost_lines(results):
        console.print(line, soft_wrap=True)
    console.print(f"{out / RESULTS_FILE}, {out / PLOT_FILE}; samples are in {out}/MODEL/SET.jsonl", soft_wrap=True)
    return EXIT_FAILED if any(result.num_failed for result in results) else 0


def _score(model: ScoredModel, sets: Sequence[ScoredSet], out: Path) -> list[SetResult]:
    """Take the samples that are missing. Raises: ConfigurationError, EndpointError, ServiceError, OSError."""
    with ExitStack() as files:
        opened = []
        for chosen in sets:
            header = {"model": {"label": model.label, "identity": model.identity}, **chosen.header()}
            path = out / model.folder / f"{chosen.name}.jsonl"
            opened.append((chosen, files.enter_context(SampleFile(path, header))))
        if any(list(missing(chosen, samples)) for chosen, samples in opened):
            with served_directory(model, out / "work") as directory:
                asyncio.run(_sample(model, directory, opened, out))
        return [result_of(model, chosen, samples) for chosen, samples in opened]


async def _sample(model: ScoredModel, directory: Path, opened: Sequence[tuple[ScoredSet, SampleFile]], out: Path) -> None:
    clock, console = MonotonicClock(), progress_console()
    settings = opened[0][0].settings
    tokenizer = ChatTokenizer(
        model.directory, settings.model.template_arguments, show_special_tokens=settings.model.show_special_tokens
    )
    log_path = out / "logs" / f"{model.folder}-sglang.log"
    console.print(f"{model.label}: SGLang is starting, which takes a minute; its log: {log_path}", soft_wrap=True)
    async with open_served(settings, directory, model.folder, tokenizer.vocab_size) as engine:
        for chosen, samples in opened:
            todo = list(missing(chosen, samples))
            if not todo:
                continue
            total = len(chosen.tasks) * chosen.terms.samples
            progress = SamplingProgress(
                console, f"{chosen.name}, {model.label}", total=total, known=total - len(todo),
                solved_at=chosen.terms.solved_at, clock=clock,
            )  # fmt: skip

            def done(sample: ScoredSample, samples: SampleFile = samples, progress: SamplingProgress = progress) -> None:
                samples.append(sample)
                progress.took(sample)

            async with open_maker(chosen, tokenizer, engine, clock) as maker:
                with progress:
                    await maker.take(iter(todo), done)


def missing(chosen: ScoredSet, samples: SampleFile) -> Iterator[tuple[ScoredTask, int]]:
    """Yield samples that are missing or have no reward: the first of every task, then the second of every task, ..."""
    known = {(each.task, each.sample) for each in known_samples(chosen, samples) if each.reward is not None}
    for number in range(chosen.terms.samples):
        for task in chosen.tasks:
            if (task.index, number) not in known:
                yield task, number


def _without_a_run(settings: Settings, out: Path) -> Settings:
    """Return ``settings`` that leave the run, and anything that runs beside this, alone."""
    changed: dict[str, object] = {"run": settings.run.model_copy(update={"directory": out})}
    if not settings.agent.url:
        # A service elsewhere may know the port; processes started here are told it.
        changed["agent"] = settings.agent.model_copy(update={"port": 0})
    return settings.model_copy(update=changed)


def _quiet_logs() -> None:
    """Silence a rollout's logs: the table says it better. GSPO_LOG_LEVEL shows them."""
    if os.environ.get("GSPO_LOG_LEVEL"):
        configure_logging("eval")
    else:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


if __name__ == "__main__":
    sys.exit(main())
