"""When a rollout takes a device that the learner uses, too, and when it gives it back.

It keeps the device while it has leases, and until the broker has answered that the window of its version is spent. While
its engine serves nothing it gives the device back at once: the next version may need the learner, which may need the device.
``services/shared/colocate.py`` says why nobody waits for ever.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from gspo_services.rollout.weights import WeightSync

LOOK_S: Final = 0.2
"""Time between two looks at whether to take the device or give it back."""


class TimeSharing:
    """Takes the device for the rollout, and gives it back.

    produces:     spans in which the engine has the device
    waits for:    leases; the broker's word that it has none; the device
    unblocked by: Lease; NoLease; the learner gives the device back
    """

    def __init__(self, sync: WeightSync, *, look_s: float = LOOK_S) -> None:
        self._sync = sync
        self._look_s = look_s
        self._asked = 0
        self._spent = 0
        """The version for which the broker had nothing more."""

    def asked(self, policy_version: int, num_running: int) -> None:
        """The rollout asks for leases, as a server of this version. Only without any in hand does a refusal end its hold:
        what they lead to may make room for more."""
        self._asked = 0 if num_running else policy_version

    def refused(self) -> None:
        """The broker has no lease for it now."""
        self._spent = self._asked

    def leased(self) -> None:
        """A lease has come. That the same answer had no more of them does not end its hold either."""
        self._asked = self._spent = 0

    def may_end(self, num_running: int) -> bool:
        """Return whether the engine has no use for the device now."""
        if self._sync.loading:
            return False
        if not self._sync.may_generate.is_set():
            return True
        return not num_running and self._spent == self._sync.policy_version

    @property
    def waits(self) -> bool:
        """Whether episodes cannot go on because the device is the learner's."""
        return not self._sync.has_device

    async def run(self, num_running: Callable[[], int]) -> None:
        """Share the device until cancelled; ``num_running`` counts the leases in hand. Raises: ServiceError."""
        while True:
            await asyncio.sleep(self._look_s)
            if not self._sync.has_device:
                if num_running():
                    await self._sync.bring_back()
            elif self.may_end(num_running()):
                await self._sync.give_up(lambda: self.may_end(num_running()))
