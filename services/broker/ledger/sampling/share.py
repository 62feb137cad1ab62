"""Which ids, prompts and tasks belong to a broker, where several share a run.

Of N brokers, broker K has the ids, prompts and tasks whose remainder by N is K. So an id says whose it is, no two brokers
ever give the same one, and a task is always sampled, judged and left to rest by one broker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of broker ``broker`` of ``num_brokers``."""

    broker: int = 0
    num_brokers: int = 1

    def first_from(self, number: int) -> int:
        """The first one of this share that is not below ``number``."""
        return number + (self.broker - number) % self.num_brokers

    def of(self, tasks: Sequence[int]) -> Sequence[int]:
        """Those of ``tasks``, which follow one another, that are in this share."""
        if not tasks:
            return tasks
        return range(self.first_from(tasks[0]), tasks[-1] + 1, self.num_brokers)


WHOLE: Final = Share()
"""Of the only broker."""
