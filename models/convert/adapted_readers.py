"""Readers of models that were adapted from dense transformers models, and whose skipped tokens keep keys and values.

flexidepth, skipgpt and mindskip add routers to the layers of a family of `hugging_face.py`; p-mod routes only the
tokens of images. Facts are from the code that each function names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch

from mod_models.checkpoint import CheckpointError
from mod_models.convert.foreign import Derived, ForeignModel, Place, constant, difference, product, refuse
from mod_models.convert.hugging_face import CONFIG, DERIVED, FAMILIES, KNOWN, model_of
from mod_models.convert.implementation_source import (
    MODEL_LAYERS,
    Source,
    as_family,
    declared_layers,
    notes_of,
    slots_note,
    with_routers,
    wrapped,
)
from mod_models.spec import shown

FLEXIDEPTH_FIELDS = ("router_", "proj_")
"""Prefixes of FlexiDepth's own fields, which are not read: the tensors show the widths that they declare."""
FLEXIDEPTH_ROUTER: Mapping[str, str] = {"hidden.weight": "router_enc.weight", "norm.weight": "router_norm.weight"}
FLEXIDEPTH_ADAPTER: Mapping[str, str] = {"gate_proj": "gate_proj", "up_proj": "down_proj", "down_proj": "up_proj"}
"""Our projection of the adapter -> FlexiDepth's. Its `down_proj` leads to the small width, its `up_proj` back."""
FLEXIDEPTH_OWN = (
    *(f"router.router_{layer}.weight" for layer in ("enc", "norm", "dec", "head")),
    *(f"router_proj.{layer}.weight" for layer in FLEXIDEPTH_ADAPTER.values()),
)

SKIPGPT_ROUTERS: Mapping[str, str] = {"router": "router_attention", "mlp_router": "router_mlp"}
SKIPGPT_LAYERS: Mapping[str, str] = {"hidden": "hidden_layer", "projection": "weight_predictor"}

MINDSKIP_FIELDS = (
    "gradient_scale", "granularity", "is_mod", "mod_capacity", "router_layers", "threshold", "train_threshold",
)  # fmt: skip
MINDSKIP_ROUTER = f"{MODEL_LAYERS}{{}}.router.weight"
MINDSKIP_KIND, MINDSKIP_CLASS = re.compile("_(mindskip|mod)$"), re.compile("MindSkip|MoD")
"""What its older classes add to the `model_type` and to the architecture of a family."""
MINDSKIP_PARTS: Mapping[str, Mapping[str, str]] = {
    "attn": {"parts": "attention", "skipped_keys_values": "kept"},
    "block": {"parts": "block", "skipped_keys_values": "kept"},
    "mlp": {"parts": "mlp", "router_stream": "block"},
}

P_MOD_KIND, P_MOD_CLASS = "pmod_llava_llama", "PmodLlavaLlamaForCausalLM"
P_MOD_WRAPPER = "decoder_layer."
P_MOD_IMAGES = ("model.vision_tower.", "model.mm_projector.", "model.image_newline")
P_MOD_FIELDS = (
    "freeze_mm_mlp_adapter", "image_", "max_num_patches", "mm_", "mod_", "tokenizer_model_max_length",
    "tokenizer_padding_side", "tune_mm_mlp_adapter", "unfreeze_mm_vision_tower", "use_mm_proj",
)  # fmt: skip
"""Prefixes of fields about images, about the routing of their tokens, and about training, which are not read."""


