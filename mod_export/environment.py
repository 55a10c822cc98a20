"""Describes the machine and its installed packages: versions, processor, GPU, and memory that may still be used.

Nothing here loads a vendor's library.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

PACKAGES = {
    "mod_export": ("mod-export",),
    "torch": ("torch",),
    "onnx": ("onnx",),
    "onnx_ir": ("onnx-ir",),
    "onnxscript": ("onnxscript",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx",),
    "polygraphy": ("polygraphy",),
}
EXPORTERS = ("mod_export", "torch", "onnx", "onnx_ir", "onnxscript")
"""Packages that an exported graph depends on, besides the model."""
EXTRAS = {
    "build": ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors"),
    "ort": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx", "polygraphy"),
    "convert": ("gguf", "huggingface_hub", "transformers"),
    "generate": ("tokenizers",),
    "structured": ("llguidance",),
    "serve": ("starlette", "uvicorn", "httptools", "prometheus_client", "opentelemetry"),
    "traces": ("opentelemetry.sdk", "opentelemetry.exporter"),
    "sign": ("model_signing",),
    "ray": ("ray",),
}
"""Extra of this package -> the modules that come with it."""
COMPILED = re.compile("s?sse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|v?aes|sha|gfni|v?pclmul|asimd|sve|bf16|i8mm")
MADV_PAGEOUT = 21
"""Advice of linux/mman.h since Linux 5.4: the kernel takes the pages back at once. Unlike MADV_DONTNEED, it keeps data
that is only in memory.
"""
CPUINFO = Path("/proc/cpuinfo")
GENERATION = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
"""Keys of CPUINFO that tell generations of processors apart, on x86 and Arm -> their names in a report."""
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_budget: ContextVar[int] = ContextVar("budget", default=0)

# Installed packages.


@cache
def package_version(name: str) -> str | None:
    """Returns the installed version of one of PACKAGES, or None if it is not installed."""
    for distribution in PACKAGES[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def extra_of_import(error: ImportError) -> str | None:
    """Returns the extra that installs the module whose import failed; None if no extra does."""
    missing = f"{error.name}."
    matches = [
        (len(module), extra)
        for extra, modules in EXTRAS.items()
        for module in modules
        if missing.startswith(f"{module}.")
    ]
    return max(matches)[1] if matches else None


def missing_modules(extra: str) -> list[str]:
    """Returns the modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


@cache
def source_digest(package: str) -> str:
    """Returns the SHA-256 of the Python files of an installed package, which serves as its version.

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
    """Returns the installed versions of PACKAGES; for this package, the digest of its source."""
    return {name: source_digest(name) if name == "mod_export" else package_version(name) for name in names}


# The machine.


def cache_folder() -> Path:
    """Returns the folder for measurements of this machine: $XDG_CACHE_HOME/mod-export, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111
    return folder / "mod-export"


def describe_machine() -> dict[str, Any]:
    """Returns the report's `environment`: versions, processor, cores, memory, GPU, and how busy the machine is."""
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _processor(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "gpu": _gpu_name(),
    }


def cpu_features() -> frozenset[str]:
    """Returns the instruction sets of this CPU that compilers generate code for; empty if the kernel lists none."""
    return frozenset(filter(COMPILED.match, (_cpu_line("flags") or _cpu_line("Features")).split()))


def _processor() -> str:
    """Returns the processor's name and, if Linux tells them, the numbers of its generation.

    Virtual machines give processors of several generations one name, such as "AMD EPYC", although one of them computes
    twice as fast as another. What was measured or built on one must not pass for the other's.
    """
    name = _cpu_line("model name") or platform.processor() or platform.machine()
    numbers = [f"{word} {value}" for key, word in GENERATION.items() if (value := _cpu_line(key))]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _cpu_line(key: str) -> str:
    """Returns the value of a key of the first CPU in Linux's /proc/cpuinfo; empty on other systems."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def _gpu_name() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None


def usable_cores() -> int:
    """Returns how many physical cores this process may use, at least 1: those of its CPU affinity, up to its quota.

    Hyperthreads of one core share its arithmetic units, so more threads than cores make matrix products slower.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in cpus}
    quota = min(_cpu_quotas(_control_groups(CGROUPS, MEMBERSHIP)), default=len(cores))
    return max(1, min(len(cores), psutil.cpu_count(logical=False) or len(cores), int(quota)))


def _core_of(cpu: int) -> str:
    """Returns a name for the core of a CPU: the list of its hyperthreads, or the CPU itself if Linux lists none."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _cpu_quotas(groups: Iterable[Path]) -> list[float]:
    """Returns the limits of control groups, in CPUs.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max.
    """
    quotas = []
    for group in groups:
        with contextlib.suppress(OSError, ValueError):
            limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
            quotas.append(float(limit) / float(period))  # "max" means no limit; its ValueError is suppressed.
    return quotas


def _control_groups(root: Path, membership: Path) -> list[Path]:
    """Returns the folders of the control groups (version 2) of this process: its own group and all groups above it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    name = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    return [folder for folder in (root / name, *(root / name).parents) if folder.is_relative_to(root)]


# Memory.


@contextlib.contextmanager
def limited(budget: int) -> Iterator[None]:
    """Within this context, `free_bytes` assumes a limit of `budget` bytes for this process; 0 is no limit."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def free_bytes() -> int:
    """Returns the number of bytes that may still be allocated: of the machine, and of a limit by control groups
    (version 2), as in a container.
    """
    free = min([psutil.virtual_memory().available, *_left_in_groups(_control_groups(CGROUPS, MEMBERSHIP))])
    budget = _budget.get()
    if not budget:
        return free
    memory = psutil.Process().memory_info()
    # The system can take pages of mapped files back at any time. If psutil does not count these pages separately, all
    # of them count as used.
    used = memory.rss - getattr(memory, "shared", 0)
    return max(0, min(free, budget - used))


def _left_in_groups(groups: Iterable[Path]) -> list[int]:
    """Returns how many bytes each control group with a limit may still use. Pages of files count as free: the system
    takes them back before it stops a process.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max, memory.current, memory.stat.
    """
    left = []
    for group in groups:
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max" means no limit.
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            files = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
            left.append(max(0, limit - used + files))
    return left


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Asks the system to take back the whole pages of these tensors. They are read again at their next use.

    Weights that are mapped from a file count as this process's memory once they were touched, although the system can
    read them again at any time. This is a request without a guarantee, and only Linux is asked.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
        if length >= mmap.PAGESIZE:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length // mmap.PAGESIZE * mmap.PAGESIZE), MADV_PAGEOUT)


def return_freed_memory() -> None:
    """Returns freed memory to the system: the C library of Linux (glibc) keeps it unless it is told to."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak_rss() -> None:
    """Starts a new peak of resident memory, if the kernel can do that (Linux: 5 in /proc/self/clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Returns the largest resident set since `reset_peak_rss`, from VmHWM; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return 0
