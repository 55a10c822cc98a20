"""OpenVINO on the CPU: an engine is a compiled model without weights, which are read from the weights file in graphs/.

OpenVINO reads the portable graph, rewrites it for the instruction sets of this processor, and exports the result. What
is exported refers to the weights by their place in the weights file (`CACHE_MODE` OPTIMIZE_SIZE, `WEIGHTS_PATH`), so all
buckets share one file on disk. It runs only with the version of OpenVINO and on the instruction sets that it was made
for, which OpenVINO checks itself.

Source: https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/optimizing-latency/model-caching-overview.html
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Arrays, EngineBuilder, EngineJob, EngineRunner, OptionalArrays, Port, check_bound
from mod_export.environment import package_version
from mod_export.errors import BuildFolderError, EngineError, TargetError
from mod_export.export.weights import WeightsFile
from mod_export.types import Availability, Dialect, DType, Engine, Variant

if TYPE_CHECKING:
    import openvino

CPU = "CPU"
BFLOAT16 = "BF16"
"""Among a device's OPTIMIZATION_CAPABILITIES."""
PRECISIONS: Mapping[DType, str] = {"float32": "f32", "bfloat16": "bf16"}
DTYPES: Mapping[str, type[np.generic]] = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "boolean": np.bool_,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
"""Element type of an input or output -> NumPy dtype."""


@cache
def _core() -> openvino.Core:
    """OpenVINO's runtime: one for the process, because plug-ins take time to load."""
    import openvino

    return openvino.Core()


