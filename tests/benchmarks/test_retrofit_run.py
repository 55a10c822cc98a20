"""`make retrofit` on a tiny model that is trained for this test; docs/training.md has the results of a real one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.marked_part import marks
from benchmarks.retrofit import run as run_retrofit
from benchmarks.retrofit.controls import narrowed, without
from benchmarks.retrofit.render import COLUMNS, render
from benchmarks.retrofit.run import folder_name, main
from benchmarks.retrofit.ways import CONTROLS, DENSE, GRID, Way, config_of, steps_of_dense
from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec
from mod_models.train import TrainConfig
from mod_models.train.corpus import read_corpus
from mod_models.train.run import train

ROOT = Path(__file__).parents[2]
SPEC = ModelSpec(vocab_size=256, d_model=32, n_layers=4, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, max_positions=64)
SMALL = (
    DENSE,
    Way("removed", "cheapest:1", 0.0),
    Way("narrowed", "all", 0.5, dense_first=0.5),
    Way("mlp", "cheapest:{half}", 0.5, adapter="gated", adapter_share=0.25),
    Way("mlp", "cheapest:{half}", 0.5, adapter="gated", adapter_share=0.25, dense_first=0.5),
    Way("removed", "cheapest:1", 0.0, taught=True),
)
QUICK = ["--steps", "4", "--batch", "2", "--seq", "32", "--eval-batches", "2", "--probe-rows", "1", "--window", "64"]
BEGIN, END = marks("make retrofit")
PAGE = f"# Before\n\n{BEGIN}\nnot run yet\n{END}\n\nafter\n"


def write_sample(samples: Path, stem: str, result: dict[str, Any]) -> None:
    """Writes a sample, and the speed of its shape, which is called like the sample without its seed."""
    name, speed = stem.rpartition("-")[0], result.pop("speed")
    (samples / f"{stem}.json").write_text(json.dumps({**result, "name": name, "shape": name}))
    if speed is not None:
        (samples / "speed").mkdir(exist_ok=True)
        (samples / "speed" / f"{name}.json").write_text(json.dumps(speed))


def sample(kind: str, loss: float, speed: float | None = None, status: str = "pass", seed: int = 0) -> dict[str, Any]:
    rows = {"measured": speed, "ci95": [1.1, 1.3], "predicted_flops": 1.5}
    quality = {"next_token_loss": loss, "bits_per_byte": 2.0, "ran": None if kind in CONTROLS else 0.5}
    text = {"measured": speed, "ci95": [1.0, 1.4], "predicted_bytes": 1.6, "texts": 16, "ran": quality["ran"]}
    speeds = {"whole_rows": rows, "text": text, "status": status}
    return {
        "kind": kind, "route": "deepest:{half}", "share": 0.5, "layers": [2, 3], "skipped_keys": "absent",
        "adapter": "none", "routers": "fitted", "taught": False, "dense_first": 0.0, "seed": seed, "tokens": 1000,
        "whole_rows": quality, "text": {**quality, "next_token_loss": loss - 0.1},
        "speed": None if speed is None else speeds,
    }  # fmt: skip


def test_the_page(tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text(PAGE)
    samples = tmp_path / "retrofit"
    samples.mkdir()
    as_given = {"next_token_loss": 2.5, "bits_per_byte": 1.5, "ran": None}
    about = {"model": "m", "text": "t", "seq": 50, "window": 2048, "as_given": as_given}
    (samples / "about.json").write_text(json.dumps(about))
    found = {
        "dense-0": sample("dense", 2.0), "dense-1": sample("dense", 2.1, seed=1),
        "mlp-0": sample("mlp", 2.1, 1.2), "mlp-1": sample("mlp", 2.4, 1.2, seed=1),
        "block-0": sample("block", 2.3, 1.4, "fail"),
        "kept-0": {**sample("block", 2.2, 1.3), "skipped_keys": "kept", "routers": "learned"},
        "both-0": {
            **sample("separate", 2.25, 1.35), "route": "every:1", "skipped_keys": "kept", "adapter": "linear",
        },
        "numbers-0": {**sample("attention", 2.25, 1.36), "route": "2,3"},
        "adapted-0": {**sample("mlp", 2.05, 1.2), "adapter": "linear", "dense_first": 0.75},
        "gated-0": {**sample("mlp", 2.05, 1.2), "adapter": "gated", "adapter_share": 0.25},
        "removed-0": {**sample("removed", 2.1, 1.2), "route": "cheapest:2"},
        "narrowed-0": {**sample("narrowed", 2.1, 1.1), "route": "all", "taught": True},
        "longer-0": {**sample("mlp", 1.9, 1.2), "tokens": 2000},
        "longer-1": {**sample("mlp", 2.0, 1.2, seed=1), "tokens": 2000},
        "long-0": {**sample("dense", 1.8), "tokens": 2000},
        "untimed-0": {**sample("narrowed", 2.0), "route": "all", "share": 0.25, "tokens": 3000},
    }  # fmt: skip
    for name, result in reversed(found.items()):
        write_sample(samples, name, result)
    for _ in range(2):  # The second pass writes over an existing page.
        render(samples, tmp_path)
    page = (tmp_path / "training.md").read_text()
    assert page.startswith("# Before\n")
    assert page.endswith(f"{END}\n\nafter\n")
    assert "not run yet" not in page
    assert "in rows of 50 tokens" in page
    assert "window of 2,048 tokens" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows, text = "1.20 [1.10, 1.30] (1.50)", "1.20 [1.00, 1.40]"
    assert lines[0].count("|") == len(COLUMNS) + 1
    assert lines[2:] == [
        "| 0 | dense, as given |  | 12.18 |  | 1 | 12.18 |  | 100% | 1 |",
        "| 1,000 | dense, trained as long | 2 | 7.78 (7.39 to 8.17) | +0.0% (+0.0% to +0.0%) | 1 | "
        "7.04 (6.69 to 7.39) | +0.0% (+0.0% to +0.0%) | 100% | 1 |",
        "| 1,000 | narrower MLPs: 50% of the neurons; with a teacher | 1 | 8.17 | +10.5% | "
        "1.10 [1.10, 1.30] (1.50) | 7.39 | +10.5% | 100% | 1.10 [1.00, 1.40] (1.60) |",
        "| 1,000 | MLPs of the 2 deepest layers run 50%, skipped tokens run 25% of the neurons | 1 | 7.77 | +5.1% | "
        f"{rows} | 7.03 | +5.1% | 50% | {text} (50%, 1.60) |",
        "| 1,000 | MLPs of the 2 deepest layers run 50% | 2 | 9.59 (8.17 to 11.02) | +22.8% (+10.5% to +35.0%) | "
        f"{rows} | 8.68 (7.39 to 9.97) | +22.8% (+10.5% to +35.0%) | 50% | {text} (50%, 1.60) |",
        f"| 1,000 | without the 2 cheapest blocks | 1 | 8.17 | +10.5% | {rows} | 7.39 | +10.5% | 100% | "
        f"{text} (1.60) |",
        "| 1,000 | blocks of the 2 deepest layers run 50%, skipped tokens keep keys; routers learn | 1 | 9.03 | +22.1% "
        "| 1.30 [1.10, 1.30] (1.50) | 8.17 | +22.1% | 50% | 1.30 [1.00, 1.40] (50%, 1.60) |",
        "| 1,000 | attentions and MLPs of all 2 layers run 50%, skipped tokens keep keys and run a linear map | 1 | "
        "9.49 | +28.4% | 1.35 [1.10, 1.30] (1.50) | 8.58 | +28.4% | 50% | 1.35 [1.00, 1.40] (50%, 1.60) |",
        "| 1,000 | attentions of 2 layers run 50% | 1 | 9.49 | +28.4% | 1.36 [1.10, 1.30] (1.50) | 8.58 | +28.4% | 50% "
        "| 1.36 [1.00, 1.40] (50%, 1.60) |",
        "| 1,000 | blocks of the 2 deepest layers run 50% | 1 | 9.97 | +35.0% | 1.40 [1.10, 1.30] (1.50), a gate "
        "failed | 9.03 | +35.0% | 50% | 1.40 [1.00, 1.40] (50%, 1.60) |",
        "| 1,000 | MLPs of the 2 deepest layers run 50%, skipped tokens run a linear map; dense for the first "
        f"75% of the tokens | 1 | 7.77 | +5.1% | {rows} | 7.03 | +5.1% | 50% | {text} (50%, 1.60) |",
        "| 2,000 | dense, trained as long | 1 | 6.05 | +0.0% | 1 | 5.47 | +0.0% | 100% | 1 |",
        # The dense model of one of the two seeds is missing.
        f"| 2,000 | MLPs of the 2 deepest layers run 50% | 2 | 7.04 (6.69 to 7.39) |  | {rows} | "
        f"6.37 (6.05 to 6.69) |  | 50% | {text} (50%, 1.60) |",
        # The run was stopped before this shape was timed, and before its dense model was trained.
        "| 3,000 | narrower MLPs: 25% of the neurons | 1 | 7.39 |  |  | 6.69 |  | 100% |  |",
    ]
    assert (tmp_path / "figures" / "retrofit.svg").stat().st_size > 1000


def test_a_page_is_written_where_there_is_none(tmp_path: Path) -> None:
    samples = tmp_path / "retrofit"
    samples.mkdir()
    as_given = {"next_token_loss": 2.5, "bits_per_byte": 1.5, "ran": None}
    (samples / "about.json").write_text(
        json.dumps({"model": "m", "text": "t", "seq": 50, "window": 64, "as_given": as_given})
    )
    write_sample(samples, "dense-0", sample("dense", 2.0))
    render(samples, tmp_path)
    assert "| 1,000 | dense, trained as long | 1 | 7.39 |" in (tmp_path / "training.md").read_text()


def test_answers_of_tasks(tmp_path: Path) -> None:
    answers = tmp_path / "retrofit" / "answers"
    answers.mkdir(parents=True)
    as_given = {"next_token_loss": 2.5, "bits_per_byte": 1.5, "ran": None}
    about = {"model": "m", "text": "t", "seq": 50, "window": 64, "as_given": as_given}
    (answers.parent / "about.json").write_text(json.dumps(about))
    (answers / "as_given.json").write_text(
        json.dumps({"one": {"figures": {"acc": 0.5}, "standard_error": 0.01, "questions": 9}})
    )
    for seed in (0, 1, 2):
        write_sample(answers.parent, f"mlp-{seed}", sample("mlp", 2.0, 1.2, seed=seed))
    for seed, accuracy in ((0, 0.25), (1, 0.35)):  # The third was not asked.
        figures = {"one": {"figures": {"acc": accuracy}, "standard_error": 0.02, "questions": 9}}
        figures["other"] = {"figures": {"acc": 1.0}, "standard_error": 0.0, "questions": 3}
        (answers / f"mlp-{seed}.json").write_text(json.dumps(figures))
    render(answers.parent, tmp_path)
    lines = [line for line in (tmp_path / "training.md").read_text().splitlines() if line.startswith("|")]
    assert lines[-4:] == [
        "| training tokens | model | one (9 questions) | other (3 questions) |",
        "|---|---|---|---|",
        "| 0 | dense, as given | 50.0% ± 1.0% |  |",
        "| 1,000 | MLPs of the 2 deepest layers run 50% | 30.0% ± 2.0% | 100.0% ± 0.0% |",
    ]


def test_the_page_is_current(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs/training.md", tmp_path)
    render(ROOT / "docs/retrofit", tmp_path)
    assert (tmp_path / "training.md").read_text() == (ROOT / "docs/training.md").read_text()


def test_ways_have_folders_of_their_own() -> None:
    assert len({way.name for way in GRID}) == len(GRID)
    assert GRID[0] == DENSE
    assert Way("mlp", "deepest:{half}", 0.5).name == "mlp-deepest-0.5"
    assert (
        Way("block", "cheapest:3", 0.5, skipped_keys="kept", adapter="linear").name
        == "block-cheapest-3-0.5-kept-linear"
    )
    assert Way("removed", "cheapest:3", 0.0).name == "removed-cheapest-3-0.0"
    learned = Way("mlp", "cheapest:{half}", 0.5, adapter="linear", routers="learned")
    assert learned.name == "mlp-cheapest-0.5-linear-learned"
    given = argparse.Namespace(steps=10, batch=2, seq=50, seed=0)
    assert folder_name(learned, given) == f"{learned.name}-1000"
    given.seed = 2
    assert folder_name(learned, given) == f"{learned.name}-1000-seed2"
    gated = Way("mlp", "cheapest:{half}", 0.5, adapter="gated", adapter_share=0.25)
    assert gated.name == "mlp-cheapest-0.5-gated-0.25"
    later, taught = dataclasses.replace(learned, dense_first=0.75), dataclasses.replace(learned, taught=True)
    assert (later.name, taught.name) == (f"{learned.name}-first-0.75", f"{learned.name}-taught")
    assert later.shape == taught.shape == learned.name, "training does not change the speed"
    assert [way.has_teacher for way in (learned, later, taught)] == [False, True, True]


def test_the_dense_model_without_blocks_skips_them() -> None:
    """Removing blocks is what happens to a token that skips all of them."""
    spec = dataclasses.replace(SPEC, tie_embeddings=False)
    dense = random_checkpoint(spec, 0)
    short = without(dense, (0, 2))
    assert short.spec == dataclasses.replace(spec, n_layers=2)
    model, expected = short.module(), dense.module()
    expected.layers = torch.nn.ModuleList([expected.layers[1], expected.layers[3]])
    ids_BS, lengths_B = torch.arange(40)[None], torch.tensor([40])
    assert torch.equal(model(ids_BS, lengths_B)[0], expected(ids_BS, lengths_B)[0])
    assert len(dense.weights) > len(short.weights)


def rows_of(spec: ModelSpec, batches: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(spec.vocab_size, (4, 32), generator=generator) for _ in range(batches)]


def test_a_narrowed_model_without_its_idle_neurons_computes_the_same() -> None:
    """Neurons that add nothing are those that go; nothing is left to fit."""
    dense = random_checkpoint(SPEC, 0)
    idle = torch.arange(SPEC.d_ff) % 4 < 2
    for layer in range(SPEC.n_layers):
        dense.weights[f"layers.{layer}.mlp.down_proj.weight"][:, idle] = 0
    before = {name: tensor.clone() for name, tensor in dense.weights.items()}
    narrow = narrowed(dense, 0.5, rows_of(SPEC))
    assert narrow.spec == dataclasses.replace(SPEC, d_ff=32)
    (ids_BS,) = rows_of(SPEC, 1)
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    torch.testing.assert_close(narrow.module()(ids_BS, lengths_B)[0], dense.module()(ids_BS, lengths_B)[0])
    assert all(torch.equal(tensor, dense.weights[name]) for name, tensor in before.items())


def test_the_fit_makes_up_for_neurons_that_go() -> None:
    """Two neurons with the same input weights do the work of one, so half of them can go without a loss."""
    dense = random_checkpoint(SPEC, 1)
    half = SPEC.d_ff // 2
    for layer in range(SPEC.n_layers):
        for name in ("gate_proj", "up_proj"):
            weight_FD = dense.weights[f"layers.{layer}.mlp.{name}.weight"]
            weight_FD[half:] = weight_FD[:half]
        dense.weights[f"layers.{layer}.mlp.down_proj.weight"][:, half:] *= 0.2  # The first of each pair adds more.
    narrow = narrowed(dense, 0.5, rows_of(SPEC))
    plain = {name: tensor.clone() for name, tensor in narrow.weights.items()}
    for layer in range(SPEC.n_layers):
        name = f"layers.{layer}.mlp.down_proj.weight"
        plain[name] = dense.weights[name][:, :half]
    (ids_BS,) = rows_of(SPEC, 1)
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    expected = dense.module()(ids_BS, lengths_B)[0]
    distances = [
        (Checkpoint(spec=narrow.spec, weights=weights).module()(ids_BS, lengths_B)[0] - expected).norm()
        for weights in (narrow.weights, plain)
    ]
    assert distances[0] < 0.05 * distances[1]


def test_settings_of_a_way() -> None:
    given = argparse.Namespace(
        steps=60, batch=4, micro_batch=0, seq=256, learning_rate=3e-4, eval_batches=16, recompute="none",
        precision="float32", seed=3,
    )  # fmt: skip
    found = {(way.kind, way.routers): config_of(way, given) for way in GRID if not way.has_teacher}
    assert {kind: (config.distill, config.anneal, config.calibrate) for kind, config in found.items()} == {
        ("dense", "fitted"): (0.0, 0.0, 0), ("removed", "fitted"): (0.0, 0.0, 0),
        ("narrowed", "fitted"): (0.0, 0.0, 0), ("block", "fitted"): (0.0, 0.0, 8),
        ("block", "learned"): (0.0, 0.5, 8), ("mlp", "fitted"): (0.0, 0.0, 8), ("mlp", "learned"): (0.0, 0.5, 8),
        ("attention", "fitted"): (0.0, 0.0, 8),
        ("separate", "learned"): (0.0, 0.5, 8),
    }  # fmt: skip
    assert {config_of(way, given).distill for way in GRID if way.has_teacher} == {1.0}
    assert {(config.steps, config.batch, config.seed) for config in found.values()} == {(60, 4, 3)}
    # After three quarters of the steps for the dense model, the last quarter reads other windows of the text.
    later = [config_of(way, given) for way in GRID if way.dense_first]
    assert {(config.steps, config.warmup, config.seed) for config in later} == {(15, 1, 9)}


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "nowhere")])
    assert "nowhere: no such checkpoint; make one of a dense model with mod-export convert" in capsys.readouterr().err


def test_a_pattern_that_fits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--only", "mlp-0.5"], SMALL)
    names = ", ".join(way.name for way in SMALL)
    assert f"--only mlp-0.5: fits none of {names}" in " ".join(capsys.readouterr().err.split())


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing")
    given = argparse.Namespace(seq=32, window=64, results=tmp_path, docs=tmp_path)
    command = r"build model.pt -c speed.toml -o build -q --text .*held_out\.txt"
    with pytest.raises(RuntimeError, match=rf"{command} ended with 2: .*model\.pt"):
        run_retrofit.speed_of(SMALL[3], tmp_path, given, read_corpus(None, None))


def test_samples_of_another_model_are_refused(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "other")):
        save_checkpoint(tmp_path / name / "model.pt", random_checkpoint(SPEC, seed))
    common = ["--results", str(tmp_path / "results"), "--docs", str(tmp_path / "docs"), *QUICK]
    given = ["--only", "dense*", "--eval-batches", "1", "--steps", "2"]
    assert main(["--model", str(tmp_path / "one" / "model.pt"), *common, *given], SMALL) == 0
    samples = (tmp_path / "docs" / "retrofit").glob("*.json")
    assert not [path.name for path in samples if str(tmp_path) in path.read_text()], "a sample names no place"
    other = ["--model", str(tmp_path / "other" / "model.pt"), *common, *given, "--learning-rate", "1"]
    reason = r"about\.json: differs in model, weights, learning_rate; name another folder with"
    with pytest.raises(RuntimeError, match=f"docs.retrofit.{reason} --docs"):
        main(other, SMALL)
    # Models that were made of another one are no better under another name.
    with pytest.raises(RuntimeError, match=f"results.{reason} --results"):
        main([*other, "--docs", str(tmp_path / "others")], SMALL)
    assert not (tmp_path / "others").exists()


def test_a_model_that_was_trained_in_another_way_is_refused(tmp_path: Path) -> None:
    """A name may have meant something else in an earlier version."""
    save_checkpoint(tmp_path / "model.pt", random_checkpoint(SPEC, 0))
    given = argparse.Namespace(
        model=tmp_path / "model.pt", results=tmp_path, docs=tmp_path, steps=2, batch=1, seq=8, seed=0
    )
    folder = tmp_path / folder_name(DENSE, given)
    folder.mkdir()
    for way, message in ((DENSE, None), (dataclasses.replace(DENSE, taught=True), "was trained in another way; name")):
        (folder / "trained").write_text(json.dumps(dataclasses.asdict(way)))
        with contextlib.nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
            run_retrofit.trained(DENSE, given, read_corpus(None, None))


@pytest.mark.parametrize("options", [["--steps", "1"], ["--seed", "6"], ["--seed", "-1"]])
def test_numbers_out_of_range(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), *options], SMALL)
    assert "--steps, --seed: expected at least 2 steps and a seed below 6" in capsys.readouterr().err


def test_a_way_keeps_a_step_for_itself() -> None:
    later = dataclasses.replace(DENSE, kind="removed", dense_first=0.75)
    assert [steps_of_dense(later, steps) for steps in (2, 3, 4, 60)] == [1, 2, 3, 45]
    assert steps_of_dense(dataclasses.replace(later, dense_first=0.01), 60) == 1
    assert steps_of_dense(DENSE, 60) == 0


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains a dense model, retrofits it, builds the result and times it; the second call has nothing left to do."""
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(steps=40, batch=4, seq=32, warmup=4, eval_every=40, eval_batches=1, learning_rate=1e-2)
    list(train(SPEC, config, Path("dense")))
    Path("docs").mkdir()
    Path("docs/training.md").write_text(PAGE)
    command = ["--model", "dense/model.pt", "--results", "results", *QUICK]
    assert main(command, SMALL) == 0
    tokens = 4 * 2 * 32
    name = f"mlp-cheapest-0.5-gated-0.25-{tokens}"
    folder, sample_json = Path("results") / name, Path(f"docs/retrofit/{name}.json")
    result = json.loads(sample_json.read_text())
    assert len(result["layers"]) == 2
    assert load_checkpoint(folder / "model.pt").spec.routed_layers == tuple(result["layers"])
    speed_json = Path("docs/retrofit/speed/mlp-cheapest-0.5-gated-0.25.json")
    speed = json.loads(speed_json.read_text())
    assert speed["status"] == "pass"
    assert speed["whole_rows"]["predicted_flops"] > 1
    assert speed["whole_rows"]["measured"] > 0
    assert speed["text"]["measured"] > 0
    assert speed["text"]["predicted_bytes"] > 1
    # It is measured on 16 pieces of the same held-out text, in which about as many tokens run.
    assert speed["text"]["texts"] == 16
    assert speed["text"]["ran"] == pytest.approx(result["text"]["ran"], abs=0.15)
    assert Path("results/held_out.txt").stat().st_size > 100_000
    # In a text, all tokens that want to run find a slot, because the window is longer.
    assert result["whole_rows"]["ran"] is None
    assert 0 < result["text"]["ran"] < 1
    page = Path("docs/training.md").read_text()
    assert f"| {tokens} | MLPs of the 2 cheapest layers run 50%, skipped tokens run 25% of the neurons | 1 |" in page
    removed = json.loads(Path(f"docs/retrofit/removed-cheapest-1-0.0-{tokens}.json").read_text())
    assert removed["whole_rows"] == removed["text"]
    assert load_checkpoint(Path(f"results/removed-cheapest-1-0.0-{tokens}/model.pt")).spec.n_layers == 3
    # Its speed is compared with the whole dense model.
    removed_speed = json.loads(Path("docs/retrofit/speed/removed-cheapest-1-0.0.json").read_text())
    assert removed_speed["whole_rows"]["predicted_flops"] > 1.2
    assert removed_speed["text"]["ran"] is None
    assert f"| {tokens} | without the cheapest block | 1 |" in page
    # Half of the tokens train the dense model, from which the narrowed and the routed one start.
    assert Path(f"results/dense-none-1.0-{tokens // 2}/model.pt").exists()
    narrow = load_checkpoint(Path(f"results/narrowed-all-0.5-first-0.5-{tokens}/model.pt"))
    assert narrow.spec == dataclasses.replace(SPEC, d_ff=32)
    assert "narrower MLPs: 50% of the neurons; dense for the first 50% of the tokens | 1 |" in page
    later = json.loads(Path(f"docs/retrofit/mlp-cheapest-0.5-gated-0.25-first-0.5-{tokens}.json").read_text())
    assert later["shape"] == result["shape"]
    shapes = {path.stem for path in speed_json.parent.iterdir()}
    assert shapes == {way.shape for way in SMALL if way != DENSE}, "a shape is timed once"
    assert later["whole_rows"] != result["whole_rows"]
    capsys.readouterr()
    # A run that was stopped after its training is judged again, and a variant that was timed is not timed again.
    sample_json.unlink()
    (folder / "state.pt").unlink()
    assert main([*command, "--only", "mlp-cheapest-0.5-gated-0.25"], SMALL) == 0
    assert json.loads(sample_json.read_text()) == result
    assert json.loads(speed_json.read_text()) == speed, "its shape is not built again"
    assert capsys.readouterr().out.startswith(f"[1/1] {name}: ")
    assert main(command, SMALL) == 0
    assert capsys.readouterr().out == "".join(
        f"[{number}/6] {way.name}-{tokens}: done before\n" for number, way in enumerate(SMALL, 1)
    )
