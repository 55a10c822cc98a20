"""Experts and noise routing in slow loops, for one token at a time. Written from docs/models.md and, like
`loop_reference`, without code of `mod_models`.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np

Weights = Mapping[str, np.ndarray]
Activation = Callable[[float], float]


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu": lambda value: value * (1 + math.erf(value / math.sqrt(2))) / 2,
    "gelu_tanh": lambda value: value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2,
}


@dataclass
class Mixture:
    """Results of experts for the tokens they were given, which are counted from 0.

    Attributes:
        deltas: what they add to each token.
        chosen: for each real expert, the tokens that ran there.
        scores: for each real expert, its score of each token, as reports state it.
        margin: distance between the scores of the closest choice.
        overflow: number of choices for which the expert was full.
    """

    deltas: list[np.ndarray]
    chosen: list[list[int]]
    scores: list[list[float]] = field(default_factory=list)
    margin: float = math.inf
    overflow: int = 0


def mixture(
    experts: dict, w: Weights, normed: list[np.ndarray], tokens: int, act: Activation, fixed: int | None = None
) -> Mixture:
    """Runs experts on the tokens of one row. `tokens` is the number that the graph gives the experts, of which `normed`
    are real; `fixed` is the number of slots per expert, if declared.
    """
    share = experts["capacity_factor"] * experts["top_k"] * tokens / experts["n_experts"]
    capacity = min(tokens, max(1, math.ceil(share)) if fixed is None else fixed)
    rows = w["experts.router.projection.weight"]
    logits = [[float(row @ x) for row in rows] for x in normed]
    choose = {"token": _token_choice, "expert": _expert_choice}[experts["choice"]]
    return choose(experts, w, normed, logits, capacity, act)


def _token_choice(
    experts: dict, w: Weights, normed: list[np.ndarray], logits: list[list[float]], capacity: int, act: Activation
) -> Mixture:
    n, top_k = experts["n_experts"], experts["top_k"]
    found = Mixture([], [[] for _ in range(n)], [[] for _ in range(n)])
    for t, x in enumerate(normed):
        # The most probable comes first; among equals, the lower number.
        ranked = sorted(range(len(logits[t])), key=lambda e: (-logits[t][e], e))
        picked = ranked[:top_k]
        last, next_ = logits[t][ranked[top_k - 1]], logits[t][ranked[top_k]]
        found.margin = min(found.margin, last - next_)
        probability = _softmax(logits[t])
        total = sum(probability[e] for e in picked) if top_k > 1 else 1.0
        delta = np.zeros_like(x)
        for e in picked:
            # Experts beyond the real ones do nothing; a full expert accepts no more tokens.
            if e < n and len(found.chosen[e]) < capacity:
                found.chosen[e].append(t)
                delta = delta + probability[e] / total * _expert(w, e, x, act)
            elif e < n:
                found.overflow += 1
        found.deltas.append(delta)
        for e in range(n):
            found.scores[e].append(logits[t][e] - (next_ if e in picked else last))
    return found


def _expert_choice(
    experts: dict, w: Weights, normed: list[np.ndarray], logits: list[list[float]], capacity: int, act: Activation
) -> Mixture:
    found = Mixture([np.zeros_like(x) for x in normed], [])
    shares = [_softmax(row) for row in logits]
    for e in range(experts["n_experts"]):
        ranked = sorted(range(len(normed)), key=lambda t: (-shares[t][e], t))
        if capacity < len(normed):
            found.margin = min(found.margin, shares[ranked[capacity - 1]][e] - shares[ranked[capacity]][e])
        found.chosen.append(sorted(ranked[:capacity]))
        found.scores.append([share[e] for share in shares])
        for t in found.chosen[e]:
            found.deltas[t] = found.deltas[t] + shares[t][e] * _expert(w, e, normed[t], act)
    return found


def _expert(w: Weights, e: int, x: np.ndarray, act: Activation) -> np.ndarray:
    """Gated MLP with weights transposed in comparison with those of an MLP."""
    gate, up = x @ w["experts.gate_proj"][e], x @ w["experts.up_proj"][e]
    return np.array([act(g) * u for g, u in zip(gate, up, strict=True)]) @ w["experts.down_proj"][e]


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    parts = [math.exp(logit - top) for logit in logits]
    return [part / sum(parts) for part in parts]


@cache
def _noise_order(seed: int) -> list[int]:
    digests = {i: hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(65536)}
    return sorted(digests, key=digests.__getitem__)


def noise(seed: int, site: str, ids: list[int]) -> list[float]:
    """Gaussian noise of each token, in float64: a quantile that depends on the running sum of the ids."""
    number = 0
    for byte in site.encode():
        number = number * 256 + byte
    offset = 7919 * (1 + number % 7919)
    found, total = [], 0
    for token in ids:
        total += token + 1
        found.append(NormalDist().inv_cdf((_noise_order(seed)[(total + offset) % 65536] + 0.5) / 65536))
    return found
