"""Frozen values that pass between stages. Paths are relative to the build folder, so a folder can be moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, get_args

from pydantic import BeforeValidator

ModelKind = Literal["mod", "dense"]
KINDS: tuple[ModelKind, ...] = ("mod", "dense")
Role = Literal["forward", "prefill", "decode"]
"""The task of a graph: `forward` reads whole rows, `prefill` reads a part of a prompt, `decode` reads one
token of each row."""


def writes_text(role: Role) -> bool:
    """Whether the role is prefill or decode, which write text together. Forward reads whole rows."""
    return role != "forward"


Site = int | str
"""A routing site: the number of a routed layer, or a name such as "3.mlp" or "3.expert0" where a layer has several."""
Outputs = Literal["logits", "last", "none"]
"""The outputs of a model: logits of every token, logits of each row's last real token, or hidden states."""
BY_POSITION, BY_SCORE = "by_position", "by_score"
FOUND = (BY_POSITION, BY_SCORE)
"""Rules of a routing site that was found in the program and not marked by the model. Each rule is the order of the
selected tokens in the program, which engines keep.
"""
PRIMARY: dict[Outputs, str] = {"logits": "logits", "last": "last_logits", "none": "hidden"}
"""Name of the output of a model of token ids: `logits` (B, S, V), `last_logits` (B, V), or `hidden` (B, S, D)."""
TOKEN_INPUTS = ("input_ids", "lengths")
"""Names of the inputs of a model of token ids: ids, int64 (B, S), and numbers of real tokens, int64 (B,)."""
FloatDType = Literal["float32", "float16", "bfloat16"]
QuantizedDType = Literal["int8", "int4"]
DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
"""The dtype of stored weights. With int8 and int4, weights that are too sensitive and everything else are float32."""
DTYPES: tuple[DType, ...] = get_args(DType)
FLOAT_DTYPES: tuple[FloatDType, ...] = get_args(FloatDType)
QUANTIZED: tuple[QuantizedDType, ...] = get_args(QuantizedDType)


TextKind = Literal["named", "held_out", "documentation", "random"]
"""Where a text comes from that a model is judged or timed on, see `DecodeRow.text`."""
FLOAT_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

IDLE, VACANT = -1, -2
"""The positions of rows of a step that have no token: one that may hold a text, and one that holds nothing. In layers
that run every token, some engines read the whole cache of an idle row, and a single slot of a vacant one."""
ROUTED = "routed_"


def routed_output(site: Site) -> str:
    """Returns the name of the graph output that holds the positions that a site selected."""
    return f"{ROUTED}{site}"


def is_expert(site: Site) -> bool:
    """Whether the site is an expert. Other sites are blocks or parts of blocks that skipped tokens bypass."""
    return ".expert" in str(site)


def site_from_text(text: Site) -> Site:
    """Returns the site with this name from JSON, whose keys are always text, or from the name of an output."""
    return int(text) if isinstance(text, str) and text.isdecimal() else text


