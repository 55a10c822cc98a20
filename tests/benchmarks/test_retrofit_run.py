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
QUICK = ["--steps", "4", "--batch", "2", "--seq", "32", "--eval-batches", "2", "--probe-rows", "1"]
BEGIN, END = marks("make retrofit")
PAGE = f"# Before\n\n{BEGIN}\nnot run yet\n{END}\n\nafter\n"


def row(parts: str, loss: float, speed: float | None = None, status: str = "pass") -> dict[str, object]:
    fast = {"measured": speed, "ci95": [1.1, 1.3], "predicted_flops": 1.5, "status": status}
    return {
        "parts": parts, "route": "deepest:{half}", "capacity": 0.5, "layers": [2, 3], "tokens_run": 0.75,
        "skipped_keys": "absent", "adapter": "none", "routers": "fitted", "untrained_perplexity": None,
        "bits_per_byte": 2.0,
        "next_token_loss": loss, "predictor_accuracy": 0.9, "speed": None if speed is None else fast,
    }  # fmt: skip


def test_the_page(tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text(PAGE)
    (tmp_path / "untouched.json").write_text('{"perplexity": 12.5, "bits_per_byte": 1.5}')
    found = {"dense": row("dense", 2.0), "mlp": row("mlp", 2.1, 1.2), "block": row("block", 2.3, 1.4, "fail")}
    found["kept"] = {**row("block", 2.2, 1.3), "skipped_keys": "kept", "routers": "learned"}
    found["adapted"] = {**row("mlp", 2.05, 1.2), "adapter": "linear", "untrained_perplexity": 9.5}
    found["removed"] = {**row("removed", 2.1, 1.2), "route": "cheapest:2", "predictor_accuracy": None}
    for name, result in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    about = {"model": "m", "text": "t", "steps": 10, "batch": 2, "seq": 50}
    for _ in range(2):  # The second pass writes over an existing page.
        render(tmp_path, tmp_path, [*found, "not trained"], about)
    page = (tmp_path / "training.md").read_text()
    assert page.startswith("# Before\n")
    assert page.endswith(f"{END}\n\nafter\n")
    assert "not run yet" not in page
    assert "10 steps of 2 rows of 50 tokens, 1,000 tokens" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    fast, failed = "1.20 [1.10, 1.30]", "1.40 [1.10, 1.30], a gate failed"
    assert lines[0].count("|") == len(COLUMNS) + 1
    assert lines[2:] == [
        "| dense, as given |  |  |  |  | 100% |  | 12.50 |  | 1.500 |  | 1 | 1 |",
        "| dense, trained as long |  |  |  |  | 100% |  | 7.39 | +0.0% | 2.000 |  | 1 | 1 |",
        f"| mlp | 2 deepest | 0.5 |  | fitted | 75% |  | 8.17 | +10.5% | 2.000 | 90.0% | 1.50 | {fast} |",
        f"| block | 2 deepest | 0.5 |  | fitted | 75% |  | 9.97 | +35.0% | 2.000 | 90.0% | 1.50 | {failed} |",
        "| block | 2 deepest | 0.5 | keep keys | learned | 75% |  | 9.03 | +22.1% | 2.000 | 90.0% | 1.50 | "
        "1.30 [1.10, 1.30] |",
        "| mlp | 2 deepest | 0.5 | run an adapter | fitted | 75% | 9.50 | 7.77 | +5.1% | 2.000 | 90.0% | 1.50 | "
        f"{fast} |",
        f"| blocks removed | 2 cheapest |  |  |  | 75% |  | 8.17 | +10.5% | 2.000 |  | 1.50 | {fast} |",
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
    assert [folder_name(learned, seed) for seed in (0, 2)] == [learned.name, f"{learned.name}-seed2"]


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


def test_the_share_of_tokens_that_run() -> None:
    assert DENSE.share_of(0, 4) == 1
    assert Way("block", "", 0.5).share_of(2, 4) == 0.75
    assert Way("mlp", "", 0.5).share_of(2, 4) == 0.875
    assert Way("removed", "", 0.0).share_of(1, 4) == 0.75


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "nowhere")])
    assert "nowhere: no such checkpoint; make one of a dense model with mod-export convert" in capsys.readouterr().err


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match=r"build model.pt -c speed.toml -o build -q ended with 2: .*model\.pt"):
        run_retrofit.speed_of(tmp_path, 32)


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
    result = json.loads(Path("results/mlp-cheapest-0.5-linear/result.json").read_text())
    assert len(result["layers"]) == 2
    assert load_checkpoint(Path("results/mlp-cheapest-0.5-linear/model.pt")).spec.routed_layers == tuple(
        result["layers"]
    )
    assert result["speed"]["status"] == "pass"
    assert result["speed"]["predicted_flops"] > 1
    assert result["speed"]["measured"] > 0
    page = Path("docs/training.md").read_text()
    assert "| mlp | 2 cheapest | 0.5 | run an adapter | fitted |" in page
    assert result["untrained_perplexity"] > 1
    removed = json.loads(Path("results/removed-cheapest-1-0.0/result.json").read_text())
    assert (len(removed["layers"]), removed["tokens_run"], removed["predictor_accuracy"]) == (1, 0.75, None)
    assert load_checkpoint(Path("results/removed-cheapest-1-0.0/model.pt")).spec.n_layers == 3
    # Its speed is compared with the whole dense model.
    assert removed["speed"]["predicted_flops"] > 1.2
    assert "| blocks removed | 1 cheapest |" in page
    capsys.readouterr()
    assert main(command, SMALL) == 0
    assert capsys.readouterr().out == (
        "[1/3] dense-none-1.0: done before\n[2/3] removed-cheapest-1-0.0: done before\n"
        "[3/3] mlp-cheapest-0.5-linear: done before\n"
    )
