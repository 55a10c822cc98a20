"""Replaces operators that the ONNX exporter translates badly, or not at all, by others that compute the same.

* `einsum` becomes matrix products, because it hides attention and weights from the rewrites.
* The k-th value of a row becomes the last value of a top-k: ONNX has no operator for it.
* Attention of any rank becomes attention of four dimensions, the only rank that is exported. Its mask has a row for
  each query. Keys and values have as many rows as queries, and as many heads or a divisor of that number.
* An LSTM with projections becomes its steps, because ONNX has no such LSTM.
* `hstack` and similar operators become `cat`, as in torch itself.
* `to(dtype)` becomes a cast, or nothing.
* Operations on masks, reductions, scatters and numeric functions become functions of `replacements.py`.

The graph that PyTorch runs as the reference keeps the operators of the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.graph.program_nodes import add_node, argument_of, replace_by, shape_of
from mod_export.graph.replacements import (
    REPLACEMENTS,
    bags_of,
    put_by_mask,
    scatter_by_mask,
    scatter_reduced,
    searchsorted,
    with_indices,
)

Lowered = Callable[..., Any]
ATEN = torch.ops.aten
ATTENTION = ATEN.scaled_dot_product_attention.default
JOINS = (
    ATEN.hstack.default, ATEN.vstack.default, ATEN.dstack.default, ATEN.column_stack.default, ATEN.row_stack.default,
    ATEN.atleast_1d.Sequence, ATEN.atleast_2d.Sequence, ATEN.atleast_3d.Sequence, ATEN.block_diag.default,
)  # fmt: skip
"""Operators that the exporter would turn into sequences of tensors and loops."""
TAKEN_APART = {*JOINS, ATEN.cross_entropy_loss.default}
"""Operators that torch decomposes itself. The exporter ignores label smoothing and probability targets of losses."""
PRODUCTS: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ATEN.baddbmm.default: torch.bmm, ATEN.addmm.default: torch.mm, ATEN.addmv.default: torch.mv,
    ATEN.addr.default: torch.outer, ATEN.addbmm.default: lambda a, b: torch.bmm(a, b).sum(0),
}  # fmt: skip
"""Operator -> product that it adds to beta times a tensor. If beta is 0, that tensor may hold anything, even NaN."""
SORTS = (ATEN.sort.default, ATEN.sort.stable, ATEN.argsort.default, ATEN.argsort.stable, ATEN.msort.default)


def lower(module: fx.GraphModule) -> None:
    """Replaces such operators in a captured program and in the branches of its conditions, in place."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _lower(part.graph)


