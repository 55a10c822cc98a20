"""The configuration: one TOML file becomes one tree of frozen values, and all problems are reported together.

Gates of parity are in export_configs/, other defaults here; docs/evidence.md has the reasons for the numbers of
default.toml. A limit that follows from statistics is a constant beside its check.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from mod_export.errors import ConfigError
from mod_export.types import Bucket, DType, FloatDType, Outputs

SHOWN_CHARACTERS = 60
MOST_LOGITS_BYTES = 2**24
"""With `outputs = "auto"`, the graphs return the logits of every token if a bucket has at most this many bytes of
float32 logits."""
LONGEST_WINDOW, PARTS_OF_PROMPTS = 1024, (32, 128)
"""Default number of tokens of the longest window and of a short prompt."""
EXPECTED = {
    "model_type": "expected a table",
    "tuple_type": "expected an array",
    "too_long": "expected fewer items",
}
"""Replacements for messages of pydantic that name Python types."""

RENAMED = {"noise": "rounding_error", "noise_rms": "rounding_error_rms", "places": "slots"}
"""Keys of earlier configurations -> their present names."""

T = TypeVar("T")


def _each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    # An empty list would build nothing, and a repeated item would count twice.
    if not items or len(set(items)) < len(items):
        raise PydanticCustomError("each_once", "expected one item or more, each once")
    return items


Names = Annotated[tuple[T, ...], AfterValidator(_each_once)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Samples = Annotated[int, Field(ge=5, le=100_000)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Section(BaseModel):
    # Strict, because TOML has types: a quoted number, or 1 instead of true, is a mistake.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )


class OrtCpuOptions(_Section):
    """ONNX Runtime on the CPU."""

    dtypes: Names[Literal["float32", "int8", "int4"]] = ("float32",)
    """One engine each. For whole rows, int8 is faster and int4 is smaller. Text is written faster in both, because each
    token reads every weight. Neither is served unless it meets its gates. float16 and bfloat16 would not be faster on a
    CPU, because ONNX Runtime casts them to float32 and back there."""
    query_block: Literal["measured"] | Annotated[int, Field(ge=0)] = "measured"
    """Number of queries that causal attention computes at a time, so that scores hidden by the mask are not computed; 0
    computes all queries at once. `measured` measures which number is fastest on this machine."""


class OpenVinoOptions(_Section):
    """OpenVINO on the CPU."""

    dtypes: Names[Literal["float32", "bfloat16", "int8", "int4"]] = ("float32",)
    """One engine each. bfloat16 is faster, int8 faster still, and int4 smaller. bfloat16 is only built on a processor
    with instructions for it. With int8 and int4, everything but the weights is bfloat16 on such a processor, else
    float32."""


class OrtCudaOptions(_Section):
    """ONNX Runtime's CUDA execution provider."""

    dtypes: Names[Literal["float32", "float16"]] = ("float32", "float16")
    """One engine each."""
    device: Annotated[int, Field(ge=0)] = 0
    """Number of the CUDA device."""
    cuda_graph: bool = True
    """Whether a run is recorded once as a CUDA graph and replayed after that."""


class InductorOptions(_Section):
    """torch.compile, packaged ahead of time by AOTInductor for this machine's CPU."""

    dtypes: Names[Literal["float32", "bfloat16"]] = ("float32",)
    """One package each. bfloat16 needs a processor with bfloat16 instructions."""


class InductorCudaOptions(_Section):
    """torch.compile, packaged ahead of time by AOTInductor for this machine's NVIDIA GPU."""

    dtypes: Names[FloatDType] = ("bfloat16", "float32")
    """One package each. In 16 bits, matrix products and attention have the narrow dtype; everything between them, and
    the routers, is float32."""
    device: Annotated[int, Field(ge=0)] = 0
    """Number of the CUDA device."""
    cuda_graph: bool = True
    """Whether a run is recorded once as a CUDA graph and replayed after that."""


class TensorRTOptions(_Section):
    """TensorRT, built on the GPU that runs it."""

    dtypes: Names[FloatDType] = ("float16", "bfloat16", "float32")
    """One plan each."""
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    """How long TensorRT's builder searches for fast kernels: 0 is the shortest build, 5 the longest."""
    workspace_mib: Annotated[int, Field(ge=1, le=2**24)] = 4096
    """GPU memory in MiB that one kernel may use for intermediate results."""


class TensorRTRTXOptions(_Section):
    """TensorRT-RTX, built ahead of time for named GPU architectures; no GPU is needed to build."""

    dtypes: Names[FloatDType] = ("float16", "bfloat16", "float32")
    """One plan each."""
    architectures: Names[str] = ("sm89", "sm120")
    """GPU architectures, named as NVIDIA writes compute capabilities, for example sm86. One plan each."""


