"""torch.compile, packaged ahead of time by AOTInductor: native code for this machine, without weights.

A package contains code only. It gets its weights when it is loaded, so all buckets share one weights file on disk and,
memory-mapped, in memory. In a 16-bit package only matrix products, their weights and tables of embeddings have 16 bits;
all other weights come from the float32 file. A package includes its C++ source, which is a sequence of calls without
branches: the i-th call that the profiler sees is the i-th call of the source, which says what weights it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Arrays, EngineBuilder, EngineJob, EngineRunner, OptionalArrays, Port
from mod_export.environment import cpu_features, package_version
from mod_export.errors import EngineError, TargetError
from mod_export.types import Availability, Engine, Kernel, Profile, TargetLimits, Variant, routed_output

if TYPE_CHECKING:
    import torch

US_PER_MS = 1000
FEWEST_THREADS = 2
CALL = re.compile(r"^\s*(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(aoti_torch_cpu_\w+|cpp_fused_\w+)\((.*)\);", re.MULTILINE)
CONSTANT = re.compile(r'constants_info_\[(\d+)\]\.(?:name|original_fqn) = "([^"]*)";')
KERNEL = re.compile(r"(?:^|_)(aoti_torch_cpu_\w+|cpp_fused_\w+)$")

MACHINE = "machine"
"""Key of a package's metadata: the system and the kind of processor that it was compiled for."""
NO_COMPILER = "no C++ compiler; install g++ to build, running needs none"

Call = tuple[str, tuple[str, ...]]


