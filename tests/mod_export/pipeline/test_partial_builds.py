"""If one target, dtype or bucket fails, the others are still built, judged, timed and served; the reason is reported.
The failures are real: numbers that float16 cannot hold, numbers whose squares float32 cannot hold, a model that cannot
be captured at one length, and a machine without the memory that one length needs.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build_folders import Silent, check_files, once, steps_of
from command_line import FEW_SAMPLES, commands, invoke, raw_checkpoint, toml_file
from torch import Tensor, nn
from writing import WRITING_TOML

import mod_export
from mod_export.config import config_from_toml
from mod_export.errors import LimitError, TargetError
from mod_export.folder.manifest import open_folder
from mod_export.model.request import Request
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.pipeline.stages import build
from mod_export.report import render_html
from mod_export.report.text import render_text
from mod_export.rows.base import FailedRow
from mod_export.rows.report import BuildReport, report_from_json
from mod_export.runtime.generator import load_generator
from mod_models.checkpoint import load_checkpoint

pytestmark = pytest.mark.usefixtures("searching_few_rows")
D, VOCABULARY = 32, 40
QUICK = f"{FEW_SAMPLES}[cost]\nprofile_runs = 0\n"
FOUR_BITS = f'{QUICK}[target.ort-cpu]\ndtypes = ["float32", "int4"]\n'
HALF = f'{QUICK}[target.tensorrt-rtx]\ndtypes = ["float16"]\n'
TOO_LARGE = "1.down.weight is multiplied with numbers that are not finite, or too large to be squared in float32"
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")


class Block(nn.Module):
    """A routed block with needlessly large hidden values: times `scale`, plus `growth` times the row length."""

    def __init__(self, capacity: float, scale: float, growth: float) -> None:
        super().__init__()
        self.capacity, self.scale, self.growth = capacity, scale, growth
        self.router, self.up, self.down = nn.Linear(D, 1), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x_BSD: Tensor) -> Tensor:
        scale = self.scale + self.growth * x_BSD.shape[1]
        score_BS = self.router(x_BSD)[..., 0]
        gate_BK, index_BK = torch.topk(score_BS, int(self.capacity * x_BSD.shape[1]))
        wide_BKD = index_BK[..., None].expand(-1, -1, D)
        hidden_BKF = self.up(x_BSD.gather(1, wide_BKD)).relu() * scale
        update_BKD = torch.sigmoid(gate_BK)[..., None] * (self.down(hidden_BKF) / scale)
        return x_BSD.scatter_add(1, wide_BKD, update_BKD)


def model_of(capacity: float = 0.25, scale: float = 1.0, growth: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    block = Block(capacity, scale, growth)
    return nn.Sequential(nn.Embedding(VOCABULARY, D), block, nn.Linear(D, VOCABULARY)).eval()


def token_ids(batch: int, seq: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, seq))


def built(model: nn.Module, dense: nn.Module, out: Path, toml: str, *targets: str, **others: Any) -> BuildReport:
    given = {"inputs": token_ids, "buckets": [(1, 16)], "name": "m", "verbosity": -1} | others
    return mod_export.build(
        model, baseline=dense, out=out, targets=targets, config=toml_file(out.parent, toml), **given
    )


def about(report: BuildReport) -> list[tuple[str | None, ...]]:
    return [(failure.stage, failure.target, failure.dtype, failure.model, failure.bucket) for failure in report.failed]


@pytest.fixture(scope="module")
def four_bits(shared_folder: Path) -> tuple[Path, BuildReport]:
    """A float32 build, read-only, of a model of which no int4 build is possible."""
    folder = shared_folder / "partial"
    once(folder, lambda: built(model_of(scale=1e19), model_of(1.0, 1e19), folder / "m", FOUR_BITS, "ort-cpu"))
    return folder / "m", report_from_json((folder / "m" / "report.json").read_text(encoding="utf-8"))


def test_a_dtype_that_fails_leaves_the_others(four_bits: tuple[Path, BuildReport]) -> None:
    root, report = four_bits
    assert set(about(report)) == {("onnx", None, "int4", kind, None) for kind in ("mod", "dense")}
    assert {stage.name: stage.failed for stage in report.stages if stage.failed} == {"onnx": 2}
    assert {(row.dtype, row.model, row.bucket) for row in report.parity if row.target == "ort-cpu" and row.passed} == {
        ("float32", model, "b1s16") for model in ("mod", "dense")
    }
    assert {row.dtype for row in report.speedup} == {"float32"}
    assert {row.dtype for row in report.artifacts} == {"float32"}
    assert report.verdict.status == "fail"
    (reason,) = report.verdict.reasons
    assert re.fullmatch(rf"int4 \w+, int4 \w+: could not be built \(stage onnx\): int4: {TOO_LARGE}, so .*", reason)
    check_files(root)


def test_it_is_shown_on_the_console_and_on_the_page(four_bits: tuple[Path, BuildReport]) -> None:
    root, report = four_bits
    lines = render_text(report, str(root)).splitlines()
    assert f"  - {report.verdict.reasons[0]}" in lines
    assert lines[-1] == f"FAIL  1 reason, listed above: {root}"
    page = render_html(report)
    assert page.count(TOO_LARGE) == 3  # It is in the verdict, and in a row for each model.
    assert '<h2 id="failed">What failed</h2>' in page


@pytest.mark.slow
def test_what_is_there_is_served_judged_and_timed(four_bits: tuple[Path, BuildReport]) -> None:
    root, _ = four_bits
    assert [row.dtype for row in open_folder(root).failed] == ["int4", "int4"]
    ids = token_ids(1, 16).numpy()
    with mod_export.load(root) as deployment:
        assert deployment.dtype == "float32"
        assert np.isfinite(deployment.infer({"input": ids})["logits"]).all()
    with pytest.raises(TargetError, match=rf"m: holds no int4 engine for ort-cpu \(int4 \w+: could not .*{TOO_LARGE}"):
        mod_export.load(root, dtype="int4")
    for name in ("validate", "bench"):
        found = invoke(name, root)
        assert (found.exit_code, found.stdout.splitlines()[-1]) == (0, "PASS"), found.output
    assert re.search(
        r"^not in this folder: int4 \w+, int4 \w+: could not be built", invoke("validate", root).stdout, re.M
    )


@pytest.mark.slow
def test_the_next_build_tries_again_what_failed_and_nothing_else(
    four_bits: tuple[Path, BuildReport], tmp_path: Path
) -> None:
    root, report = four_bits
    copy = Path(shutil.copytree(root, tmp_path / "m"))
    again = built(model_of(scale=1e19), model_of(1.0, 1e19), copy, FOUR_BITS, "ort-cpu")
    assert again.failed == report.failed
    found = {stage.name: (stage.status, stage.failed) for stage in again.stages if stage.name != "report"}
    assert found == {name: ("built", 2) if name == "onnx" else ("reused", 0) for name in found}
    assert steps_of(copy).keys() == steps_of(root).keys()
    check_files(copy)


@pytest.mark.slow
def test_a_dense_engine_that_fails_leaves_the_model(tmp_path: Path) -> None:
    report = built(model_of(), model_of(1.0, scale=1e19), tmp_path / "m", FOUR_BITS, "ort-cpu")
    assert about(report) == [("onnx", None, "int4", "dense", None)]
    judged = {(row.dtype, row.model) for row in report.parity if row.target == "ort-cpu" and row.passed}
    assert judged == {("float32", "mod"), ("float32", "dense"), ("int4", "mod")}
    assert {(row.dtype, row.model) for row in report.latency} == judged
    assert [row.dtype for row in report.speedup] == ["float32"]
    assert len(report.verdict.reasons) == 1  # No reason says that parity of an absent engine was not checked.
    text = render_text(report, "m")
    line = "not compared: ort-cpu b1s16 int4: the dense engine could not be built: int4: "
    assert f"\n{line}{TOO_LARGE}" in text
    assert f"<b>Not compared:</b> {line.removeprefix('not compared: ')}{TOO_LARGE}" in render_html(report)
    with mod_export.load(tmp_path / "m", dtype="int4") as deployment:
        assert deployment.dtype == "int4"


def test_a_baseline_of_which_nothing_can_be_built_leaves_the_model(tmp_path: Path) -> None:
    """The baseline selects tokens itself, so it is not dense."""
    report = built(model_of(), model_of(0.5), tmp_path / "m", QUICK, "ort-cpu")
    assert about(report) == [("onnx", None, None, "dense", "b1s16")]
    why = "graphs/dense-b1s16.onnx: in the baseline 1 selects 8 of 16 tokens; all must run"
    assert report.failed[0].reason == why
    assert report.not_compared == f"the dense baseline could not be built; of b1s16 dense: {why}"
    assert {(row.model, row.passed) for row in report.parity} == {("mod", True)}
    assert [row.model for row in report.latency] == ["mod"]
    assert len(report.verdict.reasons) == 1
    assert f"not compared: {report.not_compared}" in render_text(report, "m").splitlines()
    assert "compared with its dense baseline" not in render_html(report)
    found = invoke("bench", tmp_path / "m")
    assert (found.exit_code, f"not compared: {report.not_compared}" in found.stdout) == (0, True), found.output


@needs_rtx
@pytest.mark.parametrize(
    ("scales", "lost"),
    [
        pytest.param({"scale": 1e5}, ("b1s16", "b1s32"), id="a target", marks=pytest.mark.slow),
        pytest.param({"growth": 2500.0}, ("b1s32",), id="one bucket of a target", marks=pytest.mark.slow),
    ],
)
def test_a_target_that_fails_leaves_the_others(scales: dict[str, float], lost: tuple[str, ...], tmp_path: Path) -> None:
    """65,504 is the largest number of float16."""
    out = tmp_path / "m"
    report = built(
        model_of(**scales), model_of(1.0, **scales), out, HALF, "ort-cpu", "tensorrt-rtx", buckets=[(1, 16), (1, 32)]
    )
    failures = {("passes", "tensorrt-rtx", "float16", kind, bucket) for bucket in lost for kind in ("mod", "dense")}
    assert set(about(report)) == failures
    assert len(report.failed) == len(failures)
    largest = "contains 100000" if "scale" in scales else "contains 80001"
    assert all(f"{largest}, beyond the largest float16 number 65504" in row.reason for row in report.failed)
    built_for = {(row.target, row.bucket) for row in report.artifacts if row.kind == "engine"}
    kept = {"b1s16", "b1s32"} - set(lost)
    assert built_for == {("ort-cpu", "b1s16"), ("ort-cpu", "b1s32"), *(("tensorrt-rtx", bucket) for bucket in kept)}
    assert {row.bucket for row in report.speedup if row.target == "ort-cpu"} == {"b1s16", "b1s32"}
    (target,) = (one for one in report.targets if one.target == "tensorrt-rtx")
    assert target.reason.startswith("TensorRT-RTX" if kept else "nothing could be built; of tensorrt-rtx b1s16 ")
    check_files(out)
    message = "holds no engine for tensorrt-rtx .*beyond the largest" if not kept else "no engine runs here"
    with pytest.raises(TargetError, match=message):
        mod_export.load(out, target="tensorrt-rtx")
    assert validate_folder(out, None, ["ort-cpu"]).verdict.status == "pass"


@needs_rtx
@pytest.mark.slow
def test_where_nothing_can_be_built_the_first_reason_is_the_error(tmp_path: Path) -> None:
    """The error is that of the model, although its dense baseline could be built."""
    with pytest.raises(LimitError, match=r"^val_[0-9]+: contains 100000, beyond the largest float16 number") as caught:
        built(model_of(scale=1e5), model_of(1.0, scale=2e5), tmp_path / "m", HALF, "tensorrt-rtx")
    also, last = caught.value.__notes__
    assert re.match(r"also: tensorrt-rtx b1s16 float16 dense: could not be built .* contains 200000, beyond", also)
    assert last == "stage passes failed; done before it: load, capture, onnx"


PLUGIN = '''
"""An architecture that cannot be captured at 32 tokens."""

from mod_export.model.transformer import TransformerModel, ModTransformer
from mod_models.checkpoint import Checkpoint, read_plain
from mod_models.spec import ModelSpec
from mod_models.transformer import Transformer


class Long(Transformer):
    def forward(self, input_ids, lengths):
        more = int(lengths.sum()) * 0 if input_ids.shape[1] == 32 else 0
        return super().forward(input_ids + more, lengths)


class Loaded(TransformerModel):
    def skeleton(self, outputs="logits"):
        module = super().skeleton(outputs)
        module.__class__ = Long
        return module


class Short(ModTransformer):
    name = "short"

    def read(self, path):
        data = read_plain(path)
        if data["architecture"] != self.name:
            raise LookupError(data["architecture"])
        return Loaded(Checkpoint(spec=ModelSpec.from_dict(data["spec"]), weights=data["weights"]))


SHORT = Short()
'''


@pytest.mark.slow
def test_a_bucket_that_cannot_be_captured_leaves_the_others(small_folder: Path, tmp_path: Path) -> None:
    info = tmp_path / "short-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: short\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mod_export.architectures]\nshort = short:SHORT\n")
    (tmp_path / "short.py").write_text(PLUGIN)
    path = raw_checkpoint(tmp_path / "m.pt", load_checkpoint(small_folder / "small.pt"), architecture="short")
    toml = toml_file(tmp_path, f'{QUICK}[generation]\nbuild = "never"\n')
    out = tmp_path / "out"
    arguments = ["build", path, "-c", toml, "--target", "ort-cpu", "-o", out, "-q", "--buckets"]
    code = f"sys.path.insert(0, {str(tmp_path)!r})"
    (some, none) = commands([[*arguments, "1x16,1x32"], [*arguments, "1x32"]], code)
    assert some[0] == 4, some
    report = report_from_json((out / "report.json").read_text(encoding="utf-8"))
    assert set(about(report)) == {("capture", None, None, "mod", "b1s32")}
    assert {row.bucket for row in report.speedup} == {row.bucket for row in report.routing_maps} == {"b1s16"}
    assert {row.bucket for row in report.artifacts if row.model == "mod"} == {"b1s16"}
    assert "b1s32 mod: could not be built (stage capture): " in some[1]
    # The gate on speed is for the largest bucket, which was not built.
    assert len(report.verdict.reasons) == 1
    assert (none[0], none[1]) == (3, "")
    assert none[2].endswith("\n       stage capture failed; done before it: load\n")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory holds the attention scores of 7 tokens (1,568 bytes), but not those of a prompt's last
    token to the 50 slots of the cache (1,600 bytes), in the one layer where prompts have an Attention node.
    """
    monkeypatch.setattr("mod_export.pipeline.passes.free_bytes", lambda: 1580)


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_engines_that_write_text_are_built_together_or_not_at_all(writing_folder: Path, tmp_path: Path) -> None:
    toml = toml_file(tmp_path, WRITING_TOML.replace("[[1, 16]]", "[[1, 7]]").replace("[8, 16]", "[16]"))
    report = build(
        Request.checkpoint(writing_folder / "writing.pt").models,
        config_from_toml(toml),
        tmp_path / "out",
        Silent(),
        "mod-export build",
    )
    roles = {(row.stage, row.role) for row in report.failed}
    assert roles == {("passes", "prefill"), ("engines", "decode")}
    assert all("build this bucket for other targets" in row.reason for row in report.failed if row.role == "prefill")
    reason = "no prefill engine of ort-cpu float32 could be built, and text is written by both together"
    assert {row.reason for row in report.failed if row.role == "decode"} == {reason}
    assert {row.role for row in report.artifacts if row.kind == "engine"} == {"forward"}
    assert all(row.passed for row in report.parity)
    check_files(tmp_path / "out")
    assert bench_folder(tmp_path / "out", None, []).verdict.status == "pass"
    with mod_export.load(tmp_path / "out") as deployment:
        assert [bucket.name for bucket in deployment.buckets] == ["b1s7"]
    message = r"out: holds no engine that writes text of model 'mod' \(ort-cpu prefill b1s16 float32 mod: could not"
    with pytest.raises(TargetError, match=message):
        load_generator(tmp_path / "out")