class TargetOptions(_Section):
    """Options of each target, under the target's name."""

    model_config = ConfigDict(alias_generator=lambda n: n.replace("_", "-"))

    ort_cpu: OrtCpuOptions = OrtCpuOptions()
    openvino: OpenVinoOptions = OpenVinoOptions()
    ort_cuda: OrtCudaOptions = OrtCudaOptions()
    inductor: InductorOptions = InductorOptions()
    inductor_cuda: InductorCudaOptions = InductorCudaOptions()
    tensorrt: TensorRTOptions = TensorRTOptions()
    tensorrt_rtx: TensorRTRTXOptions = TensorRTRTXOptions()

    def of(self, target: str) -> Any:
        """Returns the section of one target. Every section has `dtypes`."""
        return getattr(self, target.replace("-", "_"))


class ParityGate(_Section):
    """Limits that an engine or graph of one dtype must meet, compared with eager float32. Reasons: docs/evidence.md.

    The rounding error is measured for each model: eager float32 against the same model in float64, on the same inputs
    and with the same selected tokens. The gates `rounding_error` and `rounding_error_rms` are multiples of it, scaled
    to the unit roundoff of the dtype. `max_abs` replaces them if the model is too large for float64 on this machine.
    """

    rounding_error: Tolerance
    """Largest error of a logit and of a router score, as a multiple of the largest rounding error of the reference."""
    rounding_error_rms: Tolerance
    """Largest root mean square of the errors of the logits, as a multiple of the root mean square of the rounding
    errors of the reference."""
    max_abs: Tolerance
    """Largest absolute error of the logits of any real token, given the same selected tokens."""
    near_tie: Tolerance
    """Largest distance of a score from the edge of the selection at which a token that only one side selected can be a
    near-tie, however large the rounding error. The edge is the k-th score, or 0. The distance is a share of the largest
    root mean square of a row's scores in the layer. Beyond it, the difference is a fault."""
    judged_rows: Share
    """Smallest share of the rows of outputs that must be judged. Other rows are left out because rounding decides a
    discrete choice there."""
    next_token_agreement: Share
    """Smallest share of positions whose most probable next token is the same, or equally probable within the rounding
    error."""
    max_kl: Tolerance
    """Largest mean Kullback-Leibler divergence of the next-token distribution from that of the reference, in nats, on
    any input."""
    max_perplexity_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Largest ratio of the perplexity on text to that of the reference, or the inverse ratio if that is larger."""


class ParityOptions(_Section):
    """Gates of each dtype, and numbers of inputs. The values are in export_configs/default.toml."""

    float32: ParityGate
    float16: ParityGate
    bfloat16: ParityGate
    int8: ParityGate
    int4: ParityGate
    batches_per_kind: Count = 1
    """Number of batches of each kind of input (text, random, padded, sample, ties, near_ties) for every bucket."""
    text_batches: Count = 4
    """Smallest number of batches of held-out text, over which perplexity is averaged."""
    suffixes: Annotated[int, Field(ge=1, le=1000)] = 4
    """Number of changed endings of a text that the causality test tries."""

    def gate(self, dtype: DType) -> ParityGate:
        """Returns the gate of one dtype."""
        gate: ParityGate = getattr(self, dtype)
        return gate


class LatencyOptions(_Section):
    """How latency is sampled, and the speed-up that the build must reach."""

    samples: Samples = 40
    """Interleaved samples of each model before the comparison is first looked at, rounded up to whole blocks of rounds.
    Engines that are too slow for `max_seconds` get fewer, but at least 16."""
    max_samples: Samples = 640
    """Largest number of samples of each model. The number of samples is doubled until the comparison is settled. If
    this is less than `samples`, then `samples` counts."""
    max_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 15.0
    """Seconds for warm-up and sampling of one comparison, a third of them for the warm-up. After that, only the minimum
    is run: 4 rounds of warm-up, 16 samples of each model, and 2 runs of each timed step."""
    warmup: Count = 5
    """Rounds in one window of the warm-up. The warm-up ends when two consecutive windows have the same median."""
    max_warmup: Count = 50
    """Largest number of warm-up rounds if the latency does not become stable."""
    warmup_tolerance: Share = 0.05
    """Largest difference at which two medians count as the same, as a share of the earlier one."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 1
    """Threads of every CPU engine, the same for both models; 0: the library chooses. The default is one thread, because
    its results can be compared between machines and runs."""
    bootstrap: Annotated[int, Field(ge=100, le=100_000)] = 2000
    """Number of bootstrap resamples for the intervals of the ratios."""
    resolution: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.02
    """Smallest speed-up that counts, as a share. If the interval ends below 1 + resolution and does not lie above 1,
    the verdict is `not faster`."""
    precision: Share = 0.1
    """Sampling continues, within `max_seconds` and `max_samples`, while the interval of the ratio is wider than this
    share of the ratio. For a model without a dense baseline, the interval of its median counts."""
    disturbance: Share = 0.1
    """Shares above this one are flagged: outliers among the samples, CPU time that other processes used, and changes of
    the CPU's clock."""
    min_speedup: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Gate: for every target that runs here, the whole interval of the ratio dense / MoD must reach this at the largest
    bucket. 0 is no gate. Without a dense baseline there is no gate, and a build that sets one in its configuration,
    even to the default, is refused."""


class GenerationOptions(_Section):
    """Options of the graphs and engines that write text token by token, for models that can decide about one token at a
    time.
    """

    build: Literal["auto", "always", "never"] = "auto"
    """`auto` builds them for every model that can generate, `always` refuses a model that cannot, `never` builds
    none."""
    targets: Names[Literal["ort-cpu", "openvino", "tensorrt", "tensorrt-rtx"]] = ("ort-cpu", "openvino")
    """Targets of the build that get engines for generation. `mod-export generate` runs those of ort-cpu and openvino.
    The TensorRT plans are for servers that keep the cache on the GPU."""
    window: Annotated[int, Field(ge=0)] = 0
    """Longest text in tokens, prompt and answer together. The slots of routed layers are computed for it. 0: the
    model's number of positions, at most 1,024."""
    slack: Annotated[int, Field(ge=0)] = 0
    """Additional slots of each routed layer, beyond its capacity in a row of `window` tokens."""
    prompts: tuple[Positive, ...] = ()
    """Numbers of tokens that prefill engines read at once; empty: 32 and 128. A prompt is read in parts: as much as
    possible by the engine that reads the most, and so on; the shortest one pads what is left."""
    caches: tuple[Positive, ...] = ()
    """Cache lengths of decode buckets, that is, the most tokens that a text can have in them; empty: the window."""
    batches: Names[Positive] = (1, 8)
    """Numbers of rows of decode buckets, that is, of texts that are written at once."""
    slots: Literal["all", "fair"] = "all"
    """How many rows of a step can run in a routed part. `all`: every row that wants a slot, so that texts do not depend
    on each other. `fair`: as many as run on average. If more rows want a slot, those with the largest scores run, and
    the others skip the part and count as overflow."""
    judged_tokens: Annotated[int, Field(ge=2, le=100_000)] = 256
    """Number of tokens of the texts on which decode engines are compared with the eager model; at most the length of
    the cache."""
    compared_texts: Annotated[int, Field(ge=0, le=1000)] = 4
    """Number of texts that engines and eager model both continue, to be compared; fewer for a large model; 0: none."""
    compared_tokens: Count = 48
    """Number of new tokens in each of these texts."""
    measured_tokens: Annotated[int, Field(ge=5, le=100_000)] = 48
    """Number of positions at which a step is timed, over all texts."""
    measured_texts: Count = 4
    """Least number of texts at whose positions steps are timed: texts differ in how many of their tokens run."""

    def window_of(self, max_positions: int) -> int:
        """Returns the window for a model with this many positions."""
        return self.window or min(max_positions, LONGEST_WINDOW)

    def prompt_lengths(self, window: int) -> tuple[int, ...]:
        """Returns the lengths of prefill buckets, ascending."""
        return tuple(sorted(set(self.prompts or (min(length, window) for length in PARTS_OF_PROMPTS))))

    def cache_lengths(self, window: int) -> tuple[int, ...]:
        """Returns the lengths of decode buckets, ascending."""
        return tuple(sorted(set(self.caches or (window,))))

    def cache_of_prompts(self, window: int) -> tuple[int, int]:
        """Returns how many tokens the cache of prefill engines has slots for, and how many slots behind them."""
        return self.cache_lengths(window)[-1], self.prompt_lengths(window)[-1]


