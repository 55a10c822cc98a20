"""Dialects that add routers to the layers of a transformers model; the dense model is a family of `families.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mod_models.convert.dialect import Find, Found, Source, model_from, slots_note, with_routing
from mod_models.convert.families import DERIVED
from mod_models.convert.foreign import ForeignModel, refuse
from mod_models.convert.hugging_face import CONFIG, model_of
from mod_models.spec import shown

LAYERS = "model.layers."
ASTRAMIND_ROUTER, ASTRAMIND_BLOCK = ".router.weight_predictor", ".block."
ASTRAMIND_CAPACITY = 0.125
DLO_ROUTERS = "model.routers."
DLO_FIELDS: Mapping[str, Any] = {
    "is_dlo": None, "dlo_capacity": 0.5, "rescale_hidden_states": True, "scale_factor": 2.0, "scale_gap": 0.05,
    "dlo_loss_coefficient": 1.0, "dlo_loss_type": "self", "gate_init_method": "zero",
}  # fmt: skip
"""Field of LLaMA-DLO's config.json -> its default in the code of LLaMA-DLO."""


def read_astramind(source: Source) -> ForeignModel:
    """Reads astramind-ai/Mixture-of-depths, and LLaMA-Factory, which uses it (`mixture_of_depths`).

    In `MoD/MoD.py`, a layer is wrapped as `block` beside `router.weight_predictor`, a Linear(D, 1) with a bias. Tokens
    whose weight w is above the k-th largest, k = max(1, int(c * S)), run at their original positions, and w * Block(x)
    replaces them. With k = 1 the token with the largest weight runs.
    """
    routed = source.numbers(LAYERS, f"{ASTRAMIND_ROUTER}.weight")

    def spelled(name: str) -> str:
        for layer in routed:
            if name.startswith(f"{LAYERS}{layer}."):
                return name.replace(f"{LAYERS}{layer}.", f"{LAYERS}{layer}{ASTRAMIND_BLOCK}", 1)
        return name

    fields = dict(source.fields(CONFIG))
    if isinstance(fields.get("architectures"), list):
        fields["architectures"] = [str(name).replace("MoDFor", "For") for name in fields["architectures"]]
    said = [] if source.capacity is not None else [
        f"capacity {ASTRAMIND_CAPACITY} is what its loader sets; what a model was trained at is not saved (--capacity)"
    ]  # fmt: skip
    routing = {
        "layers": routed,
        "router": "linear_bias",
        "gate": "identity",
        "combine": "replace",
        "capacity_rule": "strict_floor",
        "capacity": ASTRAMIND_CAPACITY if source.capacity is None else source.capacity,
    }
    return _routed(source, fields, routing, lambda layer: f"{LAYERS}{layer}{ASTRAMIND_ROUTER}", said, spelled)


def read_dlo(source: Source) -> ForeignModel:
    """Reads DaizeDong/LLaMA-DLO.

    In `models/llama_dlo/modeling_llama_dlo.py`, a router is `model.routers.N`, a Linear(D, 1) without a bias on the raw
    stream. At inference, tokens with sigmoid(l) > 0.5 run, without a limit, at their original positions, and only see
    each other. Attention has no gate; that of the MLP is 0.5 * scale_factor + (sigmoid(l) - 0.5) * scale_gap.
    """
    fields = dict(source.fields(CONFIG))
    options = {name: fields.pop(name, default) for name, default in DLO_FIELDS.items()}
    problems = []
    for name in ("scale_factor", "scale_gap"):
        if type(options[name]) not in (int, float) or not math.isfinite(options[name]):
            problems.append(f"{name}: expected a number, got {shown(options[name])}")
    if type(options["rescale_hidden_states"]) is not bool:
        problems.append(f"rescale_hidden_states: expected true or false, got {shown(options['rescale_hidden_states'])}")
    for name, (theirs, ours) in {
        "model_type": ("llama_dlo", "llama"), "architectures": (["LlamaDLOForCausalLM"], ["LlamaForCausalLM"]),
    }.items():  # fmt: skip
        if fields.get(name) != theirs:
            problems.append(f"{name}: expected {shown(theirs)}, got {shown(fields.get(name))}")
        fields[name] = ours
    routed = _declared_layers(source, options["is_dlo"], problems)
    refuse(source.path / CONFIG, problems)
    capacity = source.unlimited_capacity(
        f"{CONFIG} says that dlo_capacity was {shown(options['dlo_capacity'])} in training"
    )
    scales = options["rescale_hidden_states"]
    routing = {
        "layers": routed,
        "router": "linear",
        "gate": "sigmoid_affine" if scales else "ones",
        "gate_scale": options["scale_gap"] if scales else 1.0,
        "gate_shift": 0.5 * (options["scale_factor"] - options["scale_gap"]) if scales else 0.0,
        "combine": "ffn_gated",
        "selection": "threshold",
        "capacity": capacity,
    }
    return _routed(source, fields, routing, lambda layer: f"{DLO_ROUTERS}{layer}", [slots_note(capacity)])


def _declared_layers(source: Source, listed: object, problems: list[str]) -> tuple[int, ...]:
    """The layers for which `is_dlo`, a list of true and false, is true; exactly these must have routers."""
    if not isinstance(listed, list) or any(type(flag) is not bool for flag in listed):
        problems.append(f"is_dlo: expected a list of true and false, got {shown(listed)}")
        return ()
    routed = tuple(layer for layer, flag in enumerate(listed) if flag)
    for layer in sorted({*routed} ^ {*source.numbers(DLO_ROUTERS, ".weight")}):
        name = f"{DLO_ROUTERS}{layer}.weight"
        problems.append(f"{name} is missing, and is_dlo is true there" if layer in routed else
                        f"{name} stands in a layer where is_dlo is not true")  # fmt: skip
    return routed


def _routed(
    source: Source,
    fields: Mapping[str, Any],
    routing: Mapping[str, Any],
    router: Callable[[int], str],
    said: list[str],
    spelled: Callable[[str], str] = str,
) -> ForeignModel:
    """Builds a dense model with a router in each routed layer; `router` maps a layer to the name of its router."""
    routers = {f"{router(layer)}.{ending}" for layer in routing["layers"] for ending in ("weight", "bias")}
    wrapped = {name: name.replace(ASTRAMIND_BLOCK, ".", 1) for name in source.tensors}
    dense = {
        name: tensor
        for name, tensor in source.tensors.items()
        if name not in routers and not DERIVED.fullmatch(wrapped[name])
    }
    model = model_of(source.path, fields, dense, source.max_positions, source.ignored, spelled)
    find: Find = lambda name, shape: Found(f"{router(int(name.split('.')[1]))}.{name.rpartition('.')[2]}", shape)  # noqa: E731
    spec = with_routing(source, model.spec, **routing)
    return model_from(source, spec, find, family=model.family, declared_by=CONFIG, said=said, dense=model.parts)
