"""The ranges of a version that engines without ranks publish: all of what they serve."""

from collections.abc import Callable, Iterable, Iterator

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.weights import VersionRange, copy_parameters, in_order


class ServedRanges:
    """What ``served`` yields, one after the other; nothing where it ``has_none`` of it."""

    def __init__(self, served: Callable[[], Iterable[ServedParameter]], *, has_none: bool = False) -> None:
        self._served = served
        self._has_none = has_none
        self.layout = copy_parameters(served()).layout

    def of_now(self) -> Iterator[VersionRange]:
        begin = 0
        for parameter in self._served():
            for each in in_order(parameter):
                if not self._has_none:
                    yield VersionRange(begin, each.values)
                begin += each.values.nbytes
