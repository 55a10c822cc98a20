"""The contents of a build folder, and the events of a build."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from build_folders import STAGES, Silent, check_files, steps_of

import mod_export
from mod_export.config import BuildConfig, config_from_toml
from mod_export.folder.manifest import read_manifest
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import Stage
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec


def test_the_manifest_lists_every_file(built: Path) -> None:
    check_files(built)
    assert not any(path.is_symlink() for path in built.rglob("*"))


def test_nothing_in_the_folder_names_the_building_machines_paths(built: Path, checkpoint: Path) -> None:
    homes = [built.parent, checkpoint.parent, Path(mod_export.__file__).parent, Path(torch.__file__).parent,
             Path(sys.prefix), Path.cwd(), Path.home()]  # fmt: skip
    for path in (path for path in built.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for home in (home for home in homes if len(home.parts) > 2):
            assert str(home).encode() not in data, f"{path.name} names {home}"


FIELDS: dict[str, set[str]] = {
    "verdict": {"status", "reasons"},
    "model": {"name", "architecture", "parameters", "checkpoint_sha256", "spec"},
    "environment": {"mod_export", "python", "torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "cpu", "cores",
                    "gpu", "threads"},
    "stages": {"name", "status", "seconds", "peak_rss_bytes"},
    "artifacts": {"path", "kind", "target", "model", "bucket", "dtype", "bytes", "sha256"},
    "targets": {"target", "available", "reason", "ran"},
    "parity": {"target", "bucket", "dtype", "reference", "inputs", "routing", "error", "next_token_agreement", "gate",
               "passed"},
    "latency": {"target", "bucket", "dtype", "model", "providers", "threads", "warmup", "samples_ms", "p50_ms",
                "p90_ms", "p99_ms", "mean_ms", "stdev_ms"},
    "speedup": {"target", "bucket", "dtype", "measured", "ci95", "predicted_flops", "efficiency", "gate", "passed"},
    "cost": {"model", "bucket", "flops", "flops_by_part", "weight_bytes", "activation_bytes", "kv_bytes"},
}  # fmt: skip
"""Fields that the contract promises for each part; a part may have more."""


def test_report_json_has_what_the_contract_promises(built: Path, checkpoint: Path, config: BuildConfig) -> None:
    report = json.loads((built / "report.json").read_text())
    assert report["schema_version"] == 2
    assert {"config", "command"} < report.keys()
    for part, fields in FIELDS.items():
        rows = report[part] if isinstance(report[part], list) else [report[part]]
        assert rows
        for row in rows:
            assert fields <= row.keys(), part
    for row in report["parity"]:
        assert {"layers", "routed", "agreed", "near_ties", "min_margin"} <= row["routing"].keys()
        assert {"max_abs", "mean_abs", "max_rel"} <= row["error"].keys()
        routed = ["near_ties"] if row["model"] == "mod" else []
        assert row["inputs"] == [*routed, "padded", "random", "text", "ties"]
    assert report["model"]["checkpoint_sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert report["model"]["spec"] == load_checkpoint(checkpoint).spec.to_dict()
    assert config.outputs == "auto"
    assert config_again(report["config"]) == config.model_copy(update={"outputs": "logits"})
    files = read_manifest(built)["files"]
    for row in report["artifacts"]:
        assert files[row["path"]] == {"bytes": row["bytes"], "sha256": row["sha256"]}
    assert {row["path"] for row in report["artifacts"]} == files.keys() - {"report.json", "report.html"}
    for row in report["speedup"]:
        median = {
            entry["model"]: entry["p50_ms"]
            for entry in report["latency"]
            if (entry["target"], entry["bucket"], entry["dtype"]) == (row["target"], row["bucket"], row["dtype"])
        }
        assert row["measured"] == pytest.approx(median["dense"] / median["mod"])
        assert row["efficiency"] == pytest.approx(row["measured"] / row["predicted_flops"])
        assert row["ci95"][0] <= row["measured"] <= row["ci95"][1]


def config_again(data: dict[str, Any]) -> BuildConfig:
    return BuildConfig.model_validate(tomllib.loads(tomli_w.dumps(data)))


class Recorder:
    """Records a build: the names of announced stages and steps, and the finished stages."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.steps: list[str] = []
        self.finished: list[Stage] = []

    def stage_started(self, name: str) -> None:
        self.started.append(name)

    def step_started(self, name: str) -> None:
        self.steps.append(name)

    def stage_finished(self, stage: Stage) -> None:
        self.finished.append(stage)


def test_an_observer_hears_of_every_stage_and_step(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    heard = Recorder()
    build(Request.checkpoint(checkpoint).models, config, built_copy, heard, "mod-export build")
    assert heard.started == list(STAGES)
    assert [stage.name for stage in heard.finished] == list(STAGES)
    assert heard.steps == list(steps_of(built_copy))


def test_a_refused_request_leaves_no_folder(
    tmp_path: Path, checkpoint: Path, config_file: Path, tiny_spec: ModelSpec
) -> None:
    baseline = tmp_path / "base.pt"
    save_checkpoint(baseline, random_checkpoint(replace(tiny_spec.dense(), vocab_size=300), 0))
    with pytest.raises(mod_export.errors.CheckpointError, match="a vocabulary of 300 instead of 256") as caught:
        build(
            Request.checkpoint(checkpoint, baseline).models,
            config_from_toml(config_file),
            tmp_path / "out",
            Silent(),
            "",
        )
    assert caught.value.__notes__ == ["stage load failed; done before it: none"]
    assert not (tmp_path / "out").exists()
