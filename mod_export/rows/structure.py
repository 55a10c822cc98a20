"""What can be seen without comparing logits: files, causality, and which token was selected where."""

from __future__ import annotations

from mod_export.rows.base import EngineRow, Result
from mod_export.types import Site


class StructureRow(Result):
    """One file, inspected without running it: every weight is the checkpoint's, every shape is what the spec says."""

    path: str
    """Relative to the build folder."""
    checked: tuple[str, ...]
    """What was compared with the checkpoint and the spec."""
    passed: bool
    """Whether all of it is as it should be."""
    reasons: tuple[str, ...]
    """What is not."""


class CausalityRow(EngineRow):
    """Black box: the end of a text was changed, and the logits before the change were compared."""

    suffixes: int
    """Changed endings that were tried; 0 where the engine could not be probed."""
    causal: bool
    """`false`: an earlier logit moved, so the model must not be used for autoregressive sampling; `true`: not
    refuted."""
    earliest_change: int | None
    """Smallest position before the changed ending whose logits moved by more than rounding explains; null: none did."""
    largest_change: float
    """Largest change of a logit before the changed ending."""
    statement: str
    """The same in a sentence."""
    declared: bool = False
    """`true`: nothing in the spec looks ahead. A `causal` of `false` is then a fault, and the build fails."""


class MapLayer(Result):
    """What one routing site selected of one text."""

    layer: Site
    """Number of the layer, or a name such as 3.mlp."""
    k: int
    """Slots for the tokens of one row."""
    routed: tuple[int, ...]
    """Positions of the selected tokens, ascending, in the reference."""
    scores: tuple[float | None, ...]
    """The router's score of every position; null where it was not scored."""


class RoutingMap(Result):
    """Which token of one held-out text was selected by which routing site, in the reference."""

    bucket: str
    """Its length is that of the text."""
    tokens: tuple[str, ...]
    """What a person can read of each position; a token that is no text is shown as its number."""
    layers: tuple[MapLayer, ...]
    """One for each routing site."""
