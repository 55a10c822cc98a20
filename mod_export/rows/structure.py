"""Results that need no comparison of logits: files, causality, and the tokens that each routing site selected."""

from __future__ import annotations

from mod_export.rows.base import EngineRow, Result
from mod_export.types import Site


class StructureRow(Result):
    """One file, inspected without running it. Every weight must be the checkpoint's, and every shape must follow from
    the spec.
    """

    path: str
    """Path relative to the build folder."""
    checked: tuple[str, ...]
    """Properties that were compared with the checkpoint and the spec."""
    passed: bool
    """Whether all of them are right."""
    reasons: tuple[str, ...]
    """Properties that are wrong."""


class CausalityRow(EngineRow):
    """Test of an engine as a black box: the end of a text is changed, and the logits before the change are compared."""

    suffixes: int
    """Number of changed endings that were tried; 0 if the engine could not be tested."""
    causal: bool
    """`false`: an earlier logit changed, so the model must not be used for autoregressive sampling. `true`: no test
    showed this."""
    earliest_change: int | None
    """Smallest position before the changed ending at which logits changed by more than rounding explains; null if there
    is none."""
    largest_change: float
    """Largest change of a logit before the changed ending."""
    statement: str
    """The result in a sentence."""
    declared: bool = False
    """Whether the spec of the model looks at no later token. A `causal` of `false` is then a fault, and the build
    fails."""


class MapLayer(Result):
    """The tokens of one row that one routing site selected."""

    layer: Site
    """Number of the layer, or a name such as 3.mlp."""
    k: int
    """Number of slots for the tokens of one row."""
    routed: tuple[int, ...]
    """Positions of the selected tokens, ascending, in the reference."""
    scores: tuple[float | None, ...]
    """Router score of every position; null for positions that do not reach the site."""


class RoutingMap(Result):
    """The tokens of one row that each routing site selected in the reference: of real text if the model has any."""

    bucket: str
    """Bucket of the row; the row fills it."""
    tokens: tuple[str, ...]
    """Readable text of each position. Without text: its token id, or for a captured model its position."""
    layers: tuple[MapLayer, ...]
    """One entry for each routing site."""
