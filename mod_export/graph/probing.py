"""Runs single operations of a captured program on made-up numbers, to see what they do with elements.

This module has no list of operators. The result of a run shows what an operation does: whether it moves, copies, looks
up or writes elements. Floats are float32 in these runs, so integers up to 2^24 pass through unchanged. Tensors that are
constant along a dimension are views that take no memory for it.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

ATEN = torch.ops.aten
LARGEST = 2**27
"""The most elements of a result that is computed here; a larger result counts as unknown."""
_REMEMBERED = 2**16
_LARGE, _SAMPLES = 2**20, 17
_LIKE = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
_IS_PRODUCT: dict[Any, bool] = {}
Values = Callable[[fx.Node], Any]


def tensor_of(node: fx.Node) -> Tensor | None:
    """The tensor without values that describes a node's result; None if that is no tensor of fixed shape."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in value.shape):
        return None
    return value


def ran(node: fx.Node, values: Values) -> Any:
    """Runs the operation of a node on these values of its inputs; returns None if that is impossible."""
    if node.op != "call_function" or any(size > LARGEST for size in _sizes(node)):
        return None
    result = _tried(node, values)
    # A view may be impossible with these strides and possible for a contiguous tensor.
    return _tried(node, lambda source: _contiguous(values(source))) if result is None else result


def _tried(node: fx.Node, values: Values) -> Any:
    args, kwargs = fx.node.map_aggregate(fx.map_arg((node.args, node.kwargs), values), _here)
    target: Any = node.target
    try:
        with torch.no_grad():
            return target(*_written_apart(node, args), **kwargs)
    except Exception:  # Any operator of any library may run here, on numbers that it was not written for.
        return None


