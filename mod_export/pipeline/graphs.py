"""Stages capture and onnx: one static graph per model, role and bucket, and the weights files that they share.

Exporting is deterministic, so validation exports again and compares. `fresh_graph` makes the bytes of any graph of a
finished folder with the functions that a build uses.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.engines import ENGINES
from mod_export.environment import EXPORTERS, versions
from mod_export.errors import GraphError, LimitError
from mod_export.folder.manifest import GenerationFacts
from mod_export.graph.capture import captured, prove_static
from mod_export.graph.nodes import graph_from_bytes, static_shape
from mod_export.graph.onnx_export import assert_capacity, check_model, onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites, needs_rewrite, stored_forms
from mod_export.graph.sites import RoutingSite
from mod_export.graph.weights import (
    BELOW,
    NO_FORMS,
    Form,
    Forms,
    WeightsFile,
    bind_weights,
    state_of,
    write_weights,
)
from mod_export.measure.cost import cost_row
from mod_export.measure.decode import step_bytes as step_bytes_of
from mod_export.model.model import Model, stored_state
from mod_export.pipeline.build import Build
from mod_export.pipeline.calibration import in_four_bits
from mod_export.rows.base import fields_of_graph
from mod_export.rows.cost import CostRow
from mod_export.types import (
    DTYPES,
    KINDS,
    QUANTIZED,
    Bucket,
    DType,
    Graph,
    ModelKind,
    Site,
    site_from_text,
    weights_dtypes,
)

SHOWN = 4
MOST_KEPT = 32
"""Number of fresh portable graphs kept in memory. They hold no weights, and an export takes seconds."""
_kept: dict[str, bytes] = {}


def capture(build: Build) -> None:
    """Proves that every bucket is one static graph.

    Raises:
        BuildError: no bucket is one static graph.
    """
    for graph in _wanted(build):
        inputs = {**build.source_inputs(graph), **build.versions("torch")}
        with build.attempt("capture", fields_of_graph(graph)):
            build.step(f"capture/{graph.stem}", inputs, [], partial(_prove, build, graph))
    build.require(_wanted(build))


def _wanted(build: Build) -> Iterator[Graph]:
    """Yields the portable graphs that can still be made when their turn comes: the model's first."""
    return (graph for graph in build.plan.graphs if build.is_wanted(fields_of_graph(graph)))


def _prove(build: Build, graph: Graph, paths: Sequence[Path]) -> dict[str, int]:
    source = build.source(graph)
    return asdict(prove_static(source.module, source.examples, graph.stem))


def onnx(build: Build) -> None:
    """Writes the weights files and the portable graph of every model, role and bucket.

    Raises:
        BuildError: there is no graph of the model.
    """
    kinds = {build.facts[kind].weights: kind for kind in reversed(KINDS) if kind in build.facts}.values()
    wanted = {"float32", *(variant.dtype for _, variant, _ in build.plan.engines())}
    dtypes = [dtype for dtype in DTYPES if dtype in wanted]
    for kind in kinds:
        for dtype in dtypes:
            if dtype not in QUANTIZED:
                _write_weights(build, kind, dtype)
    for graph in _wanted(build):
        with build.attempt("onnx", fields_of_graph(graph)):
            _portable_step(build, graph)
    build.require(build.graphs)
    # The graphs say which weights can be quantized.
    for kind in kinds:
        # If both models read the file, both fail with it.
        only = kind if len(kinds) > 1 else None
        for dtype in dtypes:
            if dtype in QUANTIZED:
                with build.attempt("onnx", {"dtype": dtype, "model": only}):
                    _write_weights(build, kind, dtype, _forms(build, kind, dtype))
    if isinstance(build.generation, GenerationFacts):
        build.generation = _with_stored_bytes(build, build.generation, dtypes)


def _portable_step(build: Build, graph: Graph) -> None:
    inputs = {
        **build.source_inputs(graph),
        "weights": build.hash_of(build.weights_path(graph.model, "float32")),
        "versions": versions(*EXPORTERS),
    }
    step = build.step(f"graph/{graph.stem}", inputs, [graph.path], partial(_export, build, graph))
    k_by_layer = {site_from_text(name): k for name, k in step.result["k_by_layer"].items()}
    results = {name: tuple(shape) for name, shape in step.result["results"].items()}
    ports = {name: (dtype, tuple(shape)) for name, (dtype, shape) in step.result["inputs"].items()}
    build.graphs.append(replace(graph, k_by_layer=k_by_layer, inputs=ports, results=results))
    if step.result["cost"] is not None:
        build.add([CostRow.model_validate(step.result["cost"])])


