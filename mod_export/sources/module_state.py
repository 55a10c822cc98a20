"""What a module keeps beside its weights: modes, buffers, and attributes of Python that a forward pass may change.

Capture runs the code of a module on tensors without values, which must leave no traces in it; and what a run changes
must not decide what the next one computes, because an engine begins every run as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

OWN = frozenset(vars(nn.Module())) | {"training"}
"""Attributes of every module: its parts, and hooks."""
NUMBERS = (0, 7, 10**9)
"""Put in the place of numbers that a run changes, such as a count of calls."""
CONTAINERS = (list, dict, set)
Attributes = Mapping[nn.Module, dict[str, Any]]


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


def is_unread(module: nn.Module, run: Callable[[], Sequence[torch.Tensor]]) -> bool:
    """Whether results are the same whatever stands in the attributes that a run changes, such as a count of calls.

    Numbers are tried as NUMBERS, and what a run puts into lists and dictionaries as never or twice put there.

    Args:
        module: in eval mode.
        run: runs the module on the same inputs each time.

    Returns:
        False also where a run changes no attribute.
    """
    with attributes_kept(module):
        before = _values(module)
        expected = run()
        changed = {key: value for key, value in _values(module).items() if key in before and before[key] != value}
        if not changed:
            return False
        for draw in range(len(NUMBERS)):
            for (one, name), value in changed.items():
                _set_other(one, name, value, draw)
            try:
                found = run()
            except Exception:  # Of any type: it is the model's own code, which misses what stood there.
                return False
            if not all(map(torch.equal, expected, found)):
                return False
    return True


def _set_other(module: nn.Module, name: str, value: Any, draw: int) -> None:
    held = getattr(module, name)
    if isinstance(held, list):
        held[:] = [] if draw % 2 else [*held, *held]
    elif isinstance(held, (dict, set)):
        held.clear()
    else:
        setattr(module, name, type(value)(NUMBERS[draw]))


def _values(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Numbers, and the sizes of containers."""
    found: dict[tuple[nn.Module, str], Any] = {}
    for one in module.modules():
        for name, held in vars(one).items():
            if name in OWN:
                continue
            if isinstance(held, (bool, int, float)):
                found[one, name] = held
            elif isinstance(held, CONTAINERS):
                found[one, name] = len(held)
    return found


def _attributes_kept(module: nn.Module) -> Callable[[], None]:
    attributes: Attributes = {
        one: {name: held for name, held in vars(one).items() if name not in OWN} for one in module.modules()
    }
    contents = _contents([held for own in attributes.values() for held in own.values()])

    def restore() -> None:
        for one, own in attributes.items():
            for name in [name for name in vars(one) if name not in OWN and name not in own]:
                del vars(one)[name]
            vars(one).update(own)
        for container, copied in contents:
            if isinstance(container, list):
                container[:] = copied
            else:
                container.clear()
                container.update(copied)

    return restore


def _contents(held: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Every container among these, and in these, with a copy of what it holds."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = list(held)
    while waiting:
        one = waiting.pop()
        if type(one) in CONTAINERS and id(one) not in found:
            found[id(one)] = (one, type(one)(one))
            waiting += one.values() if isinstance(one, dict) else one
        elif type(one) is tuple:
            waiting += one
    return list(found.values())


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
