"""Gives a worker one module after the other, or modules that belong together."""

from xdist.scheduler import LoadFileScheduling

from tests.support.workers.groups import group_of


class ByGroup(LoadFileScheduling):
    """xdist's scheduler of files, for which modules that share a fixture of the session are one file."""

    def _split_scope(self, nodeid: str) -> str:
        module = super()._split_scope(nodeid)
        return group_of(self.config.rootpath / module) or module
