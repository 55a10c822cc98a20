"""Every error that mod-export raises on purpose, with the exit code of the command line.

    ModExportError
    |-- UsageError              2   the request cannot be met as it stands
    |   |-- ConfigError             configuration: every problem at once
    |   |-- CheckpointError         the model file
    |   |-- BuildFolderError        the output folder: foreign, unwritable, locked, damaged
    |   |-- GrammarError            no text can be made to follow the grammar
    |   |-- TooLongError            a text is longer than the window of the model that would write it
    |   `-- TargetError             unknown target, or one that cannot work on this machine
    `-- BuildError              3   something cannot be built; the message names what was complete before it
        |-- CaptureError            torch.compile or torch.export refused the model
        |-- GraphError              an ONNX graph is not as required
        |-- LimitError              a target cannot take this graph, and no rewrite helps
        `-- EngineError             a vendor's builder or runtime failed

A gate that fails (parity, speed-up) is a result, not an error: exit code 4 comes from the verdict. A BuildError of one
target, dtype or bucket is a result as well if others were built; it ends a build only if nothing is left. Exit code 1
is left to bugs. Messages say what is wrong and where, what was found and expected, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "BuildError",
    "BuildFolderError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "GrammarError",
    "GraphError",
    "LimitError",
    "ModExportError",
    "TargetError",
    "TooLongError",
    "UsageError",
]


COULD_NOT_BUILD, GATE_FAILED = 3, 4
"""Exit codes besides 0. COULD_NOT_BUILD: nothing could be built or run. GATE_FAILED: a gate was missed, or a part of
the request could not be built.
"""


class ModExportError(Exception):
    """Base of all errors that end in a message instead of a traceback."""

    exit_code: ClassVar[int] = COULD_NOT_BUILD


class UsageError(ModExportError):
    """The request cannot be met as it stands."""

    exit_code = 2


class ConfigError(UsageError):
    """Unusable configuration. `problems` holds one line for each problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Pickles the list of problems, because pickle would otherwise recreate the error from its text."""
        return type(self), (self.problems,)


class CheckpointError(UsageError):
    """The model file is not a usable checkpoint."""


class BuildFolderError(UsageError):
    """The build folder is foreign, unwritable, in use by another build, or damaged."""


class GrammarError(UsageError):
    """No text can be made to follow the grammar: it is invalid, unsupported or too large, or a package is missing."""


class TooLongError(UsageError):
    """A text is longer than the window of the model that would write it."""


class TargetError(UsageError):
    """The target is unknown, or cannot do what was asked on this machine."""


class BuildError(ModExportError):
    """Something cannot be built."""

    exit_code = 3


class CaptureError(BuildError):
    """torch.compile or torch.export refused the model."""


class GraphError(BuildError):
    """An ONNX graph is not as required."""


class LimitError(BuildError):
    """A target cannot take this graph and no rewrite helps; the message names the layer, the limit and a way out."""


class EngineError(BuildError):
    """A vendor's builder or runtime failed."""


class UnverifiedWarning(UserWarning):
    """Engines are served that were never compared with their model."""


SHOWN = 80
"""Characters of a text from a file that a message shows."""


def shown(text: object) -> str:
    """Returns text from an untrusted file as one printable line of at most SHOWN characters."""
    plain = str(text).encode("ascii", "backslashreplace").decode()
    printable = "".join(character if character.isprintable() else repr(character)[1:-1] for character in plain)
    return printable if len(printable) <= SHOWN else printable[: SHOWN - 3] + "..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that a file has caused, in printable characters."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return shown(next(lines, type(error).__name__))
