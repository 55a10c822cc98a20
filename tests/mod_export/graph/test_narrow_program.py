"""Programs with every kind of router compute products in 16 bits and routing in float32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from captures import bucket_example
from mod_manners import MANNERS
from rotary_angles import FORMS, turned
from small_graphs import make_model, make_spec
from torch import nn

import mod_export
from mod_export.errors import LimitError
from mod_export.graph.capture import captured, exported
from mod_export.graph.narrow_program import NARROW, PRODUCTS, narrowed
from mod_export.types import Bucket, DType
from mod_models.spec import ModelSpec

BUCKET = Bucket(2, 16)
aten = torch.ops.aten


def products(program: torch.export.ExportedProgram) -> dict[str, torch.dtype]:
    """Maps the name of the weight that a product reads, or of the product itself, to the dtype of its result."""
    weights = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    dtypes = {}
    for node in program.graph.nodes:
        if node.target in PRODUCTS:
            # Routers cast their weights to float32.
            operands = [source.args[0] if source.target is aten.to.dtype else source for source in node.all_input_nodes]
            read = [weights[source.name] for source in operands if source.name in weights]
            dtypes[read[0] if read else node.name] = node.meta["val"].dtype
    return dtypes


@functools.cache
def program_of(spec: ModelSpec) -> torch.export.ExportedProgram:
    module = make_model(spec)
    return exported(module, bucket_example(module, BUCKET, BUCKET.seq), "test")


@pytest.mark.parametrize(
    "routing",
    [
        {},
        {"predictor_hidden": 8, "selection": "predictor"},
        {"router": "norm_mlp", "router_hidden": 8, "gate": "sigmoid"},
        {"parts": "separate", "router_input": "normed"},
    ],
    ids=["linear", "predictor", "two layers", "parts"],
)
@pytest.mark.parametrize("dtype", NARROW)
def test_only_products_that_lead_to_no_selection_are_narrow(routing: dict[str, Any], dtype: DType) -> None:
    before = program_of(make_spec(**routing))
    program = narrowed(before, dtype)
    for name, kind in products(program).items():
        routes = "router" in name or "predictor" in name
        assert kind == (torch.float32 if routes else NARROW[dtype]), name
        if name in program.state_dict:
            assert program.state_dict[name].dtype == kind, name
    others = {name: tensor.dtype for name, tensor in program.state_dict.items() if "norm" in name}
    assert others
    assert set(others.values()) == {torch.float32}
    # The original program is unchanged.
    assert {tensor.dtype for tensor in before.state_dict.values()} == {torch.float32}
    assert set(products(before).values()) == {torch.float32}
    assert program.graph_signature.input_specs == before.graph_signature.input_specs


def test_it_computes_nearly_the_same_and_selects_the_same_tokens_by_the_same_scores() -> None:
    module = make_model(make_spec())
    ids, lengths = torch.randint(0, 40, (2, 16)), torch.tensor([16, 5])
    wide, narrow = (
        captured(module, bucket_example(module, BUCKET, 16), "test", dtype=dtype).program.module()(ids, lengths)
        for dtype in ("float32", "bfloat16")
    )
    assert [tensor.dtype for tensor in narrow] == [tensor.dtype for tensor in wide] == [torch.float32, torch.int64]
    assert torch.equal(wide[1], narrow[1])
    difference = (wide[0][0] - narrow[0][0]).abs().max()
    assert 0 < difference < 0.05 * wide[0].abs().max()


class Odd(nn.Module):
    """A weight that is read through views, one that a sum reads too, a router, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(3, 16, 16))
        self.shared = nn.Parameter(torch.randn(16, 16))
        self.table = nn.Embedding(40, 16)
        self.router = nn.Linear(16, 2)

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        x_BSD = self.table(ids_BS)
        # The score is one of the two numbers of a softmax over the result of one product.
        score_BS = self.router(x_BSD).softmax(-1)[..., 1]
        index_BK = torch.sort(score_BS, dim=-1, descending=True, stable=True).indices[:, :4].sort(-1).values
        index_BK, _ = mod_export.mark_selection(index_BK, score_BS)
        rows_BKD = x_BSD.gather(1, index_BK[..., None].expand(-1, -1, 16))
        rows_BKD = torch.matmul(rows_BKD, self.stacked[1].transpose(0, 1))
        rows_BKD = rows_BKD @ self.shared + self.shared.sum()
        return rows_BKD @ x_BSD.transpose(1, 2)


