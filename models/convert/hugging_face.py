"""Reads a folder from `save_pretrained` of transformers: config.json, weights, and the files of a tokenizer.

Each family of models is a `Family`: the defaults of transformers for missing fields, and how its spec and its tensors
differ from Llama's. Facts are from transformers 5 (`models/<name>/configuration_*.py`, `modeling_*.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mod_models.checkpoint import CheckpointError
from mod_models.convert.config_json import Config, rope_of
from mod_models.convert.foreign import (
    PHI3_FUSED,
    ForeignModel,
    Fused,
    Part,
    Place,
    StoredTensor,
    locate,
    place_of,
    plus,
    refuse,
    renamed,
)
from mod_models.convert.tensor_files import read_json, tensors_of_folder
from mod_models.convert.tensor_names import with_model, without_wrappers
from mod_models.spec import ModelSpec, SpecError, shown

CONFIG = "config.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
KNOWN = "floating-point numbers of 16, 32 or 64 bits"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Activation in transformers -> in a spec. `gelu_new` is the same approximation as `gelu_pytorch_tanh`."""
GEMMA_ACTIVATIONS = {**ACTIVATIONS, "gelu": "gelu_tanh"}
"""Gemma's first releases say `gelu` but mean the tanh approximation."""
NAMES = (
    (r"embedding\.weight", "model.embed_tokens.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"head\.weight", "lm_head.weight"),
    (r"layers\.(\d+)\.attention_norm\.(.*)", r"model.layers.\1.input_layernorm.\2"),
    (r"layers\.(\d+)\.mlp_norm\.(.*)", r"model.layers.\1.post_attention_layernorm.\2"),
    (r"layers\.(\d+)\.attention\.(.*)", r"model.layers.\1.self_attn.\2"),
    (r"layers\.(\d+)\.mlp\.(.*)", r"model.layers.\1.mlp.\2"),
)
"""Pattern of our name -> name in Llama and families like it."""
DERIVED = re.compile(
    r"model\.(layers\.\d+\.([a-z_]+\.(\d+\.)?)?self_attn\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)"
)
"""Tensors in some files that follow from the config, so they are not read; also those of a wrapped layer."""

Say = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of one `model_type`.

    Attributes:
        architecture: the class in transformers that owns its tensors.
        defaults: field of config.json -> its value if it is left out.
        says: config -> fields of the spec other than the sizes.
        harmless: fields that change nothing, for any value.
        only: field -> the values with which it changes nothing.
        window: (config, number of layers) -> the largest number of tokens that a token sees; None for all.
        fused: see `foreign.Fused`.
        norm_offset: number to add to the weight of every norm.
    """

    architecture: str
    defaults: Mapping[str, Any]
    says: Say = field(default=lambda config: {})
    harmless: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    window: Callable[[Config, int], int | None] = field(default=lambda config, layers: None)
    fused: Fused = field(default_factory=dict)
    norm_offset: float = 0.0

    @property
    def base(self) -> str:
        """The class in transformers of the model without a head."""
        return self.architecture.replace("ForCausalLM", "Model")


def foreign_name(name: str) -> str:
    """Name in Llama of one of our tensors."""
    return renamed(name, NAMES)


def spec_of(family: Family, config: Config, max_positions: int | None) -> ModelSpec | None:
    """Returns the spec that a config.json declares, or None, with the reasons in `config.problems`.

    `max_positions` makes the longest row shorter than the model allows.
    """
    layers, heads, width = (config.whole(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kv_heads = heads if config.get("num_key_value_heads") is None else config.whole("num_key_value_heads")
    if config.get("head_dim") is None and width % heads:
        config.problem("head_dim", f"missing, and num_attention_heads {heads} does not divide hidden_size {width}")
    theta, scaling = rope_of(config)
    own_fields = family.says(config)
    if "activation" not in own_fields:
        own_fields["activation"] = config.named("hidden_act", ACTIVATIONS)
    declared: dict[str, Any] = {
        "vocab_size": config.whole("vocab_size"),
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_head": max(1, width // heads) if config.get("head_dim") is None else config.whole("head_dim"),
        "d_ff": config.whole("intermediate_size"),
        "max_positions": _positions(family, config, layers, max_positions),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.number("rms_norm_eps"),
        "tie_embeddings": config.flag("tie_word_embeddings"),
        **own_fields,
    }
    for name, values in family.only.items():
        config.only(name, values)
    return None if config.problems else ModelSpec(**declared)


def _positions(family: Family, config: Config, layers: int, asked: int | None) -> int:
    most, window = config.whole("max_position_embeddings"), family.window(config, layers)
    if asked is not None and asked > most:
        config.problem("max_position_embeddings", f"{most}, and --max-positions asks for {asked}")
    positions = most if asked is None else asked
    if window is not None and window < positions:
        config.problem(
            "sliding_window",
            f"a token sees {window} tokens of up to {positions}, and a spec has no window; for rows of up to {window} "
            f"tokens, where it hides nothing, give --max-positions {window}",
        )
    return positions


def _always(config: Config, layers: int) -> int | None:
    """Mistral's window, which applies in every layer; None without one."""
    if config.get("sliding_window") is None:
        return None
    before, window = len(config.problems), config.whole("sliding_window")
    return window if len(config.problems) == before else None


def _upper_layers(config: Config, layers: int) -> int | None:
    """Qwen's window, if it is enabled and applies in some layer: from `max_window_layers` on, or in `layer_types`."""
    on, first, kinds = config.flag("use_sliding_window"), config.get("max_window_layers"), config.get("layer_types")
    listed = kinds if isinstance(kinds, list) else []
    if kinds is not None and (not listed or set(map(str, listed)) - {"full_attention", *(["sliding_attention"] * on)}):
        config.problem("layer_types", f"expected full_attention in every layer, got {shown(kinds)}")
    slides = "sliding_attention" in listed if kinds is not None else type(first) is not int or first < layers
    window = _always(config, layers)
    return window if on and slides else None


def _biases(config: Config) -> str:
    return "all" if config.flag("attention_bias") else "none"


def _gemma(config: Config) -> dict[str, Any]:
    return {
        "attention_bias": _biases(config),
        "activation": config.named("hidden_act", GEMMA_ACTIVATIONS),
        "embedding_scale": math.sqrt(config.whole("hidden_size")),
    }


COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=COMMON,
        says=lambda config: {"attention_bias": _biases(config), "mlp_bias": config.flag("mlp_bias")},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={**COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
        window=_always,
        only={"attention_bias": (False,)},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={**COMMON, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        says=lambda config: {"attention_bias": "qkv"},
        window=_upper_layers,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            **COMMON, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28,
        },
        says=lambda config: {"attention_bias": _biases(config), "qk_norm": "head"},
        window=_upper_layers,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={**COMMON, "rms_norm_eps": 1e-5},
        only={"attention_bias": (False,)},
        # The field only matters for `longrope` angles, which are refused.
        harmless=("original_max_position_embeddings",),
        window=_always,
        fused=PHI3_FUSED,
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        defaults={
            **COMMON, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
            "num_key_value_heads": 16,
        },
        says=_gemma,
        only={"hidden_activation": ("gelu_pytorch_tanh",)},
        norm_offset=1.0,
    ),
}  # fmt: skip
"""`model_type` of a config.json -> family. SmolLM and SmolLM2 are `llama`."""