@pytest.mark.slow
def test_without_evidence_it_is_said_as_well(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(MAKER)
    toml = toml_file(tmp_path, FOUR_BITS)
    found = invoke(
        "build", f"{tmp_path}/big.py:make", "-c", toml, "--buckets", "1x16", "--target", "ort-cpu", "-o",
        tmp_path / "out", "--no-evidence",
    )  # fmt: skip
    assert found.exit_code == 4, found.output
    first, last = found.stdout.splitlines()
    assert re.match(r"  - int4: could not be built \(stage onnx\): int4: ", first)
    assert last == f"built, and nothing verified: {tmp_path / 'out'}"
    assert re.search(r"^\* onnx +built .* 1 failed$", found.stderr, re.M), found.stderr
    for name in ("validate", "bench"):
        assert invoke(name, tmp_path / "out").exit_code == 0
    report = report_from_json((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row.dtype for row in report.failed] == ["int4"]
    assert report.verdict.reasons == (first.removeprefix("  - "),)


MAKER = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu() * 1e19) / 1e19

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 32), Scaled(), nn.Linear(32, 40))
    return model, lambda batch, seq: torch.randint(0, 40, (batch, seq))
"""


def row_of(**fields: Any) -> FailedRow:
    defaults = dict.fromkeys(("target", "dtype", "model", "role", "bucket"))
    return FailedRow(**{"stage": "engines", "reason": "it\n is so", **defaults, **fields})


def test_a_failure_covers_what_its_fields_leave_open() -> None:
    setting = {"target": "ort-cpu", "dtype": "int4", "model": "mod", "role": "forward", "bucket": "b1s16"}
    assert row_of(dtype="int4").covers(setting)
    assert row_of(**setting).covers(setting)
    assert not row_of(**setting | {"bucket": "b1s32"}).covers(setting)
    assert not row_of(dtype="int4").covers({"model": "mod"})
    assert not row_of(**setting, arch="sm89").covers(setting)
    assert row_of(**setting | {"role": "decode"}, arch="sm89").what == "ort-cpu decode b1s16 int4 sm89 mod"
    assert row_of(dtype="int4", stage="benchmark").sentence == "int4: could not be timed (stage benchmark): it is so"
    assert len(row_of(dtype="int4", reason="word " * 500).sentence) < 500
