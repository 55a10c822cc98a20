"""Reads the rotary angles of a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mod_models.convert.config_json import Config
from mod_models.spec import RopeScaling, shown

DEFAULT_THETA = 10_000.0
READ = ("rope_type", "type", "rope_theta")
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kind -> its parameters."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"partial_rotary_factor": (1, 1.0), "attention_factor": (1, 1.0)}
"""Other field of the table -> the values with which it changes nothing."""


def rope_of(config: Config) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling), and records in `config.problems` why a spec cannot describe them."""
    tables = {name: config.get(name) for name in ("rope_scaling", "rope_parameters")}
    # If both are given, transformers takes the older one.
    name = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    table, theta = tables[name] or {}, config.get("rope_theta")
    if not isinstance(table, Mapping):
        config.problem(name, f"expected a table, got {shown(table)}")
        return DEFAULT_THETA, None
    theta = table.get("rope_theta", DEFAULT_THETA if theta is None else theta)
    kind = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        config.problem(f"{name}.rope_type", f"a spec cannot say {shown(kind)}; known: {', '.join(KINDS)}")
        return DEFAULT_THETA, None
    _check_others(config, name, table, kind)
    parameters = {parameter: config.positive(f"{name}.{parameter}", table.get(parameter)) for parameter in KINDS[kind]}
    theta = config.positive(f"{name}.rope_theta" if "rope_theta" in table else "rope_theta", theta)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=parameters["factor"])
    return theta, RopeScaling(
        kind=kind,
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_positions=_original_positions(config, name, table),
    )


def _original_positions(config: Config, name: str, table: Mapping[str, Any]) -> int:
    """Positions before scaling; if they are left out, transformers takes `max_position_embeddings`."""
    value = table.get("original_max_position_embeddings")
    value = config.get("max_position_embeddings") if value is None else value
    if type(value) is int and value > 0:
        return value
    config.problem(f"{name}.original_max_position_embeddings", f"expected a whole number above 0, got {shown(value)}")
    return 1


def _check_others(config: Config, name: str, table: Mapping[str, Any], kind: str) -> None:
    # The length before scaling is often given although nothing depends on it.
    known = {*READ, *KINDS[kind], "original_max_position_embeddings"}
    for field, value in table.items():
        if field in known or value is None or value in NEUTRAL.get(field, ()):
            continue
        config.problem(
            f"{name}.{shown(field)}".replace("'", ""), f"a spec cannot say {shown(value)} with {kind} angles"
        )