class InductorRunner(EngineRunner):
    """A loaded package. Its metadata holds the shapes of its inputs and the names of its outputs."""

    def __init__(
        self, package: Any, metadata: Mapping[str, str], weights: Mapping[str, torch.Tensor], where: str, threads: int,
        provider: str = "AOTInductor CPU",
    ):  # fmt: skip
        import torch

        ports = json.loads(metadata["inputs"])
        inputs = {name: Port(tuple(shape), np.dtype(dtype)) for name, (dtype, shape) in ports.items()}
        outputs = metadata["outputs"].split(",")
        super().__init__(where, inputs, outputs, [provider], threads or torch.get_num_threads())
        self._package = package
        names = package.get_constant_fqns()
        missing = [name for name in names if name not in weights]
        if missing:
            raise EngineError(f"{where}: the weights file holds no {', '.join(missing[:3])}; build again")
        # user_managed: the package reads these tensors in place, so they must live as long as the package.
        self._weights = {name: weights[name] for name in names}
        package.load_constants(self._weights, check_full_update=True, user_managed=True)

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.no_grad():
            # A package reads its inputs in C order, whatever strides they have.
            results = self._package(*(torch.from_numpy(np.asarray(feeds[name], order="C")) for name in self.inputs))
        named = dict(zip(self.outputs, results, strict=True))
        return {name: named[name].numpy() for name in wanted}

    def close(self) -> None:
        del self._package


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Context in which convolutions and products in float32 on a GPU do not round their factors to 10 bits (TF32).

    Without it, torch lets convolutions do so, and products if the process has asked for it.
    """
    import torch

    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


class AotInductor(EngineBuilder):
    """Base of the two targets, which build packages for the processor and for a GPU."""

    packages = ("torch",)
    extra = "build"
    limits = TargetLimits(name="AOTInductor", max_opset=0)
    suffix = ".pt2"
    from_onnx = False

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        import torch
        from torch._inductor import exc

        program = self._placed(job.program(variant.dtype), config)
        outputs = [*job.graph.results, *(routed_output(site) for site, k in job.graph.k_by_layer.items() if k)]
        metadata = {
            "inputs": json.dumps(job.graph.inputs),
            "outputs": ",".join(outputs),
            "weights": json.dumps({name: str(tensor.dtype) for name, tensor in _held(program).items()}),
            "cpu": ",".join(sorted(cpu_features())),
            MACHINE: this_machine(),
            **self._machine(config),
        }
        options = {
            "aot_inductor.package_constants_in_so": False,
            # Otherwise vectors of up to 8 weights, such as the bias of a router, become part of the code.
            "always_keep_tensor_constants": True,
            "aot_inductor.metadata": metadata,
            **self._compiler_options(),
        }
        _forget_sources(program)
        try:
            with warnings.catch_warnings(), without_tf32():
                # torch itself uses deprecated functions while it compiles.
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(destination), inductor_configs=options
                )
        except (exc.InductorError, exc.CppCompileError, RuntimeError) as error:
            raise EngineError(f"{destination.name}: AOTInductor failed: {str(error).splitlines()[0]}") from error

    def _placed(self, program: torch.export.ExportedProgram, config: BuildConfig) -> torch.export.ExportedProgram:
        """Returns the program on the device that it is compiled for."""
        return program

    def _machine(self, config: BuildConfig) -> Mapping[str, str]:
        """Returns metadata about the device that the package is for."""
        return {}

    def _compiler_options(self) -> Mapping[str, bool | int]:
        return {}

    def made_here(self, root: Path, engine: Engine) -> bool:
        metadata = metadata_of(root / engine.path)
        missing = set(filter(None, metadata.get("cpu", "").split(","))) - cpu_features()
        return not missing and metadata.get(MACHINE, "") in ("", this_machine())

    def opened(
        self, root: Path, engine: Engine, weights: OptionalArrays, device: str, **options: Any
    ) -> tuple[Any, dict[str, str], dict[str, torch.Tensor]]:
        """Returns a package, its metadata, and its weights on a device.

        Raises:
            TargetError: the package was compiled for another processor or system.
            EngineError: the file is not a package, or is damaged.
        """
        import torch

        try:
            package = torch._inductor.aoti_load_package(str(root / engine.path), **options)
        except RuntimeError as error:
            compiled_on = machine_of(root / engine.path)
            if compiled_on not in ("", this_machine()):
                raise TargetError(
                    f"{engine.path}: compiled on {compiled_on}, and this is {this_machine()}; build again here"
                ) from error
            raise EngineError(f"{engine.path}: AOTInductor cannot load it: {str(error).splitlines()[0]}") from error
        metadata = package.get_metadata()
        missing = set(filter(None, metadata["cpu"].split(","))) - cpu_features()
        if missing:
            # Running it would end the process with an illegal instruction.
            raise TargetError(
                f"{engine.path}: compiled for a CPU with {', '.join(sorted(missing))}, which this one lacks; build "
                "again here"
            )
        return package, metadata, _tensors(root, engine, json.loads(metadata["weights"]), weights or {}, device)


def this_machine() -> str:
    """Returns the system and the kind of processor, such as `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


def machine_of(package: Path) -> str:
    """Returns what a package was compiled on, without loading it; empty if it cannot be read or does not say."""
    return str(metadata_of(package).get(MACHINE, ""))


def metadata_of(package: Path) -> dict[str, str]:
    """Returns the metadata of a package, without loading it; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith("metadata.json") and isinstance(metadata := json.loads(archive.read(name)), dict):
                return metadata
    return {}


class Inductor(AotInductor):
    """AOTInductor for the CPU of the machine that builds."""

    name = "inductor"

    def _installed(self) -> Availability:
        compiler = compiler_found()
        if compiler is None:
            return Availability(builds=False, runs=True, reason=NO_COMPILER)
        return Availability(builds=True, runs=True, reason=f"torch {package_version('torch')}, {compiler}")

    def _compiler_options(self) -> Mapping[str, bool | int]:
        import torch

        return {
            # Otherwise the kernels are compiled for the number of threads that this process happens to have.
            "cpp.dynamic_threads": True,
            # If compiled for one thread, torch 2.13 leaves out the `omp single` around code without a loop. Several
            # threads would then all execute it: the mean of a loss, for example, would be divided once by each thread.
            "cpp.threads": max(FEWEST_THREADS, torch.get_num_threads()),
            # Marks every kernel for the profiler; without a profiler, a mark costs a fraction of a microsecond.
            "cpp.enable_kernel_profile": True,
        }

    def _load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays
    ) -> InductorRunner:
        package, metadata, tensors = self.opened(root, engine, weights, "cpu")
        return InductorRunner(package, metadata, tensors, f"inductor {engine.path}", threads)

    def profile(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, feeds: Arrays, runs: int
    ) -> Profile:
        with self.load(root, engine, config, threads) as runner:
            calls = calls_of_package(root / engine.path)
            used = {name: array for name, array in feeds.items() if name in runner.inputs}
            runner.run(used)
            kernels = kernels_of_calls(lambda: runner.run(used), runs, calls, f"inductor {engine.path}")
        return Profile(profiler=f"torch.profiler {package_version('torch')}", runs=runs, kernels=kernels)


def compiler_found() -> str | None:
    """Returns the C++ compiler that torch would call, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):
        return None


def _held(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the weights and buffers of a program, including buffers that a state_dict leaves out."""
    import torch

    constants = {name: tensor for name, tensor in program.constants.items() if isinstance(tensor, torch.Tensor)}
    return {**constants, **program.state_dict}


def _tensors(
    root: Path, engine: Engine, dtypes: Mapping[str, str], replaced: Arrays, device: str
) -> dict[str, torch.Tensor]:
    """Returns the tensors that a package reads, each from the first weights file that has it in the package's dtype."""
    import torch
    from safetensors import safe_open

    assert engine.weights is not None
    tensors = {
        name: torch.from_numpy(array).to(getattr(torch, dtypes[name].removeprefix("torch.")))
        for name, array in replaced.items()
        if name in dtypes
    }
    for path in engine.weights_files:
        with safe_open(root / path, framework="pt") as file:
            for name in set(file.keys()) & set(dtypes) - set(tensors):
                tensor = file.get_tensor(name)
                if str(tensor.dtype) == dtypes[name]:
                    tensors[name] = tensor
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _forget_sources(program: torch.export.ExportedProgram) -> None:
    """Removes the model's source lines: each kernel's mark would copy them in every run, with paths of this machine."""
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def calls_of_package(path: Path) -> tuple[Call, ...]:
    """Returns (kernel, state_dict names of the constants that it reads) of every call of a package, in order."""
    with zipfile.ZipFile(path) as package:
        names = [name for name in package.namelist() if name.endswith(".wrapper.cpp")]
        source = "\n".join(package.read(name).decode() for name in names)
    pairs = defaultdict(list)
    for index, name in CONSTANT.findall(source):
        pairs[index].append(name)
    stored = {pair[0]: pair[-1] for pair in pairs.values()}
    return tuple(
        (kernel, tuple(dict.fromkeys(stored[word] for word in re.findall(r"\w+", arguments) if word in stored)))
        for kernel, arguments in CALL.findall(source)
    )


def kernels_of_calls(run: Callable[[], Any], runs: int, calls: Sequence[Call], where: str) -> tuple[Kernel, ...]:
    """Profiles `runs` runs and returns their kernels in the order in which they first ran. Equal calls are summed up.

    Empty if a package has no marks for the profiler: torch writes them on Linux and on Windows only.

    Raises:
        EngineError: the package did not run the same kernels every time.
    """
    # Otherwise torch's profiler writes to stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(runs):
            run()
    events = sorted(profiler.events() or (), key=lambda event: event.time_range.start)
    marked = [(match[1], event) for event in events if (match := KERNEL.search(event.name))]
    names = [name for name, _ in marked]
    length = len(marked) // runs
    if names != names[:length] * runs:
        raise EngineError(
            f"{where}: torch's profiler saw {len(marked)} kernels in {runs} runs, expected the same ones in every run; "
            "build the engine again with this mod-export"
        )
    known = [name for name, _ in calls] == names[:length]
    identities = list(calls) if known else [(name, ()) for name in names[:length]]
    ms_by_run: dict[Call, list[float]] = defaultdict(lambda: [0.0] * runs)
    for number, (_, event) in enumerate(marked):
        ms_by_run[identities[number % length]][number // length] += event.cpu_time_total / US_PER_MS
    return tuple(
        Kernel(name=name, operator=name, weights=weights, ms=min(ms)) for (name, weights), ms in ms_by_run.items()
    )
