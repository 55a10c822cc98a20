"""Writes the products of a step in the form that OpenVINO computes fastest on this processor.

Which form is fastest depends on the processor, the dtype and the model, so forms are tried when an engine is built:

* **More rows.** A step of one text multiplies one row by each weight. Reading the weights takes most of its time, so
  five rows should take as long. But with bfloat16 weights OpenVINO may read faster when it multiplies four to six rows:
  on a processor with AVX512_BF16 and without AMX, the dense SmolLM2-135M takes 17.2 ms a step in place of 19.6
  (docs/LOG.md). The last row is repeated, and what the repetitions give is dropped.
* **Keys on the right.** A graph multiplies cached keys by queries and transposes the few scores, because an ONNX
  product cannot transpose its right operand. OpenVINO's can. In bfloat16 its kernel for the few columns that one
  token's queries have leaves most of a vector empty, and with keys on the right a step of eight texts takes 0.94 of the
  time; in float32 that step takes longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from mod_export.engines.huge_pages import in_huge_pages
from mod_export.engines.openvino_products import bodies_of, products_of, weight_products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import openvino

ROWS = (4, 5)
KEYS_BELOW, ROWS_BELOW = 0.98, 0.95
"""Another form is used only below this share of the time of the present one. More rows compute more, so they have to
gain more."""
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Form:
    """How the products of a step are written.

    Attributes:
        rows: least number of rows in each product with a bfloat16 weight.
        keys_right: whether cached keys are the right operand of the product that gives the scores.
    """

    rows: int = 0
    keys_right: bool = False


def fastest_form(model: openvino.Model, compiled: Callable[[Form], openvino.CompiledModel]) -> Form:
    """Returns the form in which a step is fastest.

    It is measured if keys are on the left of a bfloat16 product, or if all products with bfloat16 weights have few
    rows.

    Args:
        model: the step, in its own form.
        compiled: compiles it in a form.

    Raises:
        RuntimeError: OpenVINO cannot compile or run the model.
    """
    form, seconds = Form(), cache(partial(_seconds, compiled))
    if any(True for body in bodies_of(model) for _ in _scores(body)):
        form = _faster(seconds, form, [Form(keys_right=True)], KEYS_BELOW)
    own = max((product.rows for product in products_of(model)), default=0)
    return _faster(seconds, form, [replace(form, rows=rows) for rows in ROWS if rows > own > 0], ROWS_BELOW)


def _faster(seconds: Callable[[Form], float], form: Form, others: Sequence[Form], share: float) -> Form:
    """Returns the fastest of the other forms if it takes less than this share of the time of the first."""
    if not others:
        return form
    most = share * seconds(form)
    best = min(others, key=seconds)
    return best if seconds(best) < most else form


def _seconds(compiled: Callable[[Form], openvino.CompiledModel], form: Form) -> float:
    """Returns the time of the fastest run on inputs of zeros. No other model is in memory meanwhile."""
    import openvino

    with in_huge_pages():  # As an engine is loaded.
        model = compiled(form)
    request, taken = model.create_infer_request(), []
    for port in model.inputs:
        tensor = openvino.Tensor(port.element_type, port.shape)
        tensor.data[...] = 0
        request.set_tensor(port, tensor)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        request.infer(share_outputs=True)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def write_in(model: openvino.Model, form: Form) -> None:
    """Changes a model so that its products have this form."""
    for body in bodies_of(model):
        _widen(body, form.rows)
        if form.keys_right:
            _move_keys(body)
    model.validate_nodes_and_infer_types()


def _widen(body: openvino.Model, rows: int) -> None:
    from openvino import opset13 as operators

    wide: dict[tuple[str, int], openvino.Output] = {}
    for node, product in list(weight_products(body)):
        left = node.input_value(0)
        shape = list(left.get_shape())
        axis = shape.index(max(shape[:-1]))
        if product.rows >= rows or shape[axis] != product.rows:
            continue
        read = left.get_node().get_name(), left.get_index()
        if read not in wide:
            repeated = [min(row, product.rows - 1) for row in range(rows)]
            wide[read] = operators.gather(left, repeated, axis).output(0)
        readers = list(node.output(0).get_target_inputs())
        node.input(0).replace_source_output(wide[read])
        node.validate_and_infer_types()
        own = operators.slice(node, [0], [product.rows], [1], [axis])
        for reader in readers:
            reader.replace_source_output(own.output(0))


def _scores(body: openvino.Model) -> Iterator[tuple[openvino.Node, openvino.Node, openvino.Node]]:
    """Yields (transposition of queries, product, transposition of scores) of every bfloat16 product of keys and
    transposed queries whose result is transposed, outside of the conditions of a model.
    """
    for product in body.get_ordered_ops():
        if product.get_type_name() != "MatMul" or product.get_element_type().get_type_name() != "bf16":
            continue
        about, queries = product.get_attributes(), product.input_value(1).get_node()
        readers = [reader.get_node() for reader in product.output(0).get_target_inputs()]
        if about["transpose_a"] or about["transpose_b"] or len(readers) != 1:
            continue
        if _swaps_last_axes(queries) and _swaps_last_axes(readers[0]):
            yield queries, product, readers[0]


def _swaps_last_axes(node: openvino.Node) -> bool:
    if node.get_type_name() != "Transpose" or node.input_value(1).get_node().get_type_name() != "Constant":
        return False
    order = [int(axis) for axis in node.input_value(1).get_node().data]
    axes = list(range(len(order)))
    return len(order) >= 2 and order == [*axes[:-2], axes[-1], axes[-2]]


def _move_keys(body: openvino.Model) -> None:
    from openvino import opset13 as operators

    for queries, product, scores in list(_scores(body)):
        moved = operators.matmul(queries.input_value(0), product.input_value(0), False, True)
        for reader in list(scores.output(0).get_target_inputs()):
            reader.replace_source_output(moved.output(0))
