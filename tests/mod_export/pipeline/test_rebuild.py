"""A build redoes exactly what depends on a change, and resumes after a failure."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from build_folders import STAGES, Silent, changed, check_files, steps_of, upgraded

import mod_export
from mod_export.config import BuildConfig, ParityGate, config_from_toml, toml_from_config
from mod_export.engines import ENGINES
from mod_export.errors import BuildFolderError
from mod_export.folder.manifest import read_manifest
from mod_export.folder.workspace import Step
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_export.types import Bucket
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("searching_few_rows")
STAGE_OF = {
    "load": "load", "capture": "capture", "weights": "onnx", "graph": "onnx", "formulation": "passes",
    "rewrite": "passes", "engine": "engines",
    "structure": "validate", "parity": "validate", "causality": "validate", "map": "validate", "latency": "benchmark",
    "work": "engines", "profile": "profile",
}  # fmt: skip


def rebuild(
    root: Path, checkpoint: Path, config: BuildConfig, baseline: Path | None = None
) -> tuple[set[str], BuildReport]:
    """Builds again; returns the steps that ran, and the report. Records of reused steps must not change."""
    before = steps_of(root)
    report = build(Request.checkpoint(checkpoint, baseline).models, config, root, Silent(), "mod-export build")
    after = steps_of(root)
    fingerprint = {name: record["fingerprint"] for name, record in before.items()}
    done = {name for name, record in after.items() if fingerprint.get(name) != record["fingerprint"]}
    assert {name: after[name] for name in after.keys() - done} == {name: before[name] for name in after.keys() - done}
    # The report describes this run, so it is always written.
    assert "report" in done
    done.remove("report")
    stages = {stage.name: stage.status for stage in report.stages}
    assert tuple(stages) == STAGES
    worked = {STAGE_OF[name.partition("/")[0]] for name in done}
    for stage in STAGE_OF.values():
        if any(STAGE_OF[name.partition("/")[0]] == stage for name in after if name != "report"):
            assert stages[stage] == ("built" if stage in worked else "reused")
    return done, report


BUCKETS = ("b1s64", "b2s32")


def of_engines(step: str, *buckets: str) -> set[str]:
    """Names of this step for the engines of both models."""
    return {f"{step}/{kind}-{bucket}-float32" for kind in ("mod", "dense") for bucket in buckets}


PARITY = of_engines("parity/ort-cpu", *BUCKETS) | of_engines("parity/portable", *BUCKETS)
CAUSALITY = of_engines("causality/ort-cpu", *BUCKETS)
MAP = {f"map/{bucket}" for bucket in BUCKETS}
LATENCY = {f"latency/ort-cpu/{bucket}-float32" for bucket in BUCKETS}
PROFILE = of_engines("profile/ort-cpu", *BUCKETS)


def of_bucket(bucket: str) -> set[str]:
    """Names of every step of one bucket on ort-cpu."""
    steps = {f"{step}/{kind}-{bucket}" for kind in ("mod", "dense") for step in ("capture", "graph")}
    for step in ("engine", "parity", "causality", "work", "profile", "rewrite"):
        steps |= of_engines(f"{step}/ort-cpu", bucket)
    steps |= of_engines("parity/portable", bucket)
    return {*steps, f"latency/ort-cpu/{bucket}-float32", f"map/{bucket}", "structure"}


OF_CAUSALITY = ("rounding_error", "max_abs")
"""Gates that the causality test has too."""
REDONE: dict[str, set[str]] = {
    "cost/profile_runs": PROFILE,
    "seed": PARITY | CAUSALITY | MAP | LATENCY | PROFILE,
    "latency/threads": PARITY | CAUSALITY | LATENCY | PROFILE,
    "latency/min_speedup": {"latency/ort-cpu/b1s64-float32"},
    **{
        f"latency/{name}": LATENCY
        for name in (
            "samples", "max_samples", "max_seconds", "warmup", "max_warmup", "warmup_tolerance", "resolution",
            "precision", "disturbance",
        )
    },
    "parity/batches_per_kind": PARITY | CAUSALITY,
    "parity/text_batches": PARITY | CAUSALITY,
    "parity/suffixes": CAUSALITY,
    **{f"parity/float32/{gate}": PARITY for gate in ParityGate.model_fields},
    **{f"parity/float32/{gate}": PARITY | CAUSALITY for gate in OF_CAUSALITY},
}  # fmt: skip
"""Field -> steps that a build of ort-cpu redoes for another value. All other fields redo nothing here: this model
cannot write text (for one that can, see pipeline/test_generation.py), and the attention of such short buckets is never
split.
"""
VALUES: dict[str, Any] = {
    "max_memory": 2**34, "target/inductor/dtypes": ["bfloat16"],
    "target/ort-cpu/query_block": 64, "generation/build": "never", "generation/slots": "fair",
}  # fmt: skip
"""Other values of fields for which `another` finds none."""
NOT_FLIPPED = {
    "buckets", "targets", "outputs", "target/ort-cpu/dtypes", "target/openvino/dtypes", "generation/targets",
}  # fmt: skip
"""The first three have their own tests, and the others can hold only one value."""


def another(value: Any) -> Any:
    """Another allowed value: shares stay below 1, and numbers of at least 1 above it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[:1] if len(value) > 1 else [32]
    if isinstance(value, int):
        return value + 1
    return 0.5 if value == 1 else (value + 1) / 2


