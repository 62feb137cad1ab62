"""The door of scores: whatever makes one, a score comes out, or the reason why there is none.

Scores are made in five places: by a function in a worker, by a service, by running programs, by an agent, and by the step of
an environment. Each goes through ``through_the_door``, with all its arithmetic inside.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

from gspo_protocol.messages.base import require_components, require_rewards
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.tasks.worker.failures import described, is_a
from gspo_services.tasks.worker.reward_value import (
    UnscoredError,
    UnscoredReason,
    number_of,
    require_count,
    value_of,
)

T = TypeVar("T")
DoorReason = Literal[UnscoredReason, "raised", "memory"]
"""Why no score comes through the door."""
_OF_THE_PROCESS: Final = (ConfigurationError, ServiceError)
"""They say that no score can be made in this process, not that this one cannot."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class Score(NamedTuple):
    """A reward and what it is made of."""

    reward: float
    components: dict[str, float]
    """By name, without their weights; empty for a reward that came as one number."""


async def through_the_door(
    making: Awaitable[T], refused: Callable[[DoorReason, str], T], passes: tuple[type[BaseException], ...] = ()
) -> T:
    """What ``making`` comes to, or what ``refused`` makes of the reason and the detail why it came to nothing.

    Nothing else comes out, whatever ``making`` raises, except an end of this task that somebody else has asked for, errors
    that concern the whole process, a full disk among them, and ``passes``.
    """
    let_out: tuple[type[BaseException], ...] = (GeneratorExit, *_OF_THE_PROCESS, *passes)
    try:
        return await making
    except let_out:
        raise
    except BaseException as error:
        if is_a(error, asyncio.CancelledError) and _is_asked_to_end():
            raise
        if type(error) is OSError and error.errno in _NO_ROOM:
            raise
        return refused(*reason_of(error))


def reason_of(error: BaseException) -> tuple[DoorReason, str]:
    """Why there is no score: the reason to count, and the detail for people, in valid Unicode and of bounded length."""
    if type(error) is UnscoredError:
        return error.reason, str(error)
    return "memory" if is_a(error, MemoryError) else "raised", described(error)


def score_of(value: Any, weights: Mapping[str, float] | None) -> Score:
    """The weighted sum of components, or the number itself, of whatever was given for a reward.

    Without ``weights`` each component counts once. With them each weighted component must be there, and one without a weight
    is reported and does not count. Raises: UnscoredError, also when the sum is not finite; MemoryError.
    """
    read = value_of(value)
    if not isinstance(read, dict):
        if weights:
            raise UnscoredError("missing_component", f"the reward is one number; components with weights: {_named(weights)}")
        return Score(read, {})
    # Weights come from users, too: a Decimal does not multiply with a float.
    counted = dict.fromkeys(read, 1.0) if weights is None else {name: _weight(name, weights[name]) for name in weights}
    missing = [name for name in counted if name not in read]
    if missing:
        raise UnscoredError("missing_component", f"the reward lacks {_named(missing)}; it has {_named(read)}")
    reward = sum_of(weight * read[name] for name, weight in counted.items())
    if not math.isfinite(reward):
        raise UnscoredError(
            "not_finite", f"the weighted sum of the reward's components is {reward}: give smaller components or weights"
        )
    return Score(reward, read)


def sum_of(numbers: Iterable[float]) -> float:
    """The exact sum, or NaN where it is too large on the way, or has infinities of both signs."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan


def require_takeable(turn_rewards: Sequence[float], components: Mapping[str, float]) -> None:
    """Raises: UnscoredError when the broker would refuse these of all turns together: too large, or too many."""
    require_count(len(components))
    try:
        require_rewards("turn_rewards", turn_rewards)
        require_components("components", components)
    except ValueError as error:
        raise UnscoredError("not_finite", str(error)) from error


def _weight(name: str, weight: object) -> float:
    return number_of(weight, f'the weight of component "{name}"')


def _named(names: Mapping[str, float] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _is_asked_to_end() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
