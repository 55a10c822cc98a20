"""Parity in parts: which tokens were routed, the error given the same routing, and what follows for the next token.

A routed model is not continuous. When two scores are closer than rounding, either token may be selected, and the logits
then differ by a lot while nothing is wrong; a wrong gate may change them by little while everything is. So the
reference is run with the candidate's routing, which makes the error comparable, and each layer's choice is judged by
the reference's own scores given the same choices in the layers below.

A candidate's first output is turned into logits, so that all kinds are judged by the same numbers: `logits` are those
of every token, `last` of each row's last real token alone, and `none` are hidden states after the final norm, which
the reference's own head makes logits of.

Shape legend: B batch, S sequence, V vocabulary, D model width, N the tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from mod_export.engines.protocol import Runner
from mod_export.runtime.generate.logits import negative_log_likelihood
from mod_export.sources.protocol import LoadedModel
from mod_export.types import PRIMARY, Outputs, Site, routed_output
from mod_export.validate.compare import (
    EMPTY,
    ErrorNumbers,
    LayerRouting,
    divergence,
    error_between,
    farthest_from,
    next_token_shortfalls,
    routing_of_layer,
)
from mod_export.validate.inputs import Batch, one_of_each_kind
from mod_export.validate.reference import Reference, Traced

__all__ = ["ROUNDING", "Comparison", "Rounding", "TextNumbers", "compare_runner"]

Rounding = Literal["some", "all", "shaken"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
"""On how many inputs the rounding error of the reference is measured: on one of each kind; on all; on all, in several
runs. Each allows at least what the one before it allows, so the next is needed only where a candidate fails.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNumbers:
    """-log p of the tokens of a text, in nats, summed: the candidate's, the reference's with the candidate's routing,
    and the reference's with its own; and at how many positions the candidate agrees with that one on the next token.
    """

    tokens: int
    nll: float
    reference_nll: float
    own_nll: float
    positions: int
    agreed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found on one batch.

    Attributes:
        kind: of the input.
        layers: of every routed layer.
        error: candidate against reference, given the same routing, over the logits of real tokens.
        noise: rounding error of the reference: its float32 runs against float64; None where it was not measured.
        shortfalls: float64 (N,), see `compare.next_token_shortfalls`.
        kl: mean divergence of the next-token distribution, in nats.
        text: only for real text.
        problems: outputs that should be there or should not.
    """

    kind: str
    layers: tuple[LayerRouting, ...]
    error: ErrorNumbers
    noise: ErrorNumbers | None = None
    shortfalls: np.ndarray = field(repr=False)
    kl: float
    text: TextNumbers | None = None
    problems: tuple[str, ...] = ()

    @property
    def agreement(self) -> float:
        """Share of tokens with the same most probable next token."""
        return float(np.mean(self.shortfalls <= 0))


def compare_runner(
    runner: Runner, reference: Reference, batches: Sequence[Batch], rounding: Rounding = "all"
) -> list[Comparison]:
    """Runs the candidate and the reference on every batch.

    Args:
        runner: the candidate.
        reference: of its model.
        batches: the inputs.
        rounding: how much is measured of what rounding does to the reference.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    # Padded rows have few logits: full ones say more about rounding.
    full = [batch for batch in batches if batch.kind != "padded"] or batches
    measured = one_of_each_kind(full) if rounding == "some" else batches
    return [_compare(runner, reference, batch, rounding if batch in measured else None) for batch in batches]


def _compare(runner: Runner, reference: Reference, batch: Batch, rounding: Rounding | None) -> Comparison:
    # A dense engine does not use the lengths, and some builders drop an input that is not read.
    outputs = runner.run({name: array for name, array in batch.feeds.items() if name in runner.inputs})
    free = reference.free(batch)
    problems = _problems(outputs, free, reference)
    candidate, unusable = _candidate_routing(outputs, free)
    # Positions outside the row cannot be forced; the routing check reports them.
    last = batch.ids_BS.shape[1] - 1
    routing = {site: index_BK.clip(EMPTY, last) for site, index_BK in candidate.items()}
    same = all(np.array_equal(index_BK, free.routed[layer]) for layer, index_BK in routing.items())
    given = free if same else reference.forced(batch, routing)
    chosen = free.routed if same else {**free.routed, **routing}
    exact = reference.exact(batch, chosen) if rounding else None
    runs = [given, *(reference.shaken(batch, chosen) if rounding == "shaken" else [])]
    judged = (
        routing_of_layer(site, index_BK, given.judged[site])
        if exact is None
        else routing_of_layer(
            site,
            index_BK,
            given.judged[site],
            exact.judged[site].score_BS,
            farthest_from(exact.judged[site].score_BS, [run.judged[site].score_BS for run in runs]),
        )
        for site, index_BK in candidate.items()
    )
    order = {site: index for index, site in enumerate(free.routed)}
    tokens_BS = _compared_tokens(reference.outputs, batch)
    expected_NV = given.logits_BSV[tokens_BS]
    logits_NV = _logits_of(outputs, reference.outputs, batch, expected_NV.shape[1], reference.loaded)
    return Comparison(
        kind=batch.kind,
        layers=tuple(sorted((*unusable, *judged), key=lambda layer: order[layer.layer])),
        error=error_between(logits_NV, expected_NV),
        noise=None
        if exact is None
        else _noise(exact.logits_BSV[tokens_BS], [run.logits_BSV[tokens_BS] for run in runs]),
        shortfalls=next_token_shortfalls(logits_NV, expected_NV),
        kl=divergence(logits_NV, expected_NV),
        text=_text(logits_NV, given.logits_BSV, free.logits_BSV, batch) if batch.kind == "text" else None,
        problems=problems,
    )


