"""Weights as numbers of 8 or 4 bits, in the two ways that are fast on a CPU.

Whole rows (`forward`). int8: activations are rounded to 8 bits too, with one scale for the whole tensor that is
computed at run time, and the product is computed in integers. int4: weights are stored in blocks of 32 with one scale
each, and unpacked when they are used; this saves memory, not arithmetic.

Where text is written (`Dialect.apart`) one scale for a whole tensor would let texts depend on the texts beside them,
and a prompt's tokens on later ones. There both dtypes store blocks of 32, and the kernel of MatMulNBits rounds
activations block by block too, each token for itself. A step reads every weight once and computes next to nothing, so
bytes are what counts: the head is stored in bits as well, and so is the table of ids where it is the same weight.

Shape legend: K the summed dimension, N columns of the result, V rows of a table, B and T those of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from mod_export.export.nodes import (
    NodeWriter,
    graph_around,
    is_standard,
    label_of,
    made_by,
    only_reader,
    require_static_shape,
    substitute,
)
from mod_export.export.passes.cast_floats import float32_island
from mod_export.export.passes.products import MICROSOFT, Product, product_of
from mod_export.export.weights import BELOW, BITS, BLOCK, ONNX_TYPES, Form, forms_of, quantized_tensors
from mod_export.types import QUANTIZED, Dialect, DType

FLOAT = ir.DataType.FLOAT
VIEWS = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")
TAKEN = (*VIEWS, "Gather", "Slice")
"""What may stand between a head and the logits that a graph returns: a prompt returns those of its last token."""
SMALLEST = 32
"""Columns or summed elements below which a product gains nothing: a router's projection has one column."""


class _Found(NamedTuple):
    """A product, and the form that its weight gets."""

    product: Product
    form: Form


class QuantizeWeights:
    """Replaces products with weights by DynamicQuantizeLinear and MatMulInteger, or by MatMulNBits.

    The router's stays float32, because a selection compares scores (`cast_floats` has the same rule). Of whole rows two
    more do: the head's, because no later layer averages its errors; and for int8 those that read the product of two
    activations, such as SwiGLU's, whose few large elements would use up the range of a shared scale (docs/numerics.md
    has the figures).
    """

    name: ClassVar[str] = "quantize_weights"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return dtype in QUANTIZED

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        found = list(_quantizable(model.graph, dialect, dtype))
        tables = {product.weight for product, form in found if form == "int8_blocks"}
        lookups = [node for node in model.graph if _is_lookup(node) and node.inputs[0] in tables]
        rounded: dict[ir.Value, Sequence[ir.Value]] = {}
        for products, form in _side_by_side(found):
            if form == "int8":
                _multiply_integers(model.graph, products[0], rounded)
            else:
                _multiply_blocks(model.graph, products, form)
                model.opset_imports[MICROSOFT] = 1
        for node in lookups:
            _look_up(model.graph, node)
        return len(found) + len(lookups)

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        found = _quantizable(model.graph, dialect, dtype)
        return [f"{label_of(product.node)} multiplies by a float32 weight" for product, _ in found]


def stored_forms(model: ir.Model, dialect: Dialect, dtype: DType) -> dict[str, set[Form]]:
    """The forms in which a graph reads each of its weights once the pass has run, which it does here."""
    QuantizeWeights().run(model, dialect, dtype)
    common.RemoveUnusedNodesPass()(model)
    return forms_of(model.graph.initializers)


def _quantizable(graph: ir.Graph, dialect: Dialect, dtype: DType) -> Iterator[_Found]:
    island = float32_island(graph)
    for node in list(graph.all_nodes() if dialect.apart else graph):
        product = None if node in island else product_of(node)
        if product is None or product.weight.dtype != FLOAT or min(product.sizes) < SMALLEST:
            continue
        is_head = node.graph is graph and _is_head(node)
        if dialect.apart:
            # No later layer averages the errors of the head.
            yield _Found(product, "int4" if dtype == "int4" and not is_head else "int8_blocks")
        elif not is_head and is_standard(node, "MatMul") and not (dtype == "int8" and _is_gated(product.x)):
            yield _Found(product, "int8" if dtype == "int8" else "int4")


