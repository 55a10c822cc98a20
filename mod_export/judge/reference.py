"""The reference: the captured program of the eager model, in float32 and in float64, free or with forced selections;
and what its routing looks like to a person.

The float32 run is what a candidate is compared with. The float64 run says how much of the float32 result is rounding
error: no candidate in float32 can be asked to be nearer to the reference than the reference is to the truth.

What runs is the captured program and not the module, because there every routing site can be observed and replaced
(`graph/routing_sites.py`). For every shape the program is first compared with the module itself, bit for bit, so that
parity with it is parity with eager PyTorch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np

from mod_export.environment import free_bytes
from mod_export.errors import CaptureError, ConfigError
from mod_export.judge.compare import EMPTY, Judged
from mod_export.judge.inputs import Batch, affordable_tokens
from mod_export.model.model import output_names, sample_of
from mod_export.model.protocol import ExportableModel, OutputHead, SampledInputs, Text
from mod_export.rows.structure import MapLayer, RoutingMap
from mod_export.types import TOKEN_INPUTS, Bucket, Outputs, Site

if TYPE_CHECKING:
    import torch

    from mod_export.graph.routing_sites import Around, Runnable
    from mod_export.judge.choices import Choice, Outcomes

Found = TypeVar("Found")
Precision = Literal["float32", "float64"]
KEPT_BYTES = 2**29
"""Outputs of runs that are kept for the next target. Longer rows cost more memory than another run costs time."""
FLOAT64_BYTES = 8
SHAKEN = 2
RUNS_OF_CHECK = 4
"""Of a captured program and of its module, on two samples each. Of a large model only the padded sample is run."""
MOST_MAPPED_TOKENS = 1024
"""Of one routing map: more than a person reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """One run: what the module returns; site -> positions int64 (B, k); site -> what it is judged by; and what its
    discrete choices that are no sites gave (`choices.py`).
    """

    outputs: tuple[np.ndarray, ...]
    routed: Mapping[Site, np.ndarray]
    judged: Mapping[Site, Judged]
    outcomes: Outcomes = field(default_factory=dict)

    @property
    def logits_BSV(self) -> np.ndarray:
        """Of a model of token ids."""
        return self.outputs[0]

    @property
    def nbytes(self) -> int:
        """Of the outputs and outcomes."""
        chosen = sum(tensor.nbytes for parts in self.outcomes.values() for tensor in parts)
        return chosen + sum(array.nbytes for array in self.outputs)


@dataclass(frozen=True, slots=True)
class _Wide:
    """A captured program that computes in float64, as `run_sites` runs it."""

    graph_module: torch.fx.GraphModule
    graph_signature: torch.export.ExportGraphSignature
    constants: Mapping[str, torch.Tensor]


class KeptRuns:
    """Runs of one or more references, the last ones that find room: a run depends on batch and routing alone, and the
    next target asks for the same.
    """

    def __init__(self, room: int = KEPT_BYTES) -> None:
        """`room` is that of the outputs of all runs together, in bytes."""
        self._room = room
        self._runs: dict[str, Traced] = {}

    def get(self, key: str) -> Traced | None:
        """The run, if it is still here."""
        return self._runs.get(key)

    def keep(self, key: str, run: Traced) -> None:
        """Keeps it in place of the oldest ones, if there is room for it at all."""
        if run.nbytes > self._room:
            return
        self._runs[key] = run
        used = sum(one.nbytes for one in self._runs.values())
        while used > self._room:
            used -= self._runs.pop(next(iter(self._runs))).nbytes


