"""Assigns ids, prompts and tasks to the brokers that share a run.

Of N brokers, broker K has the ids, prompts and tasks whose remainder by N is K. So an id shows its broker, no two brokers
ever use the same one, and one broker samples, judges and rests each task.
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
"""The share of an only broker."""
