"""Keeps what texts have read, so that later texts which begin alike do not read it again.

A text that takes kept state is bit-equal to one that reads everything itself, because both compute it with the same
operations. Prompts are read in parts (`prompts.py`), and a part is taken if all parts before it were the same. Scored
prompts are read by steps of one token, in blocks of `BLOCK`; steps round differently from parts, and the engines of one
text differently from those of several, so each kind of reading has chains of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mod_export.runtime.cache import CachedBlock

BLOCK = 16
"""Tokens of a block that steps read. A block that is not whole is read again."""

ENTRY_BYTES, TOP_BYTES = 200, 130
"""About what Python's objects of a log probability take, and of each alternative beside it."""

Key = tuple[int, tuple[int, ...]]
Reading = tuple[str, int, int]
"""How a text is read: in `parts` or by `steps`, and the rows and the cache length of the engine that takes the steps (0
for parts).
"""


@dataclass(eq=False, slots=True)
class Node:
    """The beginning of a chain, where nothing is read yet, or a block in the cache.

    Attributes:
        key: number of the node before it, and the tokens that were read.
        number: number of this node.
        parent: the node before it; None for a beginning.
        length: number of tokens read up to the end of this node.
        block: what its tokens changed; None for a beginning.
        size: bytes that it takes.
    """

    key: Key
    number: int
    parent: Node | None
    length: int
    block: CachedBlock | None
    size: int


class PrefixCache:
    """Blocks, of which the least recently used are dropped when they take more than `max_bytes`.

    Attributes:
        max_bytes: limit of the memory of kept state.
        used_bytes: memory of kept state.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._numbers = 0
        # Nodes in the order of their last use. A text that uses a node also uses the nodes before it in the chain,
        # which are moved behind it here. So the first node in this order is always the end of a chain.
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        self._families: dict[Reading, int] = {}

    def beginning(self, how: Reading) -> Node | None:
        """Returns the node at which texts that are read in this way begin; None if there is no room for it."""
        # The key of a block has the number of the node before it; the key of a beginning has a negative number there.
        key: Key = (-1 - self._families.setdefault(how, len(self._families)), ())
        return self._nodes.get(key) or self._add(key, None, 0, None)

    def chain(self, begin: Node, parts: Iterable[Sequence[int]], alternatives: int | None = None) -> list[Node]:
        """Returns the node `begin` and the kept blocks after it that hold the first parts of a text.

        Args:
            begin: where the text begins.
            parts: tokens of the text that are read together.
            alternatives: how many most probable tokens a scored prompt needs with each log probability; None for texts
                that are not scored.
        """
        nodes = [begin]
        for part in parts:
            following = self._nodes.get((nodes[-1].number, tuple(part)))
            if following is None or not _lists(following, alternatives):
                break
            nodes.append(following)
        for node in reversed(nodes):
            self._nodes.move_to_end(node.key)
        return nodes

    def add_block(self, parent: Node, ids: Sequence[int], block: CachedBlock) -> Node | None:
        """Keeps a block and returns its node; None if the node before it was dropped meanwhile, or there is no room.

        A block that was kept with fewer log probabilities is replaced.
        """
        if self._nodes.get(parent.key) is not parent:
            return None
        key = (parent.number, tuple(ids))
        known = self._nodes.get(key)
        if known is not None and known.block is not None:
            if _tops(block) > _tops(known.block):
                larger = _bytes_of(block) - _bytes_of(known.block)
                known.block, known.size = block, known.size + larger
                self.used_bytes += larger
                return self._kept(known)
            return known
        return self._add(key, parent, parent.length + len(ids), block)

    def clear(self) -> None:
        """Drops everything: when an engine has failed, what it wrote before may be damaged."""
        self._nodes.clear()
        self.used_bytes = 0

    def _add(self, key: Key, parent: Node | None, length: int, block: CachedBlock | None) -> Node | None:
        size = _bytes_of(block) + key[1].__sizeof__()
        if size > self.max_bytes:
            return None
        self._numbers += 1
        node = self._nodes[key] = Node(key, self._numbers, parent, length, block, size)
        self.used_bytes += size
        return self._kept(node)

    def _kept(self, node: Node) -> Node | None:
        """Marks a node as used, and drops what was used least recently until the rest fits. Returns the node; None if
        it was dropped too.
        """
        before: Node | None = node
        while before is not None:
            self._nodes.move_to_end(before.key)
            before = before.parent
        while self.used_bytes > self.max_bytes:
            _, dropped = self._nodes.popitem(last=False)
            self.used_bytes -= dropped.size
        return node if self._nodes.get(node.key) is node else None


def _lists(node: Node, alternatives: int | None) -> bool:
    """Whether a block holds the log probabilities that a text needs."""
    if alternatives is None or node.block is None:
        return True
    return _tops(node.block) >= alternatives


def _tops(block: CachedBlock) -> int:
    return min((len(logprob.top) for logprob in block.logprobs), default=-1)


def _bytes_of(block: CachedBlock | None) -> int:
    if block is None:
        return 0
    arrays = [*(array for pair in block.rows.values() for array in pair), block.logits_V]
    numbers = sum(array.nbytes for array in (*arrays, block.count_N, block.overflow_N) if array is not None)
    return numbers + sum(ENTRY_BYTES + TOP_BYTES * len(logprob.top) for logprob in block.logprobs)


@dataclass(slots=True)
class Trail:
    """What steps of one scored prompt have read since its last whole block.

    Attributes:
        node: the last node of its chain.
        ids: tokens read since.
        slots: for each of them, the slot that it filled in every layer; -1 for none.
    """

    node: Node
    ids: list[int] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