def _lower(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is ATEN.einsum.default:
            # torch decomposes other equations itself when it runs below autograd.
            replace_by(graph, node, _einsum if _is_plain(node) else torch.einsum, whole=_is_plain(node))
        elif node.target in TAKEN_APART or _is_projected(node):
            replace_by(graph, node, node.target, whole=False)
        elif node.target is ATEN.kthvalue.default:
            _replace_kth(graph, node)
        elif node.target in REPLACEMENTS:
            replace_by(graph, node, REPLACEMENTS[node.target])
        elif node.target in LOWERED and (function := LOWERED[node.target](node)) is not None:
            replace_by(graph, node, function)
    for node in list(graph.nodes):  # Replacements contain casts too.
        if node.target is ATEN.to.dtype:
            _replace_cast(graph, node)


def _replace_cast(graph: fx.Graph, node: fx.Node) -> None:
    source: Any = node.args[0]
    dtype = argument_of(node, "dtype")
    if source.meta["val"].dtype == dtype and not argument_of(node, "copy"):
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    else:
        # The same node, so that its value keeps its name.
        node.target, node.args, node.kwargs = ATEN._to_copy.default, (source,), {"dtype": dtype}


def _replace_kth(graph: fx.Graph, node: fx.Node) -> None:
    source: Any = node.args[0]
    dim = argument_of(node, "dim") % max(1, len(shape_of(source)))
    # K is counted from the nearer end, so that it is small.
    size, k = shape_of(source)[dim], argument_of(node, "k")
    largest = 2 * k > size
    k = size - k + 1 if largest else k
    with graph.inserting_before(node):
        top = add_node(graph, node, ATEN.topk.default, source, k, dim, largest)
        for use in list(node.users):  # Value and index.
            part = add_node(graph, node, operator.getitem, top, use.args[1])
            keepdim = argument_of(node, "keepdim")
            last = (ATEN.slice.Tensor, part, dim, k - 1, k) if keepdim else (ATEN.select.int, part, dim, k - 1)
            use.replace_all_uses_with(add_node(graph, node, *last))
            graph.erase_node(use)
    graph.erase_node(node)


def _is_plain(node: fx.Node) -> bool:
    """Whether an einsum labels every dimension, repeats no label within an operand, and has one size for each label."""
    arguments: Any = node.args
    equation, operands = arguments
    labels = equation.replace(" ", "").partition("->")[0].split(",")
    pairs = {
        (label, size)
        for item, names in zip(operands, labels, strict=True)
        for label, size in zip(names, shape_of(item), strict=False)
    }
    return (
        "." not in equation
        and all(len(set(item)) == len(item) for item in labels)
        and len(pairs) == len({label for label, _ in pairs})
    )


def _lowered_attention(node: fx.Node) -> Lowered | None:
    query, key, value = (shape_of(argument_of(node, name)) for name in ("query", "key", "value"))
    if len(query) != 4 or _has_narrow_mask(node):
        return _attention
    is_shared = not argument_of(node, "enable_gqa") and (query[1], query[1]) != (key[1], value[1])
    return _attention if is_shared or (query[0], query[0]) != (key[0], value[0]) else None


def _lowered_squeeze(node: fx.Node) -> Lowered | None:
    """Leaves out dimensions whose size is not 1: PyTorch ignores them, and ONNX rejects them."""
    shape, dims = shape_of(node.args[0]), argument_of(node, "dim")  # type: ignore[arg-type]  # A tensor's node.
    dims = [dims] if isinstance(dims, int) else list(dims)
    unit_dims = [dim for dim in dims if shape and shape[dim] == 1]
    if len(unit_dims) == len(dims):
        return None
    return lambda x, *_, **__: ATEN.squeeze.dims(x, unit_dims) if unit_dims else x


def _is_projected(node: fx.Node) -> bool:
    """Whether a node is an LSTM with projections, whose outputs are narrower than its cells; ONNX has none."""
    if node.target is not ATEN.lstm.input:
        return False
    hidden, cells = argument_of(node, "hx")
    return shape_of(hidden) != shape_of(cells)


def _lowered_clamp(node: fx.Node) -> Lowered | None:
    """Makes both bounds floats: the exporter makes a tensor of an integer, and fails with one number and one tensor."""
    bounds, dtype = [argument_of(node, name) for name in ("min", "max")], node.meta["val"].dtype
    if None in bounds or len({type(bound) for bound in bounds}) == 1:
        return None
    return lambda x, *_, **__: x.to(dtype).clamp(*map(float, bounds))


def _lowered_sort(node: fx.Node) -> Lowered | None:
    """Sorts a mask as integers, because ONNX's TopK takes no booleans, and TensorRT has no 8-bit integers."""
    target: Any = node.target
    if argument_of(node, "self").meta["val"].dtype is not torch.bool:
        return None

    def sort(mask: Tensor, *how: Any, **named: Any) -> Any:
        result = target(mask.to(torch.int32), *how, **named)
        if isinstance(result, Tensor):
            return result.to(node.meta["val"].dtype)
        values, indices = result
        return values.to(torch.bool), indices

    return sort


def _lowered_stack(node: fx.Node) -> Lowered | None:
    """Casts tensors to one dtype, as PyTorch does. The exporter does that for `cat` alone."""
    dtype = node.meta["val"].dtype
    if all(tensor.meta["val"].dtype == dtype for tensor in argument_of(node, "tensors")):
        return None
    return lambda tensors, dim=0: torch.stack([tensor.to(dtype) for tensor in tensors], dim)


def _lowered_extreme(node: fx.Node) -> Lowered | None:
    """Names all dimensions, because the exporter only knows `amax` and `amin` of named dimensions."""
    if argument_of(node, "dim") or not shape_of(node.args[0]):  # type: ignore[arg-type]  # A tensor's node.
        return None
    target: Any = node.target
    return lambda x, _dim=(), keepdim=False: target(x, list(range(x.dim())), keepdim)


def _lowered_products(node: fx.Node) -> Lowered | None:
    if argument_of(node, "beta") != 0:
        return None
    product = PRODUCTS[node.target]
    return lambda _, a, b, *, beta, alpha=1: product(a, b) * alpha


def _lowered_conv3d(node: fx.Node) -> Lowered | None:
    """Adds a bias of zeros where there is none, because the exporter adds one of a wrong size."""
    if argument_of(node, "bias") is not None:
        return None
    return lambda x, weight, _=None, *rest, **named: ATEN.conv3d.default(
        x, weight, weight.new_zeros(weight.shape[0]), *rest, **{key: v for key, v in named.items() if key != "bias"}
    )


def _has_narrow_mask(node: fx.Node) -> bool:
    """Whether the mask has one row for all queries, as a padding mask does: ONNX Runtime needs a row for each query."""
    query, key, mask = (argument_of(node, name) for name in ("query", "key", "attn_mask"))
    return mask is not None and shape_of(mask)[-2:] != (shape_of(query)[-2], shape_of(key)[-2])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (..., L, E), where the last outer dimension counts heads, and the others count rows.

    A size of 1 is broadcast. Rows are copied, but a single head of keys and values stays one (`enable_gqa`).
    """
    # The exporter refuses groups of one head, so `enable_gqa` is not set if there is one query head as well.
    shares_heads = enable_gqa or (key.shape[-3:-2] == value.shape[-3:-2] == (1,) and query.shape[-3:-2] != (1,))
    leads = [(*operand.shape[:-3], 1) if shares_heads else operand.shape[:-2] for operand in (key, value)]
    lead = torch.broadcast_shapes(query.shape[:-2], *leads)  # type: ignore[no-untyped-call]  # torch has no annotations there.
    *rows, heads = [1] * (2 - len(lead)) + list(lead)

    def of_four(tensor: Tensor, count: int = heads) -> Tensor:
        # A mask may lack outer dimensions, because it is the same for all of them.
        tensor = tensor.reshape(*[1] * (len(rows) + 3 - tensor.dim()), *tensor.shape)
        return tensor.expand(*rows, count, *tensor.shape[-2:]).reshape(-1, count, *tensor.shape[-2:])

    def of_keys(tensor: Tensor) -> Tensor:
        return of_four(tensor, tensor.shape[-3] if shares_heads and tensor.dim() > 2 else heads)

    mask = attn_mask
    if mask is not None:
        mask = of_four(mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2]))
    result: Tensor = ATTENTION(
        of_four(query), of_keys(key), of_keys(value), mask, dropout_p, is_causal, scale=scale, enable_gqa=shares_heads
    )
    return result.reshape(*lead, query.shape[-2], value.shape[-1])


def _einsum(equation: str, operands: Sequence[Tensor], **_path: Any) -> Tensor:
    """Computes an einsum as products of two operands, from the left."""
    left, _, output = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    if "->" not in equation:
        output = "".join(sorted(item for item in set(left) - {","} if left.count(item) == 1))
    size = {
        name: n for item, names in zip(operands, labels, strict=True) for name, n in zip(names, item.shape, strict=True)
    }
    result, names = operands[0], labels[0]
    for number, (right, right_names) in enumerate(zip(operands[1:], labels[1:], strict=True), 2):
        wanted = set(output).union(*labels[number:])
        result, names = _summed(result, names, wanted | set(right_names))
        right, right_names = _summed(right, right_names, wanted | set(names))
        result, names = _product(result, names, right, right_names, wanted, size)
    result, names = _summed(result, names, set(output))
    return _in_order(result, names, output)


def _summed(tensor: Tensor, names: str, wanted: set[str]) -> tuple[Tensor, str]:
    dims = [n for n, name in enumerate(names) if name not in wanted]
    return (tensor.sum(dims) if dims else tensor), "".join(name for name in names if name in wanted)


def _in_order(tensor: Tensor, names: str, wanted: str) -> Tensor:
    return tensor if names == wanted else tensor.permute([names.index(name) for name in wanted])


def _product(
    left: Tensor, names: str, right: Tensor, right_names: str, wanted: set[str], size: dict[str, int]
) -> tuple[Tensor, str]:
    """The product and its labels: first the wanted labels of both operands, then those of only one operand."""
    shared = [name for name in names if name in right_names]
    batch = "".join(name for name in shared if name in wanted)
    inner = "".join(name for name in shared if name not in wanted)
    rows = "".join(name for name in names if name not in right_names)
    columns = "".join(name for name in right_names if name not in names)

    def shape(*parts: str) -> list[int]:
        return [size[name] for part in parts for name in part]

    left, right = _in_order(left, names, batch + rows + inner), _in_order(right, right_names, batch + inner + columns)
    if not inner:
        left = left.reshape(shape(batch, rows) + [1] * len(columns))
        return left * right.reshape(shape(batch) + [1] * len(rows) + shape(columns)), batch + rows + columns
    k = math.prod(shape(inner))
    # Without a batch, the second operand is like the weight of a linear layer, which reads rows of any shape.
    folded = [math.prod(shape(rows))] if batch else shape(rows)
    product = left.reshape([*shape(batch), *folded, k]) @ right.reshape([*shape(batch), k, math.prod(shape(columns))])
    return product.reshape(shape(batch, rows, columns)), batch + rows + columns


def _lowered_index_put(node: fx.Node) -> Lowered | None:
    """`x[mask] = value`, if one boolean mask is the only index of x."""
    used = [index for index in argument_of(node, "indices") if index is not None]
    if len(used) != 1 or used[0].meta["val"].dtype is not torch.bool or argument_of(node, "accumulate"):
        return None
    return put_by_mask


def _lowered_masked_scatter(node: fx.Node) -> Lowered:
    """Finds how many copies a mask holds of each entry, such as D in `mask_BS[..., None].expand_as(x_BSD)`. Each true
    entry then takes a whole row of the source.
    """
    mask, source = argument_of(node, "mask").meta["val"], argument_of(node, "source")
    copies = 1
    for size, step in zip(reversed(mask.shape), reversed(mask.stride()), strict=True):
        if step != 0 and size != 1:
            break
        copies *= size
    return scatter_by_mask(copies if math.prod(shape_of(source)) % copies == 0 else 1)


def _lowered_scatter(node: fx.Node) -> Lowered | None:
    """Drops elements without an index: PyTorch ignores them, and ONNX needs an index for each element."""
    if _has_an_index_for_each(node):
        return None
    target: Any = node.target
    return lambda x, dim, index, source: target(x, dim, index, with_indices(source, index))


def _lowered_scatter_reduce(node: fx.Node) -> Lowered | None:
    """Leaves to the exporter what it can translate: all reductions but the mean, if they include the old elements."""
    is_exported = argument_of(node, "reduce") != "mean" and argument_of(node, "include_self")
    return None if is_exported and _has_an_index_for_each(node) else scatter_reduced


def _has_an_index_for_each(node: fx.Node) -> bool:
    return shape_of(argument_of(node, "index")) == shape_of(argument_of(node, "src"))


def _lowered_embedding_bag(node: fx.Node) -> Lowered | None:
    """`embedding_bag` with bags of one size, as a 2-D input has; the sizes of other bags depend on the data."""
    offsets, indices = argument_of(node, "offsets"), argument_of(node, "indices")
    if not isinstance(offsets, fx.Node) or offsets.target not in (ATEN.arange.start_step, ATEN.arange.default):
        return None
    step, bags = argument_of(offsets, "step") or 1, shape_of(offsets)[0]
    if argument_of(offsets, "start") not in (None, 0) or argument_of(node, "include_last_offset"):
        return None
    return bags_of(bags) if bags * step == math.prod(shape_of(indices)) else None


def _lowered_searchsorted(node: fx.Node) -> Lowered | None:
    return None if argument_of(node, "sorter") is not None else searchsorted


LOWERED: Mapping[Any, Callable[[fx.Node], Lowered | None]] = {
    ATTENTION: _lowered_attention,
    ATEN.squeeze.dim: _lowered_squeeze,
    ATEN.squeeze.dims: _lowered_squeeze,
    ATEN.index_put.default: _lowered_index_put,
    ATEN.index_put_.default: _lowered_index_put,
    ATEN.masked_scatter.default: _lowered_masked_scatter,
    ATEN.scatter_reduce.two: _lowered_scatter_reduce,
    ATEN.scatter.src: _lowered_scatter,
    ATEN.scatter_add.default: _lowered_scatter,
    ATEN.embedding_bag.padding_idx: _lowered_embedding_bag,
    ATEN.embedding_bag.default: _lowered_embedding_bag,
    ATEN.searchsorted.Tensor: _lowered_searchsorted,
    ATEN.searchsorted.Scalar: _lowered_searchsorted,
    **dict.fromkeys(PRODUCTS, _lowered_products),
    ATEN.amax.default: _lowered_extreme,
    ATEN.amin.default: _lowered_extreme,
    ATEN.clamp.default: _lowered_clamp,
    **dict.fromkeys(SORTS, _lowered_sort),
    ATEN.stack.default: _lowered_stack,
    ATEN.conv3d.default: _lowered_conv3d,
}
"""Operator -> function that returns the replacement of a node, or None if the exporter translates the node well."""
