"""Builds the engines of one entry, and compares their outputs on fresh inputs with eager."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import mod_export
from benchmarks.corpus.entry import ROWS, Entry, Inputs, eager, routed_calls
from mod_export.errors import CaptureError, ModExportError, UsageError
from mod_export.rows.report import BuildReport

RUNS = frozenset({"ort-cpu", "openvino", "inductor"})
TARGETS = ("ort-cpu", "openvino", "inductor", "tensorrt-rtx")
"""All targets, in the order of the page's columns. A plan of TensorRT-RTX is built but not run."""
FRESH = range(1000, 1003)
"""Seeds of the inputs that engines and eager are compared on; a build uses none of them."""
LARGEST_ERROR = 1e-4
"""Allowed error, as a share of the output's root mean square. Both sides round float32 (6e-8) some hundred times."""
CONFIG = """
[target.tensorrt-rtx]
architectures = ["sm89"]
dtypes = ["float16"]
[latency]
samples = 5
max_samples = 5
max_seconds = 0.0
bootstrap = 100
[cost]
profile_runs = 0
[generation]
build = "never"
"""
"""Parity is judged in full. Latency gets the fewest samples possible, because nobody reads it here."""
Row = dict[str, Any]


def run(entry: Entry, targets: Sequence[str]) -> list[Row]:
    """Returns a row for each target. Builds all targets together; if that fails, builds each of them alone."""
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        rows = _built(entry, targets, folder)
    except ModExportError as error:
        if len(targets) > 1 and not isinstance(error, (CaptureError, UsageError)):
            return [row for target in targets for row in run(entry, [target])]
        rows = {target: {"status": "refused", "sentence": str(error)} for target in targets}
    except Exception as error:  # A bug of the project becomes a row; it must not end the run.
        if len(targets) > 1:
            return [row for target in targets for row in run(entry, [target])]
        last = "".join(traceback.format_exception(error)[-4:])
        text = f"{type(error).__name__}: {error}"
        rows = {target: {"status": "error", "sentence": text, "traceback": last} for target in targets}
    finally:
        shutil.rmtree(folder)
    seconds = round((time.monotonic() - begin) / len(targets), 1)
    return [described(entry, target) | rows[target] | {"seconds": seconds} for target in targets]


def described(entry: Entry, target: str) -> Row:
    """Fields of a row that are known before anything runs."""
    return {
        "name": entry.name,
        "package": entry.package,
        "class": entry.of,
        "variant": entry.variant,
        "release": version(entry.package),
        "manner": entry.manner.__name__,
        "target": target,
    }


def _built(entry: Entry, targets: Sequence[str], folder: Path) -> dict[str, Row]:
    model = entry.build()
    expected = len(routed_calls(model, entry.inputs(ROWS, entry.tokens)))
    config, out = folder / "corpus.toml", folder / "build"
    config.write_text(CONFIG, encoding="utf-8")
    report = mod_export.build(
        model, inputs=entry.inputs, buckets=[(ROWS, entry.tokens)], targets=targets, out=out, config=config,
        name=entry.of, verbosity=-1,
    )  # fmt: skip
    sites = max((len({site.layer for site in row.routing.layers}) for row in report.parity), default=0)
    rows: dict[str, Row] = {}
    for target in targets:
        row: Row = {"routed": expected, "sites": sites}
        reasons = _reasons(report, target)
        if sites != expected:
            reasons.append(f"{sites} routing sites found of {expected}")
        if target in RUNS and not reasons:
            row["max_error"] = error = largest_error(entry, model, out, target)
            if not error <= LARGEST_ERROR:
                reasons.append(f"on fresh inputs an output differs by {error:.2g} of its root mean square")
        rows[target] = row | {"status": "fail" if reasons else "pass", "sentence": "; ".join(reasons)}
    return rows


def _reasons(report: BuildReport, target: str) -> list[str]:
    """Reasons in the report why the engine of a target, or a graph that it is made from, fails."""
    engine = any(file.kind == "engine" and file.target == target for file in report.artifacts)
    about = {target, f"{target} graph", "portable"}
    judged = [row for row in report.parity if row.target in about]
    reasons = [f"{row.target}: {reason}" for row in judged if not row.passed for reason in row.reasons]
    reasons += [f"{row.path}: {reason}" for row in report.structure if not row.passed for reason in row.reasons]
    return [*reasons, *([] if engine else [f"no engine of {target} was built"])]


def largest_error(entry: Entry, model: nn.Module, out: Path, target: str) -> float:
    """Returns the largest `relative_error` of any output on the fresh inputs."""
    worst = 0.0
    with mod_export.load(out, target=target, threads=1) as engine:
        for seed in FRESH:
            torch.manual_seed(seed)
            inputs = entry.inputs(ROWS, entry.tokens)
            expected = eager(model, inputs)
            outputs = list(engine.infer(_feeds(inputs, next(iter(engine.inputs.values())))).values())
            if [output.shape for output in outputs] != [output.shape for output in expected]:
                raise AssertionError(f"outputs {[x.shape for x in outputs]} of {[x.shape for x in expected]}")
            worst = max(worst, *map(relative_error, outputs, expected))
    return worst


def _feeds(inputs: Inputs, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays by the engine's input names. Named tensors keep their names; those in tuples get the others in order."""
    by_name = inputs if isinstance(inputs, dict) else {}
    named = {name: value for name, value in by_name.items() if isinstance(value, torch.Tensor)}
    unnamed = [
        value
        for value in (by_name.values() if by_name else inputs)
        if not by_name or not isinstance(value, torch.Tensor)
    ]
    leaves = [leaf for leaf in pytree.tree_leaves(unnamed) if isinstance(leaf, torch.Tensor)]
    named |= zip([name for name in names if name not in named], leaves, strict=True)
    return {name: tensor.numpy() for name, tensor in named.items()}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the root mean square of `expected`; infinite for any NaN, or if the infinities differ."""
    numbers = np.isfinite(expected)
    if not np.array_equal(numbers, np.isfinite(found)) or not np.array_equal(expected[~numbers], found[~numbers]):
        return float("inf")
    if not numbers.any():
        return 0.0
    wide = expected[numbers].astype(np.float64)
    return float(np.abs(found[numbers] - wide).max() / max(np.sqrt((wide**2).mean()), 1e-30))