def is_hugging_face(path: Path) -> bool:
    """Whether this is a folder whose config.json has a `model_type`."""
    config = path / CONFIG
    if not config.is_file():
        return False
    try:
        return "model_type" in read_json(config)
    except CheckpointError:
        return False


def read_hugging_face(path: Path, max_positions: int | None, ignored: Collection[str]) -> ForeignModel:
    """Reads the model of a folder. Of its weights it only reads headers, and a head that must equal the embedding.

    Args:
        path: path of the folder.
        max_positions: tokens of the longest row, to make it shorter than the model allows.
        ignored: fields of config.json that the caller knows to change nothing.

    Raises:
        CheckpointError: the family is unknown, the config is not a valid spec or does not fit the tensors, or tensors
            are missing, left over, damaged, or not floats.
    """
    fields = read_json(path / CONFIG)
    tensors, notes = named_tensors(path, fields)
    model = model_of(path, fields, tensors, max_positions, ignored)
    return replace(model, notes=(*notes, *model.notes))


def named_tensors(path: Path, fields: Mapping[str, Any]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Returns the tensors of a folder under the names of a causal language model, and notes about changed names.

    Args:
        path: path of the folder.
        fields: fields of its config.json.

    Raises:
        CheckpointError: see `tensors_of_folder` and `without_wrappers`; or it is a model with an adapter beside its
            weights, or a base model whose head is not the embedding.
    """
    unwrapped, of_wrappers = without_wrappers(path, tensors_of_folder(path))
    tensors, of_base = with_model(path, unwrapped)
    if unmerged := next((name for name in tensors if ".base_layer." in name or ".lora_" in name), None):
        raise CheckpointError(
            f"{path}: holds {shown(unmerged)}, so it is a model with an adapter of PEFT that is not merged; save what "
            "merge_and_unload of peft returns, or convert the adapter alone"
        )
    kind = fields.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is not None and HEAD not in tensors and (of_base or fields.get("architectures") == [family.base]):
        tied = fields.get("tie_word_embeddings", family.defaults["tie_word_embeddings"])
        if tied is False:
            raise CheckpointError(
                f"{path}: a base model ({family.base}) without {HEAD}, and tie_word_embeddings is false, so it gives "
                f"no logits; save {family.architecture}, the model with its head"
            )
    return {**tensors}, (*of_wrappers, *of_base)


def companions_of(path: Path) -> tuple[Path, ...]:
    """The files of a tokenizer in a folder, and the files that configure its use."""
    return tuple(path / name for name in COMPANIONS if (path / name).is_file())


def model_of(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    max_positions: int | None,
    ignored: Collection[str],
    spelled: Callable[[str], str] = str,
) -> ForeignModel:
    """Builds the dense model from the fields of a config.json and from tensors.

    Args:
        path: path of the folder.
        fields: fields of a config.json of the family.
        tensors: name in the file -> tensor.
        max_positions: see `read_hugging_face`.
        ignored: see `read_hugging_face`.
        spelled: name in the family -> name in the file.

    Raises:
        CheckpointError: see `read_hugging_face`.
    """
    family = _family(path / CONFIG, fields)
    spec = _spec(path / CONFIG, family, fields, max_positions, ignored)

    def find(name: str, shape: tuple[int, ...]) -> Place:
        place = place_of(spec, name, shape, foreign_name, family.fused)
        if family.norm_offset and name.endswith("norm.weight"):
            place = place._replace(made=partial(plus, added=family.norm_offset))
        return place._replace(name=spelled(place.name))

    parts, problems, unused = locate(spec, find, tensors, CONFIG, KNOWN)
    embedding = parts.get("embedding.weight") if spec.tie_embeddings else None
    problems += _left_over({name: tensors[name] for name in unused}, embedding)
    refuse(path, problems)
    kind = str(fields.get("model_type"))
    return ForeignModel(path=path, family=kind, spec=spec, parts=parts, companions=companions_of(path))


def spec_of_config(path: Path, fields: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec that the fields of a config.json declare; `path` is the file, for messages.

    Raises:
        CheckpointError: the family is unknown, or the config is not a valid spec.
    """
    return _spec(path, _family(path, fields), fields, None, ())


def _family(path: Path, fields: Mapping[str, Any]) -> Family:
    kind = fields.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{path}: model_type: {shown(kind)} is no family that can be converted; known: {', '.join(FAMILIES)}"
        )
    return family


