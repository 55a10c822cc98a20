"""The table of graph rewrites, in the order in which they run, and the function that runs them.

A rewrite works on any ONNX graph, ours or a user's. `apply_rewrites` calls it only for targets that need it, checks
what it promises (`ensures`), and removes unused nodes after it. Where ONNX Runtime can run the graph, the stage
`passes` compares it with the reference; other graphs are compared by the stage `validate`. The tests of a rewrite use
small graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import onnx_ir as ir
from onnx_ir.passes import common

from mod_export.errors import GraphError
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites.attention import AttentionOperator, DecomposeAttention, QueryBlocks
from mod_export.graph.rewrites.cache_in_use import CacheInUse
from mod_export.graph.rewrites.cached_attention import CachedAttention, CacheInPlace, PackedAttention
from mod_export.graph.rewrites.cast_floats import CastFloats
from mod_export.graph.rewrites.continued_attention import ContinuedAttention
from mod_export.graph.rewrites.heads import FlatHeads, RotaryEmbedding
from mod_export.graph.rewrites.norms import NormOperator
from mod_export.graph.rewrites.plain_scatter import PlainScatter
from mod_export.graph.rewrites.products import QuantizeWeights, StoredWeights
from mod_export.graph.rewrites.rows_that_run import RowsThatRun
from mod_export.graph.rewrites.scaled_queries import ScaledQueries
from mod_export.graph.rewrites.topk import GroupedTopk, SelectTopk, ThresholdSelection
from mod_export.graph.weights import Form, forms_of
from mod_export.types import DType, TargetLimits


class Rewrite(Protocol):
    """A rewrite of an ONNX graph. `apply_rewrites` calls `run` and then `ensures`, in the order of REWRITES."""

    name: ClassVar[str]

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        """Whether graphs of a target with these limits, in this dtype, go through this rewrite."""

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Rewrites the graph in place, and returns the number of rewrites.

        Raises:
            LimitError: the graph has something that the target cannot take and this rewrite cannot change.
        """

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        """Returns the problems that `run` should have removed; empty if there are none."""


REWRITES: tuple[Rewrite, ...] = (
    SelectTopk(),
    NormOperator(),
    AttentionOperator(),
    PlainScatter(),
    ThresholdSelection(),
    RotaryEmbedding(),
    ContinuedAttention(),
    CacheInUse(),
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
    RowsThatRun(),
    ScaledQueries(),
)

PORTABLE = TargetLimits(name="portable ONNX", max_opset=23)
"""Allows standard operators only. The graph of every target is rewritten from a graph within these limits."""


def needs_rewrite(limits: TargetLimits, dtype: DType) -> bool:
    """Whether the graph of a target with these limits can differ from the portable float32 one."""
    return any(item.applies(limits, dtype) and not item.applies(PORTABLE, "float32") for item in REWRITES)


def stored_forms(model: ir.Model, limits: TargetLimits, dtype: DType) -> dict[str, set[Form]]:
    """Applies every rewrite up to the one that quantizes weights, and returns the forms in which the graph then reads
    each of its weights. Earlier rewrites matter: products that end up in different branches of an If
    cannot be fused, so their weights are stored apart.

    Raises:
        GraphError: a rewrite left a problem that it should remove.
        LimitError: the graph has something that the target cannot take.
    """
    last = next(number for number, rewrite in enumerate(REWRITES) if isinstance(rewrite, QuantizeWeights))
    apply_rewrites(model, limits, dtype, REWRITES[: last + 1])
    return forms_of(model.graph.initializers)


def apply_rewrites(
    model: ir.Model, limits: TargetLimits, dtype: DType, rewrites: Sequence[Rewrite] | None = None
) -> dict[str, int]:
    """Applies every rewrite that a target needs, in place; only some of the table if `rewrites` is given.

    Returns:
        Name of each rewrite that ran -> number of its changes.

    Raises:
        GraphError: a rewrite left a problem that it should remove. The message names the rewrites that ran before it.
        LimitError: the graph has something that the target cannot take.
    """
    applied: dict[str, int] = {}
    for rewrite in REWRITES if rewrites is None else rewrites:
        if not rewrite.applies(limits, dtype):
            continue
        count = rewrite.run(model, limits, dtype)
        problems = rewrite.ensures(model, limits, dtype)
        if problems:
            before = ", ".join(applied) or "none"
            raise GraphError(f"pass {rewrite.name} left: {'; '.join(problems)} (passes before it: {before})")
        applied[rewrite.name] = count
        if count:
            common.RemoveUnusedNodesPass()(model)
            _remove_unused_constants(model)
            common.TopologicalSortPass()(model)
    return applied


def _remove_unused_constants(model: ir.Model) -> None:
    """Removes unused constants of branches: RemoveUnusedNodesPass leaves them, and ONNX Runtime warns about them."""
    for node in model.graph.all_nodes():
        for branch in branches_of(node):
            for name in [name for name, value in branch.initializers.items() if not value.uses()]:
                if branch.initializers[name] not in branch.outputs:
                    del branch.initializers[name]
