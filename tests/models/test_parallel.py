"""Two processes connected by gloo follow the loss curve of one; any number of them can save and load sharded state."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_spec
from training_runs import rows, state
from two_processes import retrofit, routers_alone

from mod_models.train import TrainConfig, TrainError
from mod_models.train.parallel import Workers, launched
from mod_models.train.run import train
from mod_models.transformer import Transformer

# All losses, a layer that takes no token, and parameters with fewer rows than processes.
SPEC = make_spec(
    vocab_size=256, d_model=16, predictor_hidden=3, layers=(0, 1, 2), capacity=(0.25, 1e-9, 0.5), max_positions=32,
    tie_embeddings=False, d_ff=15,
)  # fmt: skip
CONFIG = TrainConfig(
    steps=10, batch=4, seq=16, warmup=3, eval_every=6, eval_batches=1, log_every=1, router_loss=0.5, learning_rate=1e-2
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def assert_same_curve(one: Path, other: Path) -> None:
    ours, theirs = rows(one), rows(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for left, right in zip(ours, theirs, strict=True):
        assert left.keys() == right.keys()
        for name, text in left.items():
            if text:
                assert float(right[name]) == pytest.approx(float(text), rel=0, abs=1e-5), (left["step"], name)
            else:
                assert right[name] == ""


def assert_same_state(one: Path, other: Path) -> None:
    ours, theirs = state(one), state(other)
    assert ours["step"] == theirs["step"]
    assert ours["identity"] == theirs["identity"]
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, tensor in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], tensor, rtol=0, atol=1e-4)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    list(train(SPEC, CONFIG, folder))
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "spec.json").write_text(json.dumps(SPEC.to_dict()))
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(CONFIG)))
    list(train(SPEC, CONFIG, folder / "one-half", stop_after=7))
    script = str(Path(__file__).with_name("two_processes.py"))
    run([*TORCHRUN, script, str(folder / "spec.json"), str(folder / "config.json"), str(folder)])
    return folder


@pytest.fixture(scope="module")
def in_halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process adds up the gradients of the halves that two processes compute."""
    folder = tmp_path_factory.mktemp("in halves")
    list(train(SPEC, dataclasses.replace(CONFIG, micro_batch=2), folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(one: Path, in_halves: Path, two: Path, parallel: str) -> None:
    """They agree bit for bit with one process that adds up both halves, because a sum of two has only one order."""
    assert len(rows(one)) == CONFIG.steps
    assert float(rows(one)[-1]["total_loss"]) < float(rows(one)[0]["total_loss"]) - 0.1
    assert_same_curve(one, two / parallel)
    ours, theirs = state(in_halves), state(two / parallel)
    for name, tensor in ours["model"].items():
        assert torch.equal(theirs["model"][name], tensor), name
    for left, right in zip(rows(in_halves), rows(two / parallel), strict=True):
        assert (left["total_loss"], left["gradient_norm"]) == (right["total_loss"], right["gradient_norm"])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_portions_on_two_processes(one: Path, two: Path, parallel: str) -> None:
    assert_same_curve(one, two / f"rows-alone-{parallel}")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_retrofit_on_two_processes(two: Path, tmp_path: Path, parallel: str) -> None:
    begin, settings = retrofit(SPEC, CONFIG)
    # Scores are close to each other at first, so the last bit of a sum would decide which token is selected.
    list(train(begin.spec, dataclasses.replace(settings, micro_batch=2), tmp_path, initial=begin))
    assert float(rows(tmp_path)[-1]["distill_loss"]) > 0
    assert_same_curve(tmp_path, two / f"retrofit-{parallel}")
    ours, theirs = state(tmp_path), state(two / f"retrofit-{parallel}")
    assert theirs["optimizer"].keys() == ours["optimizer"].keys()
    for name, tensor in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], tensor, rtol=0, atol=1e-4)
        if not name.startswith(("layers.1.", "layers.2.")):
            assert torch.equal(theirs["model"][name], begin.weights[name]), name


