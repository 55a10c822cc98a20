"""The reference: the captured program of the eager model, in float32 and in float64, free or with forced selections;
and what its routing looks like to a person.

The float32 run is what a candidate is compared with. The float64 run says how much of the float32 result is rounding
error: no candidate in float32 can be asked to be nearer to the reference than the reference is to the truth.

What runs is the captured program and not the module, because there every routing site can be observed and replaced
(`export/routing_sites.py`). For every shape the program is first compared with the module itself, bit for bit, so that
parity with it is parity with eager PyTorch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np

from mod_export.environment import free_bytes
from mod_export.errors import CaptureError, ConfigError
from mod_export.results.structure import MapLayer, RoutingMap
from mod_export.sources.protocol import ExportableModel, OutputHead, Text
from mod_export.types import Bucket, Outputs, Site
from mod_export.validate.compare import EMPTY, Judged
from mod_export.validate.inputs import Batch

if TYPE_CHECKING:
    import torch

Found = TypeVar("Found")
Precision = Literal["float32", "float64"]
KEPT_BYTES = 2**30
"""Logits of runs that are kept for the next target. Longer rows cost more memory than another run costs time."""
FLOAT64_BYTES = 8
SHAKEN = 2
MOST_MAPPED_TOKENS = 1024
"""Of one routing map: more than a person reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """One run: logits (B, S, V); site -> positions int64 (B, k); site -> what it is judged by. Floats of one dtype."""

    logits_BSV: np.ndarray
    routed: Mapping[Site, np.ndarray]
    judged: Mapping[Site, Judged]


class Programs:
    """A model's captured programs, each made when a shape is first run, and the module that they must equal."""

    def __init__(self, loaded: ExportableModel) -> None:
        self._loaded = loaded
        self._modules: dict[Precision, torch.nn.Module | None] = {}
        self._programs: dict[tuple[int, int, Precision], torch.export.ExportedProgram] = {}

    def module(self, precision: Precision) -> torch.nn.Module | None:
        """The eager module; None where this machine's memory does not hold it in float64 as well."""
        if precision not in self._modules:
            self._modules[precision] = self._loaded.module() if precision == "float32" else self._double()
        return self._modules[precision]

    def _double(self) -> torch.nn.Module | None:
        needed = FLOAT64_BYTES * sum(tensor.numel() for tensor in self._loaded.weights.values())
        module = self.module("float32")
        return copy.deepcopy(module).double() if module is not None and needed < free_bytes() // 2 else None

    def program(self, bucket: Bucket, precision: Precision) -> torch.export.ExportedProgram:
        """The captured program of a shape, its routing sites marked.

        Raises:
            CaptureError: the module cannot be captured, or the program does not compute the same bits.
        """
        from mod_export.export.capture import bucket_example, exported

        key = (bucket.batch, bucket.seq, precision)
        if key not in self._programs:
            module = self.module(precision)
            assert module is not None
            where = f"the reference in {precision} at {bucket.name}"
            program = exported(module, bucket_example(module, bucket, bucket.seq), where)
            if precision == "float32":
                check_program(program, module, bucket, self._loaded.vocab_size)
            self._programs[key] = program
        return self._programs[key]


def check_program(
    program: torch.export.ExportedProgram, module: torch.nn.Module, bucket: Bucket, vocab_size: int
) -> None:
    """Compares a captured program with its module on a full batch and on a padded one, bit for bit.

    Raises:
        CaptureError: an output differs.
    """
    import torch

    from mod_export.export.routing_sites import SiteRun, run_sites
    from mod_export.export.weights import state_of

    rng = np.random.default_rng(0)
    for lengths_B in (np.full(bucket.batch, bucket.seq), rng.integers(1, bucket.seq + 1, bucket.batch)):
        ids_BS = rng.integers(0, vocab_size, (bucket.batch, bucket.seq))
        inputs = (torch.from_numpy(ids_BS), torch.from_numpy(lengths_B))
        with torch.no_grad():
            expected = module(*inputs)
        found = run_sites(program, state_of(module), inputs, SiteRun(bucket.seq))
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise CaptureError(
                    f"the captured program is not the eager model: at {bucket.name} its output {n} differs by up to "
                    f"{float((one - other).abs().max()):.3g}, expected the same bits, so parity with it would say "
                    "nothing about the model; please report this model"
                )