def test_weights_are_narrow_where_nothing_but_narrow_products_reads_them() -> None:
    module = Odd()
    program = narrowed(exported(module, bucket_example(module, BUCKET, 16), "odd"), "bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in program.state_dict.items()}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert narrow == {"stacked", "table.weight"}
    assert products(program)["router.weight"] == torch.float32
    assert [node.meta["val"].dtype for node in program.graph.nodes if node.target is aten.matmul.default] == [
        torch.bfloat16
    ] * 3
    ids, lengths = bucket_example(module, BUCKET, 16)
    ids = torch.randint(0, 40, ids.shape)
    (output,) = (captured(module, (ids, lengths), "odd", dtype="bfloat16").program.module()(ids, lengths)[0],)
    wanted = module(ids, lengths)
    assert (output - wanted).abs().max() < 0.05 * wanted.abs().max()


class Masked(nn.Module):
    """Attention with an additive mask; its first row hides all keys, with the lowest float32 as is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        x_B1SD = self.table(ids_BS)[:, None]
        mask_SS = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).tril(-1) == 0, torch.finfo(torch.float32).min)
        return nn.functional.scaled_dot_product_attention(x_B1SD, x_B1SD, x_B1SD, attn_mask=mask_SS)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_that_is_masked_whole_stays_finite(dtype: DType) -> None:
    module, (_, lengths) = Masked(), bucket_example(Masked(), BUCKET, 16)
    ids = torch.randint(0, 40, (2, 16))
    (output,) = captured(module, (ids, lengths), "masked", dtype=dtype).program.module()(ids, lengths)
    wanted = module(ids, lengths)
    assert output.isfinite().all()
    assert (output - wanted)[:, :, 1:].abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_angles_of_positions_are_exact(form: str, *, given: bool) -> None:
    """Not every position above 256 has an exact bfloat16, and its angle would be off by a radian."""
    module, inputs = turned(form, given=given)
    program = captured(module, inputs, "turned", dtype="bfloat16").program
    for node in program.graph.nodes:
        if node.target in PRODUCTS:
            assert node.meta["val"].dtype == (torch.bfloat16 if node.target is aten.linear.default else torch.float32)
    torch.testing.assert_close(program.module()(*inputs)[0], module(*inputs)[0])


def test_products_of_looked_up_rows_are_no_angles() -> None:
    """The table is a buffer here, so the rows come from ids and a buffer alone."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(40, 16))

        def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
            x_BSD = nn.functional.embedding(ids_BS, self.table)  # type: ignore[arg-type]  # The buffer is a tensor.
            return x_BSD @ x_BSD.transpose(1, 2)

    program = captured(Frozen(), (torch.zeros(2, 16, dtype=torch.int64),), "frozen", dtype="bfloat16").program
    assert set(products(program).values()) == {torch.bfloat16}


def test_a_weight_beyond_the_range_is_refused() -> None:
    module = make_model(make_spec())
    with torch.no_grad():
        module.layers[0].mlp.up_proj.weight[2, 3] = -7e4  # type: ignore[union-attr, index, operator]
    program = exported(module, bucket_example(module, BUCKET, 16), "test")
    message = r"^layers\.0\.mlp\.up_proj\.weight: contains -70000, beyond the largest float16 number 65504; build this"
    with pytest.raises(LimitError, match=message):
        narrowed(program, "float16")
    narrowed(program, "bfloat16")


@pytest.mark.parametrize(
    "name", [name if name == "recursions" else pytest.param(name, marks=pytest.mark.slow) for name in MANNERS]
)
def test_every_manner_of_routing(name: str) -> None:
    torch.manual_seed(0)
    manner = MANNERS[name]
    module, inputs = manner.make().eval(), manner.inputs(0)
    capture, original = captured(module, inputs, name, dtype="bfloat16"), captured(module, inputs, name)
    assert capture.sites == original.sites
    with torch.no_grad():
        narrow, wide = capture.program.module()(*inputs), original.program.module()(*inputs)
    assert [(tensor.dtype, tensor.shape) for tensor in narrow] == [(tensor.dtype, tensor.shape) for tensor in wide]
    assert torch.isfinite(narrow[0]).all()
    kinds = set(products(capture.program).values())
    assert kinds == {torch.float32, torch.bfloat16}
