"""Any fault in a request causes one clear message, and leaves or overwrites no file."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Payload, commands, contents, invoke, raw_checkpoint, refused

from mod_export.engines import ENGINES
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint

# Refused requests and their messages. Each case writes its files into the folder and returns arguments of `build`.

Case = Callable[[Path, Path], list[object]]
CASES: dict[str, tuple[Case, str]] = {}


def case(message: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, message)
        return function

    return register


def _file(name: str, data: bytes, *options: str) -> Case:
    """Writes a file, used as the model, or as the value of the last of these options with a sound model."""

    def written(folder: Path, checkpoint: Path) -> list[object]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        return [checkpoint, *options, folder / name] if options else [folder / name]

    return written


def _given(*arguments: str) -> Case:
    """Options for a sound model; an argument that begins with DIR is a path in the folder."""
    return lambda folder, checkpoint: [
        folder / word.removeprefix("DIR/") if word.startswith("DIR") else {"MODEL": checkpoint}.get(word, word)
        for word in arguments
    ]


CASES |= {
    "absent": (_given("DIR/absent.pt"), r"absent\.pt: no such file or folder"),
    "not_a_checkpoint": (
        _file("notes.pt", b"my notes"),
        r"notes\.pt: not a model\.pt as torch\.save writes it: truncated, or not a checkpoint, or a bare pickle",
    ),
    "bucket_too_long": (
        _file("c.toml", b"buckets = [[1, 64], [1, 512]]", "-c"),
        r"buckets: 1 x 512 is longer than the model's 256 positions; shorten it or drop it",
    ),
    "unknown_key": (_file("c.toml", b"buckts = [[1, 64]]", "-c"), r"buckts: unknown key, did you mean 'buckets'\?"),
    "broken_toml": (_file("c.toml", b"buckets = [[1, 64]", "-c"), r"c\.toml: not valid TOML"),
    "baseline_that_is_none": (_file("base.pt", b"PK", "--baseline"), r"base\.pt: not a model\.pt"),
    "unknown_target": (
        _given("MODEL", "--target", "ort-cup"),
        r"unknown target 'ort-cup', did you mean 'ort-cpu'\?; known: ort-cpu, openvino, ort-cuda, inductor, "
        "inductor-cuda, tensorrt",
    ),
    "unknown_target_like_no_other": (
        _given("MODEL", "--target", "abacus"),
        r"unknown target 'abacus'; known: ort-cpu,",
    ),
    "absent_config": (_given("MODEL", "-c", "DIR/absent.toml"), r"absent\.toml: no such configuration file"),
    "absent_baseline": (_given("MODEL", "--baseline", "DIR/base.pt"), r"base\.pt: no such file or folder"),
    "routed_baseline": (
        _given("MODEL", "--baseline", "MODEL"),
        r"baseline tiny: has routed layers; a baseline is a dense model",
    ),
    "report_over_a_folder": (_given("MODEL", "--report", "DIR/"), r": is a folder; choose another place with --report"),
}


@case(r"folder: no config\.json in this folder; expected config\.json and model\.safetensors, or a model\.pt")
def folder_without_config(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "folder").mkdir()
    return [folder / "folder"]


@case(r"model\.safetensors: weights without a spec; give the folder that holds it beside its config\.json")
def weights_alone(folder: Path, checkpoint: Path) -> list[object]:
    save_checkpoint(folder / "model", load_checkpoint(checkpoint))
    return [folder / "model/model.safetensors"]


@case(r"model\.safetensors: truncated, it has 5000 of at least \d+ bytes; fetch it again")
def truncated_safetensors(folder: Path, checkpoint: Path) -> list[object]:
    save_checkpoint(folder / "model", load_checkpoint(checkpoint))
    os.truncate(folder / "model/model.safetensors", 5000)
    return [folder / "model"]


def _truncated(share: float) -> Case:
    def truncated(folder: Path, checkpoint: Path) -> list[object]:
        shutil.copy(checkpoint, folder / "cut.pt")
        os.truncate(folder / "cut.pt", int(share * checkpoint.stat().st_size))
        return [folder / "cut.pt"]

    return truncated


CASES |= {
    f"truncated_to_{share}": (_truncated(share), r"cut\.pt: not a model\.pt as torch\.save writes it")
    for share in (0.5, 0.9999)
} | {"truncated_to_0": (_truncated(0), r"cut\.pt: an empty file; fetch it again")}


@case(r"evil\.pt: not a model\.pt as torch\.save writes it: .*or a bare pickle, which could run code and is not read")
def bare_pickle_with_code(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "evil.pt").write_bytes(pickle.dumps(Payload(folder / "ran")))
    return [folder / "evil.pt"]


@case(r"evil\.pt: refused, its pickle asks for posix\.mkdir, which is more than plain data and tensors")
def pickle_with_code(folder: Path, checkpoint: Path) -> list[object]:
    return [raw_checkpoint(folder / "evil.pt", load_checkpoint(checkpoint), payload=Payload(folder / "ran"))]


@case(r"m\.pt: weights do not fit the spec: layers\.0\.attention\.q_proj\.weight has shape \[32, 31\], "
      r"the spec says \[32, 32\]")  # fmt: skip
def weight_of_wrong_shape(folder: Path, checkpoint: Path) -> list[object]:
    return [_with_weight(folder, checkpoint, "layers.0.attention.q_proj.weight", lambda tensor: tensor[:, 1:].clone())]


@case(r"m\.pt: weights do not fit the spec: missing layers\.1\.router\.projection\.weight \[1, 32\]")
def missing_weight(folder: Path, checkpoint: Path) -> list[object]:
    found = load_checkpoint(checkpoint)
    weights = {name: tensor for name, tensor in found.weights.items() if name != "layers.1.router.projection.weight"}
    return [raw_checkpoint(folder / "m.pt", replace(found, weights=weights))]


@case(r"m\.pt: norm\.weight holds 1 values that are NaN or infinite in float32, of 32")
def nan_weight(folder: Path, checkpoint: Path) -> list[object]:
    return [_with_weight(folder, checkpoint, "norm.weight", lambda tensor: tensor.index_fill(0, FIRST, float("nan")))]


FIRST = torch.tensor([0])


def _with_weight(folder: Path, checkpoint: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    found = load_checkpoint(checkpoint)
    weights = {**found.weights, name: change(found.weights[name])}
    return raw_checkpoint(folder / "m.pt", replace(found, weights=weights))


def _capacity(value: float) -> Case:
    def capacity(folder: Path, checkpoint: Path) -> list[object]:
        found = load_checkpoint(checkpoint)
        routing = found.spec.to_dict()["routing"] | {"capacity": value}
        return [raw_checkpoint(folder / "m.pt", found, spec={"routing": routing})]

    return capacity


CASES |= {
    f"capacity_{value}": (_capacity(value), rf"m\.pt: spec\.routing\.capacity.*{re.escape(str(value))}")
    for value in (-0.125, float("nan"))
}


@case(r"cannot build here for (ort-cuda|tensorrt|tensorrt-rtx|inductor): .+")
def unavailable_target(folder: Path, checkpoint: Path) -> list[object]:
    absent = [name for name, engine in ENGINES.items() if not engine.availability().builds]
    if not absent:
        pytest.skip("every target can build on this machine")
    return [checkpoint, "--target", absent[0]]


@case(r"baseline base: has a vocabulary of 300 instead of 256 and positions up to 128 instead of 256")
def baseline_for_another_job(folder: Path, checkpoint: Path) -> list[object]:
    spec = replace(load_checkpoint(checkpoint).spec.dense(), vocab_size=300, max_positions=128)
    save_checkpoint(folder / "base.pt", random_checkpoint(spec, 0))
    return [checkpoint, "--baseline", folder / "base.pt"]


@case(r"file/rows\.json: cannot write in .*; choose another place with --report")
def report_below_a_file(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "file").write_text("mine")
    return [checkpoint, "--report", folder / "file/rows.json"]


INTO_A_FINISHED_FOLDER = ("absent", "unknown_key", "missing_weight", "routed_baseline")


@pytest.mark.parametrize(
    ("name", "existing"), [*((name, False) for name in CASES), *((name, True) for name in INTO_A_FINISHED_FOLDER)]
)
def test_bad_input(name: str, existing: bool, tmp_path: Path, checkpoint: Path, small: Path) -> None:
    make, message = CASES[name]
    arguments = make(tmp_path, checkpoint)
    if existing:
        shutil.copytree(small, tmp_path / "out")
    before = contents(tmp_path)
    refused(invoke("build", *arguments, "-o", tmp_path / "out"), message)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [bare_pickle_with_code, pickle_with_code])
def test_the_payloads_would_have_run(make: Case, tmp_path: Path, checkpoint: Path) -> None:
    path = Path(str(make(tmp_path, checkpoint)[0]))
    if make is bare_pickle_with_code:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert (tmp_path / "ran").is_dir()


NEEDS_NO_TORCH = (
    "absent", "not_a_checkpoint", "folder_without_config", "weights_alone", "truncated_to_0.5",
    "bare_pickle_with_code", "unknown_target", "unknown_key", "absent_config", "absent_baseline", "report_below_a_file",
)  # fmt: skip
SERVER = """
for name in ("onnx", "onnx_ir", "onnxscript", "torch", "safetensors", "mod_models"):
    sys.modules[name] = None  # Whoever imports it now gets an ImportError.
"""
COMMANDS = ["report DIR", "report DIR --format html", "bench DIR", "config show", "--help", "build --help", "--version"]


def test_what_needs_no_torch_does_not_load_it(tmp_path: Path, checkpoint: Path) -> None:
    requests: list[list[object]] = []
    for name in NEEDS_NO_TORCH:
        (tmp_path / name).mkdir()
        requests.append(["build", *CASES[name][0](tmp_path / name, checkpoint), "-o", tmp_path / "out"])
    before = contents(tmp_path)
    answers = commands(requests, "sys.modules['torch'] = None")
    for name, (exit_code, _, stderr) in zip(NEEDS_NO_TORCH, answers, strict=True):
        assert exit_code == 2, (name, stderr)
        assert re.search(CASES[name][1], stderr)
    assert contents(tmp_path) == before


def test_what_a_server_runs_needs_nothing_that_builds(small: Path) -> None:
    requests = [[small if word == "DIR" else word for word in line.split()] for line in COMMANDS]
    for line, (exit_code, stdout, stderr) in zip(COMMANDS, commands(requests, SERVER), strict=True):
        assert (exit_code, stderr) == (0, ""), line
        assert stdout
