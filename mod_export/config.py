"""The configuration: one TOML file becomes one tree of frozen values, and all problems are reported together.

Every tolerance and threshold is defined here or in a file of export_configs/, and nowhere else in the code. The reasons
for the numbers of default.toml are in docs/numerics.md and docs/measurement.md.
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
"""Of a bucket, in float32, up to which `outputs = "auto"` returns the logits of every token."""
LONGEST_WINDOW, SHORT_PROMPT = 1024, 128
"""Default tokens of a window, at most, and of a short prompt."""
EXPECTED = {
    "model_type": "expected a table",
    "tuple_type": "expected an array",
    "too_long": "expected fewer items",
}
"""Replaces messages of pydantic that name Python types."""

RENAMED = {"noise": "rounding_error", "noise_rms": "rounding_error_rms", "places": "slots"}
"""Keys of earlier configurations -> what they are called now."""

T = TypeVar("T")


def _each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    # An empty list would build nothing, and an item that is named twice would count twice.
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
    # Strict: TOML has types, so a quoted number, or a 1 instead of true, is a mistake.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )


class OrtCpuOptions(_Section):
    """ONNX Runtime on the CPU."""

    dtypes: Names[Literal["float32", "int8", "int4"]] = ("float32",)
    """Of whole rows int8 is faster and int4 smaller; text is written faster in both, because each token reads every
    weight. Neither is served unless it meets its gates. float16 and bfloat16 would not be faster on a CPU, where ONNX
    Runtime casts them to float32 and back."""
    query_block: Literal["measured"] | Annotated[int, Field(ge=0)] = "measured"
    """Queries that causal attention computes at a time, so that scores hidden by the mask are not computed; 0 computes
    all at once. `measured` measures on this machine which number is the fastest."""


class OpenVinoOptions(_Section):
    """OpenVINO on the CPU."""

    dtypes: Names[Literal["float32", "bfloat16", "int8", "int4"]] = ("float32",)
    """One engine each. bfloat16 is faster, int8 faster still, and int4 smaller. They are only built on a processor with
    instructions for bfloat16: with int8 and int4, all that is not a weight is bfloat16."""


class OrtCudaOptions(_Section):
    """ONNX Runtime's CUDA execution provider."""

    dtypes: Names[Literal["float32", "float16"]] = ("float32", "float16")
    """One engine each."""
    device: Annotated[int, Field(ge=0)] = 0
    """Number of the CUDA device."""
    cuda_graph: bool = True
    """Whether a run is recorded once as a CUDA graph and then replayed."""


class InductorOptions(_Section):
    """torch.compile, packaged ahead of time by AOTInductor for this machine's CPU."""

    dtypes: Names[Literal["float32", "bfloat16"]] = ("float32",)
    """One package each. bfloat16 is for processors with instructions for it."""


class InductorCudaOptions(_Section):
    """torch.compile, packaged ahead of time by AOTInductor for this machine's NVIDIA GPU."""

    dtypes: Names[FloatDType] = ("bfloat16", "float32")
    """One package each. In 16 bits matrix products and attention are; what stands between them, and routers, are
    float32."""
    device: Annotated[int, Field(ge=0)] = 0
    """Number of the CUDA device."""
    cuda_graph: bool = True
    """Whether a run is recorded once as a CUDA graph and then replayed."""


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
    """Names as NVIDIA writes compute capabilities, for example sm86. One plan each."""


class TargetOptions(_Section):
    """Options of every target, each under the target's name."""

    model_config = ConfigDict(alias_generator=lambda n: n.replace("_", "-"))

    ort_cpu: OrtCpuOptions = OrtCpuOptions()
    openvino: OpenVinoOptions = OpenVinoOptions()
    ort_cuda: OrtCudaOptions = OrtCudaOptions()
    inductor: InductorOptions = InductorOptions()
    inductor_cuda: InductorCudaOptions = InductorCudaOptions()
    tensorrt: TensorRTOptions = TensorRTOptions()
    tensorrt_rtx: TensorRTRTXOptions = TensorRTRTXOptions()


