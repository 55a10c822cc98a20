"""A module becomes a model: captured at each shape, equal to the module bit for bit, and the module stays as it was."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import Embedded, Images, Masked, made, masked_inputs, token_ids
from mod_dialects import DIALECTS, D, V
from torch import Tensor, nn

from mod_export.errors import CaptureError, UsageError
from mod_export.graph.capture import exported
from mod_export.graph.sites import routing_sites
from mod_export.model.model import Model
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

SHORT, LONG = Bucket(2, 8), Bucket(2, 16)


def program_model(model: Model) -> ProgramModel:
    assert isinstance(model, ProgramModel)
    return model


def embeddings(batch: int, seq: int, seed: int) -> Tensor:
    return torch.randn(batch, seq, D, generator=torch.Generator().manual_seed(seed))


def images(batch: int, seq: int) -> tuple[Tensor]:
    return (torch.rand(batch, 3, 32, 32),)


CASES: dict[str, tuple[Any, Any, list[Bucket], tuple[str, ...], tuple[str, ...], list[str]]] = {
    **{
        name: (name, token_ids, [SHORT, LONG], ("ids",), ("logits",), ["blocks.1", "blocks.3"]) for name in DIALECTS
    },
    "ids and mask": (
        Masked, masked_inputs, [SHORT, LONG], ("input_ids", "attention_mask"), ("logits", "hidden"), ["block"]
    ),
    "embeddings": (Embedded, embeddings, [SHORT, LONG], ("inputs_embeds",), ("output_0", "output_1"), ["blocks.1"]),
    "images": (Images, images, [Bucket(2, 17)], ("images",), ("logits",), ["blocks.1"]),
}  # fmt: skip


@functools.cache
def captured_case(case: str) -> tuple[nn.Module, ProgramModel]:
    """The module of a case and the model that was captured from it. Tests do not change them."""
    kind, inputs, buckets, *_ = CASES[case]
    module = made(kind)
    return module, program_model(model_from_module(module, inputs, buckets, "mine"))


@pytest.mark.fast("ids and mask", "images")
@pytest.mark.parametrize("case", CASES)
def test_a_module_is_captured_and_captured_again(case: str) -> None:
    """The model returns what the module returns, and another capture, with or without values, gives the same graph."""
    _, _, buckets, input_names, output_names, sites = CASES[case]
    module, loaded = captured_case(case)
    assert (loaded.input_names, loaded.output_names()) == (input_names, output_names)
    assert loaded.buckets == tuple(buckets)
    restored, skeleton = loaded.module(), loaded.skeleton().to("meta")
    for bucket in buckets:
        seen = []
        for seed in range(6):
            sample = [torch.from_numpy(array) for array in loaded.sample(bucket, seed).values()]
            seen.append(sample[0])
            with torch.no_grad():
                expected, outputs = module(*sample), restored(*sample)
            expected = list(expected.values()) if isinstance(expected, dict) else expected
            expected = [expected] if isinstance(expected, Tensor) else expected
            assert all(torch.equal(reference, output) for reference, output in zip(expected, outputs, strict=True))
        assert not torch.equal(seen[0], seen[5])
        again = exported(restored, sample, case)
        assert [str(site.name) for site in routing_sites(again)] == sites
        without = exported(skeleton, [tensor.to("meta") for tensor in sample], case)
        assert [node.name for node in again.graph.nodes] == [node.name for node in without.graph.nodes]


def test_the_module_is_as_before() -> None:
    module = made(Masked)
    module.train()
    module.block.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tensors = {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    attributes = set(vars(module))
    model_from_module(module, masked_inputs, [SHORT], "mine")
    assert module.training
    assert module.head.training
    assert not module.block.training
    assert {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())} == tensors
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    assert set(vars(module)) == attributes


def test_tied_weights_are_one_and_buffers_keep_their_dtypes() -> None:
    _, loaded = captured_case("ids and mask")
    assert "embedding.weight" in loaded.weights
    assert "head.weight" not in loaded.weights
    assert set(loaded.constants) == {"scale", "position_ids", "offset"}
    assert loaded.constants["position_ids"].dtype == np.int64
    assert loaded.module().get_buffer("position_ids").dtype == torch.int64


@pytest.mark.slow
def test_the_same_module_is_the_same_model() -> None:
    first, second = (model_from_module(made("index_put"), token_ids, [SHORT], "mine") for _ in range(2))
    assert first.origin.checkpoint_sha256 == second.origin.checkpoint_sha256
    assert program_model(first).spec == program_model(second).spec
    assert first.origin.package == "mod_export"
    assert first.origin.code_sha256
    changed = made("index_put")
    with torch.no_grad():
        changed.head.weight[0, 0] += 1
    assert (
        model_from_module(changed, token_ids, [SHORT], "mine").origin.checkpoint_sha256
        != first.origin.checkpoint_sha256
    )


@pytest.mark.slow
def test_sixteen_bit_modules_become_float32() -> None:
    module = made("scatter_add").to(torch.bfloat16)
    loaded = program_model(model_from_module(module, token_ids, [SHORT], "mine"))
    assert loaded.weights["head.weight"].dtype == torch.bfloat16
    ids = token_ids(2, 8, 7)
    with torch.no_grad():
        (output,) = loaded.module()(ids)
        assert torch.equal(output, module.float()(ids))


def test_inputs_that_do_not_take_a_seed_are_drawn_alike_every_time() -> None:
    first, second = (program_model(model_from_module(nn.ReLU(), images, [SHORT], "mine")) for _ in range(2))
    samples = [first.sample(SHORT, seed)["input"] for seed in range(5)]
    assert all(np.array_equal(samples[n], second.sample(SHORT, n)["input"]) for n in range(5))
    assert not any(np.array_equal(samples[0], sample) for sample in samples[1:])


def seeded(batch: int, seq: int, seed: int = 0) -> Tensor:
    return embeddings(batch, seq, 100 + seed)  # Torch's own generator never gets this number.


def on_device(batch: int, seq: int, device: str = "cpu") -> Tensor:
    return torch.randn(batch, seq, D, device=device)


def of_sizes(*sizes: int) -> Tensor:
    return torch.randn(*sizes, D)


@pytest.mark.parametrize("inputs", [seeded, on_device, of_sizes, functools.partial(embeddings, seed=7)])
def test_only_a_seed_is_passed_as_a_seed(inputs: Callable[..., Tensor]) -> None:
    model = program_model(model_from_module(nn.Linear(D, D), inputs, [SHORT], "mine"))
    sample = model.sample(SHORT, 1)["input"]
    assert np.array_equal(sample, seeded(SHORT.batch, SHORT.seq, 1).numpy()) == (inputs is seeded)


def test_inputs_of_one_bucket_may_be_the_tensors_themselves() -> None:
    inputs = masked_inputs(2, 8)
    loaded = program_model(model_from_module(made(Masked), inputs, [SHORT], "mine"))
    assert len(loaded.samples[SHORT]) == 1
    drawn = loaded.sample(SHORT, 1)
    assert not np.array_equal(drawn["input_ids"], inputs["input_ids"].numpy())
    assert drawn["input_ids"].max() < V
    assert np.array_equal(drawn["attention_mask"], inputs["attention_mask"].numpy())


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(4, 4)


class Counts(Apart):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class Writes(Apart):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)


class Random(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand(4)


class Counted(Apart):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.linear(x) * self.calls


class Asking(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if torch.compiler.is_compiling() else 1.00001)


class Constant(Apart):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"bias": self.linear.bias * 2, "number": 3}


class Counting(Apart):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.linear(x), 3


class Reserved(Apart):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"routed_3": self.linear(x)}


class Strided(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.ones(1, 4).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.row.as_strided((2, 4), (0, 1))


class Nothing(Apart):
    def forward(self, x: Tensor) -> None:
        self.linear(x)


class Dynamic(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0])


class Narrow(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.bfloat16).view(torch.int16).to(torch.float32))


class Named(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner._parameters["eval"] = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.inner._parameters["eval"]


REFUSED: dict[type[nn.Module], str] = {
    Counts: r"mine at b2s4: changes its buffer count in place, at .*\n.*\nwhich engines do not",
    Writes: r"mine at b2s4: changes its input x in place, at .*\n.*\nwhich engines do not",
    Random: r"mine at b2s4: draws random numbers \(aten\.rand\.default\), at .*\n.*torch\.rand",
    Constant: "mine at b2s4: returns nothing that depends on its inputs; an engine has nothing to compute there",
    Reserved: "mine at b2s4: returns routed_3; names that begin with routed_ are those of routing sites",
    Strided: r"mine at b2s4: calls aten\.as_strided, at .*\n.*\nwhich reads memory that is none of its tensor's",
    Nothing: "mine at b2s4: returns no tensor",
    Named: r"mine at b2s4: the weight inner.eval is called as a method of every module \(eval\)",
    Counted: "mine at b2s4: the module returns something else each time it gets the same inputs",
    Asking: "mine at b2s4: output 0 of the captured program differs from that of the module by ",
    Narrow: "mine at b2s4: cannot be computed in float32: ",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_engine_does_is_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    with pytest.raises(CaptureError) as refused:
        model_from_module(module, torch.randn(2, 4), [Bucket(2, 4)], "mine")
    assert re.match(REFUSED[kind], str(refused.value))
    assert module.count == 0
    assert module.training


def test_a_size_that_depends_on_the_data_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"^mine at b2s4: ") as refused:
        model_from_module(Dynamic(), torch.randn(2, 4), [Bucket(2, 4)], "mine")
    assert "return self.linear(x[x[:, 0] > 0])" in str(refused.value)


class Odd(nn.Module):
    """Values that torch.export keeps and engines do not take: None, a number, an input that is returned, one output
    twice. And outputs that depend on no input, which engines return.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor, mask: Tensor, *, flag: bool = False, none: None = None) -> dict[str, Any]:  # noqa: A002
        out = self.linear(input) * self.mask * (2 if flag else 1) + mask
        returned = {
            "out": out,
            "input": input,
            "none": none,
            "parts": (out, out + torch.tensor(1.0)),
            "a b": out.sum(-1),
        }
        return returned | {"number": 3, "scale": self.linear.bias.exp(), "bias": self.linear.bias}