def read_flexidepth(source: Source) -> ForeignModel:
    """Reads FlexiDepth (arXiv 2503.23798), `modeling_ddllama.py` of xuan-luo/FlexiDepth-Llama-3-8B-Instruct.

    The router computes l = head(dec(tanh(rmsnorm(enc(h))))), without biases, from the normed stream h. With
    w = sigmoid(l), tokens with w > 0.5 run and become x + A + w M. Others become x + (1 - w) adapter(norm(x)), with the
    norm of the MLP. Attention sees the keys and values of all tokens. Dec and head become one layer here, because no
    activation stands between them.
    """
    layers = source.numbers(MODEL_LAYERS, ".router.router_enc.weight")
    fields = {name: value for name, value in source.fields(CONFIG).items() if not name.startswith(FLEXIDEPTH_FIELDS)}
    problems: list[str] = []
    declared = fields.pop("routing_layers", None)
    if declared is not None and declared != [*layers]:
        problems.append(f"routing_layers: {shown(declared)}, and layers {shown([*layers])} have routers")
    normed = any(name.endswith(".self_attn.q_norm.weight") for name in source.tensors)
    fields |= as_family(fields, "qwen3" if normed else "llama", problems)
    refuse(source.path / CONFIG, problems)
    capacity = source.unlimited_capacity()
    first = f"{MODEL_LAYERS}{layers[0]}.router"
    hidden = max(1, source.shape(f"{first}.router_enc.weight")[0])
    routing = {
        "layers": layers,
        "router": "norm_mlp",
        "router_input": "normed",
        "router_hidden": hidden,
        "router_activation": "tanh",
        "selection": "threshold",
        "gate": "sigmoid",
        "combine": "ffn_gated",
        "skipped_keys_values": "kept",
        "skipped_result": "adapter",
        "adapter": "gated",
        "adapter_hidden": max(1, source.shape(f"{first}_proj.gate_proj.weight")[0]),
        "adapter_gate": "rest",
        "capacity": capacity,
    }
    own = {f"{MODEL_LAYERS}{layer}.{name}" for layer in layers for name in FLEXIDEPTH_OWN}
    _check_dec(source, layers, hidden)

    def find(name: str, shape: tuple[int, ...]) -> Place | Derived:
        layer, part, inner = name.removeprefix("layers.").split(".", 2)
        before = f"{MODEL_LAYERS}{layer}.router"
        if part == "adapter":
            projection = FLEXIDEPTH_ADAPTER[inner.removesuffix(".weight")]
            return Place(f"{before}_proj.{projection}.weight", shape)
        if inner.endswith("bias"):
            return constant(shape, 0.0)
        if inner in FLEXIDEPTH_ROUTER:
            return Place(f"{before}.{FLEXIDEPTH_ROUTER[inner]}", shape)
        dec = source.tensors[f"{before}.router_dec.weight"]
        return Place(f"{before}.router_head.weight", (1, dec.shape[0]), made=partial(product, factor=dec))

    notes = [
        slots_note(capacity),
        "both results are weighted, w * M and (1 - w) * adapter, as in the released models; training code that weighs "
        "neither stores the same tensors",
    ]
    return with_routers(source, fields, routing, find, own, notes)


def _check_dec(source: Source, layers: Collection[int], hidden: int) -> None:
    """Refuses second layers of FlexiDepth's routers that cannot be multiplied with the third."""
    problems = []
    for layer in layers:
        name = f"{MODEL_LAYERS}{layer}.router.router_dec.weight"
        expected = [source.shape(f"{MODEL_LAYERS}{layer}.router.router_enc.weight")[-1], hidden]
        tensor = source.tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is missing, expected {expected}")
        elif [*tensor.shape] != expected:
            problems.append(f"{name} has shape {[*tensor.shape]}, expected {expected}")
        elif not isinstance(tensor.stored, torch.dtype):
            problems.append(f"{name} holds {tensor.stored}, expected {KNOWN}")
    refuse(source.path, problems)


def read_skipgpt(source: Source) -> ForeignModel:
    """Reads EIT-NLP/SkipGPT, `router_attn_mlp.py`: a Llama model whose state_dict `torch_save.py` wrote.

    Each layer is wrapped as `block` beside two routers, Linear - ReLU - Linear(2): one of attention, one of the MLP.
    Both read the stream that the layer gets. A token of class 0 runs the part and becomes x + A or x + M. Attention
    sees all tokens.
    """
    layers = source.numbers(MODEL_LAYERS, ".router_attention.hidden_layer.weight")
    capacity = source.unlimited_capacity()
    routing = {
        "layers": layers,
        "parts": "separate",
        "router": "mlp",
        "router_hidden": max(1, source.shape(f"{MODEL_LAYERS}{layers[0]}.router_attention.hidden_layer.weight")[0]),
        "router_activation": "relu",
        "router_stream": "block",
        "selection": "threshold",
        "gate": "ones",
        "combine": "replace_ungated",
        "skipped_keys_values": "kept",
        "capacity": capacity,
    }
    own = {
        f"{MODEL_LAYERS}{layer}.{router}.{part}.{ending}"
        for layer in layers
        for router in SKIPGPT_ROUTERS.values()
        for part in SKIPGPT_LAYERS.values()
        for ending in ("weight", "bias")
    }

    def find(name: str, shape: tuple[int, ...]) -> Place:
        _, layer, router, part, ending = name.split(".")
        theirs = f"{MODEL_LAYERS}{layer}.{SKIPGPT_ROUTERS[router]}.{SKIPGPT_LAYERS[part]}.{ending}"
        if part == "projection":
            return Place(theirs, (2, *shape[1:]), made=partial(difference, row=0))
        return Place(theirs, shape)

    notes = [
        slots_note(capacity),
        "the more probable class decides; its code draws Gumbel noise at inference too, so that one text has no one "
        "result there",
    ]
    return with_routers(
        source, source.fields(CONFIG), routing, find, own, notes, partial(wrapped, layers=layers, wrapper="block.")
    )