def _noise(exact_NV: np.ndarray, runs: Sequence[np.ndarray]) -> ErrorNumbers:
    return error_between(farthest_from(exact_NV, runs), exact_NV)


def _text(logits_NV: np.ndarray, expected_BSV: np.ndarray, own_BSV: np.ndarray, batch: Batch) -> TextNumbers | None:
    """None of a text whose tokens have no next one, and where only the last tokens were compared."""
    if batch.ids_BS.shape[1] < 2 or logits_NV.size != expected_BSV.size:
        return None
    nll, tokens = negative_log_likelihood(logits_NV.reshape(expected_BSV.shape), batch.ids_BS)
    own_NV = own_BSV.reshape(logits_NV.shape)
    return TextNumbers(
        tokens=tokens,
        nll=nll,
        reference_nll=negative_log_likelihood(expected_BSV, batch.ids_BS)[0],
        own_nll=negative_log_likelihood(own_BSV, batch.ids_BS)[0],
        positions=len(own_NV),
        agreed=int(np.sum(logits_NV.argmax(-1) == own_NV.argmax(-1))),
    )


def _problems(outputs: Mapping[str, np.ndarray], free: Traced, reference: Reference) -> tuple[str, ...]:
    """Logits of the wrong shape, and outputs that this model does not have."""
    problems = []
    name = PRIMARY[reference.outputs]
    primary, shape = outputs.get(name), _primary_shape(reference.outputs, free.logits_BSV.shape, reference.loaded)
    if primary is None or primary.shape != shape:
        found = f"no {name}" if primary is None else f"{name} of shape {list(primary.shape)}"
        problems.append(f"the engine gives {found}, expected {list(shape)}")
    expected = {name, *map(routed_output, free.routed)}
    extra = sorted(name for name in outputs if name not in expected)
    if extra:
        problems.append(f"the engine gives {', '.join(extra)}, which this model does not have")
    return tuple(problems)


def _candidate_routing(
    outputs: Mapping[str, np.ndarray], free: Traced
) -> tuple[dict[Site, np.ndarray], list[LayerRouting]]:
    """The candidate's positions by layer, and the layers whose positions cannot even be compared."""
    usable, unusable = {}, []
    for layer, expected_BK in free.routed.items():
        index = outputs.get(routed_output(layer))
        if index is not None and index.shape == expected_BK.shape:
            usable[layer] = index.astype(np.int64)
            continue
        B, k = expected_BK.shape
        found = "no routed positions" if index is None else f"routed positions of shape {list(index.shape)}"
        unusable.append(
            LayerRouting(
                layer=layer,
                k=k,
                routed=B * k,
                agreed=0,
                distances=(),
                min_margin=None,
                malformed=f"the engine gives {found}, expected [{B}, {k}]",
            )
        )
    return usable, unusable


def _compared_tokens(outputs: Outputs, batch: Batch) -> np.ndarray:
    """Bool (B, S): the tokens whose logits a candidate gives, padding left out."""
    position_S = np.arange(batch.ids_BS.shape[1])
    if outputs != "last":
        given_BS: np.ndarray = batch.real_BS & (position_S >= batch.judged_from)
        return given_BS
    last_BS: np.ndarray = position_S == batch.lengths_B[:, None] - 1
    return last_BS


def _primary_shape(outputs: Outputs, logits_shape: Sequence[int], loaded: LoadedModel) -> tuple[int, ...]:
    """The shape of a candidate's first output, where the logits of every token are `logits_shape` (B, S, V)."""
    B, S, V = logits_shape
    shapes: dict[Outputs, tuple[int, ...]] = {"logits": (B, S, V), "last": (B, V), "none": (B, S, loaded.d_model)}
    return shapes[outputs]


def _logits_of(
    found: Mapping[str, np.ndarray], outputs: Outputs, batch: Batch, vocab_size: int, loaded: LoadedModel
) -> np.ndarray:
    """The logits (N, V) of the tokens that `_compared_tokens` names; NaN where the candidate gives nothing usable."""
    B, S = batch.ids_BS.shape
    tokens_BS = _compared_tokens(outputs, batch)
    array = found.get(PRIMARY[outputs], np.empty(0))
    if array.shape != _primary_shape(outputs, (B, S, vocab_size), loaded):
        return np.full((int(tokens_BS.sum()), vocab_size), np.nan, np.float32)
    if outputs == "last":
        return array
    return array[tokens_BS] if outputs == "logits" else loaded.head(array[tokens_BS])
