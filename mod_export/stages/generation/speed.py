"""How fast steps and prompts are, model against dense twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Bucket, Engine, ModelKind
from mod_export.measure.decoding import PROMPT_RUNS, DecodeRow, FirstTokenRow, StepBytes
from mod_export.measure.decoding_folder import first_token_of_pair, steps_of_pair
from mod_export.measure.roofline import cached_roofline
from mod_export.plan import KINDS, GenerationPlan
from mod_export.protocols import GeneratingModel
from mod_export.stages.context import Context
from mod_export.stages.generation.evidence import decoding_engines
from mod_export.validate.written import prompts_of
from mod_export.workspace import Step

__all__ = ["measure_decoding", "step_bytes"]


def measure_decoding(context: Context, plan: GenerationPlan) -> list[Step]:
    """Steps of every decode bucket, and prompts of every prefill bucket, of all that runs here."""
    steps = []
    found = decoding_engines(context)
    for pair in found.pairs("decode"):
        mod = pair["mod"]
        name = f"decode/{mod.target}/{mod.bucket.name}-{mod.dtype}"
        inputs = {**_inputs(context, pair), "positions": context.plan.config.generation.measured_tokens}
        step = context.step(name, inputs, [], partial(_decode, context, plan, pair))
        context.generation.decode.append(DecodeRow(**step.result | {"ci95": tuple(step.result["ci95"])}))
        steps.append(step)
    for pair in found.pairs("prefill"):
        mod = pair["mod"]
        name = f"first_token/{mod.target}/{mod.bucket.name}-{mod.dtype}"
        inputs = {**_inputs(context, pair), "runs": PROMPT_RUNS}
        step = context.step(name, inputs, [], partial(_first_token, context, plan, pair))
        context.generation.first_token.append(FirstTokenRow(**step.result | {"ci95": tuple(step.result["ci95"])}))
        steps.append(step)
    return steps


def _inputs(context: Context, pair: Mapping[ModelKind, Engine]) -> dict[str, Any]:
    return {**context.conditions(list(pair.values())), "seed": context.plan.config.seed}


def _decode(
    context: Context, plan: GenerationPlan, pair: Mapping[ModelKind, Engine], paths: Sequence[Path]
) -> dict[str, Any]:
    mod, config = pair["mod"], context.plan.config
    roofline = cached_roofline(context.machine, mod.dtype, config.latency.threads)
    model = plan.models["mod"]
    row = steps_of_pair(
        decoding_engines(context),
        pair,
        prompts_of(model.loaded, mod.bucket.batch, mod.bucket.seq, config.seed),
        {kind: plan.models[kind].sites for kind in KINDS},
        {kind: step_bytes(plan.models[kind], mod.bucket) for kind in KINDS},
        None if roofline is None else roofline.bandwidth_gbs,
    )
    return asdict(row)


def step_bytes(model: GeneratingModel, bucket: Bucket) -> StepBytes:
    """What a step of a decode bucket has to read: a sum over the places of routing, so each is asked for alone."""
    nowhere = dict.fromkeys(model.sites, 0.0)
    always = model.least_bytes(bucket.batch, bucket.seq, nowhere)
    sites = {
        str(site): model.least_bytes(bucket.batch, bucket.seq, nowhere | {site: 1.0}) - always for site in model.sites
    }
    # Experts add nothing: they are read in every step, as many of them as its rows can take.
    return StepBytes(always, {site: size for site, size in sites.items() if size})


def _first_token(
    context: Context, plan: GenerationPlan, pair: Mapping[ModelKind, Engine], paths: Sequence[Path]
) -> dict[str, Any]:
    ids_1S = prompts_of(plan.models["mod"].loaded, 1, pair["mod"].bucket.seq, context.plan.config.seed)
    return asdict(first_token_of_pair(decoding_engines(context), pair, ids_1S[0]))
