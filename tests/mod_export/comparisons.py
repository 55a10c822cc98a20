"""Results of validation on one input, written by hand with numbers small enough to follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mod_export.config import config_from_toml
from mod_export.judge.checks import Allowance, Comparison, TextNumbers, allowance
from mod_export.judge.compare import SiteRouting
from mod_export.rows.correctness import ErrorNumbers

GATE = config_from_toml(None).parity.float32.model_copy(
    update={
        "rounding_error": 16.0, "rounding_error_rms": 4.0, "max_abs": 1e-3, "near_tie": 1e-2, "judged_rows": 0.25,
        "next_token_agreement": 0.9, "max_kl": 1e-3, "max_perplexity_ratio": 1.01,
    }
)  # fmt: skip
SITE = SiteRouting(site=3, k=2, routed=4, agreed=4, distances=(), min_margin=0.5, scale=1.0)
TEXT = TextNumbers(tokens=9, nll=18.0, reference_nll=18.0, own_nll=18.0, positions=10, agreed=10)


def errors(value: float) -> ErrorNumbers:
    return ErrorNumbers(max_abs=value, mean_abs=value, max_rel=value, rms=value)


GOOD = Comparison(
    kind="text", output="logits", sites=(SITE,), error=errors(1e-5), tokens=10, values=10_000, shortfalls=np.zeros(10),
    divergences=np.full(10, 1e-9), text=TEXT,
)  # fmt: skip
"""Everything agrees, and no float64 run measured the rounding error."""


def with_error(value: float) -> Comparison:
    return replace(GOOD, error=errors(value))


def with_rounding(value: float, scores: float = 0.0) -> Comparison:
    """The reference differs by this much from its own float64 run, in logits and in scores."""
    return replace(GOOD, rounding=errors(value), sites=(replace(SITE, rounding=scores),))


def with_routing(*distances: float, malformed: str = "") -> Comparison:
    """Tokens of layer 5 are routed differently, at these distances from the k-th score."""
    return replace(GOOD, sites=(SITE, replace(SITE, site=5, distances=distances, malformed=malformed)))


def allowed_by(*found: Comparison) -> Allowance:
    """Largest differences that a float32 engine is allowed on these inputs."""
    return allowance(found or (GOOD,), GATE, "float32", routed=True)
