"""The code of the study, run for a few steps; its results are in docs/training.md."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from observing import observed

from benchmarks.marked_part import marks
from benchmarks.study import measure as measure_study
from benchmarks.study import models as study_models
from benchmarks.study import step_times
from benchmarks.study.measure import trained_model
from benchmarks.study.models import BATCH, SEEDS, STUDIED, config_of
from benchmarks.study.render import read_runs, render
from benchmarks.study.run import folder_of, train_one

SMALL = 2e10
NAMES = ("dense", "MoD 12.5 %", "stochastic MoD 12.5 %")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_study, "EVAL_BATCHES", 2)
        patch.setattr(step_times, "STUDIED", [model for model in STUDIED if model.name in NAMES])
        for name in NAMES:
            assert train_one(folder, name, 0, SMALL).startswith(f"{name}, seed 0: ")
        (folder / "step_times.json").write_text(json.dumps(step_times.step_times(rounds=1)), encoding="utf-8")
    return folder


def test_every_model_gets_the_same_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting takes a whole training step, and `config_of` counts the same as this test.
    flops_of_row = functools.cache(study_models.flops_of_row)
    monkeypatch.setattr(study_models, "flops_of_row", flops_of_row)
    for studied in STUDIED:
        spent = config_of(studied, 0).steps * BATCH * flops_of_row(studied.spec, training=True)
        assert spent == pytest.approx(5e12, rel=0.01)


def test_names_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({folder_of(tmp_path, studied, seed) for studied in STUDIED for seed in SEEDS}) == 2 * len(STUDIED)


@pytest.mark.slow
def test_a_run_is_not_repeated(results: Path) -> None:
    assert train_one(results, "dense", 0, SMALL) == "dense, seed 0: done before"


@pytest.mark.slow
def test_what_is_measured(results: Path) -> None:
    runs = read_runs(results)
    assert list(runs) == list(NAMES)
    dense, mod = runs["dense"][0], runs["MoD 12.5 %"][0]
    assert "map" not in dense
    assert dense["predictor_accuracy"] is None
    assert 0.5 < mod["predictor_accuracy"] <= 1
    assert mod["forward_flops"] < dense["forward_flops"]
    assert mod["steps"] > dense["steps"]
    assert len(mod["share_by_entropy"]) == 10
    # Every routed block runs an eighth of the tokens.
    assert sum(mod["share_by_entropy"]) / 10 == pytest.approx(1 / 8, abs=0.01)
    assert {len(positions) for positions in mod["map"]["layers"].values()} == {32}
    assert 0 < mod["curve"][-1]["bits_per_byte"] < 8.5


@pytest.mark.slow
def test_the_model_that_is_measured_is_the_one_that_was_trained(results: Path) -> None:
    studied = next(one for one in STUDIED if one.name == "MoD 12.5 %")
    model = trained_model(folder_of(results, studied, 0), studied.spec, "predictor")
    assert not model.training
    _, decided = observed(model, torch.randint(0, 256, (1, 64)), torch.tensor([64]))
    assert {routing.rule for routing in decided.values()} == {"first_come"}


@pytest.mark.slow
def test_the_page(results: Path, tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text("\n".join(["# Before", *marks("make study"), "after"]), encoding="utf-8")
    render(results, tmp_path)
    page = (tmp_path / "training.md").read_text(encoding="utf-8")
    assert page.startswith("# Before\n")
    assert page.endswith("\nafter")
    assert all(f"| {name} |" in page for name in NAMES)
    assert "| learned routing is better than stochastic routing | " in page
    # The page leaves out models that were not trained.
    assert "integrated MoDE" not in page
    for figure in ("study-curves.svg", "study-scores.svg", "study-entropy.svg"):
        assert (tmp_path / "figures" / figure).stat().st_size > 1000
        assert f"figures/{figure}" in page
