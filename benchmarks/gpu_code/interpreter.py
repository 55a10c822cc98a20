"""Runs the code of `inductor-cuda` on the processor, and compares it with the program that it was generated from.

    TRITON_INTERPRET=1 python -m benchmarks.gpu_code.interpreter MODEL.pt CONFIG.toml ARCHITECTURE FOLDER OUT.json

Triton's interpreter executes the kernels that Inductor generates (`generated_code.py`), one program of the grid after
the other, and torch's own operators take the place of CUDA's libraries. So every index, mask and reduction of the
generated code is the one that a GPU runs; the order of sums inside a product, and the time, are not. It needs its own
process, and Triton.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_code.generated_code import Generated, generated_by_build
from benchmarks.gpu_code.torch_device import GPUS, pretend


class Interpreted:
    """A kernel of Inductor in Triton's interpreter, in the first of its variants.

    `run` takes what the wrapper passes: a value for every parameter that no variant sets.
    """

    def __init__(self, configs: Sequence[Any], function: Any, inductor_meta: dict[str, Any]) -> None:
        self._variant = configs[0].kwargs
        self._config = configs[0]
        self._function = function
        self._meta = inductor_meta

    def run(self, *values: Any, stream: int) -> None:
        """Executes the whole grid."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        names = [name for name in self._function.arg_names if name not in self._variant]
        given = dict(zip(names, map(in_host_memory, values), strict=True))
        sizes = {name: value for name, value in given.items() if isinstance(value, int)}
        grid = GridExpr.from_meta(self._meta, self._config).eval_slow(sizes | self._variant)
        self._function[grid](**given, **self._variant)


def in_host_memory(value: Any) -> Any:
    """Returns the same memory as a tensor on the processor; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes() - value.storage_offset() * value.element_size()
    if size <= 0:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.shape, value.stride())


def interpret() -> None:
    """Makes Inductor's kernels interpreted ones, in a process that has its pretended device."""
    import triton.language as tl
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.runtime.triton_helpers import libdevice

    def cached_autotune(
        size_hints: Any, configs: Any, triton_meta: Any, heuristic_type: Any, filename: Any = None,
        inductor_meta: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        return lambda function: Interpreted(configs, function, inductor_meta)

    triton_heuristics.cached_autotune = cached_autotune  # type: ignore[assignment]
    for name in vars(libdevice):
        # NVIDIA's library of functions is machine code; Triton's own functions of these names can be interpreted.
        if not name.startswith("_") and hasattr(tl.math, name):
            setattr(libdevice, name, lambda *values, name=name: getattr(tl.math, name)(*values))
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )


def kernel_of(name: str, source: str) -> Any:
    """Returns the kernel that the wrapper calls."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(source), name)


def row_of(engine: Generated) -> dict[str, Any]:
    """Compares what the code and the program of an engine returned.

    `error` is the largest difference of a floating-point output over the output's root mean square.
    """
    errors, same, selected = [], 0, 0
    for found, wanted in zip(engine.found, engine.wanted, strict=True):
        a, b = found.cpu(), wanted.cpu()
        if b.is_floating_point():
            errors.append(float((a.double() - b.double()).abs().max() / b.double().square().mean().sqrt()))
        else:
            same += int((a == b).sum())
            selected += b.numel()
    return {
        "engine": engine.engine, "kernels": len(engine.kernels), "error": max(errors), "selected": selected,
        "same": same,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    checkpoint, config, architecture, folder, out = arguments
    pretend(GPUS[architecture], Path(folder) / "torch_device.so")
    interpret()
    engines = generated_by_build(checkpoint, config, Path(folder), kernel_of)
    Path(out).write_text(json.dumps([row_of(engine) for engine in engines], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
