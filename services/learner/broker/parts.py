"""Tracks which parts of a batch have come, and how many more to ask for. Pure: no sockets, no clock."""

from typing import Final

from gspo_protocol.codec import Array
from gspo_protocol.digests import part_digest
from gspo_protocol.messages import Batch, BatchPart, BatchPartRequest

CREDIT: Final = 3
"""Parts asked for and not yet taken by the training thread; bounds the memory of waiting parts."""
MOST_DAMAGED: Final = 8
"""Copies of one part in a row that may be damaged."""


class DamagedPart(ValueError):
    """A part arrived damaged again and again. The text says what is wrong with it."""


class PartStream:
    """The parts of one batch, taken in order. Out-of-order, duplicate or damaged parts are ignored or asked for again.

    produces:     requests for parts
    waits for:    the part that is next
    unblocked by: ``took``, which makes room for one more; ``ask_again`` after a reconnection or silence
    """

    def __init__(self, batch: Batch) -> None:
        self.index = batch.index
        self._num_tokens = batch.num_tokens
        self._part_tokens = batch.part_tokens
        self._num_parts = batch.num_parts
        self._next = 0
        self._num_taken = 0
        self._asked = 1
        """All parts before this one were asked for; the first comes unasked."""
        self._num_damaged = 0

    @property
    def next_part(self) -> int:
        """The next part expected."""
        return self._next

    @property
    def complete(self) -> bool:
        return self._next == self._num_parts

    def offer(self, part: BatchPart, arrays: dict[str, Array]) -> bool:
        """True: it is the next part, and intact. False: a duplicate, behind a gap, over the credit, of another batch, or
        damaged.

        Raises: DamagedPart after MOST_DAMAGED damaged copies in a row.
        """
        if part.index != self.index or part.part != self._next or self._next >= self._room:
            return False
        problem = self._problem(part, arrays)
        if problem:
            self._num_damaged += 1
            if self._num_damaged == MOST_DAMAGED:
                raise DamagedPart(
                    f"part {part.part} of batch {part.index} arrived damaged {MOST_DAMAGED} times in a row: "
                    f"{problem}; check the network, and the memory of both machines"
                )
            self.ask_again()
            return False
        self._num_damaged = 0
        self._next += 1
        return True

    def took(self) -> None:
        """Make room for another part: the training thread has taken one."""
        self._num_taken += 1

    def ask_again(self) -> None:
        """Ask again for parts that have not come: they may be lost."""
        self._asked = self._next

    def request(self) -> BatchPartRequest | None:
        """Return a request for further parts that fit; None: there is nothing to ask for."""
        first = max(self._asked, self._next)
        count = min(self._room, self._num_parts) - first
        if count <= 0:
            return None
        self._asked = first + count
        return BatchPartRequest(index=self.index, part=first, count=count)

    @property
    def _room(self) -> int:
        return self._num_taken + CREDIT

    def _problem(self, part: BatchPart, arrays: dict[str, Array]) -> str:
        """Say what is wrong with the next part; empty if it is intact."""
        expected = min(self._part_tokens, self._num_tokens - self._next * self._part_tokens)
        if len(arrays["token_ids"]) != expected:
            return f"it has {len(arrays['token_ids'])} tokens, and {expected} were announced"
        digest = part_digest(part.index, part.part, arrays)
        return "" if digest == part.digest else f"its digest is {digest}, and it should be {part.digest}"
