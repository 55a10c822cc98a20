"""Files of torch.export.save become the buckets of one model."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import Embedded, Images, Masked, made, masked_inputs, token_ids
from mod_dialects import D, Inner, V
from safetensors.torch import save_file
from torch import Tensor, nn

from mod_export.errors import CaptureError, CheckpointError
from mod_export.model.model import Model
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
from mod_export.model.pt2_models import model_from_pt2
from mod_export.types import Bucket

SHORT, LONG = Bucket(2, 8), Bucket(2, 16)


def saved(path: Path, module: nn.Module, inputs: Any) -> Path:
    """Saves the program of the module; inputs in a dictionary become keywords."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    torch.export.save(torch.export.export(module, args, dict(kwargs)), path)
    return path


def loaded(model: Model) -> ProgramModel:
    assert isinstance(model, ProgramModel)
    return model


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two programs of one model, which tests only read."""
    module, folder = made(Masked), tmp_path_factory.mktemp("masked")
    return [saved(folder / f"mine-{seq}.pt2", module, masked_inputs(2, seq)) for seq in (16, 8)]


@pytest.mark.slow
def test_files_are_the_same_model_as_the_module(masked: list[Path]) -> None:
    model = model_from_pt2(masked)
    direct = loaded(model_from_module(made(Masked), masked_inputs, [SHORT, LONG], "mine"))
    found = loaded(model)
    assert (model.name, model.origin.architecture) == ("mine-16", "program")
    assert (found.buckets, found.input_names, found.output_names()) == (
        direct.buckets, direct.input_names, direct.output_names()
    )  # fmt: skip
    assert found.weights.keys() == direct.weights.keys()
    for bucket in found.buckets:
        sample = [torch.from_numpy(array) for array in direct.sample(bucket, 3).values()]
        assert all(
            torch.equal(output, reference)
            for output, reference in zip(found.module()(*sample), direct.module()(*sample), strict=True)
        )
        assert np.array_equal(found.sample(bucket, 0)["input_ids"], masked_inputs(2, bucket.seq)["input_ids"].numpy())


def test_weights_are_held_once(masked: list[Path]) -> None:
    opened = loaded(model_from_pt2(masked))
    first, second = (plain.program.state_dict for plain in opened.programs.values())
    assert all(tensor.data_ptr() == second[name].data_ptr() for name, tensor in first.items())


class Dense(nn.Module):
    """`Images` without routing."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, D, 8, stride=8), Inner(), nn.Linear(D, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def test_the_bucket_counts_what_is_routed_also_for_the_baseline(tmp_path: Path) -> None:
    """16 patches and a class token are 17 tokens, although the second dimension of the image is 3."""
    mod = model_from_pt2([saved(tmp_path / "vit.pt2", made(Images), (torch.rand(2, 3, 32, 32),))])
    assert loaded(mod).buckets == (Bucket(2, 17),)
    path = saved(tmp_path / "dense.pt2", made(Dense), (torch.rand(2, 3, 32, 32),))
    assert loaded(model_from_pt2([path], like=mod)).buckets == (Bucket(2, 17),)
    assert loaded(model_from_pt2([path])).buckets == (Bucket(2, 3),)


@pytest.mark.slow
def test_programs_of_other_weights_are_refused(tmp_path: Path, masked: list[Path]) -> None:
    module = made(Masked)
    with torch.no_grad():
        module.head.weight[3, 3] += 1e-6
    changed = saved(tmp_path / "changed.pt2", module, masked_inputs(2, 16))
    with pytest.raises(CheckpointError, match=r"b2s8 and b2s16: the weight embedding.weight differs"):
        model_from_pt2([masked[1], changed])
    module.extra = nn.Linear(2, 2)
    more = saved(tmp_path / "more.pt2", module, masked_inputs(2, 16))
    with pytest.raises(CheckpointError, match=r"the weight extra.bias is in b2s16 and not in b2s8"):
        model_from_pt2([masked[1], more])


