"""The structure on which an exporter relies: one static graph for any input."""

import dataclasses
import math

import pytest
import torch
from observing import observed
from tiny_models import lively_checkpoint, make_spec
from variants import VARIANTS, experts

from mod_models.declarations import CHOICES, COMBINES, GATES, PARTS, POSITIONS, ROUTER_INPUTS, ROUTERS, SELECTIONS
from mod_models.layers import rope_tables
from mod_models.spec import CAPACITY_RULES, EveryNth, ModelSpec
from mod_models.transformer import Transformer

ONE_OF_EACH = {  # Every name of every table occurs at least once.
    "paper": make_spec(capacity=(0.25, 0.6), layers=EveryNth(every=2, offset=0)),
    "every token, replaced": make_spec(
        capacity_rule="ceil", capacity=1.0, router="linear_bias", gate="sigmoid", combine="replace", n_kv_heads=4
    ),
    "compact, apart, by predictors": make_spec(
        positions="compact", gate="scaled_sigmoid", combine="double_residual", parts="separate",
        selection="predictor", predictor_hidden=2,
    ),
    "attention by threshold": make_spec(
        router="mlp", router_input="normed", gate="softmax_selected", combine="replace_ungated", parts="attention",
        selection="threshold", experts=experts(layers=(0,)),
    ),
    "MLP gated, at random": make_spec(
        gate="tanh_affine", combine="ffn_gated", capacity_rule="floor_min1", tie_embeddings=False, parts="mlp",
        selection="random",
    ),
    "MLP gated, added": make_spec(combine="double_residual_ffn_gated", gate="sigmoid"),
    "absolute, none of some": make_spec(gate="ones", capacity_rule="absolute", capacity=(2, 5), router="noise"),
    "exits, experts choose": make_spec(
        selection="exit", capacity_rule="ceil", capacity=(0.75, 0.5), experts=experts(choice="expert", n_experts=2)
    ),
    "normed router, first tokens always": make_spec(
        router="norm_mlp", gate="sigmoid_affine", capacity_rule="strict_floor", capacity=0.5, always_first=1
    ),
    "no slot, two experts of a token or none": make_spec(capacity=1e-9, experts=experts(noop_experts=2, top_k=2)),
    "dense": make_spec(routing=None),
}  # fmt: skip
each_spec = pytest.mark.parametrize("spec", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())
each_kind = pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())


def test_one_of_each_is_complete() -> None:
    declared = [spec.routing for spec in ONE_OF_EACH.values() if spec.routing]
    tables = {
        "router": ROUTERS, "router_input": ROUTER_INPUTS, "gate": GATES, "combine": COMBINES, "selection": SELECTIONS,
        "capacity_rule": CAPACITY_RULES, "positions": POSITIONS, "parts": PARTS,
    }  # fmt: skip
    assert {name: {getattr(one, name) for one in declared} for name in tables} == {n: set(t) for n, t in tables.items()}
    assert {spec.experts.choice for spec in ONE_OF_EACH.values() if spec.experts} == set(CHOICES)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(16, (2, 8)), torch.tensor([8, 3])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.fast("attention by threshold", "exits, experts choose")
@each_spec
def test_exports_with_static_shapes(spec: ModelSpec) -> None:
    """Every tensor of the exported graph has a shape of plain integers; no operator's shape depends on data."""
    module = lively_checkpoint(spec).module()
    ids_BS, lengths_B = inputs()
    program = torch.export.export(module, (ids_BS, lengths_B))
    assert program.range_constraints == {}
    tags = set()
    for node in program.graph.nodes:
        if node.op == "call_function":
            tags |= set(getattr(node.target, "tags", ()))
            for value in torch.utils._pytree.tree_leaves(node.meta["val"]):
                assert all(type(size) is int for size in getattr(value, "shape", ())), node
    assert torch.Tag.data_dependent_output not in tags
    assert torch.Tag.dynamic_output_shape not in tags
    with torch.no_grad():
        for found, expected in zip(program.module()(ids_BS, lengths_B), module(ids_BS, lengths_B), strict=True):
            torch.testing.assert_close(found, expected)


def test_the_ranking_is_declared_stable() -> None:
    """CPU kernels always sort stably, but the exported graph must ask for it."""
    program = torch.export.export(lively_checkpoint(make_spec(layers=(0,))).module(), inputs())
    sorts = [node for node in program.graph.nodes if "sort" in str(node.target)]
    assert [str(node.target) for node in sorts] == ["aten.sort.stable", "aten.sort.default"]
    assert sorts[0].kwargs["stable"] is True
    assert sorts[0].kwargs["descending"] is True


