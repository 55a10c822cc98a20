"""The reference: the captured program of the eager model, in float32 and in float64, with free or forced selections;
and a map of its routing for people to read.

A candidate is compared with the float32 run. The float64 run shows how much of the float32 result is rounding error: no
float32 candidate can be required to be closer to the reference than the reference is to the exact result.

The captured program runs instead of the module, because every routing site can be observed and replaced there
(`graph/sites.py`). For every shape, the program is first compared with the module itself, bit for bit, so that
parity with the program is parity with eager PyTorch.
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
from mod_export.model.model import Model
from mod_export.rows.correctness import MapLayer, RoutingMap
from mod_export.types import BY_SCORE, TOKEN_INPUTS, Bucket, Outputs, Site

if TYPE_CHECKING:
    import torch

    from mod_export.graph.sites import Around, Convert, Runnable
    from mod_export.judge.choices import Choice, Outcomes

Found = TypeVar("Found")
Precision = Literal["float32", "float64"]
KEPT_BYTES = 2**29
"""Size of the outputs that are kept for the next target even if little memory is free."""
KEPT_SHARE = 1 / 4
"""Share of the free memory, what is kept included, that kept outputs may take."""
FLOAT64_BYTES = 8
SHAKEN = 2
RUNS_OF_CHECK = 4
"""Runs of one check: captured program and module, on two samples each. A large model runs only the second sample, which
is padded in a model of token ids.
"""
PERIOD = 2**20 - 3
"""Number of random directions, which are repeated, because drawing one for each weight takes four times as long. It is
prime, so that rows of a weight have different ones.
"""
MOST_MAPPED_TOKENS = 1024
"""Longest row that gets a routing map: nobody would read a longer map."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """One run: the outputs of the module; site -> selected positions, int64 (B, k); site -> inputs of the selection;
    and the outcomes of discrete choices that are not sites (`choices.py`).
    """

    outputs: tuple[np.ndarray, ...]
    routed: Mapping[Site, np.ndarray]
    judged: Mapping[Site, Judged]
    outcomes: Outcomes = field(default_factory=dict)

    @property
    def logits_BSV(self) -> np.ndarray:
        """Logits of a model of token ids."""
        return self.outputs[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs and outcomes."""
        chosen = sum(tensor.nbytes for parts in self.outcomes.values() for tensor in parts)
        return chosen + sum(array.nbytes for array in self.outputs)


@dataclass(frozen=True, slots=True)
class _Wide:
    """A captured program that computes in float64, in the form that `run_sites` takes."""

    graph_module: torch.fx.GraphModule
    graph_signature: torch.export.ExportGraphSignature
    constants: Mapping[str, torch.Tensor]


def _doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double()


@dataclass(frozen=True, slots=True)
class _Move:
    """Moves every number of a parameter to one of its two neighbours, at random; with other numbers, in another way.

    A parameter is moved at each use: a copy of all weights would need as much memory as the model.
    """

    parameters: Sequence[str]
    number: int

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if name not in self.parameters:
            return tensor
        seed = self.number * len(self.parameters) + self.parameters.index(name)
        # Towards a number that is far above or far below, each as often.
        far = torch.finfo(tensor.dtype).max / 2
        generator, values_N = torch.Generator().manual_seed(seed), tensor.detach().reshape(-1)
        towards_N = torch.empty(min(len(values_N), PERIOD), dtype=tensor.dtype).uniform_(-far, far, generator=generator)
        moved_N = torch.empty_like(values_N)
        for moved, values in zip(torch.split(moved_N, PERIOD), torch.split(values_N, PERIOD), strict=True):
            torch.nextafter(values, towards_N[: len(values)], out=moved)
        return moved_N.view(tensor.shape)


class KeptRuns:
    """Keeps the latest runs of one or more references, as many as fit. Runs do not depend on the target, so the next
    target asks for the same ones.
    """

    def __init__(self, room: int | None = None) -> None:
        """`room` is the size limit of all runs together, in bytes; by default it depends on the memory that is free."""
        self._limit = room
        self._runs: dict[str, Traced] = {}

    def get(self, key: str) -> Traced | None:
        """Returns the run, or None if it is not kept any more."""
        return self._runs.get(key)

    def keep(self, key: str, run: Traced) -> None:
        """Keeps a run and drops the oldest ones to make room. A run that is larger than all the room is not kept."""
        used = sum(kept.nbytes for kept in self._runs.values())
        room = self._room(used)
        left = room - run.nbytes if run.nbytes <= room else room
        while used > left:
            used -= self._runs.pop(next(iter(self._runs))).nbytes
        if run.nbytes <= room:
            self._runs[key] = run

    def _room(self, used: int) -> int:
        if self._limit is not None:
            return self._limit
        return max(KEPT_BYTES, int(KEPT_SHARE * (free_bytes() + used)))


