"""torch.compile, packaged ahead of time by AOTInductor: native code for this machine's CPU, without its weights.

The package holds code only. Weights are handed over when it is loaded, so all buckets share one weights file on disk
and, memory-mapped, in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mod_export.artifacts import PRIMARY, Availability, Bucket, Dialect, Engine, ModelKind, Profile, Variant
from mod_export.config import BuildConfig
from mod_export.engine.feeds import check_feeds, check_outputs
from mod_export.engine.inductor_trace import calls_of_package, kernels_of_calls
from mod_export.environment import cpu_features, package_version
from mod_export.errors import EngineError, TargetError
from mod_export.protocols import EngineJob

if TYPE_CHECKING:
    import torch

__all__ = ["Inductor"]


class InductorRunner:
    """A loaded package. Shapes and names of inputs and outputs travel in the package's metadata."""

    def __init__(
        self, package: Any, metadata: Mapping[str, str], weights: Mapping[str, torch.Tensor], where: str, threads: int
    ):
        import torch

        self._torch = torch
        self._package = package
        self._where = where
        self._shapes = {
            "input_ids": (int(metadata["batch"]), int(metadata["seq"])),
            "lengths": (int(metadata["batch"]),),
        }
        self.inputs = tuple(self._shapes)
        self.outputs = tuple(metadata["outputs"].split(","))
        self.threads = threads or torch.get_num_threads()
        self.providers: tuple[str, ...] = ("AOTInductor CPU",)
        names = package.get_constant_fqns()
        missing = [name for name in names if name not in weights]
        if missing:
            raise EngineError(f"{where}: the weights file holds no {', '.join(missing[:3])}; build again")
        # user_managed: the package reads these tensors in place, so they must outlive it.
        self._weights = {name: weights[name] for name in names}
        package.load_constants(self._weights, check_full_update=True, user_managed=True)

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        check_feeds(self._where, self._shapes, feeds)
        wanted = list(outputs or self.outputs)
        check_outputs(self._where, self.outputs, wanted)
        torch = self._torch
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.no_grad():
            results = self._package(*(torch.from_numpy(feeds[name]) for name in self.inputs))
        named = dict(zip(self.outputs, results, strict=True))
        return {name: named[name].numpy() for name in wanted}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._package


class Inductor:
    """AOTInductor for the CPU it is built on."""

    name: ClassVar[str] = "inductor"
    dialect: ClassVar[Dialect] = Dialect(name="AOTInductor", max_opset=0)
    from_onnx: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    binds: ClassVar[bool] = False
    suffix: ClassVar[str] = ".pt2"

    def availability(self) -> Availability:
        if package_version("torch") is None:
            return Availability(builds=False, runs=False, reason="torch is not installed; install mod-export[build]")
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            compiler = get_cpp_compiler()
        except (InvalidCxxCompiler, OSError):
            return Availability(
                builds=False, runs=True, reason="no C++ compiler; install g++ to build, running needs none"
            )
        return Availability(builds=True, runs=True, reason=f"torch {package_version('torch')}, {compiler}")

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        return [Variant(dtype=dtype) for dtype in config.target.inductor.dtypes]

    def versions(self) -> Mapping[str, str]:
        return {"torch": package_version("torch") or ""}

    def check(self, config: BuildConfig, model: ModelKind, bucket: Bucket) -> Sequence[str]:
        return []

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        import torch
        from torch._inductor import exc

        outputs = [PRIMARY[job.graph.outputs], *(f"routed_{layer}" for layer, k in job.graph.k_by_layer.items() if k)]
        metadata = {
            "batch": str(job.graph.bucket.batch),
            "seq": str(job.graph.bucket.seq),
            "outputs": ",".join(outputs),
            "cpu": ",".join(sorted(cpu_features())),
        }
        options = {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.metadata": metadata,
            # Otherwise the kernels are compiled for the number of threads that this process happens to have.
            "cpp.dynamic_threads": True,
            # Marks every kernel for the profiler; where none listens, a mark costs a fraction of a microsecond.
            "cpp.enable_kernel_profile": True,
        }
        program = job.exported_program()
        _forget_sources(program)
        try:
            with warnings.catch_warnings():
                # torch's own code trips over its own deprecations while it compiles.
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(destination), inductor_configs=options
                )
        except (exc.InductorError, exc.CppCompileError, RuntimeError) as error:
            raise EngineError(f"{destination.name}: AOTInductor failed: {str(error).splitlines()[0]}") from error

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None
    ) -> InductorRunner:
        import torch
        from safetensors.torch import load_file

        assert engine.weights is not None
        try:
            package = torch._inductor.aoti_load_package(str(root / engine.path))
        except RuntimeError as error:
            raise EngineError(f"{engine.path}: AOTInductor cannot load it: {str(error).splitlines()[0]}") from error
        metadata = package.get_metadata()
        missing = set(filter(None, metadata["cpu"].split(","))) - cpu_features()
        if missing:
            # Running it all the same would end the process with an illegal instruction.
            raise TargetError(
                f"{engine.path}: compiled for a CPU with {', '.join(sorted(missing))}, which this one lacks; build "
                "again here"
            )
        tensors = load_file(root / engine.weights)
        tensors |= {name: torch.from_numpy(array) for name, array in (weights or {}).items()}
        return InductorRunner(package, metadata, tensors, f"inductor {engine.path}", config.latency.threads)

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, feeds: Mapping[str, np.ndarray], runs: int
    ) -> Profile:
        with self.load(root, engine, config) as runner:
            calls = calls_of_package(root / engine.path)
            used = {name: array for name, array in feeds.items() if name in runner.inputs}
            runner.run(used)
            kernels = kernels_of_calls(lambda: runner.run(used), runs, calls, f"inductor {engine.path}")
        return Profile(profiler=f"torch.profiler {package_version('torch')}", runs=runs, kernels=kernels)


def _forget_sources(program: torch.export.ExportedProgram) -> None:
    """Source lines of the model: each kernel's mark would copy them in every run, and show paths of this machine."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
