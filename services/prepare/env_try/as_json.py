"""Episodes for machines: one JSON object in a line for each."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gspo_services.prepare.env_try.player import PlayedEpisode
from gspo_services.prepare.env_try.watcher import PlayedTurn
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.local_play import TokenRun


class JsonReport:
    """The ``Audience`` that writes each episode when its reward is known."""

    def __init__(
        self, output: TextIO, tokenizer: ChatTokenizer, played_of_each: int = 1, columns: Sequence[str] = ()
    ) -> None:
        """``played_of_each``: the episodes of a task; several are compared at their end. ``columns``: what became of those
        of each source of rows."""
        self._columns = columns
        self._played_of_each = played_of_each
        self._output = output
        self._tokenizer = tokenizer

    def begins(self, episode: PlayedEpisode) -> None:
        """See ``Audience``."""

    def asked(self, turn: PlayedTurn) -> None:
        """See ``TurnWatcher``."""

    def answered(self, turn: PlayedTurn) -> None:
        """See ``TurnWatcher``."""

    def ended(self, episode: PlayedEpisode) -> None:
        """See ``Audience``."""
        if self._played_of_each == 1:
            self._write(episode)

    def compared(self, group: Sequence[PlayedEpisode]) -> None:
        """See ``Audience``."""
        for episode in group:
            self._write(episode)

    def _write(self, episode: PlayedEpisode) -> None:
        # Escaped, so that nothing that a model says acts on a terminal.
        self._output.write(json.dumps({**plain(episode, self._tokenizer), "columns": self._columns}, default=str) + "\n")
        self._output.flush()

    def summary(self, episodes: Sequence[PlayedEpisode]) -> None:
        """Nothing: whoever reads the lines counts them."""


def plain(episode: PlayedEpisode, tokenizer: ChatTokenizer) -> Mapping[str, Any]:
    """The episode as plain data."""
    return {
        "split": episode.split,
        "index": episode.index,
        "seed": episode.seed,
        "task": episode.task,
        "end": episode.end,
        "reward": episode.reward,
        "reward_alone": episode.alone,
        "turn_rewards": episode.turn_rewards,
        "components": episode.components,
        "failure": episode.failure or None,
        "refused_messages": episode.refused,
        "remark": episode.remark or None,
        "turns": [_turn(turn) for turn in episode.turns],
        "sequences": [[_run(run, tokenizer) for run in runs] for runs in episode.mask.sequences],
        "num_tokens": {use: episode.mask.num_tokens(use) for use in ("trained", "context", "discarded")},
        "printed": episode.printed,
        "seconds": round(episode.seconds, 4),
        "model_seconds": round(episode.model_s, 4),
    }


def _turn(turn: PlayedTurn) -> Mapping[str, Any]:
    prompt, answer = turn.prompt, turn.answer
    return {
        "messages": [] if prompt is None else prompt.messages,
        "tools": [] if prompt is None else list(prompt.tools),
        "begins_conversation": prompt is not None and prompt.is_new,
        "content": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": [{"name": call.name, "arguments": call.arguments_json} for call in answer.tool_calls],
        "end": turn.end,
        "seconds": round(turn.seconds, 4),
    }


def _run(run: TokenRun, tokenizer: ChatTokenizer) -> Mapping[str, Any]:
    return {
        "use": run.use,
        "turn": run.turn,
        "text": tokenizer.decode(run.token_ids),
        "token_ids": run.token_ids,
        "logprobs": None if run.use == "context" else run.logprobs,
    }
