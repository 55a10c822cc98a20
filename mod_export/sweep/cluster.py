"""Runs the cells of a sweep on a Ray cluster. Each node runs one cell at a time and nothing else.

A cell has its own process here too, started by a Ray task that reserves every CPU and GPU of its node. If a node does
not share the sweep's folder, it uses its own cache folder and sends back the report; the engines stay on the node.
"""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mod_export.environment import cache_folder
from mod_export.errors import COULD_NOT_BUILD, UsageError
from mod_export.folder.files import write_whole
from mod_export.folder.manifest import MANIFEST, REPORT_FILES
from mod_export.model.checkpoint import files_of, sha256_of
from mod_export.model.request import Request
from mod_export.model.tokenizer_files import READ
from mod_export.sweep.cell import CellJob, CellRunner, digest_of_tokenizer, failed_cell, run_cell
from mod_export.sweep.schema import CellEntry

LOCAL = "local"
RETURNED_FILES = (*REPORT_FILES, MANIFEST)
"""Files of a build folder that a node sends back if it does not share the sweep's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """Result that a node sends back: the row, the log, and small files if the folder is not shared."""

    entry: str
    log: bytes
    files: Mapping[str, bytes]


def run_on_cluster(address: str, folder: Path, checkpoint: Path) -> CellRunner:
    """Returns a runner for the cluster at `address`; `local` starts one on this machine for the time of the sweep.

    Raises, when the runner runs:
        UsageError: Ray is not installed, or there is no such cluster.
    """

    def run(jobs: Sequence[CellJob]) -> Generator[CellEntry]:
        if not jobs:
            return
        ray = _connected(address)
        marker = folder.absolute() / "cells" / f".shared-{uuid.uuid4().hex}"
        try:
            marker.touch()
            yield from _distribute(ray, jobs, marker, checkpoint)
        finally:
            marker.unlink(missing_ok=True)
            ray.shutdown()

    return run


def cell_on_node(job: CellJob, marker: Path, fetch: Callable[[], Mapping[str, bytes]]) -> NodeResult:
    """Runs a cell on the current node.

    Args:
        job: the job, with paths of the machine that started the sweep.
        marker: a file in the sweep's folder. If it exists on this node, the folder is shared.
        fetch: returns the files of the checkpoint and of its tokenizer; only called if the node does not have them.
    """
    shared = marker.is_file()
    if not shared:
        home = cache_folder() / "sweep" / job.checkpoint_sha256[:16] / job.fingerprint[:16]
        job = job.model_copy(update={"root": home / "build", "row": home / "row.json"})
    if not _is_here(job):
        job = job.model_copy(update={"checkpoint": _unpacked(fetch(), job)})
    where = {"node": platform.node()} | ({} if shared else {"folder": str(job.root)})
    entry = run_cell(job).model_copy(update=where)
    files = {} if shared else {name: job.root / name for name in RETURNED_FILES}
    return NodeResult(
        entry=entry.model_dump_json(indent=1),
        log=job.log.read_bytes(),
        files={name: path.read_bytes() for name, path in files.items() if path.is_file()},
    )


def packed_checkpoint(checkpoint: Path) -> dict[str, bytes]:
    """Path -> content of the files of a checkpoint. Paths start with its name; build folders inside it are left out. A
    model.pt comes first, and after it the tokenizer beside it.
    """
    if checkpoint.is_file():
        beside = chain.from_iterable(map(checkpoint.parent.glob, READ)) if checkpoint.name == "model.pt" else ()
        files = (checkpoint, *sorted(path for path in beside if path.is_file()))
        return {path.relative_to(checkpoint.parent).as_posix(): path.read_bytes() for path in files}
    resolved = checkpoint.resolve()
    return {path.relative_to(resolved.parent).as_posix(): path.read_bytes() for path in files_of(resolved)}


def _is_here(job: CellJob) -> bool:
    """Says whether this node has the checkpoint of a job where the job says, and the same tokenizer beside it."""
    if not job.checkpoint.exists() or sha256_of(job.checkpoint) != job.checkpoint_sha256:
        return False
    try:
        tokenizer, _ = Request.checkpoint(job.checkpoint).tokenizer()
    except UsageError:
        return False  # What the node has beside it is no tokenizer.
    return digest_of_tokenizer(tokenizer) == job.tokenizer_sha256


def _unpacked(files: Mapping[str, bytes], job: CellJob) -> Path:
    # Files of another tokenizer would be read together with these.
    tokenizer = (job.tokenizer_sha256 or "none")[:16]
    folder = cache_folder() / "sweep" / job.checkpoint_sha256[:16] / f"checkpoint-{tokenizer}"
    for name, data in files.items():
        write_whole(folder / name, data, "-o")
    return folder / next(iter(files)).partition("/")[0]


def _connected(address: str) -> Any:
    # Ray reports usage over the network by default, and reads this variable when it starts.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise UsageError(f'--ray: Ray cannot be loaded ({error}); pip install "mod-export[ray]"') from error
    # None for a running cluster, which decides about its dashboard itself.
    dashboard = False if address == LOCAL else None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise UsageError(
            f"--ray {address}: no cluster there ({str(error).strip().splitlines()[0]}); expected the address of a "
            "running one, `auto`, or `local` to start one here"
        ) from error
    return ray


def _distribute(ray: Any, jobs: Sequence[CellJob], marker: Path, checkpoint: Path) -> Iterator[CellEntry]:
    # In a list, so that Ray does not copy the checkpoint to a node that has it already.
    packed = [ray.put(packed_checkpoint(checkpoint))]
    waiting, free = list(jobs), _nodes(ray)
    running: dict[Any, tuple[CellJob, dict[str, Any]]] = {}
    while waiting or running:
        while waiting and free:
            job, node = waiting.pop(0), free.pop(0)
            running[_submitted(ray, node, job, marker, packed)] = (job, node)
        if not running:
            yield from (
                failed_cell(job, COULD_NOT_BUILD, "no node of the Ray cluster is left to run it") for job in waiting
            )
            return
        (reference,), _ = ray.wait(list(running), num_returns=1)
        job, node = running.pop(reference)
        try:
            yield _stored(ray.get(reference), job)
        except ray.exceptions.RayError as error:
            yield failed_cell(
                job, COULD_NOT_BUILD, f"lost on a node of the Ray cluster: {str(error).strip().splitlines()[-1]}"
            )
        if node["NodeID"] in {alive["NodeID"] for alive in _nodes(ray)}:
            free.append(node)


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """Returns the nodes that are alive and have a CPU, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _submitted(ray: Any, node: dict[str, Any], job: CellJob, marker: Path, packed: list[Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    whole_node = ray.remote(_task).options(
        num_cpus=node["Resources"]["CPU"],
        num_gpus=node["Resources"].get("GPU", 0),
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )
    return whole_node.remote(job.model_dump_json(), marker, packed)


def _task(job_json: str, marker: Path, packed: list[Any]) -> NodeResult:
    import ray

    return cell_on_node(CellJob.model_validate_json(job_json), marker, lambda: ray.get(packed[0]))


def _stored(sent: NodeResult, job: CellJob) -> CellEntry:
    for name in RETURNED_FILES:
        if name in sent.files:
            write_whole(job.root / name, sent.files[name], "-o")
    write_whole(job.log, sent.log, "-o")
    write_whole(job.row, sent.entry + "\n", "-o")
    return CellEntry.model_validate_json(sent.entry)
