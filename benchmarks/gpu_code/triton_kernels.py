"""Compiles the kernels of `inductor-cuda` to machine code of a GPU that is not here.

    python -m benchmarks.gpu_code.triton_kernels MODEL.pt CONFIG.toml ARCHITECTURE FOLDER OUT.json

Triton and ptxas compile every kernel that Inductor generates (`generated_code.py`), in all of the variants that a build
would choose from. It needs its own process, and Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_code.generated_code import Generated, generated_by_build
from benchmarks.gpu_code.torch_device import GPUS, pretend

LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
LIBRARY = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(\w+)", re.MULTILINE)
STACK = re.compile(r"\bSTACK:(\d+)")


def compiled(name: str, source: str) -> Iterator[dict[str, int]]:
    """Compiles one kernel in each of its variants, and yields their resources in bytes.

    Raises:
        Exception: any error of Triton or ptxas.
    """
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    for variant in kernel.configs:
        # The launcher that Inductor would otherwise make does not keep the machine code.
        with config.patch(use_static_cuda_launcher=False):
            binary = kernel._precompile_config(variant).kernel
        yield {"shared": binary.metadata.shared, "stack": stack_of(binary.asm["cubin"])}


def stack_of(cubin: bytes) -> int:
    """Returns the bytes of memory that a thread uses because its registers are not enough."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(int(number) for number in STACK.findall(shown.stdout))


def rows_of(engines: Sequence[Generated]) -> Iterator[dict[str, Any]]:
    """Compiles every kernel once, and yields a row for each engine."""
    results: dict[str, list[dict[str, int]] | str] = {}
    for engine in engines:
        failed: dict[str, str] = {}
        variants: list[dict[str, int]] = []
        for name, source in engine.kernels.items():
            key = source.replace(name, "kernel")
            if key not in results:
                try:
                    results[key] = list(compiled(name, source))
                except Exception as error:  # Whatever it is, it is a row.
                    results[key] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            result = results[key]
            if isinstance(result, str):
                failed[name] = result
            else:
                variants += result
        yield {
            "engine": engine.engine,
            "kernels": len(engine.kernels),
            "variants": len(variants),
            "failed": failed,
            "launches": len(LAUNCH.findall(engine.wrapper)),
            "library": len(LIBRARY.findall(engine.wrapper)),
            "shared": max((variant["shared"] for variant in variants), default=0),
            "stack": max((variant["stack"] for variant in variants), default=0),
        }


def main(arguments: Sequence[str]) -> None:
    checkpoint, config, architecture, folder, out = arguments
    pretend(GPUS[architecture], Path(folder) / "torch_device.so")
    engines = generated_by_build(checkpoint, config, Path(folder))
    Path(out).write_text(json.dumps(list(rows_of(engines)), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
