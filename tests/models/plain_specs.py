"""Specs as JSON values, and their problems."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import make_spec

from mod_models.spec import ModelSpec, SpecError

WHOLE = "expected a whole number from {} to {}, got {}"


def plain(routing: Any = None, experts: Any = None, **changes: Any) -> dict[str, Any]:
    """A sound spec as JSON values, with changes of its routing, its experts, and its own fields."""
    data = json.loads(json.dumps(make_spec(predictor_hidden=2).to_dict()))
    data["routing"] |= routing or {}
    data["experts"] = None if experts is None else {"n_experts": 4, **experts}
    return {**data, **changes}


def problems(data: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_dict(data)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems
