"""Who fetches a version from whom, so that the learner sends each byte a constant number of times. Pure.

Whoever asks first is served by the learner. Everybody later is sent to the first of those who asked before him, and serve
others, that has not yet as many as it can take: a tree in the order in which they asked. A rollout passes a version on when
it has checked it, so a version reaches n rollouts in log n steps. A rollout whose source fails comes back to the learner.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from protocol.messages import Source

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
    parent: bytes | None
    num_children: int = 0
    usable: bool = True


@dataclass(kw_only=True)
class _Tree:
    nodes: dict[bytes, _Node] = field(default_factory=dict)
    num_direct: int = 0


class FanOut:
    """The trees of the versions that are fetched now; peers are known by their identities."""

    def __init__(self, *, direct: int = DIRECT, children: int = CHILDREN) -> None:
        self._direct = direct
        self._children = children
        self._trees: OrderedDict[Item, _Tree] = OrderedDict()
        self.num_failed = 0
        """How often somebody came back from his source."""

    def join(self, item: Item, peer: bytes, source: Source | None, *, direct: bool = False) -> list[Source]:
        """``peer`` wants ``item`` and will serve it as ``source`` (None: it will not). Returns where it is; empty: here.

        ``direct``: it wants nobody else's, because what came from its source was damaged. Whoever asks for an item a second
        time is served here, too: his source may be the reason.
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
        parent = None if direct or tree.num_direct < self._direct else self._parent(tree)
        tree.nodes[peer] = _Node(source=source, parent=parent)
        if parent is None:
            tree.num_direct += 1
            return []
        node = tree.nodes[parent]
        node.num_children += 1
        assert node.source is not None
        return [node.source]

    def came_back(self, item: Item, peer: bytes) -> None:
        """``peer`` asks the learner for bytes of ``item``: where it was sent to somebody, nobody else is sent there."""
        tree = self._trees.get(item)
        node = None if tree is None else tree.nodes.get(peer)
        if tree is None or node is None or node.parent is None:
            return
        parent = tree.nodes.get(node.parent)
        if parent is not None and parent.usable:
            parent.usable = False
        node.parent = None
        self.num_failed += 1

    def _parent(self, tree: _Tree) -> bytes | None:
        for peer, node in tree.nodes.items():
            if node.source is not None and node.usable and node.num_children < self._children:
                return peer
        return None
