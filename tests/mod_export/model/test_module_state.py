"""State beside the weights is the same after a capture; state on which later calls depend is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mod_export.errors import CaptureError, UsageError
from mod_export.model.module import model_from_module
from mod_export.model.module_state import as_it_was
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

B, S, D = 2, 4, 8


class Part(nn.Module):
    def __init__(self, notes: dict[str, Any]) -> None:
        super().__init__()
        self.notes, self.linear = notes, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        size = self.notes["size"]
        self.notes["size"] = torch.ones(x.shape[:2]) if size is None else size + 1
        return self.linear(x) * self.notes["size"][..., None]


class Sharing(nn.Module):
    """Keeps state in one dictionary that all parts write to, as token merging does with the sizes of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {"size": None}
        self.parts = nn.Sequential(Part(self.notes), Part(self.notes))

    def forward(self, x: Tensor) -> Tensor:
        self.notes["size"] = None
        result: Tensor = self.parts(x)
        return result


class Noting(nn.Module):
    """Counts calls and stores values, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.calls, self.log, self.seen = 0, list[Any](), dict[int, Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(tuple(x.shape))
        self.seen[self.calls] = x.mean()
        self.last = self.linear(x)
        return self.last


class Subclasses(nn.Module):
    """Has subclasses of dict and a deque, to which each call adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.recent = nn.Linear(D, D), deque[float]([0.5], maxlen=3)
        self.named, self.counts = OrderedDict(first=1), Counter[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1.0)
        self.named[f"call {len(self.named)}"] = 0
        self.counts["calls"] += 1
        result: Tensor = self.linear(x)
        return result


class Refusing(OrderedDict[str, int]):
    """A configuration that refuses changes, as in some packages, whose own code bypasses its methods."""

    def update(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError("this configuration is fixed")

    clear = __delitem__ = __setitem__ = update


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config, self.counts = nn.Linear(D, D), Refusing(), Refusing()
        OrderedDict.__setitem__(self.config, "width", D)

    def forward(self, x: Tensor) -> Tensor:
        OrderedDict.__setitem__(self.counts, "calls", self.counts.get("calls", 0) + 1)
        result: Tensor = self.linear(x) * self.config["width"]
        return result


class InDictionary(nn.Module):
    """Has a count that nothing reads, and one that is read, in a dictionary of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.state = nn.Linear(D, D), 0, {"step": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.state["step"] += 1
        result: Tensor = self.linear(x)
        return result if self.state["step"] < 1000 else result * 2


class InObject(InDictionary):
    """Like `InDictionary`, but the count that is read is in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(step=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.held.step += 1
        result: Tensor = self.linear(x)
        return result if self.held.step < 1000 else result * 2


class Warming(nn.Module):
    """Doubles its result after many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.linear(x)
        return result if self.calls < 1000 else result * 2


class Popping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(D, D), [1.0, 2.0] * 20

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result * (1 + 0 * self.scales.pop())


class Expanded(nn.Module):
    """Has a buffer that expands one row, and a weight in the memory order channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(1, D).expand(S, D))
        self.conv = nn.Conv2d(1, D, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv((x + self.bias)[:, None]).mean(1)
        return result


class Unset(Expanded):
    """Has NaN in an expanded buffer and in its results, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unset", torch.full((1, D), torch.nan).expand(S, D))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.cat([super().forward(x), self.unset.expand(len(x), S, D)], 1)


class Defaulted(nn.Module):
    """Has a tensor with a default in the class body, one without, and one whose name no buffer can have."""

    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask, self.scale = nn.Linear(D, D), torch.tril(torch.ones(S, S)), torch.full((D,), 2.0)
        setattr(self, "of.rows", torch.full((S, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mask @ self.linear(x) * self.scale * getattr(self, "of.rows")
        return result


class Computed(nn.Module):
    """Has a cached property that was computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        assert self.mask.shape == (S, S)

    @cached_property
    def mask(self) -> Tensor:
        return torch.tril(torch.ones(S, S))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mask @ self.linear(x)
        return result


class Delegating(nn.Module):
    """Has a tensor of the same name as a part of it, and asks that part for the names that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mask = Computed(), torch.full((S, S), 0.5)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mask @ self.inner(x)
        return result


def captured(module: nn.Module) -> ProgramModel:
    torch.manual_seed(0)
    loaded = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine")
    assert isinstance(loaded, ProgramModel)
    return loaded


KINDS = [Sharing, Noting, Expanded, Subclasses, Frozen, Unset, Defaulted, Computed, Delegating]


@pytest.mark.parametrize("kind", KINDS)
def test_what_nothing_reads_is_no_obstacle_and_stays_as_it_was(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    texts = {name: repr(value) for name, value in before.items()}
    loaded = captured(module)
    after = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert {name: id(value) for name, value in after.items()} == {name: id(value) for name, value in before.items()}
    assert {name: repr(value) for name, value in after.items()} == texts
    x = torch.randn(B, S, D)
    torch.testing.assert_close(loaded.module()(x)[0], module(x), equal_nan=True)


def _fails(*_: Any) -> Any:
    raise RuntimeError("not today")


def _build(module: nn.Module) -> None:
    module.forward = _fails
    try:
        captured(module)
    finally:
        del module.forward


def _change_mode(module: nn.Module) -> None:
    """Enters the context of a capture with a module that refuses to change its mode."""
    module.train = _fails
    try:
        with as_it_was(module):
            pass
    finally:
        del module.train


@pytest.mark.parametrize("attempt", [_build, _change_mode])
@pytest.mark.parametrize("kind", [Defaulted, Computed, Delegating])
def test_after_an_error_the_module_is_as_it_was(kind: type[nn.Module], attempt: Callable[[nn.Module], None]) -> None:
    module, x = kind().train(), torch.randn(B, S, D)
    before, expected, fused = dict(vars(module)), module(x), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises((UsageError, RuntimeError), match="not today"):
        attempt(module)
    assert vars(module) == before
    assert not dict(module.named_buffers())
    assert all(part.training for part in module.modules())
    assert torch.equal(module(x), expected)
    assert torch.backends.mha.get_fastpath_enabled() == fused


def test_a_tensor_with_a_default_that_a_run_writes_has_its_values_back() -> None:
    module = Defaulted()
    with as_it_was(module), torch.no_grad():
        module.mask += 1.0
        module.scale += 1.0
    assert torch.equal(module.mask, torch.tril(torch.ones(S, S)))
    assert torch.equal(module.scale, torch.full((D,), 2.0))


@pytest.mark.parametrize("kind", [Warming, Popping, InDictionary, InObject])
def test_what_a_later_call_reads_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r'^mine at b2s4: .*(\n.*)*See "State that changes" in docs/models.md'):
        captured(kind())
