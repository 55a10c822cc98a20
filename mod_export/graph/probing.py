"""Runs single operations of a captured program on made-up numbers, to see what they do with elements and tokens.

This module has no list of operators. The result of a run shows what an operation does: whether it moves, copies, looks
up or writes elements. Floats are float32 in these runs, so integers up to 2^24 pass through unchanged. Tensors that are
constant along a dimension are views that take no memory for it.

A label is a number that identifies a token: 1 + row * T + token; 0 means no token. A tensor of labels has the shape of
the tensor whose elements it labels.

Shape legend: B rows, T tokens that a site can select from, K slots, P places that a tensor has for each row (P >= T).
"""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

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
    value = tensor_of(node)
    if node.op != "call_function" or (value is not None and value.numel() > LARGEST):
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


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _here(argument: Any) -> Any:
    """Replaces a floating-point dtype by float32, and a device by the CPU."""
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float32
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _written_apart(node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
    """The arguments, with copies of those that the operation changes in place."""
    written = {number for number, argument in enumerate(arguments_of(node)) if is_written(argument)}
    return [
        value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) and number in written else value
        for number, value in enumerate(args)
    ]


def arguments_of(node: fx.Node) -> Any:
    """The declared arguments of an operator; empty if the target is no operator."""
    schema = getattr(node.target, "_schema", None)
    return () if schema is None else schema.arguments


def is_written(argument: Any) -> bool:
    """Whether an operator changes an argument in place, as PyTorch declares it."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


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
    return any(argument.alias_info is not None and not is_written(argument) for argument in arguments_of(node))


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
    """The same elements, with size 1 in all dimensions along which they do not differ; of a large tensor, along which
    its first, last and some other slices do not.
    """
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

    def run(self, node: fx.Node, values: Mapping[fx.Node, Any], fill: float | None) -> Any:
        """Runs the operation of a node on these values, else on known values; the other inputs are filled with one
        number, or with noise if it is None.
        """

        def value_of(source: fx.Node) -> Any:
            value = values[source] if source in values else self.value(source)
            if value is not None or source in values:
                return value
            return _noise(source) if fill is None else filled(source, fill)

        return ran(node, value_of)

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
            value = self._result_for_any_values(node)
        else:
            value = None
        if value is not None:
            self._values[node], self._behind[node] = value, sources
            # A write into a view changes the tensors that it is a view of.
            for base, whole in bases_after_write(node, value, self.value):
                self._values[base], self._behind[base] = whole, sources

    def _weighted(self, node: fx.Node) -> Any:
        """One-hot rows or a mask that unknown gates multiply, with 1 for the gates; None for any other operation."""
        if not any(_is_mask(self.value(source)) for source in node.all_input_nodes):
            return None
        with_ones, with_twos = self.run(node, {}, 1.0), self.run(node, {}, 2.0)
        if not _is_mask(with_ones) or not isinstance(with_twos, Tensor) or not torch.equal(with_twos, with_ones * 2):
            return None
        return compact(with_ones)

    def _result_for_any_values(self, node: fx.Node) -> Any:
        """The result if only shape or dtype of the unknown inputs are used; None if their values may matter."""
        with_zeros = self.run(node, {}, 0.0)
        if not isinstance(with_zeros, Tensor) or not bool(with_zeros.any()):
            return None
        with_noise = self.run(node, {}, None)
        return compact(with_zeros) if isinstance(with_noise, Tensor) and torch.equal(with_zeros, with_noise) else None

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
    written = next((number for number, argument in enumerate(arguments_of(node)) if is_written(argument)), None)
    if written is None or written >= len(node.args) or not isinstance(value, Tensor):
        return []
    chain: list[Any] = [node.args[written]]
    while isinstance(chain[-1], fx.Node) and is_view(chain[-1]) and chain[-1].args:
        chain.append(chain[-1].args[0])
    if not all(isinstance(member, fx.Node) for member in chain):
        return []
    base = values(chain[-1])
    base = filled(chain[-1], 0.0) if base is None else base
    if not isinstance(base, Tensor):
        return []
    base = base.clone(memory_format=torch.contiguous_format)
    changed: list[tuple[fx.Node, Tensor]] = [(chain[-1], base)]
    for member in reversed(chain[:-1]):
        view = ran(member, dict(changed).get)
        if not isinstance(view, Tensor):
            return []
        changed.append((member, view))
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


# Labels of tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a tensor may hold tokens.

    Attributes:
        places: P.
        labels: int64, with the shape of the tensor: 1 + row * P + place, or 1 + place if `one_row`.
        one_row: whether the tensor holds the tokens of only one of several rows.
    """

    places: int
    labels: Tensor
    one_row: bool


