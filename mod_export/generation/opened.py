"""Engines of a build folder that write text, opened for whoever looks at one bucket after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mod_export.artifacts import DType, Engine, ModelKind
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.engine.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.errors import TargetError
from mod_export.generation.decoder import Decoder, Prompts
from mod_export.protocols import BindableRunner, Runner

__all__ = ["GRAPH", "DecodingEngines", "writing_here"]

GRAPH = " graph"
"""Ends the name of a target whose graphs are run in place of its engines."""


def writing_here(engines: Iterable[Engine]) -> list[Engine]:
    """Those that keep their cache in this machine's memory, and can run on it."""
    return [one for one in engines if ENGINES[one.target].binds and ENGINES[one.target].availability().can_run(one)]


@dataclass(frozen=True, slots=True)
class DecodingEngines:
    """The prefill and decode engines of a build folder.

    Attributes:
        root: the build folder.
        engines: all of them.
        config: the resolved configuration.
    """

    root: Path
    engines: Sequence[Engine]
    config: BuildConfig

    def load(self, engine: Engine) -> Runner:
        """One engine as it is; of a target's graph, which stands for engines that cannot run here, a session on it."""
        if engine.target.endswith(GRAPH):
            session = session_from_onnx(self.root / engine.path, self.root / "graphs", [CPU], 1, {})
            return OrtRunner(session, engine.path, 1)
        return ENGINES[engine.target].load(self.root, engine, self.config)

    def prefills(self, kind: ModelKind, target: str, dtype: DType) -> list[Engine]:
        """All prefill engines of a model, of one target and dtype."""
        wanted = ("prefill", kind, target, dtype)
        return [one for one in self.engines if (one.role, one.model, one.target, one.dtype) == wanted]

    def pairs(self, role: str) -> list[dict[ModelKind, Engine]]:
        """Model and dense twin of every bucket, target and dtype that has both."""
        found: dict[object, dict[ModelKind, Engine]] = {}
        for one in self.engines:
            if one.role == role:
                found.setdefault((one.target, one.bucket, one.dtype), {})[one.model] = one
        return [pair for pair in found.values() if len(pair) > 1]

    @contextlib.contextmanager
    def prompts(self, kind: ModelKind, target: str, dtype: DType) -> Iterator[Prompts]:
        """All prefill engines of a model, of one target and dtype, as one reader of prompts."""
        with contextlib.ExitStack() as opened:
            engines = self.prefills(kind, target, dtype)
            yield Prompts({one.bucket.seq: opened.enter_context(self.load(one)) for one in engines})

    @contextlib.contextmanager
    def decoder(self, engine: Engine) -> Iterator[Decoder]:
        """A decode engine with its cache.

        Raises:
            TargetError: its target keeps no cache here.
        """
        with self.load(engine) as runner:
            if not isinstance(runner, BindableRunner):
                raise TargetError(f"{engine.path}: {engine.target} keeps no cache here")
            yield Decoder(runner, engine.bucket.seq, f"{engine.target} {engine.path}")
