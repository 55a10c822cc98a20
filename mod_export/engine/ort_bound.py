"""Sessions of ONNX Runtime whose inputs and outputs have their places in a device's memory for good.

What a CUDA graph needs: it is recorded once, with addresses and all, and then started as a whole, without the time that
launching kernels one by one takes (https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html, "Using
CUDA Graphs"). Every shape here is static, so every bucket can be one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from mod_export.engine.ort_session import DTYPES, OrtRunner

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["BoundRunner"]


class BoundRunner(OrtRunner):
    """A session with inputs and outputs of static shape in the memory of one device.

    `run` copies its feeds to the device and the wanted outputs back, and nothing else. Threads take turns.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, where: str, threads: int, device: str, device_id: int
    ) -> None:
        import onnxruntime as ort

        super().__init__(session, where, threads)
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

    def _results(self, feeds: Mapping[str, np.ndarray], wanted: list[str]) -> dict[str, np.ndarray]:
        with self._turn:
            for name, array in feeds.items():
                self._values[name].update_inplace(np.ascontiguousarray(array))
            self._session.run_with_iobinding(self._binding)
            # A copy, also where the device's memory is this machine's: the next run writes to the same place.
            return {name: np.array(self._values[name].numpy()) for name in wanted}

    def _errors(self) -> tuple[type[Exception], ...]:
        # `run_with_iobinding` raises this in place of ONNX Runtime's own.
        return (RuntimeError,)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.clear()
        del self._binding
        super().__exit__(kind, error, trace)
