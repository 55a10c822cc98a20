"""Validation of a finished build folder again, on this machine, with or without the checkpoint."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mod_export.artifacts import DTYPES, Engine, Graph, ModelKind, Outputs
from mod_export.config import BuildConfig
from mod_export.environment import versions
from mod_export.errors import BuildError, BuildFolderError, CheckpointError
from mod_export.generation.opened import DecodingEngines, writing_here
from mod_export.graph.digests import digests_of_tensors
from mod_export.graph.onnx_export import EXPORTERS
from mod_export.graph.quantize import source_of
from mod_export.graph.weights import state_of
from mod_export.graph.weights_file import WeightsFile
from mod_export.measure.latency import Setting
from mod_export.measure.verdict import Verdict, judge
from mod_export.model import model_from_checkpoint, model_from_weights
from mod_export.protocols import LoadedModel
from mod_export.runtime import engines_of, graphs_of, opened_folder, runnable_engines
from mod_export.validate.candidates import Candidate, candidates_from_engines, candidates_from_graphs
from mod_export.validate.causality import CausalityRow
from mod_export.validate.decoding import parity_of_decoding, reference_outputs
from mod_export.validate.findings import causality_of, parity_of
from mod_export.validate.fresh import FreshGraphs, structure_of_export
from mod_export.validate.reference import Reference
from mod_export.validate.rows import ParityRow, failed_row
from mod_export.validate.structure import (
    StructureRow,
    structure_of_file,
    structure_of_graph,
    structure_of_weights,
)
from mod_export.workspace import MANIFEST, TOKENIZER

if TYPE_CHECKING:
    import torch

__all__ = ["Validation", "validate_folder"]

KINDS: tuple[ModelKind, ...] = ("mod", "dense")
OUTPUTS: tuple[Outputs, ...] = ("last", "logits")
MODEL_KEYS = ("name", "architecture", "checkpoint_sha256", "spec", "vocab_size", "weights", "tensors")
"""What the manifest says of each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What was found in a build folder on this machine."""

    structure: list[StructureRow]
    parity: list[ParityRow]
    causality: list[CausalityRow]
    verdict: Verdict
    notes: list[str]


def validate_folder(
    root: Path, config: BuildConfig | None, targets: Sequence[str], checkpoint: Path | None = None
) -> Validation:
    """Everything again: files, weights, graphs, and whatever runs here against eager PyTorch.

    The reference is rebuilt from the folder's own spec and weights, or from `checkpoint`. A file that is not the one
    that was built is a finding, not an error: it is looked at like any other, but for compiled code, which is not run.

    Raises:
        BuildFolderError: not a whole build folder.
        CheckpointError: `checkpoint` cannot be read, or is not the one that the folder was built from.
        TargetError: nothing to run.
    """
    manifest = opened_folder(root, verify=False)
    _check_manifest(root, manifest)
    config = config or BuildConfig.model_validate(manifest["config"])
    engines = runnable_engines(root, manifest, targets)
    structure = structure_of_folder(root, manifest)
    changed = {row.path for row in structure if not row.passed}
    graphs = graphs_of(manifest)
    judged = candidates_from_engines(engines, graphs)
    if not targets:
        judged += candidates_from_graphs(
            graphs,
            judged,
            lambda graph: _weights_path(manifest, graph),
            lambda path: str(manifest["files"][path]["sha256"]),
        )
    references = {kind: _reference(root, manifest, kind, checkpoint) for kind in KINDS}
    structure += _against_fresh_exports(root, manifest, references)
    if checkpoint is not None:
        structure += _against_checkpoint(root, manifest, references)
    parity, causality = [], []
    for candidate in judged:
        if candidate.graph is None and candidate.path in changed:
            parity.append(_unrun_row(candidate, config))
            continue
        parity.append(parity_of(root, candidate, references[candidate.model], config))
        if candidate.engine is not None and parity[-1].inputs:
            causality.append(causality_of(root, candidate, references[candidate.model], config))
    parity += _decoding(root, manifest, config, references, targets)
    verdict = judge(
        _settings(engines),
        _buckets(engines),
        parity=parity,
        speedup=None,
        min_speedup=0,
        structure=structure,
        causality=causality,
    )
    notes = [*_not_judged(manifest, judged), *_not_written_with(manifest, parity), *_not_compared(manifest)]
    return Validation(structure=structure, parity=parity, causality=causality, verdict=verdict, notes=notes)


def _decoding(
    root: Path,
    manifest: dict[str, Any],
    config: BuildConfig,
    references: Mapping[ModelKind, Reference],
    targets: Sequence[str],
) -> list[ParityRow]:
    """Parity of the engines that write text and run here."""
    about = manifest.get("generation") or {}
    if "engines" not in about:
        return []
    engines = [engine for engine in engines_of(about) if not targets or engine.target in targets]
    # The window, the slack and the places are those that the graphs were made for, whatever the configuration says now.
    built = BuildConfig.model_validate(manifest["config"]).generation
    asked = config.generation.model_copy(update={"places": built.places})
    config = config.model_copy(update={"generation": asked})
    able = writing_here(engines)
    found = DecodingEngines(root, able, config)
    rows = []
    for kind in KINDS:
        model = references[kind].loaded.generating(about["window"], built.slack if kind == "mod" else 0)
        for outputs in OUTPUTS:
            wanted = [engine for engine in able if engine.model == kind and reference_outputs(engine) == outputs]
            reference = Reference(model.loaded, outputs=outputs) if wanted else None
            rows += [parity_of_decoding(found, one, model, reference) for one in wanted if reference is not None]
    return rows


def _check_manifest(root: Path, manifest: dict[str, Any]) -> None:
    """Whether the parts of a manifest agree: nothing that is listed once may be missing where it is judged.

    Raises:
        BuildFolderError: they do not.
    """
    try:
        files, graphs, engines = manifest["files"], graphs_of(manifest), engines_of(manifest)
        about, files_of_texts = manifest.get("generation") or {}, set()
        if "engines" in about:
            files_of_texts = {
                *(graph.path for graph in graphs_of(about)),
                *(engine.path for engine in engines_of(about)),
            }
        BuildConfig.model_validate(manifest["config"])
        for kind, name in itertools.product(KINDS, MODEL_KEYS):
            manifest["models"][kind][name]
        manifest["exporters"], manifest["weight_digests"].items()
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise BuildFolderError(
            f"{root / MANIFEST}: not as this release writes it ({what}); validate it with the release that built it, "
            "or build again"
        ) from error
    listed = {*(graph.path for graph in graphs), *(engine.path for engine in engines), *manifest["weight_digests"]}
    listed |= files_of_texts
    problems = [f"{path} is no file of it" for path in sorted(listed - files.keys())]
    problems += [
        f"{one.path} has no weights file" for one in engines if one.weights is None and one.path.endswith(".onnx")
    ]
    known = {"report.json", "report.html", TOKENIZER}
    problems += [f"{path} is nothing that it describes" for path in sorted(files.keys() - listed - known)]
    problems += [
        f"{one.path} is listed as {one.dtype} and its graph as {one.graph.dtype}"
        for one in candidates_from_engines(engines, graphs)
        if one.graph is not None and one.graph.dtype != one.dtype
    ]
    if problems:
        raise BuildFolderError(f"{root / MANIFEST}: contradicts itself: {'; '.join(problems)}; build again")


def _reference(root: Path, manifest: dict[str, Any], kind: ModelKind, checkpoint: Path | None) -> Reference:
    try:
        outputs = BuildConfig.model_validate(manifest["config"]).outputs
        return Reference(_restored(root, manifest, kind, checkpoint), outputs=outputs)
    except RuntimeError as error:  # What torch raises for weights that do not fit the model.
        raise BuildFolderError(
            f"{root / MANIFEST}: the reference cannot be rebuilt from spec and weights "
            f"({str(error).splitlines()[0]}); build again"
        ) from error


def structure_of_folder(root: Path, manifest: dict[str, Any]) -> list[StructureRow]:
    """Every file against its hash, weights against the checkpoint's fingerprints, graphs against their references."""
    rows = [structure_of_file(root, path, entry) for path, entry in manifest["files"].items()]
    rows += [structure_of_weights(root, path, found) for path, found in manifest["weight_digests"].items()]
    graphs = graphs_of(manifest)
    named = {graph.path: graph for graph in graphs}
    for candidate in candidates_from_engines(engines_of(manifest), graphs):
        if candidate.graph is not None:
            named[candidate.path] = candidate.graph
    vocab_size = {kind: entry["vocab_size"] for kind, entry in manifest["models"].items()}
    return rows + [
        structure_of_graph(root, path, graph, vocab_size[graph.model], manifest["weight_digests"])
        for path, graph in named.items()
    ]


