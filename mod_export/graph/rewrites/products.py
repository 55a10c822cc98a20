"""Multiplies by weights as they are stored: float weights without a transposed copy, or integers of 8 or 4 bits.

PyTorch stores a linear layer's weight as (out, in), and ONNX MatMul wants (in, out), so an export transposes every
weight, and a runtime computes the transposed copies while loading: the whole model is in memory twice. ONNX Runtime's
FusedMatMul reads a weight as it is stored, so the weight stays in the file that all buckets map (`StoredWeights`).

`QuantizeWeights` uses forms that are fast on a CPU. The rounding of a token depends on no other token. For products of
many rows, int8 rounds activations to 8 bits too, with a scale and a zero point for each token that are computed at run
time, and multiplies integers. For products of few rows, as in a step of text, every weight is read once and little is
computed, so the number of bytes counts: both dtypes store blocks with one scale each, and the kernel of MatMulNBits
rounds activations block by block. This form has the smallest errors, and it is faster than float32 for many rows as
well. So int8 uses it everywhere for two kinds of weights: the head's, because no later layer averages its errors (it
has 8 bits in int4 too, and the shortest blocks in int8); and those that read the product of two activations, as in
SwiGLU, whose few large elements would use up the range of a token's scale. If the head's weight is the embedding table
too, both read blocks.

An engine that rounds activations itself (`TargetLimits.rounds_activations`) gets int8 weights as DequantizeLinear and
MatMul, the head's too, if some product of the graph has many rows. OpenVINO rounds groups of a token's numbers, so its
errors are close to those of blocks, at the speed of whole columns. In a large model steps use that form too: they take
half to two thirds of the time there, and all graphs share one copy of the weights (docs/LOG.md).

Shape legend: K the summed dimension, N columns of the result, R rows, V rows of a table, (B, T) token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    MICROSOFT,
    NodeWriter,
    before_views,
    graph_around,
    is_standard,
    label_of,
    made_by,
    only_reader,
    require_static_shape,
    static_shape,
    substitute,
)
from mod_export.graph.rewrites.cast_floats import float32_island
from mod_export.graph.weights import BELOW, BITS, BLOCKS, ONNX_TYPES, Form, quantized_tensors
from mod_export.types import QUANTIZED, DType, TargetLimits


class Product(NamedTuple):
    """x (..., K) times the transpose of a weight (N, K)."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    sizes: tuple[int, int]


def product_of(node: ir.Node) -> Product | None:
    """The product that a node computes; None if it computes no product with a transposed weight."""
    if is_standard(node, "MatMul"):
        x, right = node.inputs
        transpose = made_by(right, "Transpose")
        # (0, 1), the permutation that changes nothing, is excluded; no exporter writes it.
        if transpose is None or list(transpose.attributes.get_ints("perm", [1, 0])) != [1, 0]:
            return None
        weight = transpose.inputs[0]
    elif is_standard(node, "Gemm") and not any(value is not None for value in node.inputs[2:]):
        x, weight = node.inputs[:2]
        swapped = tuple(node.attributes.get_int(name, 0) for name in ("transA", "transB"))
        if node.attributes.get_float("alpha", 1.0) != 1 or swapped != (0, 1):
            return None
    else:
        return None
    shape = static_shape(weight)
    if x is None or weight is None or not weight.is_initializer() or shape is None or len(shape) != 2:
        return None
    return Product(node, x, weight, (shape[0], shape[1]))


# Float weights

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""The dtypes that FusedMatMul multiplies."""


class StoredWeights:
    """Replaces MatMul with a transposed weight by com.microsoft::FusedMatMul, which transposes while it packs.

    It also replaces a Gemm that does the same for rows without a batch, such as the head of a prompt's last token,
    because ONNX Runtime's sessions share packed weights only among operators of one type.
    """

    name: ClassVar[str] = "stored_weights"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.stored_weights

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        products = _float_products(model)
        for node, x, weight, _ in products:
            writer = NodeWriter(graph_around(node), node, "stored")
            writer.replace(writer.op("FusedMatMul", x, weight, domain=MICROSOFT, like=node.outputs[0], transB=1))
            model.opset_imports[MICROSOFT] = 1
        return len(products)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(product.node)} packs a copy of {product.weight.name}" for product in _float_products(model)]


def _float_products(model: ir.Model) -> list[Product]:
    """The products with transposed weights, also in branches, which use the weights of the whole graph."""
    products = [product for product in map(product_of, model.graph.all_nodes()) if product is not None]
    return [product for product in products if product.weight.dtype in FLOATS]


# Quantized weights

FLOAT = ir.DataType.FLOAT
VIEWS = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")
TAKEN = (*VIEWS, "Gather", "Slice")
"""Operators that may stand between a head and the logits that a graph returns: a graph that reads prompts returns only
the logits of the last token.
"""
MANY = 32
"""The fewest rows for which a product in integers is worth the rounding of its activations."""
LARGE = 2**29
"""A graph whose products read this many weights is of a large model."""
SMALLEST = 32
"""The fewest columns, or summed elements, with which a product gains anything; a router's projection has one column."""


