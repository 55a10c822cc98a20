"""Frozen values that pass between stages. Paths are relative to the build folder, so a folder can be moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol, TypeVar, get_args

from pydantic import BeforeValidator

ModelKind = Literal["mod", "dense"]
KINDS: tuple[ModelKind, ...] = ("mod", "dense")
Role = Literal["forward", "prefill", "decode"]
"""What a graph does: `forward` reads whole rows, `prefill` reads a prompt and returns a cache, `decode` reads one token
of each row."""


def writes_text(role: Role) -> bool:
    """Whether a role is one of those that write text together; the other one reads whole rows."""
    return role != "forward"


Site = int | str
"""A routing site: the number of a routed layer, or a name such as "3.mlp" or "3.expert0" where a layer has several."""
Outputs = Literal["logits", "last", "none"]
"""What a model returns: logits of every token, of each row's last real token, or hidden states and no logits."""
BY_POSITION, BY_SCORE = "by_position", "by_score"
FOUND = (BY_POSITION, BY_SCORE)
"""Rules of a routing site that was found and not marked: the order of its selected tokens, which stays as it is."""
PRIMARY: dict[Outputs, str] = {"logits": "logits", "last": "last_logits", "none": "hidden"}
"""The name of what a model of token ids returns: `logits` (B, S, V), `last_logits` (B, V), `hidden` (B, S, D)."""
TOKEN_INPUTS = ("input_ids", "lengths")
"""The names of what it reads: int64 (B, S), and int64 (B,), the real tokens of each row."""
FloatDType = Literal["float32", "float16", "bfloat16"]
QuantizedDType = Literal["int8", "int4"]
DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
"""The dtype of stored weights. With int8 and int4, weights that are too sensitive and everything else are float32."""
DTYPES: tuple[DType, ...] = get_args(DType)
FLOAT_DTYPES: tuple[FloatDType, ...] = get_args(FloatDType)
QUANTIZED: tuple[QuantizedDType, ...] = get_args(QuantizedDType)


FLOAT_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

ROUTED = "routed_"


def routed_output(site: Site) -> str:
    """The name of the graph output that says which positions a site selected."""
    return f"{ROUTED}{site}"


def is_expert(site: Site) -> bool:
    """Whether the site is an expert, and not a block or a part of a block that the other tokens skip."""
    return ".expert" in str(site)


def site_from_text(text: Site) -> Site:
    """The site with this name in JSON, whose keys are always text, or in the name of an output."""
    return int(text) if isinstance(text, str) and text.isdecimal() else text


SiteKey = Annotated[Site, BeforeValidator(site_from_text)]
"""A site as a key of a mapping that is stored as JSON."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One static shape: `batch` rows of `seq` tokens. Every graph and engine belongs to exactly one."""

    batch: int
    seq: int

    @property
    def name(self) -> str:
        """As in file names: b1s512."""
        return f"b{self.batch}s{self.seq}"

    @classmethod
    def named(cls, name: str) -> Bucket:
        """The bucket of this name."""
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
        """As in file names: mod-b1s512-float16, or mod-decode-b1s512-float32."""
        return f"{_stem(self.model, self.role, self.bucket)}-{self.dtype}"

    def __str__(self) -> str:
        role = f" {self.role}" if self.writes_text else ""
        return f"{self.target}{role} {self.bucket.name} {self.dtype}"

    @property
    def writes_text(self) -> bool:
        """Whether the engine is one of those that write text together."""
        return writes_text(self.role)

    def of(self, model: ModelKind) -> Setting:
        """The same setting of the other model."""
        return replace(self, model=model)


class HasSetting(Protocol):
    """An engine, or a result about one."""

    @property
    def setting(self) -> Setting: ...


About = TypeVar("About", bound=HasSetting)


def by_setting(items: Iterable[About]) -> dict[Setting, dict[ModelKind, About]]:
    """What is about the MoD model, beside what is about its dense baseline where there is anything.

    Returns:
        Setting of the MoD model -> model -> item, in the order of the items of the MoD model.
    """
    found = {item.setting: item for item in items}
    return {
        setting: {kind: found[setting.of(kind)] for kind in KINDS if setting.of(kind) in found}
        for setting in found
        if setting.model == "mod"
    }


def pairs_of(items: Iterable[About]) -> dict[Setting, dict[ModelKind, About]]:
    """The same of the settings that have both."""
    return {setting: both for setting, both in by_setting(items).items() if len(both) == len(KINDS)}