def test_names_and_values_that_graphs_cannot_have() -> None:
    torch.manual_seed(0)
    module, given = Odd(), {"input": torch.randn(2, 4), "mask": torch.randn(2, 4), "flag": True}
    loaded = program_model(model_from_module(module, given, [Bucket(2, 4)], "mine"))
    assert loaded.input_names == ("input", "mask_in")
    assert loaded.output_names() == ("out", "input_out", "parts_0", "parts_1", "a_b", "scale", "bias")
    outputs = loaded.module()(given["input"], given["mask"])
    returned = module(**given)
    expected = [
        returned["out"],
        given["input"],
        *returned["parts"],
        *(returned[name] for name in ("a b", "scale", "bias")),
    ]
    for output, other in zip(outputs, expected, strict=True):
        assert torch.equal(output, other)
    assert outputs[0].data_ptr() != outputs[2].data_ptr()
    assert loaded.constant_outputs == {"scale", "bias"}


def test_a_number_beside_a_single_output_changes_no_name() -> None:
    loaded = model_from_module(Counting(), torch.randn(2, 4), [Bucket(2, 4)], "mine")
    assert loaded.output_names() == ("logits",)


def test_inputs_of_other_shapes_are_refused() -> None:
    _, loaded = captured_case("images")
    message = r"inputs of the shapes \[\(2, 3, 32, 33\)\]; this model was captured at \[\(2, 3, 32, 32\)\]"
    with pytest.raises(ValueError, match=message):
        loaded.module()(torch.rand(2, 3, 32, 33))