class Reference:
    """Runs a model's captured programs. A run depends on batch and routing alone, so it is kept for the next target."""

    name = "eager float32"

    def __init__(
        self,
        loaded: ExportableModel,
        outputs: Outputs = "logits",
        programs: Programs | None = None,
        replaced: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """`outputs` is what the candidates return, `replaced` other values of some weights, by name.

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
        self._states: dict[Precision, dict[str, torch.Tensor]] = {}
        self._moved: list[dict[str, torch.Tensor]] | None = None
        self._kept: dict[str, Traced] = {}
        self._remembered: dict[str, object] = {}

    @property
    def module(self) -> torch.nn.Module:
        """The eager module in float32, with its own weights."""
        module = self._programs.module("float32")
        assert module is not None
        return module

    def with_weights(self, replaced: Mapping[str, np.ndarray]) -> Reference:
        """The same model with other values of some weights, by name; nothing that is found with it is kept here."""
        return Reference(self.loaded, self.outputs, self._programs, {**self._replaced, **replaced})

    def returning(self, outputs: Outputs) -> Reference:
        """The same model for candidates that return something else."""
        return Reference(self.loaded, outputs, self._programs, self._replaced)

    @property
    def output_head(self) -> OutputHead:
        """Makes logits of what candidates return, where that is hidden states."""
        assert isinstance(self.loaded, OutputHead)
        return self.loaded

    def k_by_layer(self, bucket: Bucket) -> dict[Site, int]:
        """Routing site -> slots, in the order of the decisions, in the captured program of a shape."""
        from mod_export.export.routing_sites import routing_sites

        return {site.name: site.k for site in routing_sites(self._programs.program(bucket, "float32"))}

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

    def exact(self, batch: Batch, routing: Mapping[Site, np.ndarray]) -> Traced | None:
        """The same in float64; None where this machine's memory does not hold the model in float64 as well."""
        return None if self._programs.module("float64") is None else self._run(batch, routing, "float64")

    def shaken(self, batch: Batch, routing: Mapping[Site, np.ndarray]) -> list[Traced]:
        """The same in float32 with every weight moved to one of its two neighbouring numbers, drawn at random: SHAKEN
        runs, each with another rounding error. Empty where this machine's memory does not hold the weights so often.

        A single run can be exact by luck where a model is ill-conditioned (Monte Carlo arithmetic; Parker, Pierce and
        Eggert, Computing in Science and Engineering 2(4), 2000).
        """
        if self._moved is None:
            self._moved = self._move()
        return [self._trace(state, batch, routing, "float32") for state in self._moved]

    def _move(self) -> list[dict[str, torch.Tensor]]:
        import torch

        state = self._state("float32")
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

    def _state(self, precision: Precision) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, replaced ones among them."""
        import torch

        from mod_export.export.weights import state_of

        if precision not in self._states:
            module = self._programs.module(precision)
            assert module is not None
            state = state_of(module)
            given = {name: torch.from_numpy(array).to(state[name].dtype) for name, array in self._replaced.items()}
            self._states[precision] = {**state, **given}
        return self._states[precision]

    def _run(self, batch: Batch, routing: Mapping[Site, np.ndarray], precision: Precision) -> Traced:
        key = _digest(batch, routing, precision)
        if key in self._kept:
            return self._kept[key]
        traced = self._trace(self._state(precision), batch, routing, precision)
        kept = sum(known.logits_BSV.nbytes for known in self._kept.values())
        if kept + traced.logits_BSV.nbytes <= KEPT_BYTES:
            self._kept[key] = traced
        return traced

    def _trace(
        self,
        state: Mapping[str, torch.Tensor],
        batch: Batch,
        routing: Mapping[Site, np.ndarray],
        precision: Precision,
    ) -> Traced:
        import torch

        from mod_export.export.routing_sites import SiteRun, run_sites

        bucket = Bucket(*batch.ids_BS.shape)
        run = SiteRun(bucket.seq, {site: torch.from_numpy(index_BK) for site, index_BK in routing.items()})
        inputs = (torch.from_numpy(batch.ids_BS), torch.from_numpy(batch.lengths_B))
        logits_BSV, *_ = run_sites(self._programs.program(bucket, precision), state, inputs, run)
        found = run.selections.items()
        return Traced(
            logits_BSV.numpy(),
            {site: one.index_BK.numpy() for site, one in found},
            {site: Judged(one.rule, one.score_BS.numpy(), one.open_BS.numpy()) for site, one in found},
        )


def _digest(batch: Batch, routing: Mapping[Site, np.ndarray], dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype} {batch.ids_BS.shape}".encode())
    digest.update(batch.ids_BS.tobytes())
    digest.update(batch.lengths_B.tobytes())
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
    ids_S, loaded = batch.ids_BS[0], reference.loaded
    texts = loaded.token_texts(ids_S) if batch.kind == "text" and isinstance(loaded, Text) else None
    return RoutingMap(
        bucket=bucket.name,
        tokens=tuple(map(str, ids_S)) if texts is None else tuple(texts),
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