def layouts(shape: Sequence[int], strides: Sequence[int], rows: int, tokens: int) -> Iterator[Layout]:
    """Yields every way in which a tensor can hold at least T tokens for each of B rows, those with exactly T first."""
    entries: list[tuple[int, int, Tensor, bool]] = []
    for dim, size in enumerate(shape):
        number = _along(torch.arange(1, size + 1), dim, len(shape))
        if rows > 1 and size % rows == 0 and size // rows >= tokens:
            places = size // rows
            entries.append((places, 0, number, False))
            entries.append((places, 1, 1 + (number - 1) % rows * places + (number - 1) // rows, False))
        if size < tokens:
            continue
        if rows == 1:
            entries.append((size, 0, number, False))
            continue
        # A dimension with stride 0 holds no rows: it repeats the tokens, for example for each expert.
        row_dims = [n for n, count in enumerate(shape) if n != dim and count == rows and strides[n]]
        entries += [(size, 0, _along(torch.arange(rows) * size, n, len(shape)) + number, False) for n in row_dims]
        entries.append((size, 2, number, True))
    for places, _, labels, one_row in sorted(entries, key=lambda entry: (entry[0] != tokens, entry[1])):
        yield Layout(places, labels.expand(tuple(shape)), one_row)


def _along(numbers: Tensor, dim: int, dims: int) -> Tensor:
    """Reshapes numbers to lie along one of `dims` dimensions; the others have size 1."""
    return numbers.reshape([-1 if n == dim else 1 for n in range(dims)])


def tokens_at(
    places: Tensor, layout: Layout, index_BK: Tensor, tokens: int, tables: Sequence[Tensor | None]
) -> Tensor | None:
    """Labels of the selected tokens that elements belong to; None unless they belong to exactly the selected tokens.
    Tokens that cannot be selected, such as a class token, may be there too.

    Args:
        places: labels of a layout; 0 where an element belongs to no place.
        layout: the layout that these labels belong to.
        index_BK: int64, the selected tokens.
        tokens: T.
        tables: int64 (B, T), numberings that the program may use for the tokens; None for their own numbers.
    """
    narrow, rows, (B, K) = narrowest(places), 1 if layout.one_row else len(index_BK), index_BK.shape
    if narrow.numel() > 4 * B * layout.places:
        return None  # The labels vary within a token, so they are not places of tokens.
    occupied = torch.zeros(rows * layout.places + 1, dtype=torch.bool)
    occupied[narrow.flatten()] = True
    occupied_RP = occupied[1:].view(rows, layout.places)
    if not bool((occupied_RP.sum(1) >= K).all()):
        return None
    number_BT = torch.arange(tokens).expand(B, tokens)
    for table in tables:
        placed_BT = number_BT if table is None else table
        for shift in _shifts(occupied_RP[0], placed_BT.gather(1, index_BK)[0], tokens, layout):
            row = _row_held(occupied_RP, placed_BT + shift, index_BK)
            if row is None:
                continue
            token_of = torch.zeros(rows * layout.places + 1, dtype=torch.int64)
            first_B1 = torch.arange(B)[:, None]
            where_BT, label_BT = 1 + first_B1 * layout.places + placed_BT + shift, 1 + first_B1 * tokens + number_BT
            if layout.one_row:
                where_BT, label_BT = where_BT[row : row + 1] - row * layout.places, label_BT[row : row + 1]
            fits_BT = placed_BT[: len(where_BT)] + shift < layout.places
            token_of[where_BT[fits_BT]] = label_BT[fits_BT]
            return token_of[narrow].expand(places.shape)
    return None


def _shifts(held_P: Tensor, placed_K: Tensor, tokens: int, layout: Layout) -> list[int]:
    """Returns the possible differences between a token's place and its number: further tokens, such as a class token,
    may stand before all of them.
    """
    result = [0]
    if layout.places > tokens and not layout.one_row:
        place = held_P.nonzero()[:, 0]
        shifts = (place[: len(place) - len(placed_K) + 1] - placed_K.min()).tolist()
        result += [shift for shift in shifts if shift > 0]
    return result


def _row_held(held_RP: Tensor, placed_BT: Tensor, index_BK: Tensor) -> int | None:
    """The row whose selected tokens are held, or 0 if each row holds its own; None if other tokens are held."""
    (rows, places), chosen_BK = held_RP.shape, placed_BT.gather(1, index_BK)
    if int(chosen_BK.max()) >= places:
        return None
    none_BP = torch.zeros(len(placed_BT), places, dtype=torch.bool)
    chosen_BP = none_BP.scatter(1, chosen_BK, True)
    # Tokens past the last place are clamped to it.
    open_BP = none_BP.scatter(1, placed_BT.clamp(max=places - 1), True)
    others_BP = held_RP & ~open_BP
    matches_B = ((held_RP & open_BP) == chosen_BP).all(1)
    if rows == 1 and len(placed_BT) > 1:
        return int(matches_B.int().argmax()) if bool(matches_B.any()) and not bool(others_BP[matches_B].any()) else None
    return 0 if bool(matches_B.all()) and bool((others_BP == others_BP[:1]).all()) else None


def are_in_order(labels: Tensor, tokens: int) -> bool:
    """Whether the tokens of each row are in ascending order."""
    narrow = narrowest(labels).flatten()
    narrow = narrow[narrow > 0] - 1
    for row in torch.unique(narrow // tokens).tolist():
        row_K = narrow[narrow // tokens == row]
        if bool((row_K[1:] < row_K[:-1]).any()):
            return False
    return True


def tokens_by_row(labels: Tensor, tokens: int) -> Mapping[int, set[int]]:
    """Row -> the tokens of this row that elements belong to."""
    number = torch.unique(narrowest(labels))
    number = number[number > 0] - 1
    result: dict[int, set[int]] = {}
    for index in number.tolist():
        result.setdefault(index // tokens, set()).add(index % tokens)
    return result


def as_floats(labels: Any) -> Tensor | None:
    """Labels as float32; None if these are no labels."""
    return narrowest(labels).float().expand(labels.shape) if isinstance(labels, Tensor) else None


def as_value_of(node: fx.Node, labels: Tensor) -> Any:
    """Labels in the kind of number that the node returns: float32, or int64."""
    value = tensor_of(node)
    return labels if value is not None and not value.dtype.is_floating_point else as_floats(labels)


def has_tokens(labels: Any) -> bool:
    """Whether some element belongs to a token."""
    return isinstance(labels, Tensor) and bool((narrowest(labels) > 0).any())


def labels_of(result: Tensor) -> Tensor | None:
    """Labels as int64, without memory for dimensions along which they are equal; None if these are not labels."""
    if result.dtype is torch.bool or result.is_complex():
        return None
    narrow = narrowest(result)
    numbers = narrow.long()
    are_labels = bool((numbers == narrow).all()) and bool((numbers >= 0).all())
    return numbers.expand(result.shape) if are_labels else None


def reversed_labels(labels: Tensor, last: int) -> Tensor:
    """Reverses the order of the labels, so that each token gets another one."""
    narrow = narrowest(labels)
    return torch.where(narrow > 0, last - narrow, 0).expand(labels.shape)


def agrees_reversed(result: Any, mirrored_result: Any, last: int) -> bool:
    """Whether an operation did the same with reversed labels, so that it does not depend on their values."""
    if isinstance(result, (tuple, list)):
        return isinstance(mirrored_result, (tuple, list)) and all(
            agrees_reversed(*pair, last) for pair in zip(result, mirrored_result, strict=True)
        )
    if not isinstance(result, Tensor):
        return result is None
    if not isinstance(mirrored_result, Tensor) or result.shape != mirrored_result.shape:
        return False
    if result.dtype is torch.bool or result.is_complex():
        return False
    return _are_same(reversed_labels(result, last), mirrored_result)


def broadcast_labels(labels: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """Labels of a pointwise result: an element belongs to the token of the first operand that has one there."""
    if len(labels) == 1 and labels[0].numel() != math.prod(shape):
        return None
    try:
        wide = [operand.expand(tuple(shape)) for operand in labels]
    except RuntimeError:
        return None  # The result has another shape, for example because an operation in place returns the base.
    result = wide[0]
    for operand in wide[1:]:
        if operand is not result and not _are_same(result, operand):
            result = torch.where(result > 0, result, operand)
            result = narrowest(result).expand(tuple(shape))
    return result


def _are_same(a: Tensor, b: Tensor) -> bool:
    first, second = narrowest(a), narrowest(b)
    return first.shape == second.shape and torch.equal(first, second)


def kept_labels(labels: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Labels of a computed result; None unless the dimensions along which tokens vary stay in their order."""
    narrow = narrowest(labels)
    varying = [dim for dim, size in enumerate(narrow.shape) if size > 1]
    last = varying[-1] + 1 if varying else 0
    stay = len(shape) == labels.dim() and all(shape[dim] == labels.shape[dim] for dim in varying)
    dims: list[int] = []
    if stay or tuple(shape[:last]) == tuple(labels.shape[:last]):
        dims = varying
    else:
        for dim in varying:
            start = dims[-1] + 1 if dims else 0
            place = next((n for n in range(start, len(shape)) if shape[n] == labels.shape[dim]), None)
            if place is None:
                return None
            dims.append(place)
    sizes = [shape[n] if n in dims else 1 for n in range(len(shape))]
    return narrow.reshape(sizes).expand(tuple(shape))