class _Rounded(NamedTuple):
    """Rows that are rounded to integers: x = scale (x_int + below)."""

    x_int_RK: ir.Value
    scale_R1: ir.Value
    below_R1: ir.Value


class QuantizeWeights:
    """Replaces products with weights by MatMulIntegerToFloat, MatMulNBits, or DequantizeLinear and MatMul.

    The router's weight stays float32, because a selection compares scores (`cast_floats` has the same rule).
    """

    name: ClassVar[str] = "quantize_weights"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return dtype in QUANTIZED

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        quantizable = list(_quantizable(model.graph, limits, dtype))
        tables = {product.weight: form for product, form in quantizable if form in BITS and BITS[form] == 8}
        tables = {} if limits.rounds_activations else tables  # The engine's other graphs read the table as it is.
        gathers = [node for node in model.graph if is_standard(node, "Gather")]
        lookups = [node for node in gathers if not node.attributes.get_int("axis", 0) and node.inputs[0] in tables]
        rounded: dict[tuple[ir.Value, ir.Graph], _Rounded] = {}
        for products, form in _side_by_side(quantizable):
            if form == "int8" and limits.rounds_activations:
                _multiply_dequantized(model.graph, products[0])
            elif form == "int8":
                _multiply_integers(model.graph, products[0], rounded)
            else:
                _multiply_blocks(model.graph, products, form)
        if quantizable:
            model.opset_imports[MICROSOFT] = 1
        for node in lookups:
            assert node.inputs[0] is not None
            _look_up(model.graph, node, tables[node.inputs[0]])
        return len(quantizable) + len(lookups)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        quantizable = _quantizable(model.graph, limits, dtype)
        return [f"{label_of(product.node)} multiplies by a float32 weight" for product, _ in quantizable]


def _quantizable(graph: ir.Graph, limits: TargetLimits, dtype: DType) -> Iterator[tuple[Product, Form]]:
    """Yields each product that is quantized, and the form that its weight gets."""
    island = float32_island(graph)
    products = [p for node in graph.all_nodes() if node not in island and (p := product_of(node)) is not None]
    most = max((_rows(product) for product in products), default=0)
    is_large = sum(math.prod(sizes) for sizes in {p.weight: p.sizes for p in products}.values()) >= LARGE
    for product in products:
        if product.weight.dtype != FLOAT or min(product.sizes) < SMALLEST:
            continue
        is_head = product.node.graph is graph and _is_head(product.node)
        if limits.rounds_activations:
            in_columns = most >= MANY or is_large
        else:
            in_columns = dtype == "int8" and not (is_head or _rows(product) < MANY or _is_gated(product.x))
        if dtype == "int4" and not is_head:
            form: Form = "int4"
        elif in_columns:
            form = "int8"
        else:
            # Short blocks cost time, and only the head of an int8 graph gains enough accuracy by them.
            form = "int8_blocks" if is_head and dtype == "int8" else "int8_blocks64"
        yield product, form


def _rows(product: Product) -> int:
    return math.prod(require_static_shape(product.x, product.node)[:-1])


def _side_by_side(quantizable: Sequence[tuple[Product, Form]]) -> list[tuple[list[Product], Form]]:
    """Groups products that read the same rows, such as queries, keys and values, or gate and up, if their weights are
    stored in blocks. As one product they round the rows once, and threads wait for each other once.
    """
    groups: dict[object, tuple[list[Product], Form]] = {}
    for product, form in quantizable:
        key = (product.x, product.node.graph, form) if form in BITS else product.node
        groups.setdefault(key, ([], form))[0].append(product)
    return list(groups.values())


def _is_head(node: ir.Node) -> bool:
    """Whether a product is an output of the graph, directly or after a change of shape or a selection of tokens."""
    value = node.outputs[0]
    while not value.is_graph_output():
        user = only_reader(value)
        if user is None or not is_standard(user, *TAKEN):
            return False
        value = user.outputs[0]
    return True


def _is_gated(x: ir.Value) -> bool:
    """Whether a value is the elementwise product of two computed values."""
    product = made_by(before_views(x, *VIEWS), "Mul")
    return product is not None and all(value is not None and value.producer() is not None for value in product.inputs)


def _round(writer: NodeWriter, product: Product) -> _Rounded:
    """Rounds rows to 8 bits; the range of each row covers zero and all of its numbers."""
    *rows, K = require_static_shape(product.x, product.node)
    x_RK = writer.op("Reshape", product.x, [math.prod(rows), K])
    low_R = writer.op("Min", writer.op("ReduceMin", x_RK, [1], keepdims=0), np.array(0, np.float32))
    high_R = writer.op("Max", writer.op("ReduceMax", x_RK, [1], keepdims=0), np.array(0, np.float32))
    width_R = writer.op("Mul", writer.op("Sub", high_R, low_R), np.array(1 / 255, np.float32))
    scale_R = writer.op("Max", width_R, np.array(np.finfo(np.float32).tiny))  # All numbers of a row may be zero.
    below_R = writer.op("Round", writer.op("Div", low_R, scale_R))
    zero_R = writer.op("Cast", writer.op("Neg", below_R), to=ir.DataType.UINT8)
    x_int_RK = writer.op("QuantizeLinear", x_RK, scale_R, zero_R, axis=0)
    return _Rounded(x_int_RK, writer.op("Unsqueeze", scale_R, [1]), writer.op("Unsqueeze", below_R, [1]))