class Programs:
    """A model's captured programs, each made when a shape is first run, and the module that they must equal."""

    _numbers = itertools.count()

    def __init__(self, loaded: ExportableModel) -> None:
        self._loaded = loaded
        self.number = next(self._numbers)
        """Tells its runs from those of other models."""
        self._programs: dict[tuple[Bucket, Precision], Runnable] = {}
        self._choices: dict[Bucket, Sequence[Choice]] = {}

    @cached_property
    def module(self) -> torch.nn.Module:
        """The eager module in float32."""
        return self._loaded.module()

    @cached_property
    def has_room(self) -> bool:
        """Whether this machine's memory holds the largest weight in float64 as well: they are widened one by one."""
        needed = FLOAT64_BYTES * max((tensor.numel() for tensor in self._loaded.weights.values()), default=0)
        return needed < free_bytes() // 2

    def program(self, bucket: Bucket, precision: Precision = "float32") -> Runnable:
        """The captured program of a shape, its routing sites marked.

        Raises:
            CaptureError: the module cannot be captured, or the program does not compute the same bits.
        """
        if (bucket, precision) not in self._programs:
            found = self._captured(bucket) if precision == "float32" else _widened(self.program(bucket))
            self._programs[bucket, precision] = found
        return self._programs[bucket, precision]

    def choices(self, bucket: Bucket) -> Sequence[Choice]:
        """Discrete choices of the program of a shape that are no routing sites."""
        from mod_export.judge.choices import choices_of

        if bucket not in self._choices:
            self._choices[bucket] = choices_of(self.program(bucket))
        return self._choices[bucket]

    def _captured(self, bucket: Bucket) -> torch.export.ExportedProgram:
        from mod_export.graph.capture import exported

        samples = [sample_of(self._loaded, bucket, seed) for seed in range(2)]
        if not isinstance(self._loaded, SampledInputs):
            lengths_B = np.random.default_rng(0).integers(1, bucket.seq + 1, bucket.batch)
            samples[1] = {**samples[1], TOKEN_INPUTS[1]: lengths_B}
        if RUNS_OF_CHECK * bucket.batch * bucket.seq > affordable_tokens(self._loaded):
            samples = samples[1:]
        program = exported(self.module, tensors_of(samples[0]), f"the reference at {bucket.name}")
        check_program(program, self.module, bucket, samples)
        return program


