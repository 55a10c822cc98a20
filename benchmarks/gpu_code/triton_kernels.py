"""Compiles the kernels of `inductor-cuda` to machine code of a GPU that is not here.

    python -m benchmarks.gpu_code.triton_kernels MODEL.pt CONFIG.toml ARCHITECTURE FOLDER OUT.json

A build runs as it does beside a GPU, up to the call of AOTInductor. In its place, Inductor generates the code of each
engine for a GPU that this process only pretends to have, and Triton and ptxas compile every kernel in it, in all of the
variants that a build would choose from. It needs its own process, and Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_code.torch_device import GPUS, pretend

LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
LIBRARY = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(\w+)", re.MULTILINE)
STACK = re.compile(r"\bSTACK:(\d+)")
PLACEHOLDER = b"no package: its kernels were compiled, and nothing else"


class Generated:
    """What Inductor generated in the place of packages: the code of every engine, and the source of every kernel.

    Attributes:
        wrappers: path of the engine -> the code that calls its kernels.
        kernels: path of the engine -> name of the kernel -> its source.
    """

    def __init__(self) -> None:
        self.wrappers: dict[str, str] = {}
        self.kernels: dict[str, dict[str, str]] = {}
        self._engine = ""

    def package(self, program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> str:
        """Stands in for `torch._inductor.aoti_compile_and_package`: the same program, compiled up to its kernels."""
        from torch._inductor import config

        ours = {"always_keep_tensor_constants": inductor_configs["always_keep_tensor_constants"]}
        self._engine = "/".join(Path(package_path).parts[-2:])
        self.kernels[self._engine] = {}
        arguments, _ = program.example_inputs
        with config.patch({**ours, "force_disable_caches": True}):
            torch._inductor.compile(program.module(check_guards=False), arguments)
        Path(package_path).write_bytes(PLACEHOLDER)
        return package_path

    def keep(self) -> None:
        """Replaces the last step of Inductor, which compiles, in this process."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.graph import GraphLowering

        generated = self

        def kept(self: AsyncCompile, kernel_name: str, source_code: str, device_str: str = "cuda") -> None:
            generated.kernels[generated._engine][kernel_name] = source_code

        def saved(source_code: str) -> None:
            generated.wrappers[generated._engine] = source_code

        AsyncCompile.triton = kept  # type: ignore[method-assign,assignment]
        GraphLowering.save_output_code = staticmethod(saved)  # type: ignore[method-assign,assignment]
        torch._inductor.aoti_compile_and_package = self.package  # type: ignore[assignment]


def compiled(name: str, source: str) -> Iterator[dict[str, Any]]:
    """Compiles one kernel in each of its variants, and yields their size and resources.

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
        cubin = binary.asm["cubin"]
        yield {"bytes": len(cubin), "shared": binary.metadata.shared, "stack": stack_of(cubin)}


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


def found(generated: Generated) -> list[dict[str, Any]]:
    """Compiles every kernel once, and returns a row for each engine."""
    results: dict[str, list[dict[str, Any]] | str] = {}
    rows = []
    for engine, kernels in generated.kernels.items():
        failed = {}
        variants: list[dict[str, Any]] = []
        for name, source in kernels.items():
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
        wrapper = generated.wrappers[engine]
        rows.append(
            {
                "engine": engine,
                "kernels": len(kernels),
                "variants": len(variants),
                "failed": failed,
                "launches": len(LAUNCH.findall(wrapper)),
                "library": len(LIBRARY.findall(wrapper)),
                "bytes": sum(variant["bytes"] for variant in variants),
                "shared": max((variant["shared"] for variant in variants), default=0),
                "stack": max((variant["stack"] for variant in variants), default=0),
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    checkpoint, config, architecture, folder, out = arguments
    pretend(GPUS[architecture], Path(folder) / "torch_device.so")
    from mod_export.cli import cli

    generated = Generated()
    generated.keep()
    build = ["build", checkpoint, "-c", config, "-o", str(Path(folder) / "build"), "--no-evidence", "--quiet"]
    try:
        cli(build, standalone_mode=False)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    Path(out).write_text(json.dumps(found(generated), indent=1), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