def fields_of(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every field with another value."""
    for name, value in data.items():
        path = prefix + name
        if isinstance(value, dict):
            yield from fields_of(value, f"{path}/")
        elif path not in NOT_FLIPPED:
            yield path, VALUES[path] if path in VALUES else another(value)


def redone(
    root: Path, checkpoint: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], BuildReport]:
    """Returns the steps that a build would redo, and the report that it writes. The build reuses those steps
    nevertheless, to save time.
    """
    noted, before = set(), set(steps_of(root))
    is_of = Step.is_of

    def noting(step: Step, fingerprint: str, outputs: Sequence[str]) -> bool:
        same = is_of(step, fingerprint, outputs)
        if not same:
            noted.add(step.name)
        return same or step.name != "report"

    monkeypatch.setattr(Step, "is_of", noting)
    report = build(Request.checkpoint(checkpoint).models, config, root, Silent(), "mod-export build")
    return noted - {"report"} | before ^ set(steps_of(root)), report


@pytest.fixture
def others(config: BuildConfig) -> dict[str, Any]:
    """Every field of the configuration -> another value."""
    return dict(fields_of(tomllib.loads(toml_from_config(config))))


@pytest.mark.fast(
    "cost/profile_runs", "seed", "latency/threads", "latency/min_speedup", "latency/samples",
    "parity/batches_per_kind", "parity/suffixes", "parity/float32/near_tie", "parity/float32/rounding_error",
)  # fmt: skip
@pytest.mark.parametrize("field", REDONE)
def test_a_changed_field_redoes_what_depends_on_it_and_nothing_else(
    field: str, others: dict[str, Any], built_copy: Path, checkpoint: Path, config: BuildConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    changed_config = changed(config, {field: others[field]})
    done, report = redone(built_copy, checkpoint, changed_config, monkeypatch)
    assert done == REDONE[field]
    # "auto" means this for the model.
    assert changed(changed_config, {"outputs": "logits"}).model_dump(mode="json", by_alias=True) == report.config


def test_other_fields_redo_nothing(
    others: dict[str, Any], built_copy: Path, checkpoint: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other fields change at once."""
    changed_config = changed(config, {field: value for field, value in others.items() if field not in REDONE})
    assert redone(built_copy, checkpoint, changed_config, monkeypatch)[0] == set()


def test_another_version_of_the_runtime(
    built_copy: Path, tmp_path: Path, checkpoint: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with upgraded(tmp_path / "upgraded", monkeypatch, "onnxruntime", "onnxruntime_gpu"):
        done, report = redone(built_copy, checkpoint, config, monkeypatch)
    assert done == {*of_engines("engine/ort-cpu", *BUCKETS), *PARITY, *CAUSALITY, *LATENCY, *PROFILE}
    assert report.environment["onnxruntime"] == "99.0"


# From here on, builds really redo what changed.


@pytest.fixture
def small_checkpoint(small_folder: Path) -> Path:
    return small_folder / "small.pt"


@pytest.fixture
def small_config(small_folder: Path) -> BuildConfig:
    return config_from_toml(small_folder / "small.toml")


@pytest.mark.slow
def test_another_seed(small_copy: Path, small_checkpoint: Path, small_config: BuildConfig) -> None:
    done, report = rebuild(small_copy, small_checkpoint, changed(small_config, {"seed": 1}))
    steps = of_engines("parity/portable", "b1s16")
    for step in ("parity", "causality", "profile"):
        steps |= of_engines(f"{step}/ort-cpu", "b1s16")
    assert done == {*steps, "latency/ort-cpu/b1s16-float32", "map/b1s16"}
    assert report.verdict.status == "pass"


@pytest.mark.slow
def test_other_outputs(small_copy: Path, small_checkpoint: Path, small_config: BuildConfig) -> None:
    done, _ = rebuild(small_copy, small_checkpoint, changed(small_config, {"outputs": "last"}))
    assert done == of_bucket("b1s16") - {"map/b1s16"}


def test_the_same_checkpoint_under_another_name(
    small_copy: Path, tmp_path: Path, small_checkpoint: Path, small_config: BuildConfig
) -> None:
    files = {path: path.stat().st_mtime_ns for path in small_copy.rglob("*") if path.suffix in (".onnx", ".data")}
    shutil.copy(small_checkpoint, tmp_path / "renamed.pt")
    done, report = rebuild(small_copy, tmp_path / "renamed.pt", small_config)
    assert done == set()
    assert report.model.name == "renamed"
    written = json.loads((small_copy / "report.json").read_text())
    assert {stage["name"]: stage["status"] for stage in written["stages"]} == dict.fromkeys(STAGES, "reused")
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert report.verdict.status == "pass"


@pytest.mark.slow
def test_an_added_bucket_and_a_dropped_one(small_copy: Path, small_checkpoint: Path, small_config: BuildConfig) -> None:
    done, report = rebuild(small_copy, small_checkpoint, changed(small_config, {"buckets": [[1, 16], [1, 8]]}))
    assert done == of_bucket("b1s8")
    assert {row.bucket for row in report.speedup} == {"b1s8", "b1s16"}
    done, _ = rebuild(small_copy, small_checkpoint, changed(small_config, {"buckets": [[1, 8]]}))
    assert done - LATENCY == {"structure"}


@pytest.mark.slow
def test_another_checkpoint_redoes_everything(
    small_copy: Path, tmp_path: Path, small_checkpoint: Path, small_config: BuildConfig
) -> None:
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(load_checkpoint(small_checkpoint).spec, 7))
    done, _ = rebuild(small_copy, tmp_path / "other.pt", small_config)
    # A graph without its weights does not change, nor does the work that is counted in it.
    assert done == {"load", "weights/weights-float32", *of_bucket("b1s16")} - of_engines("work/ort-cpu", "b1s16")


@pytest.mark.slow
def test_a_baseline_redoes_the_dense_half(
    small_copy: Path, tmp_path: Path, small_checkpoint: Path, small_config: BuildConfig
) -> None:
    spec = load_checkpoint(small_checkpoint).spec
    save_checkpoint(tmp_path / "base.pt", random_checkpoint(spec.dense(), 7))
    done, _ = rebuild(small_copy, small_checkpoint, small_config, tmp_path / "base.pt")
    dense = {name for name in of_bucket("b1s16") if "mod-" not in name and not name.startswith("map/")}
    assert done == {"load", "weights/weights-baseline-float32", *dense}
    assert (small_copy / "graphs/weights-baseline-float32.data").is_file()
    done, _ = rebuild(small_copy, small_checkpoint, small_config)
    assert done == {"load", *dense}
    assert not (small_copy / "graphs/weights-baseline-float32.data").exists()


@pytest.mark.slow
def test_an_added_target_and_architecture(small_copy: Path, small_checkpoint: Path, small_config: BuildConfig) -> None:
    found = ENGINES["tensorrt-rtx"].availability()
    if not found.builds:
        pytest.skip(found.reason)
    targets = ["ort-cpu", "tensorrt-rtx"]
    added = changed(small_config, {"targets": targets, "target/tensorrt-rtx/dtypes": ["float32"]})
    first = changed(added, {"target/tensorrt-rtx/architectures": ["sm89"]})
    done, report = rebuild(small_copy, small_checkpoint, first)
    engines = of_engines("engine/tensorrt-rtx", "b1s16")
    rewrites = {name for name in done if name.startswith("rewrite/tensorrt-rtx/")}
    found_out = ("structure", "parity/", "causality/", "latency/", "work/", "profile/")
    assert {name for name in done - rewrites if not name.startswith(found_out)} == {
        f"{engine}-sm89" for engine in engines
    }
    ran_by_target = {target.target: target.ran for target in report.targets}
    assert ran_by_target["tensorrt-rtx"] is found.runs
    done, _ = rebuild(small_copy, small_checkpoint, added)
    assert {name for name in done if name.startswith("engine/")} == {f"{engine}-sm120" for engine in engines}
    assert not any(name.startswith(("rewrite/", "capture/", "graph/")) for name in done)
    # If the target is dropped again, its files are deleted.
    rebuild(small_copy, small_checkpoint, small_config)
    assert not list(small_copy.rglob("*tensorrt*"))


def made(root: Path) -> dict[str, Any]:
    """Fingerprint and outputs of each step."""
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
    damages: tuple[Callable[[Path], None], ...], small_copy: Path, small_checkpoint: Path, small_config: BuildConfig
) -> None:
    names = ("engines/ort-cpu/mod-b1s16-float32.onnx", "graphs/weights-float32.data")
    contents, before = [(small_copy / name).read_bytes() for name in names], made(small_copy)
    for damage, name in zip((*damages, damages[0]), (*names, "report.html"), strict=True):
        damage(small_copy / name)
    build(Request.checkpoint(small_checkpoint).models, small_config, small_copy, Silent(), "mod-export build")
    assert made(small_copy) == before
    assert [(small_copy / name).read_bytes() for name in names] == contents
    check_files(small_copy)


