"""Decides whether the versions that a chunk names fit its tokens, and counts its action tokens, without the tokens."""

from dataclasses import dataclass

from protocol.messages import Chunk


@dataclass(frozen=True, kw_only=True)
class ActionTokens:
    """Summary of the action tokens of one chunk; the versions are 0 when it has none."""

    num: int
    version_sum: int
    oldest: int
    last: int
    """Version of the last one: the engine serves at least this."""
    num_turns: int
    """Highest action turn + 1."""


def action_tokens(chunk: Chunk, newest_version: int) -> ActionTokens:
    """Walk ``segments`` and ``version_runs`` side by side.

    Raises: ValueError when an action token has no version, an observation token has one, or a version was never published.
    """
    runs = iter(chunk.version_runs)
    version = 0
    left_in_run = num = version_sum = oldest = last = num_turns = 0
    for segment in chunk.segments:
        left_in_segment = segment.num_tokens
        if segment.kind == "action":
            num_turns = max(num_turns, segment.turn + 1)
        while left_in_segment:
            if not left_in_run:
                run = next(runs)
                version, left_in_run = run.version, run.num_tokens
            step = min(left_in_segment, left_in_run)
            left_in_segment -= step
            left_in_run -= step
            if segment.kind == "observation":
                if version != -1:
                    raise ValueError(f"version_runs give version {version} to observation tokens: it must be -1")
                continue
            if not 1 <= version <= newest_version:
                raise ValueError(
                    f"version_runs give version {version} to action tokens: published are 1 to {newest_version}"
                )
            num += step
            version_sum += step * version
            oldest = min(oldest, version) if oldest else version
            last = version
    return ActionTokens(num=num, version_sum=version_sum, oldest=oldest, last=last, num_turns=num_turns)