def _said(error: BaseException) -> str:
    """What OpenVINO says of an error, without the places in its sources: the last line that it wrote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class OpenVinoRunner(EngineRunner):
    """A compiled model with inputs and outputs of static shape. It reads feeds in place and returns arrays over memory
    of OpenVINO, without a copy, which the next runs use again once those arrays are gone. Several threads may run it.
    """

    def __init__(self, model: openvino.CompiledModel, where: str, threads: int, keep: object = None) -> None:
        """`keep` is what the model reads, kept as long as it is."""
        inputs, outputs = _ports(model.inputs), _ports(model.outputs)
        super().__init__(where, inputs, list(outputs), ["OpenVINO CPU"], threads)
        self.ports: Mapping[str, Port] = {**inputs, **outputs}
        self._model: openvino.CompiledModel | None = model
        self._keep = keep
        self._idle: list[openvino.InferRequest] = []
        self._changing = threading.Lock()

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        lease = _Lease(self._idle, self._request())
        given = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        with self._errors():
            for name, array in given.items():
                lease.request.set_tensor(name, _tensor(array))
            lease.request.infer()
        return {name: np.asarray(_Result(lease, name, self.ports[name])) for name in wanted}

    def _request(self) -> openvino.InferRequest:
        with self._changing:
            if self._model is None:
                raise EngineError(f"{self._where}: the engine is closed; open another one")
            return self._idle.pop() if self._idle else self._model.create_infer_request()

    def bind(self, feeds: Arrays, outputs: Arrays) -> Callable[[], None]:
        check_bound(self._where, self.ports, feeds, outputs)
        with self._changing:
            if self._model is None:
                raise EngineError(f"{self._where}: the engine is closed; open another one")
            request = self._model.create_infer_request()
        held = (*feeds.values(), *outputs.values())
        for name, array in {**feeds, **outputs}.items():
            request.set_tensor(name, _tensor(array))

        def run() -> None:
            assert held  # Kept alive here: OpenVINO only has their addresses.
            if self._model is None:
                raise EngineError(f"{self._where}: the engine is closed; open another one")
            with self._errors():
                request.infer()

        return run

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(f"{self._where}: OpenVINO failed: {_said(error)}") from error

    def close(self) -> None:
        with self._changing:
            self._model = self._keep = None
            self._idle.clear()


class _Lease:
    """A request whose outputs are in use: it goes back to the idle ones when the last array over them is deleted."""

    def __init__(self, idle: list[openvino.InferRequest], request: openvino.InferRequest) -> None:
        self.request = request
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.request)


class _Result:
    """The memory of one output."""

    def __init__(self, lease: _Lease, name: str, port: Port) -> None:
        self._lease = lease
        self._tensor = lease.request.get_tensor(name)
        data = self._tensor.data
        self.__array_interface__ = {
            "shape": port.shape,
            "typestr": port.dtype.str,
            "data": (data.__array_interface__["data"][0], False),
            "version": 3,
        }


def _tensor(array: np.ndarray) -> openvino.Tensor:
    import openvino

    return openvino.Tensor(array, shared_memory=True)


def _ports(ports: Sequence[Any]) -> dict[str, Port]:
    """Name -> input or output."""
    return {
        port.get_any_name(): Port(tuple(port.shape), np.dtype(DTYPES[port.element_type.get_type_name()]))
        for port in ports
    }


class OpenVino(EngineBuilder):
    """OpenVINO's CPU plug-in."""

    name = "openvino"
    packages = ("openvino",)
    extra = "openvino"
    suffix = ".blob"
    binds = True
    dialect = Dialect(name="OpenVINO", max_opset=23, branches=True)

    def _installed(self) -> Availability:
        about = f"openvino {package_version('openvino')}"
        if CPU not in _core().available_devices:
            return Availability(builds=False, runs=False, reason=f"{about}, which has no plug-in for this CPU")
        return Availability(builds=True, runs=True, reason=about)

    def variants(self, config: BuildConfig) -> Sequence[Variant]:
        return [Variant(dtype=dtype) for dtype in config.target.openvino.dtypes]

    def build(self, job: EngineJob, variant: Variant, destination: Path, config: BuildConfig) -> None:
        core, graph = _core(), job.root / job.graph.path
        try:
            compiled = core.compile_model(core.read_model(str(graph)), CPU, _options(variant.dtype, 1))
            blob = compiled.export_model().getvalue()
        except RuntimeError as error:
            raise EngineError(f"{destination.name}: OpenVINO cannot compile {graph.name}: {_said(error)}") from error
        about = {"openvino": package_version("openvino"), "cpu": core.get_property(CPU, "FULL_DEVICE_NAME")}
        destination.write_bytes(json.dumps({**about, "dtype": variant.dtype}).encode() + b"\n" + blob)

    def load(
        self, root: Path, engine: Engine, config: BuildConfig, threads: int, weights: OptionalArrays = None
    ) -> OpenVinoRunner:
        assert engine.weights is not None
        where = f"{self.name} {engine.path}"
        try:
            head, _, blob = (root / engine.path).read_bytes().partition(b"\n")
            about = json.loads(head)
            file = WeightsFile.open(root / engine.weights)
        except (OSError, ValueError, BuildFolderError) as error:
            raise EngineError(f"{engine.path}: not an engine of OpenVINO, or damaged ({error}); build again") from error
        folder = None if weights is None else tempfile.TemporaryDirectory()
        path = root / engine.weights
        if folder is not None and weights is not None:
            path = _with_other_weights(path, file, weights, Path(folder.name))
        options = {**_options(engine.dtype, threads), "WEIGHTS_PATH": str(path.resolve())}
        try:
            model = _core().import_model(blob, CPU, options)
        except RuntimeError as error:
            raise self._refused(engine, about, error) from error
        return OpenVinoRunner(model, where, threads, keep=folder)

    def _refused(self, engine: Engine, about: Mapping[str, str], error: RuntimeError) -> EngineError | TargetError:
        made, here = (about.get("openvino"), about.get("cpu")), package_version("openvino")
        if "runtime configuration" in str(error):
            cpu = _core().get_property(CPU, "FULL_DEVICE_NAME")
            return TargetError(
                f"{engine.path}: compiled by OpenVINO {made[0]} for the instruction sets of {made[1]}, and this is "
                f"OpenVINO {here} on {cpu}; build again here"
            )
        return EngineError(f"{engine.path}: OpenVINO cannot load it: {_said(error)}; build again")


def _options(dtype: DType, threads: int) -> dict[str, Any]:
    """Of compiling and of loading; with 0 threads OpenVINO chooses."""
    options: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        "CACHE_MODE": "OPTIMIZE_SIZE",
        "NUM_STREAMS": 1,
    }
    return {**options, "INFERENCE_NUM_THREADS": threads} if threads else options


def _with_other_weights(path: Path, file: WeightsFile, weights: Arrays, folder: Path) -> Path:
    """A copy of a weights file with other numbers in it: a compiled model takes weights from files only."""
    copy = Path(shutil.copyfile(path, folder / path.name))
    with copy.open("r+b") as changed:
        for name, array in weights.items():
            if name not in file.entries:
                raise EngineError(f"{path.name}: holds no {name}, so it cannot be replaced")
            _, _, offset, length = file.entries[name]
            data = np.ascontiguousarray(array).tobytes()
            if len(data) != length:
                raise EngineError(f"{path.name}: {name} takes {length} bytes, not {len(data)}")
            changed.seek(offset)
            changed.write(data)
    return copy
