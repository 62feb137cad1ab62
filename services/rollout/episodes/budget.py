"""Limits what an episode's calls may use, so that the broker accepts all of it. Pure."""

from typing import Final

from gspo_protocol.limits import MAX_SEQUENCES, RUNS_PER_TURN, SEGMENTS_PER_TURN, TrajectoryLimits
from gspo_protocol.messages import GroupSampling
from gspo_services.rollout.endpoint import CallRefused
from gspo_services.rollout.episodes.log import EpisodeLog

RUNS_PER_PART: Final = 2
"""Version runs of a part of an answer, during which the engine's version may change."""


class Budget:
    """The rest of an episode's limits, less the promises to running calls."""

    def __init__(self, log: EpisodeLog, sampling: GroupSampling, limits: TrajectoryLimits) -> None:
        self._log = log
        self._sampling = sampling
        self._limits = limits
        self._promised: dict[int, int] = {}
        self._no_turn_yet: set[int] = set()

    def promise(self, ordinal: int, num_tokens: int, *, has_begun: bool) -> None:
        """Call ``ordinal`` may still append so many tokens; ``has_begun``: its turn, with a first one."""
        self._promised[ordinal] = num_tokens
        if has_begun:
            self._no_turn_yet.discard(ordinal)
        else:
            self._no_turn_yet.add(ordinal)

    def release(self, ordinal: int) -> None:
        """The call has ended."""
        self._promised.pop(ordinal, None)
        self._no_turn_yet.discard(ordinal)

    def may_send_part(self) -> bool:
        """Return whether an answer may enter the log before its end. Parts of concurrent answers alternate there, and the
        broker counts each change; enough must be left for the end of every call.
        """
        running = len(self._promised)
        segments, runs = self._log.num_segments + 1 + running, self._log.num_runs + RUNS_PER_PART * (1 + running)
        return running < 2 or (segments <= self._limits.segments and runs <= self._limits.runs)

    def require_call(self) -> None:
        """Raises: CallRefused when the episode can have no further call."""
        running = len(self._promised)
        for what, found, allowed in (
            ("calls", self._log.num_turns + len(self._no_turn_yet) + 1, self._limits.turns),
            ("changes between calls", self._log.num_segments + running + SEGMENTS_PER_TURN, self._limits.segments),
            ("changes of version", self._log.num_runs + RUNS_PER_PART * running + RUNS_PER_TURN, self._limits.runs),
        ):
            if found > allowed:
                text = f"this episode would have {found} {what}, {allowed} are allowed in a batch of this size: end it here"
                raise CallRefused(400, "too_many_calls", text)

    def require_new_sequence(self) -> None:
        """Raises: CallRefused when no further sequence can begin."""
        if len(self._log.sequences) >= MAX_SEQUENCES:
            text = (
                f"this episode has {MAX_SEQUENCES} contexts, the most allowed, and this call needs a new one: repeat an "
                "earlier conversation unchanged, including its last answer, and append to it"
            )
            raise CallRefused(400, "too_many_contexts", text)

    def room(self, num_before: int, num_observed: int, asked: int | None) -> int:
        """Return how many tokens a call may sample after ``num_observed`` new ones in a sequence of ``num_before``.

        Raises: CallRefused when there is no room for any.
        """
        prompt, most = num_before + num_observed, self._sampling.max_tokens
        if prompt >= most:
            raise CallRefused(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {most} tokens (sampling.max_tokens), your messages have {prompt}: "
                "send fewer or shorter messages",
                param="messages",
            )
        taken = self._log.num_tokens + sum(self._promised.values())
        left = self._sampling.max_episode_tokens - taken - num_observed
        if left < 1:
            raise CallRefused(
                400,
                "context_length_exceeded",
                f"this episode's calls may have {self._sampling.max_episode_tokens} tokens in total "
                f"(sampling.max_episode_tokens), {taken} are used and this call adds {num_observed}: end the episode here",
                param="messages",
            )
        room = min(self._sampling.max_turn_tokens, most - prompt, left)
        return room if asked is None else min(room, asked)
