"""What a module keeps beside its weights: modes, buffers, and attributes of Python that a forward pass may change.

Capture runs the code of a module on tensors without values, which must leave no traces in it; and what a run changes
must not decide what the next one computes, because an engine begins every run as the first.
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
"""Attributes of every module: its parts, and hooks."""
NUMBERS = (0, 7, 10**9)
"""Put in the place of numbers that a run changes, such as a count of calls."""
CONTAINERS = (list, deque, OrderedDict, dict, set)
"""Their own methods read and write what a module holds: those of a subclass may refuse, or do more."""


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in eval mode; behind it in that of before, with the same values in its buffers, and with
    the attributes that it had.
    """
    # The fused kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer is in no program, and rounds otherwise.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    training = {one: one.training for one in module.modules()}
    restore = _attributes_kept(module)
    plain = [
        (one, name, held)
        for one in module.modules()
        for name, held in vars(one).items()
        if isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter)
    ]
    for one, name, held in plain:
        # A table or a cache that is an attribute may be written to, which torch.export takes of buffers only.
        delattr(one, name)
        one.register_buffer(name, held, persistent=False)
    buffers = {one: {name: (held, _copy(held)) for name, held in one._buffers.items()} for one in module.modules()}
    module.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for one, mode in training.items():
            one.training = mode
        for one, held_by_name in buffers.items():
            for name, (buffer, value) in held_by_name.items():
                one._buffers[name] = buffer
                # What is the same was not written to; torch refuses to write into what is expanded.
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for one, name, _ in plain:
            del one._buffers[name]
            one._non_persistent_buffers_set.discard(name)
        restore()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Behind it every module has the attributes of before, and lists and dictionaries hold what they held.

    torch.export puts copies of lists in the place of those that modules share, and leaves tensors without values.
    """
    restore = _attributes_kept(module)
    try:
        yield
    finally:
        restore()


def attributes_read(module: nn.Module, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[str, ...] | None:
    """What a run changes in the attributes of a module, if results depend on it, such as a schedule that counts calls.

    Numbers are tried as NUMBERS. Lists are tried empty and twice as long, dictionaries and sets empty, so a result that
    needs a number in a dictionary is found to need it. So are the attributes of objects that modules hold.

    Args:
        module: in eval mode.
        run: runs the module on the same inputs each time.

    Returns:
        Each attribute that a run changes, as `name == value` before it; nothing where results are the same whatever
        stands there; None where a run changes no attribute.
    """
    with attributes_kept(module):
        before = _values(module)
        expected = run()
        after = _values(module)
        changed = [key for key, value in after.items() if key in before and before[key].value != value.value]
        told = tuple(f"{before[key].name} == {before[key].value}" for key in changed)
        if not changed:
            return None
        for draw in range(len(NUMBERS)):
            for key in changed:
                _set_other(after[key].holder, key[1], draw)
            try:
                found = run()
            except Exception:  # Of any type: it is the model's own code, which misses what stood there.
                return told
            if not all(map(torch.equal, expected, found)):
                return told
    return ()


@dataclass(frozen=True, slots=True)
class _Value:
    """An attribute: who holds it, what messages call it, and its number, or the size of it and the numbers in it."""

    holder: Any
    name: str
    value: Any


def _set_other(holder: Any, name: str, draw: int) -> None:
    held = vars(holder)[name]
    if not isinstance(held, CONTAINERS):
        vars(holder)[name] = type(held)(NUMBERS[draw])
    else:
        items = _items(held)
        _fill(held, items * 2 if isinstance(held, (list, deque)) and draw % 2 == 0 else [])


def _values(module: nn.Module) -> dict[tuple[int, str], _Value]:
    """By the identity of who holds it, and the name of the attribute."""
    found: dict[tuple[int, str], _Value] = {}
    for path, holder in _holders(module):
        for name, held in vars(holder).items():
            full = f"{path}.{name}" if path else name
            if _is_own(holder, name):
                continue
            if isinstance(held, (int, float)):
                found[id(holder), name] = _Value(holder, full, held)
            elif isinstance(held, CONTAINERS):
                inside = held.values() if isinstance(held, dict) else held
                numbers = [one for one in inside if isinstance(one, (int, float))]
                found[id(holder), name] = _Value(holder, full, (len(held), *numbers))
    return found


def _holders(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module, and every object that one holds as an attribute, with its path; each once.

    What is called, and Python's own modules, are no such objects: others write to them as well.
    """
    seen = set[int]()
    for path, one in module.named_modules():
        yield path, one
        for name, held in vars(one).items():
            is_other = callable(held) or isinstance(held, (torch.Tensor, ModuleType, *CONTAINERS))
            if name not in OWN and hasattr(held, "__dict__") and not is_other and id(held) not in seen:
                seen.add(id(held))
                yield f"{path}.{name}" if path else name, held


def _attributes_kept(module: nn.Module) -> Callable[[], None]:
    attributes = [
        (holder, {name: held for name, held in vars(holder).items() if not _is_own(holder, name)})
        for _, holder in _holders(module)
    ]
    contents = _contents([held for _, own in attributes for held in own.values()])

    def restore() -> None:
        for holder, own in attributes:
            for name in [name for name in vars(holder) if not _is_own(holder, name) and name not in own]:
                del vars(holder)[name]
            vars(holder).update(own)
        for container, items in contents:
            _fill(container, items)

    return restore


def _is_own(holder: Any, name: str) -> bool:
    return isinstance(holder, nn.Module) and name in OWN


def _contents(held: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Every container among these, and in these, with what it holds."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    waiting = list(held)
    while waiting:
        one = waiting.pop()
        if isinstance(one, CONTAINERS) and id(one) not in found:
            found[id(one)] = (one, _items(one))
            waiting += dict.values(one) if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            waiting += one
    return list(found.values())


def _items(container: Any) -> list[Any]:
    """What a container holds, in its order; of a dictionary the pairs."""
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def _fill(container: Any, items: list[Any]) -> None:
    """Let a container hold these, unless it already does."""
    held, base = _items(container), _base(container)
    if len(held) == len(items) and all(map(_is_same, held, items)):
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


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are one object, or pairs of the same key and value: pairs are made anew whenever they are read."""
    is_pair = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
    return one is other or (is_pair and all(a is b for a, b in zip(one, other, strict=True)))


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
