"""Saves and checks the state of a module besides its weights: modes, buffers, and Python attributes that a run changes.

Capture runs the code of a module on tensors without values, and must leave no traces in the module. Changes of one run
must not affect the results of the next, because an engine starts every run in the same state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its parts and hooks."""
NUMBERS = (0, 7, 10**9)
"""Values that are tried in place of numbers that a run changes, such as a count of calls."""
CONTAINERS = (list, deque, OrderedDict, dict, set)
"""Containers are read and written with the methods of these classes: methods of a subclass may refuse, or do more."""


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Keeps the module in eval mode within the context. Afterwards its mode, the values in its buffers and tensor
    attributes, and its attributes are as before, also if the module cannot be put into that mode.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    training = {part: part.training for part in module.modules()}
    restore = _attributes_kept(module)
    buffers = {part: dict(part._buffers) for part in module.modules()}
    plain = [
        (part, name, tensor)
        for part in module.modules()
        for name, tensor in vars(part).items()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
    ]
    tensors = [tensor for named in buffers.values() for tensor in named.values() if tensor is not None]
    values = [(tensor, tensor.detach().clone()) for tensor in (*tensors, *(tensor for _, _, tensor in plain))]
    moved = [(part, name, tensor) for part, name, tensor in plain if _can_be_buffer(part, name)]
    try:
        # The fused kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer is not captured, and rounds
        # differently.
        torch.backends.mha.set_fastpath_enabled(False)
        for part, name, tensor in moved:
            # The module may write to a tensor attribute (a table, a cache), which torch.export allows for buffers only.
            del vars(part)[name]
            part._buffers[name] = tensor
            part._non_persistent_buffers_set.add(name)
        module.eval()
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part, mode in training.items():
            part.training = mode
        for part, name, _ in moved:
            part._buffers.pop(name, None)
            part._non_persistent_buffers_set.discard(name)
        for part, named in buffers.items():
            part._buffers.update(named)
        restore()
        for tensor, value in values:
            # An equal tensor needs no copy, and torch refuses to write into an expanded one.
            if not same_values(tensor, value):
                tensor.copy_(value)


def _can_be_buffer(part: nn.Module, name: str) -> bool:
    """Whether `part.name` would still be the tensor if it were a buffer. Python finds a default in the class body, a
    method or a cached property of this name first, and buffers have no dots in their names.
    """
    return "." not in name and not hasattr(type(part), name)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restores the attributes of every module, and the contents of lists and dictionaries, when the context ends.

    torch.export replaces shared lists with copies, and leaves behind tensors without values.
    """
    restore = _attributes_kept(module)
    try:
        yield
    finally:
        restore()


def attributes_read(module: nn.Module, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[str, ...] | None:
    """Returns the attributes that a run changes, if results depend on them, such as a schedule that counts calls.

    Changed numbers are replaced by NUMBERS. Changed lists are emptied or doubled, dictionaries and sets are emptied, so
    a result that needs a number in a dictionary is noticed. Attributes of objects that modules hold are tried as well.

    Args:
        module: a module in eval mode.
        run: runs the module on the same inputs each time.

    Returns:
        `name == value` for each changed attribute, with its value before the run. Empty if results do not depend on
        these attributes; None if a run changes no attribute.
    """
    with attributes_kept(module):
        before = _values(module)
        expected = run()
        after = _values(module)
        changed = [key for key, value in after.items() if key in before and before[key].value != value.value]
        descriptions = tuple(f"{before[key].name} == {before[key].value}" for key in changed)
        if not changed:
            return None
        for draw in range(len(NUMBERS)):
            for key in changed:
                _set_other(after[key].holder, key[1], draw)
            try:
                results = run()
            except Exception:  # Any type of error: the model's own code misses the value that it needs.
                return descriptions
            if not all(map(same_values, expected, results)):
                return descriptions
    return ()


@dataclass(frozen=True, slots=True)
class _AttributeValue:
    """An attribute: its holder, its name in messages, and its value: a number, or a container's size and numbers."""

    holder: Any
    name: str
    value: Any


def _set_other(holder: Any, name: str, draw: int) -> None:
    value = vars(holder)[name]
    if not isinstance(value, CONTAINERS):
        vars(holder)[name] = type(value)(NUMBERS[draw])
    else:
        items = _items(value)
        _fill(value, items * 2 if isinstance(value, (list, deque)) and draw % 2 == 0 else [])


def _values(module: nn.Module) -> dict[tuple[int, str], _AttributeValue]:
    """Returns the attributes by (id of the holder, name)."""
    values: dict[tuple[int, str], _AttributeValue] = {}
    for path, holder in _holders(module):
        for name, value in vars(holder).items():
            full = f"{path}.{name}" if path else name
            if _is_own(holder, name):
                continue
            if isinstance(value, (int, float)):
                values[id(holder), name] = _AttributeValue(holder, full, value)
            elif isinstance(value, CONTAINERS):
                inside = value.values() if isinstance(value, dict) else value
                numbers = [item for item in inside if isinstance(item, (int, float))]
                values[id(holder), name] = _AttributeValue(holder, full, (len(value), *numbers))
    return values


def _holders(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, object) for every module, and once for every object that a module holds as an attribute.

    Callables and Python modules are left out, because other code writes to them as well.
    """
    seen = set[int]()
    for path, part in module.named_modules():
        yield path, part
        for name, value in vars(part).items():
            is_other = callable(value) or isinstance(value, (torch.Tensor, ModuleType, *CONTAINERS))
            if name not in OWN and hasattr(value, "__dict__") and not is_other and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value


def _attributes_kept(module: nn.Module) -> Callable[[], None]:
    attributes = [
        (holder, {name: value for name, value in vars(holder).items() if not _is_own(holder, name)})
        for _, holder in _holders(module)
    ]
    contents = _contents([value for _, saved in attributes for value in saved.values()])

    def restore() -> None:
        for holder, saved in attributes:
            for name in [name for name in vars(holder) if not _is_own(holder, name) and name not in saved]:
                del vars(holder)[name]
            vars(holder).update(saved)
        for container, items in contents:
            _fill(container, items)

    return restore


def _is_own(holder: Any, name: str) -> bool:
    return isinstance(holder, nn.Module) and name in OWN


def _contents(values: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Returns every container among these values, or nested in them, with its items."""
    contents: dict[int, tuple[Any, list[Any]]] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, CONTAINERS) and id(value) not in contents:
            contents[id(value)] = (value, _items(value))
            waiting += dict.values(value) if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            waiting += value
    return list(contents.values())


def _items(container: Any) -> list[Any]:
    """Returns the items of a container in order; for a dictionary, its (key, value) pairs."""
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def _fill(container: Any, items: list[Any]) -> None:
    """Replaces the items of a container, unless they are the same already."""
    current, base = _items(container), _base(container)
    if len(current) == len(items) and all(map(_is_same, current, items)):
        return
    base.clear(container)
    if isinstance(container, dict):
        for key, value in items:
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        base.update(container, items)
    else:
        base.extend(container, items)


def _base(container: Any) -> Any:
    return next(base for base in CONTAINERS if isinstance(container, base))


def _is_same(first: Any, second: Any) -> bool:
    """Returns whether both are the same object, or pairs of the same objects; `dict.items` makes new pairs."""
    is_pair = isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second)
    return first is second or (is_pair and all(a is b for a, b in zip(first, second, strict=True)))


def same_values(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Says whether two tensors have one shape and equal values, where NaN equals NaN."""
    if expected.shape != actual.shape:
        return False
    return torch.equal(expected, actual) or bool(((expected == actual) | (expected.isnan() & actual.isnan())).all())
