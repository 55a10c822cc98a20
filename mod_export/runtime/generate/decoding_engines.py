"""The prefill and decode engines of a build folder, opened one bucket at a time for validation and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mod_export.config import BuildConfig
from mod_export.engines.protocol import BindableRunner, Runner
from mod_export.errors import TargetError
from mod_export.runtime.generate.decoder import Decoder, Prompts
from mod_export.types import DType, Engine, ModelKind

__all__ = ["DecodingEngines"]


@dataclass(frozen=True, slots=True)
class DecodingEngines:
    """The prefill and decode engines of a build folder.

    Attributes:
        engines: all of them.
        load: opens one.
        config: the resolved configuration.
    """

    engines: Sequence[Engine]
    load: Callable[[Engine], Runner]
    config: BuildConfig

    def prefills(self, kind: ModelKind, target: str, dtype: DType) -> list[Engine]:
        """All prefill engines of a model, of one target and dtype."""
        wanted = ("prefill", kind, target, dtype)
        return [one for one in self.engines if (one.role, one.model, one.target, one.dtype) == wanted]

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
            TargetError: engines of its target cannot keep a cache on this machine.
        """
        with self.load(engine) as runner:
            if not isinstance(runner, BindableRunner):
                raise TargetError(f"{engine.path}: {engine.target} keeps no cache here")
            yield Decoder(runner, engine.bucket.seq, f"{engine.target} {engine.path}")
