"""A CUDA device for a PyTorch that was built without CUDA, so that torch.compile generates the code of a GPU anywhere.

Its memory is the host's and its operators run on the processor (`torch_device.cpp`). No kernel of a GPU runs on it:
what a compiler makes for it can be looked at, and compiled further. It changes the whole process, for good.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
CUDA_VERSION = "13.0"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a compiler asks of a GPU, from NVIDIA's CUDA C++ programming guide, "Technical specifications per compute
    capability", and the architecture's white paper.

    Attributes:
        name: as the driver gives it.
        major: compute capability before the point.
        minor: compute capability behind the point.
        multiprocessors: streaming multiprocessors.
        threads: threads that one multiprocessor holds.
        shared_kib: shared memory of a multiprocessor, in KiB. A block can have 1 KiB less.
        cache_mib: second-level cache.
        memory_gib: memory.
    """

    name: str
    major: int
    minor: int
    multiprocessors: int
    threads: int
    shared_kib: int
    cache_mib: int
    memory_gib: int

    @property
    def architecture(self) -> str:
        """Its architecture as NVIDIA writes it: sm90."""
        return f"sm{self.major}{self.minor}"

    @property
    def properties(self) -> SimpleNamespace:
        """Its properties under the names of torch.cuda.get_device_properties."""
        return SimpleNamespace(
            name=self.name, major=self.major, minor=self.minor, multi_processor_count=self.multiprocessors,
            max_threads_per_multi_processor=self.threads, max_threads_per_block=1024, warp_size=32,
            regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=self.shared_kib * 1024,
            shared_memory_per_block_optin=(self.shared_kib - 1) * 1024, shared_memory_per_block=48 * 1024,
            L2_cache_size=self.cache_mib * MIB, total_memory=self.memory_gib * 1024 * MIB, gcnArchName="",
            is_integrated=0,
        )  # fmt: skip


GPUS: Mapping[str, Gpu] = {
    gpu.architecture: gpu
    for gpu in (
        Gpu("A100", 8, 0, 108, 2048, 164, 40, 80),
        Gpu("RTX 4090", 8, 9, 128, 1536, 100, 72, 24),
        Gpu("H100", 9, 0, 132, 2048, 228, 50, 80),
        Gpu("RTX 5090", 12, 0, 170, 1536, 100, 96, 32),
    )
}


def pretend(gpu: Gpu, library: Path) -> None:
    """Gives this process the GPU as its only CUDA device. Call it before torch.compile is imported or used.

    Args:
        library: where the compiled `torch_device.cpp` is, or is put.

    Raises:
        RuntimeError: this PyTorch has CUDA, or no C++ compiler is here.
    """
    if torch.version.cuda is not None:
        raise RuntimeError(f"torch {torch.__version__} has CUDA; only one without it can be given such a device")
    if not library.exists():
        _compile(library)
    torch.ops.load_library(str(library))
    torch.version.cuda = CUDA_VERSION  # type: ignore[assignment]  # A string where there is CUDA.
    _replace(
        torch._C,
        _cuda_getDeviceCount=lambda: 1,
        _cuda_getDevice=lambda: 0,
        _cuda_setDevice=lambda index: None,
        _cuda_exchangeDevice=lambda index: 0,
        _cuda_maybeExchangeDevice=lambda index: 0,
        _cuda_synchronize=lambda: None,
        _cuda_getCurrentRawStream=lambda index: 0,
    )
    _replace(
        torch.cuda,
        _lazy_init=lambda: None,
        _get_device_properties=lambda index: gpu.properties,
        _exchange_device=lambda index: 0,
        _maybe_exchange_device=lambda index: 0,
    )
    for module in (torch.cuda, torch.cuda.random):
        _replace(
            module,
            get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=lambda state, device=None: None,
        )
    _drive(gpu)


def _replace(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def _drive(gpu: Gpu) -> None:
    """Gives Triton, if it is installed, a driver that only knows what to compile for."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.driver import GPUDriver
    except ImportError:
        return

    class Driver(GPUDriver):  # type: ignore[misc]  # Triton has no types.
        def __init__(self) -> None:
            """Does not load the driver's library, as the base class does."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", gpu.major * 10 + gpu.minor, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> None:
            return None

    triton.runtime.driver.set_active(Driver())
    # The source of every kernel asks Inductor for the driver of a real GPU.
    from torch._inductor.runtime import triton_helpers

    _replace(triton_helpers, set_driver_to_gpu=lambda: None)


def _compile(library: Path) -> None:
    package = Path(torch.__file__).parent
    command = [
        "g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{package / 'include'}", str(SOURCE),
        f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{package / 'lib'}", "-o",
    ]  # fmt: skip
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(".partial")
    try:
        done = subprocess.run([*command, str(partial)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("no C++ compiler is here; install g++") from error
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name}: g++ failed: {done.stderr.strip().splitlines()[0]}")
    partial.rename(library)
