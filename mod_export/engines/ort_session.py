"""Sessions of ONNX Runtime on graphs whose weights are in another folder, and two runners for such a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mod_export.engines.protocol import ON_GPU, Arrays, EngineRunner, OptionalArrays, Port, check_bound
from mod_export.errors import EngineError

if TYPE_CHECKING:
    import onnxruntime

CPU = "CPUExecutionProvider"
DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(bool)": np.bool_,
    "tensor(int8)": np.int8, "tensor(int16)": np.int16, "tensor(int32)": np.int32, "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8, "tensor(uint16)": np.uint16, "tensor(uint32)": np.uint32, "tensor(uint64)": np.uint64,
}  # fmt: skip
"""Element type of an input or output -> NumPy dtype."""
FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
"""Session option that lets a graph in engines/ use weights in graphs/; ONNX only allows files beside the graph."""


class OrtRunner(EngineRunner):
    """A session with inputs and outputs of static shape."""

    def __init__(self, session: onnxruntime.InferenceSession, where: str, threads: int) -> None:
        inputs, outputs = _ports(session.get_inputs()), _ports(session.get_outputs())
        super().__init__(where, inputs, list(outputs), session.get_providers(), threads)
        self.ports: Mapping[str, Port] = {**inputs, **outputs}
        self._session_or_none: onnxruntime.InferenceSession | None = session

    @property
    def _session(self) -> onnxruntime.InferenceSession:
        if self._session_or_none is None:
            raise EngineError(f"{self._where}: the session is closed; open another one")
        return self._session_or_none

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        with self._errors():
            return dict(zip(wanted, self._session.run(wanted, dict(feeds)), strict=True))

    def bind(self, feeds: Arrays, outputs: Arrays) -> Callable[[], None]:
        check_bound(self._where, self.ports, feeds, outputs)
        binding, arrays = self._session.io_binding(), (*feeds.values(), *outputs.values())
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

        def run() -> None:
            assert arrays  # Keeps the arrays alive: ONNX Runtime only has their addresses.
            session = self._session
            with self._errors():
                session.run_with_iobinding(binding)

        return run

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _vendor_errors() as error:
            raise EngineError(f"{self._where}: ONNX Runtime failed: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._session_or_none = None


class BoundRunner(OrtRunner):
    """A session whose inputs and outputs have fixed addresses in the memory of one device, as a CUDA graph needs.

    A CUDA graph is recorded once, including the addresses, and then launched as a whole, which saves the time of
    launching kernels one by one (https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html, "Using
    CUDA Graphs"). Every bucket has static shapes, so every bucket can be recorded. `run` copies its feeds to the device
    and the wanted outputs back; one thread runs at a time.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, where: str, threads: int, device: str, device_id: int
    ) -> None:
        import onnxruntime as ort

        super().__init__(session, where, threads)
        self._binding = session.io_binding()
        self._values = {
            item.name: ort.OrtValue.ortvalue_from_shape_and_type(item.shape, DTYPES[item.type], device, device_id)
            for item in (*session.get_inputs(), *session.get_outputs())
        }
        for name in self.inputs:
            self._binding.bind_ortvalue_input(name, self._values[name])
        for name in self.outputs:
            self._binding.bind_ortvalue_output(name, self._values[name])

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        with ON_GPU, self._errors():
            for name, array in feeds.items():
                self._values[name].update_inplace(np.ascontiguousarray(array))
            self._session.run_with_iobinding(self._binding)
            # A copy, even if the device is this CPU: the next run writes to the same address.
            return {name: np.array(self._values[name].numpy()) for name in wanted}

    def close(self) -> None:
        self._values.clear()
        del self._binding
        super().close()


def _ports(items: Iterable[onnxruntime.NodeArg]) -> dict[str, Port]:
    # A type that NumPy does not have becomes void, which no fed array has.
    return {item.name: Port(tuple(item.shape), np.dtype(DTYPES.get(item.type, np.void))) for item in items}


def session_from_onnx(
    path: Path | bytes,
    weights_folder: Path,
    providers: Sequence[Any],
    threads: int,
    entries: Mapping[str, str] | None = None,
    weights: OptionalArrays = None,
    *,
    optimized: bool = True,
    profile: Path | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a session on a graph whose weights are in another folder.

    Args:
        path: the graph, or its bytes.
        weights_folder: the folder of the graph's external data.
        providers: execution providers, each a name or (name, options).
        threads: threads inside one operator; with 0 ONNX Runtime chooses.
        entries: further entries of the session's configuration.
        weights: tensors that replace external data of the same name.
        optimized: False keeps every node as it is in the graph.
        profile: prefix of the file that ONNX Runtime writes its profile to.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or one of `weights` is not external data of the graph.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(weights_folder.resolve()))
    # Threads of an idle session must not spin on the cores of the session that is being timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    try:
        if weights:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
            # `add_initializer` is silently ignored for weights in external files.
            options.add_external_initializers(list(weights), values)
        graph = path if isinstance(path, bytes) else str(path)
        return ort.InferenceSession(graph, options, providers=list(providers))
    except _vendor_errors() as error:
        name = "a graph in memory" if isinstance(path, bytes) else path.name
        raise EngineError(f"{name}: ONNX Runtime refuses this graph: {str(error).splitlines()[0]}") from error


def _vendor_errors() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    # `run_with_iobinding` raises RuntimeError instead of ONNX Runtime's own errors.
    return (
        RuntimeError, state.Fail, state.InvalidGraph, state.InvalidArgument, state.InvalidProtobuf,
        state.NotImplemented, state.RuntimeException, state.EPFail, state.NoSuchFile, state.NoModel,
    )  # fmt: skip