def test_a_failing_stage_names_what_was_done(
    small_copy: Path, small_checkpoint: Path, small_config: BuildConfig
) -> None:
    shutil.rmtree(small_copy / "engines")
    (small_copy / "engines").write_text("in the way")
    before = made(small_copy)
    with pytest.raises(BuildFolderError, match=r"moved: cannot write .*engines") as caught:
        build(Request.checkpoint(small_checkpoint).models, small_config, small_copy, Silent(), "mod-export build")
    assert caught.value.__notes__ == ["stage engines failed; done before it: load, capture, onnx, passes"]
    assert (small_copy / "engines").read_text() == "in the way"
    assert not list(small_copy.rglob(".partial-*"))
    assert "files" not in read_manifest(small_copy)
    (small_copy / "engines").unlink()
    report = build(Request.checkpoint(small_checkpoint).models, small_config, small_copy, Silent(), "mod-export build")
    stages = {stage.name: stage.status for stage in report.stages}
    assert stages["onnx"] == "reused"
    assert stages["engines"] == "built"
    assert made(small_copy) == before


def test_a_dropped_bucket_takes_its_files_along(built_copy: Path, checkpoint: Path, config: BuildConfig) -> None:
    done, _ = rebuild(built_copy, checkpoint, changed(config, {"buckets": [[1, 64]]}))
    assert done == {"structure"}
    assert not list(built_copy.rglob("*b2s32*"))
    check_files(built_copy)
    assert {row["bucket"] for row in json.loads((built_copy / "report.json").read_text())["cost"]} == {"b1s64"}
    assert list(mod_export.load(built_copy).buckets) == [Bucket(1, 64)]


def test_a_folder_of_hard_links_is_built_further(small: Path, small_folder: Path, tmp_path: Path) -> None:
    """Backups and images share files between copies of a folder. The checker of ONNX refuses such weights."""
    root, weights = tmp_path / "linked", "graphs/weights-float32.data"
    shutil.copytree(small, root, copy_function=os.link)
    assert (root / weights).samefile(small / weights)
    config = config_from_toml(small_folder / "small.toml")
    more = config.model_copy(update={"buckets": (*config.buckets, (1, 24))})
    models = Request.checkpoint(small_folder / "small.pt").models
    report = build(models, more, root, Silent(), "mod-export build", evidence=False)
    assert not report.failed
    assert any("b1s24" in artifact.path for artifact in report.artifacts)
    assert (root / weights).stat().st_nlink == 1
    assert (root / weights).read_bytes() == (small / weights).read_bytes()