SiteKey = Annotated[Site, BeforeValidator(site_from_text)]
"""A site as a key of a mapping that is stored as JSON."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One static shape: `batch` rows of `seq` tokens. Every graph and engine has exactly one."""

    batch: int
    seq: int

    @property
    def name(self) -> str:
        """Name as in file names: b1s512."""
        return f"b{self.batch}s{self.seq}"

    @classmethod
    def named(cls, name: str) -> Bucket:
        """Returns the bucket with this name."""
        batch, seq = name.removeprefix("b").split("s")
        return cls(int(batch), int(seq))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Target, dtype, model, role and bucket: the key of engines and of results."""

    target: str
    dtype: DType
    model: ModelKind
    role: Role
    bucket: Bucket

    @property
    def name(self) -> str:
        """Name as in file names: mod-b1s512-float16, or mod-decode-b1s512-float32."""
        return f"{_stem(self.model, self.role, self.bucket)}-{self.dtype}"

    def __str__(self) -> str:
        role = f" {self.role}" if self.writes_text else ""
        return f"{self.target}{role} {self.bucket.name} {self.dtype}"

    @property
    def writes_text(self) -> bool:
        """Whether the engine writes text (`writes_text`)."""
        return writes_text(self.role)

    def of(self, model: ModelKind) -> Setting:
        """Returns the same setting for `model`."""
        return replace(self, model=model)


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Stands in place of something that a model or folder lacks, with the reason as a sentence for the user."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class HasSetting(Protocol):
    """An engine, or a result about one."""

    @property
    def setting(self) -> Setting: ...


About = TypeVar("About", bound=HasSetting)
Item = TypeVar("Item")


def by_setting(items: Iterable[About]) -> dict[Setting, dict[ModelKind, About]]:
    """Groups items of the MoD model with those of its dense baseline in the same setting, if there are any.

    Returns:
        Setting of the MoD model -> model -> item, in the order of the items of the MoD model.
    """
    items_by_setting = {item.setting: item for item in items}
    return {
        setting: {kind: items_by_setting[setting.of(kind)] for kind in KINDS if setting.of(kind) in items_by_setting}
        for setting in items_by_setting
        if setting.model == "mod"
    }


def pairs_of(items: Iterable[About]) -> dict[Setting, dict[ModelKind, About]]:
    """Like `by_setting`, but only settings that have both models."""
    return {setting: both for setting, both in by_setting(items).items() if len(both) == len(KINDS)}


def _stem(model: ModelKind, role: Role, bucket: Bucket) -> str:
    return "-".join([model, *([role] if writes_text(role) else []), bucket.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """The shapes of queries for which a target has kernels of the ONNX Attention operator.

    Attributes:
        narrowest: smallest width of a head.
        widest: largest width of a head.
        fewest_heads: smallest number of query heads.
        fewest_vectors: smallest number of query vectors, over all rows and heads, if each row has one query.
    """

    narrowest: int
    widest: int
    fewest_heads: int = 1
    fewest_vectors: int = 1

    def problem(self, shape: Sequence[int]) -> str:
        """Returns why there is no kernel for queries of shape (batch, heads, queries, width); empty if there is one.

        Nothing is known of shapes with other numbers of dimensions.
        """
        if len(shape) != 4:
            return ""
        batch, heads, queries, width = shape
        if not self.narrowest <= width <= self.widest:
            return f"heads of width {width}, allowed is {self.narrowest} to {self.widest}"
        if heads < self.fewest_heads:
            return f"{heads} query head{'s' if heads > 1 else ''}, allowed are {self.fewest_heads} or more"
        if queries == 1 and batch * heads < self.fewest_vectors:
            return f"one query in each of {batch} x {heads} heads, allowed are {self.fewest_vectors} heads or more"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """The limits of a target's graph. Rewrites use them to decide what to rewrite, `check_limits` to decide what to
    refuse.

    Attributes:
        name: name in messages.
        max_opset: highest ai.onnx opset that the target's parser supports.
        topk_limit: largest K of a TopK, or None.
        topk_saving: smallest number of positions of an axis that a TopK in groups must save to be faster; None if it
            never is.
        scatter_reduction: whether ScatterND and ScatterElements may reduce.
        whole_scores: whether attention holds all its (B, H, T, T) scores in this machine's memory at once. The target's
            options then have `query_block`, which limits how many.
        attention_dtypes: dtypes in which the ONNX Attention operator is supported; others get primitive operators.
        attention_kernels: shapes for which Attention is supported; None for all.
        extra_domains: operator domains that are allowed in addition to the standard one.
        stored_weights: whether com.microsoft::FusedMatMul can read a weight in its stored layout.
        rotary_embedding: whether the operator RotaryEmbedding is the faster way to rotate queries and keys.
        flat_heads: whether Attention can read heads side by side, (B, T, H * E), without losing speed.
        branches: whether If is supported, as a condition around nodes of fixed shapes.
        cache_update: whether a decode graph updates its cache itself, with TensorScatter.
        query_blocks: (T, b) for every number of tokens T whose causal attention is computed in blocks of b queries.
        query_blocks_from: (T, b): b from this number of tokens on, if b need not be measured. The first T is 0.
        late_masks: whether masks are computed when the graph runs; otherwise the engine would store them as constants.
        grouped_rows: whether queries that share keys are multiplied as rows of one matrix.
        one_type_norms: whether RMSNormalization computes in float32 whatever its `stash_type`, and is a single kernel
            only if `stash_type` is the type of its input.
        cached_attention: whether com.microsoft::GroupQueryAttention attends to a cache and writes it in place.
        scaled_queries: whether that operator is faster for a step if the queries are scaled in place of the scores.
        cache_in_use: whether conditions choose how much of its cache a prefill attends to.
        gathered_rows: whether the routed parts of a step compute only the rows that run, whose number is known when
            the graph runs.
        rounds_activations: whether the engine itself rounds the activations that integer weights are multiplied with,
            in groups within a token. The graph then only dequantizes the weights.
        quantized_beside: dtype of everything except the weights in graphs with integer weights.
    """

    name: str
    max_opset: int
    topk_limit: int | None = None
    topk_saving: int | None = None
    whole_scores: bool = False
    scatter_reduction: bool = True
    attention_dtypes: frozenset[DType] = frozenset(DTYPES)
    attention_kernels: AttentionKernels | None = None
    extra_domains: frozenset[str] = frozenset()
    stored_weights: bool = False
    rotary_embedding: bool = False
    flat_heads: bool = False
    branches: bool = False
    cache_update: bool = False
    query_blocks: tuple[tuple[int, int], ...] = ()
    query_blocks_from: tuple[tuple[int, int], ...] = ()
    late_masks: bool = False
    grouped_rows: bool = False
    one_type_norms: bool = False
    cached_attention: bool = False
    scaled_queries: bool = False
    cache_in_use: bool = False
    gathered_rows: bool = False
    rounds_activations: bool = False
    quantized_beside: FloatDType = "float32"

    def floats(self, dtype: DType) -> FloatDType:
        """Returns the dtype of products, and of the values between them, in a graph of `dtype`."""
        return self.quantized_beside if dtype == "int8" or dtype == "int4" else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """An ONNX file of one model, role and bucket.

    Attributes:
        path: relative to the build folder.
        model: `mod` or `dense`.
        role: task of the graph.
        bucket: shape; for a decode graph, `seq` is the number of tokens that its cache holds.
        dtype: dtype of the weights and matrix products.
        target: target that the graph was rewritten for; None for the portable graph.
        k_by_layer: routing site -> number of slots; empty until the model is captured.
        inputs: argument of the module -> its NumPy dtype and shape, in order; empty until the model is captured.
        results: output of the model itself -> its shape, in order; empty until the model is captured.
        query_blocks: number of tokens whose causal attention is computed in blocks -> queries of a block.
        limits_of_machine: limits of the machine that the graph was made for, where they are not those of its target.
        outputs: outputs of a model of token ids.
    """

    path: str
    model: ModelKind
    bucket: Bucket
    dtype: DType
    target: str | None
    k_by_layer: dict[SiteKey, int] = field(default_factory=dict, hash=False)
    inputs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, hash=False)
    results: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    query_blocks: dict[int, int] = field(default_factory=dict, hash=False)
    limits_of_machine: dict[str, Any] = field(default_factory=dict, hash=False)
    outputs: Outputs = "logits"
    role: Role = "forward"

    @property
    def reads_tokens(self) -> bool:
        """Whether the graph reads integers (B, S), and its first result is for each token, (B, S, ...), or the last."""
        rows = (self.bucket.batch, self.bucket.seq)
        ids = any(dtype.startswith("int") and shape == rows for dtype, shape in self.inputs.values())
        first = next(iter(self.results.values()), ())
        return ids and (self.outputs == "last" or first[:2] == rows)

    @property
    def writes_text(self) -> bool:
        """Whether the graph writes text (`writes_text`)."""
        return writes_text(self.role)

    @property
    def stem(self) -> str:
        """Name as in file names: mod-b1s512, or mod-decode-b1s512."""
        return _stem(self.model, self.role, self.bucket)

    def limits(self, target: TargetLimits) -> TargetLimits:
        """Returns the limits of its target on the machine that the graph was made for, with its query blocks."""
        return replace(target, query_blocks=tuple(sorted(self.query_blocks.items())), **self.limits_of_machine)


def weights_dtypes(dtype: DType) -> tuple[DType, ...]:
    """Returns the dtypes of the weights files that a graph of this dtype reads: some tensors of 16-bit graphs stay
    float32, and a quantized file holds all that it needs.
    """
    return (dtype,) if dtype in QUANTIZED or dtype == "float32" else (dtype, "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine to build from a graph: a dtype and, if built ahead of time, a GPU architecture such as `sm89`."""

    dtype: DType
    arch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A built engine file. `weights` is the weights file that it reads at run time; None if it contains its weights."""

    target: str
    model: ModelKind
    bucket: Bucket
    dtype: DType
    path: str
    weights: str | None = None
    arch: str | None = None
    role: Role = "forward"

    @property
    def writes_text(self) -> bool:
        """Whether the engine writes text (`writes_text`)."""
        return writes_text(self.role)

    @property
    def setting(self) -> Setting:
        """Setting of the engine."""
        return Setting(target=self.target, dtype=self.dtype, model=self.model, role=self.role, bucket=self.bucket)

    @property
    def stem(self) -> str:
        """File name without its suffix: mod-b1s512-float16-sm89."""
        return self.setting.name if self.arch is None else f"{self.setting.name}-{self.arch}"

    @property
    def weights_files(self) -> tuple[str, ...]:
        """Every weights file that the engine reads at run time, that of its own dtype first."""
        if self.weights is None:
            return ()
        others = weights_dtypes(self.dtype)[1:] if self.weights.endswith(f"{self.dtype}.data") else ()
        return (self.weights, *(self.weights.removesuffix(f"{self.dtype}.data") + f"{dtype}.data" for dtype in others))

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that the engine needs."""
        return (self.path, *self.weights_files)


