"""The part of ONNX Runtime's C interface that its Python interface lacks: sessions that share packed weights.

Both wheels, onnxruntime and onnxruntime-gpu, contain the C library. Its table of functions only grows: a function keeps
its index in all later releases, and the library itself asserts that (onnxruntime_c_api.cc, "DO NOT MODIFY ABOVE"). So
the indices below, all of version 8 (ONNX Runtime 1.8), are valid for every release since.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mod_export.errors import EngineError

Handle = ctypes.c_void_p
VERSION = 8
LIBRARIES = ("libonnxruntime.so*", "libonnxruntime*.dylib")
"""Windows is left out because its paths have another encoding; sessions of the Python interface are used there."""

POINTER, NUMBER, SIZE, TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
FUNCTIONS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "CreateEnv": (3, (NUMBER, TEXT, POINTER)),
    "Run": (9, (POINTER, POINTER, POINTER, POINTER, SIZE, POINTER, SIZE, POINTER)),
    "CreateSessionOptions": (10, (POINTER,)),
    "DisableMemPattern": (17, (POINTER,)),
    "SetSessionLogSeverityLevel": (22, (POINTER, NUMBER)),
    "SetIntraOpNumThreads": (24, (POINTER, NUMBER)),
    "SetInterOpNumThreads": (25, (POINTER, NUMBER)),
    "SessionGetInputCount": (30, (POINTER, POINTER)),
    "SessionGetOutputCount": (31, (POINTER, POINTER)),
    "SessionGetInputTypeInfo": (33, (POINTER, SIZE, POINTER)),
    "SessionGetOutputTypeInfo": (34, (POINTER, SIZE, POINTER)),
    "SessionGetInputName": (36, (POINTER, SIZE, POINTER, POINTER)),
    "SessionGetOutputName": (37, (POINTER, SIZE, POINTER, POINTER)),
    "CreateTensorWithDataAsOrtValue": (49, (POINTER, POINTER, SIZE, POINTER, SIZE, NUMBER, POINTER)),
    "GetTensorMutableData": (51, (POINTER, POINTER)),
    "CastTypeInfoToTensorInfo": (55, (POINTER, POINTER)),
    "GetTensorElementType": (60, (POINTER, POINTER)),
    "GetDimensionsCount": (61, (POINTER, POINTER)),
    "GetDimensions": (62, (POINTER, POINTER, SIZE)),
    "CreateCpuMemoryInfo": (69, (NUMBER, NUMBER, POINTER)),
    "AllocatorFree": (76, (POINTER, POINTER)),
    "GetAllocatorWithDefaultOptions": (78, (POINTER,)),
    "AddSessionConfigEntry": (130, (POINTER, TEXT, TEXT)),
    "CreateAndRegisterAllocator": (144, (POINTER, POINTER, POINTER)),
    "AddInitializer": (150, (POINTER, TEXT, POINTER)),
    "CreatePrepackedWeightsContainer": (166, (POINTER,)),
    "CreateSessionWithPrepackedWeightsContainer": (168, (POINTER, TEXT, POINTER, POINTER, POINTER)),
}
"""Name -> index in the table, and argument types. Each returns a status, which is null on success."""
RELEASES = {
    "Status": 93, "Session": 95, "Value": 96, "TypeInfo": 98, "SessionOptions": 100, "PrepackedWeightsContainer": 167,
}  # fmt: skip
GET_ERROR_MESSAGE = 2


class _Base(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("get_version", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    )


class OrtC:
    """The functions of one library. `call` is for functions that return only a status, `make` for functions that create
    an object.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.OrtGetApiBase.restype = ctypes.POINTER(_Base)
        base = library.OrtGetApiBase().contents
        self.version: str = base.get_version().decode()
        table = ctypes.cast(base.get_api(VERSION), ctypes.POINTER(ctypes.c_void_p))
        self._functions: dict[str, Callable[..., int | None]] = {
            name: ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments)(table[index])
            for name, (index, arguments) in FUNCTIONS.items()
        }
        self._releases: dict[str, Callable[[Handle], None]] = {
            name: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(table[index]) for name, index in RELEASES.items()
        }
        self._message = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(table[GET_ERROR_MESSAGE])
        self.run: Callable[..., int | None] = self._functions["Run"]
        self.tensor: Callable[..., int | None] = self._functions["CreateTensorWithDataAsOrtValue"]
        self.data: Callable[..., int | None] = self._functions["GetTensorMutableData"]
        self.release_value: Callable[[Handle], None] = self._releases["Value"]

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function.

        Raises:
            EngineError: the function failed; the message is the library's.
        """
        self.check(self._functions[name](*arguments))

    def make(self, name: str, *arguments: object) -> Handle:
        """Calls a function that returns an object through its last argument.

        Raises:
            EngineError: the function failed; the message is the library's.
        """
        handle = Handle()
        self.call(name, *arguments, ctypes.byref(handle))
        return handle

    def number(self, name: str, *arguments: object) -> int:
        """Calls a function that returns a number through its last argument."""
        result = ctypes.c_size_t()
        self.call(name, *arguments, ctypes.byref(result))
        return result.value

    def release(self, kind: str, handle: Handle) -> None:
        """Releases an object."""
        self._releases[kind](handle)

    def check(self, status: int | None) -> None:
        """Raises the error of a status.

        Raises:
            EngineError: the status is not null.
        """
        if status is None:
            return
        message = self._message(status).decode(errors="replace")
        self._releases["Status"](Handle(status))
        raise EngineError(message.splitlines()[0])


@cache
def ort_c() -> OrtC | None:
    """Returns the C interface of the installed ONNX Runtime, loaded once; None if it has no such library."""
    spec = importlib.util.find_spec("onnxruntime")
    folders: Sequence[str] = (spec.submodule_search_locations or ()) if spec is not None else ()
    paths = (path for folder in folders for name in LIBRARIES for path in sorted(Path(folder, "capi").glob(name)))
    path = next(paths, None)
    return None if path is None else OrtC(path)