def read_mindskip(source: Source) -> ForeignModel:
    """Reads CASE-Lab-UMD/Router-Tuning-Mixture-of-Depths (arXiv 2410.13184), `utils/model/model_patch.py`.

    Where `is_mod` is true, a Linear(D, 1) without a bias reads the normed stream that the layer gets, and tokens
    with sigmoid(l) >= `threshold` run what `granularity` names. Attention sees the keys and values of all tokens.
    """
    config = source.fields(CONFIG)
    fields = {name: value for name, value in config.items() if name not in MINDSKIP_FIELDS}
    problems: list[str] = []
    layers = declared_layers(source, "is_mod", config.get("is_mod"), MINDSKIP_ROUTER, problems)
    granularity = str(config.get("granularity") or "attn_sequence").lower().replace("-", "_")
    if "token" not in granularity:
        problems.append(
            f"granularity: {shown(granularity)} makes one decision for a whole text, from the mean of its tokens, and "
            "a graph cannot leave out what a text may need; a checkpoint of a *_token granularity can be converted"
        )
    threshold = config.get("threshold", 0.5)
    if type(threshold) not in (int, float) or not 0 < threshold < 1:
        problems.append(f"threshold: expected a number between 0 and 1, got {shown(threshold)}")
    refuse(source.path / CONFIG, problems)
    # Older versions have classes of their own, such as LlamaMindSkipForCausalLM.
    if isinstance(fields.get("model_type"), str):
        fields["model_type"] = MINDSKIP_KIND.sub("", fields["model_type"])
    if isinstance(fields.get("architectures"), list):
        fields["architectures"] = [MINDSKIP_CLASS.sub("", str(name)) for name in fields["architectures"]]
    capacity = source.unlimited_capacity()
    part = next((part for part in ("block", "mlp") if part in granularity), "attn")
    routing = {
        "layers": layers,
        "router": "linear" if threshold == 0.5 else "linear_bias",
        "router_input": "normed",
        "selection": "threshold",
        "gate": "ones",
        "combine": "replace_ungated",
        "capacity": capacity,
        **MINDSKIP_PARTS[part],
    }

    def find(name: str, shape: tuple[int, ...]) -> Place | Derived:
        if name.endswith("bias"):
            return constant(shape, -math.log(threshold / (1 - threshold)))
        return Place(MINDSKIP_ROUTER.format(name.split(".")[1]), shape)

    notes = [slots_note(capacity), f"its code also runs a token whose sigmoid(l) is exactly {threshold}"]
    return with_routers(source, fields, routing, find, {*map(MINDSKIP_ROUTER.format, layers)}, notes)


def read_p_mod(source: Source) -> ForeignModel:
    """Reads MCG-NJU/p-MoD (arXiv 2412.04449), `llava/model/language_model/pmod_llava_llama.py`, as a model of text.

    Its routers choose among the tokens of images, and the layers, wrapped as `decoder_layer`, run all others. So on
    text alone it is a dense Llama.
    """
    if source.capacity is not None:
        raise CheckpointError(
            f"{source.path}: --capacity is for routed layers; p-mod routes the tokens of images, and its model of text "
            "is dense"
        )
    fields = {name: value for name, value in source.fields(CONFIG).items() if not name.startswith(P_MOD_FIELDS)}
    problems = []
    for name, theirs, ours in (
        ("model_type", P_MOD_KIND, "llama"), ("architectures", [P_MOD_CLASS], [FAMILIES["llama"].architecture]),
    ):  # fmt: skip
        if fields.get(name) != theirs:
            problems.append(f"{name}: expected {shown(theirs)}, got {shown(fields.get(name))}")
        fields[name] = ours
    refuse(source.path / CONFIG, problems)
    routed = source.numbers(MODEL_LAYERS, ".router.router.weight")
    routers = {f"{MODEL_LAYERS}{layer}.router.router.{ending}" for layer in routed for ending in ("weight", "bias")}
    dense = {
        name: tensor
        for name, tensor in source.tensors.items()
        if name not in routers and not name.startswith(P_MOD_IMAGES) and not DERIVED.fullmatch(name)
    }
    spelled = partial(wrapped, layers=routed, wrapper=P_MOD_WRAPPER)
    model = model_of(source.path, fields, dense, source.max_positions, source.ignored, spelled)
    notes = (
        f"tokens of images are not converted: the routers of {len(routed)} layers, which choose among them, and the "
        "vision tower are left out, and text runs every layer as in its code",
    )
    return replace(model, family=f"{model.family} as p-mod stores it", notes=(*notes_of(model.spec), *notes))