def _forms(build: Build, kind: ModelKind, dtype: DType) -> Forms:
    """Returns the forms in which the graphs of one weights file read each weight."""
    by_name: dict[str, set[Form]] = {}
    for builder, variant, graph in build.planned():
        if variant.dtype == dtype and build.facts[graph.model].weights == build.facts[kind].weights:
            model = ir.load(build.root / graph.path)
            try:
                stored = stored_forms(model, graph.limits(builder.limits_here()), dtype)
            except (GraphError, LimitError):  # The stage `passes` reports it later, for this graph alone.
                continue
            for name, forms in stored.items():
                by_name.setdefault(name, set()).update(forms)
    return by_name


def _with_stored_bytes(build: Build, facts: GenerationFacts, dtypes: Sequence[DType]) -> GenerationFacts:
    """Adds the bytes that a step reads in other dtypes than float32; for int8 and int4, these are the sizes in their
    weights files.
    """
    step_bytes = {bucket: dict(by_dtype) for bucket, by_dtype in facts.step_bytes.items()}
    for bucket, dtype in itertools.product(step_bytes, dtypes):
        kinds = [kind for kind in build.facts if build.weights_path(kind, dtype) in build.weight_digests]
        if dtype not in QUANTIZED:
            wide = step_bytes[bucket]["float32"]
            step_bytes[bucket][dtype] = {kind: sizes.stored_in(dtype) for kind, sizes in wide.items()}
            continue
        files = {kind: WeightsFile.open(build.root / build.weights_path(kind, dtype)) for kind in kinds}
        models = {kind: build.generating(kind) for kind in files}
        stored = {kind: file.quantized_bytes(models[kind].whole_rows.weights) for kind, file in files.items()}
        step_bytes[bucket][dtype] = {
            kind: step_bytes_of(models[kind], Bucket.named(bucket), stored[kind]) for kind in files
        }
    return facts.model_copy(update={"step_bytes": step_bytes})


def _export(build: Build, graph: Graph, paths: Sequence[Path]) -> dict[str, Any]:
    source = build.source(graph)
    model, applied, sites = _portable(build, graph)
    save_graph(build, model, graph, paths[0])
    cost = cost_row(model, graph.model, graph.bucket) if not graph.writes_text else None
    return {
        "passes": applied,
        "k_by_layer": {str(site.name): site.k for site in sites},
        "inputs": {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in zip(source.inputs, source.examples[0], strict=True)
        },
        "results": {value.name: static_shape(value) for value in model.graph.outputs if value.name in source.outputs},
        "cost": None if cost is None else cost.model_dump(mode="json"),
    }


def _portable(build: Build, graph: Graph) -> tuple[ir.Model, dict[str, int], tuple[RoutingSite, ...]]:
    """Returns the portable graph with weights that have no values, the applied rewrites, and the routing sites.

    Raises:
        BuildError: it cannot be exported, or does not route as the model declares.
    """
    source = build.source(graph)
    # In strict mode conditions are captured with the rest. Otherwise torch compiles each alone, which takes longer.
    capture = captured(source.module, source.examples[0], graph.stem, strict=source.conditions)
    model = onnx_from_captured(capture, state_of(source.module), source.inputs, source.outputs)
    # Rewrites read the values of small buffers, such as a causal mask.
    _bind(build, model, graph)
    applied = apply_rewrites(model, PORTABLE, "float32")
    _check_ports(graph, model, source.inputs, [*source.outputs, *capture.routed])
    if not graph.writes_text:
        k_by_layer = {site.name: site.k for site in capture.sites}
        _check_routing(build.model(graph.model), graph, k_by_layer)
        assert_capacity(model, graph.bucket, k_by_layer, source.outputs)
    return model, applied, capture.sites


def _check_routing(model: Model, graph: Graph, k_by_layer: Mapping[Site, int]) -> None:
    """Checks that a model routes as it declares, and that no token skips anything in a dense baseline.

    Raises:
        GraphError: the captured program has other routing sites, or other numbers of slots.
    """
    declared = model.k_by_layer(graph.bucket.seq)
    if declared is not None:
        expected = {site: k for site, k in declared.items() if k}
        if k_by_layer != expected:
            raise GraphError(f"{graph.path}: marks the routing sites {k_by_layer}, and the spec declares {expected}")
    elif graph.model == "dense":
        skipping = [f"{site} selects {k}" for site, k in k_by_layer.items() if k < graph.bucket.seq]
        if skipping:
            raise GraphError(
                f"{graph.path}: in the baseline {', '.join(skipping)} of {graph.bucket.seq} tokens; all must run"
            )


