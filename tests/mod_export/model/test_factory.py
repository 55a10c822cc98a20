"""A model from a function in the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mod_export.errors import UsageError
from mod_export.model.factory import model_from_factory
from mod_export.types import Bucket

BUCKET = Bucket(1, 8)
CODE = """
import torch
from torch import nn
from beside_it import WIDTH


class Small(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
        self.router, self.block = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        k = int(x.shape[1] * self.capacity)
        index = torch.topk(self.router(x)[..., 0], k).indices.sort().values
        wide = index[..., None].expand(-1, -1, WIDTH)
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


def inputs(batch, seq):
    return torch.randn(batch, seq, WIDTH)


def make_model(capacity=0.25):
    return Small(capacity), inputs


def make_pair():
    return Small(0.25), inputs, nn.Linear(WIDTH, WIDTH)


def make_alone():
    return Small(0.25), inputs


def make_wrong():
    return Small(0.25)


def make_list():
    return [1], inputs


def make_error():
    return nn.Linear(3), inputs


def make_exit():
    raise SystemExit(3)


not_a_function = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "beside_it.py").write_text("WIDTH = 16\n", encoding="utf-8")
    (tmp_path / "my_model.py").write_text(CODE, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)
    before = set(sys.modules)
    yield tmp_path / "my_model.py"
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__ or "").parent == tmp_path:
            del sys.modules[name]


def test_a_function_of_a_file(code: Path) -> None:
    model, baseline = model_from_factory(f"{code}:make_pair", [BUCKET])
    assert model.name == "my_model"
    assert baseline is not None
    assert baseline.name == "my_model-dense"
    assert set(baseline.weights) == {"weight", "bias"}


def test_the_same_function_without_skipping_is_the_baseline(code: Path) -> None:
    model, baseline = model_from_factory(f"{code}:make_model", [BUCKET])
    assert baseline is not None
    assert set(baseline.weights) == set(model.weights)
    assert baseline.origin.checkpoint_sha256 != model.origin.checkpoint_sha256


@pytest.mark.slow
def test_another_capacity(code: Path) -> None:
    default, _ = model_from_factory(f"{code}:make_model", [BUCKET])
    same, _ = model_from_factory(f"{code}:make_model", [BUCKET], 0.25)
    half, _ = model_from_factory(f"{code}:make_model", [BUCKET], 0.5)
    assert default.spec["programs"] == same.spec["programs"] != half.spec["programs"]
    with pytest.raises(UsageError, match=r"make_pair: capacity 0.5: make_pair has no parameter `capacity`"):
        model_from_factory(f"{code}:make_pair", [BUCKET], 0.5)


def test_a_function_of_a_package_without_a_baseline(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    model, baseline = model_from_factory("my_model:make_alone", [BUCKET])
    assert (model.name, baseline) == ("my_model", None)


WRONG = {
    "make_modle": "no make_modle there; did you mean make_model or make_",
    "zzz": "no zzz there; it has Small, inputs, make_model, make_pair, make_alone, make_wrong, make_list, make_error",
    "not_a_function": "is int; expected a function that returns a module and its inputs",
    "make_wrong": "make_wrong() returned Small; expected `module, inputs` or `module, inputs, baseline`",
    "make_list": "make_list() returned (list, function); expected `module, inputs` or `module, inputs, baseline`",
    "make_error": "make_error() raised: TypeError: Linear.__init__() missing 1 required positional argument: "
    "'out_features' (my_model.py, line 45: return nn.Linear(3), inputs)",
    "make_exit": "make_exit() raised: SystemExit: 3 (my_model.py, line 49: raise SystemExit(3))",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_such_function(name: str, code: Path) -> None:
    with pytest.raises(UsageError) as refused:
        model_from_factory(f"{code}:{name}", [BUCKET])
    assert str(refused.value).startswith(f"{code}:{name}: {WRONG[name]}")


def test_what_cannot_be_imported(code: Path) -> None:
    with pytest.raises(UsageError, match=r"expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"):
        model_from_factory(str(code), [BUCKET])
    with pytest.raises(UsageError, match=r"absent.py: no such file"):
        model_from_factory(f"{code.parent}/absent.py:make", [BUCKET])
    with pytest.raises(UsageError, match=r"absent_package:make: cannot be imported: ModuleNotFoundError: No module"):
        model_from_factory("absent_package:make", [BUCKET])
    code.write_text("import torch\nraise ValueError('a bad day')\n", encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        model_from_factory(f"{code}:make", [BUCKET])
    expected = "cannot be imported: ValueError: a bad day (my_model.py, line 2: raise ValueError('a bad day'))"
    assert str(refused.value) == f"{code}:make: {expected}"
    code.write_text("def make(:\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot be imported: SyntaxError: .*my_model.py, line 1"):
        model_from_factory(f"{code}:make", [BUCKET])
