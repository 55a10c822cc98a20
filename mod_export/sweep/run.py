"""Runs a sweep: checks the grid, reuses finished cells, runs the rest, and writes the results after every cell."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.environment import PACKAGES, describe_machine, package_version, source_digest
from mod_export.errors import COULD_NOT_BUILD, GATE_FAILED, BuildFolderError, CheckpointError, ConfigError, TargetError
from mod_export.folder.files import PARTIAL, write_whole
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model, token_ids
from mod_export.model.request import Request
from mod_export.model.tokenizer_files import TokenizerFiles
from mod_export.pipeline.plan import check_names
from mod_export.sweep.cell import CellJob, digest_of_tokenizer, finished_cell, run_locally
from mod_export.sweep.cluster import run_on_cluster
from mod_export.sweep.findings import findings_of
from mod_export.sweep.schema import SCHEMA_VERSION, CellEntry, CellKey, SweepModel, SweepReport
from mod_export.sweep.show import SweepProgress, render_html
from mod_export.types import Bucket

OWN = {"cells", "sweep.json", "sweep.html", ".lock"}
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes as typed. Each string may hold several values separated by commas. An empty axis means the default."""

    capacities: Sequence[str] = ()
    seqs: Sequence[str] = ()
    batches: Sequence[str] = ()
    targets: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One build of the grid. If `capacity` is None, the checkpoint's own schedule of capacities per layer is used."""

    capacity: float | None
    bucket: Bucket
    target: str

    @property
    def name(self) -> str:
        """Name in file names, such as c0.125-b1s512-ort-cpu."""
        capacity = "own" if self.capacity is None else f"c{float(self.capacity)!r}".removesuffix(".0")
        return f"{capacity}-{self.bucket.name}-{self.target}"


def cells_of(model: Model, config: BuildConfig, axes: Axes, *, here: bool) -> tuple[GridCell, ...]:
    """Returns every cell, ordered by target, batch, length and capacity. `config` and `model` fill empty axes.

    With `here`, the cells run on this machine, which must support the targets.

    Raises:
        CheckpointError: the model has no routed layers, or no dense baseline.
        ConfigError: values are not numbers, or the model does not accept them; it lists all of them.
        TargetError: a target is unknown, or cannot be measured on this machine.
    """
    if model.routes_depth is False or not model.has_capacity:
        raise CheckpointError(f"{model.name}: no layer is routed by a capacity that could be swept")
    if model.dense() is None:
        raise CheckpointError(
            f"{model.name}: has no dense baseline of its own, beside which every cell of a sweep is timed"
        )
    problems: list[str] = []
    capacities = _numbers("--capacity", axes.capacities, float, "a number above 0", problems)
    seqs = _numbers("--seq", axes.seqs, int, "a whole number of at least 1", problems)
    batches = _numbers("--batch", axes.batches, int, "a whole number of at least 1", problems)
    longest = token_ids(model).max_positions
    problems += [f"--seq {seq}: longer than the model's {longest} positions" for seq in seqs if seq > longest]
    for capacity in capacities:
        try:
            model.with_capacity(capacity)
        except ValueError as error:
            problems.append(f"--capacity {capacity:g}: {error}")
    if problems:
        raise ConfigError(problems)
    model_capacity: list[float | None] = [model.capacity]
    targets = _targets(axes.targets, config, here=here)
    return tuple(
        GridCell(capacity=capacity, bucket=bucket, target=target)
        for target, bucket, capacity in product(
            targets, _buckets(config, longest, batches, seqs), capacities or model_capacity
        )
    )


def _numbers(
    option: str, texts: Sequence[str], kind: Callable[[str], Number], expected: str, problems: list[str]
) -> list[Number]:
    numbers = set()
    for text in _split(texts):
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        # Not "<= 0": this also refuses NaN.
        if not number > 0:
            problems.append(f"{option}: expected {expected}, got {text!r}")
        numbers.add(number)
    return [] if problems else sorted(numbers)


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _buckets(config: BuildConfig, longest: int, batches: Sequence[int], seqs: Sequence[int]) -> list[Bucket]:
    """The buckets of the configuration, or the product of batches and lengths if an axis is given."""
    configured = config.bucket_list(longest)
    if not batches and not seqs:
        return list(configured)
    crossed = product(batches or {bucket.batch for bucket in configured}, seqs or {bucket.seq for bucket in configured})
    return sorted(Bucket(batch, seq) for batch, seq in crossed)


def _targets(requested: Sequence[str], config: BuildConfig, *, here: bool) -> list[str]:
    wanted = list(dict.fromkeys(_split(requested))) or list(config.targets)
    check_names(wanted)
    if wanted and not here:
        return wanted
    availability = {name: ENGINES[name].availability() for name in wanted or ENGINES}
    able = [name for name, status in availability.items() if status.builds and status.runs]
    refused = [f"{name}: {status.reason}" for name, status in availability.items() if name not in able]
    if not able or (wanted and refused):
        raise TargetError("a sweep builds and measures, which cannot be done here for " + "; ".join(refused))
    return wanted or able[:1]


