"""The episode that an agent's own code gets: its task, the address of the policy, and side effects that happen once.

    async def solve(episode: Episode) -> float:
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        ...
        rows = await episode.step("search", search, query)
        ...
        return 1.0

Standard library only, for Python 3.10 or later: a worker loads this file by its path, so an agent may use a Python that has
neither this package nor what it needs.
"""

import inspect
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo.tasks.computer import RUN, WRITE, CommandResult, Computer, ComputerError, ComputerPort
from gspo.tasks.step_order import EpisodeRecord, StepOrder, arguments_digest

__all__ = [
    "MAX_STEP_BYTES",
    "MAX_STEP_DEPTH",
    "CommandResult",
    "Computer",
    "ComputerError",
    "Episode",
    "EpisodeRecord",
    "Role",
    "arguments_digest",
    "require_plain_result",
]

MAX_STEP_DEPTH = 32
"""Levels of lists and maps in the result of a step."""
MAX_STEP_BYTES = 128 * 1024
"""The result of a step, as JSON: with any content it fits an entry of the journal."""


class Role(NamedTuple):
    """The policy in one of its roles."""

    name: str
    base_url: str
    api_key: str
    model: str


class Episode:
    """One episode of an agent; the agent's function returns its reward, or a map of named components of the reward.

    The list "turns" in such a map has a reward for each answer of the policy, in the order of the calls; what else the map
    has comes with the last one.
    """

    def __init__(
        self,
        *,
        task: dict[str, Any],
        seed: int,
        base_url: str,
        api_key: str,
        model: str,
        roles: Sequence[str] = (),
        ends_at: float,
        recorded: Sequence[tuple[str, str, Any]],
        record: EpisodeRecord,
        computer: ComputerPort | None = None,
    ) -> None:
        self.task = task
        """The task, plain data."""
        self.seed = seed
        """All randomness of the agent should follow from it."""
        self.base_url = base_url
        """The policy, as a server of OpenAI or Anthropic; its tokens are recorded under ``api_key``."""
        self.api_key = api_key
        self.model = model
        self.roles = tuple(roles)
        """``agent.roles``: what the policy may play here; empty for one role."""
        self._ends_at = ends_at
        self._steps = StepOrder(recorded, record)
        self._computer = None if computer is None else Computer(self._steps, computer)

    def role(self, name: str) -> "Role":
        """The policy as the role ``name``, one of ``agent.roles``: each has conversations and a reward of its own.

        The function's reward is then a map with one number for each role that has played, or one number for all of them.
        """
        return Role(name, self.base_url, f"{self.api_key}.{name}", self.model)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; then an async agent is cancelled, and a sync one fails at its next step."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def is_replay(self) -> bool:
        """Whether the next step returns a recorded result. It is False for good once all recorded steps were returned."""
        return self._steps.is_replay

    @property
    def computer(self) -> Computer:
        """Its working directory and commands in a sandbox. Raises: RuntimeError where the configuration gives none."""
        if self._computer is None:
            raise RuntimeError("agent.computer is false: set it to true, and each episode has a computer")
        return self._computer

    async def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)``, sync or async, once: it has a side effect that must not be repeated.

        When the same episode is replayed, on this machine or another, the recorded result comes back and nothing is called.
        A step is known by its place, its name and ``args``: what the function does must follow from these. Where one of them
        differs from the record, the agent has gone another way, and this step and all later ones are done again.
        A function that raises is not recorded: let it return what went wrong as data if a replay must not repeat it.
        Steps of an episode come one after another; do work in parallel inside of one step.

        Raises: what the function raises; TypeError when its result is not plain data; ValueError when it is too large;
        RuntimeError when another step is under way.
        """
        arguments = arguments_digest(args)
        if self._replays(name, arguments):
            return self._steps.replayed()
        with self._steps.under_way(name):
            value = function(*args)
            if inspect.isawaitable(value):
                value = await value
            result = self._finished(name, value)
            await self._steps.record.record(name, arguments, self._steps.taken(), result)
            return result

    def step_now(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """``step`` for an agent that is a plain ``def``: ``function`` is sync, and nothing has to be awaited."""
        arguments = arguments_digest(args)
        if self._replays(name, arguments):
            return self._steps.replayed()
        with self._steps.under_way(name):
            value = function(*args)
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError(f'step "{name}" is a coroutine: make the agent "async def" and await episode.step(...)')
            result = self._finished(name, value)
            self._steps.record.record_now(name, arguments, self._steps.taken(), result)
            return result

    def _replays(self, name: str, arguments: str) -> bool:
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise TypeError(f"the name of a step is {name!r}: expected 1 to 200 characters of text")
        if name in (RUN, WRITE):
            raise ValueError(f'a step cannot be called "{name}": that is a step of the episode\'s computer')
        return self._steps.replays(name, arguments)

    def _finished(self, name: str, value: Any) -> Any:
        """The result as a replay will return it."""
        require_plain_result(f'the result of step "{name}"', value)
        text = json.dumps(value, allow_nan=False)
        if len(text) > MAX_STEP_BYTES:
            raise ValueError(
                f'the result of step "{name}" has {len(text)} bytes, {MAX_STEP_BYTES} allowed: keep it in a file'
            )
        return json.loads(text)


def require_plain_result(what: str, value: Any) -> None:
    """Raises: TypeError when ``value`` holds anything but None, bool, finite numbers, text, lists and maps of text keys."""
    level = [value]
    for _ in range(MAX_STEP_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node
                below += node.values()
                if not all(isinstance(key, str) for key in node):
                    raise TypeError(f"{what} holds a key that is not text")
            elif isinstance(node, list):
                below += node
            else:
                _require_plain_leaf(what, node)
        if not below:
            return
        level = below
    raise TypeError(f"{what} is nested more than {MAX_STEP_DEPTH} levels deep")


def _require_plain_leaf(what: str, leaf: Any) -> None:
    if isinstance(leaf, float):
        if not math.isfinite(leaf):
            raise TypeError(f"{what} holds {leaf!r}, which JSON cannot represent")
    elif isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**64:
            raise TypeError(f"{what} holds a number of more than 64 bits: make it text")
    elif isinstance(leaf, str):
        if not leaf.isascii() and leaf.encode("utf-8", "replace").decode() != leaf:
            raise TypeError(f"{what} holds a text that is not valid Unicode: {leaf[:40]!r}")
    elif leaf is not None:
        raise TypeError(f"{what} holds a {type(leaf).__name__}: expected None, bool, number, text, list or dict")
