"""Every kind of model through the whole pipeline: parity, plans of TensorRT-RTX, and what a user runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Recorder
from tiny_models import distinct_ids, lively_checkpoint
from variants import VARIANTS

import mod_export
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.pipeline import build
from mod_export.report.schema import BuildReport
from mod_export.runtime import engines_of
from mod_export.workspace import read_manifest
from mod_models.checkpoint import save_checkpoint
from mod_models.spec import ModelSpec

BUCKET = (2, 16)
LENGTHS = np.array([12, 7])
RTX = ENGINES["tensorrt-rtx"].availability()


def config_of(config: BuildConfig) -> BuildConfig:
    options = config.target.tensorrt_rtx.model_copy(update={"architectures": ("sm89",), "dtypes": ("float16",)})
    targets = ("ort-cpu", "tensorrt-rtx") if RTX.builds else ("ort-cpu",)
    return config.model_copy(
        update={
            "buckets": (BUCKET,),
            "targets": targets,
            "target": config.target.model_copy(update={"tensorrt_rtx": options}),
            "cost": config.cost.model_copy(update={"profile_runs": 0}),
            "generation": config.generation.model_copy(update={"build": "never"}),
        }
    )


@pytest.fixture(scope="module", params=list(VARIANTS))
def kind(
    request: pytest.FixtureRequest, config: BuildConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelSpec, Path, BuildReport]:
    folder = tmp_path_factory.mktemp("kind")
    spec = VARIANTS[request.param]
    save_checkpoint(folder / "kind.pt", lively_checkpoint(spec))
    root = folder / "build"
    report = build(folder / "kind.pt", config_of(config), root, None, Recorder(), "mod-export build kind.pt")
    return spec, root, report


def test_parity_holds_on_every_target_that_runs(kind: tuple[ModelSpec, Path, BuildReport]) -> None:
    spec, _, report = kind
    assert report.verdict.status == "pass", report.verdict.reasons
    assert all(row.passed for row in report.parity)
    sites = {str(site) for site, k in spec.k_by_layer(BUCKET[1]).items() if k}
    mod = next(row for row in report.parity if row.model == "mod" and row.target == "ort-cpu")
    assert {str(layer.layer) for layer in mod.routing.layers} == sites
    # Inputs were of every kind that these models have, so that there was something to agree on.
    assert not sites or 0 < mod.routing.agreed <= mod.routing.routed


def test_causal_where_declared(kind: tuple[ModelSpec, Path, BuildReport]) -> None:
    spec, _, report = kind
    probed = [row for row in report.causality if row.model == "mod"]
    assert probed
    if not spec.looks_ahead:
        assert all(row.causal and row.suffixes > 0 for row in probed)


@pytest.mark.skipif(not RTX.builds, reason=RTX.reason or "TensorRT-RTX builds here")
def test_plans_are_built(kind: tuple[ModelSpec, Path, BuildReport]) -> None:
    _, root, report = kind
    plans = [one for one in report.artifacts if one.kind == "engine" and one.target == "tensorrt-rtx"]
    assert {one.model for one in plans} == {"mod", "dense"}
    assert all((root / one.path).stat().st_size == one.bytes > 10_000 for one in plans)


def test_what_a_user_runs_is_the_eager_model(kind: tuple[ModelSpec, Path, BuildReport], config: BuildConfig) -> None:
    spec, root, _ = kind
    ids_BS = distinct_ids(spec, 2, 12).numpy()
    padded_BS = np.zeros(BUCKET, np.int64)
    padded_BS[:, :12] = ids_BS
    module = lively_checkpoint(spec).module()
    with torch.no_grad():
        logits_BSV, decided = module.trace(torch.from_numpy(padded_BS), torch.from_numpy(LENGTHS))
    with mod_export.load(root) as deployment:
        found_BSV = deployment.run(ids_BS, LENGTHS)
    real_BS = np.arange(12) < LENGTHS[:, None]
    np.testing.assert_allclose(found_BSV[real_BS], logits_BSV.numpy()[:, :12][real_BS], atol=1e-4)
    engine = next(one for one in engines_of(read_manifest(root)) if (one.target, one.model) == ("ort-cpu", "mod"))
    with ENGINES["ort-cpu"].load(root, engine, config) as runner:
        feeds = {"input_ids": padded_BS, "lengths": LENGTHS}
        outputs = runner.run({name: array for name, array in feeds.items() if name in runner.inputs})
    routed = {name: array.tolist() for name, array in outputs.items() if name.startswith("routed_")}
    assert routed == {f"routed_{site}": one.index_BK.tolist() for site, one in decided.items()}
