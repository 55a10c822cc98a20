"""Training: the model learns, and a run that was stopped ends bit for bit as an uninterrupted one does."""

import copy
import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import observed
from tiny_models import make_spec
from training_runs import CONFIG, SPEC, evaluations, finish, lines, rows, state
from variants import VARIANTS

from mod_models import layers
from mod_models.checkpoint import CheckpointError, load_checkpoint, write_plain
from mod_models.train import TrainConfig, TrainError
from mod_models.train import run as run_module
from mod_models.train.corpus import read_corpus
from mod_models.train.evaluation import evaluate
from mod_models.train.losses import losses
from mod_models.train.parallel import Workers
from mod_models.train.run import clip_gradients, learning_rate_at, make_optimizer, train
from mod_models.transformer import Transformer


def assert_equal_trees(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_trees(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(folder)
    return folder


def assert_same_end(folder: Path, uninterrupted: Path) -> None:
    assert_equal_trees(state(folder), state(uninterrupted))
    assert (folder / "model.pt").read_bytes() == (uninterrupted / "model.pt").read_bytes()
    assert (folder / "log.csv").read_text() == (uninterrupted / "log.csv").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["log.csv", "model.pt", "state.pt"]


# Learning.


def test_loss_falls(tmp_path: Path) -> None:
    config = TrainConfig(steps=60, batch=4, seq=32, warmup=5, eval_every=30, eval_batches=4, learning_rate=1e-2)
    printed = finish(tmp_path, config)
    first, last = evaluations(tmp_path)
    assert float(last["held_out_bits_per_byte"]) < float(first["held_out_bits_per_byte"]) < 8
    assert [row["step"] for row in rows(tmp_path)] == ["25", "30", "50", "60"]
    assert printed[0].startswith("step 25/60  loss ")
    accuracy = {layer: round(float(last[f"held_out_predictor_accuracy/{layer}"]), 4) for layer in ("0", "2")}
    bits = round(float(last["held_out_bits_per_byte"]), 4)
    perplexity = round(math.exp(float(last["held_out_next_token_loss"])), 4)
    assert perplexity == pytest.approx(2 ** float(last["held_out_bits_per_byte"]), abs=1e-4)  # A token is a byte here.
    found = {"bits_per_byte": bits, "perplexity": perplexity, "predictor_accuracy": accuracy}
    assert printed[-1] == f"step 60/60  held out: {found}"


@pytest.mark.fast(
    "dense", "stochastic", "early exit with experts", "routed apart by predictors", "staged MoDE, expert choice",
    "keys and values kept, adapter",
)  # fmt: skip
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_trains_is_evaluated_and_resumes(name: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(VARIANTS[name], vocab_size=256)
    config = dataclasses.replace(CONFIG, steps=2, seq=12, eval_every=1, eval_batches=1, log_every=1, router_loss=0.01)
    list(train(spec, config, tmp_path, stop_after=1))
    assert "resumed at step 1" in lines(train(spec, config, tmp_path))
    assert load_checkpoint(tmp_path / "model.pt").spec == spec
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]


def test_what_a_run_leaves(uninterrupted: Path) -> None:
    assert [row["step"] for row in rows(uninterrupted)] == ["2", "4", "5", "6", "8", "10", "12"]
    assert [row["step"] for row in evaluations(uninterrupted)] == ["5", "10", "12"]
    metrics = ["predictor_accuracy/0", "predictor_accuracy/2", "predictor_loss"]
    assert list(rows(uninterrupted)[0]) == [
        "step", "learning_rate", "gradient_norm", "total_loss", "next_token_loss", "train_bits_per_byte", *metrics,
        "held_out_bits_per_byte", "held_out_next_token_loss", *(f"held_out_{name}" for name in metrics),
    ]  # fmt: skip
    row = {name: float(value) for name, value in rows(uninterrupted)[2].items()}
    assert row["train_bits_per_byte"] == pytest.approx(row["next_token_loss"] / math.log(2))
    assert row["total_loss"] == pytest.approx(row["next_token_loss"] + row["predictor_loss"], rel=1e-6)
    assert row["learning_rate"] == learning_rate_at(4, CONFIG, CONFIG.learning_rate)
    checkpoint = load_checkpoint(uninterrupted / "model.pt")
    assert checkpoint.spec == SPEC
    for name, tensor in state(uninterrupted)["model"].items():
        assert torch.equal(checkpoint.weights[name], tensor.half())


# Resuming.


@pytest.mark.parametrize("stop_after", [5, 7])
def test_stopped_and_resumed_is_uninterrupted(uninterrupted: Path, tmp_path: Path, stop_after: int) -> None:
    finish(tmp_path, stop_after=stop_after)
    assert state(tmp_path)["step"] == stop_after
    assert finish(tmp_path)[0] == f"resumed at step {stop_after}"
    assert_same_end(tmp_path, uninterrupted)


def test_abandoned_at_any_line_and_resumed_is_uninterrupted(uninterrupted: Path, tmp_path: Path) -> None:
    """A generator that is no longer advanced is like a run that was killed there."""
    for count in (1, 1, 2, 1, 9):
        run = train(SPEC, CONFIG, tmp_path)
        list(itertools.islice((event for event in run if event.text), count))
        run.close()
    assert_same_end(tmp_path, uninterrupted)


def test_killed_between_log_and_state(uninterrupted: Path, tmp_path: Path) -> None:
    """The row without a state is computed again when the run resumes, and occurs once in the log."""
    finish(tmp_path, stop_after=7)
    shutil.copy(uninterrupted / "log.csv", tmp_path / "log.csv")
    finish(tmp_path)
    assert_same_end(tmp_path, uninterrupted)
    # A finished run has nothing left to do.
    assert finish(tmp_path) == ["resumed at step 12"]
    assert_same_end(tmp_path, uninterrupted)


def test_other_settings_are_refused(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "out")
    (tmp_path / "text.txt").write_text("one two three " * 100)
    changes: dict[str, tuple[Any, Any, Any]] = {
        "seed": (SPEC, {"seed": 1}, None),
        "learning_rate, steps": (SPEC, {"steps": 13, "learning_rate": 1e-4}, None),
        "spec": (dataclasses.replace(SPEC, norm_eps=1e-6), {}, None),
        "data": (SPEC, {}, read_corpus(tmp_path / "text.txt")),
    }
    for names, (spec, options, corpus) in changes.items():
        message = rf"state\.pt: belongs to a run with other settings \({names}\); name another folder with --out$"
        with pytest.raises(TrainError, match=message):
            list(train(spec, dataclasses.replace(CONFIG, **options), tmp_path / "out", corpus=corpus))
    assert_same_end(tmp_path / "out", uninterrupted)


def test_a_damaged_state_is_refused(uninterrupted: Path, tmp_path: Path) -> None:
    expected = r"state\.pt: its tensors are not those of this model; name another folder with --out$"
    for damage in ({"model": {}}, {"optimizer": None}, {"step": None}):
        write_plain(tmp_path / "state.pt", {**state(uninterrupted), **damage})
        with pytest.raises(TrainError, match=expected):
            finish(tmp_path)
    (tmp_path / "state.pt").write_bytes((uninterrupted / "state.pt").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"state\.pt: not a model\.pt as torch\.save writes it"):
        finish(tmp_path)


@pytest.mark.parametrize("text", ["{", "loss,step\n1,2\n", "step,loss\nx,1\n", "\n\n", "\0"])
def test_a_log_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(TrainError, match=r"log\.csv: not the log of a training run; name another folder with --out$"):
        finish(tmp_path)


# 16 bits.


def test_bfloat16_learns_and_resumes(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, precision="bfloat16", steps=20, eval_every=20)
    finish(tmp_path / "whole", config)
    finish(tmp_path / "parts", config, stop_after=9)
    finish(tmp_path / "parts", config)
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    first, *_, last = rows(tmp_path / "whole")
    assert float(last["next_token_loss"]) < float(first["next_token_loss"])
    assert all(tensor.dtype == torch.float32 for tensor in state(tmp_path / "whole")["model"].values())
    finish(tmp_path / "float32", dataclasses.replace(config, precision="float32"))
    near, far = float(rows(tmp_path / "float32")[0]["total_loss"]), float(first["total_loss"])
    assert far != near
    assert far == pytest.approx(near, rel=1e-2)


def test_bfloat16_leaves_routers_float32() -> None:
    """The first layer routes on the embedding itself, so its scores equal those of float32 bit for bit."""
    spec = make_spec(vocab_size=256, predictor_hidden=4, layers=(0, 1), d_model=32)
    rows_BS, lengths_B = (
        torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1)),
        torch.tensor([16] * 2),
    )
    model = fresh(spec)
    _, exact = observed(model, rows_BS, lengths_B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BSV, cast = observed(model, rows_BS, lengths_B)
        predicted = model.layers[0].predictor(torch.randn(1, 4, 32))
    assert torch.equal(cast[0].score_BS, exact[0].score_BS)
    assert predicted.dtype == cast[1].score_BS.dtype == torch.float32
    assert logits_BSV.dtype == torch.bfloat16
    assert not torch.equal(cast[1].score_BS, exact[1].score_BS)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_short_rows_in_bfloat16_have_the_attention_and_gradients_of_float64(
    n_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and PyTorch's fused attention round alike, and only short rows that learn are given to products."""
    spec = dataclasses.replace(make_spec(d_model=32), n_heads=4, n_kv_heads=n_kv_heads, d_head=8, max_positions=24)
    torch.manual_seed(0)
    attention = layers.Attention(spec)
    cos, sin = layers.rope_tables(spec)
    x_BTD, grad_BTD = torch.randn(2, 2, 24, 32)

    def attended(autocast: bool, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        module, (x, grad, cos_TE, sin_TE) = attention, (x_BTD, grad_BTD, cos[:24], sin[:24])
        if exact:
            module = copy.deepcopy(attention).double()
            x, grad, cos_TE, sin_TE = (tensor.double() for tensor in (x, grad, cos_TE, sin_TE))
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            delta, *_ = module(x, cos_TE, sin_TE)
        (gradient,) = torch.autograd.grad(delta, x, grad.to(delta.dtype))
        return delta.double(), gradient.double()

    exact = attended(autocast=False, exact=True)
    calls = []
    products = layers._attention_by_products
    monkeypatch.setattr(layers, "_attention_by_products", lambda *inputs: calls.append(1) or products(*inputs))
    by_products = attended(autocast=True)
    assert calls == [1]
    monkeypatch.setattr(layers, "SHORT_ROW", 23)
    fused = attended(autocast=True)
    attended(autocast=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        attention(x_BTD[:, :8], cos[:8], sin[:8])
    assert calls == [1]
    for ours, theirs, truth in zip(by_products, fused, exact, strict=True):
        scale = truth.abs().max()
        assert (ours - truth).abs().max() < 0.02 * scale
        assert (ours - truth).norm() < 1.5 * (theirs - truth).norm()


# A given text.


def test_a_folder_is_what_is_learnt(tmp_path: Path) -> None:
    """A text of one repeated line is learnt by heart; in as many steps, the standard library is not."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("the quick brown fox\n" * 20)
    (tmp_path / "text" / "picture").write_bytes(b"\xff\xfe\xfd")
    config = dataclasses.replace(CONFIG, steps=100, batch=4, learning_rate=1e-2, eval_every=150)
    printed = finish(tmp_path / "out", config, corpus=read_corpus(tmp_path / "text"))
    assert printed[0] == f"{tmp_path / 'text'}: 40 files, 1 skipped as not UTF-8 text"
    assert float(rows(tmp_path / "out")[-1]["held_out_bits_per_byte"]) < 1


# Refused options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: expected 1 to 1000000000, got 0"),
        ({"seq": -1, "batch": 0}, "batch: expected 1 to 1000000000, got 0; seq: expected 1 to 1000000000, got -1"),
        ({"learning_rate": math.nan}, "learning_rate: expected 0 to 1000000000, got nan"),
        ({"clip": math.inf}, "clip: expected 0 to 1000000000, got inf"),
        ({"precision": "float16"}, "precision: expected float32 or bfloat16, got 'float16'"),
        ({"router_loss": -1.0}, "router_loss: expected 0 to 1000000000, got -1.0"),
        ({"seed": 10**30}, "seed: expected 0 to 1000000000, got a whole number beyond 64 bits"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError) as caught:
        TrainConfig(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"vocab_size": 255}, {}, "spec.vocab_size: the tokens of this Python's sources need at least 256, got 255"),
        ({}, {"seq": 33}, "seq: 33 is more than spec.max_positions 32"),
        ({"max_positions": 2**24}, {"seq": 2**24}, "seq: 16777216 tokens and the next are too long for this Python's"),
        ({}, {"micro_batch": 3}, "micro_batch: 3 does not divide the 2 rows of a process"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path: Path, sizes: dict[str, int], options: dict[str, int], said: str) -> None:
    with pytest.raises(TrainError) as caught:
        list(train(dataclasses.replace(SPEC, **sizes), dataclasses.replace(CONFIG, **options), tmp_path))
    assert str(caught.value).startswith(said)
    assert list(tmp_path.iterdir()) == []


# Loss, evaluation, schedule.


def fresh(spec: Any = SPEC) -> Transformer:
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_leaves_no_trace(mode: bool) -> None:
    model = fresh().train(mode)
    before, weights = torch.random.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    first = evaluate(model, CONFIG)
    assert evaluate(model, CONFIG) == first
    # Nothing is kept for a backward pass, so nothing is recomputed, and the caller's layers are not wrapped.
    assert evaluate(model, dataclasses.replace(CONFIG, recompute="layers")) == first
    assert not any("forward" in vars(layer) for layer in model.layers)
    assert model.training is mode
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_equal_trees(dict(model.state_dict()), weights)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_schedule() -> None:
    config = TrainConfig(steps=110, warmup=10, learning_rate=9.0)
    assert [learning_rate_at(step, config, 1.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate_at(10, config, 1.0) == pytest.approx(1.0)
    assert learning_rate_at(60, config, 1.0) == pytest.approx(0.55)
    assert learning_rate_at(110, config, 1.0) == pytest.approx(0.1)
    assert learning_rate_at(0, TrainConfig(steps=1, warmup=0), 0.25) == 0.25


def test_norms_and_biases_are_not_decayed() -> None:
    model = fresh()
    groups = make_optimizer(model, CONFIG).param_groups
    assert [group["weight_decay"] for group in groups] == [CONFIG.weight_decay, 0.0]
    matrices, vectors = ([id(p) for p in group["params"]] for group in groups)
    assert matrices == [id(p) for p in model.parameters() if p.dim() == 2]
    assert vectors == [id(p) for p in model.parameters() if p.dim() == 1]


def test_what_nothing_trains_stays_as_it_was(tmp_path: Path) -> None:
    """They are neither decayed nor given a state: predictors without their loss, and a layer that takes no token."""
    spec = make_spec(vocab_size=256, predictor_hidden=4, capacity_rule="floor", capacity=(1e-9, 0.5))
    list(train(spec, dataclasses.replace(CONFIG, predictor_loss=0.0), tmp_path))
    initial, trained = fresh(spec).state_dict(), state(tmp_path)
    idle = {name for name in initial if ".predictor." in name or name.startswith("layers.0.")}
    for name, tensor in initial.items():
        assert torch.equal(trained["model"][name], tensor) == (name in idle), name
    assert trained["optimizer"].keys() == initial.keys() - idle


@pytest.mark.parametrize("largest", [0.0, 1e-3, 1.0, 1e9])
def test_clipping(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CACHED", 100)  # The embeddings have 2,048 numbers, which are squared in parts.
    model = fresh()
    losses(model, torch.randint(0, 256, (2, 17))).total.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in before.values()))
    assert clip_gradients(model, largest, Workers()) == pytest.approx(exact, rel=1e-7)
    for name, parameter in model.named_parameters():
        scaled = before[name].double() * min(1, largest / exact)
        torch.testing.assert_close(parameter.grad.double(), scaled, rtol=1e-6, atol=0)


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, learning_rate=1e6, warmup=0, steps=100, eval_every=1, clip=1e9)
    expected = r"^step \d+: the gradient is no longer finite \(loss .+\); the last saved state is good"
    with pytest.raises(TrainError, match=expected) as caught:
        finish(tmp_path, config)
    step = int(str(caught.value).split()[1].rstrip(":"))
    assert state(tmp_path)["step"] == step - 1
    assert all(bool(tensor.isfinite().all()) for tensor in state(tmp_path)["model"].values())
