"""Decode and prefill engines of a folder, timed: what a build and a bench on another machine both do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.artifacts import Engine, ModelKind, Site
from mod_export.generation.opened import DecodingEngines
from mod_export.measure.decoding import DecodeRow, FirstTokenRow, StepBytes, decode_row, first_token_row, read_text

__all__ = ["first_token_of_pair", "steps_of_pair"]


def steps_of_pair(
    found: DecodingEngines,
    pair: Mapping[ModelKind, Engine],
    ids_BS: np.ndarray,
    sites: Mapping[ModelKind, Sequence[Site]],
    least: Mapping[ModelKind, StepBytes],
    bandwidth_gbs: float | None,
) -> DecodeRow:
    """Times the steps of a bucket at positions of the texts int64 (B, S), as much of them as a prompt bucket holds.

    `sites` are the places of routing of each model: a dense twin has experts at most.

    Raises:
        EngineError: an engine failed.
    """
    mod, config = pair["mod"], found.config
    with (
        found.prompts("mod", mod.target, mod.dtype) as ours,
        found.prompts("dense", mod.target, mod.dtype) as theirs,
        found.decoder(mod) as mod_decoder,
        found.decoder(pair["dense"]) as dense_decoder,
    ):
        ids_BS = ids_BS[:, : min(mod.bucket.seq, ours.longest, theirs.longest)]
        text = read_text(ids_BS, {"mod": ours, "dense": theirs}, sites)
        return decode_row(
            {"mod": mod_decoder, "dense": dense_decoder},
            text,
            config.generation.measured_tokens,
            target=mod.target,
            bucket=mod.bucket.name,
            dtype=mod.dtype,
            threads=config.latency.threads,
            seed=config.seed,
            least=least,
            bandwidth_gbs=bandwidth_gbs,
        )


def first_token_of_pair(found: DecodingEngines, pair: Mapping[ModelKind, Engine], ids_S: np.ndarray) -> FirstTokenRow:
    """Times a prompt int64 (S,) that fills its bucket.

    Raises:
        EngineError: an engine failed.
    """
    mod = pair["mod"]
    with found.prompts("mod", mod.target, mod.dtype) as ours, found.prompts("dense", mod.target, mod.dtype) as theirs:
        return first_token_row({"mod": ours, "dense": theirs}, ids_S, target=mod.target, dtype=mod.dtype)
