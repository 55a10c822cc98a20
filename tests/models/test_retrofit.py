"""Routing added to a dense model: exactly that model at capacity 1, and its training from there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import distinct_ids, lively_checkpoint, make_spec
from training_runs import lines, rows, state

from mod_models.checkpoint import ROUTES, Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.generation_spec import why_not
from mod_models.spec import ExpertsSpec, ModelSpec, SpecError
from mod_models.train import TrainConfig, TrainError
from mod_models.train.retrofit import (
    LEAST_HIDDEN,
    UNSEEN,
    kept_neurons,
    layers_of,
    retrofitted,
    routed_spec,
    with_predictors,
)
from mod_models.train.run import spec_at, train

DENSE = make_spec(routing=None, vocab_size=256, d_model=16, n_layers=4, max_positions=32)
PARTS = ("block", "attention", "mlp", "separate")
CONFIG = TrainConfig(
    steps=8, batch=2, seq=16, warmup=2, eval_every=4, eval_batches=1, log_every=1, learning_rate=1e-3, anneal=0.5
)


def routed(
    dense: Checkpoint, capacity: float = 1.0, parts: str = "block", selection: str = "predictor", seed: int = 0
) -> Checkpoint:
    return retrofitted(dense, routed_spec(dense.spec, (1, 3), capacity, parts, selection), seed)


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    return lively_checkpoint(DENSE)


# Equality with the dense model.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("selection", ["predictor", "threshold"])
@pytest.mark.parametrize("parts", PARTS)
def test_at_capacity_1_it_is_the_dense_model_bit_for_bit(
    dense: Checkpoint, parts: str, selection: str, training: bool
) -> None:
    model = routed(dense, parts=parts, selection=selection).module().train(training)
    ids_BS, lengths_B = distinct_ids(DENSE, 3, 32), torch.tensor([32, 17, 1])
    (expected_BSV,), (found_BSV,) = dense.module()(ids_BS, lengths_B), model(ids_BS, lengths_B)
    for row, length in enumerate(lengths_B.tolist()):
        assert torch.equal(found_BSV[row, :length], expected_BSV[row, :length])


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_gates_are_1_whatever_the_weights(size: float) -> None:
    """The stream and the weights of its norm can be large; a router of the usual size would show here."""
    weights = dict(lively_checkpoint(DENSE).weights)
    for name in list(weights):
        if name.endswith("norm.weight") and name != "norm.weight":
            weights[name] = weights[name] * size
        elif name == "embedding.weight":
            weights[name] = weights[name] / size
    big = Checkpoint(spec=DENSE, weights=weights)
    ids_BS, lengths_B = distinct_ids(DENSE, 2, 32), torch.tensor([32, 32])
    (expected_BSV,), (found_BSV,) = big.module()(ids_BS, lengths_B), routed(big).module()(ids_BS, lengths_B)
    assert torch.equal(found_BSV, expected_BSV)


def test_no_two_tokens_tie_at_the_start(dense: Checkpoint) -> None:
    """Below capacity 1, top-k with zero routers would take the first tokens of every row."""
    model = routed(dense, 0.5).module().train()
    block = model.layers[1]
    x_BSD = torch.randn(4, 200, 16, generator=torch.Generator().manual_seed(5))
    l_BS = block.router(block.attention_norm(x_BSD))
    assert float(l_BS.abs().max()) < UNSEEN
    assert all(len(set(row)) == 200 for row in l_BS.tolist())
    first_half = (torch.topk(l_BS, 100).indices < 100).float().mean()
    assert 0.3 < float(first_half) < 0.7


def test_new_weights_depend_on_the_seed_and_old_ones_are_shared(dense: Checkpoint) -> None:
    first, again, other_seed = routed(dense), routed(dense), routed(dense, seed=1)
    new = {name for name in first.weights if ROUTES.match(name)}
    assert new == first.weights.keys() - dense.weights.keys() != set()
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, again.weights[name])
        assert tensor is dense.weights[name] if name not in new else True
    changed = {name for name in new if not torch.equal(first.weights[name], other_seed.weights[name])}
    assert {name for name in new if name.endswith(("router.projection.weight", "hidden.weight"))} == changed


@pytest.mark.parametrize("selection", ["predictor", "threshold"])
def test_the_result_can_write_text(dense: Checkpoint, selection: str) -> None:
    for parts in PARTS:
        spec = routed(dense, 0.5, parts, selection).spec
        assert why_not(spec) is None
        assert spec.looks_ahead == ()
        assert spec.dense() == DENSE


# Names of layers.


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("deepest:3", (7, 8, 9)), ("every:2", (1, 3, 5, 7, 9)), ("every:3", (2, 5, 8)), ("3", (3,)),
        ("5,3,3", (3, 5)), ("0-2, 8-9", (0, 1, 2, 8, 9)), ("deepest:10", tuple(range(10))),
    ],
)  # fmt: skip
def test_layers(text: str, layers: tuple[int, ...]) -> None:
    assert layers_of(text, 10, "block") == layers


def test_layers_of_a_probe(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    costs = {"mlp": [3.0, 1.0, 2.0, -1.0], "block": [0.0, 1.0, 2.0, 3.0]}
    listed = [{"layer": i, "part": part, "cost": cost} for part, many in costs.items() for i, cost in enumerate(many)]
    path.write_text(json.dumps({"rows": listed}))
    assert layers_of(f"{path}:2", 4, "mlp") == (1, 3)
    assert layers_of(f"{path}:2", 4, "block") == (0, 1)


@pytest.mark.parametrize(
    ("text", "parts", "said"),
    [
        ("deepest:11", "block", r"^--route deepest:11: expected a number from 1 to 10 after the colon, got '11'$"),
        ("every:0", "block", r"^--route every:0: expected a number from 1 to 10 after the colon, got '0'$"),
        ("x", "block", r"^--route x: expected deepest:N, every:N, numbers and ranges such as 3,5,8-11, or FILE:N for"),
        ("", "block", r"^--route : expected deepest:N"),
        ("4-10", "block", r"^--route 4-10: expected layers from 0 to 9$"),
        ("9-4", "block", r"^--route 9-4: expected layers from 0 to 9$"),
        ("nowhere:3", "block", r"^--route nowhere: not what python -m mod_models.probe --out writes \(\[Errno 2\]"),
        ("probe.json:3", "block", r"^--route probe.json: has no cost of --parts block for each of the 10 layers$"),
        ("probe.json:3", "separate", r"^--route probe.json: a probe ranks one part at a time; name the layers, or"),
        ("list.json:3", "block", r"^--route list.json: not what python -m mod_models.probe --out writes \(list ind"),
    ],
)
def test_layers_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, parts: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("probe.json").write_text('{"rows": [{"layer": 0, "part": "block", "cost": 1}]}')
    Path("list.json").write_text("[]")
    with pytest.raises(TrainError, match=said):
        layers_of(text, 10, parts)


def test_models_that_cannot_be_retrofitted() -> None:
    with pytest.raises(TrainError, match=r"^--route: expected a dense model, and the one of --init routes already; le"):
        routed_spec(make_spec(), (1,), 0.5, "block", "predictor")
    with pytest.raises(TrainError, match=r"^--route: expected a dense model, and the one of --init has experts; leav"):
        routed_spec(make_spec(routing=None, experts=ExpertsSpec()), (1,), 0.5, "block", "predictor")
    with pytest.raises(TrainError, match=r"^--selection, --parts: expected one of \('threshold', 'predictor'\) and"):
        routed_spec(DENSE, (1,), 0.5, "block", "topk")
    with pytest.raises(SpecError, match=r"spec.routing.capacity: expected a share in \(0, 1\], got 1.5"):
        routed_spec(DENSE, (1,), 1.5, "block", "predictor")
    with pytest.raises(TrainError, match=r"^--skipped-keys kept: with --parts mlp every token runs attention, and all"):
        routed_spec(DENSE, (1,), 0.5, "mlp", "predictor", skipped_keys="kept")
    for parts in ("attention", "separate"):
        with pytest.raises(TrainError, match=rf"^--adapter linear: .* expected --parts block or mlp, got {parts}$"):
            routed_spec(DENSE, (1,), 0.5, parts, "predictor", adapter="linear")
    with pytest.raises(
        TrainError, match=r"^--skipped-keys, --adapter, --routers: expected one of \('absent', 'kept'\), \('none'"
    ):
        routed_spec(DENSE, (1,), 0.5, "block", "predictor", adapter="bottleneck")
    biased = dataclasses.replace(DENSE, mlp_bias=True)
    with pytest.raises(TrainError, match=r"^--adapter gated: has no biases, but the MLPs of --init have some; use"):
        routed_spec(biased, (1,), 0.5, "mlp", "predictor", adapter="gated")
    wide = dataclasses.replace(DENSE, d_ff=1536)
    for share, kept in ((0.0, 16), (0.999, "1,536")):
        with pytest.raises(
            TrainError,
            match=rf"^--adapter-share: expected a share of the MLP's 1,536 neurons, .* got {share:g}, which is {kept} ",
        ):
            routed_spec(wide, (1,), 0.5, "mlp", "predictor", adapter="gated", adapter_share=share)


@pytest.mark.parametrize(("share", "width"), [(0.8, 1232), (1.0, 1536), (2.0, 1536), (0.0, 16), (0.011, 16)])
def test_kept_neurons_fill_tiles(share: float, width: int) -> None:
    assert kept_neurons(1536, share) == width


# Training.


def test_capacity_falls_to_the_specs(dense: Checkpoint) -> None:
    spec, config = routed(dense, 0.25).spec, TrainConfig(steps=100, anneal=0.5)
    capacities = [spec_at(step, spec, config).capacity for step in (0, 25, 50, 99)]
    assert capacities == [1.0, pytest.approx(0.625), 0.25, 0.25]
    assert spec_at(0, spec, TrainConfig(steps=100)) is spec
    schedule = dataclasses.replace(spec, routing=dataclasses.replace(spec.routing, capacity=(0.5, 0.1)))
    assert spec_at(25, schedule, config).routing.capacity == (pytest.approx(0.75), pytest.approx(0.55))


def test_calibrated_predictors_have_no_hidden_units_that_nothing_uses() -> None:
    """More of them would be read and multiplied in every step of text, for nothing."""
    widths = [
        routed_spec(DENSE, (1, 3), 0.5, "mlp", selection, calibrated=calibrated).routing.predictor_hidden
        for selection in ("predictor", "threshold")
        for calibrated in (False, True)
    ]
    assert widths == [DENSE.d_model // 4, LEAST_HIDDEN, 0, 0]
    ranked = random_checkpoint(make_spec(vocab_size=256, d_model=32), 0)
    for calibrated, width in ((False, 8), (True, LEAST_HIDDEN)):
        predicting = with_predictors(ranked, 0, calibrated=calibrated)
        assert predicting.spec.routing.predictor_hidden == width
        assert predicting.weights["layers.0.predictor.hidden.weight"].shape == (width, 32)


def test_what_skipped_tokens_leave_is_declared(dense: Checkpoint) -> None:
    plain = routed_spec(DENSE, (1, 3), 0.5, "block", "predictor").routing
    assert (plain.skipped_keys_values, plain.skipped_result) == ("absent", "identity")
    spec = routed_spec(DENSE, (1, 3), 1.0, "block", "predictor", skipped_keys="kept", adapter="linear")
    declared = {"skipped_keys_values": "kept", "skipped_result": "adapter", "adapter": "linear", "capacity": 1.0}
    assert spec.routing == dataclasses.replace(plain, **declared)
    begin = retrofitted(dense, spec, 0)
    assert begin.dense().weights.keys() == dense.weights.keys()
    assert why_not(spec) is None
    ids_BS, lengths_B = distinct_ids(DENSE, 2, 32), torch.tensor([32, 20])
    (expected_BSV,), (found_BSV,) = dense.module()(ids_BS, lengths_B), begin.module()(ids_BS, lengths_B)
    assert torch.equal(found_BSV[0], expected_BSV[0])
    torch.testing.assert_close(found_BSV[1, :20], expected_BSV[1, :20])


def test_a_teacher_of_another_depth(dense: Checkpoint, tmp_path: Path) -> None:
    """A dense model can learn from another dense model; a resumed run needs the same one."""
    short = lively_checkpoint(dataclasses.replace(DENSE, n_layers=2), 7)
    config = dataclasses.replace(CONFIG, anneal=0.0, distill=1.0)
    list(train(short.spec, config, tmp_path, initial=short, teacher=dense, stop_after=4))
    assert float(rows(tmp_path)[0]["distill_loss"]) > 0
    with pytest.raises(TrainError, match=r"belongs to a run with other settings \(teacher\); name another"):
        list(train(short.spec, config, tmp_path, initial=short, teacher=lively_checkpoint(DENSE, 1)))
    with pytest.raises(TrainError, match=r"^distill: the dense model to learn from is the one that --init"):
        list(train(short.spec, config, tmp_path / "none", initial=short))
    list(train(short.spec, config, tmp_path, initial=short, teacher=dense))
    assert len(rows(tmp_path)) == 8


def test_a_run_starts_as_the_dense_model_and_ends_at_its_capacity(dense: Checkpoint, tmp_path: Path) -> None:
    begin = routed(dense, 0.25)
    config = dataclasses.replace(CONFIG, distill=0.5)
    list(train(begin.spec, config, tmp_path / "whole", initial=begin))
    found = rows(tmp_path / "whole")
    assert [float(row["capacity"]) for row in found] == [
        pytest.approx(spec_at(step, begin.spec, config).capacity) for step in range(8)
    ]
    # The first step has capacity 1, at which both models are equal.
    assert float(found[0]["distill_loss"]) == 0.0 < float(found[-1]["distill_loss"])
    assert float(found[-1]["total_loss"]) == pytest.approx(
        float(found[-1]["next_token_loss"])
        + 0.5 * float(found[-1]["distill_loss"])
        + float(found[-1]["predictor_loss"]),
        rel=1e-6,
    )
    assert load_checkpoint(tmp_path / "whole" / "model.pt").spec == begin.spec
    list(train(begin.spec, config, tmp_path / "parts", initial=begin, stop_after=3))
    # An unfinished model states the capacity at which it was trained.
    assert load_checkpoint(tmp_path / "parts" / "model.pt").spec == spec_at(2, begin.spec, config)
    assert lines(train(begin.spec, config, tmp_path / "parts", initial=begin))[0] == "resumed at step 3"
    assert (tmp_path / "parts" / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()
    assert (tmp_path / "parts" / "model.pt").read_bytes() == (tmp_path / "whole" / "model.pt").read_bytes()
    with pytest.raises(TrainError, match=r"belongs to a run with other settings \(initial weights\); name another"):
        list(train(begin.spec, config, tmp_path / "parts", initial=routed(lively_checkpoint(DENSE, 1), 0.25)))


@pytest.mark.parametrize("distill", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["routers", "routed", "all"])
def test_what_is_trained(dense: Checkpoint, tmp_path: Path, kind: str, distill: float) -> None:
    begin = routed(dense, 0.5, "mlp")
    before = {name: tensor.clone() for name, tensor in begin.weights.items()}
    config = dataclasses.replace(CONFIG, train=kind, distill=distill)
    list(train(begin.spec, config, tmp_path, initial=begin))
    trained = state(tmp_path)
    inside = {"routers": ROUTES.match, "routed": lambda name: name.startswith(("layers.1.", "layers.3.")), "all": bool}
    moved = {name for name, tensor in trained["model"].items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if inside[kind](name)}
    assert trained["optimizer"].keys() == moved
    # The given weights, which the teacher may share, are unchanged.
    assert all(torch.equal(tensor, before[name]) for name, tensor in begin.weights.items())


def test_routers_have_a_rate_of_their_own(dense: Checkpoint, tmp_path: Path) -> None:
    begin = routed(dense, 0.5)
    config = dataclasses.replace(CONFIG, learning_rate=0.0, router_learning_rate=1e-2)
    list(train(begin.spec, config, tmp_path, initial=begin))
    for name, tensor in state(tmp_path)["model"].items():
        assert torch.equal(tensor, begin.weights[name]) == (ROUTES.match(name) is None), name


@pytest.mark.slow
def test_routers_alone_learn_to_select(tmp_path: Path) -> None:
    """With all else frozen and half of the tokens in each layer, the learnt choice beats the arbitrary one."""
    dense_config = TrainConfig(
        steps=200, batch=4, seq=32, warmup=5, eval_every=200, eval_batches=8, learning_rate=1e-2, log_every=200
    )
    list(train(DENSE, dense_config, tmp_path / "dense"))
    trained = Checkpoint(spec=DENSE, weights=state(tmp_path / "dense")["model"])
    spec = routed_spec(DENSE, (0, 1, 2, 3), 0.5, "mlp", "predictor")
    begin = retrofitted(trained, spec, 0)
    config = dataclasses.replace(dense_config, steps=80, eval_every=80, train="routers", log_every=80, anneal=0.5)
    held_out = {}
    for rate in (1e-9, 3e-2):
        list(train(spec, dataclasses.replace(config, learning_rate=rate), tmp_path / str(rate), initial=begin))
        held_out[rate] = float(rows(tmp_path / str(rate))[-1]["held_out_next_token_loss"])
    assert held_out[3e-2] < held_out[1e-9] - 0.05


@pytest.mark.fast("block", "separate")
@pytest.mark.parametrize("parts", PARTS)
def test_activation_checkpointing_changes_nothing(dense: Checkpoint, tmp_path: Path, parts: str) -> None:
    begin = routed(dense, 0.5, parts)
    for kind in ("none", "layers"):
        config = dataclasses.replace(CONFIG, recompute=kind, distill=1.0, router_loss=0.1)
        list(train(begin.spec, config, tmp_path / kind, initial=begin))
    assert (tmp_path / "layers" / "log.csv").read_text() == (tmp_path / "none" / "log.csv").read_text()
    assert (tmp_path / "layers" / "model.pt").read_bytes() == (tmp_path / "none" / "model.pt").read_bytes()


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (DENSE, {"train": "routers"}, r"^train: routers is for models that route, and this one does not$"),
        (DENSE, {"anneal": 0.5}, r"^anneal: 0.5 is for models that route, and this one does not$"),
        (
            make_spec(vocab_size=256, capacity_rule="absolute", capacity=4),
            {"anneal": 1.0},
            r"^anneal: lowers a share o",
        ),
        (make_spec(vocab_size=256), {"distill": 1.0}, r"^distill: the dense model to learn from is the one that --in"),
    ],
)
def test_settings_that_need_routing(tmp_path: Path, spec: ModelSpec, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        list(train(spec, TrainConfig(seq=8, batch=1, steps=1, **options), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_train_is_said(dense: Checkpoint, tmp_path: Path) -> None:
    config = TrainConfig(seq=8, batch=1, steps=1, train="routers", predictor_loss=0.0, calibrate=1)
    spec = routed_spec(DENSE, (1, 3), 0.5, "mlp", "predictor", routers="fitted")
    expected = (
        r"^train: with --train routers, no trained weight gets a gradient; routers with a gate of 1 learn by "
        r"--router-loss only, and predictors by --predictor-loss$"
    )
    with pytest.raises(TrainError, match=expected):
        list(train(spec, config, tmp_path, initial=retrofitted(dense, spec, 0)))
    noise = make_spec(vocab_size=256, router="noise")
    with pytest.raises(TrainError, match=r"^train: routers, predictors and adapters are to be trained, and this model"):
        list(train(noise, dataclasses.replace(config, calibrate=0), tmp_path))


def test_options_out_of_range() -> None:
    with pytest.raises(TrainError, match=r"^anneal: expected 0 to 1, got 1.5$"):
        TrainConfig(anneal=1.5)
    with pytest.raises(TrainError, match=r"^train: expected all or routed or routers, got 'some'$"):
        TrainConfig(train="some")


def test_from_a_folder_on_disk(dense: Checkpoint, tmp_path: Path) -> None:
    """16-bit weights are computed in float32, as in a build."""
    halves = {name: tensor.half() for name, tensor in dense.weights.items()}
    save_checkpoint(tmp_path / "dense", Checkpoint(spec=DENSE, weights=halves))
    loaded = load_checkpoint(tmp_path / "dense")
    begin = routed(loaded)
    ids_BS, lengths_B = distinct_ids(DENSE, 2, 32), torch.tensor([32, 32])
    (expected_BSV,), (found_BSV,) = loaded.module()(ids_BS, lengths_B), begin.module()(ids_BS, lengths_B)
    assert torch.equal(found_BSV, expected_BSV)
    list(train(begin.spec, CONFIG, tmp_path / "out", initial=begin))
    assert all(tensor.dtype == torch.float32 for tensor in state(tmp_path / "out")["model"].values())
