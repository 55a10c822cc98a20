"""Frozen values that pass between stages. Paths are relative to the build folder, so a folder can be moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

__all__ = [
    "DTYPES",
    "FLOAT_DTYPES",
    "PRIMARY",
    "QUANTIZED",
    "Availability",
    "Bucket",
    "DType",
    "Dialect",
    "Engine",
    "FloatDType",
    "Graph",
    "Kernel",
    "ModelKind",
    "Outputs",
    "Profile",
    "QuantizedDType",
    "Role",
    "Site",
    "Variant",
    "engine_stem",
    "is_expert",
    "primary_output",
    "routed_output",
    "site_from_text",
]

ModelKind = Literal["mod", "dense"]
Role = Literal["forward", "prefill", "decode"]
"""What a graph does with a text: all of it at once; the prompt, with a cache for what follows; or one more token."""
Site = int | str
"""Where a model decides which tokens run: the number of a routed layer, or a name such as "3.mlp" or "3.expert0" where
a layer has several such places."""
Outputs = Literal["logits", "last", "none"]
"""What a model returns: logits of every token, of each row's last real token, or hidden states and no logits."""
PRIMARY: dict[Outputs, str] = {"logits": "logits", "last": "last_logits", "none": "hidden"}
"""The name of its first output: `logits` (B, S, V), `last_logits` (B, V), `hidden` (B, S, D)."""
FloatDType = Literal["float32", "float16", "bfloat16"]
QuantizedDType = Literal["int8", "int4"]
DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
"""What weights are stored in. With int8 and int4 everything else stays float32, and the weights that cannot bear it."""
DTYPES: tuple[DType, ...] = get_args(DType)
FLOAT_DTYPES: tuple[FloatDType, ...] = get_args(FloatDType)
QUANTIZED: tuple[QuantizedDType, ...] = get_args(QuantizedDType)


def routed_output(site: Site) -> str:
    """The name of the graph output that says which positions a site took."""
    return f"routed_{site}"


def is_expert(site: Site) -> bool:
    """Whether it is an expert that takes tokens there, and not a block, or a part of one, that others pass by."""
    return ".expert" in str(site)


def site_from_text(text: str) -> Site:
    """A site as it stands in JSON, which has no numbers for keys, or in the name of an output."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One static shape: `batch` rows of `seq` tokens. Every graph and engine belongs to exactly one."""

    batch: int
    seq: int

    @property
    def name(self) -> str:
        """As it stands in file names: b1s512."""
        return f"b{self.batch}s{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What the graph of a target may hold. Passes read it to decide what to rewrite, `check_dialect` what to refuse.

    Attributes:
        name: as it stands in messages.
        max_opset: highest ai.onnx opset that the target's parser takes.
        topk_limit: largest K of a TopK, or None.
        scatter_reduction: whether ScatterND and ScatterElements may reduce.
        whole_scores: whether attention keeps all its (B, H, T, T) scores in this machine's memory at once.
        attention_dtypes: dtypes in which the ONNX Attention operator is taken; others get primitive operators.
        attention_widths: smallest and largest width of a head for which it is taken, or None.
        extra_domains: operator domains allowed beside the standard one.
        stored_weights: whether com.microsoft::FusedMatMul takes a weight as it is stored.
        rotary_embedding: whether the operator RotaryEmbedding is the faster way to rotate queries and keys.
        flat_heads: whether Attention takes heads side by side without losing speed.
        branches: whether If is taken, a condition around nodes of fixed sizes.
        cache_update: whether a step writes into its cache itself, by TensorScatter.
        query_blocks: (T, b) for every number of tokens T whose causal attention is computed in blocks of b queries.
    """

    name: str
    max_opset: int
    topk_limit: int | None = None
    whole_scores: bool = False
    scatter_reduction: bool = True
    attention_dtypes: frozenset[DType] = frozenset(DTYPES)
    attention_widths: tuple[int, int] | None = None
    extra_domains: frozenset[str] = frozenset()
    stored_weights: bool = False
    rotary_embedding: bool = False
    flat_heads: bool = False
    branches: bool = False
    cache_update: bool = False
    query_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """An ONNX file of one model and bucket. `target` is None for the portable graph.

    Of a decode graph the bucket's `seq` is how many tokens its cache holds.

    `query_blocks` has, for every number of tokens whose causal attention is computed in blocks, the queries of a block.
    """

    path: str
    model: ModelKind
    bucket: Bucket
    dtype: DType
    target: str | None
    k_by_layer: dict[Site, int] = field(hash=False)
    query_blocks: dict[int, int] = field(default_factory=dict, hash=False)
    outputs: Outputs = "logits"
    role: Role = "forward"

    def dialect(self, target: Dialect) -> Dialect:
        """The dialect of its target, with the choices that were made for this graph."""
        return replace(target, query_blocks=tuple(sorted(self.query_blocks.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine to build for a (model, bucket): a dtype and, ahead of time, a GPU architecture such as `sm89`."""

    dtype: DType
    arch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A built engine file. `weights` is the build folder's file that it reads at run time, None if it holds its own."""

    target: str
    model: ModelKind
    bucket: Bucket
    dtype: DType
    path: str
    weights: str | None = None
    arch: str | None = None
    role: Role = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """What a target can do on this machine; `reason` says what is missing, or what was found.

    `arch` is the GPU's architecture, for targets whose engines are built ahead of time for a named one.
    """

    builds: bool
    runs: bool
    reason: str
    arch: str | None = None

    def refusal(self, engines: Iterable[Engine]) -> str:
        """Why none of a target's engines runs here; empty when one does."""
        if not self.runs:
            return self.reason
        archs = list(dict.fromkeys(engine.arch for engine in engines))
        if any(arch in (None, self.arch) for arch in archs):
            return ""
        return f"built for {', '.join(map(str, archs))}, and the GPU here is {self.arch}"

    def can_run(self, engine: Engine) -> bool:
        """Whether an engine of this target runs here."""
        return not self.refusal([engine])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One step of an engine's run, as the engine's own profiler names it.

    Attributes:
        name: of the kernel; for an engine that runs a graph the name of the node, or one made from it.
        operator: what it computes, in the engine's words.
        weights: state_dict names of the weights that it is known to read.
        ms: milliseconds that it took in the run in which it was fastest: neighbours on the machine can only add to it.
    """

    name: str
    operator: str
    weights: tuple[str, ...] = ()
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time of a run goes: the kernels of one run in the words of `profiler`, over `runs` runs."""

    profiler: str
    runs: int
    kernels: tuple[Kernel, ...]


def primary_output(names: Iterable[str]) -> str:
    """Which of an engine's outputs is the model's own, and not a routing decision.

    Raises:
        StopIteration: none of them.
    """
    return next(name for name in names if name in PRIMARY.values())


def engine_stem(model: ModelKind, bucket: Bucket, dtype: DType, arch: str | None = None, role: Role = "forward") -> str:
    """File name of an engine without its suffix: mod-b1s512-float16-sm89, or mod-decode-b1s512-float32."""
    return "-".join([model, *([] if role == "forward" else [role]), bucket.name, dtype, *([arch] if arch else [])])