class CostOptions(_Section):
    """How the cost model is compared with measurements."""

    profile_runs: Annotated[int, Field(ge=0, le=1000)] = 7
    """Number of runs of each engine under its own profiler, after one run that does not count; 0: no profile. The
    fastest run of each kernel counts."""
    measure_again: bool = False
    """Whether the roofline of this machine is measured again instead of being read from the cache."""


class BuildConfig(_Section):
    """Options of the whole build."""

    buckets: tuple[tuple[Positive, Positive], ...] = ()
    """(batch, sequence) pairs; empty: 1 x 128, and 1 x 512 or the longest power of two that the model allows."""
    outputs: Outputs | Literal["auto"] = "auto"
    """Outputs of the graphs: `logits` of every token; `last`, the logits of the last real token of each row, which
    sampling needs, so that the output head and, except for keys and values, the last layer are not computed for other
    tokens; or `none`, hidden states after the final norm.
    `auto` is `last` if the largest bucket would return more than 16 MiB of logits, for example 128 tokens with a
    vocabulary of 49,152; otherwise `logits`."""
    targets: tuple[str, ...] = ()
    """Target names as in `mod-export targets`; empty: every target that can build on this machine."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Random seed for the inputs of validation and measurement, for run orders, and for bootstrap resamples."""
    max_memory: ByteSize = ByteSize(0)
    """Memory that a build may use, such as "12GiB"; 0: what is free, and no build is refused. With a size, a build
    that needs more is refused before it starts. Steps that are not essential (the reference in float64) are left out
    where they need more."""
    target: TargetOptions = TargetOptions()
    parity: ParityOptions
    latency: LatencyOptions
    cost: CostOptions = CostOptions()
    generation: GenerationOptions = GenerationOptions()

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        # TOML arrays become lists, but the tree is frozen and holds tuples.
        return _tuples_from_lists(data)

    @property
    def returned(self) -> Outputs:
        """`outputs` of a plan or a build folder, where `auto` has been resolved."""
        assert self.outputs != "auto", "make_plan decides it"
        return self.outputs

    def bucket_list(self, max_positions: int) -> tuple[Bucket, ...]:
        """Returns the buckets to build, ascending.

        Raises:
            ConfigError: a bucket is longer than the model has positions for.
        """
        longest = min(512, 2 ** (max_positions.bit_length() - 1))
        pairs = self.buckets or ((1, min(128, longest)), (1, longest))
        problems = [
            f"buckets: {batch} x {seq} is longer than the model's {max_positions} positions; shorten it or drop it"
            for batch, seq in pairs
            if seq > max_positions
        ]
        if problems:
            raise ConfigError(problems)
        return tuple(sorted({Bucket(batch, seq) for batch, seq in pairs}))