class Programs:
    """A model's captured programs, each made when a shape is first run, and the module that they must equal."""

    _numbers = itertools.count()

    def __init__(self, model: Model) -> None:
        self._model = model
        self.number = next(self._numbers)
        """Distinguishes its runs from those of other models."""
        self._programs: dict[tuple[Bucket, Precision], Runnable] = {}
        self._choices: dict[Bucket, Sequence[Choice]] = {}

    @cached_property
    def module(self) -> torch.nn.Module:
        """The eager module in float32."""
        return self._model.module()

    @cached_property
    def has_room(self) -> bool:
        """Whether memory has room for the largest weight in float64 too: weights are widened one by one."""
        needed = FLOAT64_BYTES * max((tensor.numel() for tensor in self._model.weights.values()), default=0)
        return needed < free_bytes() // 2

    def program(self, bucket: Bucket, precision: Precision = "float32") -> Runnable:
        """Returns the captured program of a shape, with its routing sites marked.

        Raises:
            CaptureError: the module cannot be captured, or the program does not compute the same bits.
        """
        if (bucket, precision) not in self._programs:
            program = self._captured(bucket) if precision == "float32" else _widened(self.program(bucket))
            self._programs[bucket, precision] = program
        return self._programs[bucket, precision]

    def choices(self, bucket: Bucket) -> Sequence[Choice]:
        """Returns the discrete choices of the program of a shape that are not routing sites."""
        from mod_export.judge.choices import choices_of

        if bucket not in self._choices:
            self._choices[bucket] = choices_of(self.program(bucket))
        return self._choices[bucket]

    def _captured(self, bucket: Bucket) -> torch.export.ExportedProgram:
        from mod_export.graph.capture import exported

        samples = [self._model.sample(bucket, seed) for seed in range(2)]
        if self._model.tokens is not None:
            lengths_B = np.random.default_rng(0).integers(1, bucket.seq + 1, bucket.batch)
            samples[1] = {**samples[1], TOKEN_INPUTS[1]: lengths_B}
        if RUNS_OF_CHECK * bucket.batch * bucket.seq > affordable_tokens(self._model, bucket.seq):
            samples = samples[1:]
        program = exported(self.module, tensors_of(samples[0]), f"the reference at {bucket.name}")
        check_program(program, self.module, bucket, samples)
        return program


def _widened(program: Runnable) -> _Wide:
    """Returns the same operations in float64, also where the model names the dtype float32 itself."""
    import torch

    from mod_export.graph.program_nodes import with_arguments

    module = with_arguments(program.graph_module, {torch.float32: torch.float64})
    return _Wide(module, program.graph_signature, program.constants)


