"""Sessions of ONNX Runtime whose inputs and outputs have their places in a device's memory for good.

What a CUDA graph needs: it is recorded once, with addresses and all, and then started as a whole, without the time that
launching kernels one by one takes (https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html, "Using
CUDA Graphs"). Every shape here is static, so every bucket can be one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from mod_export.engine.feeds import check_feeds, check_outputs
from mod_export.errors import EngineError

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["BoundRunner"]

DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class BoundRunner:
    """A session with inputs and outputs of static shape in the memory of one device.

    `run` copies its feeds to the device and the wanted outputs back, and nothing else. Threads take turns.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, where: str, threads: int, device: str, device_id: int
    ) -> None:
        import onnxruntime as ort

        self._session = session
        self._where = where
        self._turn = threading.Lock()
        self._binding = session.io_binding()
        self._values = {
            item.name: ort.OrtValue.ortvalue_from_shape_and_type(item.shape, DTYPES[item.type], device, device_id)
            for item in (*session.get_inputs(), *session.get_outputs())
        }
        for item in session.get_inputs():
            self._binding.bind_ortvalue_input(item.name, self._values[item.name])
        for item in session.get_outputs():
            self._binding.bind_ortvalue_output(item.name, self._values[item.name])
        self._shapes = {item.name: tuple(item.shape) for item in session.get_inputs()}
        self.inputs = tuple(self._shapes)
        self.outputs = tuple(item.name for item in session.get_outputs())
        self.providers = tuple(session.get_providers())
        self.threads = threads

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        check_feeds(self._where, self._shapes, feeds)
        wanted = list(outputs or self.outputs)
        check_outputs(self._where, self.outputs, wanted)
        try:
            with self._turn:
                for name, array in feeds.items():
                    self._values[name].update_inplace(np.ascontiguousarray(array))
                self._session.run_with_iobinding(self._binding)
                # A copy, also where the device's memory is this machine's: the next run writes to the same place.
                return {name: np.array(self._values[name].numpy()) for name in wanted}
        except RuntimeError as error:
            raise EngineError(f"{self._where}: ONNX Runtime failed: {str(error).splitlines()[0]}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.clear()
        del self._binding
        del self._session
