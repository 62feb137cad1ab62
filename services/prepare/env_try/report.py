"""Episodes in the terminal: messages as they come, then the tokens with their use, the reward and the time.

Every line says in words what its colour says.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.style import Style
from rich.text import Text

from gspo_services.prepare.env_try.player import PlayedEpisode
from gspo_services.prepare.env_try.watcher import PlayedTurn
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.local_play import TokenRun, Use
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.plain_text import one_line

STYLES: Final[dict[Use, str]] = {"trained": "bold green", "context": "dim", "discarded": "red"}
ROLE: Final = "bold cyan"
FAILURE: Final = "bold red"
MOST_SHOWN: Final = 400
"""Characters of a run of tokens that is not trained."""
MOST_SAID: Final = 8000
"""Characters of a line of a message."""


class TerminalReport:
    """The ``Audience`` in a terminal or a file. What tasks, models and agents say is made printable."""

    def __init__(
        self,
        console: PlainConsole,
        tokenizer: ChatTokenizer,
        *,
        num_episodes: int,
        columns: Sequence[str] = (),
        compares: bool = False,
        with_tokens: bool,
        with_logprobs: bool,
    ) -> None:
        """``columns``: what became of those of each source of rows.
        ``compares``: the reward of an episode is what it is worth alone, and its group is compared later.
        ``with_tokens``: show each sampled token. ``with_logprobs``: they were drawn from a distribution."""
        self._console = console
        self._tokenizer = tokenizer
        self._num_episodes = num_episodes
        self._columns = columns
        self._compares = compares
        self._with_tokens = with_tokens
        self._with_logprobs = with_logprobs
        self._num_begun = 0

    def begins(self, episode: PlayedEpisode) -> None:
        """See ``Audience``."""
        self._num_begun += 1
        if self._num_begun > 1:
            self._say("")
        else:
            for columns in self._columns:
                self._field("columns", columns)
        title = (
            f"episode {self._num_begun} of {self._num_episodes}: {episode.split} task {episode.index}, seed {episode.seed}"
        )
        self._say(title, style="bold")
        self._field("task", json.dumps(episode.task, ensure_ascii=False))

    def asked(self, turn: PlayedTurn) -> None:
        """See ``TurnWatcher``."""
        prompt = turn.prompt
        if prompt is None:
            self._heading(f"turn {turn.number}: {len(turn.context)} tokens of context")
            return
        if prompt.is_new and turn.number:
            self._heading(f"turn {turn.number} begins another conversation")
        if prompt.tools and prompt.is_new:
            self._field("tools", ", ".join(_tool_name(tool) for tool in prompt.tools))
        for message in prompt.messages:
            self._message(message)

    def answered(self, turn: PlayedTurn) -> None:
        """See ``TurnWatcher``."""
        facts = [f"turn {turn.number}", _num(len(turn.token_ids), "token"), turn.end]
        if self._with_logprobs and turn.logprobs:
            facts.append(f"mean log-prob {_mean(turn.logprobs):.3f}")
        self._heading("assistant", f"({', '.join(facts)})")
        answer = turn.answer
        if answer.reasoning:
            self._lines(answer.reasoning, style="dim italic")
        if answer.content or not (answer.reasoning or answer.tool_calls):
            self._lines(answer.content or "(nothing)", style="" if answer.content else "dim")
        for call in answer.tool_calls:
            self._lines(f"calls {call.name}({call.arguments_json})")
        if answer.problem:
            self._lines(f"not taken as a tool call: {answer.problem}", style="yellow")

    def ended(self, episode: PlayedEpisode) -> None:
        """See ``Audience``."""
        for line in episode.printed:
            self._field("printed", line)
        self._mask(episode)
        if episode.reward is None:
            self._heading("failed", style=FAILURE)
            self._lines(episode.failure)
            for message in episode.refused:
                self._message(message)
        else:
            self._field("alone" if self._compares else "reward", _reward_text(episode), style="bold")
        user_s = max(0.0, episode.seconds - episode.model_s)
        self._field("time", f"{episode.seconds:.2f} s: {episode.model_s:.2f} in the model, {user_s:.2f} in your code")

    def compared(self, group: Sequence[PlayedEpisode]) -> None:
        """See ``Audience``."""
        self._say("")
        self._say(f"task {group[0].index}: reward.group compares its {len(group)} episodes", style="bold")
        for number, episode in enumerate(group, start=self._num_begun - len(group) + 1):
            if episode.reward is None:
                self._field("failed", f"episode {number}: {episode.failure}", style=FAILURE)
            else:
                self._field("reward", f"episode {number}: {_reward_text(episode)}; alone {episode.alone:.6g}", style="bold")

    def summary(self, episodes: Sequence[PlayedEpisode]) -> None:
        """The last line."""
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        parts = [f"{_num(len(episodes), 'episode')}: {len(rewards)} with a reward"]
        if rewards:
            parts.append(f"mean {_mean(rewards):.4g}, from {min(rewards):.4g} to {max(rewards):.4g}")
        if len(rewards) < len(episodes):
            parts.append(f"{len(episodes) - len(rewards)} failed")
        self._say("")
        self._say("; ".join(parts), style="bold" if len(rewards) == len(episodes) else FAILURE)

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _message(self, message: Mapping[str, Any]) -> None:
        named = message.get("name") or message.get("tool_call_id")
        self._heading(str(message.get("role", "message")), f"({named})" if named else "")
        if message.get("reasoning_content"):
            self._lines(str(message["reasoning_content"]), style="dim italic")
        content = message.get("content")
        if content is not None and content != "":
            self._lines(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            self._lines(f"calls {function['name']}({function['arguments']})")

    def _mask(self, episode: PlayedEpisode) -> None:
        mask = episode.mask
        counts = ", ".join(f"{mask.num_tokens(use)} {use}" for use in STYLES)
        self._field("tokens", f"{counts}; {_num(len(mask.sequences), 'sequence')}")
        if episode.remark:
            self._field("", episode.remark)
        for place, runs in enumerate(mask.sequences):
            if len(mask.sequences) > 1:
                self._say(f"  sequence {place}", style="bold")
            for run in runs:
                self._run(run)

    def _run(self, run: TokenRun) -> None:
        style, text = STYLES[run.use], self._tokenizer.decode(run.token_ids)
        most = MOST_SHOWN if run.use == "context" else MOST_SAID
        self._show(f"  {run.use:<10}", one_line(text, most), style)
        if not self._with_tokens or run.use == "context":
            return
        for token, logprob in zip(run.token_ids, run.logprobs, strict=True):
            shown = f"{logprob:>9.4f}  " if self._with_logprobs else ""
            self._show(f"    {token:>8}  {shown}", one_line(self._tokenizer.decode([token])), style)

    def _field(self, name: str, text: str, style: str = "") -> None:
        self._show(f"{name:<8}  ", one_line(text, MOST_SAID), style)

    def _heading(self, title: str, facts: str = "", style: str = ROLE) -> None:
        self._console.print(Text.assemble((one_line(title), style), (f" {one_line(facts)}" if facts else "", "dim")))

    def _lines(self, text: str, style: str = "") -> None:
        for line in text.split("\n"):
            self._show("    ", one_line(line, MOST_SAID), style)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(one_line(text), style=style), soft_wrap=True)

    def _show(self, before: str, text: str, style: str | Style = "") -> None:
        """``text`` after ``before``; on a terminal further lines are indented alike, and a file gets one line."""
        body = Text(text, style=style)
        if not self._console.is_terminal:
            self._console.print(Text.assemble(before, body), soft_wrap=True)
            return
        width = max(20, self._console.width - len(before))
        for place, line in enumerate(body.wrap(self._console, width, overflow="fold") if text else [body]):
            self._console.print(Text.assemble(" " * len(before) if place else before, line), soft_wrap=True)


def _reward_text(episode: PlayedEpisode) -> str:
    parts = [f"{episode.reward:.6g}"]
    if len(episode.turn_rewards) > 1:
        parts.append("by turn " + ", ".join(f"{reward:.4g}" for reward in episode.turn_rewards))
    if episode.components:
        parts.append("from " + ", ".join(f"{name} {value:.4g}" for name, value in episode.components.items()))
    if episode.end == "length":
        parts.append("ended by its length")
    return "; ".join(parts)


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", tool))


def _num(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