def _spec(
    path: Path, family: Family, fields: Mapping[str, object], max_positions: int | None, ignored: Collection[str]
) -> ModelSpec:
    config = Config(fields, family.defaults)
    architectures = fields.get("architectures")
    if architectures is not None and architectures not in ([family.architecture], [family.base]):
        config.problem("architectures", f"expected {family.architecture}, got {shown(architectures)}")
    try:
        spec = spec_of(family, config, max_positions)
    except SpecError as error:
        raise CheckpointError(f"{path}: {error}") from error
    config.check_others({*ignored, *family.harmless})
    refuse(path, config.problems)
    assert spec is not None, "without a problem there is a spec"
    return spec


def _left_over(tensors: Mapping[str, StoredTensor], tied: Part | None) -> list[str]:
    """Problems of tensors that the config does not describe. A head that equals the tied embedding is no problem."""
    problems = []
    for name, tensor in tensors.items():
        if name == HEAD and tied is not None:
            if not same(tensor, tied):
                problems.append(f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}")
        elif not DERIVED.fullmatch(name):
            problems.append(f"{shown(name)} belongs to nothing that {CONFIG} describes")
    return problems


def same(tensor: StoredTensor, part: Part) -> bool:
    """Whether both have the same shape, dtype and values."""
    if (tensor.shape, tensor.stored) != (part.shape, part.dtype):
        return False
    pairs = zip(Part(tensor, 0, part.length).pieces(), part.pieces(), strict=True)
    return all(torch.equal(piece, expected) for piece, expected in pairs)
