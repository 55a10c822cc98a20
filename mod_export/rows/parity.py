"""Parity with eager PyTorch: which tokens were selected, and the error given the same selection. See docs/numerics.md.

Distances of router scores are shares of the layer's scale, the largest root mean square of a row's scores.
"""

from __future__ import annotations

from mod_export.rows.base import EngineRow, Result
from mod_export.types import Site


class LayerAgreement(Result):
    """Which tokens one routing site selected, compared with the reference, over all inputs."""

    layer: Site
    """Number of the layer, or a name such as 3.mlp or 3.expert0 where a layer has several routing sites."""
    k: int
    """Slots for the tokens of one row."""
    routed: int
    """Selected tokens."""
    agreed: int
    """Selected tokens that the reference selected too."""
    overflow: int
    """Tokens that wanted a slot and found none, where tokens choose."""
    near_ties: int
    """Differences within `score_bound` of the edge of the selection: of the k-th score, or of 0 where tokens choose."""
    faults: int
    """Differences outside it. One fails the row."""
    min_margin: float | None
    """Smallest distance between the scores at rank k and k + 1; null where there is no rank k + 1."""
    score_bound: float
    """Largest distance at which a difference still counts as a near-tie."""
    worst_flip: float | None
    """Distance of the worst difference; null where there is none."""


class InputAgreement(Result):
    """Selected tokens over all routing sites on one batch of inputs."""

    input: str
    """Kind of input: text, random, padded, ..."""
    routed: int
    """Selected tokens."""
    agreed: int
    """Selected tokens that the reference selected too."""


class RoutingAgreement(Result):
    """Sums over the routing sites, each site, and each batch of inputs. A dense engine has no sites."""

    layers: tuple[LayerAgreement, ...]
    """One for each routing site."""
    routed: int
    """Selected tokens, over all sites and inputs."""
    agreed: int
    """Selected tokens that the reference selected too."""
    near_ties: int
    """Differences that rounding explains. One swap is two differences: the token selected and the token skipped."""
    min_margin: float | None
    """Smallest margin of all sites."""
    by_input: tuple[InputAgreement, ...]
    """The same for each batch of inputs."""


class ErrorNumbers(Result):
    """Differences of one output, of logits those of real tokens, given the same routing."""

    max_abs: float
    """Largest absolute difference of a value."""
    mean_abs: float
    """Mean absolute difference, of the worst input."""
    max_rel: float
    """Largest difference over the root mean square of the reference's values."""
    rms: float
    """Root mean square of the differences, of the worst input."""


class Gate(Result):
    """What the configuration demands for this dtype. The fields are named as in the configuration."""

    max_abs: float
    """Most for `error.max_abs` where the rounding error is not known."""
    near_tie: float
    """Bound of the distance of scores where the rounding error is not known."""
    judged_rows: float | None = None
    """Least share of the rows of outputs that were judged; null in reports that were written before."""
    next_token_agreement: float
    """Least `next_token_agreement`."""
    rounding_error: float
    """Most for `error.max_abs` as a multiple of `rounding_error`, scaled to the dtype; likewise for scores."""
    rounding_error_rms: float
    """Most for `error.rms` as a multiple of that of the reference's rounding error."""
    max_kl: float
    """Most for `kl`, in nats."""
    max_perplexity_ratio: float
    """Most for either perplexity over the other."""


class TextQuality(Result):
    """Perplexity on held-out text."""

    tokens: int
    """Predicted tokens."""
    perplexity: float
    """Of the engine."""
    reference_perplexity: float
    """Of PyTorch, given the engine's routing."""
    own_perplexity: float
    """Of PyTorch with its own routing."""
    next_token_agreement: float
    """Share of positions with the same most probable next token as PyTorch with its own routing."""


class Located(Result):
    """Where candidate and reference differ first, given the same routing. What an engine does not show is null."""

    layer: str
    """First module whose output differs, such as layers.3."""
    operator: str | None
    """Node of the graph there."""
    input: str
    """Kind of input that it was seen on."""
    error: float | None
    """Largest difference of that output."""
    allowed: float | None
    """What rounding can explain there: nothing where two exports are compared."""
    makes_nan: bool = False
    """Whether the first NaN is made there."""

    def __str__(self) -> str:
        at = f", {self.operator}" if self.operator else ""
        if self.makes_nan:
            return f"the first NaN is made in {self.layer}{at}"
        if self.error is None:
            return f"differs first in {self.layer}{at}"
        if self.allowed:
            by = f"differs by {self.error:.3g} from the model in float64, rounding explains {self.allowed:.3g}"
        else:
            by = f"differs by {self.error:.3g} from a fresh export, which should give the same bits"
        return f"differs first in {self.layer}{at}: {by}"


class OutputParity(Result):
    """Another output of a model that has several."""

    name: str
    """Its name."""
    error: ErrorNumbers
    """Its error, given the same routing."""
    rounding_error: float | None
    """Its largest rounding error in the reference; null where it was not measured."""
    allowed_max_abs: float
    """Largest `error.max_abs` that passes."""


class LeftOutRows(Result):
    """Rows of an output that were not judged."""

    output: str
    """Its name."""
    inputs: tuple[str, ...]
    """Kinds of input on which rows were left out."""
    rows: int
    """How many, over all inputs."""
    total: int
    """Of how many rows of this output, over all inputs."""
    because: str
    """Why: which input declares padding, or which operation decides by rounding."""

    def __str__(self) -> str:
        return f"{self.output}: {self.rows:,} of {self.total:,} rows, on {', '.join(self.inputs)}: {self.because}"


class ParityRow(EngineRow):
    """One engine, or one graph, against eager float32 PyTorch of the same model."""

    artifact: str | None
    """The file that was judged, relative to the build folder."""
    reference: str
    """What it was compared with."""
    inputs: tuple[str, ...]
    """Kinds of input; empty where nothing could be run."""
    tokens: int
    """Tokens whose outputs were compared, over all inputs: fewer of a larger model. Of an output that has none for each
    token, its rows."""
    rounding_tokens: int
    """Those on which the rounding error was measured."""
    routing: RoutingAgreement
    """Which tokens were selected."""
    error: ErrorNumbers
    """Error of the first output, given the same routing."""
    rounding_error: float | None
    """Largest difference of a value of it between the reference and the same model in float64, on the same inputs and
    routing: what rounding alone does to the reference. Null where it was not measured."""
    allowed_max_abs: float
    """Largest `error.max_abs` that passes."""
    next_token_agreement: float | None
    """Share of positions with the same most probable next token, of the worst input; null where the output is not
    logits."""
    kl: float | None
    """Mean divergence of the next-token distribution from the reference's in nats, of the worst input; likewise."""
    text: TextQuality | None
    """Quality on held-out text, where there is text for the model's vocabulary."""
    ties_exact: bool | None
    """Whether exactly equal scores were given to the earlier token; null where that could not be tested."""
    further_outputs: tuple[OutputParity, ...] = ()
    """The other outputs, each judged by its own rounding error."""
    left_out: tuple[LeftOutRows, ...] = ()
    """What was not judged, and why; empty where everything was."""
    located: Located | None
    """On failure: where candidate and reference differ first, as far as it could be found."""
    gate: Gate
    """What the configuration demands."""
    passed: bool
    """Whether every gate was met."""
    reasons: tuple[str, ...]
    """What missed its gate, each with number and gate, on the worst input, and how many more there are; empty exactly
    when the row passed."""