class ParityGate(_Section):
    """What an engine or graph of one dtype must meet, compared with eager float32. Reasons: docs/numerics.md.

    The rounding error is measured for each model: eager float32 against the same model in float64, on the same inputs
    and with the same selected tokens. The gates `rounding_error` and `rounding_error_rms` are multiples of it, scaled
    to the dtype's unit roundoff. `max_abs` replaces them where the model is too large for float64 on this machine.
    """

    rounding_error: Tolerance
    """Largest error of a logit and of a router score, as a multiple of the largest rounding error of the reference."""
    rounding_error_rms: Tolerance
    """Largest root mean square of the errors of the logits, as a multiple of that of the rounding errors of the
    reference."""
    max_abs: Tolerance
    """Largest absolute error of any real token's logits, given the same selected tokens."""
    near_tie: Tolerance
    """Largest distance of a score from the edge of the selection (the k-th score, or 0), as a share of the layer's
    largest root mean square of a row's scores, at which a token that only one side selected can be a near-tie, however
    large the rounding error. Beyond it the difference is a fault."""
    judged_rows: Share
    """Smallest share of the rows of outputs that has to be judged, where discrete choices leave others to rounding."""
    next_token_agreement: Share
    """Smallest share of positions whose most probable next token is the same, or equally probable within the rounding
    error."""
    max_kl: Tolerance
    """Largest mean Kullback-Leibler divergence of the next-token distribution from that of the reference, in nats, of
    any input."""
    max_perplexity_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Largest ratio of the perplexity on held-out text to that of the reference, or the inverse ratio, whichever is
    larger."""


class ParityOptions(_Section):
    """Gates of each dtype, and the number of inputs of each kind. The numbers are in export_configs/default.toml."""

    float32: ParityGate
    float16: ParityGate
    bfloat16: ParityGate
    int8: ParityGate
    int4: ParityGate
    batches_per_kind: Count = 1
    """Batches of each kind of input (text, random, padded, sample, ties, near_ties) for every bucket."""
    text_batches: Count = 4
    """Least number of batches of held-out text, over which perplexity is averaged."""
    suffixes: Annotated[int, Field(ge=1, le=1000)] = 4
    """Changed endings of a text that the causality probe tries."""

    def gate(self, dtype: DType) -> ParityGate:
        """The gate of one dtype."""
        gate: ParityGate = getattr(self, dtype)
        return gate


class LatencyOptions(_Section):
    """How latency is sampled, and which speed-up the build must reach."""

    samples: Samples = 40
    """Interleaved samples of each of the two models before the first look, rounded up to whole blocks of rounds; fewer,
    16 at least, of engines that are too slow for `max_seconds`."""
    max_samples: Samples = 640
    """Most samples of each model: their number is doubled until the comparison is settled. If it is less than
    `samples`, then `samples`."""
    max_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 15.0
    """Seconds for warming up and sampling one comparison, a third of them for warming up. After that, only the least
    that says anything is run: 4 rounds of warm-up, 16 samples of each model, and 2 visits of each timed step."""
    warmup: Count = 5
    """Rounds of one window of the warm-up. The warm-up ends when two consecutive windows have the same median."""
    max_warmup: Count = 50
    """Most rounds of a warm-up that does not become stable."""
    warmup_tolerance: Share = 0.05
    """Largest difference at which two medians count as the same, as a share of the earlier one."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 1
    """Threads of every CPU engine, the same for both models; 0: the library chooses. The default is one, because
    results on one thread can be compared between machines and runs."""
    bootstrap: Annotated[int, Field(ge=100, le=100_000)] = 2000
    """Bootstrap resamples for the intervals of the ratios."""
    resolution: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.02
    """The smallest speed-up that counts, as a share: if the interval ends below 1 + resolution and does not lie above
    1, the verdict is `not faster`."""
    precision: Share = 0.1
    """Sampling continues, within `max_seconds` and `max_samples`, while the interval of the ratio is wider than this
    share of the ratio; of a model without a dense baseline, the interval of its median."""
    disturbance: Share = 0.1
    """Shares above this one are flagged: outliers among the samples, CPU time that other processes used, a change of
    the CPU's clock."""
    min_speedup: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Gate: the whole interval of the ratio dense / MoD must reach this, for every target that runs here, at the
    largest bucket. 0 means no gate. Without a dense baseline there is none, and one that is set, at the default
    too, is refused."""


class GenerationOptions(_Section):
    """Graphs and engines that write text token by token, for models that can decide about one token at a time."""

    build: Literal["auto", "always", "never"] = "auto"
    """`auto` builds them for every model that can generate, `always` refuses a model that cannot, `never` builds
    none."""
    targets: Names[Literal["ort-cpu", "openvino", "tensorrt", "tensorrt-rtx"]] = ("ort-cpu", "openvino")
    """Those of the build's targets that get engines for generation. `mod-export generate` runs those of ort-cpu and
    openvino; the TensorRT plans are for servers that keep the cache on the GPU."""
    window: Annotated[int, Field(ge=0)] = 0
    """The longest text in tokens, prompt and answer; the slots of routed layers are computed for it. 0: the model's
    number of positions, at most 1,024."""
    slack: Annotated[int, Field(ge=0)] = 0
    """Slots that each routed layer has beyond its capacity in a row of `window` tokens."""
    prompts: tuple[Positive, ...] = ()
    """Lengths of prefill buckets, with one row each; empty: 128 and the window."""
    caches: tuple[Positive, ...] = ()
    """Cache lengths of decode buckets: how many tokens a text can have in them; empty: the window."""
    batches: Names[Positive] = (1, 8)
    """Rows of decode buckets: how many texts are written at once."""
    slots: Literal["all", "fair"] = "all"
    """How many rows of a step can run in a routed part. `all`: every row that wants a slot, so that texts do not depend
    on each other. `fair`: as many as run on average; if more rows want a slot, those with the largest scores run, and
    the others skip the part and count as overflow."""
    judged_tokens: Annotated[int, Field(ge=2, le=100_000)] = 256
    """Tokens of the texts on which decode engines are compared with the eager model; at most the length of the
    cache."""
    compared_texts: Annotated[int, Field(ge=0, le=1000)] = 4
    """Texts that the engines and the eager model both continue, to be compared, fewer of a large model; 0: none."""
    compared_tokens: Count = 48
    """New tokens in each of these texts."""
    measured_tokens: Annotated[int, Field(ge=5, le=100_000)] = 48
    """Number of positions of a text at which a step is timed."""

    def window_of(self, max_positions: int) -> int:
        """The window for a model of so many positions."""
        return self.window or min(max_positions, LONGEST_WINDOW)

    def prompt_lengths(self, window: int) -> tuple[int, ...]:
        """Lengths of prefill buckets, ascending."""
        return tuple(sorted(set(self.prompts or (min(SHORT_PROMPT, window), window))))

    def cache_lengths(self, window: int) -> tuple[int, ...]:
        """Lengths of decode buckets, ascending."""
        return tuple(sorted(set(self.caches or (window,))))


class CostOptions(_Section):
    """How the cost model is compared with measurements."""

    profile_runs: Annotated[int, Field(ge=0, le=1000)] = 7
    """Runs of each engine under its own profiler, after one run that does not count; 0 profiles nothing. For each
    kernel the fastest run counts."""
    measure_again: bool = False
    """Whether this machine's roofline is measured again instead of being read from the cache."""


