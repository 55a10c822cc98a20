"""`make retrofit` on a tiny model that is trained for this test; docs/training.md has the results of a real one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.marked_part import marks
from benchmarks.retrofit import run as run_retrofit
from benchmarks.retrofit.render import COLUMNS, render
from benchmarks.retrofit.run import DENSE, GRID, Way, folder_name, main, without
from mod_models.checkpoint import load_checkpoint, random_checkpoint
from mod_models.spec import ModelSpec
from mod_models.train import TrainConfig
from mod_models.train.run import train

SPEC = ModelSpec(vocab_size=256, d_model=32, n_layers=4, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, max_positions=64)
SMALL = (DENSE, Way("removed", "cheapest:1", 0.0), Way("mlp", "cheapest:{half}", 0.5, adapter="linear"))
QUICK = ["--steps", "4", "--batch", "2", "--seq", "32", "--eval-batches", "2", "--probe-rows", "1", "--window", "64"]
BEGIN, END = marks("make retrofit")
PAGE = f"# Before\n\n{BEGIN}\nnot run yet\n{END}\n\nafter\n"


def row(parts: str, loss: float, speed: float | None = None, status: str = "pass") -> dict[str, object]:
    fast = {"measured": speed, "ci95": [1.1, 1.3], "predicted_flops": 1.5}
    quality = {"next_token_loss": loss, "bits_per_byte": 2.0, "ran": 0.5}
    speeds = {"whole_rows": fast, "text": {**fast, "ci95": [1.0, 1.4]}, "status": status}
    return {
        "parts": parts, "route": "deepest:{half}", "capacity": 0.5, "layers": [2, 3], "skipped_keys": "absent",
        "adapter": "none", "routers": "fitted", "seed": 0, "tokens": 1000, "whole_rows": quality,
        "text": {**quality, "next_token_loss": loss - 0.1, "ran": 0.45}, "speed": None if speed is None else speeds,
    }  # fmt: skip


def test_the_page(tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text(PAGE)
    (tmp_path / "untouched.json").write_text('{"next_token_loss": 2.5, "bits_per_byte": 1.5, "ran": 1.0}')
    found = {"dense": row("dense", 2.0), "mlp": row("mlp", 2.1, 1.2), "block": row("block", 2.3, 1.4, "fail")}
    found["kept"] = {**row("block", 2.2, 1.3), "skipped_keys": "kept", "routers": "learned"}
    found["adapted"] = {**row("mlp", 2.05, 1.2), "adapter": "linear"}
    found["removed"] = {**row("removed", 2.1, 1.2), "route": "cheapest:2"}
    found["longer"] = {**row("mlp", 1.9, 1.2), "tokens": 2000}
    for name, result in reversed(found.items()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({**result, "name": name}))
    about = {"model": "m", "text": "t", "names": list(found), "seq": 50, "window": 2048}
    for _ in range(2):  # The second pass writes over an existing page.
        render(tmp_path, tmp_path, about)
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
        "| 0 | dense, as given |  |  |  |  | 12.18 |  | 1 | 12.18 |  | 100% | 1 |",
        "| 1,000 | dense, trained as long |  |  |  |  | 7.39 | +0.0% | 1 | 6.69 | +0.0% | 100% | 1 |",
        f"| 1,000 | mlp | 2 deepest | 0.5 |  | fitted | 8.17 | +10.5% | {rows} | 7.39 | +10.5% | 45% | {text} |",
        "| 1,000 | block | 2 deepest | 0.5 |  | fitted | 9.97 | +35.0% | 1.40 [1.10, 1.30] (1.50), a gate failed | "
        "9.03 | +35.0% | 45% | 1.40 [1.00, 1.40] |",
        "| 1,000 | block | 2 deepest | 0.5 | keep keys | learned | 9.03 | +22.1% | 1.30 [1.10, 1.30] (1.50) | "
        "8.17 | +22.1% | 45% | 1.30 [1.00, 1.40] |",
        f"| 1,000 | mlp | 2 deepest | 0.5 | run an adapter | fitted | 7.77 | +5.1% | {rows} | 7.03 | +5.1% | 45% | "
        f"{text} |",
        f"| 1,000 | blocks removed | 2 cheapest |  |  |  | 8.17 | +10.5% | {rows} | 7.39 | +10.5% |  | {text} |",
        f"| 2,000 | mlp | 2 deepest | 0.5 |  | fitted | 6.69 |  | {rows} | 6.05 |  | 45% | {text} |",
    ]
    assert (tmp_path / "figures" / "retrofit.svg").stat().st_size > 1000


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


def test_settings_of_a_way() -> None:
    given = argparse.Namespace(
        steps=60, batch=4, micro_batch=0, seq=256, learning_rate=3e-4, eval_batches=16, recompute="none",
        precision="float32", seed=3,
    )  # fmt: skip
    found = {(way.parts, way.routers): run_retrofit.config_of(way, given) for way in GRID}
    assert {kind: (config.distill, config.anneal, config.calibrate) for kind, config in found.items()} == {
        ("dense", "fitted"): (0.0, 0.0, 0), ("removed", "fitted"): (1.0, 0.0, 0), ("block", "fitted"): (1.0, 0.0, 8),
        ("block", "learned"): (1.0, 0.5, 8), ("mlp", "fitted"): (1.0, 0.0, 8), ("mlp", "learned"): (1.0, 0.5, 8),
        ("attention", "fitted"): (1.0, 0.0, 8),
    }  # fmt: skip
    assert {(config.steps, config.batch, config.seed) for config in found.values()} == {(60, 4, 3)}


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "nowhere")])
    assert "nowhere: no such checkpoint; make one of a dense model with mod-export convert" in capsys.readouterr().err


def test_a_pattern_that_fits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--only", "mlp-0.5"], SMALL)
    names = "dense-none-1.0, removed-cheapest-1-0.0, mlp-cheapest-0.5-linear"
    assert f"--only mlp-0.5: fits none of {names}" in " ".join(capsys.readouterr().err.split())


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match=r"build model.pt -c speed.toml -o build -q ended with 2: .*model\.pt"):
        run_retrofit.speed_of(SMALL[2], tmp_path, argparse.Namespace(seq=32, window=64, results=tmp_path))


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
    folder = Path(f"results/mlp-cheapest-0.5-linear-{tokens}")
    result = json.loads((folder / "result.json").read_text())
    assert len(result["layers"]) == 2
    assert load_checkpoint(folder / "model.pt").spec.routed_layers == tuple(result["layers"])
    assert result["speed"]["status"] == "pass"
    assert result["speed"]["whole_rows"]["predicted_flops"] > 1
    assert result["speed"]["whole_rows"]["measured"] > 0
    assert result["speed"]["text"]["measured"] > 0
    # In a text, all tokens that want to run find a slot, because the window is longer.
    assert result["whole_rows"]["ran"] is None
    assert 0 < result["text"]["ran"] < 1
    page = Path("docs/training.md").read_text()
    assert f"| {tokens} | mlp | 2 cheapest | 0.5 | run an adapter | fitted |" in page
    removed = json.loads(Path(f"results/removed-cheapest-1-0.0-{tokens}/result.json").read_text())
    assert removed["whole_rows"] == removed["text"]
    assert load_checkpoint(Path(f"results/removed-cheapest-1-0.0-{tokens}/model.pt")).spec.n_layers == 3
    # Its speed is compared with the whole dense model.
    assert removed["speed"]["whole_rows"]["predicted_flops"] > 1.2
    assert f"| {tokens} | blocks removed | 1 cheapest |" in page
    capsys.readouterr()
    # A run that was stopped after its training is judged again, and a variant that was timed is not timed again.
    (folder / "result.json").unlink()
    (folder / "state.pt").unlink()
    assert main([*command, "--only", "mlp-*"], SMALL) == 0
    again = json.loads((folder / "result.json").read_text())
    assert again == result
    assert capsys.readouterr().out.startswith(f"[1/1] mlp-cheapest-0.5-linear-{tokens}: ")
    assert main(command, SMALL) == 0
    assert capsys.readouterr().out == "".join(
        f"[{number}/3] {way.name}-{tokens}: done before\n" for number, way in enumerate(SMALL, 1)
    )
