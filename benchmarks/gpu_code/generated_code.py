"""Builds `inductor-cuda` up to AOTInductor, and keeps the code that Inductor generates for a GPU in place of a package.

A build runs as it does beside a GPU, in a process that was given a pretended one before (`torch_device.py`). Each
engine that it asks for becomes the code that calls kernels (the wrapper), and the source of every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_code.building import build

PLACEHOLDER = b"no package: only the code of its kernels was generated"


@dataclass
class Generated:
    """What was generated for one engine.

    Attributes:
        engine: path of the engine below engines/.
        wrapper: the code that calls its kernels.
        kernels: name of a kernel -> its source.
        wanted: outputs of the exported program, if it was run.
        found: outputs of the generated code for the same inputs, if it was run.
    """

    engine: str
    wrapper: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    wanted: Sequence[torch.Tensor] = ()
    found: Sequence[torch.Tensor] = ()


def generated_by_build(
    checkpoint: str, config: str, folder: Path, kernel: Callable[[str, str], object] | None = None
) -> list[Generated]:
    """Runs a build without evidence, and returns what was generated for its engines.

    Args:
        checkpoint: the model.
        config: the configuration file, with the target `inductor-cuda`.
        folder: gets the build folder.
        kernel: makes an object that the wrapper can call from the name and source of a kernel. With it, the program
            and the generated code are also run.

    Raises:
        RuntimeError: the build failed.
    """
    from torch._inductor import config as inductor
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    engines: list[Generated] = []

    def package(program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> str:
        """Stands in for `torch._inductor.aoti_compile_and_package`."""
        engine = Generated("/".join(Path(package_path).parts[-2:]))
        engines.append(engine)
        ours = {"always_keep_tensor_constants": inductor_configs["always_keep_tensor_constants"]}
        arguments, _ = program.example_inputs
        module = program.module(check_guards=False)
        if kernel is not None:
            # Before it is compiled, because the compiler takes its weights.
            engine.wanted = module(*arguments)
        # Whether a product is padded to round sizes is measured on the GPU.
        with inductor.patch({**ours, "force_disable_caches": True, "shape_padding": False}):
            run = torch._inductor.compile(module, arguments)
        if kernel is not None:
            engine.found = run(*arguments)
        Path(package_path).write_bytes(PLACEHOLDER)
        return package_path

    def triton(self: AsyncCompile, kernel_name: str, source_code: str, device_str: str = "cuda") -> object:
        engines[-1].kernels[kernel_name] = source_code
        return None if kernel is None else kernel(kernel_name, source_code)

    def save_output_code(code: str) -> None:
        engines[-1].wrapper = code

    AsyncCompile.triton = triton  # type: ignore[method-assign,assignment]
    GraphLowering.save_output_code = staticmethod(save_output_code)  # type: ignore[method-assign,assignment]
    torch._inductor.aoti_compile_and_package = package  # type: ignore[assignment]
    build(checkpoint, config, folder / "build")
    return engines
