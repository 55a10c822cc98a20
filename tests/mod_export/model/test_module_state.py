"""What a module keeps beside its weights is as it was behind a capture, and decides nothing unnoticed."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mod_export.errors import CaptureError
from mod_export.model.module import model_from_module
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
    """As token merging keeps the sizes of tokens: in one dictionary that all its parts write to."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {"size": None}
        self.parts = nn.Sequential(Part(self.notes), Part(self.notes))

    def forward(self, x: Tensor) -> Tensor:
        self.notes["size"] = None
        found: Tensor = self.parts(x)
        return found


class Noting(nn.Module):
    """Counts, and remembers what nothing reads."""

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
    """What is derived from dictionaries and lists, and a deque, which only grow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.recent = nn.Linear(D, D), deque[float]([0.5], maxlen=3)
        self.named, self.counts = OrderedDict(first=1), Counter[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1.0)
        self.named[f"call {len(self.named)}"] = 0
        self.counts["calls"] += 1
        found: Tensor = self.linear(x)
        return found


class Refusing(OrderedDict[str, int]):
    """A configuration that nobody may change, as packages keep them; what is theirs writes around it."""

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
        found: Tensor = self.linear(x) * self.config["width"]
        return found


class InDictionary(nn.Module):
    """A count that nothing reads stands beside one that is read, in a dictionary of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.state = nn.Linear(D, D), 0, {"step": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.state["step"] += 1
        found: Tensor = self.linear(x)
        return found if self.state["step"] < 1000 else found * 2


class InObject(InDictionary):
    """The same in an object that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(step=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.held.step += 1
        found: Tensor = self.linear(x)
        return found if self.held.step < 1000 else found * 2


class Warming(nn.Module):
    """Routes only behind many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.linear(x)
        return found if self.calls < 1000 else found * 2


class Popping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(D, D), [1.0, 2.0] * 20

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found * (1 + 0 * self.scales.pop())


class Expanded(nn.Module):
    """With a buffer that is one row for all, and a weight whose memory is not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(1, D).expand(S, D))
        self.conv = nn.Conv2d(1, D, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv((x + self.bias)[:, None]).mean(1)
        return found


class Unset(Expanded):
    """With NaN in an expanded buffer and in its results, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unset", torch.full((1, D), torch.nan).expand(S, D))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.cat([super().forward(x), self.unset.expand(len(x), S, D)], 1)


def captured(module: nn.Module) -> ProgramModel:
    torch.manual_seed(0)
    loaded = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine").loaded
    assert isinstance(loaded, ProgramModel)
    return loaded


@pytest.mark.parametrize("kind", [Sharing, Noting, Expanded, Subclasses, Frozen, Unset])
def test_what_nothing_reads_is_no_obstacle_and_stays_as_it_was(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    before = {name: held for name, held in vars(module).items() if not name.startswith("_")}
    texts = {name: repr(held) for name, held in before.items()}
    loaded = captured(module)
    after = {name: held for name, held in vars(module).items() if not name.startswith("_")}
    assert {name: id(held) for name, held in after.items()} == {name: id(held) for name, held in before.items()}
    assert {name: repr(held) for name, held in after.items()} == texts
    x = torch.randn(B, S, D)
    torch.testing.assert_close(loaded.module()(x)[0], module(x), equal_nan=True)


@pytest.mark.parametrize("kind", [Warming, Popping, InDictionary, InObject])
def test_what_a_later_call_reads_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r'^mine at b2s4: .*(\n.*)*See "State that changes" in docs/porting.md'):
        captured(kind())