class Attributes(TypedDict, total=False):
    """Attributes by which graphs, engines and rows are chosen."""

    model: ModelKind
    role: Role
    target: str | None
    dtype: DType
    bucket: Bucket


def having(items: Iterable[Item], **values: Unpack[Attributes]) -> list[Item]:
    """Returns those graphs, engines or rows whose attributes have these values, in their order."""
    return [item for item in items if all(getattr(item, name) == value for name, value in values.items())]


def graph_of(engine: Engine, graphs: Sequence[Graph]) -> Graph | None:
    """Returns the graph that an engine was built from: the graph of its target and dtype, or else the portable graph;
    None if there is neither.
    """
    same_shape = having(graphs, model=engine.model, role=engine.role, bucket=engine.bucket)
    rewritten = having(same_shape, target=engine.target, dtype=engine.dtype)
    return next(iter(rewritten or having(same_shape, target=None)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a target can build and run on this machine; `reason` names what is missing, or else what is available.

    `arch` is the architecture of this machine's GPU, for targets whose engines are built ahead of time for a named one.
    """

    builds: bool
    runs: bool
    reason: str
    arch: str | None = None

    def refusal(self, engines: Iterable[Engine]) -> str:
        """Says why none of these engines of the target runs here; empty if one does."""
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
        name: name of the kernel. For an engine that runs a graph, the name of the node, or a name derived from it.
        operator: what the kernel computes, as the engine names it.
        weights: state_dict names of the weights that the kernel is known to read.
        ms: milliseconds in its fastest run, because other load on the machine can only make it slower.
    """

    name: str
    operator: str
    weights: tuple[str, ...] = ()
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Milliseconds of each kernel of a run, by `profiler`, from `runs` runs."""

    profiler: str
    runs: int
    kernels: tuple[Kernel, ...]


def primary_output(names: Iterable[str]) -> str:
    """Returns the first output of an engine that is the model's own, and not the selection of a routing site.

    Raises:
        StopIteration: there is none.
    """
    return next(name for name in names if not name.startswith(ROUTED))
