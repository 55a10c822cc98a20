"""Users' models, which know nothing of mod-export, given in every possible way: as a module, programs, a factory."""

from __future__ import annotations

import builtins
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tomli_w
import torch
from command_line import FEW_SAMPLES, invoke, refused
from foreign_models import Buffered, Embedded, Images, Masked, made, masked_inputs, token_ids
from mod_dialects import D, Inner
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils import _pytree as pytree

import mod_export
from mod_export.errors import CheckpointError, ModExportError, UsageError
from mod_export.folder.manifest import open_folder
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.rows.correctness import StructureRow
from mod_export.rows.report import BuildReport, report_from_json
from mod_export.rows.speed import LatencyRow
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("searching_few_rows")
TOML = f"""
targets = ["ort-cpu"]
{FEW_SAMPLES}"""
MODELS: dict[str, tuple[type[nn.Module] | str, Callable[..., Any], list[tuple[int, int]], dict[str, int]]] = {
    "mask and two outputs": (Masked, masked_inputs, [(2, 16)], {"block": 4}),
    "two buckets": (Masked, masked_inputs, [(1, 16), (2, 32)], {"block": 4}),
    "embeddings": (Embedded, lambda batch, seq: torch.randn(batch, seq, D), [(1, 16)], {"blocks.1": 4}),
    "images": (Images, lambda batch, seq: torch.randn(batch, 3, 32, 32), [(2, 17)], {"blocks.1": 4}),
}
MAKER = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.capacity, self.router, self.mlp = capacity, nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x):
        gate, index = torch.topk(self.router(x)[..., 0], int(self.capacity * x.shape[1]))
        wide = index[..., None].expand(-1, -1, 16)
        return x.scatter_add(1, wide, torch.sigmoid(gate)[..., None] * self.mlp(x.gather(1, wide)).relu())

def make(capacity=0.25):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16), Block(capacity), nn.Linear(16, 40))
    return model, lambda batch, seq: torch.randint(0, 40, (batch, seq))
