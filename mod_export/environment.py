"""Versions and devices, gathered once for a report. Nothing here loads a vendor's library."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

__all__ = ["cache_folder", "cpu_features", "describe_machine", "package_version", "source_digest", "versions"]

PACKAGES = {
    "mod_export": ("mod-export",),
    "torch": ("torch",),
    "onnx": ("onnx",),
    "onnx_ir": ("onnx-ir",),
    "onnxscript": ("onnxscript",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx",),
    "polygraphy": ("polygraphy",),
}


COMPILED = re.compile("s?sse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|v?aes|sha|gfni|v?pclmul|asimd|sve|bf16|i8mm")


@cache
def package_version(name: str) -> str | None:
    """Installed version of one of PACKAGES, None when it is absent."""
    for distribution in PACKAGES[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def cache_folder() -> Path:
    """Where what was measured here is kept: $XDG_CACHE_HOME/mod-export, ~/.cache by default."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
    return folder / "mod-export"


@cache
def source_digest(package: str) -> str:
    """SHA-256 over the Python files of an installed package: its version as far as results depend on it.

    A version number alone would let an edited or half-upgraded installation reuse what other code has made.
    """
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    digest = hashlib.sha256()
    for root in map(Path, roots):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions(*names: str) -> dict[str, str | None]:
    """Installed versions of PACKAGES; of this package the source itself."""
    return {name: source_digest(name) if name == "mod_export" else package_version(name) for name in names}


def describe_machine() -> dict[str, Any]:
    """The report's `environment`: versions, processor, cores, memory, GPU, and how busy the machine is."""
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "gpu": _gpu_name(),
    }


def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU that compilers write native code for; empty where the kernel does not say."""
    return frozenset(filter(COMPILED.match, (_cpu_line("flags") or _cpu_line("Features")).split()))


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _cpu_line(key: str) -> str:
    """What Linux says of the first CPU; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _gpu_name() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip().splitlines()[0] if found.returncode == 0 and found.stdout.strip() else None
