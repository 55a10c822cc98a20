"""Measures on this machine how many queries a block of causal attention should have on ONNX Runtime's CPU kernels.

Small blocks compute fewer scores that the mask hides; large blocks multiply larger matrices. The best size depends on
the processor's caches and on the length, so the sizes are timed in turns on an attention of the same shape.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.graph.rewrites.attention import QueryBlocks
from mod_export.types import TargetLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHORTEST = 128
"""With fewer tokens than this nothing can be gained: the whole attention takes less than a millisecond."""
BLOCKS = (32, 64, 128, 256)
DEFAULT = 64
MUST_TAKE_LESS_THAN = 0.95
"""Another size replaces the default only below this share of the default's time, so that timing noise does not decide
what is built."""
MOST_SCORES = 2**28
"""With more scores than this (a GiB in float32) the whole attention is neither timed nor used."""
ROUNDS = 9
SECONDS = 3.0


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """A causal self-attention: B rows, H heads of queries, G of keys, T tokens, heads of width E."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    width: int

    def __str__(self) -> str:
        return f"b{self.batch}h{self.heads}g{self.kv_heads}t{self.tokens}e{self.width}"


def default_block(tokens: int) -> int:
    """Returns the number of queries in a block if nothing was measured; one block has all queries if it is `tokens`."""
    return DEFAULT if tokens >= SHORTEST else tokens


def is_measured(shape: AttentionShape) -> bool:
    """Returns whether an attention is long enough for blocks to matter."""
    return shape.tokens >= SHORTEST


def time_blocks(shape: AttentionShape, threads: int) -> dict[int, float]:
    """Returns number of queries in a block -> milliseconds of the fastest round.

    Where the key is the number of tokens, one block has all queries. The result is empty if the attention is too short
    to split.
    """
    if not is_measured(shape):
        return {}
    sizes = [block for block in BLOCKS if block < shape.tokens]
    if shape.batch * shape.heads * shape.tokens**2 <= MOST_SCORES:
        sizes.append(shape.tokens)
    runs = {block: _run(shape, block, threads) for block in sizes}
    samples_ms: dict[int, list[float]] = {block: [] for block in sizes}
    deadline = time.perf_counter() + SECONDS
    for done in range(1 + ROUNDS):
        for block, run in runs.items():
            begin = time.perf_counter()
            run()
            samples_ms[block].append(1e3 * (time.perf_counter() - begin))
        if done > 1 and time.perf_counter() > deadline:
            break
    # The first round does not count: it fills caches and memory arenas.
    return {block: min(ms[1:]) for block, ms in samples_ms.items()}


def fastest_block(shape: AttentionShape, ms: Mapping[int, float]) -> int:
    """Returns the default size, or another one that is clearly faster."""
    usual = default_block(shape.tokens)
    if usual not in ms:
        return usual
    best = min(ms, key=lambda block: ms[block])
    return best if ms[best] < MUST_TAKE_LESS_THAN * ms[usual] else usual


def _run(shape: AttentionShape, block: int, threads: int) -> Callable[[], object]:
    import onnx_ir as ir

    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 23]>
        attention (float[{batch},{heads},{tokens},{width}] q, float[{batch},{kv_heads},{tokens},{width}] k,
        float[{batch},{kv_heads},{tokens},{width}] v) => (float[{batch},{heads},{tokens},{width}] y)
        {{ y = Attention <is_causal = 1> (q, k, v) }}""".format(**asdict(shape))
    )
    limits = TargetLimits(name="timed", max_opset=23, query_blocks=((shape.tokens, block),))
    QueryBlocks().run(model, limits, "float32")
    session = session_from_onnx(ir.to_proto(model).SerializeToString(), Path(), [CPU], threads)
    rng = np.random.default_rng(0)
    feeds = {item.name: rng.standard_normal(item.shape, np.float32) for item in session.get_inputs()}
    return lambda: session.run(None, feeds)
