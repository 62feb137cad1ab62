"""``gspo env try CONFIG``: plays some episodes here, and shows what would be trained on."""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

from gspo_services.prepare.env_try.answer_source import AnswerSource, open_engine, require_directory
from gspo_services.prepare.env_try.as_json import JsonReport
from gspo_services.prepare.env_try.groups import played_of_each
from gspo_services.prepare.env_try.player import PlayedEpisode, TaskPicker, open_player
from gspo_services.prepare.env_try.prompts import Prompts, WatchedTokenizer
from gspo_services.prepare.env_try.report import TerminalReport
from gspo_services.rollout.tokenizer import TokenizerError
from gspo_services.runs.local_play import places_of
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
from gspo_services.shared.runtime.logs import configure_logging, quiet_logs
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.settings import Settings, load_settings

TASKS: Final = 3
DESCRIPTION: Final = """\
Play some episodes of CONFIG here, in seconds and without a run: its environment or its agent, its chat template, its limits.
See each message, the answers, the reward with its components, where the time goes, and what would be trained on:

  trained    tokens that the policy sampled: the loss covers these, and nothing else (green)
  context    what the policy read: prompts, tools, the results of tools (dim)
  discarded  sampled, but in no loss: of an episode that failed, or is too long for objective.overlong_filter_tokens (red)

Where the answers come from:

  gspo env try my.toml                                  the model at model.path, here, on the CPU
  gspo env try my.toml --model models/tiny              another model
  gspo env try my.toml --url http://127.0.0.1:30000     a running SGLang server that serves model.path
  gspo env try my.toml --echo                           no model: each answer repeats the last message
  gspo env try my.toml --answer 42                      no model: each answer is the same
  gspo env try my.toml --type                           you: type each answer in a line (\\ at its end: one more line)

The tokenizer and the chat template are the model's in any case; weights are needed only for the first two. Which tasks:

  gspo env try my.toml --echo --split eval --tasks 10   the first 10 held-out ones
  gspo env try my.toml --echo --index 7                 task 7 alone

An error in your code is shown with its files and lines. Status 0: every episode has a reward; 1: one has none, or the model
failed; 2: nothing can be tried, because of the configuration or the command line.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and play. Returns the exit status."""
    begin_command()
    arguments = _parser().parse_args(argv)
    try:
        with _logs():
            return _try(arguments)
    except KeyboardInterrupt as error:
        places = places_of(error)
        sys.stderr.write(f"\ngspo env try: interrupted{f' in {places[-1]}' if places else ''}\n")
        return EXIT_INTERRUPTED
    except (ConfigurationError, EndpointError, ServiceError, OSError, BaseExceptionGroup) as error:
        return _explained(error)


def _explained(error: BaseException) -> int:
    """Say what ended the command. Returns its exit status; a bug is raised."""
    known = tell(error, "gspo env try")
    return EXIT_FAILED if all(isinstance(leaf, ServiceError) for leaf in known) else EXIT_CONFIGURATION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo env try", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration_arguments(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model's directory (default: model.path)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="ask the SGLang server there")
    source.add_argument("--echo", action="store_true", help="answer with the last message")
    source.add_argument("--answer", metavar="TEXT", help="answer with TEXT")
    source.add_argument("--type", dest="typed", action="store_true", help="type the answers")
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="which tasks (default: %(default)s)")
    parser.add_argument("--index", type=_at_least(0), metavar="N", help="begin at task N; without --tasks, only that one")
    many = f"how many tasks (default: {TASKS}; 1 where reward.group compares the batch.group_size answers of each)"
    parser.add_argument("--tasks", type=_at_least(1), metavar="N", help=many)
    parser.add_argument("--tokens", action="store_true", help="show each sampled token with its id and log-prob")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each episode, with all its tokens")
    return parser


def _at_least(lowest: int) -> Callable[[str], int]:
    """The type of a whole number on the command line."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {lowest} up")
        return int(text)

    return number


def _source(arguments: argparse.Namespace) -> AnswerSource:
    if arguments.url is not None:
        return AnswerSource(kind="server", url=arguments.url)
    if arguments.echo:
        return AnswerSource(kind="echo")
    if arguments.answer is not None:
        return AnswerSource(kind="fixed", text=arguments.answer)
    if arguments.typed:
        return AnswerSource(kind="typed")
    return AnswerSource(kind="model", is_chosen=arguments.model is not None)


def _try(arguments: argparse.Namespace) -> int:
    """Play the episodes and show them. Returns the exit status. Raises: ConfigurationError, EndpointError, ServiceError."""
    settings = load_settings(arguments.config, arguments.overrides, fetch=True)
    if arguments.model is not None:
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": arguments.model})})
    with tempfile.TemporaryDirectory(prefix="gspo-try-") as folder, _output(apart=arguments.json) as output:
        episodes = asyncio.run(_play(arguments, _without_a_run(settings, Path(folder)), output))
    return EXIT_FAILED if any(episode.reward is None for episode in episodes) else 0


async def _play(arguments: argparse.Namespace, settings: Settings, output: TextIO) -> list[PlayedEpisode]:
    compares = played_of_each(settings, arguments.split) > 1
    few = 1 if compares or arguments.index is not None else TASKS
    first, most = arguments.index or 0, arguments.tasks or few
    tasks = TaskPicker(settings, arguments.split, first, most)
    require_directory(settings.model.path)
    prompts, clock, source = Prompts(), MonotonicClock(), _source(arguments)
    try:
        tokenizer = WatchedTokenizer(settings, prompts)
    except TokenizerError as error:
        raise ConfigurationError(str(error)) from error
    console = PlainConsole(file=output)
    report = (
        JsonReport(output, tokenizer, tasks.played_of_each, tasks.columns)
        if arguments.json
        else TerminalReport(
            console, tokenizer, num_episodes=tasks.num_episodes, columns=tasks.columns, compares=compares,
            with_tokens=arguments.tokens, with_logprobs=source.has_logprobs,
        )
    )  # fmt: skip
    async with open_engine(source, settings, tokenizer, prompts, _tell) as engine:
        async with open_player(settings, tokenizer, prompts, engine, clock) as player:
            episodes = await player.play(tasks, report)
    report.summary(episodes)
    return episodes


@contextlib.contextmanager
def _logs() -> Iterator[None]:
    """Inside, what a rollout logs is not said: the report says it better. GSPO_LOG_LEVEL brings it back."""
    with quiet_logs():
        if os.environ.get("GSPO_LOG_LEVEL"):
            configure_logging("try")
        yield


@contextlib.contextmanager
def _output(*, apart: bool) -> Iterator[TextIO]:
    """Where results go. ``apart``: what an environment prints goes to standard error instead."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if apart else contextlib.nullcontext():
        yield output


def _without_a_run(settings: Settings, folder: Path) -> Settings:
    """``settings`` that leave the run, and whatever may run beside this, alone."""
    changed: dict[str, object] = {"run": settings.run.model_copy(update={"directory": folder})}
    if not settings.agent.url:
        # A service elsewhere may know the port; processes that are started here are told it.
        changed["agent"] = settings.agent.model_copy(update={"port": 0})
    return settings.model_copy(update=changed)


def _tell(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