def _check_ports(graph: Graph, model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Checks names and sizes of inputs and outputs: a runtime finds them by name and allocates them by size.

    Raises:
        GraphError: an input or output is missing, or has no fixed size.
    """
    names = [value.name for value in model.graph.outputs]
    if names != list(outputs) or not {value.name for value in model.graph.inputs} <= set(inputs):
        raise GraphError(f"{graph.path}: has the outputs {', '.join(map(str, names))}, not {', '.join(outputs)}")
    loose = [value.name for value in model.graph.outputs if value.shape is None or not value.shape.is_static()]
    if loose:
        raise GraphError(f"{graph.path}: {', '.join(map(str, loose))} has no fixed size; write the model without one")


def _bind(build: Build, model: ir.Model, graph: Graph) -> None:
    """Makes the weights of a graph refer to the weights files of the folder.

    Raises:
        GraphError: a weights file does not hold one of them.
        BuildFolderError: a weights file is missing or unreadable.
    """
    paths = [build.weights_path(graph.model, dtype) for dtype in weights_dtypes(graph.dtype)]
    bind_weights(model, [WeightsFile.open(build.root / path) for path in paths], build.root / "graphs")
    unbound = [name for name, value in model.graph.initializers.items() if value.const_value is None]
    if unbound:
        raise GraphError(f"{graph.path}: no value for {', '.join(unbound[:SHOWN])} in {', '.join(paths)}")


def _bytes(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def save_graph(build: Build, model: ir.Model, graph: Graph, destination: Path) -> None:
    """Binds the weights, checks the graph with onnx.checker in the folder of its weights, and writes it."""
    for dtype in weights_dtypes(graph.dtype):
        _have_one_name(build.root / build.weights_path(graph.model, dtype))
    _bind(build, model, graph)
    data = _bytes(model)
    # External data must lie beside the graph, so the check runs on a copy there.
    probe = build.root / "graphs" / f".partial-{destination.name}"
    try:
        probe.write_bytes(data)
        check_model(str(probe))
    finally:
        probe.unlink(missing_ok=True)
    destination.write_bytes(data)


def _have_one_name(path: Path) -> None:
    """Replaces a file that has other names, as in a copy of hard links (`cp -al`), by a copy of its own, because
    onnx.checker refuses such files.
    """
    if path.is_file() and path.stat().st_nlink > 1:
        partial = path.with_name(f".partial-{path.name}")
        shutil.copyfile(path, partial)
        partial.replace(path)


def fresh_graph(build: Build, graph: Graph) -> bytes:
    """Returns the bytes of a graph as a build would write it now.

    Raises:
        BuildError: the graph cannot be exported, or the weights files do not hold its weights.
        BuildFolderError: a weights file is missing or unreadable.
    """
    portable = replace(graph, dtype="float32", target=None)
    weights = build.weights_path(graph.model, "float32")
    entries = WeightsFile.open(build.root / weights).entries
    # The key covers the model itself: two folders may have the same manifest entries for different programs.
    spec = dict(build.model(graph.model).spec)
    key = json.dumps([build.source_inputs(graph), spec, weights, sorted(entries.items())], default=str)
    if key not in _kept:
        model, _, _ = _portable(build, portable)
        _bind(build, model, portable)
        _kept[key] = _bytes(model)
        if len(_kept) > MOST_KEPT:
            del _kept[next(iter(_kept))]
    limits = PORTABLE if graph.target is None else graph.limits(ENGINES[graph.target].limits)
    if graph.target is None or not needs_rewrite(limits, graph.dtype):
        return _kept[key]
    model = graph_from_bytes(_kept[key])
    _bind(build, model, portable)
    apply_rewrites(model, limits, graph.dtype)
    _bind(build, model, graph)
    return _bytes(model)


def _write_weights(build: Build, kind: ModelKind, dtype: DType, forms: Forms = NO_FORMS) -> None:
    path = build.weights_path(kind, dtype)

    tensors = stored_state(build.plan.models[kind])
    in_int4 = {part for name, weight_forms in forms.items() if "int4" in weight_forms for part in name.split(BELOW)}

    def make(paths: Sequence[Path]) -> dict[str, str]:
        # Digests are taken from the tensors in memory: those of the file itself would match even a file that is wrong.
        rounded = in_four_bits(build, kind, {name: tensors[name] for name in in_int4}) if in_int4 else None
        return write_weights(paths[0], tensors, dtype, forms, rounded)

    stored = {
        name: sorted(weight_forms) for name, weight_forms in sorted(forms.items()) if set(weight_forms) != {"float"}
    }
    inputs = {**build.identity(kind), "dtype": dtype, "forms": stored, **build.versions()}
    if in_int4:
        inputs |= {"text": build.text_inputs, "buckets": [bucket.name for bucket in build.buckets]}
    step = build.step(f"weights/{Path(path).stem}", inputs, [path], make)
    build.weight_digests[path] = step.result
