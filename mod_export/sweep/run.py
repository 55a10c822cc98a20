"""Runs a sweep: plans the grid, reuses finished cells, runs the rest, and writes the results after every cell."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mod_export.config import BuildConfig
from mod_export.environment import describe_machine, package_version, source_digest
from mod_export.errors import COULD_NOT_BUILD, GATE_FAILED, BuildFolderError
from mod_export.folder.files import write_whole
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.model import Model
from mod_export.sweep.cell import CellJob, CellRunner, finished_cell, run_locally
from mod_export.sweep.findings import findings_of
from mod_export.sweep.grid import Axes, Cell, cells_of
from mod_export.sweep.page import render_html
from mod_export.sweep.schema import SCHEMA_VERSION, CellEntry, SweepModel, SweepReport
from mod_export.sweep.text import SweepProgress

OWN = {"cells", "sweep.json", "sweep.html", ".lock", ".sweep.json", ".sweep.html"}
VERSIONS = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "tensorrt", "tensorrt_rtx")


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
        jobs = [_job(cell, model, checkpoint, config, folder, command) for cell in cells]
        rows = {job.name: entry for job in jobs if (entry := finished_cell(job, here=here))}
        progress.planned(len(jobs), len(rows))
        missing = [job for job in jobs if job.name not in rows]

        def written() -> SweepReport:
            entries = [rows[job.name] for job in jobs if job.name in rows]
            report = _report(model, config, command, len(jobs), entries, _notes(model, axes))
            write_whole(folder / "sweep.json", report.to_json(), "-o")
            write_whole(folder / "sweep.html", render_html(report), "-o")
            return report

        report = written()
        with contextlib.closing(_runner(ray_address, folder, checkpoint)(missing)) as finished:
            for entry in finished:
                rows[entry.name] = entry
                report = written()
                progress.cell_finished(entry)
    return report


def exit_code_of(report: SweepReport) -> int:
    """Returns 4 if any cell missed a gate, else 3 if any cell could not be built, else 0."""
    if any(cell.missed for cell in report.cells):
        return GATE_FAILED
    return COULD_NOT_BUILD if any(cell.failed for cell in report.cells) else 0


def _runner(ray_address: str | None, folder: Path, checkpoint: Path) -> CellRunner:
    if ray_address is None:
        return run_locally
    from mod_export.sweep.cluster import run_on_cluster

    return run_on_cluster(ray_address, folder, checkpoint)


def _job(cell: Cell, model: Model, checkpoint: Path, config: BuildConfig, folder: Path, command: str) -> CellJob:
    cells = folder.absolute() / "cells"
    cell_config = _config_of(cell, config)
    depends: dict[str, Any] = {
        "checkpoint_sha256": model.origin.checkpoint_sha256,
        "capacity": cell.capacity,
        "config": cell_config,
        "code": _code(model),
    }
    text = json.dumps({**depends, "versions": {name: package_version(name) for name in VERSIONS}}, sort_keys=True)
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


def _config_of(cell: Cell, config: BuildConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json", by_alias=True)
    data |= {"buckets": [[cell.bucket.batch, cell.bucket.seq]], "targets": [cell.target]}
    data["latency"] |= {"min_speedup": 0.0}
    # A sweep does not measure writing text, whose graphs take longer to build than all others of a cell.
    data["generation"] |= {"build": "never"}
    return data


def _code(model: Model) -> dict[str, str]:
    return {package: source_digest(package) for package in ("mod_export", model.origin.package)}


def _notes(model: Model, axes: Axes) -> list[str]:
    if axes.capacities and model.capacity is None:
        return ["the checkpoint has a capacity for each layer; here every routed layer has the cell's capacity"]
    return []


def _report(
    model: Model, config: BuildConfig, command: str, planned: int, cells: Sequence[CellEntry], notes: Sequence[str]
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
        planned=planned,
        cells=tuple(cells),
        findings=findings_of(cells, notes),
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the sweep's folder against other sweeps.

    Raises:
        BuildFolderError: the path is a file, holds foreign files, is not writable, or is in use by another sweep.
    """
    if folder.is_dir():
        foreign = sorted(path.name for path in folder.iterdir() if path.name.removesuffix(".partial") not in OWN)
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
        yield