def _multiply_integers(graph: ir.Graph, product: Product, rounded: dict[tuple[ir.Value, ir.Graph], _Rounded]) -> None:
    node, x, weight, sizes = product
    around = graph_around(node)
    writer = NodeWriter(around, node, "int8")
    if (x, around) not in rounded:
        rounded[x, around] = _round(writer, product)
    x_int_RK, scale_R1, below_R1 = rounded[x, around]
    w_int_KN, w_scale_N = _stored(graph, str(weight.name), sizes, "int8")
    numbers = (x_int_RK, w_int_KN, np.array(1, np.float32), w_scale_N)
    y_RN = writer.op("MatMulIntegerToFloat", *numbers, domain=MICROSOFT, like=node.outputs[0])
    y_RN.shape = ir.Shape([require_static_shape(x_int_RK, node)[0], sizes[0]])
    # This corrects for the zero points. A session computes the sums of columns once, while it is loaded.
    column_1N = writer.op("ReduceSum", writer.op("Cast", w_int_KN, to=ir.DataType.INT32), [0])
    column_1N = writer.op("Mul", writer.op("Cast", column_1N, to=FLOAT), w_scale_N)
    y_RN = writer.op("Mul", writer.op("Gemm", below_R1, column_1N, y_RN), scale_R1)
    writer.replace(writer.op("Reshape", y_RN, list(require_static_shape(node.outputs[0], node))))


def _multiply_dequantized(graph: ir.Graph, product: Product) -> None:
    node, x, weight, sizes = product
    writer = NodeWriter(graph_around(node), node, "int8")
    w_int, w_scale = _stored(graph, str(weight.name), sizes, "int8")
    weight_KN = writer.op("DequantizeLinear", w_int, w_scale, axis=1)
    writer.replace(writer.op("MatMul", x, weight_KN, like=node.outputs[0]))


def _multiply_blocks(graph: ir.Graph, products: Sequence[Product], form: Form) -> None:
    """Replaces products of the same rows by one product, in the place of the first."""
    first, K = products[0], products[0].sizes[1]
    columns = [product.sizes[0] for product in products]
    writer = NodeWriter(graph_around(first.node), first.node, form)
    # Level 4 allows the kernel to round activations to 8 bits, block by block; other levels are many times slower.
    attributes = {"K": K, "N": sum(columns), "bits": BITS[form], "block_size": BLOCKS[form], "accuracy_level": 4}
    name = BELOW.join(str(product.weight.name) for product in products)
    inputs = [first.x, *_stored(graph, name, (sum(columns), K), form)]
    y = writer.op("MatMulNBits", *inputs, domain=MICROSOFT, like=first.node.outputs[0], **attributes)
    if len(products) == 1:
        writer.replace(y)
        return
    assert y.shape is not None
    y.shape[-1] = sum(columns)
    parts = writer.ops("Split", len(products), y, np.array(columns), axis=-1)
    for product, part in zip(products, parts, strict=True):
        substitute(product.node.outputs[0], part, product.node)


def _look_up(graph: ir.Graph, node: ir.Node, form: Form) -> None:
    """Looks up rows of a table (V, K) that a product reads too. Only these rows become floats."""
    table, ids = node.inputs
    assert table is not None
    V, K = require_static_shape(table, node)
    writer = NodeWriter(graph, node, "lookup")
    whole_BTMU, scale_BTM = (
        writer.op("Gather", stored, ids, axis=0) for stored in _stored(graph, str(table.name), (V, K), form)
    )
    *rows, blocks = require_static_shape(scale_BTM, node)
    zero = np.array(2 ** (BITS[form] - 1), np.float32)
    number_BTMU = writer.op("Sub", writer.op("Cast", whole_BTMU, to=FLOAT), zero)
    row_BTMU = writer.op("Mul", number_BTMU, writer.op("Reshape", scale_BTM, [*rows, blocks, 1]))
    row_BTK = writer.op("Reshape", row_BTMU, [*rows, blocks * BLOCKS[form]])
    writer.replace(row_BTK if blocks * BLOCKS[form] == K else writer.op("Slice", row_BTK, [0], [K], [len(rows)]))


def _stored(graph: ir.Graph, weight: str, sizes: tuple[int, int], form: Form) -> list[ir.Value]:
    """The initializers that replace a weight; they get their values from the weights file of this dtype."""
    values = []
    for name, (kind, shape) in quantized_tensors(weight, sizes, form).items():
        if name not in graph.initializers:
            tensor_type = ir.TensorType(ir.DataType[ONNX_TYPES[kind]])
            graph.initializers.add(ir.Value(name=name, type=tensor_type, shape=ir.Shape(shape)))
        values.append(graph.initializers[name])
    return values
