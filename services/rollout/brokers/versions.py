"""Which version all brokers know: the only one that a rollout may move to.

A broker refuses tokens of a version that it has not heard of. Versions reach each broker by itself, so one that is away may
be behind the others.
"""

from typing import NamedTuple


class _Newest(NamedTuple):
    version: int
    endpoint: str
    order: int
    """Later news have a larger one."""


class AnnouncedVersions:
    """The newest version that each broker has announced."""

    def __init__(self, num_brokers: int) -> None:
        self._newest: list[_Newest | None] = [None] * num_brokers
        self._num_news = 0

    def announced(self, broker: int, version: int, endpoint: str) -> None:
        """``broker`` says that ``version`` is its newest, to be fetched at ``endpoint``."""
        former = self._newest[broker]
        if former is None or (former.version, former.endpoint) != (version, endpoint):
            self._num_news += 1
            self._newest[broker] = _Newest(version, endpoint, self._num_news)

    @property
    def common(self) -> tuple[int, str]:
        """The newest version that every broker heard of so far knows, whether it is there now or not, and where it is.

        Of brokers that name several places for it, the latest news count: the learner has moved.
        """
        heard = [each for each in self._newest if each is not None]
        if not heard:
            return 0, ""
        least = min(heard, key=lambda each: (each.version, -each.order))
        return least.version, least.endpoint

    def may_have(self, broker: int, version: int) -> bool:
        """Whether ``broker`` takes tokens of ``version``.

        Not so where this process began while the broker was away, and took a version from the others. A broker alone always
        does: whatever is served here, it has announced.
        """
        newest = self._newest[broker]
        return len(self._newest) == 1 or (newest is not None and newest.version >= version)
