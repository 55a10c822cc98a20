"""Keeps what texts have read, so that later texts which begin alike do not read it again.

A text that takes kept state is bit-equal to one that reads everything itself. That holds because state is only reused
where a text alone would have come to the same bits in the same way: prompts are read by one call of a prefill engine,
up to its length, and by steps of one token from there on, and the two round differently. So a chain of kept state has
a *start*, which is what the prefill call gave (or nothing, for texts that are read by steps alone), and then *blocks*
of `BLOCK` tokens that were read by steps of the same engine. A prompt shorter than the prefill engine is one call,
which only the same prompt can reuse; long prompts, conversations and scored contexts reuse every whole block.

Shape legend: G key/value heads, L slots of a layer, E head width, N routing sites, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mod_export.runtime.logits import Logprob

if TYPE_CHECKING:
    from mod_export.runtime.decoder import Kept

BLOCK = 16
"""Tokens of a block. A block that is not whole is read again."""

Key = tuple[int, tuple[int, ...]]
Reading = tuple[str, int, int]
"""How a text is read: its first tokens by `prefill` or all by `steps`, and the rows and the cache length of the engine
that takes the steps.
"""


@dataclass(frozen=True, slots=True)
class BlockState:
    """What reading one block changed in a row of a decoder.

    Attributes:
        rows: name of a cache tensor -> (slots, (G, slots, E)), the slots that were filled and what they hold.
        count_N: int64, used slots of each routing site after the block; None if the model has no routing sites.
        overflow_N: int64, tokens so far that wanted a slot of each site but found none left; None as above.
        logprobs: of a scored prompt, the log probability of each token of the block but the first of a text.
        logits_V: of a scored prompt, the logits after the block.
    """

    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    count_N: np.ndarray | None
    overflow_N: np.ndarray | None
    logprobs: tuple[Logprob, ...] = ()
    logits_V: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Node:
    """A start or a block in the cache.

    Attributes:
        key: number of the node before it, and the tokens that were read.
        number: number of this node.
        parent: the node before it; None for a start.
        length: number of tokens read up to the end of this node.
        start: state after a prefill call; None for a block, and for the start of texts that are read by steps alone.
        block: state of a block; None for a start.
        size: bytes that it takes.
    """

    key: Key
    number: int
    parent: Node | None
    length: int
    start: Kept | None
    block: BlockState | None
    size: int


class PrefixCache:
    """Starts and blocks, of which the least recently used are dropped when they take more than `max_bytes`.

    Attributes:
        max_bytes: limit of the memory of kept state.
        used_bytes: memory of kept state.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._numbers = 0
        # In the order of their last use. Whoever uses a node uses those before it, and they are moved after it. So the
        # first node in this order is always the end of a chain.
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        self._families: dict[Reading, int] = {}

    def start(self, how: Reading, ids: Sequence[int]) -> Node | None:
        """Finds the start that a text comes to if its first tokens (none if it is read by steps) are `ids`."""
        return self._nodes.get((self._family(how), tuple(ids)))

    def chain(self, start: Node, ids: Sequence[int], alternatives: int | None) -> list[Node]:
        """Returns the start and the blocks after it that hold the tokens of a text, but never its last token, which is
        read again for its logits.

        Args:
            start: a result of `start`.
            ids: all tokens of the text.
            alternatives: how many most probable tokens a scored prompt needs with each log probability; None for texts
                that are not scored.
        """
        nodes = [start]
        while start.length + BLOCK < len(ids):
            following = self._nodes.get((start.number, tuple(ids[start.length : start.length + BLOCK])))
            if following is None or not _lists(following, alternatives):
                break
            nodes.append(start := following)
        for node in reversed(nodes):
            self._nodes.move_to_end(node.key)
        return nodes

    def add_start(self, how: Reading, ids: Sequence[int], kept: Kept | None) -> Node | None:
        """Keeps the state after a prefill call, or nothing before the first step; None if it is too large."""
        key = (self._family(how), tuple(ids))
        return self._nodes.get(key) or self._add(key, None, len(ids), start=kept)

    def add_block(self, parent: Node, ids: Sequence[int], block: BlockState) -> Node | None:
        """Keeps a block; None if the state before it was dropped meanwhile, or it is too large.

        A block that was kept with fewer log probabilities is replaced.
        """
        if self._nodes.get(parent.key) is not parent:
            return None
        key = (parent.number, tuple(ids))
        known = self._nodes.get(key)
        if known is not None and known.block is not None:
            if _tops(block) > _tops(known.block):
                known.block = block
            return known
        return self._add(key, parent, parent.length + len(ids), block=block)

    def clear(self) -> None:
        """Drops everything, after an engine failed: what it wrote before may be damaged."""
        self._nodes.clear()
        self.used_bytes = 0

    def _family(self, how: Reading) -> int:
        """Negative numbers stand where blocks have the number of the node before them."""
        return -1 - self._families.setdefault(how, len(self._families))

    def _add(
        self, key: Key, parent: Node | None, length: int, *, start: Kept | None = None, block: BlockState | None = None
    ) -> Node | None:
        size = _bytes_of(start, block) + key[1].__sizeof__()
        if size > self.max_bytes:
            return None
        self._numbers += 1
        node = self._nodes[key] = Node(key, self._numbers, parent, length, start, block, size)
        self.used_bytes += size
        before = parent
        while before is not None:
            self._nodes.move_to_end(before.key)
            before = before.parent
        while self.used_bytes > self.max_bytes:
            _, dropped = self._nodes.popitem(last=False)
            self.used_bytes -= dropped.size
        return node if self._nodes.get(key) is node else None


def _lists(node: Node, alternatives: int | None) -> bool:
    """Whether a block holds the log probabilities that a text needs."""
    if alternatives is None or node.block is None:
        return True
    return node.block.logits_V is not None and _tops(node.block) >= alternatives


def _tops(block: BlockState) -> int:
    return min((len(logprob.top) for logprob in block.logprobs), default=-1)


def _bytes_of(start: Kept | None, block: BlockState | None) -> int:
    arrays: list[np.ndarray | None] = []
    if start is not None:
        arrays += [*start.rows.values(), start.count_N, start.overflow_N, start.logits_V]
    if block is not None:
        arrays += [array for pair in block.rows.values() for array in pair]
        arrays += [block.count_N, block.overflow_N, block.logits_V]
    return sum(array.nbytes for array in arrays if array is not None)


@dataclass(slots=True)
class Trail:
    """What one text has read since its last whole block.

    Attributes:
        node: the last node of its chain.
        ids: tokens read since.
        slots: for each of them, the slot that it filled in every layer; -1 for none.
    """

    node: Node
    ids: list[int] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