@pytest.mark.fast("paper", "exits, experts choose")
@each_spec
def test_compiles_once_without_graph_breaks(spec: ModelSpec) -> None:
    """One graph serves every input of a shape: other ids, other lengths, rows without a real token."""
    module = lively_checkpoint(spec).module()
    graphs: list[torch.fx.GraphModule] = []

    def eager(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=eager, dynamic=False)
    with torch.no_grad():
        for lengths in ([8, 8], [1, 5], [0, 3]):
            ids_BS, lengths_B = torch.randint(16, (2, 8)), torch.tensor(lengths)
            for found, expected in zip(compiled(ids_BS, lengths_B), module(ids_BS, lengths_B), strict=True):
                assert torch.equal(found, expected)
    assert len(graphs) == 1
    assert torch._dynamo.utils.counters["graph_break"] == {}


@each_kind
def test_dense_baseline_and_skeleton(spec: ModelSpec) -> None:
    """The baseline keeps all weights except those of routing; a skeleton has everything but values."""
    checkpoint = lively_checkpoint(spec)
    baseline, skeleton, module = checkpoint.dense(), checkpoint.skeleton(), checkpoint.module()
    assert baseline.spec == dataclasses.replace(spec, routing=None)
    assert set(baseline.weights) == set(baseline.skeleton().state_dict())
    assert all(tensor is checkpoint.weights[name] for name, tensor in baseline.weights.items())
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in module.named_parameters()}
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in skeleton.parameters())
    assert not skeleton.training
    assert torch.equal(skeleton.rope_cos, module.rope_cos)


def test_initial_weights() -> None:
    """Normal(0, 0.02), with the two projections that write to the stream scaled down by depth, norms 1, biases 0."""
    spec = make_spec(d_model=64, d_ff=128, n_layers=8, layers=(0,), router="linear_bias", vocab_size=512)
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        else:
            expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.3 if parameter.numel() < 100 else 0.05), name


def test_rope_tables_are_exact_and_real_on_the_meta_device() -> None:
    """Angles are in float64 and rounded once; a float32 angle is off by 1e-4 at position 2000."""
    spec = make_spec(max_positions=2048, rope_theta=500.0)
    with torch.device("meta"):
        model = Transformer(spec)
    assert model.embedding.weight.is_meta
    cos_PE, sin_PE = rope_tables(spec)
    assert torch.equal(model.rope_cos, cos_PE)
    assert torch.equal(model.rope_sin, sin_PE)
    for position, pair in ((0, 0), (1, 1), (2047, 0), (2047, 1)):
        angle = position / 500.0 ** (2 * pair / spec.d_head)
        assert cos_PE[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin_PE[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


@each_kind
def test_outputs_are_parts_of_the_whole(spec: ModelSpec) -> None:
    checkpoint, (ids_BS, lengths_B) = lively_checkpoint(spec), inputs()
    with torch.no_grad():
        logits_BSV, routed = observed(checkpoint.module(), ids_BS, lengths_B)
        last_BV, routed_last = observed(checkpoint.module("last"), ids_BS, lengths_B)
        hidden_BSD, routed_none = observed(checkpoint.module("none"), ids_BS, lengths_B)
        from_hidden_BSV = checkpoint.module().logits(hidden_BSD)
    torch.testing.assert_close(last_BV, logits_BSV[[0, 1], lengths_B - 1])
    assert hidden_BSD.shape == (2, 8, spec.d_model)
    torch.testing.assert_close(from_hidden_BSV, logits_BSV)
    for found in (routed_last, routed_none):
        assert found.keys() == routed.keys()
        assert all(torch.equal(selection.index_BK, routed[site].index_BK) for site, selection in found.items())


@pytest.mark.fast(
    *(name for name in ONE_OF_EACH if name != "dense"), "routed apart by predictors", "normed heads", "early exit",
    "skipped are scaled", "skipped have a linear adapter", "keys and values kept, adapter", "stochastic",
)  # fmt: skip
@pytest.mark.parametrize("spec", [*VARIANTS.values(), *ONE_OF_EACH.values()], ids=[*VARIANTS, *ONE_OF_EACH])
def test_scores_are_float32_in_16_bits(spec: ModelSpec) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = lively_checkpoint(spec).module().to(dtype)
        with torch.no_grad():
            logits_BSV, decided = observed(model, *inputs())
        assert logits_BSV.dtype == dtype
        assert {routing.score_BS.dtype for routing in decided.values()} <= {torch.float32}
        if "noise" in dict(model.named_buffers()):
            assert len(model.noise.unique()) == len(model.noise)
