"""Checks a graph against a target's limits before a parser sees it. Messages name the layer and a way out."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir

from mod_export.errors import GraphError, LimitError
from mod_export.graph.nodes import (
    ROWS_THAT_RUN,
    branches_of,
    constant_array,
    graph_from_file,
    is_standard,
    label_of,
    static_shape,
)
from mod_export.types import DType, TargetLimits

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
DATA_DEPENDENT = ("Compress", "NonMaxSuppression", "NonZero", "Unique")
SCATTERS = ("ScatterND", "ScatterElements")
DTYPES: dict[ir.DataType | None, DType] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


def check_limits(model: ir.Model, limits: TargetLimits, dtype: DType) -> None:
    """Checks that a graph is within the limits of its target, before a parser sees it. `dtype` only appears in the
    message.

    Raises:
        LimitError: the graph breaks a limit. The message lists every problem, one per line.
    """
    problems = list(_model_problems(model, limits))
    for node in model.graph.all_nodes():
        problems += [
            f"{label_of(node)}: {problem}" for check in NODE_CHECKS if (problem := check(node, limits)) is not None
        ]
    if problems:
        raise LimitError("\n".join(f"{limits.name} cannot take this {dtype} graph: {problem}" for problem in problems))


def _model_problems(model: ir.Model, limits: TargetLimits) -> Iterator[str]:
    opset = max(model.opset_imports.get(domain, 0) for domain in STANDARD_DOMAINS)
    if opset > limits.max_opset:
        yield f"it is of opset {opset}, the highest allowed is {limits.max_opset}; export it with a lower opset"
    for value in model.graph.inputs:
        if value.shape is None or not value.shape.is_static():
            yield (
                f"input {value.name} has the shape {value.shape}, expected fixed sizes; export one graph for each "
                "bucket without dynamic_shapes"
            )


def _foreign(node: ir.Node, limits: TargetLimits) -> str | None:
    if node.domain in STANDARD_DOMAINS | limits.extra_domains:
        return None
    allowed = " and ".join(["standard ONNX", *sorted(limits.extra_domains)])
    return (
        f"the operator {node.domain}::{node.op_type} is not allowed, only {allowed}; export without optimisations that "
        "belong to another runtime"
    )


def _nested(node: ir.Node, limits: TargetLimits) -> str | None:
    if not branches_of(node) or (limits.branches and is_standard(node, "If")):
        return None
    return (
        f"{node.op_type} holds a graph of its own, expected one static graph; write the branch or loop of the model "
        "without tensors in its condition"
    )


def _data_dependent(node: ir.Node, limits: TargetLimits) -> str | None:
    if not is_standard(node, *DATA_DEPENDENT) or all(_has_known_size(value, limits) for value in node.outputs):
        return None
    return (
        f"the size of what {node.op_type} returns depends on the data, expected fixed sizes; take a fixed number of "
        "tokens with topk and gather instead of a boolean mask"
    )


def _dynamic(node: ir.Node, limits: TargetLimits) -> str | None:
    used = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    dynamic = [value for value in used if not _has_known_size(value, limits)]
    if not dynamic or is_standard(node, *DATA_DEPENDENT):
        return None
    return (
        f"{node.op_type} returns {dynamic[0].name} of shape {dynamic[0].shape}, expected fixed sizes; export one graph "
        "for each bucket without dynamic_shapes"
    )


def _has_known_size(value: ir.Value, limits: TargetLimits) -> bool:
    """Whether all axes of a value have a fixed size, or that of the rows that run where they are gathered."""
    if value.shape is None:
        return False
    dynamic = {axis.value for axis in value.shape if isinstance(axis, ir.SymbolicDim)}
    return dynamic <= ({ROWS_THAT_RUN} if limits.gathered_rows else set())


def _topk(node: ir.Node, limits: TargetLimits) -> str | None:
    if not is_standard(node, "TopK"):
        return None
    k = constant_array(node.inputs[1])
    if k is None:
        return "K of this TopK is computed while the graph runs, expected a constant; derive k from the static length"
    if limits.topk_limit is None or k.item() <= limits.topk_limit:
        return None
    return (
        f"TopK takes K = {k.item()}, the limit is {limits.topk_limit}; lower the capacity or the sequence length, or "
        "build another target"
    )


def _scatter(node: ir.Node, limits: TargetLimits) -> str | None:
    reduction = node.attributes.get_string("reduction", "none") if is_standard(node, *SCATTERS) else "none"
    if limits.scatter_reduction or reduction == "none":
        return None
    return (
        f"{node.op_type} reduces by {reduction!r}, only reduction 'none' is allowed; gather, compute, and write the "
        "result back with index_put(accumulate=False)"
    )


def _attention(node: ir.Node, limits: TargetLimits) -> str | None:
    query = node.inputs[0] if is_standard(node, "Attention") else None
    if query is None:
        return None
    if DTYPES.get(query.dtype) not in limits.attention_dtypes:
        allowed = ", ".join(sorted(limits.attention_dtypes)) or "no dtype"
        return (
            f"the Attention operator runs on {query.dtype}, allowed is {allowed}; decompose it into MatMul and "
            "Softmax, or build another dtype"
        )
    shape = static_shape(query)
    if limits.attention_kernels is None or shape is None:
        return None
    problem = limits.attention_kernels.problem(shape)
    return f"the Attention operator has {problem}; decompose it into MatMul and Softmax" if problem else None


NODE_CHECKS: tuple[Callable[[ir.Node, TargetLimits], str | None], ...] = (
    _foreign,
    _nested,
    _data_dependent,
    _dynamic,
    _topk,
    _scatter,
    _attention,
)


def check_external_data(path: Path) -> None:
    """Checks where the external weights of an ONNX file are stored, because parsers treat links differently.

    TensorRT's parser follows a link out of the folder, ONNX Runtime refuses some kinds of links, and onnx refuses all
    links. All of them accept a regular file beside the graph that contains the bytes that the graph refers to.

    Raises:
        GraphError: the file is no ONNX graph, or a weight is stored elsewhere, in a link, or beyond the file's end.
    """
    for tensor in _external_tensors(graph_from_file(path)):
        problem = _location_problem(path.parent, tensor)
        if problem is not None:
            raise GraphError(
                f"{path.name}: the weight {tensor.name} {problem}; expected a regular file beside the graph that holds "
                "all of it; build again"
            )


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in model.graphs():
        tensors = [value.const_value for value in graph.initializers.values()]
        for node in graph:
            tensors += [item.as_tensor() for item in node.attributes.values() if item.type == ir.AttributeType.TENSOR]
        yield from (tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _location_problem(folder: Path, tensor: ir.ExternalTensor) -> str | None:
    location = str(tensor.location)
    if not location or location in (".", "..") or "/" in location or "\\" in location:
        return f"lies in {location!r}, which is no plain file name"
    try:
        status = (folder / location).lstat()
    except OSError as error:
        return f"lies in {location}, which cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return f"lies in {location}, which is a link or no regular file"
    offset, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length != tensor.nbytes or offset + length > status.st_size:
        return (
            f"needs {tensor.nbytes} bytes and is said to be bytes {offset} to {offset + length} of {location}, which "
            f"has {status.st_size}"
        )
    return None
