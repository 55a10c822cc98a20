"""Whether files and engines are right: structure, parity with eager PyTorch, causality, and maps of selected tokens.

Parity says which tokens were selected, and the error given the same selection (docs/evidence.md). Distances of router
scores are shares of the layer's scale, which is the largest root mean square of a row's scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mod_export.rows.base import EngineRow, Result
from mod_export.types import QUANTIZED, DType, Site


class LayerAgreement(Result):
    """The tokens that one routing site selected, compared with the reference, over all inputs."""

    layer: Site
    """Number of the layer, or a name such as 3.mlp or 3.expert0 if a layer has several routing sites."""
    k: int
    """Number of slots for the tokens of one row."""
    routed: int
    """Number of selected tokens."""
    agreed: int
    """Number of selected tokens that the reference selected too."""
    overflow: int
    """Number of tokens that wanted a slot and found none, if each token decides for itself."""
    near_ties: int
    """Number of differences at most `score_bound` away from the edge of the selection: the k-th score, or 0 if each
    token decides for itself. If a captured model runs its tokens in order of score, two neighbours in the wrong order
    are a difference too, and its distance is that of their scores."""
    faults: int
    """Number of differences farther away. A single one fails the row."""
    min_margin: float | None
    """Smallest distance between the scores at rank k and k + 1, null if there is no rank k + 1; if each token decides
    for itself, the smallest distance of a score from 0."""
    score_bound: float
    """Largest distance at which a difference still counts as a near-tie."""
    worst_flip: float | None
    """Distance of the worst difference; null if there is no difference."""


class InputAgreement(Result):
    """The selected tokens of all routing sites on one batch of inputs."""

    input: str
    """Kind of input: text, random, padded, ..."""
    routed: int
    """Number of selected tokens."""
    agreed: int
    """Number of selected tokens that the reference selected too."""


class RoutingAgreement(Result):
    """The selected tokens of all routing sites: sums, each site, each batch of inputs. A dense engine has no sites."""

    layers: tuple[LayerAgreement, ...]
    """One entry for each routing site."""
    routed: int
    """Number of selected tokens, over all sites and inputs."""
    agreed: int
    """Number of selected tokens that the reference selected too."""
    near_ties: int
    """Number of differences that rounding explains. If two tokens change places, these are two differences: one token
    is selected and one is skipped."""
    min_margin: float | None
    """Smallest margin of all sites."""
    by_input: tuple[InputAgreement, ...]
    """Selected tokens of each batch of inputs."""


class ErrorNumbers(Result):
    """Errors of one output given the same routing. For logits, only real tokens count."""

    max_abs: float
    """Largest absolute error of a value."""
    mean_abs: float
    """Mean absolute error, on the worst input."""
    max_rel: float
    """Largest absolute error divided by the root mean square of the reference's values, on the worst input."""
    rms: float
    """Root mean square of the errors, on the worst input."""


class Gate(Result):
    """The gate of the configuration for this dtype. The fields are named as in the configuration."""

    max_abs: float
    """Largest `error.max_abs` that passes if the rounding error is not known."""
    near_tie: float
    """Largest distance from the edge of the selection at which a difference can be a near-tie, however large the
    rounding error."""
    judged_rows: float | None = None
    """Smallest share of the rows of an output that must be judged; null in reports written before this gate existed."""
    next_token_agreement: float
    """Smallest `next_token_agreement` that passes; except in float32, it may be missed by two standard deviations."""
    rounding_error: float
    """Largest `error.max_abs` that passes, as a multiple of `rounding_error` scaled to the dtype. The same multiple
    bounds the distances of scores that rounding can explain."""
    rounding_error_rms: float
    """Largest `error.rms` that passes, as a multiple of the root mean square of the reference's rounding errors, scaled
    to the dtype."""
    max_kl: float
    """Largest `kl` that passes, in nats; in int8 and int4 it may be exceeded by two standard deviations of the mean."""
    max_perplexity_ratio: float
    """Largest ratio that passes of `text.perplexity` and `text.reference_perplexity`, in int8 and int4
    `text.own_perplexity`, whichever of the two is larger."""


class TextQuality(Result):
    """Perplexity on real text: held-out text of the model, or Python's documentation if it has none."""

    tokens: int
    """Number of predicted tokens."""
    perplexity: float
    """Perplexity of the engine."""
    reference_perplexity: float
    """Perplexity of PyTorch, given the engine's routing."""
    own_perplexity: float
    """Perplexity of PyTorch with its own routing."""
    next_token_agreement: float
    """Share of positions at which the engine has the same most probable next token as PyTorch with its own routing."""

    def expected_perplexity(self, dtype: DType) -> float:
        """Returns the perplexity of PyTorch with which the gate compares that of an engine of this dtype."""
        return self.own_perplexity if dtype in QUANTIZED else self.reference_perplexity


