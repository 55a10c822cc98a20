"""The table of graph passes, in the order in which they run, and the function that runs them.

A pass works on any ONNX graph, ours or a user's. `run_passes` calls it only for dialects that need it, checks what it
promises (`ensures`), and removes unused nodes after it. The caller proves numerically, on the real graph and its real
weights, that a rewrite kept the results; the tests of the pass prove it on small graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import onnx_ir as ir
from onnx_ir.passes import common

from mod_export.errors import GraphError
from mod_export.graph.passes.attention_operator import AttentionOperator
from mod_export.graph.passes.cache_in_place import CacheInPlace
from mod_export.graph.passes.cached_attention import CachedAttention
from mod_export.graph.passes.cast_floats import CastFloats
from mod_export.graph.passes.decompose_attention import DecomposeAttention
from mod_export.graph.passes.grouped_topk import GroupedTopk
from mod_export.graph.passes.heads import FlatHeads, RotaryEmbedding
from mod_export.graph.passes.norm_operator import NormOperator
from mod_export.graph.passes.packed_attention import PackedAttention
from mod_export.graph.passes.plain_scatter import PlainScatter
from mod_export.graph.passes.products import StoredWeights
from mod_export.graph.passes.quantize_weights import QuantizeWeights
from mod_export.graph.passes.query_blocks import QueryBlocks
from mod_export.graph.passes.selection import SelectTopk, ThresholdSelection
from mod_export.types import Dialect, DType

__all__ = ["PASSES", "PORTABLE", "GraphPass", "needs_rewrite", "run_passes"]


class GraphPass(Protocol):
    """A rewrite of an ONNX graph. `run_passes` calls `run` and then `ensures`, in the order of PASSES."""

    name: ClassVar[str]

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        """Whether graphs of this dialect and dtype go through this pass."""

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        """Rewrites the graph in place, and returns the number of rewrites.

        Raises:
            LimitError: the graph has something that the dialect cannot take and this pass cannot rewrite.
        """

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        """Returns the problems that `run` should have removed; empty if there are none."""


PASSES: tuple[GraphPass, ...] = (
    SelectTopk(),
    NormOperator(),
    AttentionOperator(),
    PlainScatter(),
    ThresholdSelection(),
    RotaryEmbedding(),
    FlatHeads(),
    QueryBlocks(),
    DecomposeAttention(),
    CacheInPlace(),
    CachedAttention(),
    QuantizeWeights(),
    CastFloats(),
    GroupedTopk(),
    PackedAttention(),
    StoredWeights(),
)

PORTABLE = Dialect(name="portable ONNX", max_opset=23)
"""The dialect with standard operators only. The graph of every target is rewritten from a graph in this dialect."""


def needs_rewrite(dialect: Dialect, dtype: DType) -> bool:
    """Whether a dialect's graph can differ from the portable float32 one."""
    return any(item.applies(dialect, dtype) and not item.applies(PORTABLE, "float32") for item in PASSES)


def run_passes(model: ir.Model, dialect: Dialect, dtype: DType) -> dict[str, int]:
    """Runs every pass that applies, in place.

    Returns:
        Name of each pass that ran -> number of its rewrites.

    Raises:
        GraphError: a pass left a problem that it should remove. The message names the passes that ran before it.
        LimitError: the graph has something that the dialect cannot take.
    """
    applied: dict[str, int] = {}
    for graph_pass in PASSES:
        if not graph_pass.applies(dialect, dtype):
            continue
        rewrites = graph_pass.run(model, dialect, dtype)
        problems = graph_pass.ensures(model, dialect, dtype)
        if problems:
            before = ", ".join(applied) or "none"
            raise GraphError(f"pass {graph_pass.name} left: {'; '.join(problems)} (passes before it: {before})")
        applied[graph_pass.name] = rewrites
        if rewrites:
            common.RemoveUnusedNodesPass()(model)
            common.TopologicalSortPass()(model)
    return applied
