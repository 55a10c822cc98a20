"""Every kind of model through the whole pipeline: parity, TensorRT-RTX plans, and what a user runs. A build takes long,
so one model combines several declarations that do not affect each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build_folders import Silent, changed
from observing import observed
from tiny_models import distinct_ids, lively_checkpoint, make_spec
from variants import VARIANTS, experts

import mod_export
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.folder.manifest import open_folder
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_models.checkpoint import save_checkpoint
from mod_models.spec import EveryNth, ModelSpec

BUCKET = (2, 16)
LENGTHS = np.array([12, 7])
RTX = ENGINES["tensorrt-rtx"].availability()


def config_of(config: BuildConfig) -> BuildConfig:
    added: dict[str, Any] = {"targets": ["ort-cpu", "tensorrt-rtx"]} if RTX.builds else {}
    rtx = {"target/tensorrt-rtx/architectures": ["sm89"], "target/tensorrt-rtx/dtypes": ["float16"]}
    return changed(config, {"buckets": [BUCKET], "cost/profile_runs": 0, "generation/build": "never", **rtx, **added})


KINDS: dict[str, ModelSpec] = {
    **{
        name: VARIANTS[name]
        for name in (
            "staged MoDE, threshold", "dense", "random", "MLP routed", "routed apart", "routed apart by predictors",
            "experts, expert choice", "staged MoDE", "staged MoDE, expert choice", "integrated MoDE",
            "integrated MoDE, expert choice", "early exit with experts", "biases", "normed heads",
            "keys and values kept", "keys and values kept, attention routed", "keys and values kept, routed apart",
            "keys and values kept, adapter", "skipped are scaled", "skipped have a linear adapter",
            "skipped have a bottleneck adapter", "several blocks, nested", "several blocks, nested, threshold",
        )
    },
    "stochastic, absolute": make_spec(router="noise", noise_seed=5, capacity_rule="absolute", capacity=3),
    "attention routed by thresholds": make_spec(parts="attention", selection="threshold", gate="sigmoid"),
    "FFN gated, schedule, protected blocks": make_spec(
        combine="ffn_gated", capacity=(0.25, 0.6), n_layers=4,
        layers=EveryNth(every=1, offset=0, skip_first=1, skip_last=1),
    ),
    "experts, token choice, two of a token": make_spec(routing=None, experts=experts(capacity_factor=1.0, top_k=2)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model(name: str, config: BuildConfig, tmp_path: Path) -> None:
    spec = KINDS[name]
    save_checkpoint(tmp_path / "kind.pt", lively_checkpoint(spec))
    root = tmp_path / "build"
    report = build(
        Request.checkpoint(tmp_path / "kind.pt").models, config_of(config), root, Silent(), "mod-export build kind.pt"
    )
    check_parity(spec, report)
    check_causality(spec, report)
    if RTX.builds:
        check_plans(spec, root, report)
    check_served(spec, root, config)


def check_parity(spec: ModelSpec, report: BuildReport) -> None:
    """Checks parity on every target that runs."""
    assert report.verdict.status == "pass", report.verdict.reasons
    assert all(row.passed for row in report.parity)
    sites = {str(site) for site, k in spec.k_by_layer(BUCKET[1]).items() if k}
    mod = next(row for row in report.parity if row.model == "mod" and row.target == "ort-cpu")
    assert {str(layer.layer) for layer in mod.routing.layers} == sites
    # The inputs were of every kind that these models have, so there was routing to agree on.
    assert not sites or 0 < mod.routing.agreed <= mod.routing.routed


def check_causality(spec: ModelSpec, report: BuildReport) -> None:
    """Checks that a model is causal if its spec says so."""
    probed = [row for row in report.causality if row.model == "mod"]
    assert probed
    if not spec.looks_ahead:
        assert all(row.causal and row.suffixes > 0 for row in probed)


def check_plans(spec: ModelSpec, root: Path, report: BuildReport) -> None:
    plans = [file for file in report.artifacts if file.kind == "engine" and file.target == "tensorrt-rtx"]
    assert {file.model for file in plans} == ({"mod", "dense"} if spec.routed_layers else {"mod"})
    assert all((root / file.path).stat().st_size == file.bytes > 10_000 for file in plans)


def check_served(spec: ModelSpec, root: Path, config: BuildConfig) -> None:
    """Checks that what a user runs gives the results of the eager model."""
    ids_BS = distinct_ids(spec, 2, 12).numpy()
    padded_BS = np.zeros(BUCKET, np.int64)
    padded_BS[:, :12] = ids_BS
    module = lively_checkpoint(spec).module()
    with torch.no_grad():
        logits_BSV, decided = observed(module, torch.from_numpy(padded_BS), torch.from_numpy(LENGTHS))
    with mod_export.load(root) as deployment:
        found_BSV = deployment.run(ids_BS, LENGTHS)
    real_BS = np.arange(12) < LENGTHS[:, None]
    np.testing.assert_allclose(found_BSV[real_BS], logits_BSV.numpy()[:, :12][real_BS], atol=1e-4)
    engine = next(
        item for item in open_folder(root, verify=False).engines if (item.target, item.model) == ("ort-cpu", "mod")
    )
    with ENGINES["ort-cpu"].load(root, engine, config, 1) as runner:
        feeds = {"input_ids": padded_BS, "lengths": LENGTHS}
        outputs = runner.run({name: array for name, array in feeds.items() if name in runner.inputs})
    routed = {name: array.tolist() for name, array in outputs.items() if name.startswith("routed_")}
    assert routed == {f"routed_{site}": item.index_BK.tolist() for site, item in decided.items()}
