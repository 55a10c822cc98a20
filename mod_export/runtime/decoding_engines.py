"""The prefill and decode engines of a build folder, and how they are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mod_export.config import BuildConfig
from mod_export.engines.protocol import BindableRunner, Runner
from mod_export.errors import TargetError
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.prompts import Prompts
from mod_export.types import DType, Engine, ModelKind, having


@dataclass(frozen=True, slots=True)
class DecodingEngines:
    """The prefill and decode engines of a build folder.

    Attributes:
        engines: the engines.
        load: opens an engine.
        config: the resolved configuration.
    """

    engines: Sequence[Engine]
    load: Callable[[Engine], Runner]
    config: BuildConfig

    def prefills(self, kind: ModelKind, target: str, dtype: DType) -> list[Engine]:
        """Returns the prefill engines of one model, target and dtype."""
        return having(self.engines, role="prefill", model=kind, target=target, dtype=dtype)

    @contextlib.contextmanager
    def prompts(self, kind: ModelKind, target: str, dtype: DType) -> Iterator[Prompts]:
        """Opens all prefill engines of one model, target and dtype, and allocates their cache.

        Raises:
            TargetError: engines of this target cannot be bound to a cache on this machine.
        """
        with self.prompts_of(self.prefills(kind, target, dtype)) as prompts:
            yield prompts

    @contextlib.contextmanager
    def prompts_of(self, engines: Sequence[Engine]) -> Iterator[Prompts]:
        """Like `prompts`, with only some of these engines."""
        first = engines[0]
        with contextlib.ExitStack() as opened:
            runners = {engine.bucket.seq: opened.enter_context(self._bindable(engine)) for engine in engines}
            yield Prompts(runners, self.longest(first.model, first.target, first.dtype), f"{first.target} {first.path}")

    def longest(self, kind: ModelKind, target: str, dtype: DType) -> int:
        """Returns how many tokens the texts of one model, target and dtype can have."""
        engines = having(self.engines, role="decode", model=kind, target=target, dtype=dtype)
        return max(engine.bucket.seq for engine in engines)

    @contextlib.contextmanager
    def decoder(self, engine: Engine) -> Iterator[Decoder]:
        """Opens a decode engine and allocates its cache.

        Raises:
            TargetError: engines of this target cannot be bound to a cache on this machine.
        """
        with self._bindable(engine) as runner:
            yield Decoder(runner, engine.bucket.seq, f"{engine.target} {engine.path}")

    @contextlib.contextmanager
    def _bindable(self, engine: Engine) -> Iterator[BindableRunner]:
        with self.load(engine) as runner:
            if not isinstance(runner, BindableRunner):
                raise TargetError(f"{engine.path}: {engine.target} keeps no cache here")
            yield runner