def _widened(program: Runnable) -> _Wide:
    """The same operations in float64: a dtype that a model names is replaced like one that follows from its weights."""
    import torch

    from mod_export.graph.program_nodes import with_arguments

    module = with_arguments(program.graph_module, {torch.float32: torch.float64})
    return _Wide(module, program.graph_signature, program.constants)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def tensors_of(feeds: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """Inputs as a module takes them."""
    import torch

    return tuple(torch.from_numpy(array) for array in feeds.values())


def check_program(
    program: torch.export.ExportedProgram,
    module: torch.nn.Module,
    bucket: Bucket,
    samples: Iterable[Mapping[str, np.ndarray]],
) -> None:
    """Compares a captured program with its module on several inputs, bit for bit.

    Raises:
        CaptureError: an output differs.
    """
    import torch

    from mod_export.graph.routing_sites import SiteRun, run_sites
    from mod_export.graph.weights import state_of

    for feeds in samples:
        inputs = tensors_of(feeds)
        with torch.no_grad():
            expected = module(*inputs)
        found = run_sites(program, state_of(module), inputs, SiteRun(bucket.seq))
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not _same_bits(one, other):
                raise CaptureError(
                    f"the captured program is not the eager model: at {bucket.name} its output {n} "
                    f"{_difference(one, other)}, expected the same bits, so parity with it would say "
                    "nothing about the model; please report this model"
                )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of tensors of any rank; two that are NaN alike are the same."""
    import torch

    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    # Without dimensions a tensor cannot be seen as bytes.
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {one.dtype} {list(one.shape)} in place of {other.dtype} {list(other.shape)}"
    return f"differs by up to {float((one.double() - other.double()).abs().max()):.3g}"


class Reference:
    """Runs a model's captured programs."""

    name = "eager float32"

    def __init__(
        self,
        loaded: ExportableModel,
        outputs: Outputs = "logits",
        programs: Programs | None = None,
        replaced: Mapping[str, np.ndarray] | None = None,
        kept: KeptRuns | None = None,
    ) -> None:
        """`outputs` is what the candidates return, `replaced` other values of some weights, by name, and `kept` where
        its runs are kept, which references can share.

        Raises:
            ConfigError: candidates return hidden states, and the model cannot make logits of them.
        """
        if outputs == "none" and not isinstance(loaded, OutputHead):
            raise ConfigError(
                ["outputs: none, but this model has no head that makes logits of hidden states; build it with logits"]
            )
        self.loaded = loaded
        self.outputs: Outputs = outputs
        self._programs = Programs(loaded) if programs is None else programs
        self._replaced = dict(replaced or {})
        self._moved: list[dict[str, torch.Tensor]] | None = None
        self._kept = KeptRuns() if kept is None else kept
        self._remembered: dict[str, object] = {}

    @property
    def module(self) -> torch.nn.Module:
        """The eager module in float32, with its own weights."""
        return self._programs.module

    def with_weights(self, replaced: Mapping[str, np.ndarray]) -> Reference:
        """The same model with other values of some weights, by name; nothing that is found with it is kept."""
        return Reference(self.loaded, self.outputs, self._programs, {**self._replaced, **replaced}, KeptRuns(0))

    def returning(self, outputs: Outputs) -> Reference:
        """The same model for candidates that return something else."""
        return Reference(self.loaded, outputs, self._programs, self._replaced, self._kept)

    @property
    def output_head(self) -> OutputHead:
        """Makes logits of what candidates return, where that is hidden states."""
        assert isinstance(self.loaded, OutputHead)
        return self.loaded

    @property
    def output_names(self) -> tuple[str, ...]:
        """Of what candidates return, in order."""
        return output_names(self.loaded, self.outputs)

    def k_by_layer(self, bucket: Bucket) -> dict[Site, int]:
        """Routing site -> slots, in the order of the decisions, in the captured program of a shape."""
        from mod_export.graph.routing_sites import routing_sites

        return {site.name: site.k for site in routing_sites(self._programs.program(bucket))}

    def remembered(self, name: str, find: Callable[[], Found]) -> Found:
        """Something that was found out with this reference and holds as long as it does."""
        if name not in self._remembered:
            self._remembered[name] = find()
        return cast("Found", self._remembered[name])

    def free(self, batch: Batch) -> Traced:
        """The model's own routing, in float32."""
        return self.forced(batch, {})

    def forced(self, batch: Batch, routing: Mapping[Site, np.ndarray]) -> Traced:
        """In float32, with the given positions at the sites that `routing` names, whatever their scores."""
        return self._run(batch, routing, "float32")

    def exact(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around | None = None) -> Traced | None:
        """The same in float64, with the outcomes of other discrete choices as in float32; None where this machine's
        memory has no room for that. `around` stands around the operations in place of what holds these outcomes.
        """
        if not self._programs.has_room:
            return None
        return (
            self._run(batch, routing, "float64")
            if around is None
            else self._observed(batch, routing, around, "float64")
        )

    def shaken(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around | None = None) -> list[Traced]:
        """In float32, again with the outcomes of the float32 run, and with every weight moved to one of its two
        neighbouring numbers, drawn at random: SHAKEN runs, each with another rounding error. Empty where this machine's
        memory does not hold the weights so often.

        A single run can be exact by luck where a model is ill-conditioned (Monte Carlo arithmetic; Parker, Pierce and
        Eggert, Computing in Science and Engineering 2(4), 2000).
        """
        if self._moved is None:
            self._moved = self._move()
        around = around or self._holder(batch, routing)
        return [self._trace(state, batch, routing, "float32", around) for state in self._moved]

    def program(self, bucket: Bucket) -> Runnable:
        """The captured program of a shape."""
        return self._programs.program(bucket)

    def choices(self, bucket: Bucket) -> Sequence[Choice]:
        """Discrete choices at a shape that are no routing sites."""
        return self._programs.choices(bucket)

    def observed(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around) -> Traced:
        """In float32, with something that stands around every operation; nothing of it is kept."""
        return self._observed(batch, routing, around, "float32")

    def _observed(
        self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around, precision: Precision
    ) -> Traced:
        return self._trace(self._state, batch, routing, precision, around)

    def _holder(self, batch: Batch, routing: Mapping[Site, np.ndarray]) -> Around | None:
        from mod_export.judge.choices import Holder

        choices = self.choices(batch.bucket)
        return Holder(choices, self.forced(batch, routing).outcomes) if choices else None

    def _move(self) -> list[dict[str, torch.Tensor]]:
        import torch

        state = self._state
        weights = {name: state[name] for name, _ in self.module.named_parameters()}
        if SHAKEN * sum(tensor.nbytes for tensor in weights.values()) > free_bytes() // 2:
            return []
        generator = torch.Generator().manual_seed(0)
        states = []
        for _ in range(SHAKEN):
            moved = {}
            for name, tensor in weights.items():
                up = torch.rand(tensor.shape, generator=generator) < 1 / 2
                moved[name] = torch.nextafter(tensor.detach(), torch.where(up, torch.inf, -torch.inf))
            states.append({**state, **moved})
        return states

    @cached_property
    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, replaced ones among them."""
        import torch

        from mod_export.graph.weights import state_of

        state = state_of(self.module)
        return {**state, **{name: torch.from_numpy(array) for name, array in self._replaced.items()}}

    def _run(self, batch: Batch, routing: Mapping[Site, np.ndarray], precision: Precision) -> Traced:
        key = f"{self._programs.number} {_digest(batch, routing, precision)}"
        traced = self._kept.get(key)
        if traced is None:
            around = self._holder(batch, routing) if precision == "float64" else None
            traced = self._trace(self._state, batch, routing, precision, around)
            self._kept.keep(key, traced)
        return traced

    def _trace(
        self,
        state: Mapping[str, torch.Tensor],
        batch: Batch,
        routing: Mapping[Site, np.ndarray],
        precision: Precision,
        around: Around | None,
    ) -> Traced:
        import torch

        from mod_export.graph.routing_sites import SiteRun, run_sites
        from mod_export.judge.choices import Recorder

        choices = self.choices(batch.bucket)
        around = around or (Recorder(choices) if choices else None)
        run = SiteRun(batch.bucket.seq, {site: torch.from_numpy(index_BK) for site, index_BK in routing.items()})
        inputs = tensors_of(batch.feeds)
        if precision == "float64":
            inputs = tuple(_double(tensor) for tensor in inputs)
        program, default = self._programs.program(batch.bucket, precision), torch.get_default_dtype()
        try:
            # Of what an operation makes without naming a dtype, such as zeros to scatter into, or a mask of numbers.
            torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
            outputs = run_sites(program, state, inputs, run, widen=precision == "float64", around=around)
        finally:
            torch.set_default_dtype(default)
        found = run.selections.items()
        return Traced(
            tuple(tensor.numpy() for tensor in outputs),
            {site: one.index_BK.numpy() for site, one in found},
            {site: Judged(one.rule, one.score_BS.numpy(), one.open_BS.numpy()) for site, one in found},
            around.outcomes if isinstance(around, Recorder) else {},
        )


def _digest(batch: Batch, routing: Mapping[Site, np.ndarray], dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype} {batch.digest}".encode())
    for site, index_BK in sorted(routing.items(), key=lambda item: str(item[0])):
        digest.update(f"{site} {index_BK.shape}".encode())
        digest.update(index_BK.tobytes())
    return digest.hexdigest()


def routing_map(reference: Reference, bucket: Bucket, batches: Sequence[Batch]) -> RoutingMap | None:
    """Which token of the first batch of text, or of any, went through which routing site.

    None where nothing is routed, or where the row is too long to be read.
    """
    if bucket.seq > MOST_MAPPED_TOKENS or not batches:
        return None
    batch = next((one for one in batches if one.kind == "text"), batches[0])
    traced = reference.free(batch)
    if not traced.routed:
        return None
    loaded = reference.loaded
    if isinstance(loaded, SampledInputs):
        texts: Sequence[str] | None = [str(position) for position in range(bucket.seq)]
    elif batch.kind == "text" and isinstance(loaded, Text):
        texts = loaded.token_texts(batch.ids_BS[0])
    else:
        texts = None
    return RoutingMap(
        bucket=bucket.name,
        tokens=tuple(map(str, batch.ids_BS[0])) if texts is None else tuple(texts),
        layers=tuple(
            MapLayer(
                layer=site,
                k=index_BK.shape[1],
                routed=tuple(int(position) for position in index_BK[0] if position != EMPTY),
                scores=_scores(traced.judged[site]),
            )
            for site, index_BK in traced.routed.items()
        ),
    )


def _scores(judged: Judged) -> tuple[float | None, ...]:
    """Of the first row; None for tokens that did not get this far."""
    found = zip(judged.score_BS[0], judged.open_BS[0], strict=True)
    return tuple(float(f"{score:.4g}") if is_open else None for score, is_open in found)
