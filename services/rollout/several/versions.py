"""Which version all brokers know: the only one that a rollout may move to.

A broker refuses tokens of a version that it has not heard of. Versions reach each broker by itself, so one that is away may
be behind the others. And a broker that has a newer version need not know those before it: where a learner came back and made
another one in a version's place, only some brokers have heard of the first.
"""

from typing import Final, NamedTuple

KEPT: Final = 256
"""Versions of one broker that are remembered: the newest. With older ones nobody gets a lease."""


class _News(NamedTuple):
    endpoint: str
    order: int
    """Later news have a larger one."""


class AnnouncedVersions:
    """The ``KnownVersions`` of several brokers."""

    def __init__(self, num_brokers: int) -> None:
        self._announced: list[dict[int, _News]] = [{} for _ in range(num_brokers)]
        self._num_news = 0

    def announced(self, broker: int, version: int, endpoint: str) -> None:
        """``broker`` says that ``version`` is its newest, to be fetched at ``endpoint``."""
        of_broker = self._announced[broker]
        for later in [each for each in of_broker if each > version]:
            del of_broker[later]  # It has gone back, to what is left after a loss.
        former = of_broker.get(version)
        if former is None or former.endpoint != endpoint:
            self._num_news += 1
            of_broker[version] = _News(endpoint, self._num_news)
        if len(of_broker) > KEPT:
            del of_broker[min(of_broker)]

    @property
    def common(self) -> tuple[int, str]:
        """The newest version that every broker heard of so far has announced, whether it is there now or not, and where it
        is; 0: there is none.

        Of brokers that name several places for it, the latest news count: the learner has moved.
        """
        heard = [each for each in self._announced if each]
        if not heard:
            return 0, ""
        everywhere = frozenset.intersection(*map(frozenset, heard))
        version = max(everywhere, default=0)
        news = [each[version] for each in heard if version in each]
        return version, max(news, key=lambda each: each.order).endpoint if news else ""

    @property
    def waits(self) -> str:
        """Why there is no version to move to, although some were announced; empty: there is one, or none was."""
        newest = {broker: max(each) for broker, each in enumerate(self._announced) if each}
        if self.common[0] or not any(newest.values()):
            return ""
        return "no version that all brokers know yet: " + ", ".join(
            f"broker {broker} has {version or 'none'}" for broker, version in newest.items()
        )

    def may_have(self, broker: int, version: int) -> bool:
        """Whether ``broker`` takes tokens of ``version``.

        Not so where this process began while the broker was away, and took a version from the others.
        """
        return version in self._announced[broker]
