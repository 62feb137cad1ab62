"""The process that opens what is the user's: tokenizer, tasks, reward functions, agents. It may hang or die.

It sends its parent one message after the other, as it goes on, so that what was found before is not lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import TaskSource
from gspo.tasks.ladders import LadderTasks
from gspo_services.prepare.check import code
from gspo_services.prepare.env_try.player import PlayedEpisode, TaskPicker, open_player
from gspo_services.prepare.env_try.prompts import Prompts, WatchedTokenizer
from gspo_services.prepare.env_try.scripted import TextEngine, echo
from gspo_services.prepare.env_try.watcher import PlayedTurn
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.opening import open_comparing, open_user_code
from gspo_services.rollout.tokenizer import SENTINEL, ChatTokenizer, TokenizerError
from gspo_services.runs.eval.sets import open_set
from gspo_services.runs.local_play import of_the_configuration, places_of
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, flatten
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import (
    READING,
    ComparesAnswers,
    MixedTasks,
    create_environment,
    create_task_set,
    forms_of,
    questions_said_again,
)
from gspo_services.tasks.worker.frames import FrameSocket

MOST_RENDERED: Final = 200
"""Tasks of a split whose prompts are measured, spread evenly over it."""
MOST_COMPARED: Final = 50_000
MOST_SAID_AGAIN: Final = 64
"""Tasks of a split that are compared with the other split's."""
MOST_TEXT: Final = 2000
Tell = Callable[[dict[str, Any]], None]
Split = Literal["train", "eval"]


def main() -> int:
    """Do what the parent asks, and report to it."""
    frames = FrameSocket()
    request = frames.receive()
    if request is None:
        return 1  # The parent is gone.
    frames.listen(lambda _: None)

    def only_progress(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if event["event"] == READING:
            frames.send({"part": code.READING, "path": event["path"], "num_rows": event["num_rows"]})
        raise structlog.DropEvent

    structlog.configure(processors=[only_progress], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    settings = Settings.model_validate(request["settings"])
    open_all(settings, Path(request["folder"]), frames.send)
    return 0


def open_all(settings: Settings, folder: Path, tell: Tell) -> None:
    """Open everything that is the user's. ``folder``: an empty one for files of the episode."""
    tokenizer = _tokenizer(settings, tell) if (settings.model.path / "config.json").is_file() else None
    tell({"part": "begins", "what": f'environment "{settings.environment.name}"'})
    if not _tell_tasks(settings, tokenizer, tell):
        return
    tell({"part": "begins", "what": "an episode" if tokenizer and _may_play(settings) else "the user's code"})
    settings = settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"directory": folder}),
            "agent": settings.agent.model_copy(update={"port": 0, "workers": 1}),
        }
    )
    try:
        if tokenizer is not None and _may_play(settings):
            tell({"part": "episode", **asyncio.run(_play_one(settings))})
        else:
            asyncio.run(_open_code(settings))
            tell({"part": "code"})
    except (ConfigurationError, ServiceError, OSError, BaseExceptionGroup) as error:
        leaves = flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
        tell({"part": "code", "error": "\n".join(str(leaf) for leaf in leaves)})


def _tokenizer(settings: Settings, tell: Tell) -> ChatTokenizer | None:
    """Return the tokenizer; None where it, or its template, can render nothing."""
    tell({"part": "begins", "what": "the tokenizer"})
    model = settings.model
    try:
        loaded = ChatTokenizer(model.path, model.template_arguments, show_special_tokens=model.show_special_tokens)
    except TokenizerError as error:
        tell({"part": "tokenizer", "error": str(error)})
        return None
    stops = [str(loaded.token(token)) for token in sorted(loaded.stop_ids)]
    tell({"part": "tokenizer", "vocabulary": loaded.vocab_size, "stops": stops})
    facts = _template_facts(loaded)
    tell({"part": "template", "stops": stops, **facts})
    return None if "refuses" in facts else loaded