def wrong_shapes(batch: int, seq: int, seed: int) -> Tensor:
    return token_ids(batch, seq + seed)


def failing(batch: int, seq: int) -> Tensor:
    raise KeyError("nothing here")


USAGE: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (
        lambda: model_from_module(len, token_ids, [SHORT], "mine"),  # type: ignore[arg-type]
        "mine: got builtin_function_or_method; expected a torch.nn.Module",
    ),
    "elsewhere": (
        lambda: model_from_module(nn.Linear(4, 4, device="meta"), token_ids, [SHORT], "mine"),
        "mine: is on meta; give it on the CPU: module.to('cpu')",
    ),
    "no bucket": (
        lambda: model_from_module(made("index_put"), token_ids, [], "mine"),
        "mine: no bucket; name at least one shape, (batch, seq)",
    ),
    "one shape": (
        lambda: model_from_module(made("index_put"), token_ids(2, 8), [SHORT, LONG], "mine"),
        "mine: inputs of one shape for 2 buckets; give a function inputs(batch, seq) instead",
    ),
    "changing shapes": (
        lambda: model_from_module(made("index_put"), wrong_shapes, [SHORT], "mine"),
        "mine at b2s8: inputs have the shapes [(2, 8)] and then [(2, 9)]; a bucket has one shape",
    ),
    "an error": (
        lambda: model_from_module(made("index_put"), failing, [SHORT], "mine"),
        "mine at b2s8: inputs(2, 8) raised KeyError: 'nothing here' (test_module.py, line ",
    ),
    "a text": (
        lambda: model_from_module(made("index_put"), lambda batch, seq: "x", [SHORT], "mine"),
        "mine at b2s8: inputs are str; expected a tensor, a tuple or a dict of tensors",
    ),
    "no tensor": (
        lambda: model_from_module(made("index_put"), lambda batch, seq: (None,), [SHORT], "mine"),
        "mine at b2s8: inputs hold no tensor",
    ),
    "a module that fails": (
        lambda: model_from_module(made("index_put"), lambda batch, seq: token_ids(batch, 65), [SHORT], "mine"),
        "mine at b2s8: the module itself fails on these inputs: IndexError: index out of range in self "
        "(mod_dialects.py, line ",
    ),
    "another name": (
        lambda: model_from_module(made("index_put"), {"tokens": token_ids(2, 8)}, [SHORT], "mine"),
        "mine at b2s8: inputs do not fit forward(ids: 'Tensor') -> 'Tensor': missing a required argument: 'ids'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", USAGE)
def test_what_cannot_be_captured_is_named(case: str) -> None:
    call, message = USAGE[case]
    with pytest.raises(UsageError) as refused:
        call()
    assert message in str(refused.value)


@pytest.mark.slow
def test_the_same_shapes_for_two_buckets() -> None:
    with pytest.raises(UsageError, match=r"b2s8 and b2s16: both read inputs of the shapes \[\(2, 8\)\]"):
        model_from_module(made("index_put"), lambda batch, seq: token_ids(2, 8), [SHORT, LONG], "mine")
