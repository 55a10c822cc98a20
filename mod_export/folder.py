"""What can be done again with a finished build folder, on this machine: parity and latency, without the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mod_export.artifacts import Engine, ModelKind
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.errors import TargetError
from mod_export.measure.cost import CostRow
from mod_export.measure.latency import LatencyRow, Setting
from mod_export.measure.pairs import engine_pairs, measure_pair
from mod_export.measure.statistics import SpeedupRow, speedup_rows
from mod_export.measure.verdict import Verdict, judge
from mod_export.model import model_from_weights
from mod_export.protocols import LoadedModel
from mod_export.runtime import engines_of, opened_folder
from mod_export.validate.parity import ParityRow, parity_of_engine
from mod_export.validate.reference import Reference

__all__ = ["bench_folder", "runnable_engines", "validate_folder"]


def runnable_engines(root: Path, manifest: dict[str, Any], targets: Sequence[str]) -> list[Engine]:
    """The folder's engines whose target runs here, all of them or those named.

    Raises:
        TargetError: nothing in it runs here, or a named target is not in it or cannot run.
    """
    engines = engines_of(manifest)
    names = list(dict.fromkeys(engine.target for engine in engines))
    missing = [name for name in targets if name not in names]
    if missing:
        raise TargetError(f"{root}: holds no engine for {', '.join(missing)}; built for {', '.join(names)}")
    found = {name: ENGINES[name].availability() for name in (targets or names)}
    refusals = {name: one.refusal(e for e in engines if e.target == name) for name, one in found.items()}
    refused = [f"{name}: {reason}" for name, reason in refusals.items() if reason]
    if refused and (targets or len(refused) == len(found)):
        raise TargetError(f"{root}: cannot run here: {'; '.join(refused)}")
    return [engine for engine in engines if engine.target in found and found[engine.target].can_run(engine)]


def validate_folder(root: Path, config: BuildConfig | None, targets: Sequence[str]) -> tuple[list[ParityRow], Verdict]:
    """Parity again. The reference is rebuilt from the folder's own spec and weights.

    Raises:
        BuildFolderError: not a whole build folder.
        TargetError: nothing to run.
    """
    manifest = opened_folder(root)
    config = config or BuildConfig.model_validate(manifest["config"])
    engines = runnable_engines(root, manifest, targets)
    loaded = {kind: _restored(root, manifest, kind) for kind in {engine.model for engine in engines}}
    references = {kind: Reference(model) for kind, model in loaded.items()}
    rows = [
        parity_of_engine(root, engine, loaded[engine.model], references[engine.model], config) for engine in engines
    ]
    verdict = judge(_settings(engines), _buckets(engines), parity=rows, speedup=None, min_speedup=0)
    return rows, verdict


def bench_folder(
    root: Path, config: BuildConfig | None, targets: Sequence[str]
) -> tuple[list[LatencyRow], Sequence[SpeedupRow], Verdict]:
    """Latency again, model and dense twin interleaved. Needs no PyTorch unless an `inductor` engine is run.

    Raises:
        BuildFolderError: not a whole build folder.
        TargetError: nothing to run.
    """
    manifest = opened_folder(root)
    config = config or BuildConfig.model_validate(manifest["config"])
    engines = runnable_engines(root, manifest, targets)
    vocab_size = manifest["models"]["mod"]["vocab_size"]
    latency = [
        row
        for setting, pair in engine_pairs(engines).items()
        for row in measure_pair(root, setting, pair, vocab_size, config)
    ]
    buckets = _buckets(engines)
    speedup = speedup_rows(
        latency,
        [CostRow(**row) for row in manifest["cost"]],
        buckets,
        min_speedup=config.latency.min_speedup,
        resamples=config.latency.bootstrap,
        seed=config.seed,
    )
    verdict = judge(_settings(engines), buckets, parity=None, speedup=speedup, min_speedup=config.latency.min_speedup)
    return latency, speedup, verdict


def _restored(root: Path, manifest: dict[str, Any], kind: ModelKind) -> LoadedModel:
    from safetensors.torch import load_file

    entry = manifest["models"][kind]
    tensors = load_file(root / entry["weights"])
    weights = {name: tensors[name] for name in entry["tensors"]}
    return model_from_weights(
        entry["name"], entry["architecture"], entry["spec"], weights, entry["checkpoint_sha256"]
    ).loaded


def _settings(engines: Sequence[Engine]) -> list[Setting]:
    return list(dict.fromkeys(Setting(target=e.target, bucket=e.bucket, dtype=e.dtype) for e in engines))


def _buckets(engines: Sequence[Engine]) -> list[Any]:
    return sorted({engine.bucket for engine in engines})
