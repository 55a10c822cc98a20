"""Stage validate: compares files with the checkpoint, and everything that runs here with eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

import onnx_ir as ir

from mod_export.environment import free_bytes
from mod_export.errors import BuildError, BuildFolderError, GraphError
from mod_export.folder.programs import PROGRAM
from mod_export.folder.workspace import FinishedFolder
from mod_export.graph.weights import digests_expected, state_of
from mod_export.judge.candidates import Candidate, candidates_from_engines, candidates_from_graphs
from mod_export.judge.checks import failed_row, unjudged_row
from mod_export.judge.decode import quality_of
from mod_export.judge.inputs import parity_batches
from mod_export.judge.reference import routing_map
from mod_export.judge.structure import (
    structure_of_export,
    structure_of_file,
    structure_of_graph,
    structure_of_programs,
    structure_of_weights,
)
from mod_export.measure.working_memory import working_bytes
from mod_export.pipeline.build import Build
from mod_export.pipeline.completing import is_unevidenced
from mod_export.pipeline.graphs import fresh_graph
from mod_export.pipeline.roles import ROLES
from mod_export.rows.base import fields_of_graph, setting_fields
from mod_export.rows.correctness import ParityRow, RoutingMap, StructureRow
from mod_export.rows.speed import QualityRow
from mod_export.types import DTYPES, KINDS, Bucket, Graph, Unavailable, having

QUALITY_TEXTS = 4


def validate(build: Build) -> None:
    """Judges every file and every candidate, and draws a routing map of every bucket."""
    _structure(build)
    changed = {row.path for row in build.rows(StructureRow) if not row.passed}
    candidates = _candidates(build, changed)
    for candidate in candidates:
        _parity(build, candidate, candidates, is_changed=candidate.path in changed)
    ran = {row.artifact: row for row in build.rows(ParityRow) if row.inputs}
    engines = [candidate for candidate in candidates if candidate.engine is not None and candidate.path in ran]
    for candidate in engines:
        with build.attempt("validate", setting_fields(candidate.setting)):
            allowed = ran[candidate.path].allowed_max_abs
            ROLES[candidate.setting.role].further(build, candidate, candidates, allowed)
    # Quality is about the model, so a run over some targets of a finished folder does not measure it.
    if not isinstance(build.generation, Unavailable) and not build.targets:
        with build.attempt("validate", {"model": "mod", "role": "decode"}):
            _quality(build)
    if build.finished is None or is_unevidenced(build):
        _maps(build)  # Only a report that is written or completed needs maps.
    build.release_references()


def check_structure(build: Build) -> None:
    """Checks files, weights and graphs without running them, in a build without evidence.

    Raises:
        GraphError: a file, weight or graph is not what it must be.
    """
    _structure(build)
    reasons = [f"{row.path}: {reason}" for row in build.rows(StructureRow) for reason in row.reasons]
    if reasons:
        raise GraphError("; ".join(reasons))


def _structure(build: Build) -> None:
    """Checks the structure of weights files, graphs, and engines that are ONNX graphs."""
    graphs = {graph.path: graph for graph in build.graphs}
    graphs |= {engine.path: build.graph_of(engine) for engine in build.engines if engine.path.endswith(".onnx")}
    files = {path: build.hash_of(path) for path in (*build.weight_digests, *graphs)}
    inputs = {"files": files, "weights": build.weight_digests, **build.versions("onnx_ir")}
    build.row_step(StructureRow, "structure", inputs, lambda: list(_structure_rows(build, graphs)))


def _structure_rows(build: Build, graphs: Mapping[str, Graph]) -> Iterator[StructureRow]:
    root = build.root
    if build.finished is not None:
        yield from _against_manifest(build, build.finished)
    for path, digests in build.weight_digests.items():
        yield structure_of_weights(root, path, digests)
    for path, graph in graphs.items():
        yield structure_of_graph(root, path, graph, build.weight_digests)
    # A build has just exported its graphs. Those of a finished folder are compared with a fresh export.
    if build.finished is not None:
        if build.finished.exports_alike:
            for path, graph in graphs.items():
                yield _against_export(build, path, graph)
        if build.checkpoint is not None:
            yield from _against_checkpoint(build)


def _against_manifest(build: Build, folder: FinishedFolder) -> Iterator[StructureRow]:
    for path, entry in folder.manifest.files.items():
        yield structure_of_file(build.root, path, entry)
    yield from _against_captured(build)


def _against_captured(build: Build) -> Iterator[StructureRow]:
    for kind, facts in build.facts.items():
        if facts.architecture == PROGRAM:
            yield from structure_of_programs(build.root, kind, facts.spec)


def changed_program(build: Build) -> str | None:
    """Names a file of a captured model that was changed since the capture; None if there is none."""
    return next((f"{row.path}: {row.reasons[0]}" for row in _against_captured(build) if not row.passed), None)


def _against_export(build: Build, path: str, graph: Graph) -> StructureRow:
    try:
        return structure_of_export(build.root, path, fresh_graph(build, graph))
    except (BuildError, BuildFolderError) as error:
        return StructureRow(path=path, checked=(), passed=False, reasons=(f"no fresh export: {error}",))


def _against_checkpoint(build: Build) -> Iterator[StructureRow]:
    """Compares weights files with the checkpoint itself, regardless of the manifest's fingerprints.

    A baseline from a checkpoint of its own is left out, because its reference is made of the file to be compared.
    """
    # The model comes last: if both share a file, its tensors include those of the dense baseline.
    built_from = build.facts["mod"].checkpoint_sha256
    kinds = [kind for kind in reversed(KINDS) if kind in build.facts]
    same_source = [kind for kind in kinds if build.facts[kind].checkpoint_sha256 == built_from]
    files = {build.weights_path(kind, dtype): (kind, dtype) for kind in same_source for dtype in DTYPES}
    for path, (kind, dtype) in files.items():
        if path in build.weight_digests:
            state = state_of(build.reference(kind).module)
            try:
                digests = digests_expected(build.root / path, state, dtype)
            except BuildFolderError:
                digests = {}  # The row says that the file cannot be read.
            yield structure_of_weights(build.root, path, digests)


def _candidates(build: Build, changed: Set[str]) -> list[Candidate]:
    """Returns every engine that runs here, and the graphs that ONNX Runtime runs in place of other engines, as far as
    memory has room for them. The files in `changed` may be anything, so the sizes in them say nothing.
    """
    engines = candidates_from_engines(build.runnable("forward", "prefill", "decode"), build.graphs)
    if build.targets:
        return engines
    graphs = [
        candidate
        for candidate in candidates_from_graphs(build.graphs, engines, build.weights_path, build.hash_of)
        if candidate.setting.writes_text or candidate.path in changed or _has_room(build, candidate)
    ]
    return [*engines, *(graph for graph in graphs if ROLES[graph.setting.role].can_be_judged(graph, graphs))]


def _has_room(build: Build, candidate: Candidate) -> bool:
    """Says whether a graph can be run in half of the free memory. If not, the build keeps why it is not judged."""
    needed, free = working_bytes(ir.load(build.root / candidate.path)), free_bytes()
    if needed <= free // 2:
        return True
    build.not_run[candidate.path] = (
        f"{candidate.setting} {candidate.setting.model}: not run: ONNX Runtime would hold about "
        f"{needed / 2**30:.1f} GiB of values at once, more than half of the {free / 2**30:.1f} GiB that are free"
    )
    return False


def _parity(build: Build, candidate: Candidate, candidates: Sequence[Candidate], *, is_changed: bool) -> None:
    setting = candidate.setting
    gate, stages = build.config.parity.gate(setting.dtype), ROLES[setting.role]

    def make() -> list[ParityRow]:
        if is_changed and candidate.graph is None:
            why = "not run: it is compiled code, and not the file that was built"
            return [failed_row(why, gate, setting, artifact=candidate.path)]
        return [stages.parity(build, candidate, candidates, partial(fresh_graph, build))]

    options = {"gate": gate.model_dump(), **stages.parity_inputs(build, candidate, candidates)}
    name = f"parity/{setting.target}/{setting.name}"
    try:
        build.row_step(ParityRow, name, build.judging_inputs(candidate, **options), make)
    except BuildError as error:
        if build.finished is not None and changed_program(build) is not None:
            raise  # Nothing can be judged by a reference that was changed.
        # The row is not recorded as a step, so the next run judges the candidate again.
        build.add([unjudged_row(f"cannot be judged: {error}", gate, setting, artifact=candidate.path)])


def _quality(build: Build) -> None:
    """Measures what deciding about one token at a time costs in perplexity."""

    def make() -> list[QualityRow]:
        own, causal = build.reference("mod").returning("logits"), build.reference("mod", "decode")
        generating, seed = build.generating("mod"), build.config.seed
        quality = quality_of(generating, causal, own, QUALITY_TEXTS, seed, build.text_source)
        return [] if quality is None else [quality]

    generation = build.config.generation.model_dump(include={"window", "slack"})
    inputs = {**build.identity("mod"), "generation": generation, **build.text_inputs}
    build.row_step(QualityRow, "quality", {**inputs, **build.versions("torch")}, make)


def _maps(build: Build) -> None:
    named = build.text_source if build.named_text is not None else None
    inputs = {"checkpoint": build.identity("mod"), "seed": build.config.seed, **build.versions("torch")}
    inputs |= {} if named is None else {"text": build.text_inputs}
    for graph in having(build.graphs, model="mod", role="forward", target=None):

        def make(bucket: Bucket = graph.bucket) -> list[RoutingMap]:
            reference = build.reference("mod")
            ks = reference.k_by_layer(bucket).values()
            batches = parity_batches(reference.model, bucket, ks, build.config.seed, 1, text_source=named)
            row = routing_map(reference, bucket, batches)
            return [] if row is None else [row]

        with build.attempt("validate", fields_of_graph(graph)):
            build.row_step(RoutingMap, f"map/{graph.bucket.name}", inputs, make)
