"""The roofline of this machine (Williams, Waterman and Patterson, CACM 52(4), 2009): how fast its processor multiplies
matrices, and how fast bytes pass between it and the memory.

Measured once and kept in the user's cache folder, because a number that changes with every build explains nothing. It
is measured again for another processor, dtype, thread count or library, and when the configuration asks
(cost.measure_again). What was measured on a busy machine is used once, says so, and is not kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mod_export.benchmark.system_load import Watch
from mod_export.build_folder.files import replace_file
from mod_export.environment import cache_folder, package_version
from mod_export.results.cost import Roofline
from mod_export.types import DType

__all__ = ["cache_file", "cached_roofline", "measure_roofline"]

FORMAT_VERSION = 1
MOST_OTHERS = 0.1
"""Share of the machine's CPU time that other processes may take while something is measured that will be kept."""
BUSY = "; the machine was busy, so both may be too low"
MS_PER_GIGA = 1e-6
"""Milliseconds that one unit takes at a rate of one giga-unit a second."""


def cached_roofline(
    machine: Mapping[str, Any], dtype: DType, threads: int, *, measure_again: bool = False
) -> Roofline | None:
    """The roofline of this machine's processor, measured if it is not in the cache.

    Takes about two seconds when it measures. A cache that is damaged or cannot be written is as good as none.

    Args:
        machine: as `environment.describe_machine` says.
        dtype: of the numbers.
        threads: of one operator; 0 is the library's own choice.
        measure_again: whether to replace what the cache holds.

    Returns:
        None where nothing here measures: a dtype that no CPU engine computes in, or neither ONNX Runtime nor PyTorch.
    """
    library = next((name for name in ("onnxruntime", "torch") if package_version(name)), None)
    if dtype != "float32" or library is None:
        return None
    key = json.dumps([machine["cpu"], machine["logical_cores"], dtype, threads, library, package_version(library)])
    known = _read()
    if key in known and not measure_again:
        with contextlib.suppress(TypeError, ValueError):
            return _checked(known[key])
    found = measure_roofline(dtype, threads, library)
    if not found.method.endswith(BUSY):
        _write({**_read(), key: found.model_dump(mode="json")})
    return found


def measure_roofline(dtype: DType, threads: int, library: str) -> Roofline:
    """Measures with `library`, onnxruntime or torch."""
    # Not at module level: a roofline from the cache needs neither library.
    from mod_export.benchmark.microbenchmarks import gemm_rate, stream_rate

    watch = Watch()
    gemm, stream = gemm_rate(library, threads), stream_rate(library, threads)
    others = watch.conditions().other_load or 0.0
    quiet = gemm.steady and stream.steady and others <= MOST_OTHERS
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
    """Where measurements are kept: $XDG_CACHE_HOME/mod-export/roofline.json, ~/.cache by default."""
    return cache_folder() / "roofline.json"


def _checked(entry: Any) -> Roofline:
    found = Roofline(**entry)
    if not (found.gemm_gflops > 0 and found.bandwidth_gbs > 0):
        raise ValueError
    return found


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = json.loads(cache_file().read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("version") == FORMAT_VERSION and isinstance(data.get("entries"), dict):
            return dict(data["entries"])
    return {}


def _write(entries: dict[str, Any]) -> None:
    path = cache_file()
    text = json.dumps({"version": FORMAT_VERSION, "entries": entries}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