def tensors_of(feeds: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """Converts inputs to tensors, in the order of the module's arguments."""
    import torch

    return tuple(torch.from_numpy(np.asarray(array, order="C")) for array in feeds.values())


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

    from mod_export.graph.sites import SiteRun, run_sites
    from mod_export.graph.weights import state_of

    for feeds in samples:
        inputs = tensors_of(feeds)
        with torch.no_grad():
            expected = module(*inputs)
        outputs = run_sites(program, state_of(module), inputs, SiteRun(bucket.seq))
        for n, (output, expected_output) in enumerate(zip(outputs, expected, strict=True)):
            if not _same_bits(output, expected_output):
                raise CaptureError(
                    f"the captured program is not the eager model: at {bucket.name} its output {n} "
                    f"{_difference(output, expected_output)}, expected the same bits, so parity with it would say "
                    "nothing about the model; please report this model"
                )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of any rank have the same bits, NaN included."""
    import torch

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # A tensor without dimensions cannot be viewed as bytes.
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"is {actual.dtype} {list(actual.shape)} in place of {expected.dtype} {list(expected.shape)}"
    return f"differs by up to {float((actual.double() - expected.double()).abs().max()):.3g}"


class Reference:
    """Runs a model's captured programs."""

    def __init__(
        self,
        model: Model,
        outputs: Outputs = "logits",
        programs: Programs | None = None,
        replaced: Mapping[str, np.ndarray] | None = None,
        kept: KeptRuns | None = None,
    ) -> None:
        """`outputs` says what the candidates return, `replaced` holds other values of some weights by name, and `kept`
        keeps the runs; references can share it.

        Raises:
            ConfigError: candidates return hidden states, and the model cannot turn them into logits.
        """
        if outputs == "none" and model.d_model is None:
            raise ConfigError(
                ["outputs: none, but this model has no head that makes logits of hidden states; build it with logits"]
            )
        self.model = model
        self.outputs: Outputs = outputs
        self._programs = Programs(model) if programs is None else programs
        self._replaced = dict(replaced or {})
        self._kept = KeptRuns() if kept is None else kept
        self._remembered: dict[str, object] = {}

    @property
    def module(self) -> torch.nn.Module:
        """The eager module in float32, with its own weights."""
        return self._programs.module

    def with_weights(self, replaced: Mapping[str, np.ndarray]) -> Reference:
        """Returns a reference with other values of some weights, by name; its runs are not kept."""
        return Reference(self.model, self.outputs, self._programs, {**self._replaced, **replaced}, KeptRuns(0))

    def returning(self, outputs: Outputs) -> Reference:
        """Returns a reference of the same model for candidates that return other outputs."""
        return Reference(self.model, outputs, self._programs, self._replaced, self._kept)

    def logits_of(self, hidden_ND: np.ndarray) -> np.ndarray:
        """Turns hidden states (N, D) into logits (N, V), for candidates that return hidden states."""
        logits_NV = self.model.head(hidden_ND)
        assert logits_NV is not None, "refused above for a model without a head"
        return logits_NV

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs of candidates, in order."""
        return self.model.output_names(self.outputs)

    @property
    def first_output(self) -> str:
        """Name of the first output that depends on the inputs."""
        return next(name for name in self.output_names if name not in self.model.constant_outputs)

    def k_by_layer(self, bucket: Bucket) -> dict[Site, int]:
        """Maps each routing site in the captured program of a shape to its slots, in the order of the decisions."""
        from mod_export.graph.sites import routing_sites

        return {site.name: site.k for site in routing_sites(self._programs.program(bucket))}

    def ordered_sites(self, bucket: Bucket) -> Sequence[Site]:
        """Returns the sites that select in an order of scores which the program defines."""
        return self.remembered(f"ordered sites at {bucket.name}", lambda: _ordered_sites(self.program(bucket)))

    def remembered(self, name: str, find: Callable[[], Found]) -> Found:
        """Returns the result of `find`, which is called once for each `name`."""
        if name not in self._remembered:
            self._remembered[name] = find()
        return cast("Found", self._remembered[name])

    def free(self, batch: Batch) -> Traced:
        """Runs in float32 with the model's own routing."""
        return self.forced(batch, {})

    def forced(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around | None = None) -> Traced:
        """Runs in float32 with the given positions at the sites that `routing` names, whatever their scores. If
        `around` is wrapped around every operation, the run is not kept.
        """
        return self._run(batch, routing, "float32", around)

    def exact(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around | None = None) -> Traced | None:
        """Like `forced`, but in float64. Discrete choices other than routing sites get the outcomes of the float32 run,
        unless `around` replaces the wrapper of operations that imposes them. None if memory has no room for the run.
        """
        return self._run(batch, routing, "float64", around) if self._programs.has_room else None

    def shaken(self, batch: Batch, routing: Mapping[Site, np.ndarray], around: Around | None = None) -> list[Traced]:
        """Runs SHAKEN times in float32, each time with other rounding errors: every weight is moved to one of its two
        neighbouring numbers at random. Other discrete choices have the outcomes of the float32 run. Empty if memory has
        no room for the runs.

        A single run can be exact by luck if a model is ill-conditioned (Monte Carlo arithmetic; Parker, Pierce and
        Eggert, Computing in Science and Engineering 2(4), 2000).
        """
        if not self._programs.has_room:
            return []
        around = around or self._holder(batch, routing)
        parameters = [name for name, _ in self.module.named_parameters()]
        moves = [_Move(parameters, number) for number in range(SHAKEN)]
        return [self._trace(batch, routing, "float32", around, move) for move in moves]

    def program(self, bucket: Bucket) -> Runnable:
        """Returns the captured program of a shape."""
        return self._programs.program(bucket)

    def choices(self, bucket: Bucket) -> Sequence[Choice]:
        """Returns the discrete choices at a shape that are not routing sites."""
        return self._programs.choices(bucket)

    def _holder(self, batch: Batch, routing: Mapping[Site, np.ndarray]) -> Around | None:
        from mod_export.judge.choices import Holder

        choices = self.choices(batch.bucket)
        return Holder(choices, self.forced(batch, routing).outcomes) if choices else None

    @cached_property
    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, with the replaced values."""
        import torch

        from mod_export.graph.weights import state_of

        state = state_of(self.module)
        return {**state, **{name: torch.from_numpy(array) for name, array in self._replaced.items()}}

    def _run(
        self, batch: Batch, routing: Mapping[Site, np.ndarray], precision: Precision, around: Around | None
    ) -> Traced:
        if around is not None:
            return self._trace(batch, routing, precision, around)
        key = f"{self._programs.number} {_digest(batch, routing, precision)}"
        traced = self._kept.get(key)
        if traced is None:
            around = self._holder(batch, routing) if precision == "float64" else None
            traced = self._trace(batch, routing, precision, around)
            self._kept.keep(key, traced)
        return traced

    def _trace(
        self,
        batch: Batch,
        routing: Mapping[Site, np.ndarray],
        precision: Precision,
        around: Around | None,
        convert: Convert | None = None,
    ) -> Traced:
        import torch

        from mod_export.graph.sites import SiteRun, run_sites
        from mod_export.judge.choices import Recorder

        choices = self.choices(batch.bucket)
        around = around or (Recorder(choices) if choices else None)
        run = SiteRun(batch.bucket.seq, {site: torch.from_numpy(index_BK) for site, index_BK in routing.items()})
        inputs = tensors_of(batch.feeds)
        if precision == "float64":
            inputs = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
            convert = _doubled
        program, default = self._programs.program(batch.bucket, precision), torch.get_default_dtype()
        try:
            # For tensors that operations create without naming a dtype: zeros to scatter into, or a mask of numbers.
            torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
            outputs = run_sites(program, self._state, inputs, run, convert=convert, around=around)
        finally:
            torch.set_default_dtype(default)
        selections = run.selections.items()
        return Traced(
            tuple(tensor.numpy() for tensor in outputs),
            {site: selection.index_BK.numpy() for site, selection in selections},
            {
                site: Judged(selection.rule, selection.score_BS.numpy(), selection.open_BS.numpy())
                for site, selection in selections
            },
            around.outcomes if isinstance(around, Recorder) else {},
        )


def _ordered_sites(program: Runnable) -> list[Site]:
    """Returns the found sites that run the selected tokens in the order of a sort, or of a top-k that sorts."""
    from mod_export.graph.find_sites import SELECTS
    from mod_export.graph.program_nodes import argument_of
    from mod_export.graph.sites import Marked
    from mod_export.marker import MARKER

    ordered: list[Site] = []
    for node in program.graph_module.graph.nodes:
        if node.op != "call_function" or node.target is not MARKER or (marked := Marked(*node.args)).rule != BY_SCORE:
            continue
        selector = marked.index
        while selector.target not in SELECTS:  # Only reshaped, transposed and cut before the marker.
            selector = selector.args[0]
        # With `sorted=False`, a top-k may return its tokens in any order, also by chance in the order of a sort.
        if argument_of(selector, "sorted") is not False:
            ordered += marked.sites
    return ordered


def _digest(batch: Batch, routing: Mapping[Site, np.ndarray], dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype} {batch.digest}".encode())
    for site, index_BK in sorted(routing.items(), key=lambda item: str(item[0])):
        digest.update(f"{site} {index_BK.shape}".encode())
        digest.update(index_BK.tobytes())
    return digest.hexdigest()


def routing_map(reference: Reference, bucket: Bucket, batches: Sequence[Batch]) -> RoutingMap | None:
    """Shows which tokens each routing site selects in the first row of the first batch of text, or else of the first
    batch.

    None if nothing is routed, if there is no batch, or if the row is too long to be read.
    """
    if bucket.seq > MOST_MAPPED_TOKENS or not batches:
        return None
    batch = next((text_batch for text_batch in batches if text_batch.kind == "text"), batches[0])
    traced = reference.free(batch)
    if not traced.routed:
        return None
    if reference.model.tokens is None:
        texts: Sequence[str] | None = [str(position) for position in range(bucket.seq)]
    elif batch.kind == "text":
        texts = reference.model.token_texts(batch.ids_BS[0])
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
    """Returns the scores of the first row; None for tokens that did not reach the site."""
    pairs = zip(judged.score_BS[0], judged.open_BS[0], strict=True)
    return tuple(float(f"{score:.4g}") if is_open else None for score, is_open in pairs)
