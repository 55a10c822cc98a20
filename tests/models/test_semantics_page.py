"""docs/models.md agrees with the code: its names exist, its published specs can be built."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from tiny_models import lively_checkpoint, make_spec
from variants import BIASES, NORMED_HEADS

from mod_models import declarations
from mod_models.spec import CAPACITY_RULES, ExpertsSpec, ModelSpec, RoutingSpec

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose first heading cell is `heading`, without its two heading lines."""
    lines = PAGE[PAGE.index(f"\n| {heading} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("`router`", declarations.ROUTERS),
        ("`router_input`", declarations.ROUTER_INPUTS),
        ("`router_stream`", declarations.ROUTER_STREAMS),
        ("`skipped_keys_values`", declarations.KEYS_VALUES),
        ("`skipped_result`", declarations.RESULTS),
        ("`adapter`, the layer", declarations.ADAPTERS),
        ("`adapter_gate`", declarations.ADAPTER_GATES),
        ("`gate`", declarations.GATES),
        ("`combine`", declarations.COMBINES),
        ("`capacity_rule`", tuple(CAPACITY_RULES)),
        ("`selection`", declarations.SELECTIONS),
        ("`candidates`", declarations.CANDIDATES),
        ("`parts`", declarations.PARTS),
        ("`choice`", declarations.CHOICES),
        ("`kind`", declarations.ROPE_SCALINGS),
    ],
)
def test_every_variant_is_described(heading: str, table: tuple[str, ...]) -> None:
    assert tuple(re.findall(r"`(\w+)`", row[0])[0] for row in rows(heading)) == table


@pytest.mark.parametrize("row", rows("`selection`"), ids=lambda row: row[0].split("`")[1])
def test_causality_is_what_the_spec_says(row: list[str]) -> None:
    selection = row[0].split("`")[1]
    built = make_spec(selection=selection, predictor_hidden=2 if selection == "predictor" else 0, capacity_rule="ceil")
    assert {"yes": (), "no": (f"routing.selection={selection}",)}[row[2]] == built.looks_ahead


def test_every_field_is_named_with_its_default() -> None:
    for kind in (RoutingSpec, ExpertsSpec):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in PAGE, field.name
            if type(field.default) in (int, float) and kind is ExpertsSpec:
                stated = (f"`{field.name}` (default {field.default})", f"`{field.name}` is {field.default} by default")
                assert any(text in PAGE for text in stated), field.name


@pytest.mark.parametrize("row", rows("implementation as a spec"), ids=lambda row: row[0].split()[0])
def test_published_specs_can_be_built(row: list[str]) -> None:
    call = ast.parse(f"dict({row[1].strip('`')})", mode="eval").body
    routing = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    built = ModelSpec.from_dict({**make_spec().to_dict(), "routing": routing})
    assert built.k_by_layer(512)


@pytest.mark.parametrize(
    "one",
    [
        make_spec(router="mlp", predictor_hidden=2, tie_embeddings=False),
        make_spec(parts="separate", predictor_hidden=2, experts=ExpertsSpec(layers=(0,), n_experts=3, noop_experts=2)),
        make_spec(**BIASES),
        make_spec(**NORMED_HEADS),
        make_spec(router="norm_mlp"),
    ],
    ids=["block", "separate, experts", "biases", "normed heads", "normed router"],
)
def test_names_and_shapes_of_the_weights(one: ModelSpec) -> None:
    """The table names every tensor of a model with its shape."""
    text = PAGE[PAGE.index("| tensor |") : PAGE.index("The **dense baseline**")]
    sizes = {**one.to_dict(), **(one.to_dict()["experts"] or {})}
    for name, tensor in lively_checkpoint(one).weights.items():
        module = re.sub(r"\.\d+\.", ".N.", name).removesuffix(".weight").removesuffix(".bias")
        # The second router and predictor of a layer have one entry, which refers to the first ones.
        module = re.sub(r"(mlp_(router|predictor))\..*", r"\1", module)
        parent, _, last = module.rpartition(".")
        # A line names its first tensor in full, and a second one with the same parent in short: `up_proj`.
        (line,) = (x for x in text.splitlines() if f"`{module}" in x or (f"`{parent}." in x and f"`{last}`" in x))
        if re.search(r"N\.(mlp_)?(router|predictor)", module) is None:
            (shape,) = re.findall(r"\| (\([^|]*\)) \|", line)
            of_weight = eval(shape, {}, sizes)
            assert tuple(tensor.shape) == (of_weight[:1] if name.endswith(".bias") else of_weight), name
