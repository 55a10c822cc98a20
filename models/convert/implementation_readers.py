"""Readers of public implementations of Mixture-of-Depths in which selected tokens see only each other.

Two implementations add routers to the layers of a transformers model, whose dense model is a family of
`hugging_face.py`: astramind and dlo. Three have Llama's blocks and their own names of tensors: ohara, sramshetty and
D-LLM. The last two are based on Meta's Llama 2: params.json, and state_dicts in .pth files. All three rotate pairs of
neighbouring rows of queries and keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from mod_models.convert.config_json import Config
from mod_models.convert.foreign import (
    ForeignModel,
    Part,
    Place,
    TensorRows,
    declared_spec,
    difference,
    halves_of_heads,
    low_rank,
    refuse,
)
from mod_models.convert.hugging_face import CONFIG, KNOWN, same
from mod_models.convert.implementation_source import (
    MODEL_LAYERS,
    Source,
    declared_layers,
    model_from,
    slots_note,
    with_routers,
    with_routing,
    wrapped,
)
from mod_models.convert.tensor_files import FileTensor
from mod_models.spec import ModelSpec, shown

ASTRAMIND_ROUTER = ".router.weight_predictor"
ASTRAMIND_CAPACITY = 0.125
DLO_ROUTER = "model.routers.{}"
DLO_FIELDS: Mapping[str, Any] = {
    "is_dlo": None, "dlo_capacity": 0.5, "rescale_hidden_states": True, "scale_factor": 2.0, "scale_gap": 0.05,
    "dlo_loss_coefficient": 1.0, "dlo_loss_type": "self", "gate_init_method": "zero",
}  # fmt: skip
"""Field of LLaMA-DLO's config.json -> its default in the code of LLaMA-DLO."""
PARAMS = "params.json"
LAYER = re.compile(r"layers\.(\d+)\.(.*)")
Names = Mapping[str, str]

OHARA_EMBEDDING, OHARA_HEAD = "model.token_emb.weight", "model.vocab_proj.weight"
OHARA_NAMES: Names = {
    "attention_norm": "norm1", "mlp_norm": "norm2",
    # Its apply_rope takes keys first and queries second, but is called with swapped arguments.
    "attention.q_proj": "attn.key", "attention.k_proj": "attn.query", "attention.v_proj": "attn.value",
    "attention.o_proj": "attn.proj", "mlp.gate_proj": "ff.gate", "mlp.up_proj": "ff.up", "mlp.down_proj": "ff.down",
}  # fmt: skip
OHARA_BESIDE: Names = {
    "router.projection": "router", "predictor.hidden": "aux_router.0", "predictor.projection": "aux_router.2",
}  # fmt: skip
OHARA_DEFAULTS: Mapping[str, Any] = {
    "seq_len": 64, "num_kv_heads": 0, "capacity_factor": 0.12, "ffn": "swiglu", "mixture_of_expert": False,
    "mixture_of_depth": True,
}  # fmt: skip
OHARA_HARMLESS = (
    "bias", "dropout", "model_type", "moe_num_experts", "moe_num_experts_per_tok", "multiple_of",
    "sliding_window_attention", "weight_tying", "window_size",
)  # fmt: skip
"""Fields that ohara's code reads only for training or experts, or never; the tensors show which biases there are."""

