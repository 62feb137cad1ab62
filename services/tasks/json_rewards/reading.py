"""The reward in a body of JSON, from a program's file or a service's answer."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from gspo_services.tasks.worker.reward_value import value_of

MAX_ANSWER_BYTES: Final = 64 * 1024

UnreadableReason = Literal["too_large", "not_finite", "no_result"]


class UnreadableError(ValueError):
    """There is no reward in a body."""

    def __init__(self, reason: UnreadableReason, text: str) -> None:
        super().__init__(text)
        self.reason: UnreadableReason = reason


def reward_in(body: bytes, what: str) -> float | dict[str, float]:
    """The reward in ``body``, or its components, still to be weighted.

    Raises: UnreadableError, as ``json_in``; UnscoredError when it is not a reward.
    """
    return value_of(json_in(body, what))


def json_in(body: bytes, what: str) -> Any:
    """The value in ``body``, or the one of {"reward": ...}.

    Raises: UnreadableError, which names ``what`` the body is, when it is too large or not JSON.
    """
    if len(body) > MAX_ANSWER_BYTES:
        raise UnreadableError("too_large", f"{what} has more than {MAX_ANSWER_BYTES} bytes")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # JSON has no NaN, so Python's own encoder says it in a way that is not JSON.
        reason: UnreadableReason = "not_finite" if body.strip() in (b"NaN", b"Infinity", b"-Infinity") else "no_result"
        raise UnreadableError(reason, f"{what} is not JSON: {error}: {body[:100]!r}") from error
    if isinstance(value, dict) and list(value) == ["reward"]:
        value = value["reward"]
    return value