"""


@pytest.fixture(autouse=True)
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(TOML, encoding="utf-8")
    return tmp_path / "c.toml"


def check_folder(root: Path, module: nn.Module, inputs: Any, sites: dict[str, int]) -> None:
    """Checks that a finished folder passes validation, can be timed again, and computes what the module computes."""
    manifest = open_folder(root)
    assert manifest.graphs[0].k_by_layer == sites
    found = validate_folder(root, None, ())
    assert found.verdict.status == "pass", found.verdict.reasons
    assert all(row.passed for row in found.rows(StructureRow))
    assert bench_folder(root, None, ()).rows(LatencyRow)
    feeds = inputs if isinstance(inputs, dict) else {next(iter(manifest.graphs[0].inputs)): inputs}
    with mod_export.load(root) as deployment, torch.no_grad():
        expected = pytree.tree_leaves(module(*feeds.values()))
        found_by_name = deployment.infer({name: tensor.numpy() for name, tensor in feeds.items()})
        for array, tensor in zip(found_by_name.values(), expected, strict=True):
            np.testing.assert_allclose(array, tensor.numpy(), atol=1e-4)
        name, tensor = next(iter(feeds.items()))
        with pytest.raises(
            mod_export.errors.UsageError, match=rf"no bucket was built for {name} \[1\].*; built: {name}"
        ):
            deployment.infer({name: np.zeros(1), **{key: value.numpy() for key, value in feeds.items() if key != name}})
        with pytest.raises(UsageError, match="inputs of its own; give them by name: infer"):
            deployment.run(np.zeros((1, 16), np.int64))


@pytest.mark.fast("mask and two outputs")
@pytest.mark.parametrize("name", MODELS)
def test_a_module(
    name: str, tmp_path: Path, toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also builds as in a notebook, where rich would recognize the shell and make an HTML block of every line."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert Console().is_jupyter
    kind, inputs, buckets, sites = MODELS[name]
    module = made(kind).train()
    report = mod_export.build(module, inputs, buckets, out="built", config=toml)
    assert module.training
    call = f"mod_export.build({kind if isinstance(kind, str) else kind.__name__}, inputs={inputs.__name__}, "
    call = call.replace("<lambda>", "inputs")
    assert report.command == f"{call}buckets={buckets}, out='built', config='{toml}')"
    assert report.rebuild == f"{call}out='BUILD', config='config.toml')"
    assert report.verdict.status == "pass", report.verdict.reasons
    assert "* validate built" in capsys.readouterr().err
    rows = [row for row in report.parity if row.target == "ort-cpu"]
    assert {"sample", "near_ties"} <= set(rows[0].inputs)
    assert [row.routing.routed > 0 and row.passed for row in rows] == [True] * len(buckets)
    assert report.model.reads_tokens == (kind is Masked)
    assert (report.generation is None) == (kind is not Masked)
    assert len(rows[0].further_outputs) == len(pytree.tree_leaves(module.eval()(**named(inputs, module, buckets)))) - 1
    assert all(further.error.max_abs <= further.allowed_max_abs for row in rows for further in row.further_outputs)
    check_folder(tmp_path / "built", module.eval(), inputs(*buckets[0]), sites)


def named(inputs: Callable[..., Any], module: nn.Module, buckets: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    import inspect

    feeds = inputs(*buckets[0])
    return feeds if isinstance(feeds, dict) else {next(iter(inspect.signature(module.forward).parameters)): feeds}


def save_program(path: Path, module: nn.Module, batch: int, seq: int) -> str:
    torch.export.save(torch.export.export(module, (token_ids(batch, seq),)), path)
    return path.name


@pytest.mark.slow
def test_attention_under_a_mask_in_a_buffer_becomes_the_operator(tmp_path: Path, toml: Path) -> None:
    """The mask is stored as a weight of no engine: the operator is causal by its attribute."""
    mod_export.build(made(Buffered), lambda batch, seq: torch.randn(batch, seq, D), [(1, 16)], out="built", config=toml)
    for graph in open_folder(tmp_path / "built").graphs:
        model = onnx.load(tmp_path / "built" / graph.path, load_external_data=False)
        masked = [node for node in model.graph.node if node.op_type in ("Softmax", "Where") or "bias" in node.input]
        attentions = [node for node in model.graph.node if node.op_type == "Attention"]
        assert (masked, len(attentions)) == ([], 2)
        assert all(("is_causal", 1) in [(item.name, item.i) for item in node.attribute] for node in attentions)


@pytest.mark.slow
def test_programs_with_a_baseline_and_samples(tmp_path: Path, toml: Path) -> None:
    model, dense = made("scatter_add"), made("scatter_add")
    dense.blocks = nn.ModuleList([Inner().eval() for _ in range(4)])
    shapes = [(1, 16), (2, 32)]
    ours = [save_program(tmp_path / f"mod{batch}.pt2", model, batch, seq) for batch, seq in shapes]
    theirs = [save_program(tmp_path / f"dense{batch}.pt2", dense, batch, seq) for batch, seq in shapes]
    save_file({f"b1s16/ids.{n}": token_ids(1, 16, 7 + n) for n in range(2)}, tmp_path / "more.safetensors")
    found = invoke(
        "build", *ours, *(part for path in theirs for part in ("--baseline", path)), "--samples", "more.safetensors",
        "-c", toml, "-o", "built", "--report", "r.json", "-q",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [row["bucket"] for row in report["speedup"]] == ["b1s16", "b2s32"]
    assert report["rebuild"] == (
        "mod-export build mod1.pt2 mod2.pt2 --baseline dense1.pt2 --baseline dense2.pt2 --samples more.safetensors "
        "-c config.toml -o BUILD"
    )
    assert sorted(path.name for path in (tmp_path / "built/programs").iterdir()) == [
        "dense-b1s16.json", "dense-b2s32.json", "dense-constants.npz", "dense-samples.npz",
        "mod-b1s16.json", "mod-b2s32.json", "mod-constants.npz", "mod-samples.npz",
    ]  # fmt: skip
    check_folder(tmp_path / "built", model, token_ids(1, 16), {"blocks.1": 4, "blocks.3": 4})
    # Building again does nothing; building another model does.
    again = invoke("build", *ours, "-c", toml, "-o", "built", "-q")
    assert again.exit_code == 0, again.output
    assert "not compared: there is no dense baseline" in again.stdout
    assert not list((tmp_path / "built/programs").glob("dense-*"))


@pytest.mark.slow
def test_a_factory_is_its_own_baseline(tmp_path: Path, toml: Path) -> None:
    (tmp_path / "maker.py").write_text(MAKER, encoding="utf-8")
    found = invoke("build", "maker.py:make", "--buckets", "1x16", "-c", toml)
    assert found.exit_code == 0, found.output
    assert "* load     built" in found.stderr
    manifest = open_folder(tmp_path / "build/maker")
    # With capacity 1 every token runs, in the order of the scores.
    assert [graph.k_by_layer for graph in manifest.graphs if graph.target is None] == [{1: 4}, {1: 16}]
    more = invoke("build", "maker.py:make", "--buckets", "1x16", "--capacity", "0.5", "-c", toml, "-o", "half", "-q")
    assert more.exit_code == 0, more.output
    assert open_folder(tmp_path / "half").graphs[0].k_by_layer == {1: 8}
    # The report's own command gives the same result, so nothing is left to do.
    half_report = report_from_json((tmp_path / "half/report.json").read_text())
    assert half_report.rebuild == "mod-export build maker.py:make --capacity 0.5 -c config.toml -o BUILD"
    (tmp_path / "config.toml").write_text(tomli_w.dumps(half_report.config), encoding="utf-8")
    repeated = invoke(*shlex.split(half_report.rebuild.replace("BUILD", "half"))[1:])
    assert repeated.exit_code == 0, repeated.output
    *stages, report = repeated.stderr.splitlines()
    assert {line.split()[2] for line in stages} == {"reused"}
    assert report.startswith("* report ")


class Overflowing(nn.Module):
    """Squares its values until they exceed float32, and excludes some classes."""

    def __init__(self, squares: int) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(40, D), Inner(), nn.Linear(D, 40)
        self.router, self.squares = nn.Linear(D, 1), squares

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        score, index = torch.topk(self.router(x)[..., 0], 4)
        wide = index[..., None].expand(-1, -1, D)
        x = x.scatter_add(1, wide, torch.sigmoid(score)[..., None] * self.block(x.gather(1, wide)))
        for _ in range(self.squares):
            x = 9 * x * x
        logits: torch.Tensor = self.head(x - x.mean(-1, keepdim=True))
        return logits.masked_fill(torch.arange(40) >= 37, -torch.inf)


@pytest.mark.slow
def test_logits_that_are_excluded_and_a_model_that_overflows(tmp_path: Path) -> None:
    def build(squares: int) -> BuildReport:
        torch.manual_seed(0)
        return mod_export.build(
            Overflowing(squares), inputs=lambda batch, seq: torch.randint(0, 40, (batch, seq)), buckets=[(1, 16)],
            out=tmp_path / str(squares), targets=["ort-cpu"], config=tmp_path / "c.toml",
        )  # fmt: skip

    assert build(0).verdict.status == "pass"
    found = build(9)
    assert found.verdict.status == "fail"
    for reason in found.verdict.reasons:
        assert re.search(
            r"parity: the model itself returns NaN, in eager float32, on (\d+) of \1 inputs \(sample, ties, near_ties\)"
            r", so there is nothing to compare with: aten\.\S+ in \S+( at .+:\d+)? makes the first.*; its values "
            r"overflow there, or these inputs are not",
            reason,
        )


@pytest.mark.fast("beside model.pt")
@pytest.mark.parametrize("form", ["folder", "beside model.pt"])
def test_a_build_from_python_keeps_the_tokenizer_of_the_model(
    form: str, tmp_path: Path, fast: Path, tiny_spec: ModelSpec
) -> None:
    source = tmp_path / "named" if form == "folder" else tmp_path / "run" / "model.pt"
    source.parent.mkdir(exist_ok=True)
    save_checkpoint(source, random_checkpoint(replace(tiny_spec, n_layers=2), 0))
    words = {f"w{number}": number for number in range(200)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(
        str((source if form == "folder" else source.parent) / "tokenizer.json")
    )
    report = mod_export.build(
        source,
        buckets=(shape for shape in [(1, 16)]),
        out=tmp_path / "out",
        targets="ort-cpu",
        config=fast,
        verbosity=-1,
    )
    assert report.verdict.status == "pass"
    assert "buckets=[(1, 16)]" in report.command
    manifest = open_folder(tmp_path / "out")
    assert manifest.tokenizer == "tokenizer.json"
    assert "tokenizer.json" in manifest.files


def test_a_name_on_the_hub_is_no_python_function(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hf://nobody: expected hf://ORG/NAME or hf://ORG/NAME@REVISION"):
        mod_export.build("hf://nobody", buckets=[(1, 16)], out=tmp_path / "out", targets="ort-cpu")
    assert not (tmp_path / "out").exists()


def test_what_is_refused(tmp_path: Path, toml: Path) -> None:
    (tmp_path / "maker.py").write_text(MAKER, encoding="utf-8")
    (tmp_path / "m.pt").write_bytes(b"no archive")
    for arguments, message in (
        (["maker.py:make"], r"error: maker\.py:make: at which shapes\? Name them, such as --buckets 1x128,1x512"),
        (["a.pt2", "m.pt"], r"error: m\.pt: only programs \(\.pt2\), one for each shape, are built together"),
        (["a.pt2"], r"error: a\.pt2: no such file"),
        (
            ["maker.py:make", "--samples", "s"],
            r"error: --samples s: only a \.pt2 takes samples; maker\.py:make",
        ),
        (["maker.py:make", "--baseline", "b.pt2", "--buckets", "1x16"], r"error: b\.pt2: no such file"),
    ):
        refused(invoke("build", *arguments, "-c", toml), message)
    wrong = invoke("build", "maker.py:make", "--buckets", "1,2")
    assert wrong.exit_code == 2
    assert "'1,2': expected rows x tokens, such as 1x128,1x512" in wrong.stderr
    with pytest.raises(ModExportError, match=r"Masked: of a module the inputs must be given: inputs=lambda batch, seq"):
        mod_export.build(made(Masked), buckets=[(1, 16)], verbosity=-1)
    with pytest.raises(ModExportError, match=r"Masked: samples belong to \.pt2 files; of a module, inputs"):
        mod_export.build(made(Masked), masked_inputs, [(1, 16)], samples="s.safetensors", verbosity=-1)


@pytest.mark.slow
def test_what_is_refused_after_a_program_was_read(tmp_path: Path) -> None:
    save_program(tmp_path / "mod.pt2", made("scatter_add"), 1, 16)
    refused(invoke("build", "mod.pt2", "--samples", "none"), r"error: none: no such file")
    refused(invoke("build", "mod.pt2", "--buckets", "1x32", "-q"), r"error: buckets: b1s32: mod was captured at b1s16;")
    refused(invoke("build", "mod.pt2", "--capacity", "0.5", "-q"), "that of mod cannot be changed without training")
    Tokenizer(WordLevel({"a": 0})).save(str(tmp_path / "t.json"))
    refused(
        invoke("build", "mod.pt2", "--tokenizer", "t.json", "-q"),
        r"error: t\.json: mod is not known to read token ids, so it takes no tokenizer; leave it out",
    )
    (tmp_path / "last.toml").write_text('outputs = "last"\n' + TOML, encoding="utf-8")
    refused(
        invoke("build", "mod.pt2", "-c", "last.toml", "-q"),
        "outputs: last, but mod is no model of token ids; leave `outputs` out",
    )
    torch.export.save(torch.export.export(made(Embedded), (torch.randn(1, 16, D),)), tmp_path / "other.pt2")
    with pytest.raises(ModExportError, match=r"baseline other: has at b1s16 the inputs inputs_embeds float32 .*inst"):
        mod_export.build(made(Masked), masked_inputs, [(1, 16)], baseline=tmp_path / "other.pt2", verbosity=-1)


@pytest.mark.slow
def test_every_target(tmp_path: Path, toml: Path) -> None:
    """The targets include AOTInductor, and TensorRT-RTX plans, whose graphs are judged on ONNX Runtime."""
    module = made(Masked)
    targets = ["ort-cpu", "inductor", "tensorrt-rtx"]
    report = mod_export.build(module, masked_inputs, [(1, 16)], out="built", targets=targets, config=toml, verbosity=-1)
    assert report.verdict.status == "pass", report.verdict.reasons
    judged = {row.target for row in report.parity}
    assert judged == {"ort-cpu", "inductor", "portable", "tensorrt-rtx graph"}
    assert {engine.target for engine in open_folder(tmp_path / "built").engines} == set(targets)
    feeds = masked_inputs(1, 16)
    with mod_export.load(tmp_path / "built", target="inductor") as deployment, torch.no_grad():
        expected = module(**feeds)
        found = deployment.infer({name: tensor.numpy() for name, tensor in feeds.items()})
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), atol=1e-4)
