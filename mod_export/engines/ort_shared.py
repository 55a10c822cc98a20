"""Sessions of ONNX Runtime on the CPU that share memory: all buckets of a model map their weights file once, pack the
weights once, and allocate intermediate values from one arena.

Kernels multiply by a packed copy of a weight, in the order in which the processor reads it. Each session of the Python
interface packs a copy of its own, so four buckets need four times the memory. Here all sessions on one weights file
share their packed weights (OrtPrepackedWeightsContainer). After packing, the pages of the mapped file are released, and
read again only where a kernel looks rows up in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from mod_export.engines.ort_c import Handle, OrtC
from mod_export.engines.protocol import Port, check_bound, check_feeds, check_outputs
from mod_export.errors import BuildFolderError, EngineError
from mod_export.export.weights_file import WeightsFile

__all__ = ["SharedRunner", "shared_runner"]

ARENA, DEFAULT_MEMORY = 1, 0
"""OrtArenaAllocator, OrtMemTypeDefault."""
ERRORS_ONLY = 3
CODES = {"F32": 1, "U8": 2, "I8": 3, "F16": 10, "BF16": 16}
"""Name of a dtype in safetensors -> ONNXTensorElementDataType."""
DTYPES: Mapping[int, type[np.generic]] = {1: np.float32, 7: np.int64, 9: np.bool_}
"""ONNXTensorElementDataType of an input or output -> NumPy dtype."""


@cache
def _environment(api: OrtC) -> tuple[Handle, Handle]:
    """(environment, description of CPU memory), one of each for the process; sessions allocate from its arena."""
    environment = api.make("CreateEnv", ERRORS_ONLY, b"mod_export")
    memory = api.make("CreateCpuMemoryInfo", ARENA, DEFAULT_MEMORY)
    api.call("CreateAndRegisterAllocator", environment, memory, None)
    return environment, memory


class _Weights:
    """One weights file in memory: mapped, each tensor wrapped as a value of ONNX Runtime, and the packed copies."""

    def __init__(self, api: OrtC, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.container = api.make("CreatePrepackedWeightsContainer")
        self.values: dict[str, Handle] = {}
        mapped = np.frombuffer(self._map, np.uint8)
        for name, (dtype, shape, offset, length) in WeightsFile.open(path).entries.items():
            if length:
                self.values[name] = _tensor(api, mapped[offset : offset + length], shape, CODES[dtype])
        weakref.finalize(self, _release, api, self.values, self.container, mapped)

    def release_pages(self) -> None:
        """Gives the pages of the file that were read back to the system, and the memory that packing has freed.

        Pages that are used again are read again. A session packs every weight before it sees that the container has it
        already, and the C library of Linux (glibc) keeps freed memory unless it is told to return it.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        if sys.platform.startswith("linux") and hasattr(trim := ctypes.CDLL(None), "malloc_trim"):
            trim.malloc_trim(0)


def _release(api: OrtC, values: Mapping[str, Handle], container: Handle, mapped: np.ndarray) -> None:
    # The reference `mapped` keeps the file mapped until here.
    for value in values.values():
        api.release("Value", value)
    api.release("PrepackedWeightsContainer", container)


_weights_in_use: weakref.WeakValueDictionary[tuple[str, int, int], _Weights] = weakref.WeakValueDictionary()
"""Weights files that a session uses, by (path, inode, time of change): a file that was replaced is another one."""
_opening = threading.Lock()


def _weights(api: OrtC, path: Path) -> _Weights:
    WeightsFile.open(path)  # Raises where the file is damaged.
    status = path.stat()
    key = (str(path.resolve()), status.st_ino, status.st_mtime_ns)
    with _opening:
        weights = _weights_in_use.get(key)
        if weights is None:
            weights = _weights_in_use[key] = _Weights(api, path)
    return weights


def _tensor(api: OrtC, array: np.ndarray, shape: Sequence[int], code: int) -> Handle:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    memory = _environment(api)[1]
    return api.make("CreateTensorWithDataAsOrtValue", memory, array.ctypes.data, array.nbytes, sizes, len(shape), code)


def shared_runner(api: OrtC, graph: Path, weights: Path, where: str, threads: int) -> SharedRunner:
    """Opens a session on a graph that reads its weights from one file, shared with all other sessions on that file.

    Args:
        api: ONNX Runtime's C interface.
        graph: the ONNX file.
        weights: the weights file, in the folder that the graph's references are relative to.
        where: what messages call it.
        threads: threads inside an operator; 0 leaves ONNX Runtime's choice.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or the other file is not one of weights.
    """
    try:
        shared = _weights(api, weights)
    except (BuildFolderError, OSError) as error:
        raise EngineError(str(error)) from error
    options = api.make("CreateSessionOptions")
    try:
        api.call("SetIntraOpNumThreads", options, threads)
        api.call("SetInterOpNumThreads", options, 1)
        # A memory pattern is a block of memory for each session; without it all of them share the pieces of the arena.
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


