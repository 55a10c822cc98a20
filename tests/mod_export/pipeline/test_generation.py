"""Engines that write text: what a build makes again, every kind of model that can write, the shipped checkpoint, and
plans for an absent GPU, whose graphs are judged token by token on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from build_folders import Silent, changed, check_files, steps_of
from command_line import FEW_SAMPLES
from generating import GENERATING, WINDOW
from observing import observed
from tiny_models import lively_checkpoint
from writing import SPEC
from writing import WINDOW as WRITING_WINDOW

from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import ENGINES
from mod_export.folder.manifest import open_folder, read_manifest
from mod_export.judge.text import prompts_of
from mod_export.measure.verdict import DENSE_ITSELF
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.model.transformer import MOD_TRANSFORMER
from mod_export.pipeline.rerun import bench_folder, validate_folder
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_export.rows.speed import DecodeRow
from mod_export.runtime.generator import Generator, load_generator
from mod_export.types import KINDS, ModelKind
from mod_models.checkpoint import save_checkpoint

DECODES = [f"{kind}-decode-b{rows}s48-float32" for kind in KINDS for rows in (1, 3)]
PREFILLS = [f"{kind}-prefill-b1s{seq}-float32" for kind in KINDS for seq in (8, 16)]


def steps(prefix: str, names: list[str]) -> set[str]:
    return {f"{prefix}/ort-cpu/{name}" for name in names}


PARITY = steps("parity", DECODES + PREFILLS)
TEXTS = steps("texts", DECODES)
SPEED = steps("decode", ["b1s48-float32", "b3s48-float32"])


def with_options(config: BuildConfig, **options: Any) -> BuildConfig:
    return changed(config, {f"generation/{name}": value for name, value in options.items()})


def test_every_file_is_listed(written: Path) -> None:
    check_files(written)
    manifest = read_manifest(written)
    about = manifest["generation"]
    assert (about["window"], about["sites"]) == (48, {"mod": [0, 2], "dense": []})
    engines, graphs = ([one for one in manifest[part] if one["role"] != "forward"] for part in ("engines", "graphs"))
    assert len(engines) == len(DECODES + PREFILLS)
    # Each engine has a portable graph and one of the target.
    assert len(graphs) == 2 * len(engines)
    assert set(about["step_bytes"]) == {"b1s48", "b3s48"}
    whole = json.loads((written / "report.json").read_text())
    report, judged = whole["generation"], [row for row in whole["parity"] if row["role"] != "forward"]
    assert report["capacity"] == {"0": 18, "2": 18}
    assert [row["artifact"].rpartition("/")[2] for row in judged] == [
        f"{kind}-{role}.onnx"
        for kind in KINDS
        for role in ("prefill-b1s8-float32", "prefill-b1s16-float32", "decode-b1s48-float32", "decode-b3s48-float32")
    ]
    assert all(row["passed"] for row in judged)
    assert [(row["texts"], row["identical"]) for row in report["texts"]] == [(2, 2)] * 4


def test_all_graphs_share_one_file_of_weights(written: Path) -> None:
    weight_files = {path.name for path in (written / "graphs").iterdir() if path.suffix == ".data"}
    assert weight_files == {"weights-float32.data"}
    small = [path.stat().st_size for path in written.rglob("*.onnx")]
    assert max(small) < 200_000


def test_every_weight_is_packed_once(written: Path) -> None:
    """ONNX Runtime's sessions share packed weights among operators of one type."""
    readers: dict[str, set[str]] = {}
    products = {"FusedMatMul", "Gemm", "MatMul"}
    for path in sorted((written / "engines" / "ort-cpu").glob("*-float32.onnx")):
        model = ir.load(path)
        for node in model.graph.all_nodes():
            if node.op_type in products and node.inputs[1].is_initializer() and len(node.inputs) == 2:
                readers.setdefault(node.inputs[1].name, set()).add(node.op_type)
    assert readers
    assert {name: kinds for name, kinds in readers.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compared_texts": 0}, set()),
        # Decode engines continue from what prefill engines read.
        pytest.param(
            {"prompts": (16,)}, steps("parity", DECODES) | TEXTS | SPEED | {"structure"}, marks=pytest.mark.slow
        ),
        pytest.param({"judged_tokens": 20}, PARITY, marks=pytest.mark.slow),
        pytest.param({"compared_tokens": 9}, TEXTS, marks=pytest.mark.slow),
        ({"measured_tokens": 6}, SPEED),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_changed_option_redoes_what_depends_on_it(
    written_copy: Path,
    writing_folder: Path,
    writing_config: BuildConfig,
    options: dict[str, Any],
    expected: set[str],
) -> None:
    before = steps_of(written_copy)
    config = with_options(writing_config, **options)
    report = build(
        Request.checkpoint(writing_folder / "writing.pt").models, config, written_copy, Silent(), "mod-export build"
    )
    after = steps_of(written_copy)
    done = {name for name in after if after[name]["fingerprint"] != before.get(name, {}).get("fingerprint")}
    assert done == expected | {"report"}
    assert report.verdict.status == "pass"
    assert any(stage.status == "built" for stage in report.stages if stage.name != "report") == bool(expected)
    assert len(report.generation.texts) == (0 if options.get("compared_texts") == 0 else 4)


def test_never_takes_everything_away(written_copy: Path, writing_folder: Path, writing_config: BuildConfig) -> None:
    config = with_options(writing_config, build="never")
    report = build(
        Request.checkpoint(writing_folder / "writing.pt").models, config, written_copy, Silent(), "mod-export build"
    )
    assert report.generation.reason == "it was built with generation.build = never; build it again with auto"
    assert not [path for path in written_copy.rglob("*") if "prefill" in path.name or "decode" in path.name]
    check_files(written_copy)


@pytest.mark.slow
def test_a_dense_checkpoint_is_built_once_and_writes(writing_config: BuildConfig, tmp_path: Path) -> None:
    """Its dense baseline would be the model itself, so none is built, judged or timed."""
    save_checkpoint(tmp_path / "dense.pt", lively_checkpoint(SPEC.dense(), 6))
    model = model_from_checkpoint(tmp_path / "dense.pt")
    config = with_options(writing_config, batches=(2,), prompts=(8,))
    report = build(lambda: (model, None), config, tmp_path / "out", Silent(), "mod-export build")
    assert report.verdict.status == "pass", report.verdict.reasons
    manifest = open_folder(tmp_path / "out")
    assert list(manifest.models) == ["mod"]
    assert not [path for path in manifest.files if "dense" in path]
    assert {row.model for row in (*report.parity, *report.latency, *report.cost, *report.generation.texts)} == {"mod"}
    assert {row.role for row in report.parity} == {"forward", "prefill", "decode"}
    assert report.not_compared == DENSE_ITSELF
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "MoD" not in page
    assert "Files of the model." in page
    (decode,), (prompt,) = report.generation.decode, report.generation.first_token
    assert (list(decode.ms), decode.compared, list(prompt.ms), prompt.compared) == (["mod"], None, ["mod"], None)
    again = bench_folder(tmp_path / "out", None, ())
    assert (again.not_compared, again.verdict.status) == (DENSE_ITSELF, "pass")
    assert [list(row.ms) for row in again.rows(DecodeRow)] == [["mod"]]
    ids = prompts_of(model, 256, 1, 9, 0).tolist()[0]
    with load_generator(tmp_path / "out") as generator:
        assert generator.generate([ids], 20)[0].ids == model.generating(WRITING_WINDOW).write(ids, 20)


KINDS_THAT_DIFFER = [
    "experts in routed blocks",
    "routed apart by predictors",
    "MLP routed",
    "biases",
    "normed heads",
    "several blocks, nested, threshold",
    "several blocks by predictors",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_THAT_DIFFER)
def test_every_kind_of_model_writes(name: str, writing_config: BuildConfig, tmp_path: Path) -> None:
    """Each kind writes like the eager model, beside its dense twin unless it is dense itself."""
    checkpoint = lively_checkpoint(dataclasses.replace(GENERATING[name], tie_embeddings=False))
    save_checkpoint(tmp_path / "kind.pt", checkpoint)
    config = with_options(
        writing_config, build="always", window=WINDOW, prompts=(6, WINDOW), caches=(WINDOW,), batches=(2,)
    )
    report = build(
        Request.checkpoint(tmp_path / "kind.pt").models, config, tmp_path / "out", Silent(), "mod-export build"
    )
    assert report.verdict.status == "pass", report.verdict.reasons
    assert {row.role for row in report.parity} == {"forward", "prefill", "decode"}
    (decode,) = report.generation.decode
    assert all(0 <= decode.executed[site] <= 1 for site in decode.executed)
    prompts = np.random.default_rng(0).integers(0, 16, (3, 5)).tolist()
    model = model_from_checkpoint(tmp_path / "kind.pt")
    kinds: dict[ModelKind, Model | None] = {"mod": model, "dense": model.dense()}
    for kind, version in kinds.items():
        if version is None:
            continue
        eager = version.generating(WINDOW)
        with load_generator(tmp_path / "out", model=kind) as generator:
            found = generator.generate(prompts, WINDOW - 4)
        assert [completion.ids for completion in found] == [eager.write(prompt, WINDOW - 4) for prompt in prompts]


SHIPPED_TOML = f"""
buckets = [[1, 64]]
targets = ["ort-cpu"]
{FEW_SAMPLES}[cost]
profile_runs = 0
[generation]
window = 512
prompts = [128]
batches = [1, 4]
compared_texts = 0
judged_tokens = 64
measured_tokens = 12
"""


@pytest.mark.slow
def test_the_shipped_checkpoint(tmp_path: Path) -> None:
    path = MOD_TRANSFORMER.demo_checkpoint()
    assert path is not None
    shipped, root = model_from_checkpoint(path), tmp_path / "out"
    (tmp_path / "c.toml").write_text(SHIPPED_TOML)
    report = build(
        Request.checkpoint(path).models, config_from_toml(tmp_path / "c.toml"), root, Silent(), "mod-export build"
    )
    check_what_is_skipped(report)
    with load_generator(root) as generator:
        check_texts(generator, shipped)
        check_steps(generator, shipped)


def check_texts(generator: Generator, shipped: Model) -> None:
    """Two hundred tokens after each of several held-out prompts equal the eager model's."""
    eager = shipped.generating(512)
    prompt_NS = prompts_of(shipped, 256, 6, 32, 0)
    found = generator.generate(prompt_NS.tolist(), 200)
    expected = [eager.write(prompt, 200) for prompt in prompt_NS.tolist()]
    assert [completion.ids for completion in found] == expected
    assert len({tuple(ids) for ids in expected}) > 3


def check_steps(generator: Generator, shipped: Model) -> None:
    """Logits after some positions of a held-out text agree when read by steps, as a prompt, and by the eager model."""
    ids_S = prompts_of(shipped, 256, 1, 300, 3)[0]
    loaded = shipped.generating(512).whole_rows
    with torch.no_grad():
        logits_SV = observed(loaded.module(), torch.from_numpy(ids_S)[None], torch.tensor([300]))[0][0].numpy()
    reads = generator._reads()
    with generator._exclusive(generator.bucket_for(1, 300)) as (decoder,):
        for position in (1, 5, 40, 127, 299):
            decoder.put(0, reads.read(ids_S[:1].tolist()))
            for t in range(1, position + 1):
                logits_BV = decoder.step(ids_S[t : t + 1], np.array([t]))
            np.testing.assert_allclose(logits_BV[0], logits_SV[position], rtol=0, atol=1e-4)
            kept = reads.read(ids_S[: position + 1].tolist())
            np.testing.assert_allclose(kept.logits_V, logits_SV[position], rtol=0, atol=1e-4)
            np.testing.assert_array_equal(kept.count_N, decoder.cache["counts"][0])


def check_what_is_skipped(report: BuildReport) -> None:
    assert report.verdict.status == "pass", report.verdict.reasons
    single = next(row for row in report.generation.decode if row.bucket == "b1s512")
    # With a single row, a part is executed exactly when its token runs.
    assert single.executed == single.selected
    capacity = report.generation.capacity
    assert capacity is not None
    assert single.compared is not None
    routed = single.compared.routed_kv_bytes
    assert routed["mod"] <= (max(capacity.values()) / 512 + 0.02) * routed["dense"]
    assert single.least_bytes["mod"] < single.least_bytes["dense"]
    assert report.generation.quality is not None
    assert report.generation.quality.perplexity < 1.1 * report.generation.quality.own_perplexity


@pytest.mark.slow
def test_fair_slots_are_judged_in_turns_and_counted(
    writing_folder: Path, writing_config: BuildConfig, written_copy: Path
) -> None:
    config = with_options(writing_config, slots="fair", batches=(4,), prompts=(16,))
    report = build(Request.checkpoint(writing_folder / "writing.pt").models, config, written_copy, Silent(), "test")
    assert report.generation is not None
    assert report.generation.slots == "fair"
    assert [row.reasons for row in report.parity if not row.passed] == []
    assert {(row.texts, row.identical) for row in report.generation.texts} == {(2, 2)}
    prompts: list[Any] = prompts_of(model_from_checkpoint(writing_folder / "writing.pt"), 256, 4, 9, 0).tolist()
    with load_generator(written_copy) as generator:
        together = generator.generate(prompts, 30)
        alone = [generator.generate([prompt], 30)[0] for prompt in prompts]
    # At most two of four rows run in a layer, so some tokens skip a layer that would run if they were alone.
    assert sum(sum(text.overflow.values()) for text in together) > sum(sum(text.overflow.values()) for text in alone)


TARGETS = ("ort-cpu", "tensorrt-rtx")


def with_plans(config: BuildConfig) -> BuildConfig:
    rtx = {"target/tensorrt-rtx/architectures": ["sm89"], "target/tensorrt-rtx/dtypes": ["float16"]}
    config = with_options(config, targets=TARGETS, prompts=(16,), batches=(3,), compared_texts=0)
    return changed(config, {"targets": TARGETS, **rtx})


@pytest.mark.slow
def test_plans_are_built_and_their_graphs_judged(
    writing_folder: Path, writing_config: BuildConfig, written_copy: Path
) -> None:
    """Plans are built beside the engines of a finished folder, from its graphs."""
    if not ENGINES["tensorrt-rtx"].availability().builds:
        pytest.fail("CI installs tensorrt-rtx, whose builder needs no GPU")
    root = written_copy
    report = build(
        Request.checkpoint(writing_folder / "writing.pt").models, with_plans(writing_config), root, Silent(), "test"
    )
    assert report.verdict.status == "pass"
    check_files(root)
    engines = open_folder(root).engines
    plans = [engine for engine in engines if engine.target == "tensorrt-rtx" and engine.role != "forward"]
    assert {(engine.model, engine.role, engine.arch, engine.dtype) for engine in plans} == {
        (kind, role, "sm89", "float16") for kind in ("mod", "dense") for role in ("prefill", "decode")
    }
    assert report.generation is not None
    judged = {(row.target, row.role, row.model, row.dtype) for row in report.parity if row.passed}
    assert {
        ("tensorrt-rtx graph", role, kind, "float16") for kind in ("mod", "dense") for role in ("prefill", "decode")
    } <= judged
    step = onnx.load(
        root / "graphs" / f"mod-decode-b3s{WRITING_WINDOW}.tensorrt-rtx.float16.onnx", load_external_data=False
    )
    operators = [node.op_type for node in step.graph.node]
    assert operators.count("If") == 2
    assert operators.count("TensorScatter") == 6
    # Engines that cannot run here are not validated; those that can write text.
    assert validate_folder(root, None, []).verdict.status == "pass"
    with load_generator(root) as generator:
        assert generator.target == "ort-cpu"
        assert len(generator.generate("ab", 4)[0].ids) == 4