def _stem(model: ModelKind, role: Role, bucket: Bucket) -> str:
    return "-".join([model, *([role] if writes_text(role) else []), bucket.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What the graph of a target may contain. Passes use it to decide what to rewrite, `check_dialect` what to refuse.

    Attributes:
        name: as in messages.
        max_opset: highest ai.onnx opset that the target's parser supports.
        topk_limit: largest K of a TopK, or None.
        topk_saving: positions of an axis that a TopK in groups must spare to pay, or None where it never does.
        scatter_reduction: whether ScatterND and ScatterElements may reduce.
        whole_scores: whether attention holds all its (B, H, T, T) scores in this machine's memory at once.
        attention_dtypes: dtypes in which the ONNX Attention operator is supported; others get primitive operators.
        attention_widths: smallest and largest width of a head for which it is supported, or None.
        extra_domains: operator domains that are allowed in addition to the standard one.
        stored_weights: whether com.microsoft::FusedMatMul can read a weight in its stored layout.
        rotary_embedding: whether the operator RotaryEmbedding is the faster way to rotate queries and keys.
        flat_heads: whether Attention can read heads side by side, (B, T, H * E), without losing speed.
        branches: whether If is supported, a condition around nodes of fixed shapes.
        cache_update: whether a step updates its cache itself, with TensorScatter.
        query_blocks: (T, b) for every number of tokens T whose causal attention is computed in blocks of b queries.
        query_block: b of all of them, where it need not be measured.
        late_masks: whether masks are computed when the graph runs: an engine would store them as constants.
        grouped_rows: whether queries that share keys are multiplied as rows of one matrix.
        one_type_norms: whether RMSNormalization computes in float32 whatever its `stash_type`, and is one kernel only
            where that is the type of its input.
        cached_attention: whether com.microsoft::GroupQueryAttention attends to a cache and writes it in place.
        rounds_activations: whether the engine itself rounds what a weight of whole numbers is multiplied with, a part
            of one token at a time; the graph then says only what the weight's numbers mean.
        quantized_beside: dtype of everything else in its graphs of whole numbers.
    """

    name: str
    max_opset: int
    topk_limit: int | None = None
    topk_saving: int | None = None
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
    query_block: int | None = None
    late_masks: bool = False
    grouped_rows: bool = False
    one_type_norms: bool = False
    cached_attention: bool = False
    rounds_activations: bool = False
    quantized_beside: FloatDType = "float32"

    def floats(self, dtype: DType) -> FloatDType:
        """The dtype of products, and of what is between them, in a graph of `dtype`."""
        return self.quantized_beside if dtype == "int8" or dtype == "int4" else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """An ONNX file of one model, role and bucket.

    Attributes:
        path: relative to the build folder.
        model: `mod` or `dense`.
        role: what it does.
        bucket: its shape. Of a decode graph `seq` is the number of tokens that its cache holds.
        dtype: of its weights and matrix products.
        target: the target whose dialect it is in; None for the portable graph.
        k_by_layer: routing site -> slots, as captured; empty in a plan, before that.
        inputs: name of each of the module's arguments -> its NumPy dtype and shape, in order; as captured likewise.
        results: name of each of the model's own outputs -> its shape, in order; likewise.
        query_blocks: number of tokens whose causal attention is computed in blocks -> queries of a block.
        outputs: what a model of token ids returns.
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
    outputs: Outputs = "logits"
    role: Role = "forward"

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads integers (B, S), and its first result is that of each token, (B, S, ...), or of the last."""
        rows = (self.bucket.batch, self.bucket.seq)
        ids = any(dtype.startswith("int") and shape == rows for dtype, shape in self.inputs.values())
        first = next(iter(self.results.values()), ())
        return ids and (self.outputs == "last" or first[:2] == rows)

    @property
    def writes_text(self) -> bool:
        """Whether it is one of the graphs that write text together."""
        return writes_text(self.role)

    @property
    def stem(self) -> str:
        """As in file names: mod-b1s512, or mod-decode-b1s512."""
        return _stem(self.model, self.role, self.bucket)

    def dialect(self, target: Dialect) -> Dialect:
        """The dialect of its target, with what holds for this graph alone."""
        blocks = tuple(sorted(self.query_blocks.items()))
        return replace(target, query_blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine to build from a graph: a dtype and, if built ahead of time, a GPU architecture such as `sm89`."""

    dtype: DType
    arch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A built engine file. `weights` is the weights file that it reads at run time, None if it contains its weights."""

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
        """Whether it is one of the engines that write text together."""
        return writes_text(self.role)

    @property
    def setting(self) -> Setting:
        """Its setting."""
        return Setting(target=self.target, dtype=self.dtype, model=self.model, role=self.role, bucket=self.bucket)

    @property
    def stem(self) -> str:
        """File name without its suffix: mod-b1s512-float16-sm89."""
        return self.setting.name if self.arch is None else f"{self.setting.name}-{self.arch}"

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that it needs."""
        return (self.path,) if self.weights is None else (self.path, self.weights)


def graph_of(engine: Engine, graphs: Sequence[Graph]) -> Graph | None:
    """The graph that an engine was built from: that of its target and dtype, or the portable one; None if absent."""
    same = [one for one in graphs if (one.model, one.role, one.bucket) == (engine.model, engine.role, engine.bucket)]
    own = (one for one in same if (one.target, one.dtype) == (engine.target, engine.dtype))
    return next(own, next((one for one in same if one.target is None), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """What a target can do on this machine; `reason` says what is missing, or what was found.

    `arch` is the architecture of the GPU here, for targets whose engines are built ahead of time for a named one.
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
        name: of the kernel; for an engine that runs a graph, the name of the node, or a name derived from it.
        operator: what it computes, as the engine names it.
        weights: state_dict names of the weights that it is known to read.
        ms: milliseconds in its fastest run, because other load on the machine can only make it slower.
    """

    name: str
    operator: str
    weights: tuple[str, ...] = ()
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The time of each kernel of a run, as named by `profiler`, from `runs` runs."""

    profiler: str
    runs: int
    kernels: tuple[Kernel, ...]


def primary_output(names: Iterable[str]) -> str:
    """The first of an engine's outputs that is the model's own, and not the selection of a routing site.

    Raises:
        StopIteration: there is none.
    """
    return next(name for name in names if not name.startswith(ROUTED))
