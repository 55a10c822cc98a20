"""Sessions of ONNX Runtime on the CPU that share memory: all buckets of a model map their weights file once, keep one
packed copy of the weights, and allocate intermediate values from one arena.

Kernels multiply by a packed copy of a weight, in the order in which the processor reads it. Each session of the Python
interface packs its own copy, so four buckets need four times the memory. Here all sessions on one weights file share
their packed weights (OrtPrepackedWeightsContainer): with 159 MB of weights, a further bucket takes 3 MB or 2 %. Weights
that are packed in advance and stored in a file would take memory in each session, and fit only one kind of processor.
After packing, the pages of the mapped file are released. They are read again only if a kernel looks up rows in the
file.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from mod_export.engines.ort_c import Handle, OrtC
from mod_export.engines.protocol import Arrays, EngineRunner, Port, check_bound
from mod_export.environment import return_freed_memory
from mod_export.errors import BuildFolderError, EngineError
from mod_export.graph.weights import WeightsFile

ARENA, DEFAULT_MEMORY = 1, 0
"""Values of OrtArenaAllocator and OrtMemTypeDefault."""
ERRORS_ONLY = 3
CODES = {"F32": 1, "U8": 2, "I8": 3, "I16": 5, "I32": 6, "I64": 7, "BOOL": 9, "F16": 10, "F64": 11, "BF16": 16}
"""Name of a dtype in safetensors -> ONNXTensorElementDataType."""
DTYPES: Mapping[int, np.dtype[np.generic]] = {
    1: np.dtype(np.float32), 2: np.dtype(np.uint8), 3: np.dtype(np.int8), 4: np.dtype(np.uint16), 5: np.dtype(np.int16),
    6: np.dtype(np.int32), 7: np.dtype(np.int64), 9: np.dtype(np.bool_), 10: np.dtype(np.float16),
    11: np.dtype(np.float64), 12: np.dtype(np.uint32), 13: np.dtype(np.uint64),
}  # fmt: skip
"""ONNXTensorElementDataType of an input or output -> NumPy dtype."""
CODE_OF = {dtype: code for code, dtype in DTYPES.items()}


@cache
def _environment(api: OrtC) -> tuple[Handle, Handle]:
    """Returns (environment, description of CPU memory), one of each per process. Sessions allocate from its arena."""
    environment = api.make("CreateEnv", ERRORS_ONLY, b"mod_export")
    memory = api.make("CreateCpuMemoryInfo", ARENA, DEFAULT_MEMORY)
    api.call("CreateAndRegisterAllocator", environment, memory, None)
    return environment, memory


def _tensor(api: OrtC, array: np.ndarray, shape: Sequence[int], code: int) -> Handle:
    """Returns an array as a value of ONNX Runtime, which only has the array's address."""
    value, address = Handle(), array.__array_interface__["data"][0]
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    memory = _environment(api)[1]
    api.check(api.tensor(memory, address, array.nbytes, sizes, len(shape), code, ctypes.byref(value)))
    return value


