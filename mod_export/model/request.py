"""A user's request to build, and the models that it names: a checkpoint, programs, or a factory in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mod_export.environment import let_go
from mod_export.errors import CheckpointError, ConfigError
from mod_export.model.checkpoint import companions_in, is_gguf, look_at_checkpoint, model_from_checkpoint
from mod_export.model.hub import PREFIX
from mod_export.model.model import Model
from mod_export.types import Bucket

if TYPE_CHECKING:
    from mod_export.model.tokenizer_files import TokenizerFiles

Way = Literal["checkpoint", "programs", "factory"]
ENDINGS = (".pt2", ".pt", ".py", ".gguf")
"""Endings of file names that are no part of a model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to build a model.

    Attributes:
        sources: a checkpoint; or programs of `torch.export.save`, a .pt2 for each shape; or `my_model.py:make_model`.
        baseline: sources of the dense baseline; if empty, the model's own dense baseline is used if it has one.
        samples: a safetensors file of inputs for programs.
        capacity: capacity of every routed layer, in place of the checkpoint's own; a factory is called with it.
    """

    sources: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    samples: Path | None = None
    capacity: float | None = None

    @classmethod
    def checkpoint(cls, path: Path, baseline: Path | None = None, capacity: float | None = None) -> Request:
        """Returns a request for a checkpoint, and for that of a dense baseline if given."""
        return cls(sources=(str(path),), baseline=() if baseline is None else (str(baseline),), capacity=capacity)

    def check(self) -> None:
        """Refuses, before PyTorch is loaded, sources that cannot be right.

        Raises:
            CheckpointError: a path cannot be the kind of source that its name says, several paths are given where one
                is expected, or samples are given for a model that has its own.
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

    def tokenizer(self, named: Path | None = None) -> tuple[TokenizerFiles | None, tuple[str, ...]]:
        """Returns the files of the model's tokenizer, None if there is none, and notes for the user.

        They come from `named` if given, or else from the GGUF file, from the model's folder, or from beside model.pt,
        where training leaves them. What the model itself says about the ends of texts also applies to `named`.

        Raises:
            UsageError: the files are not a tokenizer that can be read.
        """
        from mod_export.model.tokenizer_files import files_in, read_tokenizer, settings_in

        path = Path(self.sources[0])
        folder = path.parent if path.name == "model.pt" and path.is_file() else path
        files, notes = companions_in(path) if is_gguf(path) else (None, ())
        if named is not None:
            own = files.contents if files is not None else settings_in(folder) if folder.is_dir() else {}
            files, notes = read_tokenizer(named).of_model(own), ()
        elif folder.is_dir():
            files = files_in(folder)
        return files, (*notes, *(files.notes if files is not None else ()))

    def models(self, buckets: Sequence[Bucket] = (), like: Model | None = None) -> tuple[Model, Model | None]:
        """Returns the model and its dense baseline. The latter is None if neither request nor factory gives one.

        Args:
            buckets: shapes at which a factory's module is captured.
            like: the model that this model is the dense baseline of.

        Raises:
            CheckpointError: a source cannot be read, or is not what its name says.
            CaptureError: a factory's module cannot be captured.
            ConfigError: the model cannot have this capacity, or a factory has no shapes.
        """
        model, baseline = self._one(self.sources, buckets, like)
        if self.baseline:
            baseline, _ = self._one(self.baseline, buckets, model)
        return model, baseline

    def _one(self, sources: Sequence[str], buckets: Sequence[Bucket], like: Model | None) -> tuple[Model, Model | None]:
        # Capacity and samples do not apply to a baseline, for which `like` is the model that is built.
        way, capacity = way_of(sources), self.capacity if like is None else None
        if way == "checkpoint":
            model = model_from_checkpoint(Path(sources[0]))
            model = _at_capacity(model, capacity)
            let_go(model.weights.values())
            return model, None
        if way == "programs":
            from mod_export.model.pt2_models import model_from_pt2

            model = model_from_pt2([Path(path) for path in sources], self.samples if like is None else None, like)
            return _at_capacity(model, capacity), None
        from mod_export.model.factory import model_from_factory

        if not buckets:
            raise ConfigError([f"{sources[0]}: at which shapes? Name them, such as --buckets 1x128,1x512"])
        return model_from_factory(sources[0], buckets, capacity)


def _at_capacity(model: Model, capacity: float | None) -> Model:
    if capacity is None:
        return model
    try:
        changed = model.with_capacity(capacity)
    except ValueError as error:
        raise ConfigError([f"capacity {capacity:g}: {error}"]) from error
    changed.origin = model.origin
    return changed


def title_of(source: str | Path) -> str:
    """Returns the name of a model for its build folder: that of its file or folder without an ending, of the module of
    a factory, or of the repository or file on the hub.
    """
    text = str(source)
    if text.startswith(PREFIX):
        text = text.removeprefix(PREFIX).partition("@")[0]
    elif not Path(text).exists():
        text = text.rpartition(":")[0] or text
    name = Path(text).resolve().name
    return next((name.removesuffix(end) for end in ENDINGS if name.endswith(end)), name)


def way_of(sources: Sequence[str]) -> Way:
    """Returns the kind of the sources.

    Raises:
        CheckpointError: there are several sources and not all are programs.
    """
    if all(source.endswith(".pt2") for source in sources):
        return "programs"
    if len(sources) > 1:
        unexpected = next(source for source in sources if not source.endswith(".pt2"))
        raise CheckpointError(f"{unexpected}: only programs (.pt2), one for each shape, are built together")
    (source,) = sources
    return "factory" if ":" in source and not Path(source).exists() else "checkpoint"
