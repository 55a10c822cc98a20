"""Reads the model of a GGUF file that llama.cpp's converter wrote: its metadata as a spec, and its tensors by name.

A file stores the rotary scaling of Llama 3.1 as the divisor of each angle, which the converter computes from the
parameters of the rule in config.json. A spec needs the parameters, so they are recovered, and only accepted if they
reproduce the tensor.

The facts used here are from llama.cpp's `convert_hf_to_gguf.py` (keys, tensors and order of rows) and
`src/llama-model.cpp` (defaults of missing keys).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mod_models.checkpoint import CheckpointError
from mod_models.convert.config_json import Config
from mod_models.convert.foreign import (
    PHI3_FUSED,
    ForeignModel,
    Fused,
    Part,
    Place,
    declared_spec,
    halves_of_heads,
    locate,
    place_of,
    refuse,
    renamed,
)
from mod_models.convert.gguf_file import KNOWN, GgufTensor, Metadata, read_gguf_file
from mod_models.convert.gguf_tokenizer import tokenizer_of
from mod_models.layers import ROPE_SCALINGS
from mod_models.spec import ModelSpec, RopeScaling, shown

ARCHITECTURE = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
NAMES = (
    (r"embedding\.weight", EMBEDDING),
    (r"norm\.weight", "output_norm.weight"),
    (r"head\.weight", HEAD),
    (r"layers\.(\d+)\.attention_norm\.(.*)", r"blk.\1.attn_norm.\2"),
    (r"layers\.(\d+)\.mlp_norm\.(.*)", r"blk.\1.ffn_norm.\2"),
    (r"layers\.(\d+)\.attention\.o_proj\.(.*)", r"blk.\1.attn_output.\2"),
    (r"layers\.(\d+)\.attention\.([qkv])_proj\.(.*)", r"blk.\1.attn_\2.\3"),
    (r"layers\.(\d+)\.attention\.([qk])_norm\.(.*)", r"blk.\1.attn_\2_norm.\3"),
    (r"layers\.(\d+)\.attention\.(qkv_proj)\.(.*)", r"blk.\1.attn_qkv.\3"),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)", r"blk.\1.ffn_\2.\3"),
    (r"layers\.(\d+)\.mlp\.(gate_up_proj)\.(.*)", r"blk.\1.ffn_up.\3"),
)
"""Pattern of our name -> name in llama.cpp."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}
"""Key of an architecture -> the values with which it changes nothing."""
HARMLESS = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout")
"""Keys of an architecture that change nothing with the rotary angles that a spec can describe."""
OTHERS: Mapping[str, str] = {
    "adapter": "a LoRA adapter, and no model; merge it into the GGUF file of its base model with llama-export-lora",
    "controlvector": "a control vector, and no model; name the GGUF file of the model",
    "imatrix": "an importance matrix, with which a model was quantized, and no model; name the GGUF file of the model",
    **dict.fromkeys(
        ("mmproj", "clip"),
        "the projector of images or sound of a model (mmproj), and no model of text; name the GGUF file of that",
    ),
}
"""`general.type` or `general.architecture` of a file that holds no model -> what it holds."""
PART_OF = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
"""Name of one of several files of a model. Groups: the beginning that all names share, and how many files there are."""
FACTORS = "rope_freqs.weight"
LLAMA_3 = (4.0, 8192)
"""high_freq_factor and original_positions of every Llama 3.x, for tensors that do not determine them."""
TOLERANCE = 1e-5
"""Relative tolerance of a factor, because llama.cpp's converter computes factors in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """Properties of one `general.architecture`.

    Attributes:
        says: fields of the spec that follow neither from sizes nor from the tensors.
        scale: whether embeddings are multiplied by the square root of the width.
        paired: whether the rows of queries and keys are stored as pairs of neighbours.
        tied: whether the head is always the embedding.
        fused: see `foreign.Fused`.
    """

    says: Mapping[str, Any] = field(default_factory=dict)
    scale: bool = False
    paired: bool = False
    tied: bool = False
    fused: Fused = field(default_factory=dict)


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(paired=True),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(says={"qk_norm": "head"}),
    "phi3": GgufFamily(fused=PHI3_FUSED),
    # Its files store 1 + w for each norm weight w, so no offset is needed.
    "gemma": GgufFamily(says={"activation": "gelu_tanh"}, scale=True, tied=True),
}
"""`general.architecture` -> family. Mistral and SmolLM are `llama`."""


def read_gguf(path: Path, max_positions: int | None, ignored: Collection[str]) -> ForeignModel:
    """Reads the model of a GGUF file. Of the tensors, only their table and the factors of rotary angles are read.

    Args:
        path: path of the file.
        max_positions: tokens of the longest row, to make it shorter than the model allows.
        ignored: metadata keys that the caller knows to change nothing.

    Raises:
        CheckpointError: the file is not GGUF or is damaged, its architecture is unknown, its metadata are not a valid
            spec or do not fit the tensors, or tensors are missing, left over, or of a type that cannot be read.
        ImportError: the package `gguf` is missing, which comes with the extra `convert`.
    """
    metadata, tensors = read_gguf_file(path)
    kind = metadata.get(ARCHITECTURE)
    _check_is_a_model(path, metadata, tensors)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        raise CheckpointError(
            f"{path}: {ARCHITECTURE}: {shown(kind)} is no family that can be converted; known: {', '.join(FAMILIES)}"
        )
    _check_types(path, tensors)
    spec = _Declared(path, kind, family, metadata, tensors).spec(max_positions, ignored)
    parts = _parts(path, kind, family, spec, tensors)
    tokenizer, notes = tokenizer_of(path, metadata)
    return ForeignModel(path=path, family=kind, spec=spec, parts=parts, companions=tokenizer, notes=notes)


def _check_is_a_model(path: Path, metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> None:
    """Refuses a file that holds something else than a model of text, or only a part of one.

    Raises:
        CheckpointError: the file does not hold a whole model of text; the message says what it holds.
    """
    content = OTHERS.get(str(metadata.get("general.type"))) or OTHERS.get(str(metadata.get(ARCHITECTURE)))
    count = metadata.get("split.count", 1)
    if content is None and count not in (0, 1):
        content = _part_of(path, count)
    if content is None and not tensors and TOKENS in metadata:
        content = "a vocabulary without weights; name the GGUF file of the model"
    if content is not None:
        raise CheckpointError(f"{path}: {content}")


def _check_types(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    unread = {name: tensor.stored for name, tensor in tensors.items() if not isinstance(tensor.stored, torch.dtype)}
    if unread:
        name = next(iter(unread))
        more = f", and so do {len(unread) - 1} others" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{path}: {name} holds {unread[name]}, expected {KNOWN}{more}; take the model in one of these types"
        )


def _part_of(path: Path, count: object) -> str:
    """Describes a file that holds one of several parts of a model."""
    match = PART_OF.fullmatch(path.name)
    names = [f"{match[1]}-{number:05}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1)] if match else []
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        return f"one of {len(names)} files of a model, of which {missing[0]}{more} not beside it; fetch all of them"
    first = path.parent / names[0] if names else "FIRST.gguf"
    return f"one of {shown(count)} files of a model; join them: llama-gguf-split --merge {first} WHOLE.gguf"


class _Declared:
    """Reader of the metadata of a file, under the keys of its architecture."""

    def __init__(
        self, path: Path, kind: str, family: GgufFamily, metadata: Metadata, tensors: Mapping[str, GgufTensor]
    ) -> None:
        self.path, self.kind, self.family, self.metadata, self.tensors = path, kind, family, metadata, tensors
        fields = {key: _plain(value) for key, value in metadata.items() if key.startswith(f"{kind}.")}
        self.config = Config(fields, {self.key("rope.freq_base"): 10_000.0})

    def key(self, name: str) -> str:
        return f"{self.kind}.{name}"

    def spec(self, max_positions: int | None, ignored: Collection[str]) -> ModelSpec:
        config = self.config
        heads, width = config.whole(self.key("attention.head_count")), config.whole(self.key("embedding_length"))
        kv_key = self.key("attention.head_count_kv")
        d_head = self._head_width(width, heads)
        theta = config.number(self.key("rope.freq_base"))
        declared: dict[str, Any] = {
            "vocab_size": self._vocabulary(),
            "d_model": width,
            "n_layers": config.whole(self.key("block_count")),
            "n_heads": heads,
            "n_kv_heads": heads if config.get(kv_key) is None else config.whole(kv_key),
            "d_head": d_head,
            "d_ff": config.whole(self.key("feed_forward_length")),
            "max_positions": self._positions(max_positions),
            "rope_theta": theta,
            "rope_scaling": self._scaling(theta, d_head),
            "norm_eps": config.number(self.key("attention.layer_norm_rms_epsilon")),
            "attention_bias": self._attention_bias(),
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "embedding_scale": math.sqrt(width) if self.family.scale else 1.0,
            "tie_embeddings": self.family.tied or HEAD not in self.tensors,
            **self.family.says,
        }
        only = {self.key(name): values for name, values in ONLY.items()}
        config.check_others(ignored, tuple(map(self.key, HARMLESS)), only)
        return declared_spec(self.path, config.problems, **declared)

    def _head_width(self, width: int, heads: int) -> int:
        key, config = self.key("attention.key_length"), self.config
        if config.get(key) is None and width % heads:
            config.problem(key, f"missing, and {heads} heads do not divide the width {width}")
        d_head = max(1, width // heads) if config.get(key) is None else config.whole(key)
        # llama.cpp also allows another width of values, and rotary angles for a part of a head.
        config.only(self.key("attention.value_length"), (d_head,))
        config.only(self.key("rope.dimension_count"), (d_head,))
        return d_head

    def _vocabulary(self) -> int:
        """Returns the vocabulary size from its key or tokens, else from the embedding, whose shape is checked later."""
        key, tokens = self.key("vocab_size"), self.metadata.get(TOKENS)
        size = None if self.config.get(key) is None else self.config.whole(key)
        if isinstance(tokens, list) and size is not None and size != len(tokens):
            self.config.problem(key, f"{size}, and {TOKENS} has {len(tokens)}")
        if size is None and isinstance(tokens, list):
            size = len(tokens)
        if size is None and EMBEDDING in self.tensors:
            size = self.tensors[EMBEDDING].shape[0]
        if not size:
            self.config.problem(key, "missing, and the file has no tokens and no embedding")
        return size or 1

    def _positions(self, asked: int | None) -> int:
        config, key, window_key = self.config, self.key("context_length"), self.key("attention.sliding_window")
        most = config.whole(key)
        if asked is not None and asked > most:
            config.problem(key, f"{most}, and --max-positions asks for {asked}")
        positions = most if asked is None else asked
        if config.get(window_key) in (None, 0):
            return positions
        window = config.whole(window_key)
        if window < positions:
            config.problem(
                window_key,
                f"a token sees {window} tokens of up to {positions}, and a spec has no window; for rows of up to "
                f"{window} tokens, where it hides nothing, give --max-positions {window}",
            )
        return positions

    def _scaling(self, theta: float, d_head: int) -> RopeScaling | None:
        config, kind_key, factor_key = self.config, self.key("rope.scaling.type"), self.key("rope.scaling.factor")
        kind, old = config.get(kind_key), self.key("rope.scale_linear")
        if config.get(factor_key) is None and config.get(old) is not None:
            factor_key = old
        factor = config.get(factor_key)
        if kind not in (None, "none", "linear"):
            config.problem(kind_key, f"a spec cannot say {shown(kind)}; known: none, linear")
            return None
        # In llama.cpp a missing type means linear, and a missing factor or 0 means 1.
        linear = factor not in (None, 0, 1) and kind != "none"
        stretch = config.positive(factor_key, factor) if linear else 1.0
        factors = self.tensors.get(FACTORS) if self.kind == "llama" else None
        if factors is None:
            return RopeScaling(kind="linear", factor=stretch) if linear else None
        if linear:
            config.problem(factor_key, f"{shown(factor)} beside {FACTORS}, and a spec has one of them")
        scaling = _scaling_of(factors, theta, d_head)
        if isinstance(scaling, str):
            config.problem(FACTORS, scaling)
            return None
        return scaling

    def _attention_bias(self) -> str:
        """Derives the biases from the tensors of layer 0, because no key declares them."""
        inputs = {"blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias", "blk.0.attn_qkv.bias"}
        outputs = "blk.0.attn_output.bias" in self.tensors
        return "all" if outputs else "qkv" if inputs & self.tensors.keys() else "none"


def _plain(value: Any) -> Any:
    """Reduces equal numbers of all layers to one number, and restores the decimal of a float stored as float32."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
        return value[0] if value and value == [value[0]] * len(value) else value
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
        return value
    # The shortest decimal with this float32 value: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _parts(
    path: Path, kind: str, family: GgufFamily, spec: ModelSpec, tensors: Mapping[str, GgufTensor]
) -> dict[str, Part]:
    def find(name: str, shape: tuple[int, ...]) -> Place:
        place = place_of(spec, name, shape, lambda ours: renamed(ours, NAMES), family.fused)
        pairs = family.paired and re.search(r"\.[qk]_proj\.", name)
        return place._replace(made=partial(halves_of_heads, d_head=spec.d_head)) if pairs else place

    parts, problems, unused = locate(spec, find, tensors, "its metadata", KNOWN)
    problems += [
        f"{shown(name)} belongs to nothing that its metadata describe"
        for name in unused
        if kind != "llama" or name != FACTORS
    ]
    refuse(path, problems)
    return parts


