"""A reward that comes as JSON, from a program's file or a service's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from services.user_code.results import AgentFailure, AgentResult, failed, scored

MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_COMPONENTS: Final = 64


def answered(body: bytes, what: str, weights: Mapping[str, float] | None) -> AgentResult:
    """The result in ``body``: a number, a map of components, or either of them as {"reward": ...}."""
    if len(body) > MAX_ANSWER_BYTES:
        return failed("too_large", f"{what} has more than {MAX_ANSWER_BYTES} bytes")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # JSON has no NaN, so Python's own encoder says it in a way that is not JSON.
        reason: AgentFailure = "not_finite" if body.strip() in (b"NaN", b"Infinity", b"-Infinity") else "no_result"
        return failed(reason, f"{what} is not JSON: {error}: {body[:100]!r}")
    if isinstance(value, dict) and list(value) == ["reward"]:
        value = value["reward"]
    if isinstance(value, dict) and len(value) > MAX_COMPONENTS:
        return failed("too_large", f"{what} has {len(value)} components, {MAX_COMPONENTS} allowed")
    return scored(value, weights)
