"""Gives a worker one module after the other, or modules that belong together."""

from xdist.scheduler import LoadGroupScheduling


class ByModule(LoadGroupScheduling):
    """xdist's scheduler of groups. What is in none of them is given out by module instead of by test."""

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]
