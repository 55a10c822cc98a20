"""Latency of a finished build folder again, on this machine, without the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mod_export.artifacts import Bucket, Engine, ModelKind, Site, is_expert, site_from_text
from mod_export.config import BuildConfig
from mod_export.environment import describe_machine
from mod_export.generation.opened import DecodingEngines, writing_here
from mod_export.measure.cost import CostRow
from mod_export.measure.decoding import DecodeRow, StepBytes
from mod_export.measure.decoding_folder import steps_of_pair
from mod_export.measure.latency import LatencyRow, Setting
from mod_export.measure.pairs import engine_pairs, measure_pair
from mod_export.measure.parts import roofline_ms
from mod_export.measure.profiles import flops_by_engine, profile_engines, work_from_json
from mod_export.measure.roofline import cached_roofline
from mod_export.measure.statistics import Known, SpeedupRow, gate_of, speedup_rows
from mod_export.measure.verdict import Verdict, judge
from mod_export.runtime import engines_of, opened_folder, runnable_engines

__all__ = ["bench_decoding", "bench_folder"]


def bench_decoding(root: Path, config: BuildConfig | None, targets: Sequence[str]) -> list[DecodeRow]:
    """Steps of every decode bucket again, on random ids: without the checkpoint there is no text.

    Raises:
        BuildFolderError: not a whole build folder.
        EngineError: an engine failed.
    """
    manifest = opened_folder(root, verify=False)
    about = manifest.get("generation") or {}
    if "engines" not in about:
        return []
    config = config or BuildConfig.model_validate(manifest["config"])
    engines = [engine for engine in engines_of(about) if not targets or engine.target in targets]
    able = writing_here(engines)
    places = [site_from_text(site) for site in about["sites"]]
    sites: dict[ModelKind, list[Site]] = {"mod": places, "dense": [site for site in places if is_expert(site)]}
    rows = []
    decoding = DecodingEngines(root, able, config)
    for pair in decoding.pairs("decode"):
        bucket = pair["mod"].bucket
        least: dict[ModelKind, StepBytes] = {
            "mod": StepBytes(**about["step_bytes"][bucket.name]["mod"]),
            "dense": StepBytes(**about["step_bytes"][bucket.name]["dense"]),
        }
        roofline = cached_roofline(describe_machine(), pair["mod"].dtype, config.latency.threads)
        bandwidth = None if roofline is None else roofline.bandwidth_gbs
        vocab_size = manifest["models"]["mod"]["vocab_size"]
        shape = (bucket.batch, bucket.seq)
        ids_BS = np.random.default_rng(config.seed).integers(0, vocab_size, shape, dtype=np.int64)
        rows.append(steps_of_pair(decoding, pair, ids_BS, sites, least, bandwidth))
    return rows


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
    buckets = _buckets(engines)
    vocab_size = manifest["models"]["mod"]["vocab_size"]
    latency = [
        row
        for setting, pair in engine_pairs(engines).items()
        for row in measure_pair(
            root, setting, pair, vocab_size, config, gate_of(setting.bucket.name, buckets, config.latency.min_speedup)
        )
    ]
    _, parts = profile_engines(root, engines, manifest, describe_machine(), config)
    work = {path: work_from_json(items) for path, items in manifest.get("work", {}).items()}
    known = Known(
        k_by_layer=_k_by_layer(manifest),
        flops=flops_by_engine(engines, work),
        roofline_ms=roofline_ms(parts),
        parts=parts,
    )
    speedup = speedup_rows(
        latency,
        [CostRow(**row) for row in manifest["cost"]],
        buckets,
        config.latency,
        seed=config.seed,
        known=known,
    )
    verdict = judge(_settings(engines), buckets, parity=None, speedup=speedup, min_speedup=config.latency.min_speedup)
    return latency, speedup, verdict


def _k_by_layer(manifest: dict[str, Any]) -> dict[str, dict[Site, int]]:
    """Tokens that each routed layer takes, by the name of the bucket. JSON has no numbers for keys."""
    return {
        Bucket(**graph["bucket"]).name: {site_from_text(site): k for site, k in graph["k_by_layer"].items()}
        for graph in manifest["graphs"]
        if graph["model"] == "mod"
    }


def _settings(engines: Sequence[Engine]) -> list[Setting]:
    return list(dict.fromkeys(Setting(target=e.target, bucket=e.bucket, dtype=e.dtype) for e in engines))


def _buckets(engines: Sequence[Engine]) -> list[Any]:
    return sorted({engine.bucket for engine in engines})
