"""Build folders as an engine's builder gets them: the graph of its target, next to its weights."""

from pathlib import Path

import onnx_ir as ir
import pytest
from captures import ports
from small_graphs import make_model, parsed, portable_graph

from mod_export.engines.protocol import EngineJob
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.target import check_limits
from mod_export.graph.weights import (
    NO_FORMS,
    WeightsFile,
    bind_weights,
    forms_of,
    state_of,
    write_weights,
)
from mod_export.types import QUANTIZED, Bucket, DType, Graph, TargetLimits, weights_dtypes
from mod_models.spec import ModelSpec


def job_of(root: Path, graph: Graph) -> EngineJob:
    """Job of an engine that is built from the graph alone; a use of the program fails the test."""
    return EngineJob(root=root, graph=graph, program=lambda dtype: pytest.fail("this engine is built from the graph"))


def write_products(path: Path, weights: Path, names: list[str], shape: tuple[int, int]) -> None:
    """Writes a graph that multiplies rows of this shape by one square weight of a weights file after another."""
    rows, width = shape
    products = " ".join(f"x{i + 1} = MatMul (x{i}, {name})" for i, name in enumerate(names))
    inputs = ", ".join(f"float[{width},{width}] {name}" for name in names)
    model = parsed(f"g (float[{rows},{width}] x0, {inputs}) => (float[{rows},{width}] x{len(names)}) {{ {products} }}")
    for value in [model.graph.inputs.pop() for _ in names]:
        model.graph.initializers.add(value)
    bind_weights(model, [WeightsFile.open(weights)], path.parent)
    path.write_bytes(ir.to_proto(model).SerializeToString())


def unbound_graph(spec: ModelSpec, bucket: Bucket) -> ir.Model:
    """The portable graph of `make_model(spec)`; its weights have no values, because those are in files."""
    model = portable_graph(spec, bucket.batch, bucket.seq)
    for name in state_of(make_model(spec)).keys() & model.graph.initializers.keys():
        model.graph.initializers[name].const_value = None
    return model


def write_graph(root: Path, spec: ModelSpec, bucket: Bucket, limits: TargetLimits, dtype: DType) -> EngineJob:
    """Exports `make_model(spec)`, rewrites it for a target, checks it, and writes it and its weights to graphs/."""
    model = unbound_graph(spec, bucket)
    apply_rewrites(model, limits, dtype)
    check_limits(model, limits, dtype)
    folder = root / "graphs"
    folder.mkdir(exist_ok=True)
    files = []
    for stored_dtype in weights_dtypes(dtype):
        path = folder / f"weights-{stored_dtype}.data"
        forms = forms_of(model.graph.initializers) if dtype in QUANTIZED else NO_FORMS
        write_weights(path, state_of(make_model(spec)), stored_dtype, forms)
        files.append(WeightsFile.open(path))
    bind_weights(model, files, folder)
    kind = "dense" if spec.routing is None else "mod"
    name = f"graphs/{kind}-{bucket.name}.{dtype}.onnx"
    (root / name).write_bytes(ir.to_proto(model).SerializeToString())
    graph = Graph(
        path=name, model=kind, bucket=bucket, dtype=dtype, target=limits.name, k_by_layer=spec.k_by_layer(bucket.seq),
        **ports(bucket, spec.vocab_size),
    )  # fmt: skip
    return job_of(root, graph)
