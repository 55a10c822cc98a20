"""The roofline of this machine (Williams, Waterman and Patterson, CACM 52(4), 2009): how fast its processor multiplies
matrices, and how fast it reads and writes memory.

The roofline is measured once and kept in the user's cache folder, because a number that changes with every build
explains nothing. It is measured again for another processor, number of usable cores, dtype, thread count or library,
and when the configuration asks for it (cost.measure_again). A measurement on a busy machine has a note that says so; it
is used once and not kept.

Both rates are timed with the library that the engines run on. Right-hand sides are constant like weights, so that a
library can pack them in advance. Repeats of the different sizes are interleaved, and the fastest repeat of a size
counts: a roofline is the most that the machine can do, and other load can only make a repeat slower. If the median
repeat is much slower than the fastest, the other load may have lasted all the time, and the rate is unsteady.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pydantic import TypeAdapter, ValidationError

from mod_export.environment import cache_folder, package_version
from mod_export.errors import UsageError
from mod_export.folder.files import write_whole
from mod_export.measure.conditions import Watch
from mod_export.rows.cost import Roofline
from mod_export.types import DType

CACHED = TypeAdapter(dict[str, Roofline])
"""The conditions of a measurement, as JSON -> the roofline that was measured."""
MOST_OTHERS = 0.1
"""Share of CPU time that other processes may take during a measurement that is to be kept."""
BUSY = "; the machine was busy, so both may be too low"


def cached_roofline(
    machine: Mapping[str, Any], dtype: DType, threads: int, *, measure_again: bool = False
) -> Roofline | None:
    """Returns the roofline of this machine's processor, measured if it is not in the cache.

    A measurement takes about two seconds. A cache that is damaged or cannot be written is ignored. `measure_again`
    replaces the entry in the cache.

    Returns:
        None for any dtype except float32, or if neither ONNX Runtime nor PyTorch is installed.
    """
    library = next((name for name in ("onnxruntime", "torch") if package_version(name)), None)
    if dtype != "float32" or library is None:
        return None
    where = [machine[name] for name in ("cpu", "logical_cores", "usable_cores")]
    key = json.dumps([*where, dtype, threads, library, package_version(library)])
    known = _read()
    if key in known and not measure_again:
        return known[key]
    measured = _measured(dtype, threads, library)
    if not measured.method.endswith(BUSY):
        with contextlib.suppress(UsageError):
            write_whole(cache_file(), CACHED.dump_json({**_read(), key: measured}, indent=1))
    return measured


def _measured(dtype: DType, threads: int, library: str) -> Roofline:
    watch = Watch()
    gemm, stream = gemm_rate(library, threads), stream_rate(library, threads)
    other_load = watch.conditions().other_load or 0.0
    quiet = gemm.steady and stream.steady and other_load <= MOST_OTHERS
    method = "MatMul with constant weights; negation of a large array"
    name = {"onnxruntime": "ONNX Runtime", "torch": "PyTorch"}[library]
    return Roofline(
        dtype=dtype,
        threads=threads,
        gemm_gflops=round(gemm.giga, 2),
        bandwidth_gbs=round(stream.giga, 2),
        method=f"{name} {package_version(library)}: {method}{'' if quiet else BUSY}",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def cache_file() -> Path:
    """Returns the file that keeps measurements: $XDG_CACHE_HOME/mod-export/roofline.json, in ~/.cache by default."""
    return cache_folder() / "roofline.json"


def _read() -> dict[str, Roofline]:
    try:
        return CACHED.validate_json(cache_file().read_bytes())
    except (OSError, ValidationError):
        return {}


SIZES = ((512, 512, 512), (512, 512, 1408), (512, 1408, 512), (128, 512, 1408), (64, 512, 512))
"""(rows, inner, columns) of the layers of a small transformer at prefill, dense and routed."""
REPEATS = 15
WARMUP = 2
STEADY = 1.25
"""Largest time of the median repeat, as a multiple of the fastest one."""
SMALLEST_STREAM = 64 * 2**20
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Rate:
    """1e9 FLOPs or bytes per second, and whether the repeats agreed."""

    giga: float
    steady: bool


def gemm_rate(library: str, threads: int) -> Rate:
    """Measures the FLOP rate of float32 matrix products: the median over SIZES."""
    flops_N = 2 * np.prod(np.array(SIZES), axis=1)
    return _rate([product(library, threads, *size) for size in SIZES], flops_N)


def stream_rate(library: str, threads: int) -> Rate:
    """Measures the rate of bytes read and written by the negation of a float32 array that is larger than the caches."""
    num_numbers = _stream_bytes() // 4
    return _rate([_negation(library, threads, num_numbers)], np.array([2 * 4 * num_numbers]))


def product(library: str, threads: int, rows: int, inner: int, columns: int) -> Run:
    """Returns a function that computes one float32 product of (rows, inner) and (inner, columns)."""
    x = np.ones((rows, inner), np.float32)
    if library == "onnxruntime":
        return _session(one_operator("MatMul", x.shape, (inner, columns), (rows, columns)), x, threads)
    torch = _torch(threads)
    left, right = torch.from_numpy(x), torch.ones((columns, inner)).T
    return lambda: left @ right


def _negation(library: str, threads: int, num_numbers: int) -> Run:
    x = np.ones(num_numbers, np.float32)
    if library == "onnxruntime":
        return _session(one_operator("Neg", x.shape, None, x.shape), x, threads)
    torch = _torch(threads)
    source, result = torch.from_numpy(x), torch.empty(num_numbers)
    return lambda: torch.neg(source, out=result)


def _session(graph: bytes, x: np.ndarray, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})


def _torch(threads: int) -> Any:
    import torch

    if threads:
        torch.set_num_threads(threads)
    return torch


def _rate(runs: Sequence[Run], units_N: np.ndarray) -> Rate:
    """Measures the median rate of `runs`; run i does units_N[i] units of work."""
    measured: list[list[float]] = [[] for _ in runs]
    for _ in range(WARMUP + REPEATS):
        for run, seconds in zip(runs, measured, strict=True):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    seconds_NR = np.array(measured)[:, WARMUP:]
    fastest_N = seconds_NR.min(axis=1)
    slowdown = float(np.median(np.median(seconds_NR, axis=1) / fastest_N))
    return Rate(giga=float(np.median(units_N / fastest_N)) / 1e9, steady=slowdown <= STEADY)


def _stream_bytes() -> int:
    """Returns twice the last-level cache if known, at least SMALLEST_STREAM, at most a sixteenth of the free memory."""
    try:
        text = CACHE.read_text(encoding="utf-8").strip()
        cache = int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        cache = 0
    return min(max(SMALLEST_STREAM, 2 * cache), psutil.virtual_memory().available // 16)


FLOAT = 1
IR_VERSION, OPSET = 10, 23
VARINT, LENGTH = 0, 2


def one_operator(op_type: str, shape: Sequence[int], constant: Sequence[int] | None, result: Sequence[int]) -> bytes:
    """Makes a graph of opset 23 with one float32 node: y (`result`) = `op_type`(x (`shape`)[, ones (`constant`)]).

    The bytes are encoded by hand, because a server has no ONNX tools.
    """
    inputs = ["x", *(["c"] if constant else [])]
    node = b"".join(_bytes(1, name.encode()) for name in inputs) + _bytes(2, b"y") + _bytes(4, op_type.encode())
    initializer = _bytes(5, _ones("c", constant)) if constant else b""
    ends = _bytes(11, _value("x", shape)) + _bytes(12, _value("y", result))
    graph = _bytes(1, node) + _bytes(2, b"g") + initializer + ends
    return _number(1, IR_VERSION) + _bytes(8, _number(2, OPSET)) + _bytes(7, graph)


def _ones(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_number(1, size) for size in shape)
    return dims + _number(2, FLOAT) + _bytes(8, name.encode()) + _bytes(9, np.ones(shape, np.float32).tobytes())


def _value(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_bytes(1, _number(1, size)) for size in shape)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _number(1, FLOAT) + _bytes(2, dims)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | VARINT) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