def _scaling_of(tensor: GgufTensor, theta: float, d_head: int) -> RopeScaling | str | None:
    """Returns the scaling that leads to a tensor of factors, None if all factors are 1, or the problem as text."""
    if tensor.shape != (d_head // 2,) or tensor.stored is not torch.float32:
        return f"expected {d_head // 2} numbers of float32, got {list(tensor.shape)} of {tensor.stored}"
    factor_E = tensor.rows(0, d_head // 2).double()
    if not bool((torch.isfinite(factor_E) & (factor_E > 0)).all()):
        return "holds factors that are not above 0"
    angle_E = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    largest = float(factor_E.max())
    if largest == float(factor_E.min()):
        return None if largest == 1.0 else RopeScaling(kind="linear", factor=largest)
    for high, positions in _llama3_limits(factor_E, angle_E, largest):
        if not (math.isfinite(high) and math.isfinite(positions)) or high <= 1 or not 1 <= positions < 2**31:
            continue
        # Only ratios of low_freq_factor, high_freq_factor and original_positions matter, so low_freq_factor can be 1.
        scaling = RopeScaling(
            kind="llama3", factor=largest, low_freq_factor=1.0, high_freq_factor=high,
            original_positions=round(positions),
        )  # fmt: skip
        again_E = angle_E / ROPE_SCALINGS["llama3"](angle_E, scaling)
        if bool(((again_E - factor_E).abs() <= TOLERANCE * factor_E).all()):
            return scaling
    return "its factors are not those of the rule of Llama 3.1, the only one that a spec can say"


def _llama3_limits(factor_E: Tensor, angle_E: Tensor, largest: float) -> list[tuple[float, float]]:
    """Returns pairs (high_freq_factor, original_positions) that can explain the factors with low_freq_factor = 1.

    Between the two limits of the wavelength, the share of the unscaled angle is
    (positions * angle / 2 pi - 1) / (high - 1).
    """
    pairs: list[tuple[float, float]] = [LLAMA_3]
    between = (factor_E > 1 + TOLERANCE) & (factor_E < largest * (1 - TOLERANCE))
    angles = angle_E[between]
    share = (1 / factor_E[between] - 1 / largest) / (1 - 1 / largest)
    if not len(share):
        # No angle is between the limits: any limits that separate the slowed angles from the others will do.
        slowed, fast = float(angle_E[factor_E > 1 + TOLERANCE].max()), float(angle_E[factor_E <= 1 + TOLERANCE].min())
        whole = math.floor(2 * math.pi / slowed)
        pairs.append((min(LLAMA_3[0], whole * fast / (2 * math.pi)), whole))
    if len(share) == 1:
        pairs.append((LLAMA_3[0], float((1 + share[0] * (LLAMA_3[0] - 1)) * 2 * math.pi / angles[0])))
    if len(share) > 1:
        first, last = int(angles.argmax()), int(angles.argmin())
        slope = float((share[first] - share[last]) / (angles[first] - angles[last]))
        start = slope * float(angles[first]) - float(share[first])
        if start > 0:
            high = 1 + 1 / start
            positions = slope * (high - 1) * 2 * math.pi
            pairs += [(round(high, digits), positions) for digits in (0, 1, 2, 4)] + [(high, positions)]
    return pairs
