"""A build redoes what depends on a change and nothing else, and resumes after a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build_folders import STAGES, Silent, check_files, steps_of

import mod_export
from mod_export.build_folder.manifest import read_manifest
from mod_export.config import BuildConfig, toml_from_config
from mod_export.engines import ENGINES
from mod_export.errors import BuildFolderError
from mod_export.pipeline import build
from mod_export.results.report import BuildReport
from mod_export.types import Bucket
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

STAGE_OF = {
    "load": "load", "capture": "capture", "weights": "onnx", "graph": "onnx", "formulation": "passes",
    "rewrite": "passes", "engine": "engines",
    "structure": "validate", "parity": "validate", "causality": "validate", "map": "validate", "latency": "benchmark",
    "work": "profile", "profile": "profile",
}  # fmt: skip


def rebuild(
    root: Path, checkpoint: Path, config: BuildConfig, baseline: Path | None = None
) -> tuple[set[str], BuildReport]:
    """Builds again; the steps that were done, and the report. What was reused is as it was, to the byte."""
    before = steps_of(root)
    report = build(checkpoint, config, root, baseline, Silent(), "mod-export build")
    after = steps_of(root)
    fingerprint = {name: record["fingerprint"] for name, record in before.items()}
    done = {name for name, record in after.items() if fingerprint.get(name) != record["fingerprint"]}
    assert {name: after[name] for name in after.keys() - done} == {name: before[name] for name in after.keys() - done}
    # The report tells of this run, whatever was reused.
    assert "report" in done
    done.remove("report")
    stages = {stage.name: stage.status for stage in report.stages}
    assert tuple(stages) == STAGES
    worked = {STAGE_OF[name.partition("/")[0]] for name in done}
    for stage in STAGE_OF.values():
        if any(STAGE_OF[name.partition("/")[0]] == stage for name in after if name != "report"):
            assert stages[stage] == ("built" if stage in worked else "reused")
    return done, report


def changed(config: BuildConfig, field: str, value: Any) -> BuildConfig:
    """The configuration with one field of the TOML file changed."""
    data = tomllib.loads(toml_from_config(config))
    section = data
    *path, last = field.split("/")
    for name in path:
        section = section[name]
    assert section[last] != value
    section[last] = value
    return BuildConfig.model_validate(data)


BUCKETS = ("b1s64", "b2s32")
ENGINE_PARITY = {f"parity/ort-cpu/{kind}-{bucket}-float32" for kind in ("mod", "dense") for bucket in BUCKETS}
PARITY = ENGINE_PARITY | {name.replace("ort-cpu", "portable") for name in ENGINE_PARITY}
CAUSALITY = {name.replace("parity/", "causality/") for name in ENGINE_PARITY}
MAP = {f"map/{bucket}" for bucket in BUCKETS}
LATENCY = {f"latency/ort-cpu/{bucket}-float32" for bucket in BUCKETS}
PROFILE = {f"profile/ort-cpu/{kind}-{bucket}-float32" for kind in ("mod", "dense") for bucket in BUCKETS}


def of_bucket(bucket: str) -> set[str]:
    """Every step of one bucket on ort-cpu."""
    of_kinds = {
        f"{step}{kind}-{bucket}{dtype}"
        for kind in ("mod", "dense")
        for step, dtype in (
            ("capture/", ""), ("graph/", ""), ("engine/ort-cpu/", "-float32"), ("parity/ort-cpu/", "-float32"),
            ("causality/ort-cpu/", "-float32"), ("work/ort-cpu/", "-float32"), ("profile/ort-cpu/", "-float32"),
            ("rewrite/ort-cpu/", "-float32"), ("parity/portable/", "-float32"),
        )
    }  # fmt: skip
    return {*of_kinds, f"latency/ort-cpu/{bucket}-float32", f"map/{bucket}", "structure"}


GATES = {
    "rounding_error_rms": 5.0, "near_tie": 0.5, "next_token_agreement": 0.5, "max_kl": 0.5, "max_perplexity_ratio": 2.0,
}  # fmt: skip
TOLERANCES = {"rounding_error": 20.0, "max_abs": 0.5}
CHANGES: dict[str, tuple[Any, set[str]]] = {
    "cost/profile_runs": (2, PROFILE),
    "cost/measure_again": (True, set()),
    "seed": (1, PARITY | CAUSALITY | MAP | LATENCY | PROFILE),
    "latency/samples": (6, LATENCY),
    "latency/warmup": (2, LATENCY),
    "latency/threads": (2, PARITY | CAUSALITY | LATENCY | PROFILE),
    "latency/max_samples": (9, LATENCY),
    "latency/max_seconds": (14.0, LATENCY),
    "latency/max_warmup": (49, LATENCY),
    "latency/warmup_tolerance": (0.06, LATENCY),
    "latency/resolution": (0.03, LATENCY),
    "latency/precision": (0.2, LATENCY),
    "latency/disturbance": (0.2, LATENCY),
    "latency/bootstrap": (200, set()),
    "latency/min_speedup": (0.01, {"latency/ort-cpu/b1s64-float32"}),
    "parity/batches_per_kind": (2, PARITY | CAUSALITY),
    "parity/text_batches": (2, PARITY | CAUSALITY),
    "parity/suffixes": (2, CAUSALITY),
    **{f"parity/float32/{gate}": (value, PARITY) for gate, value in GATES.items()},
    **{f"parity/float32/{gate}": (value, PARITY | CAUSALITY) for gate, value in TOLERANCES.items()},
    **{
        f"parity/{dtype}/{gate}": (value, set())
        for dtype in ("float16", "bfloat16", "int8", "int4")
        for gate, value in (GATES | TOLERANCES).items()
    },
    "outputs": ("last", (of_bucket("b1s64") | of_bucket("b2s32")) - MAP),
    # Of buckets as short as these no attention is split.
    "target/ort-cpu/query_block": (64, set()),
    "target/ort-cuda/dtypes": (["float16"], set()),
    "max_memory": (2**34, set()),
    "target/ort-cuda/device": (1, set()),
    "target/ort-cuda/cuda_graph": (False, set()),
    "target/tensorrt/dtypes": (["float16"], set()),
    "target/tensorrt/optimization_level": (5, set()),
    "target/tensorrt/workspace_mib": (100, set()),
    "target/tensorrt-rtx/dtypes": (["float16"], set()),
    "target/tensorrt-rtx/architectures": (["sm86"], set()),
    # This model cannot write text; for one that can see stages/test_generation.py.
    "generation/build": ("never", set()),
    "generation/window": (32, set()),
    "generation/slack": (1, set()),
    "generation/prompts": ([32], set()),
    "generation/caches": ([32], set()),
    "generation/batches": ([2], set()),
    "generation/slots": ("fair", set()),
    "generation/judged_tokens": (9, set()),
    "generation/compared_texts": (1, set()),
    "generation/compared_tokens": (5, set()),
    "generation/measured_tokens": (9, set()),
}
"""Field -> a new value, and the steps that it makes a build of ort-cpu do again."""
NOT_FLIPPED = {"buckets", "targets", "target/ort-cpu/dtypes", "target/inductor/dtypes", "generation/targets"}
"""The first two have tests of their own, and the others can hold one value only."""


def _fields(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}/")
        else:
            yield prefix + name


def test_every_field_of_the_configuration_is_changed_below(config: BuildConfig) -> None:
    assert set(_fields(tomllib.loads(toml_from_config(config)))) == CHANGES.keys() | NOT_FLIPPED


def _by_steps() -> dict[str, list[str]]:
    """Fields that redo the same steps, under the name of the first."""
    groups: dict[frozenset[str], list[str]] = {}
    for field, (_, steps) in CHANGES.items():
        groups.setdefault(frozenset(steps), []).append(field)
    return {fields[0]: fields for fields in groups.values()}


BY_STEPS = _by_steps()
VALIDATED_TWICE = "parity/float32/noise_rms"
"""Redoes a part of what parity/batches_per_kind redoes, in as many seconds."""
ALONE = [field for field, (_, steps) in CHANGES.items() if steps and field not in BY_STEPS]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(name, marks=pytest.mark.slow if len(fields) == 1 or name == VALIDATED_TWICE else [])
        for name, fields in BY_STEPS.items()
    ],
)
def test_changed_fields_redo_what_depends_on_them_and_nothing_else(
    first: str, built_copy: Path, checkpoint: Path, config: BuildConfig
) -> None:
    """All fields of a group at once: none of them redoes more, and one of them at least redoes this."""
    other = config
    for field in BY_STEPS[first]:
        other = changed(other, field, CHANGES[field][0])
    done, report = rebuild(built_copy, checkpoint, other)
    assert done == CHANGES[first][1]
    assert other.model_dump(mode="json", by_alias=True) == report.config


@pytest.mark.slow
@pytest.mark.parametrize("field", ALONE)
def test_a_changed_field_redoes_it_alone(field: str, built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    value, expected = CHANGES[field]
    done, _ = rebuild(built_copy, checkpoint, changed(config, field, value))
    assert done == expected


def test_the_same_checkpoint_under_another_name(
    built_copy: Path, tmp_path: Path, checkpoint: Path, config: BuildConfig
) -> None:
    files = {path: path.stat().st_mtime_ns for path in built_copy.rglob("*") if path.suffix in (".onnx", ".data")}
    shutil.copy(checkpoint, tmp_path / "renamed.pt")
    done, report = rebuild(built_copy, tmp_path / "renamed.pt", config)
    assert done == set()
    assert report.model.name == "renamed"
    written = json.loads((built_copy / "report.json").read_text())
    assert {stage["name"]: stage["status"] for stage in written["stages"]} == dict.fromkeys(STAGES, "reused")
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert report.verdict.status == "pass"


@pytest.mark.slow
def test_an_added_bucket(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    done, report = rebuild(built_copy, checkpoint, changed(config, "buckets", [[1, 64], [2, 32], [1, 16]]))
    assert done == of_bucket("b1s16")
    assert {row.bucket for row in report.speedup} == {"b1s16", *BUCKETS}


@pytest.mark.slow
def test_another_checkpoint_redoes_everything(
    built_copy: Path, tmp_path: Path, tiny_spec: ModelSpec, config: BuildConfig
) -> None:
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(tiny_spec, 7))
    done, _ = rebuild(built_copy, tmp_path / "other.pt", changed(config, "buckets", [[1, 64]]))
    # A graph without its weights is the same, and so is the work that is counted in it.
    work = {name for name in of_bucket("b1s64") if name.startswith("work/")}
    assert done == {"load", "weights/weights-float32", *of_bucket("b1s64")} - work


@pytest.mark.slow
def test_a_baseline_redoes_the_dense_half(
    built_copy: Path, tmp_path: Path, tiny_spec: ModelSpec, checkpoint: Path, config: BuildConfig
) -> None:
    one = changed(config, "buckets", [[1, 64]])
    save_checkpoint(tmp_path / "base.pt", random_checkpoint(tiny_spec.dense(), 7))
    done, _ = rebuild(built_copy, checkpoint, one, tmp_path / "base.pt")
    dense = {name for name in of_bucket("b1s64") if "mod-" not in name and not name.startswith("map/")}
    assert done == {"load", "weights/weights-baseline-float32", *dense}
    assert (built_copy / "graphs/weights-baseline-float32.data").is_file()
    done, _ = rebuild(built_copy, checkpoint, one)
    assert done == {"load", *dense}
    assert not (built_copy / "graphs/weights-baseline-float32.data").exists()


@pytest.mark.slow
def test_an_added_target_and_architecture(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    found = ENGINES["tensorrt-rtx"].availability()
    if not found.builds:
        pytest.skip(found.reason)
    one = changed(config, "buckets", [[1, 64]])
    added = changed(changed(one, "targets", ["ort-cpu", "tensorrt-rtx"]), "target/tensorrt-rtx/dtypes", ["float32"])
    first = changed(added, "target/tensorrt-rtx/architectures", ["sm89"])
    done, report = rebuild(built_copy, checkpoint, first)
    engines = {f"engine/tensorrt-rtx/{kind}-b1s64-float32" for kind in ("mod", "dense")}
    rewrites = {name for name in done if name.startswith("rewrite/tensorrt-rtx/")}
    found_out = ("structure", "parity/", "causality/", "latency/", "work/", "profile/")
    assert {name for name in done - rewrites if not name.startswith(found_out)} == {
        f"{engine}-sm89" for engine in engines
    }
    ran = {target.target: target.ran for target in report.targets}
    assert ran["tensorrt-rtx"] is found.runs
    done, _ = rebuild(built_copy, checkpoint, added)
    assert {name for name in done if name.startswith("engine/")} == {f"{engine}-sm120" for engine in engines}
    assert not any(name.startswith(("rewrite/", "capture/", "graph/")) for name in done)
    # Dropped again, its files go with it.
    rebuild(built_copy, checkpoint, one)
    assert not list(built_copy.rglob("*tensorrt*"))


@pytest.mark.slow
def test_another_version_of_the_runtime(built_copy: Path, tmp_path: Path, checkpoint: Path, config_file: Path) -> None:
    # The metadata of an installed package comes first on the path, as after an upgrade.
    for name in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"upgraded/{name}-99.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 99.0\n")
    before = steps_of(built_copy)
    arguments = ["build", str(checkpoint), "-c", str(config_file), "-o", str(built_copy), "-q"]
    subprocess.run(
        [sys.executable, "-m", "mod_export", *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "upgraded")},
        capture_output=True,
        check=True,
    )
    after = steps_of(built_copy)
    done = {name for name in after if after[name]["fingerprint"] != before[name]["fingerprint"]}
    engines = {name for name in before if name.startswith("engine/")}
    assert done == {"report", *engines, *PARITY, *CAUSALITY, *LATENCY, *PROFILE}
    assert json.loads((built_copy / "report.json").read_text())["environment"]["onnxruntime"] == "99.0"


def made(root: Path) -> dict[str, Any]:
    """What was made from what, by step."""
    steps = {name: record for name, record in steps_of(root).items() if name != "report"}
    return {name: [record["fingerprint"], record["outputs"]] for name, record in steps.items()}


def _missing(path: Path) -> None:
    path.unlink()


def _changed_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damages", [(_missing, _changed_byte), (_changed_byte, _missing)])
def test_damaged_files_are_made_again(
    damages: tuple[Callable[[Path], None], ...], built_copy: Path, checkpoint: Path, config: BuildConfig
) -> None:
    names = ("engines/ort-cpu/mod-b1s64-float32.onnx", "graphs/weights-float32.data")
    whole, before = [(built_copy / name).read_bytes() for name in names], made(built_copy)
    for damage, name in zip((*damages, damages[0]), (*names, "report.html"), strict=True):
        damage(built_copy / name)
    build(checkpoint, config, built_copy, None, Silent(), "mod-export build")
    assert made(built_copy) == before
    assert [(built_copy / name).read_bytes() for name in names] == whole
    check_files(built_copy)


def test_a_failing_stage_names_what_was_done(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    shutil.rmtree(built_copy / "engines")
    (built_copy / "engines").write_text("in the way")
    before = made(built_copy)
    with pytest.raises(BuildFolderError, match=r"moved: cannot write .*engines") as caught:
        build(checkpoint, config, built_copy, None, Silent(), "mod-export build")
    assert caught.value.__notes__ == ["stage engines failed; done before it: load, capture, onnx, passes"]
    assert (built_copy / "engines").read_text() == "in the way"
    assert not list(built_copy.rglob(".partial-*"))
    assert "files" not in read_manifest(built_copy)
    (built_copy / "engines").unlink()
    report = build(checkpoint, config, built_copy, None, Silent(), "mod-export build")
    stages = {stage.name: stage.status for stage in report.stages}
    assert stages["onnx"] == "reused"
    assert stages["engines"] == "built"
    assert made(built_copy) == before


def test_a_dropped_bucket_takes_its_files_along(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    done, _ = rebuild(built_copy, checkpoint, changed(config, "buckets", [[1, 64]]))
    assert done == {"structure"}
    assert not list(built_copy.rglob("*b2s32*"))
    check_files(built_copy)
    assert {row["bucket"] for row in json.loads((built_copy / "report.json").read_text())["cost"]} == {"b1s64"}
    assert list(mod_export.load(built_copy).buckets) == [Bucket(1, 64)]
