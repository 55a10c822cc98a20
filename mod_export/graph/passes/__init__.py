"""The table of graph rewrites, in the order in which they run, and the framework around each of them.

A pass works on any ONNX graph, ours or a user's. The runner calls it only for dialects that need it, checks what it
promises (`ensures`), and cleans up after it. That a rewrite kept the meaning is proven numerically by the caller, on
the real graph and its real weights (`pipeline.py`), and on small graphs in the pass's own tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from mod_export.artifacts import Dialect, DType
from mod_export.errors import GraphError
from mod_export.graph.passes.cache_in_place import CacheInPlace
from mod_export.graph.passes.cast_floats import CastFloats
from mod_export.graph.passes.decompose_attention import DecomposeAttention
from mod_export.graph.passes.flat_heads import FlatHeads
from mod_export.graph.passes.plain_scatter import PlainScatter
from mod_export.graph.passes.quantize_weights import QuantizeWeights
from mod_export.graph.passes.query_blocks import QueryBlocks
from mod_export.graph.passes.rotary_embedding import RotaryEmbedding
from mod_export.graph.passes.select_topk import SelectTopk
from mod_export.graph.passes.stored_weights import StoredWeights
from mod_export.graph.passes.threshold_selection import ThresholdSelection
from mod_export.protocols import GraphPass

__all__ = ["PASSES", "PORTABLE", "Applied", "needs_rewrite", "run_passes"]

PASSES: tuple[GraphPass, ...] = (
    SelectTopk(),
    PlainScatter(),
    ThresholdSelection(),
    RotaryEmbedding(),
    FlatHeads(),
    QueryBlocks(),
    DecomposeAttention(),
    CacheInPlace(),
    CastFloats(),
    QuantizeWeights(),
    StoredWeights(),
)

PORTABLE = Dialect(name="portable ONNX", max_opset=23)
"""Standard operators and nothing that any target refuses for its dtype alone; every target starts from this graph."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One pass that ran and how many places it rewrote."""

    name: str
    rewrites: int


def needs_rewrite(dialect: Dialect, dtype: DType) -> bool:
    """Whether a dialect's graph can differ from the portable float32 one."""
    return any(one.applies(dialect, dtype) and not one.applies(PORTABLE, "float32") for one in PASSES)


def run_passes(model: ir.Model, dialect: Dialect, dtype: DType) -> list[Applied]:
    """Runs every pass that applies, in place.

    Raises:
        GraphError: a pass left what it promises to remove; the message names the passes that ran before it.
        LimitError: the graph holds what the dialect cannot take.
    """
    applied: list[Applied] = []
    for graph_pass in PASSES:
        if not graph_pass.applies(dialect, dtype):
            continue
        rewrites = graph_pass.run(model, dialect, dtype)
        problems = graph_pass.ensures(model, dialect, dtype)
        if problems:
            before = ", ".join(item.name for item in applied) or "none"
            raise GraphError(f"pass {graph_pass.name} left: {'; '.join(problems)} (passes before it: {before})")
        applied.append(Applied(graph_pass.name, rewrites))
        if rewrites:
            common.RemoveUnusedNodesPass()(model)
            common.TopologicalSortPass()(model)
    return applied
