"""What a person asks to build, and the models that it names: a checkpoint, programs, or a factory in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mod_export.environment import let_go
from mod_export.errors import CheckpointError, ConfigError
from mod_export.model.checkpoint import look_at_checkpoint, model_from_checkpoint
from mod_export.model.model import Model
from mod_export.types import Bucket

Way = Literal["checkpoint", "programs", "factory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to build.

    Attributes:
        sources: a checkpoint; or programs of `torch.export.save`, a .pt2 for each shape; or `my_model.py:make_model`.
        baseline: likewise of a dense model; empty for the model's own dense baseline, if it has one.
        samples: a safetensors file of inputs for programs.
        capacity: of every routed layer, in place of the checkpoint's own; a factory is called with it.
    """

    sources: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    samples: Path | None = None
    capacity: float | None = None

    @classmethod
    def checkpoint(cls, path: Path, baseline: Path | None = None, capacity: float | None = None) -> Request:
        """A checkpoint, and that of a dense baseline."""
        return cls(sources=(str(path),), baseline=() if baseline is None else (str(baseline),), capacity=capacity)

    def check(self) -> None:
        """Refuses what cannot be right before PyTorch is loaded.

        Raises:
            CheckpointError: a path that cannot be what it is named as, or several where one is expected.
        """
        for sources in filter(None, (self.sources, self.baseline)):
            way = way_of(sources)
            if way == "checkpoint":
                look_at_checkpoint(Path(sources[0]))
            for path in sources if way == "programs" else ():
                if not Path(path).is_file():
                    raise CheckpointError(f"{path}: no such file")
        if self.samples is not None and way_of(self.sources) != "programs":
            raise CheckpointError(f"--samples {self.samples}: only a .pt2 takes samples; {self.sources[0]} has its own")
        if self.samples is not None and not self.samples.is_file():
            raise CheckpointError(f"{self.samples}: no such file")

    def models(self, buckets: Sequence[Bucket] = (), like: Model | None = None) -> tuple[Model, Model | None]:
        """The model, and the dense model that it is compared with, if one was named or came along.

        Args:
            buckets: shapes that a factory's module is captured at.
            like: the model whose dense baseline this one is.

        Raises:
            CheckpointError: one of them cannot be read, or is not what it is named as.
            CaptureError: a factory's module cannot be captured.
            ConfigError: a capacity that the model cannot have, or a factory without shapes.
        """
        model, baseline = self._one(self.sources, buckets, like)
        if self.baseline:
            baseline, _ = self._one(self.baseline, buckets, model)
        return model, baseline

    def _one(self, sources: Sequence[str], buckets: Sequence[Bucket], like: Model | None) -> tuple[Model, Model | None]:
        # Capacity and samples are those of the model that is built; its baseline is `like` it.
        way, capacity = way_of(sources), self.capacity if like is None else None
        if way == "checkpoint":
            model = model_from_checkpoint(Path(sources[0]))
            model = model if capacity is None else model.with_capacity(capacity)
            let_go(model.loaded.weights.values())
            return model, None
        if way == "programs":
            from mod_export.model.pt2_models import model_from_pt2

            model = model_from_pt2([Path(path) for path in sources], self.samples if like is None else None, like)
            return (model if capacity is None else model.with_capacity(capacity)), None
        from mod_export.model.factory import model_from_factory

        if not buckets:
            raise ConfigError([f"{sources[0]}: at which shapes? Name them, such as --buckets 1x128,1x512"])
        return model_from_factory(sources[0], buckets, capacity)


def way_of(sources: Sequence[str]) -> Way:
    """What these name.

    Raises:
        CheckpointError: several that are not all programs.
    """
    if all(source.endswith(".pt2") for source in sources):
        return "programs"
    if len(sources) > 1:
        other = next(source for source in sources if not source.endswith(".pt2"))
        raise CheckpointError(f"{other}: only programs (.pt2), one for each shape, are built together")
    (source,) = sources
    return "factory" if ":" in source and not Path(source).exists() else "checkpoint"