META_NAMES: Names = {
    "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk", "attention.v_proj": "attention.wv", "attention.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
META_OUTER: Names = {
    "embedding.weight": "tok_embeddings.weight", "norm.weight": "norm.weight", "head.weight": "output.weight",
}  # fmt: skip
META_DEFAULTS: Mapping[str, Any] = {"multiple_of": 256, "norm_eps": 1e-5, "max_seq_len": 2048}
META_HARMLESS = ("max_batch_size", "vocab_size")
"""`vocab_size` is -1 in params.json. Meta's code takes it from the tokenizer, this module from the embedding."""
SRAMSHETTY_DEFAULTS: Mapping[str, Any] = {**META_DEFAULTS, "capacity": 256, "router_skip_blocks": 2, "routing": 1}
D_LLM_DEFAULTS: Mapping[str, Any] = {
    **META_DEFAULTS, "dynamic_start_layer": 2, "dynamic_router_hdim": 512, "dynamic_reserve_initials": 2,
}  # fmt: skip


def read_astramind(source: Source) -> ForeignModel:
    """Reads astramind-ai/Mixture-of-depths, and LLaMA-Factory, which uses it (`mixture_of_depths`).

    In `MoD/MoD.py`, a layer is wrapped as `block` beside `router.weight_predictor`, a Linear(D, 1) with a bias. Tokens
    whose weight w is above the k-th largest, k = max(1, int(c * S)), run at their original positions, and w * Block(x)
    replaces them. With k = 1 the token with the largest weight runs.
    """
    routed = source.numbers(MODEL_LAYERS, f"{ASTRAMIND_ROUTER}.weight")
    fields = dict(source.fields(CONFIG))
    if isinstance(fields.get("architectures"), list):
        fields["architectures"] = [str(name).replace("MoDFor", "For") for name in fields["architectures"]]
    notes = [] if source.capacity is not None else [
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
    spelled = partial(wrapped, layers=routed, wrapper="block.")
    return _with_linear_routers(source, fields, routing, f"{MODEL_LAYERS}{{}}{ASTRAMIND_ROUTER}", notes, spelled)


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
    routed = declared_layers(source, "is_dlo", options["is_dlo"], f"{DLO_ROUTER}.weight", problems)
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
    return _with_linear_routers(source, fields, routing, DLO_ROUTER, [slots_note(capacity)])


def _with_linear_routers(
    source: Source,
    fields: Mapping[str, Any],
    routing: Mapping[str, Any],
    router: str,
    said: list[str],
    spelled: Callable[[str], str] = str,
) -> ForeignModel:
    """Builds a dense model with a linear router in each routed layer. `router` is the name of a layer's router, with
    `{}` for the number of the layer.
    """
    own = {f"{router.format(layer)}.{ending}" for layer in routing["layers"] for ending in ("weight", "bias")}

    def find(name: str, shape: tuple[int, ...]) -> Place:
        return Place(f"{router.format(name.split('.')[1])}.{name.rpartition('.')[2]}", shape)

    return with_routers(source, fields, routing, find, own, said, spelled)


def read_ohara(source: Source) -> ForeignModel:
    """Reads joey00072/ohara, experiments/mixture_of_depth, saved by `save_pretrained` of its hub mixin.

    In every layer with a router, the k = int(c * S) tokens of a row with the largest scores run, in order, at positions
    0 to k - 1. The softmax over their scores weighs the whole block, which is added to the stream. Blocks are Llama's,
    and can have biases in the projections of attention.
    """
    config = Config(source.fields(CONFIG), OHARA_DEFAULTS)
    config.only("ffn", ("swiglu",))
    config.only("mixture_of_expert", (False,))
    config.only("mixture_of_depth", (True,))
    width, heads = config.whole("d_model"), config.whole("num_heads")
    # Its attention reshapes queries and keys alike, so it only runs with as many key heads as query heads.
    config.only("num_kv_heads", (0, heads))
    vocabulary, d_ff = config.whole("vocab_size"), config.whole("hidden_dim")
    trained_at = config.number("capacity_factor")
    row, positions = config.whole("seq_len"), source.max_positions
    if positions is not None and positions > 2 * row:
        # Its rotary tables allow twice the length of its training rows.
        code = f"{row}, so its code has {2 * row} positions"
        config.problem("seq_len", f"{code}, and --max-positions asks for {positions}")
    layers, routed = config.whole("num_layers"), source.numbers("model.layers.", ".router.weight")
    config.check_others(source.ignored, OHARA_HARMLESS, {})
    # A layer that is not wrapped by a router shows the biases; if all are wrapped, the inner block of layer 0 does.
    plain = next((layer for layer in range(layers) if layer not in routed), "0.transformer_decoder_block")
    attention = f"model.layers.{plain}.attn"
    biased = f"{attention}.key.bias" in source.tensors
    spec = declared_spec(
        source.path / CONFIG,
        config.problems,
        vocab_size=vocabulary,
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=max(2, width // heads),
        d_ff=d_ff,
        max_positions=row if positions is None else positions,
        attention_bias="none" if not biased else "all" if f"{attention}.proj.bias" in source.tensors else "qkv",
    )
    spec = with_routing(
        source,
        spec,
        layers=routed,
        gate="softmax_selected",
        combine="double_residual",
        capacity_rule="floor",
        capacity=trained_at if source.capacity is None else source.capacity,
        positions="compact",
        predictor_hidden=width // 2,
    )
    embedding = OHARA_EMBEDDING if OHARA_EMBEDDING in source.tensors else OHARA_HEAD

    def find(name: str, shape: tuple[int, ...]) -> Place:
        match = LAYER.fullmatch(name)
        if match is None:
            return Place(embedding if name == "embedding.weight" else f"model.{name}", shape)
        layer, (inner, ending) = int(match[1]), match[2].rsplit(".", 1)
        before = f"model.layers.{layer}."
        if inner in OHARA_BESIDE:
            return Place(f"{before}{OHARA_BESIDE[inner]}.{ending}", shape)
        block = "transformer_decoder_block." if layer in routed else ""
        return Place(f"{before}{block}{OHARA_NAMES[inner]}.{ending}", shape, made=_order_of(inner, spec))

    _check_copies(source, OHARA_EMBEDDING, [OHARA_HEAD])
    notes = [
        "attn.key holds what queries are made of and attn.query what keys are: so its code uses them, from commit "
        "8fc5247, the first in which its rotary positions fit a routed block",
        "aux_router becomes the predictor; its own code never runs it, and was trained with targets of the first row",
    ]
    return model_from(
        source, spec, find, family="Llama", declared_by=CONFIG, harmless=(OHARA_HEAD, "model.mask"), said=notes
    )


def read_sramshetty(source: Source) -> ForeignModel:
    """Reads sramshetty/mixture-of-depths, `mixture_of_depths/routing_transformer.py` at commit 57cc382, in training.

    All layers whose number is not a multiple of `router_skip_blocks` share one router, which is saved again in each.
    The k = min(S, capacity) best tokens run at positions 0 to k - 1. With g = sigmoid(l), which weighs the MLP,
    x + A + g M is added to x.
    """
    config = Config(source.fields(PARAMS), SRAMSHETTY_DEFAULTS)
    config.only("routing", (1, True))
    every, tokens = config.whole("router_skip_blocks"), config.whole("capacity")
    auxiliary = config.get("aux_routing"), config.get("aux_loss")
    spec = _meta_spec(source, config)
    routed = tuple(layer for layer in range(spec.n_layers) if layer % every)
    capacity = tokens if source.capacity is None else source.capacity
    spec = with_routing(
        source,
        spec,
        layers=routed,
        gate="sigmoid",
        combine="double_residual_ffn_gated",
        capacity_rule="absolute",
        capacity=capacity,
        positions="compact",
    )
    copies = [f"layers.{layer}.router.weight" for layer in range(spec.n_layers)]
    _check_copies(source, "router.weight", copies)
    auxiliaries = [name for name in source.tensors if re.match(r"(layers\.\d+\.)?aux_router\.", name)]

    def find(name: str, shape: tuple[int, ...]) -> Place:
        match = LAYER.fullmatch(name)
        if match is not None and match[2] == "router.projection.weight":
            return Place(f"layers.{match[1]}.router.weight", shape)
        return _meta_find(spec, name, shape)

    notes = [
        "routes as in training; its own generation differs: a prompt runs its first tokens whatever their scores are, "
        "and a single token where sigmoid(l) > 0.5. Commits before 57cc382 train otherwise, too"
    ]
    if auxiliaries or auxiliary[0]:
        notes.append("aux_router is left out; its code selects by it when it generates, and never in training")
    harmless = ("router.weight", *copies, *auxiliaries, "rope.freqs")
    return model_from(source, spec, find, family="Llama 2", declared_by=PARAMS, harmless=harmless, said=notes)


def read_d_llm(source: Source) -> ForeignModel:
    """Reads Jyk-122/D-LLM, `llama/model.py`: Llama 2 in one .pth, routers and LoRA in another (`checkpoint-N.pth`).

    From layer `dynamic_start_layer` on, the router is Linear(D, H) - RMSNorm - SiLU - Linear(H, 2). A token runs if
    class 1 is at least as probable as class 0, or if it is one of the first `dynamic_reserve_initials`. No token
    attends to a skipped one.
    """
    config = Config(source.fields(PARAMS), D_LLM_DEFAULTS)
    start, hidden = config.whole("dynamic_start_layer"), config.whole("dynamic_router_hdim")
    first = config.get("dynamic_reserve_initials")
    config.get("dynamic_active_target"), config.get("lora_rank")
    spec = _meta_spec(source, config)
    capacity = source.unlimited_capacity(
        f"dynamic_active_target was {shown(config.get('dynamic_active_target') or 0.5)} in training"
    )
    spec = with_routing(
        source,
        spec,
        layers=tuple(range(start, spec.n_layers)),
        router="norm_mlp",
        router_hidden=hidden,
        gate="ones",
        combine="replace_ungated",
        selection="threshold",
        always_first=first,
        capacity=capacity,
    )
    lora = _lora(source, spec)

    def find(name: str, shape: tuple[int, ...]) -> Place:
        match = LAYER.fullmatch(name)
        if match is None or not match[2].startswith("router."):
            place = _meta_find(spec, name, shape)
            if place.name not in lora:
                return place
            return place._replace(made=lambda tensor: place.made(low_rank(tensor, *lora[place.name])))
        inner, ending = match[2].removeprefix("router.").rsplit(".", 1)
        if inner == "projection":
            return Place(
                f"layers.{match[1]}.router.linear_2.{ending}", (2, *shape[1:]), made=partial(difference, row=1)
            )
        return Place(f"layers.{match[1]}.router.{'linear_1' if inner == 'hidden' else inner}.{ending}", shape)

    harmless = (*(name for matrices in lora.values() for name in (matrices[0].name, matrices[1].name)), "rope.freqs")
    notes = [slots_note(capacity)]
    if lora:
        notes.append(f"LoRA is added to {len(lora)} projections in float32; its code adds in the dtype of the weights")
    return model_from(source, spec, find, family="Llama 2", declared_by=PARAMS, harmless=harmless, said=notes)


def _meta_spec(source: Source, config: Config) -> ModelSpec:
    """Spec of Llama 2 from its params.json. `max_seq_len` is an argument of its code: 2048 if the user sets nothing."""
    width, layers, heads = config.whole("dim"), config.whole("n_layers"), config.whole("n_heads")
    kv_heads = heads if config.get("n_kv_heads") is None else config.whole("n_kv_heads")
    multiple, longest = config.whole("multiple_of"), config.whole("max_seq_len")
    d_ff = 8 * width // 3
    if config.get("ffn_dim_multiplier") is not None:
        try:
            d_ff = int(config.number("ffn_dim_multiplier") * d_ff)
        except OverflowError:
            config.problem("ffn_dim_multiplier", f"expected a factor, got {shown(config.get('ffn_dim_multiplier'))}")
    eps = config.number("norm_eps")
    config.check_others(source.ignored, META_HARMLESS, {})
    return declared_spec(
        source.path / PARAMS,
        config.problems,
        vocab_size=max(1, source.shape(META_OUTER["embedding.weight"])[0]),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_head=max(2, width // heads),
        d_ff=multiple * -(-d_ff // multiple),
        max_positions=longest if source.max_positions is None else source.max_positions,
        norm_eps=eps,
        tie_embeddings=False,
    )


def _meta_find(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Place:
    match = LAYER.fullmatch(name)
    if match is None:
        return Place(META_OUTER[name], shape)
    inner, ending = match[2].rsplit(".", 1)
    return Place(f"layers.{match[1]}.{META_NAMES[inner]}.{ending}", shape, made=_order_of(inner, spec))


def _order_of(inner: str, spec: ModelSpec) -> Callable[[TensorRows], TensorRows]:
    """Returns a function that brings rows into our order. For queries and keys it puts the first half of each head
    before the second; other tensors stay as they are.
    """
    if inner in ("attention.q_proj", "attention.k_proj"):
        return partial(halves_of_heads, d_head=spec.d_head)
    return lambda tensor: tensor


def _lora(source: Source, spec: ModelSpec) -> dict[str, tuple[FileTensor, FileTensor]]:
    """Name of a projection -> the LoRA matrices (rank, D) and (rows, rank) whose product is added to it."""
    matrices, problems = {}, []
    for layer in range(spec.n_layers):
        for letter in "qkv":
            before = f"layers.{layer}.attention.lora_{letter}.linear_"
            down, up = (source.tensors.get(f"{before}{side}.weight") for side in "AB")
            if down is None or up is None:
                continue  # A single matrix is left over, and is refused later.
            heads = spec.n_heads if letter == "q" else spec.n_kv_heads
            rank = down.shape[0] if down.shape else 0
            if (down.shape, up.shape) != ((rank, spec.d_model), (heads * spec.d_head, rank)):
                problems.append(
                    f"{before}A.weight and {before}B.weight have the shapes {list(down.shape)} and {list(up.shape)}, "
                    f"expected [rank, {spec.d_model}] and [{heads * spec.d_head}, rank]"
                )
            elif not (isinstance(down.stored, torch.dtype) and isinstance(up.stored, torch.dtype)):
                problems.append(f"{before}A.weight or {before}B.weight holds no {KNOWN}")
            else:
                matrices[f"layers.{layer}.attention.w{letter}.weight"] = down, up
    refuse(source.path, problems)
    return matrices


def _check_copies(source: Source, name: str, copies: list[str]) -> None:
    """Refuses a folder whose copies of a tensor differ, although the implementation has only one such tensor."""
    present = [copy for copy in (name, *copies) if copy in source.tensors]
    first = source.tensors.get(present[0]) if present else None
    if first is None or not isinstance(first.stored, torch.dtype):
        return  # It is missing or has no floats, and is refused later.
    part = Part(first, 0, first.shape[0])
    refuse(
        source.path,
        [
            f"{copy} differs from {first.name}, and both are the same tensor in {source.implementation}"
            for copy in present[1:]
            if not same(source.tensors[copy], part)
        ],
    )