def _against_fresh_exports(
    root: Path, manifest: dict[str, Any], references: Mapping[ModelKind, Reference]
) -> list[StructureRow]:
    """Every graph against a fresh export; none where other versions would export, and differ for good reasons."""
    if manifest["exporters"] != versions(*EXPORTERS):
        return []
    fresh, graphs, rows = FreshGraphs(root), graphs_of(manifest), []
    engines = candidates_from_engines(engines_of(manifest), graphs)
    files = {graph.path: graph for graph in graphs} | {one.path: one.graph for one in engines if one.graph is not None}
    for path, graph in files.items():
        weights = _weights_path(manifest, graph)
        try:
            rows.append(structure_of_export(root, path, fresh.graph(graph, weights, references[graph.model])))
        except (BuildError, BuildFolderError) as error:
            rows.append(StructureRow(path=path, checked=(), passed=False, reasons=(f"no fresh export: {error}",)))
    return rows


def _against_checkpoint(
    root: Path, manifest: dict[str, Any], references: Mapping[ModelKind, Reference]
) -> list[StructureRow]:
    """Weights files against the checkpoint itself, whatever fingerprints the manifest has."""
    rows: list[StructureRow] = []
    for kind, dtype in itertools.product(KINDS, DTYPES):
        path = str(manifest["models"][kind]["weights"]).removesuffix("float32.data") + f"{dtype}.data"
        if path in manifest["weight_digests"] and path not in {row.path for row in rows}:
            # The first kind is the whole model: the twin's tensors are a part of its own.
            state, quantized = state_of(references[kind].module), _quantized(root / path)
            rows.append(structure_of_weights(root, path, digests_of_tensors(state, dtype, quantized)))
    return rows


