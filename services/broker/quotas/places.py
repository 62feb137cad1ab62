"""Decides how many sessions of each role there may be, and which one goes when there is no place left.

Learners and operators have places of their own: no number of rollouts keeps them out. A key has a part of its role's places.
When that part is full, its session that was silent for longest makes room. Another key's session only goes when all places
are taken and that key has more of them. Without keys all peers count as one key, which may have all places of the role.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from gspo_protocol.limits import MAX_OPERATORS, MAX_OPERATORS_PER_KEY, MAX_PEERS, MAX_ROLLOUTS_PER_KEY
from gspo_protocol.messages import Role

RETRY_S: Final = 5.0


class NoPlace(ValueError):
    """All places are taken by peers that live; the text goes to the peer, which may try again after RETRY_S."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of one role. A session that was heard within ``silent_s`` keeps its place."""

    total: int
    per_key: int
    silent_s: float


PLACES: Final[Mapping[Role, Places]] = {
    "rollout": Places(total=MAX_PEERS - MAX_OPERATORS - 1, per_key=MAX_ROLLOUTS_PER_KEY, silent_s=10.0),
    # An operator loses nothing with its session: it says Hello again, and gets in again.
    "operator": Places(total=MAX_OPERATORS, per_key=MAX_OPERATORS_PER_KEY, silent_s=0.0),
}
"""There is one learner at a time, whose place nobody else can have."""


class Occupant(Protocol):
    """A session, as far as it matters here."""

    @property
    def owner_key(self) -> bytes: ...

    @property
    def last_seen(self) -> float: ...


Seat = TypeVar("Seat", bound=Occupant)


def makes_room(holders: Iterable[Seat], taken: Counter[bytes], places: Places, owner: bytes, now: float) -> Seat | None:
    """The session that must go before one of ``owner`` is opened; None: there is room.

    ``holders`` are the sessions of the role, ``taken`` counts them by key. Raises: NoPlace.
    """
    if taken.total() >= places.total:
        most = max(taken, key=taken.__getitem__)
        loser = most if taken[most] > taken[owner] + 1 else owner
    elif owner and taken[owner] >= places.per_key:
        loser = owner
    else:
        return None
    oldest = min((each for each in holders if each.owner_key == loser), key=lambda each: each.last_seen, default=None)
    if oldest is None or now - oldest.last_seen < places.silent_s:
        raise NoPlace(
            f"{taken.total()} sessions are open ({places.total} allowed), {taken[owner]} of them with this key "
            f"({places.per_key} allowed), and none of them is silent: this one waits for a place"
        )
    return oldest
