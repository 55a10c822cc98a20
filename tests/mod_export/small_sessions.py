"""Real sessions of ONNX Runtime that write down what was asked of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import onnx
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
from numpy.typing import NDArray

FEEDS: dict[str, NDArray[np.generic]] = {
    "x": np.arange(8, dtype=np.float32).reshape(2, 4),
    "lengths": np.array([4], dtype=np.int64),
}


class Session:
    """A session on a tiny graph; `before_run` may take time, fail, or stop the test."""

    def __init__(
        self,
        log: list[str],
        name: str,
        *,
        threads: int = 1,
        lengths: bool = False,
        before_run: Callable[[int], object] = lambda number: None,
    ) -> None:
        inputs = "float[2,4] x, int64[1] lengths" if lengths else "float[2,4] x"
        body = "y = Add(x, x) z = Mul(x, x)"
        graph = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => (float[2,4] y, float[2,4] z) {{ {body} }}'
        model = onnx.parser.parse_model(graph)
        self._session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.inputs = tuple(item.name for item in self._session.get_inputs())
        self.outputs: tuple[str, ...] = ("y", "z")
        self.providers = tuple(self._session.get_providers())
        self.threads = threads
        self.fed: set[tuple[str, ...]] = set()
        self.asked: list[Sequence[str] | None] = []
        self.collected: list[bool] = []
        self._log, self._name, self._before_run = log, name, before_run

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        self._before_run(len(self.asked))
        self._log.append(self._name)
        self.fed.add(tuple(feeds))
        self.asked.append(outputs)
        self.collected.append(gc.isenabled())
        wanted = list(outputs or self.outputs)
        return dict(zip(wanted, self._session.run(wanted, dict(feeds)), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
