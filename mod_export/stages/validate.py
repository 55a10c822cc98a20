"""Stage validate: files against the checkpoint, and everything that runs here against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Graph, engine_stem
from mod_export.inputs import parity_batches
from mod_export.stages.context import Context
from mod_export.validate.candidates import Candidate, candidates_from_engines, candidates_from_graphs
from mod_export.validate.causality import CausalityRow
from mod_export.validate.findings import causality_of, parity_of, tolerance_of
from mod_export.validate.maps import RoutingMapRow, routing_map
from mod_export.validate.rows import ParityRow
from mod_export.validate.structure import StructureRow, structure_of_graph, structure_of_weights
from mod_export.workspace import Step

__all__ = ["validate"]


def validate(context: Context) -> list[Step]:
    """Structure of every file, parity and causality of every candidate, and a routing map of every bucket."""
    engines = candidates_from_engines(context.runnable(), context.all_graphs())
    graphs = candidates_from_graphs(
        context.all_graphs(), engines, partial(_weights_of, context), context.workspace.hash_of
    )
    steps = [_structure(context)]
    parity = context.plan.config.parity
    for candidate in (*engines, *graphs):
        options = {
            "gate": parity.gate(candidate.dtype).model_dump(),
            "batches_per_kind": parity.batches_per_kind,
            "text_batches": parity.text_batches,
        }
        step = _step(context, "parity", candidate, options, partial(_parity, context, candidate))
        context.parity.append(ParityRow(**step.result))
        steps.append(step)
    for candidate, row in zip(engines, context.parity, strict=False):
        if not row.inputs:
            continue  # It could not be run, which its row says.
        options = {"gate": tolerance_of(parity.gate(candidate.dtype)), "suffixes": parity.suffixes}
        step = _step(context, "causality", candidate, options, partial(_causality, context, candidate))
        context.causality.append(CausalityRow(**step.result))
        steps.append(step)
    return [*steps, *_maps(context)]


def _weights_of(context: Context, graph: Graph) -> str:
    return context.weights_path(graph.model, graph.dtype)


def _structure(context: Context) -> Step:
    hash_of = context.workspace.hash_of
    graphs = {graph.path: graph for graph in context.all_graphs()}
    for candidate in candidates_from_engines(context.engines, context.all_graphs()):
        if candidate.graph is not None:
            graphs[candidate.path] = candidate.graph
    files = {path: hash_of(path) for path in (*context.weight_digests, *graphs)}
    inputs = {"files": files, "weights": context.weight_digests, **context.versions("onnx_ir")}
    vocab_size = {kind: context.plan.loaded(kind).vocab_size for kind in ("mod", "dense")}

    def make(paths: Sequence[Path]) -> list[dict[str, Any]]:
        rows = [structure_of_weights(context.root, path, found) for path, found in context.weight_digests.items()]
        rows += [
            structure_of_graph(context.root, path, one, vocab_size[one.model], context.weight_digests)
            for path, one in graphs.items()
        ]
        return [asdict(row) for row in rows]

    step = context.step("structure", inputs, [], make)
    context.structure += [StructureRow(**row) for row in step.result]
    return step


def _step(
    context: Context,
    what: str,
    candidate: Candidate,
    options: Mapping[str, Any],
    make: Callable[[Sequence[Path]], dict[str, Any]],
) -> Step:
    hash_of = context.workspace.hash_of
    inputs = {
        **context.conditions([candidate.engine] if candidate.engine else []),
        "file": hash_of(candidate.path),
        "weights": hash_of(context.weights_path(candidate.model, candidate.dtype)),
        "options": options,
        "seed": context.plan.config.seed,
        "checkpoint": context.identity(candidate.model),
    }
    stem = engine_stem(candidate.model, candidate.bucket, candidate.dtype)
    return context.step(f"{what}/{candidate.target}/{stem}", inputs, [], make)


def _parity(context: Context, candidate: Candidate, paths: Sequence[Path]) -> dict[str, Any]:
    return asdict(parity_of(context.root, candidate, context.reference(candidate.model), context.plan.config))


def _causality(context: Context, candidate: Candidate, paths: Sequence[Path]) -> dict[str, Any]:
    return asdict(causality_of(context.root, candidate, context.reference(candidate.model), context.plan.config))


def _maps(context: Context) -> list[Step]:
    steps = []
    for bucket in context.plan.buckets:
        inputs = {"checkpoint": context.identity("mod"), "seed": context.plan.config.seed, **context.versions("torch")}

        def make(paths: Sequence[Path], bucket: Any = bucket) -> dict[str, Any] | None:
            batches = parity_batches(context.plan.model.loaded, bucket, context.plan.config.seed, 1)
            found = routing_map(context.reference("mod"), bucket, batches)
            return None if found is None else asdict(found)

        step = context.step(f"map/{bucket.name}", inputs, [], make)
        if step.result is not None:
            context.maps.append(RoutingMapRow(**step.result))
        steps.append(step)
    return steps
