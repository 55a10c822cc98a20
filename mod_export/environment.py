"""Versions and devices, gathered once for a report. Nothing here loads a vendor's library."""

from __future__ import annotations

import contextlib
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

__all__ = [
    "EXPORTERS",
    "cache_folder",
    "cpu_features",
    "describe_machine",
    "extra_of_import",
    "missing_modules",
    "package_version",
    "source_digest",
    "usable_cores",
    "versions",
]

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
EXPORTERS = ("mod_export", "torch", "onnx", "onnx_ir", "onnxscript")
"""What an exported graph depends on beside the model."""

EXTRAS = {
    "build": ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors"),
    "ort": ("onnxruntime",),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx", "polygraphy"),
    "generate": ("tokenizers",),
    "figures": ("matplotlib",),
    "ray": ("ray",),
}
"""Extra of this package -> the modules that come with it."""
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


def extra_of_import(error: ImportError) -> str | None:
    """The extra that brings the module whose import failed; None where no extra does."""
    module = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def missing_modules(extra: str) -> list[str]:
    """Modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def cache_folder() -> Path:
    """The folder for measurements of this machine: $XDG_CACHE_HOME/mod-export, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
    return folder / "mod-export"


@cache
def source_digest(package: str) -> str:
    """SHA-256 over the Python files of an installed package, which stands for its version.

    With the version number alone, an edited or half-upgraded installation would reuse the results of other code.
    """
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    digest = hashlib.sha256()
    for root in map(Path, roots):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions(*names: str) -> dict[str, str | None]:
    """Installed versions of PACKAGES; of this package the digest of its source."""
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


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1: those of its CPU affinity, and no more than its quota.

    Hyperthreads of one core share its arithmetic units, so more threads than cores make matrix products slower.
    """
    cpus = _allowed_cpus()
    siblings = {_siblings(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology"), cpu) for cpu in cpus}
    quota = min(_cgroup_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")), default=len(cpus))
    return max(1, min(len(siblings), psutil.cpu_count(logical=False) or len(siblings), int(quota)))


def _allowed_cpus() -> list[int]:
    """Numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(topology: Path, cpu: int) -> str:
    """A name of the CPU's core: the list of its hyperthreads, or the CPU itself where Linux does not list them."""
    try:
        return (topology / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _cgroup_quotas(root: Path, membership: Path) -> list[float]:
    """CPUs' worth of time that control groups (version 2) grant this process: its own group and those above it.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    found = []
    for folder in (root / group, *(root / group).parents):
        with contextlib.suppress(OSError, ValueError):
            limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            found.append(float(limit) / float(period))  # "max" is no number, and no limit.
        if folder == root:
            break
    return found


def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU that compilers generate code for; empty where the kernel does not list them."""
    return frozenset(filter(COMPILED.match, (_cpu_line("flags") or _cpu_line("Features")).split()))


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _cpu_line(key: str) -> str:
    """The value of a key of the first CPU in Linux's /proc/cpuinfo; empty elsewhere."""
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