class Located(Result):
    """The first place at which candidate and reference differ, given the same routing. A field is null if the engine
    does not show it.
    """

    layer: str
    """First module whose output differs, such as layers.3."""
    operator: str | None
    """Node of the graph there."""
    input: str
    """Kind of input on which the difference was seen."""
    error: float | None
    """Largest difference of that output."""
    allowed: float | None
    """Largest difference that rounding can explain there; 0 if two exports are compared."""
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
    """Parity of a further output, for a model with several."""

    name: str
    """Name of the output."""
    error: ErrorNumbers
    """Error of the output, given the same routing."""
    rounding_error: float | None
    """Largest rounding error of the output in the reference; null if it was not measured."""
    allowed_max_abs: float
    """Largest `error.max_abs` that passes."""


class LeftOutRows(Result):
    """Rows of an output that were not judged."""

    output: str
    """Name of the output."""
    inputs: tuple[str, ...]
    """Kinds of input on which rows were left out."""
    rows: int
    """Number of rows left out, over all inputs."""
    total: int
    """Number of all rows of this output, over all inputs."""
    because: str
    """Reason: the input that declares padding, the operation that decides by rounding, or the place where the model
    itself makes NaN."""

    def __str__(self) -> str:
        return f"{self.output}: {self.rows:,} of {self.total:,} rows, on {', '.join(self.inputs)}: {self.because}"


def worst_error(errors: Iterable[ErrorNumbers]) -> ErrorNumbers | None:
    """Returns the error with the largest difference, of which NaN is the largest; None if there is no error."""
    return max(errors, key=lambda error: (math.isnan(error.max_abs), error.max_abs), default=None)


class ParityRow(EngineRow):
    """One engine, or one graph, compared with eager float32 PyTorch of the same model."""

    artifact: str | None
    """File that was judged, relative to the build folder."""
    reference: str
    """Reference that it was compared with."""
    inputs: tuple[str, ...]
    """Kinds of input; empty if nothing could be run."""
    tokens: int
    """Number of tokens whose outputs were compared, over all inputs; fewer for a large model. For an output without a
    row for each token, this counts its rows."""
    rounding_tokens: int
    """Number of these tokens on which the rounding error was measured."""
    routing: RoutingAgreement
    """Selected tokens, compared with the reference."""
    error: ErrorNumbers
    """Error of the first output, given the same routing."""
    rounding_error: float | None
    """Largest rounding error of the first output: the reference against the same model in float64, on the same inputs
    and with the same routing. Null if it was not measured."""
    allowed_max_abs: float
    """Largest `error.max_abs` that passes."""
    next_token_agreement: float | None
    """Share of positions with the same most probable next token given the same routing, over all inputs; tokens whose
    logits differ by no more than rounding count as equally probable. In int8 and int4, the share on text with each
    model's own routing, if there is text. Null for outputs other than logits."""
    kl: float | None
    """Mean Kullback-Leibler divergence of the next-token distribution from that of the reference, in nats, on the worst
    input; in int8 and int4, on all text together if there is any. Null for outputs other than logits."""
    text: TextQuality | None
    """Quality on real text; null if the candidate was not judged on any."""
    ties_exact: bool | None
    """Whether the earlier of tokens with exactly equal scores was always selected; null if that could not be tested."""
    further_outputs: tuple[OutputParity, ...] = ()
    """The other outputs, each judged by its own rounding error."""
    left_out: tuple[LeftOutRows, ...] = ()
    """Rows that were not judged, with the reason; empty if all were judged."""
    located: Located | None
    """For a failed row, the first place at which candidate and reference differ; null if it was not found."""
    gate: Gate
    """The gate of the configuration."""
    passed: bool
    """Whether every gate was met."""
    reasons: tuple[str, ...]
    """Reasons why the row failed, each with number and gate on the worst input, and the number of further reasons.
    Empty exactly if the row passed."""
    judged: bool = True
    """`false`: it could not be loaded or run on the machine that was to judge it, so the row fails, and says nothing
    about other machines."""

    @property
    def errors(self) -> tuple[ErrorNumbers, ...]:
        """The errors of all outputs, in order."""
        return (self.error, *(output.error for output in self.further_outputs))


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
    """Whether the model, by its spec, never looks at later tokens. Then `causal` = false is a fault and fails the
    build."""

    @property
    def broken(self) -> bool:
        """Whether the engine does what the spec rules out."""
        return self.declared and not self.causal

    @property
    def breach(self) -> str:
        """What an engine did that is `broken`."""
        return (
            "the spec says that nothing looks ahead, and changing the end of a text changed logits from position "
            f"{self.earliest_change} on before the change"
        )


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
    """The tokens that each routing site of the reference selected in one row of real text, if the model has any."""

    bucket: str
    """Bucket of the row; the row fills it."""
    tokens: tuple[str, ...]
    """Readable text of each position. Without text: its token id, or for a captured model its position."""
    layers: tuple[MapLayer, ...]
    """One entry for each routing site."""
