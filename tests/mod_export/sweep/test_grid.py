"""From options to cells, and what is refused before any work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from packages import WithoutBaseline

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.errors import CheckpointError, ConfigError, TargetError
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.model.transformer import TransformerModel
from mod_export.sweep.run import Axes, GridCell, cells_of
from mod_export.types import Bucket
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec


def test_every_combination_in_order(model: Model, config: BuildConfig) -> None:
    axes = Axes(capacities=("0.5", "0.125, 0.25", "0.50"), seqs=("64,32,64",), batches=("1", "2"), targets=("ort-cpu",))
    cells = cells_of(model, config, axes, here=True)
    assert len(cells) == 12
    assert [cell.name for cell in cells[:4]] == [
        "c0.125-b1s32-ort-cpu", "c0.25-b1s32-ort-cpu", "c0.5-b1s32-ort-cpu", "c0.125-b1s64-ort-cpu",
    ]  # fmt: skip


def test_defaults_are_the_models_and_the_configurations(model: Model, config: BuildConfig) -> None:
    assert cells_of(model, config, Axes(), here=True) == (
        GridCell(capacity=0.125, bucket=Bucket(1, 64), target="ort-cpu"),
        GridCell(capacity=0.125, bucket=Bucket(2, 32), target="ort-cpu"),
    )
    crossed = cells_of(model, config, Axes(batches=("4",)), here=True)
    assert [cell.bucket for cell in crossed] == [Bucket(4, 32), Bucket(4, 64)]
    # Without targets, the first that runs here is taken.
    found = cells_of(model, config.model_copy(update={"targets": ()}), Axes(), here=True)
    assert {cell.target for cell in found} == {"ort-cpu"}


def test_names_do_not_collide() -> None:
    names = {
        GridCell(capacity=capacity, bucket=Bucket(1, 8), target="ort-cpu").name
        for capacity in (None, 0.1234567, 0.1234568, 64.0, 1e-5)
    }
    assert names == {f"{c}-b1s8-ort-cpu" for c in ("own", "c0.1234567", "c0.1234568", "c64", "c1e-05")}


@pytest.mark.parametrize(
    ("axes", "problems"),
    [
        (
            Axes(capacities=("0.5,1.5", "x", "nan"), seqs=("64", "1000", "1.5"), batches=("0",)),
            (
                "--capacity: expected a number above 0, got 'x'",
                "--capacity: expected a number above 0, got 'nan'",
                "--seq: expected a whole number of at least 1, got '1.5'",
                "--batch: expected a whole number of at least 1, got '0'",
            ),
        ),
        (
            Axes(capacities=("1.5",), seqs=("1000",)),
            (
                "--seq 1000: longer than the model's 256 positions",
                "--capacity 1.5: spec.routing.capacity: expected a share in (0, 1], got 1.5",
            ),
        ),
    ],
    ids=["no numbers", "more than the model takes"],
)
def test_every_problem_at_once(model: Model, config: BuildConfig, axes: Axes, problems: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        cells_of(model, config, axes, here=True)
    assert caught.value.problems == problems


def test_a_capacity_of_an_absolute_rule_is_a_number_of_tokens(
    tiny_spec: ModelSpec, tmp_path: Path, config: BuildConfig
) -> None:
    spec = dataclasses.replace(tiny_spec, routing=RoutingSpec(capacity_rule="absolute", capacity=8))
    save_checkpoint(tmp_path / "m.pt", random_checkpoint(spec, 0))
    absolute = model_from_checkpoint(tmp_path / "m.pt")
    cells = cells_of(absolute, config, Axes(capacities=("16",), seqs=("64",)), here=True)
    assert absolute.with_capacity(16).k_by_layer(64) == {1: 16, 3: 16}
    assert cells[0].name == "c16-b1s64-ort-cpu"
    with pytest.raises(ConfigError, match=r"--capacity 0\.5: .*whole number of tokens"):
        cells_of(absolute, config, Axes(capacities=("0.5",)), here=True)


def test_a_dense_model_has_no_capacity(tiny_spec: ModelSpec, tmp_path: Path, config: BuildConfig) -> None:
    save_checkpoint(tmp_path / "dense.pt", random_checkpoint(tiny_spec.dense(), 0))
    dense = model_from_checkpoint(tmp_path / "dense.pt")
    with pytest.raises(CheckpointError, match="dense: no layer is routed by a capacity that could be swept"):
        cells_of(dense, config, Axes(), here=True)
    with pytest.raises(ConfigError, match=r"capacity 0\.5: spec\.routing: null, so there is no routed layer"):
        Request.checkpoint(tmp_path / "dense.pt", capacity=0.5).models()


def test_a_model_without_a_dense_baseline(tiny_spec: ModelSpec, model: Model, config: BuildConfig) -> None:
    alone = WithoutBaseline(random_checkpoint(tiny_spec, 0))
    alone.origin = model.origin
    with pytest.raises(CheckpointError, match="tiny: has no dense baseline of its own, beside which every cell of a"):
        cells_of(alone, config, Axes(), here=True)


def test_targets_that_cannot_be_measured_here(model: Model, config: BuildConfig) -> None:
    with pytest.raises(TargetError, match="unknown target 'ort-cp', did you mean 'ort-cpu'"):
        cells_of(model, config, Axes(targets=("ort-cp",)), here=True)
    unable = next((name for name, engine in ENGINES.items() if not engine.availability().runs), None)
    if unable is None:
        pytest.skip("every target runs on this machine")
    with pytest.raises(TargetError, match=f"a sweep builds and measures, which cannot be done here for {unable}: "):
        cells_of(model, config, Axes(targets=("ort-cpu", unable)), here=True)
    assert {cell.target for cell in cells_of(model, config, Axes(targets=(unable,)), here=False)} == {unable}


def test_a_model_that_does_not_declare_whether_it_skips_blocks_can_be_swept(
    tiny_spec: ModelSpec, config: BuildConfig
) -> None:
    class Undeclared(TransformerModel):
        routes_depth = None

        def dense(self) -> TransformerModel:
            return TransformerModel(self.checkpoint.dense())

    cells = cells_of(Undeclared(random_checkpoint(tiny_spec, 0)), config, Axes(batches=("1",), seqs=("64",)), here=True)
    assert [cell.bucket for cell in cells] == [Bucket(1, 64)]