def _sizes(node: fx.Node) -> list[int]:
    value = tensor_of(node)
    return [] if value is None else [value.numel()]


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _here(argument: Any) -> Any:
    """Replaces a floating-point dtype by float32, and a device by the CPU."""
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float32
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _written_apart(node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
    """The arguments, with copies of those that the operation changes in place."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments_of(node)]
    return [
        value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, Tensor) and number < len(written) and written[number]
        else value
        for number, value in enumerate(args)
    ]


def arguments_of(node: fx.Node) -> Any:
    """The declared arguments of an operator; empty if the target is no operator."""
    schema = getattr(node.target, "_schema", None)
    return () if schema is None else schema.arguments


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on elements at the same place, as PyTorch declares it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_product(node: fx.Node) -> bool:
    """Whether an operation costs FLOPs by PyTorch's counter, as matrix products and attention do."""
    target: Any = node.target
    # Whether an `einsum` is a product depends on its equation.
    key = (target, node.args[0] if node.args and isinstance(node.args[0], str) else None)
    if key not in _IS_PRODUCT:
        counter = FlopCounterMode(display=False)
        with contextlib.suppress(Exception), torch.no_grad(), counter:  # As in `ran`, but on tensors without values.
            args, kwargs = fx.map_arg((node.args, node.kwargs), _shape_alone)
            target(*args, **kwargs)
        _IS_PRODUCT[key] = counter.get_total_flops() > 0
    return _IS_PRODUCT[key]


def _shape_alone(node: fx.Node) -> Any:
    value = tensor_of(node)
    return None if value is None else torch.empty(value.shape, dtype=value.dtype, device="meta")


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Suppresses warnings of the operations that run inside, and restores the state of random numbers after them."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of an argument, as PyTorch declares it."""
    return any(argument.alias_info is not None and not argument.alias_info.is_write for argument in arguments_of(node))


def filled(node: fx.Node, number: float) -> Any:
    """A tensor filled with one number (0 if it holds integers) for an unknown value; None if the value is no tensor."""
    value = tensor_of(node)
    if value is None:
        return None
    dtype = torch.float32 if value.dtype.is_floating_point else value.dtype
    number = number if value.dtype.is_floating_point else 0
    return torch.tensor(number, dtype=dtype).expand(value.shape)


def _noise(node: fx.Node) -> Any:
    value = tensor_of(node)
    if value is None or not value.dim():
        return filled(node, 1.0)
    noise = torch.rand(value.shape[-1], generator=torch.Generator().manual_seed(1)) * 3
    return (noise if value.dtype.is_floating_point else noise.to(value.dtype)).expand(value.shape)


def is_among(values: Tensor, others: Tensor) -> bool:
    """Whether every value is one of the others, or 0."""
    narrow = narrowest(values).contiguous()
    return bool(((narrow == 0) | torch.isin(narrow, narrowest(others).contiguous())).all())


def narrowest(tensor: Tensor) -> Tensor:
    """The same elements, with size 1 in all dimensions along which they do not differ."""
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.shape[dim] > 1:
            first = tensor.narrow(dim, 0, 1)
            if tensor.stride(dim) == 0 or bool((_samples(tensor, dim) == first).all()):
                tensor = first
    return tensor


def _samples(tensor: Tensor, dim: int) -> Tensor:
    """The tensor itself, or, if it is large, some of its slices along a dimension, from the first to the last."""
    if tensor.numel() <= _LARGE or tensor.shape[dim] <= _SAMPLES:
        return tensor
    return tensor.index_select(dim, torch.linspace(0, tensor.shape[dim] - 1, _SAMPLES).long())


def compact(value: Any) -> Any:
    """The same tensors, with floats as float32, and without memory for dimensions along which elements are equal."""
    if isinstance(value, (tuple, list)):
        return [compact(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    value = value.float() if value.is_floating_point() else value
    return narrowest(value).expand(value.shape) if value.numel() > _REMEMBERED else value


def moves(node: fx.Node) -> bool:
    """Whether the result of an operation on one tensor consists of elements of that tensor, for any values."""
    sources = node.all_input_nodes
    if len(sources) != 1 or tensor_of(node) is None or (shape := tensor_of(sources[0])) is None:
        return False
    numbers = torch.arange(1, shape.numel() + 1).reshape(shape.shape)
    numbers = numbers.float() if shape.dtype.is_floating_point else numbers
    result, mirrored = ran(node, lambda _: numbers), ran(node, lambda _: shape.numel() + 1 - numbers)
    if not isinstance(result, Tensor) or not isinstance(mirrored, Tensor) or result.shape != mirrored.shape:
        return False
    return bool(torch.isin(result, numbers).all()) and torch.equal(mirrored, shape.numel() + 1 - result)


class Known:
    """Values of the nodes that depend only on constants and on selected indices, for made-up indices."""

    def __init__(self, program: ExportedProgram, indices: dict[fx.Node, Tensor]) -> None:
        """Computes every value that depends on `indices` and can be known.

        Args:
            program: a program whose constants hold values.
            indices: node of a selection -> int64, made-up indices in place of the selected ones.
        """
        self._lifted = _lifted(program)
        self._constants: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = dict(indices)
        self._behind = {node: frozenset((node,)) for node in indices}
        for node in program.graph.nodes:
            self._follow(node)

    def behind(self, node: fx.Node) -> frozenset[fx.Node]:
        """The index nodes that a known value depends on; empty if the value is unknown or a constant."""
        return self._behind.get(node, frozenset())

    def forms(self, indices: fx.Node) -> list[fx.Node]:
        """Every node with a known value that depends on these indices, in the order of the graph."""
        return [node for node, sources in self._behind.items() if indices in sources]

    def value(self, node: fx.Node) -> Any:
        """The value of a node; None if it is unknown."""
        return self._values[node] if node in self._values else self._constant(node)

    def _follow(self, node: fx.Node) -> None:
        sources = frozenset[fx.Node]().union(*(self.behind(source) for source in node.all_input_nodes))
        if node in self._values or not sources or node.op != "call_function":
            return
        if node.target is operator.getitem:
            value = _item(node, self.value)
        elif all(self.value(source) is not None for source in node.all_input_nodes):
            value = compact(ran(node, self.value))
        elif is_pointwise(node):
            value = self._weighted(node)
        elif self.behind(node.args[0] if node.args and isinstance(node.args[0], fx.Node) else node):
            value = self._whatever_else(node)
        else:
            value = None
        if value is not None:
            self._values[node], self._behind[node] = value, sources
            self._write_through(node, value, sources)

    def _weighted(self, node: fx.Node) -> Any:
        """One-hot rows or a mask after a product with unknown gates, which count as 1; None for any other operation."""
        if not any(_is_mask(self.value(one)) for one in node.all_input_nodes):
            return None
        one = ran(node, lambda node: _or(self.value(node), filled(node, 1.0)))
        two = ran(node, lambda node: _or(self.value(node), filled(node, 2.0)))
        return compact(one) if _is_mask(one) and isinstance(two, Tensor) and torch.equal(two, one * 2) else None

    def _whatever_else(self, node: fx.Node) -> Any:
        """The result if only shape or dtype of the unknown inputs are used; None if their values may matter."""
        with_zeros = ran(node, lambda node: _or(self.value(node), filled(node, 0.0)))
        if not isinstance(with_zeros, Tensor) or not bool(with_zeros.any()):
            return None
        with_noise = ran(node, lambda node: _or(self.value(node), _noise(node)))
        return compact(with_zeros) if isinstance(with_noise, Tensor) and torch.equal(with_zeros, with_noise) else None

    def _write_through(self, node: fx.Node, value: Any, sources: frozenset[fx.Node]) -> None:
        """Applies a write into a view to the tensors that it is a view of."""
        for base, whole in bases_after_write(node, value, self.value):
            self._values[base], self._behind[base] = whole, sources

    def _constant(self, node: fx.Node) -> Any:
        if node in self._lifted:
            return self._lifted[node]
        if node in self._constants or node.op != "call_function":
            return self._constants.get(node)
        self._constants[node] = None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        if node.target is operator.getitem:
            value = _item(node, self._constant)
        elif str(getattr(node.target, "_opname", "")).startswith(_LIKE):
            value = ran(node, lambda source: filled(source, 0))
        elif all(self._constant(source) is not None for source in node.all_input_nodes):
            value = ran(node, self._constant)
        else:
            return None
        value = compact(value)
        if isinstance(value, Tensor) and narrowest(value).numel() > _REMEMBERED:
            del self._constants[node]
        else:
            self._constants[node] = value
        return value


def bases_after_write(node: fx.Node, value: Any, values: Values) -> list[tuple[fx.Node, Tensor]]:
    """The tensor that an operation changes in place, and all tensors that it is a view of, as they are after that."""
    written = next((n for n, one in enumerate(arguments_of(node)) if one.alias_info and one.alias_info.is_write), None)
    if written is None or written >= len(node.args) or not isinstance(value, Tensor):
        return []
    chain: list[Any] = [node.args[written]]
    while isinstance(chain[-1], fx.Node) and is_view(chain[-1]) and chain[-1].args:
        chain.append(chain[-1].args[0])
    if not all(isinstance(one, fx.Node) for one in chain):
        return []
    base = values(chain[-1])
    base = filled(chain[-1], 0.0) if base is None else base
    if not isinstance(base, Tensor):
        return []
    base = base.clone(memory_format=torch.contiguous_format)
    changed: list[tuple[fx.Node, Tensor]] = [(chain[-1], base)]
    for one in reversed(chain[:-1]):
        view = ran(one, dict(changed).get)
        if not isinstance(view, Tensor):
            return []
        changed.append((one, view))
    if changed[-1][1].shape != value.shape:
        return []
    changed[-1][1].copy_(value)
    return changed


def _is_mask(value: Any) -> bool:
    """Whether a value is a float tensor of zeros and ones with a zero in it."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    narrow = narrowest(value)
    return bool(((narrow == 0) | (narrow == 1)).all()) and bool((narrow == 0).any())


def _item(node: fx.Node, values: Values) -> Any:
    """The result that a `getitem` node takes from several."""
    source, number = node.args
    whole = values(source) if isinstance(source, fx.Node) else None
    return whole[number] if isinstance(whole, (list, tuple)) and isinstance(number, int) else None


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


def _lifted(program: ExportedProgram) -> dict[fx.Node, Tensor]:
    """The constants and buffers that have values, such as a table of positions, but no parameters."""
    values: dict[fx.Node, Tensor] = {}
    for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False):
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            continue
        name = str(spec.target)
        value = program.constants.get(name, program.state_dict.get(name))
        if isinstance(value, Tensor) and type(value).__name__ != "FakeTensor" and not value.is_meta:
            values[node] = value.detach().float() if value.is_floating_point() else value.detach()
    return values
