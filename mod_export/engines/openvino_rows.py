"""Gives the products of a step more rows, where OpenVINO multiplies them faster.

A step of one text multiplies one row by each weight. Reading the weights takes most of its time, so five rows should
take as long. But with bfloat16 weights OpenVINO reads faster when it multiplies four to six rows: on a processor with
AVX512_BF16 and without AMX, the dense SmolLM2-135M takes 17.2 ms a step in place of 19.6 (docs/LOG.md). The best number
depends on the processor, so it is measured when an engine is built. The last row is repeated, and what the repetitions
give is dropped.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mod_export.engines.huge_pages import in_huge_pages
from mod_export.engines.openvino_products import bodies_of, products_of, weight_products

if TYPE_CHECKING:
    from collections.abc import Callable

    import openvino

CANDIDATES = (4, 5)
MUST_TAKE_LESS_THAN = 0.95
"""More rows are used only below this share of the time without them, so that timing noise does not decide what is
built."""
ROUNDS = 15


def fastest_rows(model: openvino.Model, compiled: Callable[[int], openvino.CompiledModel]) -> int:
    """Returns the number of rows with which a model is fastest; 0 if its products should keep their own.

    Only a model whose products with bfloat16 weights all have few rows is measured: a step of few texts.

    Args:
        model: the model.
        compiled: compiles it with at least this number of rows in each product.

    Raises:
        RuntimeError: OpenVINO cannot compile or run the model.
    """
    own = max((product.rows for product in products_of(model)), default=0)
    larger = [rows for rows in CANDIDATES if rows > own]
    if own == 0 or not larger:
        return 0
    seconds = {rows: _seconds(compiled, rows) for rows in (0, *larger)}
    best = min(larger, key=lambda rows: seconds[rows])
    return best if seconds[best] < MUST_TAKE_LESS_THAN * seconds[0] else 0


def _seconds(compiled: Callable[[int], openvino.CompiledModel], rows: int) -> float:
    """Returns the time of the fastest run on inputs of zeros. No other model is in memory meanwhile."""
    import openvino

    with in_huge_pages():  # As an engine is loaded.
        model = compiled(rows)
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


def widen(model: openvino.Model, rows: int) -> None:
    """Changes a model so that each product with a bfloat16 weight has at least this number of rows."""
    for body in bodies_of(model):
        _widen(body, rows)
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