def sweep(
    checkpoint: Path,
    config: BuildConfig,
    folder: Path,
    axes: Axes,
    ray_address: str | None,
    progress: SweepProgress,
    command: str,
) -> SweepReport:
    """Builds and measures every cell that is not finished yet, and writes sweep.json and sweep.html.

    Every cell starts from `config`, but without the speed-up gate, because a sweep must also show slow cells. Without
    the address of a Ray cluster, cells run on this machine, one at a time.

    Raises:
        ModExportError: the request is invalid. A cell that fails becomes a row, not an error.
    """
    model = model_from_checkpoint(checkpoint)
    here = ray_address is None
    cells = cells_of(model, config, axes, here=here)
    if folder.resolve().is_relative_to(checkpoint.resolve()):
        raise BuildFolderError(f"{folder}: lies in the checkpoint's own folder; name another folder with -o")
    with _locked(folder):
        tokenizer, _ = Request.checkpoint(checkpoint).tokenizer()
        jobs = [_job(cell, model, checkpoint, config, folder, command, tokenizer) for cell in cells]
        rows = {job.name: entry for job in jobs if (entry := finished_cell(job, here=here))}
        progress.planned(len(jobs), len(rows))
        missing = [job for job in jobs if job.name not in rows]

        def written() -> SweepReport:
            entries = [rows[job.name] for job in jobs if job.name in rows]
            report = _report(model, config, command, jobs, entries, _notes(model, axes))
            write_whole(folder / "sweep.json", report.to_json(), "-o")
            write_whole(folder / "sweep.html", render_html(report), "-o")
            return report

        report = written()
        run = run_locally if ray_address is None else run_on_cluster(ray_address, folder, checkpoint)
        with contextlib.closing(run(missing)) as finished:
            for entry in finished:
                rows[entry.name] = entry
                report = written()
                progress.cell_finished(entry)
    return report


def exit_code_of(report: SweepReport) -> int:
    """Returns 4 if any cell missed a gate, else 3 if any cell could not be built, else 0."""
    return GATE_FAILED if report.missed else COULD_NOT_BUILD if report.failed else 0


def _job(
    cell: GridCell,
    model: Model,
    checkpoint: Path,
    config: BuildConfig,
    folder: Path,
    command: str,
    tokenizer: TokenizerFiles | None,
) -> CellJob:
    cells = folder.absolute() / "cells"
    cell_config = _config_of(cell, config)
    depends: dict[str, Any] = {
        "checkpoint_sha256": model.origin.checkpoint_sha256,
        "tokenizer_sha256": digest_of_tokenizer(tokenizer),
        "capacity": cell.capacity,
        "config": cell_config,
        "code": {package: source_digest(package) for package in ("mod_export", model.origin.package)},
    }
    text = json.dumps({**depends, "versions": {name: package_version(name) for name in PACKAGES}}, sort_keys=True)
    return CellJob(
        name=cell.name,
        checkpoint=checkpoint.absolute(),
        batch=cell.bucket.batch,
        seq=cell.bucket.seq,
        target=cell.target,
        command=command,
        root=cells / cell.name,
        folder=f"cells/{cell.name}",
        row=cells / f"{cell.name}.json",
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        **depends,
    )


def _config_of(cell: GridCell, config: BuildConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json", by_alias=True)
    data |= {"buckets": [[cell.bucket.batch, cell.bucket.seq]], "targets": [cell.target]}
    data["latency"] |= {"min_speedup": 0.0}
    # A sweep does not measure writing text, whose graphs take longer to build than all others of a cell.
    data["generation"] |= {"build": "never"}
    return data


def _notes(model: Model, axes: Axes) -> list[str]:
    if axes.capacities and model.capacity is None:
        return ["the checkpoint has a capacity for each layer; here every routed layer has the cell's capacity"]
    return []


def _report(
    model: Model,
    config: BuildConfig,
    command: str,
    grid: Sequence[CellKey],
    cells: Sequence[CellEntry],
    notes: Sequence[str],
) -> SweepReport:
    return SweepReport(
        schema_version=SCHEMA_VERSION,
        command=command,
        model=SweepModel(
            name=model.name,
            architecture=model.origin.architecture,
            parameters=model.parameters,
            checkpoint_sha256=model.origin.checkpoint_sha256,
            capacity=model.capacity,
            spec=dict(model.spec),
        ),
        environment=describe_machine(),
        config=config.model_dump(mode="json", by_alias=True),
        planned=len(grid),
        cells=tuple(cells),
        findings=findings_of(grid, cells, notes),
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the sweep's folder against other sweeps.

    Raises:
        BuildFolderError: the path is a file, holds foreign files, is not writable, or is in use by another sweep.
    """
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        foreign = [name for name in names if name not in OWN and not name.startswith(PARTIAL)]
        if foreign:
            raise BuildFolderError(
                f"{folder}: holds files that are no sweep's ({', '.join(foreign[:3])}); name an empty or new folder "
                "with -o"
            )
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BuildFolderError(
            f"{folder}: cannot be written ({error.strerror}); name another folder with -o"
        ) from error
    with contextlib.closing(os.fdopen(lock)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildFolderError(
                f"{folder}: another sweep is at work here; wait for it, or name another folder with -o"
            ) from error
        # A sweep that was killed leaves what it was writing.
        for leftover in [*folder.glob(f"{PARTIAL}*"), *(folder / "cells").glob(f"{PARTIAL}*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        yield