def _side_by_side(found: Sequence[_Found]) -> list[tuple[list[Product], Form]]:
    """The products, in blocks those of the same rows in one group: queries, keys and values, or gate and up. As one
    product they round the rows once, and threads wait for each other once.
    """
    groups: dict[object, tuple[list[Product], Form]] = {}
    for product, form in found:
        key = (product.x, product.node.graph, form) if form in BITS else product.node
        groups.setdefault(key, ([], form))[0].append(product)
    return list(groups.values())


def _is_head(node: ir.Node) -> bool:
    """Whether a product is an output of the graph, directly or through a change of shape or a choice of tokens."""
    value = node.outputs[0]
    while not value.is_graph_output():
        user = only_reader(value)
        if user is None or not is_standard(user, *TAKEN):
            return False
        value = user.outputs[0]
    return True


def _is_gated(x: ir.Value) -> bool:
    """Whether a value is the product of two computed ones."""
    while (view := made_by(x, *VIEWS)) is not None and view.inputs[0] is not None:
        x = view.inputs[0]
    product = made_by(x, "Mul")
    return product is not None and all(value is not None and value.producer() is not None for value in product.inputs)


def _is_lookup(node: ir.Node) -> bool:
    return is_standard(node, "Gather") and node.attributes.get_int("axis", 0) == 0


def _multiply_integers(graph: ir.Graph, product: Product, rounded: dict[ir.Value, Sequence[ir.Value]]) -> None:
    node, x, weight, sizes = product
    writer = NodeWriter(graph, node, "int8")
    if x not in rounded:
        rounded[x] = writer.ops("DynamicQuantizeLinear", 3, x)
    x_int, x_scale, x_zero = rounded[x]
    w_int, w_scale = _stored(graph, str(weight.name), sizes, "int8")
    summed = writer.op("MatMulInteger", x_int, w_int, x_zero)
    scale = writer.op("Mul", x_scale, w_scale)
    writer.replace(writer.op("Mul", writer.op("Cast", summed, to=FLOAT), scale))


def _multiply_blocks(graph: ir.Graph, products: Sequence[Product], form: Form) -> None:
    """One product in the place of the first of them."""
    first, K = products[0], products[0].sizes[1]
    columns = [product.sizes[0] for product in products]
    writer = NodeWriter(graph_around(first.node), first.node, form)
    # Level 4 allows the kernel to round activations to 8 bits, block by block; other levels are many times slower.
    attributes = {"K": K, "N": sum(columns), "bits": BITS[form], "block_size": BLOCK, "accuracy_level": 4}
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


def _look_up(graph: ir.Graph, node: ir.Node) -> None:
    """Rows of a table (V, K) that a product reads too. Only the rows that are asked for become floats."""
    table, ids = node.inputs
    assert table is not None
    V, K = require_static_shape(table, node)
    writer = NodeWriter(graph, node, "lookup")
    form: Form = "int8_blocks"
    whole_BTMU, scale_BTM = (
        writer.op("Gather", stored, ids, axis=0) for stored in _stored(graph, str(table.name), (V, K), form)
    )
    *rows, blocks = require_static_shape(scale_BTM, node)
    zero = np.array(2 ** (BITS[form] - 1), np.float32)
    number_BTMU = writer.op("Sub", writer.op("Cast", whole_BTMU, to=FLOAT), zero)
    row_BTMU = writer.op("Mul", number_BTMU, writer.op("Reshape", scale_BTM, [*rows, blocks, 1]))
    row_BTK = writer.op("Reshape", row_BTMU, [*rows, blocks * BLOCK])
    writer.replace(row_BTK if blocks * BLOCK == K else writer.op("Slice", row_BTK, [0], [K], [len(rows)]))


def _stored(graph: ir.Graph, weight: str, sizes: tuple[int, int], form: Form) -> list[ir.Value]:
    """The initializers that replace the weight; they get their values from the weights file of this dtype."""
    made = []
    for name, (kind, shape) in quantized_tensors(weight, sizes, form).items():
        if name not in graph.initializers:
            tensor_type = ir.TensorType(ir.DataType[ONNX_TYPES[kind]])
            graph.initializers.add(ir.Value(name=name, type=tensor_type, shape=ir.Shape(shape)))
        made.append(graph.initializers[name])
    return made