class BuildConfig(_Section):
    """One named build."""

    buckets: tuple[tuple[Positive, Positive], ...] = ()
    """(batch, sequence) pairs; empty: 1 x 128, and 1 x 512 or the longest power of two that the model allows."""
    outputs: Outputs | Literal["auto"] = "auto"
    """What the graphs return: `logits` of every token; `last`, the logits of each row's last real token, which sampling
    needs, so that the output head is not computed for the others; or `none`, hidden states after the final norm.
    `auto` is `last` where the largest bucket would return more than 16 MiB of logits, as of 128 tokens with a
    vocabulary of 49,152; else `logits`."""
    targets: tuple[str, ...] = ()
    """Names as in `mod-export targets`; empty: every target that can build on this machine."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Random seed of the inputs of validation and measurement, of run orders, and of bootstrap resamples."""
    max_memory: ByteSize = ByteSize(0)
    """Memory that a build may use, such as "12GiB"; 0: the free memory. A build that needs more is refused before it
    starts, and steps that are not essential (the reference in float64) are left out."""
    target: TargetOptions = TargetOptions()
    parity: ParityOptions
    latency: LatencyOptions
    cost: CostOptions = CostOptions()
    generation: GenerationOptions = GenerationOptions()

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        # TOML has arrays; the tree is frozen and therefore holds tuples.
        return _tuples_from_lists(data)

    @property
    def returned(self) -> Outputs:
        """`outputs` of a plan or a build folder, where nothing is left to be decided."""
        assert self.outputs != "auto", "make_plan decides it"
        return self.outputs

    def bucket_list(self, max_positions: int) -> tuple[Bucket, ...]:
        """The buckets to build, ascending.

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
    """Reads a configuration. Fields that the file leaves out are those of default.toml; None is default.toml itself.

    `overrides` replaces top-level fields, as the command line's options do.

    Raises:
        ConfigError: no such file, not TOML, unknown keys (with the nearest known one), or values out of range.
    """
    defaults = tomllib.loads(files("mod_export_configs").joinpath("default.toml").read_text(encoding="utf-8"))
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
        config = BuildConfig.model_validate(_merged(defaults, data) | dict(overrides or {}))
    except ValidationError as error:
        raise ConfigError([prefix + _problem(item) for item in error.errors()]) from error
    # What default.toml says was not set by anybody: a gate that was is refused where it could not be shown.
    latency = LatencyOptions.model_construct(_fields_set={*data.get("latency", ())}, **dict(config.latency))
    return config.model_copy(update={"latency": latency})


def toml_from_config(config: BuildConfig) -> str:
    """The whole resolved configuration as TOML; `config_from_toml` reads it back to an equal value."""
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
        said = EXPECTED.get(error["type"]) or error["msg"][0].lower() + error["msg"][1:]
        return f"{where}: {said}, got {_shown(error['input'])}"
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