def _template_facts(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Whether the template does what training needs of it."""
    user = {"role": "user", "content": "Hello."}
    try:
        opens = tokenizer.render([user]) != tokenizer.render([user], add_generation_prompt=False)
    except TokenizerError as error:
        return {"refuses": str(error)}
    facts: dict[str, Any] = {"opens_answers": opens, "takes_system": _takes_system(tokenizer)}
    facts["reads_clock"] = tokenizer.template.reads_clock(tokenizer.template_arguments)
    try:
        said = {"role": "assistant", "content": SENTINEL}
        facts["keeps_answers"] = SENTINEL in tokenizer.render([user, said], add_generation_prompt=False)
        after = tokenizer.continuation([user], (), tokenizer.template_arguments, called_first=False)
        return {**facts, "ends_answers": tokenizer.stop_of_answer(after, tokenizer.encode(after.text)) is not None}
    except TokenizerError as error:
        return {"keeps_answers": True, **facts, "does_not_go_on": str(error)}


def _takes_system(tokenizer: ChatTokenizer) -> bool:
    try:
        return "Be brief." in tokenizer.render(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "."}]
        )
    except TokenizerError:
        return False


def _tell_tasks(settings: Settings, tokenizer: ChatTokenizer | None, tell: Tell) -> bool:
    """Whether there are tasks to train on."""
    name, options = settings.environment.name, settings.environment.options
    known: dict[Split, set[bytes]] = {}
    sets = settings.evaluation.sets
    has_own = settings.evaluation.every_batches and not sets
    splits: tuple[Split, ...] = ("train", "eval") if has_own else ("train",)
    for split in splits:
        try:
            with of_the_configuration(f'environment "{name}"'):
                create = create_task_set if settings.agent.is_used else create_environment
                task_set = create(name, options)
                source = task_set.tasks(split)
                tell({"part": "tasks", "split": split, "num_tasks": source.num_tasks, **_rows_facts(source)})
                if split == "train" and isinstance(source, LadderTasks):
                    tell({"part": "ladders", "ladders": msgspec.to_builtins(source.ladders)})
                if isinstance(task_set, ComparesAnswers) and not settings.agent.is_used:
                    tell({"part": "answers", "split": split, **_answers(task_set, source, options)})
                known[split] = _digests(source)
                if tokenizer is not None and not settings.agent.is_used:
                    tell({"part": "prompts", "split": split, **_prompts(settings, source, tokenizer)})
        except ConfigurationError as error:
            tell({"part": "tasks", "split": split, "error": str(error)})
            return False
    if len(known) == len(("train", "eval")):
        tell({"part": "overlap", "both": len(known["train"] & known["eval"]), "eval": len(known["eval"])})
    for set_name, terms in sets.items():
        try:
            opened = open_set(settings, set_name, terms)
            tell({"part": "set", "set": set_name, "num_tasks": len(opened.tasks), "metrics": list(opened.metrics)})
        except ConfigurationError as error:
            tell({"part": "set", "set": set_name, "error": str(error)})
    return True


def _rows_facts(source: TaskSource) -> dict[str, Any]:
    """How the rows of files are laid out, what became of their columns, and how many are rows again."""
    if not isinstance(source, MixedTasks):
        return {}
    names = [part.name for part in source.parts]
    columns = [
        {"source": name, "said": str(each), "suspicious": each.suspicious}
        for name, each in zip(names, source.columns, strict=False)
    ]
    return {"layouts": list(dict.fromkeys(source.layouts)), "num_repeated": source.num_repeated, "columns": columns}


def _answers(task_set: ComparesAnswers, source: TaskSource, options: Mapping[str, Any]) -> dict[str, Any]:
    read = forms_of(itertools.islice(task_set.golds(source), MOST_COMPARED))
    again = questions_said_again(source, options.get("kind", "symbolic"), MOST_SAID_AGAIN) if read.numbers else []
    return {**read._asdict(), "said_again": again, "asked": min(MOST_SAID_AGAIN, source.num_tasks or 0)}


def _digests(source: TaskSource) -> set[bytes]:
    number = min(MOST_COMPARED, source.num_tasks or 0)
    # Where a task comes from is not what it is.
    tasks = ({**source.task(index), "place": None} for index in range(number))
    texts = (json.dumps(task, sort_keys=True, default=str) for task in tasks)
    return {hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest() for text in texts}


def _prompts(settings: Settings, source: TaskSource, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The lengths of prompts, in tokens, and the text of the first."""
    environment = create_environment(settings.environment.name, settings.environment.options)
    number = MOST_RENDERED if source.num_tasks is None else source.num_tasks
    indices = sorted(
        {index * number // MOST_RENDERED for index in range(MOST_RENDERED)} if number > MOST_RENDERED else range(number)
    )
    lengths: list[tuple[int, int]] = []
    for index in indices:
        start = environment.start(source.task(index), settings.run.seed)
        lengths.append((len(tokenizer.prompt_ids(start.messages)), index))
    if not lengths:
        return {"measured": 0}
    first = tokenizer.render(environment.start(source.task(indices[0]), settings.run.seed).messages)
    ordered = sorted(lengths)
    return {
        "measured": len(ordered),
        "mean": sum(length for length, _ in ordered) / len(ordered),
        "longest": ordered[-1][0],
        "longest_task": ordered[-1][1],
        "too_long": sum(length >= settings.sampling.max_tokens for length, _ in ordered),
        "text": first[:MOST_TEXT],
    }


def _may_play(settings: Settings) -> bool:
    """An echo is graded where that reaches nobody: no judge is paid, no service is asked, no agent or model is started."""
    reward = settings.reward
    return not (settings.agent.is_used or reward.network or reward.model or settings.environment.options.get("reward_url"))


async def _open_code(settings: Settings) -> None:
    """Import the reward functions, or the agent, in the processes in which a rollout runs them."""
    metrics = RolloutMetrics(CollectorRegistry())
    async with (
        open_user_code(settings, "check", metrics, model="never") as player,
        open_comparing(settings, player, metrics),
    ):
        pass


async def _play_one(settings: Settings) -> dict[str, Any]:
    """Play task 0 with an echo, as ``gspo env try --echo`` does; twice, if its answers are compared."""
    settings = settings.model_copy(update={"batch": settings.batch.model_copy(update={"group_size": 2})})
    prompts = Prompts()
    tokenizer = WatchedTokenizer(settings, prompts)
    engine = TextEngine(tokenizer, prompts, echo)
    async with open_player(settings, tokenizer, prompts, engine, MonotonicClock()) as player:
        episode, *_ = await player.play(TaskPicker(settings, "train", 0, 1), _Nobody())
    return {
        "reward": episode.reward,
        "components": episode.components,
        "failure": episode.failure,
        "turns": len(episode.turns),
        "end": episode.end,
        "seconds": episode.seconds,
    }


class _Nobody:
    """Hears an episode and says nothing."""

    def begins(self, episode: PlayedEpisode) -> None: ...

    def ended(self, episode: PlayedEpisode) -> None: ...

    def compared(self, group: list[PlayedEpisode]) -> None: ...

    def asked(self, turn: PlayedTurn) -> None: ...

    def answered(self, turn: PlayedTurn) -> None: ...


if __name__ == "__main__":
    try:
        status = main()
    # Whatever the user's code raises.
    except Exception as error:  # noqa: BLE001
        sys.stderr.write("".join(f"{place}\n" for place in places_of(error)) + f"{type(error).__name__}: {error}\n")
        status = 1
    sys.stdout.flush()
    # Threads of the user's code must not keep the process.
    os._exit(status)
