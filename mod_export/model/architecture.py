"""What a package registers in the entry-point group `mod_export.architectures`: how to read and restore its models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.model.model import Model

if TYPE_CHECKING:
    import torch

GROUP = "mod_export.architectures"
"""The entry-point group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Description of a model in another format.

    Attributes:
        family: name of the model's architecture in the other format.
        parameters: number of weights.
        companions: name -> content of the files beside the weights, such as a tokenizer.
        notes: facts about the model that the user should know, each one sentence.
    """

    family: str
    parameters: int
    companions: Mapping[str, Callable[[], bytes]]
    notes: tuple[str, ...] = ()


class Architecture(ABC):
    """One entry of the group.

    Attributes:
        name: its name, which checkpoints store.
    """

    name: str

    @property
    def package(self) -> str:
        """The Python package whose code computes the modules. Graphs are built again if the package changes."""
        return type(self).__module__.partition(".")[0]

    @abstractmethod
    def read(self, path: Path) -> Model:
        """Reads a checkpoint, or a model in another format that `convert` can convert.

        Raises:
            LookupError: the checkpoint names another architecture (the error's text is that name).
            ValueError: the checkpoint is unusable for any other reason; the message is for the user.
        """

    def outline(self, path: Path) -> Model | None:
        """Reads a JSON file that declares a model, without its weights; None if the file declares no model of this
        architecture.

        Raises:
            ValueError: the model is declared, and cannot be described; the message is for the user.
        """
        return None

    @abstractmethod
    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Model:
        """Returns the model with this `Model.spec` and these `Model.weights`."""

    def demo_checkpoint(self) -> Path | None:
        """Returns a small trained checkpoint that ships with the package, or None."""
        return None

    def text_checkpoint(self) -> Path | None:
        """Returns a small trained checkpoint with a tokenizer that ships with the package and writes text, or None."""
        return None

    def timed_checkpoint(self, seed: int, path: Path) -> bool:
        """Writes a checkpoint with initial weights, large enough to measure a speed-up. Returns whether it did."""
        return False

    def look(self, source: Path) -> Converted | None:
        """Describes a model in another format without reading its weights; None if this architecture converts nothing.

        Raises:
            ValueError: the model cannot be converted; the message is for the user.
        """
        return None

    def convert(
        self,
        source: Path,
        out: Path,
        max_positions: int | None,
        ignored: Collection[str],
        written: Callable[[int, int], None],
        implementation: str | None = None,
        capacity: float | None = None,
        base: Path | None = None,
    ) -> Converted | None:
        """Writes a model in another format as a checkpoint folder, completely or not at all.

        Args:
            source: the model.
            out: a folder that does not exist yet or is empty.
            max_positions: length of the longest row, if it shall be shorter than the model allows.
            ignored: fields of the model's configuration that change nothing.
            written: called with the number of bytes of weights written so far, and with their total.
            implementation: the implementation that stored the model, if its files do not say what its tensors mean.
            capacity: capacity of routed layers, if it differs from that of the model or the implementation.
            base: the model that `source` is an adapter of, if the files of the adapter do not say where that model is.

        Returns:
            The description of the model; None if this architecture converts nothing.

        Raises:
            ValueError: the model cannot be converted, or cannot be written there; the message is for the user.
        """
        return None
