"""Inspects files without running them: every weight is the checkpoint's, every shape is what the spec says.

One element of one weight can be wrong by a percent and move no logit by more than rounding. So weights are judged by
their bytes and not by their effect. The bytes of each tensor are compared with the fingerprint of the checkpoint's own
tensor, which was taken when the folder was built. Each reference to a weight in a graph is compared with the place of
that tensor in its weights file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from mod_export.engines import ENGINES
from mod_export.errors import BuildError, BuildFolderError, GraphError
from mod_export.folder.files import FileEntry, changed_file
from mod_export.graph.nodes import graph_from_bytes, graph_from_file, is_standard, label_of, module_of, static_shape
from mod_export.graph.rewrites import PORTABLE
from mod_export.graph.rewrites.cast_floats import NARROW
from mod_export.graph.target import check_limits
from mod_export.graph.weights import ONNX_TYPES, WeightsFile, digests_of_file, is_in_graph, is_of_quantized
from mod_export.model.program_files import changed_files
from mod_export.rows.correctness import StructureRow
from mod_export.types import Graph, ModelKind, TargetLimits, routed_output

SHOWN = 4
FRESH = ("what a fresh export gives",)


def structure_of_file(root: Path, path: str, entry: FileEntry) -> StructureRow:
    """Checks that a file is the one that was built; `entry` is its entry in the manifest."""
    problem = changed_file(root, path, entry)
    return _row(path, ("the bytes that were built",), [problem] if problem else [])


def structure_of_programs(root: Path, kind: ModelKind, spec: Mapping[str, Any]) -> Iterator[StructureRow]:
    """Checks that the files from which the reference of a captured model is rebuilt hold what was captured; `spec` is
    the one in the manifest.
    """
    for path, problem in changed_files(root, kind, spec).items():
        yield _row(path, ("what was captured",), [problem] if problem else [])


def structure_of_weights(root: Path, path: str, expected: Mapping[str, str]) -> StructureRow:
    """Compares every tensor of a weights file with its fingerprint. `expected` maps its name to the SHA-256 of the
    checkpoint's tensor in the dtype of the file, taken before the file was written.
    """
    try:
        digests = digests_of_file(root / path)
    except BuildFolderError as error:
        return _row(path, ("tensors",), [str(error)])
    problems = {
        "not the checkpoint's values": [
            name for name in expected if digests.get(name, expected[name]) != expected[name]
        ],
        "missing": [name for name in expected if name not in digests],
        "not a tensor of the checkpoint": [name for name in digests if name not in expected],
    }
    reasons = [f"{_listed(names)}: {problem}" for problem, names in problems.items() if names]
    rounded = [name for name in expected if is_of_quantized(name)]
    checked = [f"{len(expected) - len(rounded)} tensors are the checkpoint's, bit for bit"]
    if rounded:
        checked.append(f"{len(rounded)} are its weights, rounded to 8 or 4 bits, their scales and zero points")
    return _row(path, tuple(checked), reasons)


def structure_of_graph(root: Path, path: str, graph: Graph, weights: Collection[str]) -> StructureRow:
    """Checks weights, outputs, operators and precision of an ONNX file, possibly an engine, that should hold `graph`.

    `weights` are the folder's weights files whose tensors have fingerprints.
    """
    try:
        model = graph_from_file(root / path)
        reasons = [
            # Outputs of prefill and decode graphs follow from the cache, and were checked when they were exported.
            *(_outputs(model, graph) if not graph.writes_text else ()),
            *_references(model, root, weights),
            *_precision(model, graph),
            *_operators(model, graph),
            *_hidden(onnx.load(root / path, load_external_data=False)),
        ]
    except (GraphError, BuildFolderError) as error:
        reasons = [str(error)]
    outputs = ("outputs",) if not graph.writes_text else ()
    checked = (*outputs, "every weight is a reference to the checkpoint's tensor", "operators", "precision")
    return _row(path, checked, list(dict.fromkeys(reasons)))


def _outputs(model: ir.Model, graph: Graph) -> Iterator[str]:
    shapes = {value.name: static_shape(value) for value in model.graph.outputs}
    routed = {routed_output(site): (graph.bucket.batch, k) for site, k in graph.k_by_layer.items() if k}
    expected = {**graph.results, **routed}
    for name, shape in expected.items():
        if name not in shapes:
            yield f"no output {name}"
        elif name in routed and (shapes[name] or ())[1:] == shape[1:]:
            continue  # A model may join the rows of a batch, or split each row, before it selects.
        elif shapes[name] != shape:
            yield f"output {name} has shape {shapes[name]}, expected {shape}"
    yield from (f"output {name} is not one of this model" for name in shapes if name not in expected)


def _hidden(proto: onnx.ModelProto) -> Iterator[str]:
    """Reports content that runtimes may read although it is not visible in the graph itself."""
    yield from (
        f"holds a function {function.name}, which could stand in for an operator" for function in proto.functions
    )
    yield from (
        f"{tensor.values.name}: a sparse initializer; weights are dense" for tensor in proto.graph.sparse_initializer
    )
    names = Counter(tensor.name for tensor in proto.graph.initializer)
    yield from (f"{name}: defined {count} times" for name, count in names.items() if count > 1)


def _references(model: ir.Model, root: Path, weights: Collection[str]) -> Iterator[str]:
    """Checks that every initializer with the name of a weight is a reference to exactly that tensor."""
    known = {Path(path).name: root / path for path in weights}
    files = {name: WeightsFile.open(path) for name, path in known.items()}
    tensors = {name: (file.name, *entry) for file in files.values() for name, entry in file.entries.items()}
    for name, value in model.graph.initializers.items():
        shape, tensor = static_shape(value), value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            if name in tensors and not _has_value_of(value, files.values(), root):
                yield f"{name}: a value of its own in the graph instead of the shared weights"
            continue
        file = files.get(str(tensor.location))
        entry = None if file is None else file.entries.get(name)
        if file is None:
            yield f"{name}: refers to {tensor.location}, which is no weights file of this folder"
            continue
        if entry is None:
            yield f"{name}: refers to {tensor.location}, which has no tensor of this name"
            continue
        stored, stored_shape, offset, length = entry
        if (tensor.offset, tensor.length) != (offset, length):
            actual = next((n for n, e in file.entries.items() if e[2] == tensor.offset), "other bytes")
            yield f"{name}: refers to {actual} in {tensor.location}"
        elif (ONNX_TYPES.get(stored), stored_shape) != (value.dtype and value.dtype.name, shape):
            yield f"{name}: is {value.dtype} {shape} in the graph and {stored} {stored_shape} in {tensor.location}"


def _has_value_of(value: ir.Value, files: Iterable[WeightsFile], root: Path) -> bool:
    """Whether the value is a small constant that is stored in the graph itself and equals that of a weights file."""
    shape = static_shape(value)
    if value.const_value is None or value.dtype is None or shape is None or not is_in_graph(value.dtype, shape):
        return False
    stored = [(file.name, *file.entries[str(value.name)]) for file in files if str(value.name) in file.entries]
    return any(
        stored_shape == shape
        and ir.ExternalTensor(
            name, offset, length, value.dtype, shape=ir.Shape(shape), name=str(value.name), base_dir=root / "graphs"
        ).tobytes()
        == value.const_value.tobytes()
        for name, _, stored_shape, offset, length in stored
    )


def _precision(model: ir.Model, graph: Graph) -> Iterator[str]:
    """Checks that no float is narrower than the graph's, and that scores are compared in float32.

    Float64 is allowed, because a model may use it, for example for angles of positions. Wrong uses show in a comparison
    with a fresh export.
    """
    floats = _limits_of(graph).floats(graph.dtype)
    allowed = {ir.DataType.DOUBLE, ir.DataType.FLOAT, NARROW.get(floats, ir.DataType.FLOAT)}
    for node in model.graph.all_nodes():
        output_dtypes = {value.dtype for value in node.outputs if value.dtype is not None}
        if is_standard(node, "Cast"):
            output_dtypes.add(ir.DataType(node.attributes.get_int("to", 0)))
        wrong = {dtype for dtype in output_dtypes if dtype.is_floating_point()} - allowed
        if wrong:
            listed = _listed(sorted(map(str, wrong)))
            yield f"{label_of(node)}: {node.op_type} computes in {listed}, this graph is {graph.dtype}"
        scores = node.inputs[0] if is_standard(node, "TopK") else None
        if scores is not None and scores.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            yield f"{label_of(node)}: TopK compares {scores.dtype} scores, expected float32"


def _operators(model: ir.Model, graph: Graph) -> Sequence[str]:
    try:
        check_limits(model, _limits_of(graph), graph.dtype)
    except BuildError as error:
        return str(error).splitlines()
    return []


def _limits_of(graph: Graph) -> TargetLimits:
    """Returns the limits of a graph."""
    # Graphs that write text use conditions to skip work, for every target.
    portable = replace(PORTABLE, branches=graph.writes_text)
    return portable if graph.target is None else graph.limits(ENGINES[graph.target].limits)


def _row(path: str, checked: tuple[str, ...], reasons: Sequence[str]) -> StructureRow:
    return StructureRow(path=path, checked=checked, passed=not reasons, reasons=tuple(reasons))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def structure_of_export(root: Path, path: str, fresh: bytes) -> StructureRow:
    """Checks that an ONNX file equals a fresh export of its model, byte for byte, and names the differences.

    Exporting is deterministic: the same spec, bucket and versions give the same bytes, whatever the weights' values. So
    a graph that differs was changed later or was not made from this model. This also finds changes that are too small
    to be visible in any output.
    """
    file = root / path
    if file.is_file() and file.read_bytes() == fresh:
        return _row(path, FRESH, [])
    try:
        actual, expected = (_entries(ir.to_proto(graph)) for graph in (graph_from_file(file), graph_from_bytes(fresh)))
    except GraphError as error:
        return _row(path, FRESH, [str(error)])
    # Differences in functions, sparse weights or duplicate names have no entry, but the file is still a different one.
    differences = _differences(actual, expected) or ["bytes that are no node, input, output or initializer"]
    reasons = [f"not what a fresh export gives: {difference}" for difference in differences]
    return _row(path, FRESH, reasons)


def _entries(proto: onnx.ModelProto) -> dict[str, tuple[str, ir.Node | None]]:
    """Returns everything that a graph holds, as place -> (content, and the node if it is one)."""
    model = ir.from_proto(proto)
    entries: dict[str, tuple[str, ir.Node | None]] = {"opset": (str(dict(model.opset_imports)), None)}
    for value in (*proto.graph.input, *proto.graph.output):
        entries[f"input or output {value.name}"] = (value.SerializeToString(deterministic=True).hex(), None)
    for tensor in proto.graph.initializer:
        entries[f"initializer {tensor.name}"] = (tensor.SerializeToString(deterministic=True).hex(), None)
    for node, written in zip(model.graph, proto.graph.node, strict=True):
        written.ClearField("metadata_props")
        entries[f"node {node.name or node.op_type}"] = (written.SerializeToString(deterministic=True).hex(), node)
    return entries


def _differences(
    actual: Mapping[str, tuple[str, ir.Node | None]], expected: Mapping[str, tuple[str, ir.Node | None]]
) -> list[str]:
    """Lists the first few entries that were added, are missing, or have changed."""
    listed = []
    for name in dict.fromkeys((*actual, *expected)):
        if actual.get(name, ("",))[0] == expected.get(name, ("",))[0]:
            continue
        change = "added" if name not in expected else "missing" if name not in actual else "changed"
        node = (actual.get(name) or expected[name])[1]
        listed.append(f"{name} {change}" + (f" in {module_of(node)}" if node is not None else ""))
    # Nodes first, because they show the place.
    listed.sort(key=lambda text: not text.startswith("node "))
    more = [f"and {len(listed) - SHOWN} more differences"] if len(listed) > SHOWN else []
    return listed[:SHOWN] + more