class SharedRunner:
    """A session with inputs and outputs of static shape. It reads feeds in place and returns arrays over ONNX Runtime's
    own memory, without a copy. Several threads may run it at once.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)

    def __init__(self, api: OrtC, session: Handle, weights: _Weights, where: str, threads: int) -> None:
        self._api = api
        self._session: Handle | None = session
        self._running = 0
        self._state_changed = threading.Condition()
        self._close = weakref.finalize(self, _close, api, session, weights)
        self._where = where
        self._inputs = _ports(api, session, "Input")
        self._outputs = _ports(api, session, "Output")
        self._shapes = {name: port.shape for name, port in self._inputs.items()}
        self._dtypes = {name: np.dtype(port.dtype) for name, port in self._inputs.items()}
        self.inputs = tuple(self._inputs)
        self.outputs = tuple(self._outputs)
        self.threads = threads

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        check_feeds(self._where, self._shapes, feeds, self._dtypes)
        wanted = list(outputs or self.outputs)
        check_outputs(self._where, self.outputs, wanted)
        given = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        values = [self._inputs[name].value(self._api, array) for name, array in given.items()]
        # Null for each output: ONNX Runtime then allocates it from the arena, whose memory is in the cache after a run.
        results = (Handle * len(wanted))()
        try:
            self._run(
                (
                    None, _names(tuple(given)), (Handle * len(values))(*values), len(values),
                    _names(tuple(wanted)), len(wanted), results,
                )
            )  # fmt: skip
        finally:
            for value in values:
                self._api.release_value(value)
        return {
            name: np.asarray(_Result(self._api, Handle(value), self._outputs[name]))
            for name, value in zip(wanted, results, strict=True)
        }

    def _run(self, arguments: tuple[object, ...]) -> None:
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

    @property
    def ports(self) -> Mapping[str, Port]:
        """ONNXTensorElementDataType of an input or output -> NumPy dtype."""
        both = {**self._inputs, **self._outputs}
        return {name: Port(port.shape, np.dtype(port.dtype)) for name, port in both.items()}

    def bind(self, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        check_bound(self._where, self.ports, feeds, outputs)
        given = [self._inputs[name].value(self._api, array) for name, array in feeds.items()]
        results = [self._outputs[name].value(self._api, array) for name, array in outputs.items()]
        return _Bound(self, (tuple(feeds), given), (tuple(outputs), results), (*feeds.values(), *outputs.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._state_changed:
            self._session = None
            # Other threads may still be running the session.
            self._state_changed.wait_for(lambda: not self._running)
        self._close()


class _Bound:
    """A run on the same arrays each time: one call, without copies or new objects."""

    def __init__(
        self,
        runner: SharedRunner,
        feeds: tuple[tuple[str, ...], list[Handle]],
        outputs: tuple[tuple[str, ...], list[Handle]],
        arrays: Sequence[np.ndarray],
    ) -> None:
        self._runner = runner
        self._arrays = arrays  # Kept alive here: ONNX Runtime only has their addresses.
        (inputs, given), (wanted, results) = feeds, outputs
        self._arguments = (
            None, _names(inputs), (Handle * len(given))(*given), len(given), _names(wanted), len(wanted),
            (Handle * len(results))(*results),
        )  # fmt: skip
        weakref.finalize(self, _release_values, runner._api, (*given, *results))

    def __call__(self) -> None:
        self._runner._run(self._arguments)


def _release_values(api: OrtC, values: Sequence[Handle]) -> None:
    for value in values:
        api.release_value(value)


def _close(api: OrtC, session: Handle, weights: _Weights) -> None:
    # The argument `weights` keeps them alive until the session, which reads them, is released.
    api.release("Session", session)


@cache
def _names(names: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


class _Result:
    """The memory of an output, returned to the arena when the last array over it is deleted."""

    def __init__(self, api: OrtC, value: Handle, port: _Port) -> None:
        self._api = api
        self._value = value
        address = Handle()
        api.check(api.data(value, ctypes.byref(address)))
        kind = np.dtype(port.dtype)
        self.__array_interface__ = {
            "shape": port.shape, "typestr": kind.str, "data": (address.value, False), "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        self._api.release_value(self._value)


class _Port:
    """An input or output: its shape and dtype, and how an array of both is wrapped as a value of ONNX Runtime."""

    def __init__(self, shape: tuple[int, ...], code: int) -> None:
        self.shape = shape
        self.dtype = DTYPES[code]
        self._sizes = (ctypes.c_int64 * len(shape))(*shape)
        self._code = code

    def value(self, api: OrtC, array: np.ndarray) -> Handle:
        made, memory = Handle(), _environment(api)[1]
        address: int = array.__array_interface__["data"][0]
        sizes, count = self._sizes, len(self.shape)
        api.check(api.tensor(memory, address, array.nbytes, sizes, count, self._code, ctypes.byref(made)))
        return made


def _ports(api: OrtC, session: Handle, kind: str) -> dict[str, _Port]:
    """Name -> input or output."""
    allocator = api.make("GetAllocatorWithDefaultOptions")
    found = {}
    for index in range(api.number(f"SessionGet{kind}Count", session)):
        text = api.make(f"SessionGet{kind}Name", session, index, allocator)
        name = ctypes.string_at(text.value or 0).decode()
        api.call("AllocatorFree", allocator, text)
        about = api.make(f"SessionGet{kind}TypeInfo", session, index)
        with contextlib.closing(_Released(api, "TypeInfo", about)):
            tensor = api.make("CastTypeInfoToTensorInfo", about)
            sizes = (ctypes.c_int64 * api.number("GetDimensionsCount", tensor))()
            api.call("GetDimensions", tensor, sizes, len(sizes))
            code = ctypes.c_int()
            api.call("GetTensorElementType", tensor, ctypes.byref(code))
        found[name] = _Port(tuple(sizes), code.value)
    return found


class _Released:
    """Releases an object of ONNX Runtime when it is closed."""

    def __init__(self, api: OrtC, kind: str, handle: Handle) -> None:
        self._arguments = (kind, handle)
        self._api = api

    def close(self) -> None:
        self._api.release(*self._arguments)