class _Weights:
    """One weights file in memory: the mapped file, each tensor as a value of ONNX Runtime, and the packed copies."""

    def __init__(self, api: OrtC, path: Path) -> None:
        entries = WeightsFile.open(path).entries
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.container = api.make("CreatePrepackedWeightsContainer")
        mapped = np.frombuffer(self._map, np.uint8)
        self.values = {
            name: _tensor(api, mapped[offset : offset + length], shape, CODES[dtype])
            for name, (dtype, shape, offset, length) in entries.items()
            if length
        }
        weakref.finalize(self, _release, api, self.values, self.container, mapped)

    def release_pages(self) -> None:
        """Returns to the system the pages of the file that were read, and the memory that packing has freed.

        Pages that are used again are read again. A session packs every weight before it sees that the container already
        has it.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        return_freed_memory()


def _release(api: OrtC, values: Mapping[str, Handle], container: Handle, mapped: np.ndarray) -> None:
    # The reference `mapped` keeps the file mapped until here.
    _release_values(api, values.values())
    api.release("PrepackedWeightsContainer", container)


def _release_values(api: OrtC, values: Iterable[Handle]) -> None:
    for value in values:
        api.release_value(value)


_weights_in_use: weakref.WeakValueDictionary[tuple[str, int, int], _Weights] = weakref.WeakValueDictionary()
"""Weights files that a session uses, by (path, inode, time of change): a replaced file gets an entry of its own."""
_opening = threading.Lock()


def _weights(api: OrtC, path: Path) -> _Weights:
    status = path.stat()
    key = (str(path.resolve()), status.st_ino, status.st_mtime_ns)
    with _opening:
        weights = _weights_in_use.get(key)
        if weights is None:
            weights = _weights_in_use[key] = _Weights(api, path)
    return weights


def shared_runner(api: OrtC, graph: Path, weights: Path, where: str, threads: int) -> SharedRunner:
    """Opens a session on a graph that reads its weights from one file, shared with all other sessions on that file.

    The graph's references are relative to the folder of that file. With 0 threads ONNX Runtime chooses the number.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or `weights` is not a weights file.
    """
    try:
        shared = _weights(api, weights)
    except (BuildFolderError, OSError) as error:
        raise EngineError(str(error)) from error
    options = api.make("CreateSessionOptions")
    try:
        api.call("SetIntraOpNumThreads", options, threads)
        api.call("SetInterOpNumThreads", options, 1)
        # A memory pattern reserves a block of memory for each session; without it all sessions share the arena.
        api.call("DisableMemPattern", options)
        api.call("SetSessionLogSeverityLevel", options, ERRORS_ONLY)
        for key, value in (
            ("session.model_external_initializers_file_folder_path", str(weights.parent.resolve())),
            # Threads of an idle session must not spin on the cores of the session that is being timed.
            ("session.force_spinning_stop", "1"),
            ("session.use_env_allocators", "1"),
        ):
            api.call("AddSessionConfigEntry", options, key.encode(), value.encode())
        for name, tensor in shared.values.items():
            api.call("AddInitializer", options, name.encode(), tensor)
        make = "CreateSessionWithPrepackedWeightsContainer"
        session = api.make(make, _environment(api)[0], str(graph).encode(), options, shared.container)
    except EngineError as error:
        raise EngineError(f"{graph.name}: ONNX Runtime refuses this graph: {error}") from error
    finally:
        api.release("SessionOptions", options)
    shared.release_pages()
    return SharedRunner(api, session, shared, where, threads)


class SharedRunner(EngineRunner):
    """A session with inputs and outputs of static shape. It reads feeds in place and returns arrays over ONNX Runtime's
    own memory, without a copy. Several threads may run it at once.
    """

    def __init__(self, api: OrtC, session: Handle, weights: _Weights, where: str, threads: int) -> None:
        inputs, outputs = _ports(api, session, "Input"), _ports(api, session, "Output")
        super().__init__(where, inputs, list(outputs), ["CPUExecutionProvider"], threads)
        self.ports: Mapping[str, Port] = {**inputs, **outputs}
        self._api = api
        self._session: Handle | None = session
        self._running = 0
        self._state_changed = threading.Condition()
        self._close = weakref.finalize(self, _close, api, session, weights)

    def _run(self, feeds: Arrays, wanted: list[str]) -> dict[str, np.ndarray]:
        arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        values = self._values(arrays)
        # ONNX Runtime allocates outputs that are null from the arena, whose memory is in the cache after a run.
        results = (Handle * len(wanted))()
        try:
            self._call(_arguments(arrays, values, wanted, results))
        finally:
            _release_values(self._api, values)
        return {
            name: np.asarray(_Result(self._api, Handle(value), self.ports[name]))
            for name, value in zip(wanted, results, strict=True)
        }

    def _values(self, arrays: Arrays) -> list[Handle]:
        ports = self.ports
        return [_tensor(self._api, array, ports[name].shape, CODE_OF[array.dtype]) for name, array in arrays.items()]

    def _call(self, arguments: tuple[object, ...]) -> None:
        with self._state_changed:
            session = self._session
            if session is None:
                raise EngineError(f"{self._where}: the session is closed; open another one")
            self._running += 1
        try:
            self._api.check(self._api.run(session, *arguments))
        except EngineError as error:
            raise EngineError(f"{self._where}: ONNX Runtime failed: {error}") from error
        finally:
            with self._state_changed:
                self._running -= 1
                self._state_changed.notify_all()

    def bind(self, feeds: Arrays, outputs: Arrays) -> Callable[[], None]:
        check_bound(self._where, self.ports, feeds, outputs)
        values, results = self._values(feeds), self._values(outputs)
        arguments = _arguments(feeds, values, outputs, (Handle * len(results))(*results))
        arrays = (*feeds.values(), *outputs.values())

        def run() -> None:
            assert arrays  # Keeps the arrays alive: ONNX Runtime only has their addresses.
            self._call(arguments)

        weakref.finalize(run, _release_values, self._api, (*values, *results))
        return run

    def close(self) -> None:
        with self._state_changed:
            self._session = None
            # Other threads may still be running the session.
            self._state_changed.wait_for(lambda: not self._running)
        self._close()


def _close(api: OrtC, session: Handle, weights: _Weights) -> None:
    # The argument `weights` keeps the weights alive until the session, which reads them, is released.
    api.release("Session", session)


@cache
def _names(names: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


def _arguments(
    inputs: Iterable[str], values: Sequence[Handle], wanted: Iterable[str], results: ctypes.Array[ctypes.c_void_p]
) -> tuple[object, ...]:
    """Returns `Run`'s arguments after the session handle."""
    handles = (Handle * len(values))(*values)
    names, outputs = _names(tuple(inputs)), _names(tuple(wanted))
    return (None, names, handles, len(handles), outputs, len(outputs), results)


class _Result:
    """The memory of an output, returned to the arena when the last array over it is deleted."""

    def __init__(self, api: OrtC, value: Handle, port: Port) -> None:
        self._api = api
        self._value = value
        address = Handle()
        api.check(api.data(value, ctypes.byref(address)))
        self.__array_interface__ = {
            "shape": port.shape,
            "typestr": port.dtype.str,
            # An empty tensor has no address.
            "data": (address.value or 0, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._api.release_value(self._value)


def _ports(api: OrtC, session: Handle, kind: str) -> dict[str, Port]:
    """Returns name -> port of the inputs or the outputs of a session."""
    allocator = api.make("GetAllocatorWithDefaultOptions")
    ports = {}
    for index in range(api.number(f"SessionGet{kind}Count", session)):
        text = api.make(f"SessionGet{kind}Name", session, index, allocator)
        name = ctypes.string_at(text.value or 0).decode()
        api.call("AllocatorFree", allocator, text)
        about = api.make(f"SessionGet{kind}TypeInfo", session, index)
        tensor = api.make("CastTypeInfoToTensorInfo", about)
        sizes = (ctypes.c_int64 * api.number("GetDimensionsCount", tensor))()
        api.call("GetDimensions", tensor, sizes, len(sizes))
        code = ctypes.c_int()
        api.call("GetTensorElementType", tensor, ctypes.byref(code))
        api.release("TypeInfo", about)
        ports[name] = Port(tuple(sizes), DTYPES[code.value])
    return ports