@pytest.mark.slow
def test_sharded_layers_whose_result_has_no_gradient_are_recomputed(two: Path, tmp_path: Path) -> None:
    begin, settings = routers_alone(SPEC, CONFIG)
    list(train(begin.spec, dataclasses.replace(settings, micro_batch=2), tmp_path, initial=begin))
    assert_same_curve(tmp_path, two / "routers-alone")
    ours, theirs = state(tmp_path)["model"], state(two / "routers-alone")["model"]
    changed = {name for name, tensor in ours.items() if not torch.equal(tensor, begin.weights[name])}
    assert changed == {name for name in ours if ".router." in name}
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_one_process_goes_on_from_two(one: Path, two: Path) -> None:
    assert state(two / "fsdp-half")["step"] == 7
    list(train(SPEC, CONFIG, two / "fsdp-half"))
    assert_same_curve(one, two / "fsdp-half")
    assert_same_state(one, two / "fsdp-half")


@pytest.mark.slow
def test_two_processes_go_on_from_one(one: Path, two: Path) -> None:
    assert_same_curve(one, two / "one-half")
    assert_same_state(one, two / "one-half")


@pytest.mark.slow
def test_a_process_holds_its_share(two: Path) -> None:
    sizes = [parameter.numel() for parameter in Transformer(SPEC).parameters()]
    first, second = (json.loads((two / f"held-{rank}.json").read_text()) for rank in (0, 1))
    assert [a + b for a, b in zip(first, second, strict=True)] == sizes
    assert sum(first) < 0.55 * sum(sizes)


@pytest.mark.slow
def test_sharded_bfloat16(two: Path, tmp_path: Path) -> None:
    list(train(SPEC, dataclasses.replace(CONFIG, precision="bfloat16"), tmp_path))
    for left, right in zip(rows(tmp_path), rows(two / "bfloat16"), strict=True):
        assert float(right["total_loss"]) == pytest.approx(float(left["total_loss"]), rel=1e-2)
    assert all(tensor.dtype == torch.float32 for tensor in state(two / "bfloat16")["model"].values())


@pytest.mark.slow
def test_what_several_processes_may_not_ask_for(two: Path) -> None:
    """Every process raises the same error, so none waits for another."""
    first, second = (json.loads((two / f"refused-{rank}.json").read_text()) for rank in (0, 1))
    assert first["odd"] == second["odd"] == "batch: 3 rows do not divide among 2 processes"
    for refused, rank in ((first, 0), (second, 1)):
        expected = "the processes do not have the same text, or not the same settings"
        assert refused["text"] == f"{two / f'text-{rank}.txt'}: {expected}"
        expected = "state.pt: not the same for every process; --out must be a folder that all machines share"
        assert refused["state"].endswith(expected)
    assert not (two / "odd").exists()


@pytest.mark.slow
def test_command_line_under_torchrun(one: Path, two: Path, tmp_path: Path) -> None:
    options = [part for name, value in dataclasses.asdict(CONFIG).items() for part in (f"--{name}", str(value))]
    options = [part.replace("_", "-") if part.startswith("--") else part for part in options]
    spec, out = ["--spec", str(two / "spec.json")], ["--out", str(tmp_path)]
    command = [*TORCHRUN, "-m", "mod_models.train", *spec, *out, "--parallel", "fsdp", "--threads", "1", *options]
    printed = run([*command, "--device", "cpu"]).stdout.splitlines()
    assert_same_curve(one, tmp_path)
    # Only the first process prints.
    assert len(printed) == len(set(printed)) == CONFIG.steps + 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "model.pt", "state.pt"]


@pytest.mark.parametrize(
    ("arguments", "gpus", "environment", "said"),
    [
        (
            ("fsdp", "cpu"),
            0,
            {},
            "--parallel fsdp: start the processes with torchrun --nproc-per-node N -m mod_models.train",
        ),
        (("ddp", "cuda"), 0, {}, "--device cuda: PyTorch finds no GPU here"),
        (
            (),
            2,
            {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "2"},
            "--nproc-per-node: 2 GPUs here, and no more processes than that",
        ),
    ],
)
def test_what_cannot_be_joined(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], gpus: int, environment: dict[str, str], said: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(TrainError) as caught, launched(*arguments):
        pass
    assert str(caught.value) == said


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with launched() as workers:
        assert workers == Workers()
