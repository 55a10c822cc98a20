"""Programs with other inputs and outputs become functions from tensors to tensors, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import register_dataclass

from mod_export.errors import CaptureError
from mod_export.graph.weights import write_weights
from mod_export.model.model import stored_state
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

BUCKET = Bucket(2, 4)


@dataclass
class Found:
    last_hidden_state: Tensor
    attentions: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None


register_dataclass(Found, serialized_type_name="test_plain_programs.Found")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Returning(Layers):
    """Takes a dictionary and keywords, and returns a dataclass, as models of transformers do."""

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor, use_cache: bool = False) -> Found:
        hidden = self.linear(batch["x y"]) * scale
        return Found(hidden, (hidden + batch["bias"], hidden + 1))


@dataclass
class Scores:
    logits: Tensor
    layers: list[Unknown]
    loss: Tensor | None = None


@dataclass
class Unknown:
    """A plain dataclass that is not registered with torch.export."""

    hidden: Tensor


class Unregistered(Layers):
    def forward(self, x: Tensor) -> tuple[Scores, dict[str, Unknown]]:
        hidden = self.linear(x)
        return Scores(hidden + 1, [Unknown(hidden + 2), Unknown(hidden + 3)]), {"last": Unknown(hidden + 4)}


class Positional(Layers):
    def forward(self, *args: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.linear(args[0]), [args[1] * 2, args[0] * 3]


class Autocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.linear(x)
        with torch.no_grad():
            return hidden * torch.tensor(2.0)


class Casting(Layers):
    """A 16-bit model with a norm in float32, as in Llama."""

    def forward(self, x: Tensor) -> Tensor:
        norm = x.to(torch.float32).pow(2).mean(-1, keepdim=True).rsqrt()
        mask = torch.full((4, 4), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        return (self.linear((x * norm).to(x.dtype)) + mask[0] * 0).type_as(x)


class Logits(Layers):
    def forward(self, ids: Tensor) -> Tensor:
        return self.linear.weight[ids % 4].sum()


class Wide(Layers):
    """Computes angles in float64, as some rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.arange(4, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (x.double() * self.angle * 1e6).cos().float()


class Whole(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


class Divided(Layers):
    def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
        return self.linear(x) / temperature


X = torch.randn(2, 4)
CASES: dict[str, tuple[type[nn.Module], Any, tuple[str, ...], tuple[str, ...]]] = {
    "dataclass": (
        Returning, {"batch": {"x y": X, "bias": X + 1}, "scale": X * 2, "use_cache": True},
        ("x_y", "bias", "scale"), ("last_hidden_state", "attentions_0", "attentions_1"),
    ),
    "positional": (Positional, (X, X + 1), ("args_0", "args_1"), ("output_0", "output_1_0", "output_1_1")),
    "scalar": (Logits, torch.arange(4)[None], ("ids",), ("output",)),
    "whole numbers": (Whole, X, ("x",), ("output",)),
}  # fmt: skip


def captured(module: nn.Module, given: Any) -> ProgramModel:
    loaded = model_from_module(module, given, [BUCKET], "mine")
    assert isinstance(loaded, ProgramModel)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_names_of_inputs_and_outputs(case: str) -> None:
    kind, arguments, inputs, outputs = CASES[case]
    torch.manual_seed(0)
    module = kind()
    loaded = captured(module, arguments)
    assert (loaded.input_names, loaded.output_names()) == (inputs, outputs)
    args = arguments if isinstance(arguments, tuple) else (arguments,)
    with torch.no_grad():
        expected = module(**arguments) if isinstance(arguments, dict) else module(*args)
        results = loaded.module()(*(torch.from_numpy(array) for array in loaded.sample(BUCKET, 0).values()))
    expected = torch.utils._pytree.tree_leaves(expected)
    for result, reference in zip(results, [result for result in expected if result is not None], strict=True):
        assert torch.equal(result, reference)


def in_float32(module: nn.Module, x: Tensor) -> Tensor:
    linear = module.linear
    assert isinstance(linear, nn.Linear)
    norm = x.pow(2).mean(-1, keepdim=True).rsqrt()
    return nn.functional.linear(x * norm, linear.weight.float(), linear.bias.float())


def test_dataclasses_that_torch_does_not_know_are_returned_too() -> None:
    module = Unregistered()
    loaded = captured(module, X)
    assert loaded.output_names() == (
        "0_logits", "0_layers_0_hidden", "0_layers_1_hidden", "1_last_hidden"
    )  # fmt: skip
    expected = [module.linear(X) + number for number in (1, 2, 3, 4)]
    assert all(torch.equal(output, reference) for output, reference in zip(loaded.module()(X), expected, strict=True))
    assert isinstance(module(X)[0], Scores)  # The module itself is unchanged.


def test_inputs_may_have_no_dimension() -> None:
    module = Divided().eval()
    loaded = captured(module, (X, torch.tensor(0.5)))
    for seed in (0, 1):
        sample = loaded.sample(BUCKET, seed)
        assert sample["temperature"].shape == ()
        (output,) = loaded.module()(*map(torch.from_numpy, sample.values()))
        assert torch.equal(output, module(torch.from_numpy(sample["x"]), torch.tensor(0.5)))


def test_float64_stays_where_a_model_asks_for_it(tmp_path: Path) -> None:
    """In float32 these angles would be off by a turn."""
    module = Wide()
    loaded = captured(module, X)
    assert loaded.constants["angle"].dtype == np.float64
    (output,) = loaded.module()(X)
    assert torch.equal(output, module(X))
    write_weights(tmp_path / "w.data", stored_state(loaded), "float32")
    stored = safetensors.torch.load_file(tmp_path / "w.data")
    assert torch.equal(stored["angle"], module.angle)
    assert stored["linear.weight"].dtype == torch.float32
    with pytest.raises(CaptureError, match=r"Wide at b2s4: the weight linear\.weight is float64; engines compute in f"):
        model_from_module(Wide().double(), X.double(), [BUCKET], "Wide")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_programs_compute_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Casting().to(dtype)
    loaded = captured(module, X.to(dtype))
    x = loaded.sample(BUCKET, 0)["x"]
    assert x.dtype == np.float32
    assert loaded.weights["linear.weight"].dtype == module.linear.weight.dtype == dtype
    (output,) = loaded.module()(torch.from_numpy(x))
    assert output.dtype == torch.float32
    assert torch.equal(output, in_float32(module, X.to(dtype).float()))


def test_autocast_computes_in_float32() -> None:
    torch.manual_seed(0)
    module = Autocast()
    (output,) = captured(module, X).module()(X)
    assert torch.equal(output, module.linear(X) * 2)
    assert not torch.equal(output, module(X))


class Read(nn.Module):
    """Reads embeddings at ids after a cast; lengths, a mask and a bias are not ids."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(5, 4), nn.Embedding(50, 4)

    def forward(self, ids: Tensor, lengths: Tensor, mask: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        ids = ids.to(torch.int64).unsqueeze(-1).squeeze(-1)
        hidden = self.small(ids) + self.large(ids) + x
        live = torch.arange(ids.shape[1]) < lengths[:, None]
        return hidden * (live * mask)[..., None] + bias[..., None]


def test_further_samples_are_like_those_that_are_given() -> None:
    torch.manual_seed(0)
    inputs = {
        "ids": torch.randint(0, 5, (2, 40), dtype=torch.int32), "lengths": torch.tensor([40, 3]),
        "mask": torch.ones(2, 40).tril(20), "bias": torch.full((2, 40), float("-inf")).triu(1).nan_to_num(0.5),
        "x": torch.randn(2, 40, 4) * 3 + 10,
    }  # fmt: skip
    inputs["bias"][0, 0] = float("-inf")
    loaded = captured(Read().eval(), inputs)
    drawn = [loaded.sample(BUCKET, seed) for seed in (1, 1, 2)]
    assert all(np.array_equal(drawn[0][name], drawn[1][name]) for name in inputs)
    for name in ("lengths", "mask", "bias"):
        assert np.array_equal(drawn[0][name], inputs[name].numpy())
    assert set(np.unique(drawn[0]["ids"])) == set(range(5))
    assert drawn[0]["ids"].dtype == np.int32
    assert not np.array_equal(drawn[0]["ids"], drawn[2]["ids"])
    assert abs(drawn[0]["x"].mean() - 10) < 1
    assert abs(drawn[0]["x"].std() - 3) < 1
    assert drawn[0]["x"].dtype == np.float32