def _tuples_from_lists(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples_from_lists(item) for item in value)
    return {key: _tuples_from_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def config_from_toml(path: Path | None, overrides: Mapping[str, Any] | None = None) -> BuildConfig:
    """Reads a configuration. Fields that the file leaves out come from default.toml; None reads default.toml alone.

    `overrides` replaces top-level fields, as the options of the command line do.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown (the message names the nearest known one),
            or a value is out of range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError([f"{path}: no such configuration file"]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{path}: cannot be read ({error})"]) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError([f"{path}: not valid TOML: {error}"]) from error
    prefix = f"{path}: " if path else ""
    try:
        config = BuildConfig.model_validate(with_defaults(data) | dict(overrides or {}))
    except ValidationError as error:
        raise ConfigError([prefix + _problem(item) for item in error.errors()]) from error
    # Values of default.toml do not count as set: only a gate that the user set is refused without a dense baseline.
    latency = LatencyOptions.model_construct(_fields_set={*data.get("latency", ())}, **dict(config.latency))
    return config.model_copy(update={"latency": latency})


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration as plain data, with the values of default.toml for what it leaves out. The configuration
    in a build folder of an earlier release leaves out the gates that were added since.
    """
    defaults = tomllib.loads(files("mod_export_configs").joinpath("default.toml").read_text(encoding="utf-8"))
    return _merged(defaults, data)


def toml_from_config(config: BuildConfig) -> str:
    """Returns the whole resolved configuration as TOML; `config_from_toml` reads it back to an equal value."""
    return tomli_w.dumps(config.model_dump(mode="json", by_alias=True))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _problem(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{where}: missing"
    if error["type"] != "extra_forbidden":
        problem = EXPECTED.get(error["type"]) or error["msg"][0].lower() + error["msg"][1:]
        return f"{where}: {problem}, got {_shown(error['input'])}"
    key, known = str(error["loc"][-1]), _known_keys(error["loc"][:-1])
    if RENAMED.get(key) in known:
        return f"{where}: is called {RENAMED[key]!r} now; rename it"
    near = difflib.get_close_matches(key, known, n=1)
    return f"{where}: unknown key" + (f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    section: type[BaseModel] = BuildConfig
    for part in path:
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        section = fields[str(part)].annotation  # type: ignore[assignment]  # Only sections hold keys.
    return [field.alias or name for name, field in section.model_fields.items()]
