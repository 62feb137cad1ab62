"""Decides which rollout fetches a version from which peer, so that the learner sends each byte a constant number of times.

Pure. The learner serves the first rollouts that ask. Each later one is referred to the first earlier rollout that serves
others and has room for one more: a tree in the order of the requests. A rollout passes a version on once it has checked it,
so that a version reaches n rollouts in log n steps. Each also gets a second source, in case the first one fails. When both
fail, the rollout comes back to the learner.

A rollout waits without limit for a source that is fetching, so no wait may be circular. Sources asked
earlier, so there is no circle, except by restarts: a wait for an address may then reach a rollout that asked later. A
rollout that took over an address is therefore served by the learner, and never waits.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from gspo_protocol.messages import Source

DIRECT: Final = 2
"""Rollouts that fetch a version from the learner."""
CHILDREN: Final = 3
"""Rollouts that fetch a version from the same rollout."""
MAX_ITEMS: Final = 8
"""Snapshots and deltas that are remembered."""

Item = tuple[int, int]
"""A version and its base (0: the snapshot)."""


@dataclass(kw_only=True)
class _Node:
    source: Source | None
    parents: list[bytes]
    """The peers that it was referred to: the first choice, and another one. Empty: the learner serves it."""
    num_children: int = 0
    num_second: int = 0
    """How often it is another peer's second source."""
    usable: bool = True


@dataclass(kw_only=True)
class _Tree:
    nodes: dict[bytes, _Node] = field(default_factory=dict)
    num_direct: int = 0


class FanOut:
    """The trees of the versions that are being fetched; peers are known by their identities."""

    def __init__(self, *, direct: int = DIRECT, children: int = CHILDREN) -> None:
        self._direct = direct
        self._children = children
        self._trees: OrderedDict[Item, _Tree] = OrderedDict()
        self.num_failed = 0
        """How often peers came back from their sources."""

    def join(self, item: Item, peer: bytes, source: Source | None, *, direct: bool = False) -> list[Source]:
        """``peer`` wants ``item`` and will serve it as ``source`` (None: it will not). Returns its sources, the best one
        first; empty: the learner.

        ``direct``: it wants only the learner, because its source sent damaged weights. A peer that asks for an item a second
        time is also served by the learner: its source may be the reason. So is one at an address that another one had.
        """
        if direct:
            for other in list(self._trees):
                if other[0] == item[0]:
                    self.came_back(other, peer)
        tree = self._trees.setdefault(item, _Tree())
        while len(self._trees) > MAX_ITEMS:
            self._trees.popitem(last=False)
        known = tree.nodes.get(peer)
        if known is not None:
            self.came_back(item, peer)
            return []
        direct = self._takes_over(item[0], peer, source) or direct
        parents = [] if direct or tree.num_direct < self._direct else self._parents(tree)
        tree.nodes[peer] = _Node(source=source, parents=parents)
        if not parents:
            tree.num_direct += 1
        return [found for parent in parents if (found := tree.nodes[parent].source) is not None]

    def came_back(self, item: Item, peer: bytes) -> None:
        """``peer`` asks the learner for bytes of ``item``: its sources failed, and no other peer is referred to them."""
        tree = self._trees.get(item)
        node = None if tree is None else tree.nodes.get(peer)
        if tree is None or node is None or not node.parents:
            return
        for parent in node.parents:
            if parent in tree.nodes:
                tree.nodes[parent].usable = False
        node.parents = []
        self.num_failed += 1

    def _takes_over(self, version: int, peer: bytes, source: Source | None) -> bool:
        """Return whether a rollout that fetches this version may wait for ``peer`` by an old request: its own, or that of
        a process which had its address and has ended. Nobody else is referred to such a process.
        """
        earlier = False
        for tree in (tree for item, tree in self._trees.items() if item[0] == version):
            for other, node in tree.nodes.items():
                if other == peer:
                    earlier = True
                elif source is not None and node.source is not None and node.source.endpoint == source.endpoint:
                    earlier, node.usable = True, False
        return earlier

    def _parents(self, tree: _Tree) -> list[bytes]:
        """Return the first peer with room for one more, and the one least often used as second choice."""
        usable = {peer: node for peer, node in tree.nodes.items() if node.source is not None and node.usable}
        first = next((peer for peer, node in usable.items() if node.num_children < self._children), None)
        if first is None:
            return []
        usable.pop(first).num_children += 1
        if not usable:
            return [first]
        second = min(usable, key=lambda peer: usable[peer].num_second)
        usable[second].num_second += 1
        return [first, second]