class Named(nn.Module):
    """A small model whose inputs and outputs have the names of those of `Masked`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        return {"logits": hidden.sum(-1), "hidden": hidden}


def test_programs_of_other_inputs_or_outputs_are_refused(tmp_path: Path) -> None:
    long, short, less = (
        saved(tmp_path / f"{name}.pt2", Renamed(made(Named), only), renamed(seq))
        for name, only, seq in (("long", "", 16), ("short", "", 8), ("less", "logits", 8))
    )
    assert loaded(model_from_pt2([long, short])).input_names == ("ids", "mask")
    with pytest.raises(CheckpointError, match="one returns logits, the other logits, hidden; programs of one model"):
        model_from_pt2([long, less])
    other = saved(tmp_path / "other.pt2", Same(Renamed(made(Named))), masked_inputs(2, 8))
    both = saved(tmp_path / "both.pt2", Same(Renamed(made(Named))), (renamed(16)["ids"], renamed(16)["mask"]))
    assert loaded(model_from_pt2([other, both])).input_names == ("input_ids", "attention_mask")


def renamed(seq: int) -> dict[str, Tensor]:
    inputs = masked_inputs(2, seq)
    return {"ids": inputs["input_ids"], "mask": inputs["attention_mask"]}


class Same(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return self.inner(input_ids, attention_mask)


class Renamed(nn.Module):
    def __init__(self, inner: nn.Module, only: str = "") -> None:
        super().__init__()
        self.inner, self.only = inner, only

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        outputs = self.inner(ids, mask)
        return {self.only: outputs[self.only]} if self.only else outputs


def test_two_files_of_one_shape_are_refused(masked: list[Path]) -> None:
    with pytest.raises(
        CheckpointError, match=r"mine-16.pt2 and .*mine-16.pt2: both are programs of b2s16; give one of"
    ):
        model_from_pt2([masked[0], masked[0]])


@pytest.mark.slow
def test_programs_without_sample_inputs_need_some(tmp_path: Path) -> None:
    program = torch.export.export(made("index_put"), (token_ids(2, 8),))
    program._example_inputs = None
    torch.export.save(program, tmp_path / "bare.pt2")
    with pytest.raises(CheckpointError, match=r"no sample inputs; give some with --samples.*of ids int64 \[2, 8\]"):
        model_from_pt2([tmp_path / "bare.pt2"])
    save_file({"ids": token_ids(2, 8)}, tmp_path / "samples.safetensors")
    assert len(loaded(model_from_pt2([tmp_path / "bare.pt2"], tmp_path / "samples.safetensors")).samples[SHORT]) == 1


def test_samples_come_before_those_of_the_files(tmp_path: Path, masked: list[Path]) -> None:
    first, second, third = (masked_inputs(2, seq, seed) for seq, seed in ((8, 5), (8, 6), (16, 7)))
    samples = {
        "input_ids.0": first["input_ids"], "attention_mask.0": first["attention_mask"],
        "b2s8/input_ids.1": second["input_ids"], "b2s8/attention_mask.1": second["attention_mask"],
        "b2s16/input_ids": third["input_ids"], "b2s16/attention_mask": third["attention_mask"],
    }  # fmt: skip
    save_file(samples, tmp_path / "s.safetensors")
    opened = loaded(model_from_pt2(masked, tmp_path / "s.safetensors"))
    assert [len(opened.samples[bucket]) for bucket in (SHORT, LONG)] == [3, 2]
    for bucket, seed, expected in ((SHORT, 0, first), (SHORT, 1, second), (LONG, 0, third)):
        assert np.array_equal(opened.sample(bucket, seed)["input_ids"], expected["input_ids"].numpy())


EXPECTED = (
    "an input of no program; expected b2s16: input_ids int64 [2, 16], attention_mask float32 [2, 16]; "
    "b2s8: input_ids int64 [2, 8], attention_mask float32 [2, 8]"
)
WRONG: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "another name": ({"ids": token_ids(2, 8)}, f"ids is int64 [2, 8], {EXPECTED}"),
    "another shape": ({"input_ids": token_ids(2, 9)}, f"input_ids is int64 [2, 9], {EXPECTED}"),
    "another dtype": ({"input_ids": token_ids(2, 8).int()}, f"input_ids is int32 [2, 8], {EXPECTED}"),
    "another bucket": ({"b1s8/input_ids": token_ids(2, 8)}, f"b1s8/input_ids is int64 [2, 8], {EXPECTED}"),
    "one of two": (
        {"input_ids.3": token_ids(2, 8)},
        "b2s8: sample 3 has no attention_mask; expected input_ids int64 [2, 8], attention_mask float32 [2, 8]",
    ),
}  # fmt: skip


@pytest.mark.fast("another dtype", "another name")
@pytest.mark.parametrize("case", WRONG)
def test_samples_that_are_none_are_refused(case: str, tmp_path: Path, masked: list[Path]) -> None:
    samples, message = WRONG[case]
    save_file(dict(samples), tmp_path / "s.safetensors")
    with pytest.raises(CheckpointError) as refused:
        model_from_pt2(masked, tmp_path / "s.safetensors")
    assert message in str(refused.value)


def test_samples_that_are_no_file_of_samples(tmp_path: Path, masked: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"none.safetensors: no such file"):
        model_from_pt2(masked, tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678901")
    with pytest.raises(CheckpointError, match=r"bad.safetensors: not a safetensors file"):
        model_from_pt2(masked, tmp_path / "bad.safetensors")


@pytest.mark.slow
def test_several_outputs_and_a_program_that_is_decomposed(tmp_path: Path) -> None:
    program = torch.export.export(made(Embedded), (torch.randn(2, 8, D),)).run_decompositions()
    torch.export.save(program, tmp_path / "core.pt2")
    opened = loaded(model_from_pt2([tmp_path / "core.pt2"]))
    assert (opened.buckets, opened.output_names()) == ((SHORT,), ("output_0", "output_1"))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_a_program_that_changes_a_buffer_is_refused_in_either_form(tmp_path: Path) -> None:
    program = torch.export.export(Counts(), (torch.ones(2, 4),))
    for number, form in enumerate((program, program.run_decompositions())):
        torch.export.save(form, tmp_path / f"{number}.pt2")
        with pytest.raises(CaptureError, match=rf"{number}.pt2: changes its buffer count in place"):
            model_from_pt2([tmp_path / f"{number}.pt2"])


def test_a_program_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "whole.pt2", nn.Embedding(V, D), (token_ids(2, 8),))
    with zipfile.ZipFile(tmp_path / "whole.pt2") as source, zipfile.ZipFile(tmp_path / "odd.pt2", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("models/model.json"):
                stored = json.loads(data)
                signature = stored["graph_module"]["module_call_graph"][0]["signature"]
                signature["in_spec"] = signature["out_spec"]
                data = json.dumps(stored).encode()
            target.writestr(name, b"" if name.endswith("sample_inputs/model.pt") else data)
    with pytest.raises(CheckpointError, match=r"odd.pt2: a program that cannot be used \("):
        model_from_pt2([tmp_path / "odd.pt2"])


def changed_samples(path: Path, change: Callable[[Tensor], Tensor]) -> Path:
    program = torch.export.export(nn.Embedding(V, D), (token_ids(2, 8),))
    program._example_inputs = ((change(token_ids(2, 8)),), {})
    torch.export.save(program, path)
    return path


def test_sample_inputs_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = changed_samples(tmp_path / "m.pt2", lambda ids: ids[:, :4].clone())
    with pytest.raises(CheckpointError, match=r"its sample inputs are int64 \[2, 4\]; expected input int64 \[2, 8\]"):
        model_from_pt2([path])


class Wide(nn.Module):
    """A model with 32 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PEAK = """
import sys
from pathlib import Path
import psutil
from mod_export.environment import peak_rss_bytes, reset_peak_rss
from mod_export.model.pt2_models import model_from_pt2
model_from_pt2([Path(sys.argv[1])])
reset_peak_rss()
before = psutil.Process().memory_info().rss
model_from_pt2([Path(path) for path in sys.argv[2:]])
print(peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_reading_takes_no_memory_for_weights(tmp_path: Path, masked: list[Path]) -> None:
    """In its own process, 128 MB of weights in two files are mapped and compared, but not copied."""
    module = Wide()
    files = [saved(tmp_path / f"{seq}.pt2", module, (torch.randn(1, seq, 2048),)) for seq in (2, 4)]
    command = [sys.executable, "-c", PEAK, str(masked[0]), *map(str, files)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < sum(parameter.nbytes for parameter in module.parameters()) / 2
