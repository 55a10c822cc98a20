"""Stage validate: files against the checkpoint, and everything that runs here against eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mod_export.errors import BuildError, BuildFolderError, GraphError
from mod_export.folder.programs import PROGRAM
from mod_export.graph.weights import digests_expected, state_of
from mod_export.judge.candidates import Candidate, candidates_from_engines, candidates_from_graphs
from mod_export.judge.causality import causality_of
from mod_export.judge.findings import parity_of
from mod_export.judge.inputs import parity_batches
from mod_export.judge.parity_row import failed_row
from mod_export.judge.quality import quality_of
from mod_export.judge.reference import routing_map
from mod_export.judge.structure import (
    structure_of_export,
    structure_of_file,
    structure_of_graph,
    structure_of_programs,
    structure_of_weights,
)
from mod_export.judge.texts import parity_of_decoding, texts_of_decoding
from mod_export.pipeline.context import Context
from mod_export.pipeline.folder_context import FolderContext
from mod_export.pipeline.graphs import fresh_graph
from mod_export.rows.base import setting_fields
from mod_export.rows.failures import fields_of_graph
from mod_export.rows.generation import QualityRow, TextsRow
from mod_export.rows.parity import ParityRow
from mod_export.rows.structure import CausalityRow, RoutingMap, StructureRow
from mod_export.runtime.decoder import DecodingEngines
from mod_export.types import DTYPES, KINDS, QUANTIZED, Bucket, Graph, Setting

QUALITY_TEXTS = 4
NO_BUCKET = Bucket(0, 0)
"""Stands for any."""


def validate(context: Context) -> None:
    """Structure of every file, parity and causality of every candidate, texts, and a routing map of every bucket."""
    _structure(context)
    changed = {row.path for row in context.rows(StructureRow) if not row.passed}
    candidates = _candidates(context)
    for candidate in candidates:
        _parity(context, candidate, candidates, is_changed=candidate.path in changed)
    ran = {row.artifact: row for row in context.rows(ParityRow) if row.inputs}
    engines = [one for one in candidates if one.engine is not None and one.path in ran]
    for candidate in engines:
        with context.attempt("validate", setting_fields(candidate.setting)):
            if candidate.setting.role == "forward":
                _causality(context, candidate, ran[candidate.path].allowed_max_abs)
            elif candidate.setting.role == "decode" and context.config.generation.compared_texts:
                _texts(context, candidate, candidates)
    # A finished folder of which only some targets were asked for is asked for nothing else.
    if not isinstance(context.generation, str) and not context.targets:
        with context.attempt("validate", {"model": "mod", "role": "decode"}):
            _quality(context)
    if not isinstance(context, FolderContext) or not context.manifest.verified:
        _maps(context)  # For the report, which is not written again.
    context.models.release_references()


def check_structure(context: Context) -> None:
    """All that a build without evidence looks at: files, weights and graphs, without running them.

    Raises:
        GraphError: one of them is not what it must be.
    """
    _structure(context)
    reasons = [f"{row.path}: {reason}" for row in context.rows(StructureRow) for reason in row.reasons]
    if reasons:
        raise GraphError("; ".join(reasons))


def _structure(context: Context) -> None:
    """Also of every engine that is an ONNX graph."""
    graphs = {graph.path: graph for graph in context.graphs}
    graphs |= {one.path: context.graph_of(one) for one in context.engines if one.path.endswith(".onnx")}
    files = {path: context.hash_of(path) for path in (*context.weight_digests, *graphs)}
    inputs = {"files": files, "weights": context.weight_digests, **context.versions("onnx_ir")}
    context.measure(StructureRow, "structure", inputs, lambda: list(_structure_rows(context, graphs)))


def _structure_rows(context: Context, graphs: Mapping[str, Graph]) -> Iterator[StructureRow]:
    root = context.root
    if isinstance(context, FolderContext):
        yield from _against_manifest(context)
    for path, digests in context.weight_digests.items():
        yield structure_of_weights(root, path, digests)
    for path, graph in graphs.items():
        yield structure_of_graph(root, path, graph, context.weight_digests)
    # A build has just exported; a finished folder is compared with a fresh export, and with a checkpoint that is named.
    if isinstance(context, FolderContext):
        if context.exports_alike:
            for path, graph in graphs.items():
                yield _against_export(context, path, graph)
        if context.checkpoint is not None:
            yield from _against_checkpoint(context)


def _against_manifest(context: FolderContext) -> Iterator[StructureRow]:
    for path, entry in context.manifest.files.items():
        yield structure_of_file(context.root, path, entry)
    yield from _against_captured(context)


def _against_captured(context: FolderContext) -> Iterator[StructureRow]:
    for kind, facts in context.facts.items():
        if facts.architecture == PROGRAM:
            yield from structure_of_programs(context.root, kind, facts.spec)


def changed_program(context: FolderContext) -> str | None:
    """Which file of a captured model does not hold what was captured; None where all do."""
    return next((f"{row.path}: {row.reasons[0]}" for row in _against_captured(context) if not row.passed), None)


def _against_export(context: FolderContext, path: str, graph: Graph) -> StructureRow:
    try:
        return structure_of_export(context.root, path, fresh_graph(context, graph))
    except (BuildError, BuildFolderError) as error:
        return StructureRow(path=path, checked=(), passed=False, reasons=(f"no fresh export: {error}",))


def _against_checkpoint(context: FolderContext) -> Iterator[StructureRow]:
    """Weights files against the checkpoint itself, whatever fingerprints the manifest has.

    A baseline that came from a checkpoint of its own is left out: its reference is made of the very file.
    """
    # The model comes last: where both share a file, the dense baseline's tensors are a part of its own.
    built_from = context.facts["mod"].checkpoint_sha256
    kinds = [kind for kind in reversed(KINDS) if kind in context.facts]
    own = [kind for kind in kinds if context.facts[kind].checkpoint_sha256 == built_from]
    files = {context.weights_path(kind, dtype): (kind, dtype) for kind in own for dtype in DTYPES}
    for path, (kind, dtype) in files.items():
        if path in context.weight_digests:
            state = state_of(context.models.reference(kind).module)
            try:
                digests = digests_expected(context.root / path, state, dtype)
            except BuildFolderError:
                digests = {}  # It cannot be read, which the row says.
            yield structure_of_weights(context.root, path, digests)


def _candidates(context: Context) -> list[Candidate]:
    """Every engine that runs here, and the graphs that ONNX Runtime can run in place of others."""
    engines = candidates_from_engines(context.runnable("forward", "prefill", "decode"), context.graphs)
    if context.targets:
        return engines
    graphs = candidates_from_graphs(context.graphs, engines, context.weights_path, context.hash_of)
    # Steps are judged after a prompt, whose graph may have failed.
    reads = {replace(one.setting, bucket=NO_BUCKET) for one in graphs if one.setting.role == "prefill"}
    return [*engines, *(one for one in graphs if one.setting.role != "decode" or _prompts_of(one) in reads)]


def _prompts_of(step: Candidate) -> Setting:
    """The setting of the graphs that read prompts for one that reads one more token, of any length."""
    return replace(step.setting, role="prefill", bucket=NO_BUCKET)


def _inputs(context: Context, candidate: Candidate, **options: Any) -> dict[str, Any]:
    kind, dtype = candidate.setting.model, candidate.setting.dtype
    return {
        **context.conditions([candidate.engine] if candidate.engine else []),
        "file": context.hash_of(candidate.path),
        "weights": context.hash_of(context.weights_path(kind, dtype)),
        "options": options,
        "seed": context.config.seed,
        "checkpoint": context.identity(kind),
    }


def _parity(context: Context, candidate: Candidate, candidates: Sequence[Candidate], *, is_changed: bool) -> None:
    config, setting = context.config, candidate.setting
    gate = config.parity.gate(setting.dtype)
    options: dict[str, Any] = {"gate": gate.model_dump()}
    if setting.role == "forward":
        options |= {"batches": config.parity.batches_per_kind, "texts": config.parity.text_batches}
        options |= context.text_inputs if setting.dtype in QUANTIZED else {}
    else:
        options |= {"tokens": config.generation.judged_tokens, **_beside(context, candidate, candidates)}

    def make() -> list[ParityRow]:
        if is_changed and candidate.graph is None:
            why = "not run: it is compiled code, and not the file that was built"
            return [failed_row(why, gate, setting, artifact=candidate.path)]
        reference = context.models.reference(setting.model, setting.role)
        if setting.role == "forward":
            fresh = partial(fresh_graph, context)
            return [parity_of(context.root, candidate, reference, config, fresh, context.text_of)]
        decoding = _decoding(context, candidates)
        return [parity_of_decoding(decoding, candidate.as_engine, reference, context.text_of)]

    name = f"parity/{setting.target}/{setting.name}"
    try:
        context.measure(ParityRow, name, _inputs(context, candidate, **options), make)
    except BuildError as error:
        if isinstance(context, FolderContext) and changed_program(context) is not None:
            raise  # Nothing can be judged by a reference that was changed.
        # No step of the folder: it is tried again next time.
        context.add([failed_row(f"cannot be judged: {error}", gate, setting, artifact=candidate.path)])


def _beside(context: Context, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """What results about an engine that writes text depend on beside it: the options that the eager model selects by,
    and for a decode engine the engines that read its prompts.
    """
    generation = context.config.generation.model_dump(include={"window", "slack", "slots"})
    generation |= context.text_inputs
    if candidate.setting.role == "prefill":
        return {"generation": generation}
    prefills = _decoding(context, candidates).prefills(
        candidate.setting.model, candidate.setting.target, candidate.setting.dtype
    )
    return {"generation": generation, "prompts": [context.hash_of(one.path) for one in prefills]}


def _decoding(context: Context, candidates: Sequence[Candidate]) -> DecodingEngines:
    """Prefill and decode candidates, opened as validation opens them."""
    by_path = {one.path: one for one in candidates if one.setting.role != "forward"}
    return DecodingEngines(
        [one.as_engine for one in by_path.values()],
        lambda engine: by_path[engine.path].open(context.root, context.config),
        context.config,
    )


def _causality(context: Context, candidate: Candidate, tolerance: float) -> None:
    setting, config, parity = candidate.setting, context.config, context.config.parity
    # What the tolerance follows from, rather than its value, which is a measured number.
    options = parity.gate(setting.dtype).model_dump(include={"rounding_error", "max_abs"})
    options |= {"batches": parity.batches_per_kind, "texts": parity.text_batches, "suffixes": parity.suffixes}
    context.measure(
        CausalityRow,
        f"causality/{setting.target}/{setting.name}",
        _inputs(context, candidate, **options),
        lambda: [causality_of(context.root, candidate, context.models.reference(setting.model), config, tolerance)],
    )


def _texts(context: Context, candidate: Candidate, candidates: Sequence[Candidate]) -> None:
    options, setting = context.config.generation, candidate.setting
    wanted = {"texts": options.compared_texts, "tokens": options.compared_tokens}
    model = context.models.generating(setting.model)

    def make() -> list[TextsRow]:
        reference = context.models.reference(setting.model, "decode")
        decoding = _decoding(context, candidates)
        return [texts_of_decoding(decoding, candidate.as_engine, model, reference, context.text_of)]

    context.measure(
        TextsRow,
        f"texts/{setting.target}/{setting.name}",
        _inputs(context, candidate, **wanted, **_beside(context, candidate, candidates)),
        make,
    )


def _quality(context: Context) -> None:
    """What deciding about one token at a time costs in perplexity."""

    def make() -> list[QualityRow]:
        models = context.models
        own, causal = models.reference("mod").returning("logits"), models.reference("mod", "decode")
        generating, seed = models.generating("mod"), context.config.seed
        found = quality_of(generating, causal, own, QUALITY_TEXTS, seed, context.text_of)
        return [] if found is None else [found]

    generation = context.config.generation.model_dump(include={"window", "slack"})
    inputs = {**context.identity("mod"), "generation": generation, **context.text_inputs}
    context.measure(QualityRow, "quality", {**inputs, **context.versions("torch")}, make)


def _maps(context: Context) -> None:
    inputs = {"checkpoint": context.identity("mod"), "seed": context.config.seed, **context.versions("torch")}
    graphs = [one for one in context.graphs if (one.model, one.role, one.target) == ("mod", "forward", None)]
    for graph in graphs:

        def make(bucket: Bucket = graph.bucket) -> list[RoutingMap]:
            reference = context.models.reference("mod")
            ks = reference.k_by_layer(bucket).values()
            batches = parity_batches(reference.loaded, bucket, ks, context.config.seed, 1)
            found = routing_map(reference, bucket, batches)
            return [] if found is None else [found]

        with context.attempt("validate", fields_of_graph(graph)):
            context.measure(RoutingMap, f"map/{graph.bucket.name}", inputs, make)
