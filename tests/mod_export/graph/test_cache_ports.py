"""The names of a cache are those of the models that write text."""

from __future__ import annotations

import pytest
from generating import WINDOW, generating_model

from mod_export.graph.cache_ports import LOGITS, SLOTS, cache_of_row, is_cache, layer_of_cache, present_of
from mod_models.cache import COUNTS, cache_layout
from mod_models.step import step_inputs, step_outputs


def test_names_are_those_of_a_step() -> None:
    spec = generating_model("predictor").spec
    layout = cache_layout(spec, 1, WINDOW)
    assert [name for name in step_inputs(spec, WINDOW) if is_cache(name)] == [
        one.name for one in layout if one.layer is not None
    ]
    rows = [name for name in step_outputs(spec) if is_cache(name)]
    assert [cache_of_row(name) for name in rows] == [one.name for one in layout if one.name != COUNTS]
    assert [layer_of_cache(one.name) for one in layout if one.name != COUNTS] == [0, 0, 1, 1, 2, 2]
    assert all(is_cache(present_of(one.name)) for one in layout if one.name != COUNTS)
    assert {LOGITS, SLOTS} <= set(step_outputs(spec))


@pytest.mark.parametrize("name", [None, "counts", "logits", "slots", "input_ids", "keys", "keys_a", "monkeys_1"])
def test_nothing_else_is_a_cache(name: str | None) -> None:
    assert not is_cache(name)
    assert cache_of_row(name) is None
    assert cache_of_row("keys_1") is None