def _quantized(path: Path) -> set[str]:
    """The weights that a file holds as whole numbers; none where it cannot be read, which is another row's problem."""
    try:
        names = WeightsFile.open(path).entries
    except BuildFolderError:
        return set()
    return {name for name in map(source_of, names) if name is not None}


def _not_judged(manifest: dict[str, Any], judged: Sequence[Candidate]) -> list[str]:
    """Engines and graphs that nothing was run of, because they cannot be run here or were not asked for."""
    hashes = {path: entry["sha256"] for path, entry in manifest["files"].items()}
    known = {hashes[candidate.path] for candidate in judged}
    engines = [f"{engine.target} engines" for engine in engines_of(manifest) if hashes[engine.path] not in known]
    graphs = [
        f"{graph.dtype} graphs of {graph.target or 'no target'}"
        for graph in graphs_of(manifest)
        if hashes[graph.path] not in known
    ]
    return [
        f"not run: {count} {what}; of these only the files were looked at"
        for what, count in Counter((*engines, *graphs)).items()
    ]


def _not_written_with(manifest: dict[str, Any], parity: Sequence[ParityRow]) -> list[str]:
    """Engines that write text and were not run, because they keep their cache elsewhere or were not asked for."""
    about, ran = manifest.get("generation") or {}, {row.artifact for row in parity}
    engines = engines_of(about) if "engines" in about else []
    missed = Counter(engine.target for engine in engines if engine.path not in ran)
    return [
        f"not run: {count} {target} engines that write text; of these only the files were looked at"
        for target, count in missed.items()
    ]


def _not_compared(manifest: dict[str, Any]) -> list[str]:
    if manifest["exporters"] == versions(*EXPORTERS):
        return []
    return ["graphs were not compared with a fresh export: other versions are installed than those that built them"]


def _weights_path(manifest: dict[str, Any], graph: Graph) -> str:
    path: str = manifest["models"][graph.model]["weights"]
    return path.removesuffix("float32.data") + f"{graph.dtype}.data"


def _restored(root: Path, manifest: dict[str, Any], kind: ModelKind, checkpoint: Path | None) -> LoadedModel:
    entry = manifest["models"][kind]
    if checkpoint is not None and entry["checkpoint_sha256"] == manifest["models"]["mod"]["checkpoint_sha256"]:
        model = model_from_checkpoint(checkpoint)
        if model.checkpoint_sha256 != entry["checkpoint_sha256"]:
            raise CheckpointError(
                f"{checkpoint}: is not the checkpoint that {root} was built from (SHA-256 "
                f"{model.checkpoint_sha256[:12]}, expected {entry['checkpoint_sha256'][:12]})"
            )
        # With the folder's spec all the same: its capacity may be another than the checkpoint's own.
        weights = model.of_kind(kind).weights
    else:
        weights = _weights_of_folder(root, entry)
    return model_from_weights(
        entry["name"], entry["architecture"], entry["spec"], weights, entry["checkpoint_sha256"]
    ).loaded


def _weights_of_folder(root: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(root / entry["weights"])
        return {name: tensors[name] for name in entry["tensors"]}
    except (SafetensorError, KeyError, OSError) as error:
        raise BuildFolderError(
            f"{root / entry['weights']}: the reference cannot be rebuilt from it ({error}); build again"
        ) from error


def _unrun_row(candidate: Candidate, config: BuildConfig) -> ParityRow:
    return failed_row(
        "not run: it is compiled code, and not the file that was built",
        config.parity.gate(candidate.dtype),
        target=candidate.target,
        bucket=candidate.bucket,
        dtype=candidate.dtype,
        model=candidate.model,
        artifact=candidate.path,
    )


def _settings(engines: Sequence[Engine]) -> list[Setting]:
    return list(dict.fromkeys(Setting(target=e.target, bucket=e.bucket, dtype=e.dtype) for e in engines))


def _buckets(engines: Sequence[Engine]) -> list[Any]:
    return sorted({engine.bucket for engine in engines})
