"""A fresh export of the model at hand: what every graph of the build folder must be, node by node.

Exporting is deterministic: the same spec, bucket and versions give the same bytes, whatever the weights' values. So a
graph that differs from a fresh export has been changed since, or was never made from this model, and if the change is
too small to be seen in any output, it is seen here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from mod_export.engines import ENGINES
from mod_export.errors import GraphError
from mod_export.export.capture import captured_module
from mod_export.export.nodes import graph_from_bytes, graph_from_file, module_of
from mod_export.export.onnx_export import INPUTS, onnx_from_captured
from mod_export.export.passes import PORTABLE, needs_rewrite, run_passes
from mod_export.export.weights import WeightsFile, bind_weights, files_for, state_of
from mod_export.results.structure import StructureRow
from mod_export.types import PRIMARY, Graph
from mod_export.validate.reference import Reference
from mod_export.validate.structure import structure_row

__all__ = ["FreshGraphs", "structure_of_export"]

FRESH = ("what a fresh export gives",)
SHOWN = 4


MOST_KEPT = 32
"""Portable graphs that a process keeps: they are small without weights, and an export takes seconds."""
_kept: OrderedDict[str, bytes] = OrderedDict()


class FreshGraphs:
    """Fresh exports for one build folder. The last MOST_KEPT portable graphs are kept for all folders of a process."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def graph(self, graph: Graph, weights: str, reference: Reference) -> bytes:
        """The graph as a build would write it now, with references to the weights files of the folder.

        Args:
            graph: which one.
            weights: a weights file of its model, such as graphs/weights-float32.data.
            reference: of its model.

        Raises:
            BuildError: it cannot be exported, or the weights files have no place for it.
            BuildFolderError: a weights file is missing, or not one.
        """
        start = weights.rpartition("-")[0]
        portable = self._portable(graph, f"{start}-float32.data", reference)
        dialect = PORTABLE if graph.target is None else graph.dialect(ENGINES[graph.target].dialect)
        if graph.target is None or not needs_rewrite(dialect, graph.dtype):
            return portable
        model = graph_from_bytes(portable)
        self._bind(model, [f"{start}-float32.data"])
        run_passes(model, dialect, graph.dtype)
        self._bind(model, [f"{start}-{dtype}.data" for dtype in files_for(graph.dtype)])
        return ir.to_proto(model).SerializeToString()

    def _portable(self, graph: Graph, weights: str, reference: Reference) -> bytes:
        places = WeightsFile.open(self._root / weights).entries
        about = [reference.loaded.spec, graph.model, graph.bucket.name, graph.outputs, weights, sorted(places.items())]
        key = json.dumps(about, default=str)
        if key not in _kept:
            skeleton = reference.loaded.skeleton(graph.outputs).to("meta")
            captured = captured_module(skeleton, graph.bucket, graph.model)
            model = onnx_from_captured(captured, state_of(skeleton), INPUTS, [PRIMARY[graph.outputs]])
            run_passes(model, PORTABLE, "float32")
            self._bind(model, [weights])
            _kept[key] = ir.to_proto(model).SerializeToString()
            if len(_kept) > MOST_KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        return _kept[key]

    def _bind(self, model: ir.Model, weights: list[str]) -> None:
        files = [WeightsFile.open(self._root / path) for path in weights]
        bind_weights(model, files, self._root / "graphs")
        left = [name for name, value in model.graph.initializers.items() if value.const_value is None]
        if left:
            raise GraphError(f"{', '.join(weights)}: no place for {', '.join(left[:SHOWN])} of a fresh export")


def structure_of_export(root: Path, path: str, fresh: bytes) -> StructureRow:
    """Whether an ONNX file is what a fresh export of its model gives, byte for byte; and if not, what differs.

    Args:
        root: the build folder.
        path: of the file.
        fresh: from `FreshGraphs`.
    """
    file = root / path
    if file.is_file() and file.read_bytes() == fresh:
        return structure_row(path, FRESH, [])
    try:
        found, expected = (_entries(ir.to_proto(one)) for one in (graph_from_file(file), graph_from_bytes(fresh)))
    except GraphError as error:
        return structure_row(path, FRESH, [str(error)])
    # Functions, sparse weights, a second definition of a name: what cannot be named here is still another file.
    differences = _differences(found, expected) or ["bytes that are no node, input, output or initializer"]
    reasons = [f"not what a fresh export gives: {difference}" for difference in differences]
    return structure_row(path, FRESH, reasons)


def _entries(proto: onnx.ModelProto) -> dict[str, tuple[str, ir.Node | None]]:
    """Everything a graph holds: where -> (what it is, the node if it is one)."""
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
    found: Mapping[str, tuple[str, ir.Node | None]], expected: Mapping[str, tuple[str, ir.Node | None]]
) -> list[str]:
    """The first few entries that one graph has and the other has not, or has differently."""
    listed = []
    for name in dict.fromkeys((*found, *expected)):
        if found.get(name, ("",))[0] == expected.get(name, ("",))[0]:
            continue
        what = "added" if name not in expected else "missing" if name not in found else "changed"
        node = (found.get(name) or expected[name])[1]
        listed.append(f"{name} {what}" + (f" in {module_of(node)}" if node is not None else ""))
    # Nodes first: they say where.
    listed.sort(key=lambda text: not text.startswith("node "))
    more = [f"and {len(listed) - SHOWN} more differences"] if len(listed) > SHOWN else []
    return listed[:SHOWN] + more
