"""The command line of training: options, messages, and interruption."""

import dataclasses
import functools
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import lively_checkpoint, make_spec
from tokenizers import ByteLevelBPETokenizer
from training_runs import SPEC, evaluations, state

from mod_models import probe
from mod_models.checkpoint import load_checkpoint, save_checkpoint
from mod_models.generation_spec import why_not
from mod_models.train import DEFAULT_SPEC, TrainConfig
from mod_models.train.__main__ import _parser, main
from mod_models.train.corpus import read_corpus
from mod_models.train.retrofit import routed_spec

QUICK = ["--threads", "1", "--batch", "1", "--seq", "8", "--warmup", "1", "--eval-batches", "1"]


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC.to_dict()))
    return path


def test_command_line(tmp_path: Path, spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "default"), "--steps", "1", *QUICK]) == 0
    assert load_checkpoint(tmp_path / "default" / "model.pt").spec == DEFAULT_SPEC
    command = ["--out", str(tmp_path / "out"), "--spec", str(spec_file), "--steps", "2", *QUICK]
    assert main(command) == 0
    assert "step 2/2  held out: {'bits_per_byte': " in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "out" / "model.pt").spec == SPEC
    assert main(command) == 0
    assert capsys.readouterr().out == "resumed at step 2\n"


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (None, ["--spec", "nowhere.json"], "nowhere.json: [Errno 2] No such file or directory"),
        ("{", [], "spec.json: Expecting property name"),
        ("[]", [], "spec.json: spec: expected a table, got list"),
        ("\udcff", [], "spec.json: 'utf-8' codec can't decode"),
        ('{"d_modl": 1}', [], "spec.json: spec.d_modl: unknown field, did you mean 'd_model'?"),
        (
            json.dumps(make_spec(vocab_size=256, selection="threshold").to_dict()),
            QUICK,
            "router_loss: where tokens choose (spec.routing.selection=threshold) it is what teaches them how many may, "
            "and it is 0; give --router-loss 0.01",
        ),
        (None, ["--steps", "0"], "steps: expected 1 to 1000000000, got 0"),
        (None, ["--seq", "4096"], "seq: 4096 is more than spec.max_positions 2048"),
        (None, ["--out", "spec.json/x"], "[Errno 20] Not a directory"),
        (None, ["--data", "nowhere"], "nowhere: no such folder or file"),
        (None, ["--tokenizer", "nowhere.json"], "nowhere.json: no such file, expected a tokenizer.json"),
        (None, ["--parallel", "fsdp"], "--parallel fsdp: start the processes with torchrun --nproc-per-node N -m mod"),
        (None, ["--device", "cuda"], "--device cuda: PyTorch finds no GPU here"),
        (None, ["--learning-rate", "fast"], "argument --learning-rate: invalid float value: 'fast'"),
    ],
)
def test_command_line_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    spec: str | None, options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("spec.json").write_text(spec or "{}", errors="surrogateescape")
    with pytest.raises(SystemExit) as caught:
        main([*(["--spec", "spec.json"] if spec else []), *options])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_from_a_dense_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Routing is added, the folder's tokenizer is used and copied, and the same command resumes."""
    folder, out = tmp_path / "dense", tmp_path / "out"
    dense = lively_checkpoint(dataclasses.replace(SPEC, vocab_size=300, routing=None))
    save_checkpoint(folder, dense)
    byte_level = ByteLevelBPETokenizer()
    byte_level.train_from_iterator(["def some(text): return text"] * 3, vocab_size=280, show_progress=False)
    byte_level.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "def some(text): return text"}\n' * 100)
    data = ["--data", str(tmp_path / "text.jsonl")]
    command = ["--init", str(folder), "--route", "deepest:2", "--capacity", "0.25", "--parts", "mlp", "--anneal", *data]
    command += ["--distill", "--train", "routers", "--out", str(out), "--steps", "2", *QUICK]
    assert main(command) == 0
    assert "'perplexity': " in capsys.readouterr().out
    trained = load_checkpoint(out / "model.pt")
    assert trained.spec == routed_spec(dense.spec, (1, 2), 0.25, "mlp", "predictor", routers="fitted")
    assert (state(out)["identity"]["anneal"], state(out)["identity"]["distill"]) == (0.5, 1.0)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()
    assert main(command) == 0
    assert capsys.readouterr().out == "resumed at step 2\n"
    # Without --route a checkpoint is trained unchanged, whether it is dense or routes.
    for source, spec in ((folder, dense.spec), (out / "model.pt", trained.spec)):
        command = ["--init", str(source), "--out", str(tmp_path / source.stem), "--steps", "1", *data, *QUICK]
        assert main([*command, "--tokenizer", str(folder / "tokenizer.json")]) == 0
        assert load_checkpoint(tmp_path / source.stem / "model.pt").spec == spec


def test_the_tokenizer_beside_a_model_pt_is_used(tmp_path: Path) -> None:
    """An earlier run leaves its tokenizer beside its model.pt, and its model knows no other tokens."""
    (tmp_path / "first").mkdir()
    save_checkpoint(tmp_path / "first" / "model.pt", lively_checkpoint(dataclasses.replace(SPEC, vocab_size=300)))
    byte_level = ByteLevelBPETokenizer()
    byte_level.train_from_iterator(["def some(text): return text"] * 3, vocab_size=280, show_progress=False)
    byte_level.save(str(tmp_path / "first" / "tokenizer.json"))
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("def some(text): return text\n" * 200)
    command = ["--init", str(tmp_path / "first" / "model.pt"), "--data", str(text), "--out", str(out), "--steps", "1"]
    assert main([*command, *QUICK]) == 0
    assert state(out)["identity"]["data"] == read_corpus(text, tmp_path / "first" / "tokenizer.json").fingerprint
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "first" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("parts", ["block", "separate"])
def test_predictors_for_a_model_that_selects_by_rank(parts: str, tmp_path: Path) -> None:
    """A model that was trained elsewhere can write text once its predictors are trained; nothing else changes."""
    routing = dataclasses.replace(SPEC.routing, selection="topk", predictor_hidden=0, parts=parts)
    given = lively_checkpoint(dataclasses.replace(SPEC, routing=routing))
    assert why_not(given.spec) is not None
    save_checkpoint(tmp_path / "given", given)
    command = ["--init", str(tmp_path / "given"), "--selection", "predictor", "--train", "routers"]
    assert main([*command, "--learning-rate", "0", "--out", str(tmp_path / "out"), "--steps", "1", *QUICK]) == 0
    trained = load_checkpoint(tmp_path / "out" / "model.pt")
    assert why_not(trained.spec) is None
    assert trained.spec == dataclasses.replace(
        given.spec, routing=dataclasses.replace(routing, selection="predictor", predictor_hidden=SPEC.d_model // 4)
    )
    for name, weight in given.weights.items():
        assert torch.equal(trained.weights[name], weight.half()), name
    assert {name for name in trained.weights if name not in given.weights} == {
        name for name in trained.weights if "predictor" in name
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["linear", "gated"])
def test_what_skipped_tokens_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: str) -> None:
    dense = lively_checkpoint(dataclasses.replace(SPEC, d_ff=64, routing=None))
    save_checkpoint(tmp_path / "dense", dense)
    command = ["--init", str(tmp_path / "dense"), "--route", "1-2", "--skipped-keys", "kept", "--adapter", adapter]
    command += ["--adapter-share", "0.5"] * (adapter == "gated")
    command += ["--out", str(tmp_path / "out"), "--steps", "1", *QUICK]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "adapters fitted; what they explain in each layer: 1: " in said
    assert "routers fitted; what they explain in each layer: 1: " in said
    trained = load_checkpoint(tmp_path / "out" / "model.pt")
    assert trained.spec == routed_spec(
        dense.spec, (1, 2), 0.5, "block", "predictor", skipped_keys="kept", adapter=adapter, adapter_share=0.5,
        routers="fitted",
    )  # fmt: skip
    assert float(trained.weights["layers.2.adapter.down_proj.weight"].abs().sum()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "0.5"], "--capacity: is for layers that are to route; name them with --route"),
        (["--skipped-keys", "kept"], "--skipped-keys: is for layers that are to route; name them with --route"),
        (
            ["--init", "dense", "--route", "1", "--parts", "mlp", "--skipped-keys", "kept"],
            "--skipped-keys kept: with --parts mlp every token runs attention, and all keys are there; leave it out",
        ),
        (
            ["--init", "dense", "--route", "1", "--parts", "attention", "--adapter", "linear"],
            "--adapter linear: skipped tokens run it instead of the MLP; expected --parts block or mlp, got attention",
        ),
        (
            ["--init", "dense", "--route", "1", "--adapter", "linear", "--adapter-share", "0.5"],
            "--adapter-share: is for --adapter gated; leave it out",
        ),
        (
            ["--init", "dense", "--route", "1", "--adapter", "gated", "--adapter-share", "1.5"],
            "neurons, above 0 and less than all, got 1.5, which is",
        ),
        (
            ["--init", "dense", "--selection", "predictor"],
            "adds predictors to a model that selects by top-k, and the one of --init routes nothing; leave it out",
        ),
        (["--init", "predicts", "--selection", "predictor"], "and the one of --init has predictors; leave it out"),
        (["--init", "first", "--selection", "predictor"], "and the one of --init selects by threshold; leave it out"),
        (
            ["--init", "first", "--selection", "threshold"],
            "--selection threshold: is for layers that are to route; name them with --route",
        ),
        (["--route", "1"], "--route: needs the dense model that is to route, --init PATH"),
        (
            ["--init", "dense", "--spec", "spec.json"],
            "--spec: the checkpoint of --init has a spec of its own; give one",
        ),
        (["--init", "dense", "--route", "9"], "--route 9: expected layers from 0 to 2"),
        (["--init", "dense", "--route", "1", "--capacity", "2"], "spec.routing.capacity: expected a share in (0, 1]"),
        (["--init", "nowhere"], "nowhere: no such file or folder"),
        (["--init", "foreign.pt"], "foreign.pt: holds the architecture other, expected mod_transformer"),
    ],
)
def test_errors_of_a_retrofit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_checkpoint(Path("dense"), lively_checkpoint(dataclasses.replace(SPEC, routing=None)))
    for name, predictor_hidden, selection in (("predicts", 2, "predictor"), ("first", 0, "threshold")):
        routing = dataclasses.replace(SPEC.routing, predictor_hidden=predictor_hidden, selection=selection)
        save_checkpoint(Path(name), lively_checkpoint(dataclasses.replace(SPEC, routing=routing)))
    Path("spec.json").write_text(json.dumps(SPEC.to_dict()))
    torch.save({"format_version": 1, "architecture": "other", "spec": {}, "weights": {}}, "foreign.pt")
    with pytest.raises(SystemExit) as caught:
        main(["--out", "out", *QUICK, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is listed with its meaning and its default, if it has one."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        value = "{" if "choices" in field.metadata else "[N]" if "const" in field.metadata else "N"
        assert f"--{field.name.replace('_', '-')} {value}" in text
        assert f"{field.metadata['help']} ({field.default})" in " ".join(text.split())
    options = "--out DIR, --spec FILE, --threads N, --data PATH, --tokenizer FILE, --parallel {ddp,fsdp}, "
    options += "--init PATH, --route LAYERS, --capacity C, --parts {block,attention,mlp,separate}, "
    options += "--skipped-keys {absent,kept}, --adapter {none,linear,gated}, --adapter-share C"
    assert all(option in text for option in options.split(", "))


def test_the_page_names_options_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    known = set(_parser()._option_string_actions) | set(probe._parser()._option_string_actions)
    torchruns = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
    # Of `make retrofit`, `make retrofit-tasks`, `mod-export generate` and pip.
    others = {"--model", "--only", "--tasks", "--chat", "--constraint"}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= known | torchruns | others
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shutil.copy(Path(__file__).parents[2] / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("example.py").write_text(code)
    runpy.run_path("example.py")
    command = ["--data", "README.md", "--tokenizer", "build/tokenizer.json", "--spec", "build/spec.json"]
    command += ["--out", "out", "--steps", "1"]
    assert main([*command, *QUICK]) == 0


@pytest.fixture
def running(tmp_path: Path, spec_file: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    python = [sys.executable, "-X", "faulthandler"]
    command = [*python, "-m", "mod_models.train", "--out", str(tmp_path / "out"), "--spec", str(spec_file)]
    command += ["--steps", "100000000", "--eval-every", "5", *QUICK]
    # If a script starts the tests in the background, they ignore the signal, and so would their processes.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as process:
        yield process, command
        process.kill()


@pytest.mark.slow
def test_interrupted_from_the_keyboard(running: tuple[subprocess.Popen[str], list[str]]) -> None:
    process, command = running
    assert process.stdout.readline().startswith("step 5/100000000  loss ")
    process.send_signal(signal.SIGINT)
    try:
        _, error = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # Then it prints its stack.
        pytest.fail(f"goes on two minutes after the interrupt:\n{process.communicate()[1]}")
    assert process.returncode == 130
    assert error == "interrupted; the same command goes on from the last evaluation\n"
    folder = Path(command[command.index("--out") + 1])
    assert int(evaluations(folder)[-1]["step"]) >= state(folder)["step"] >= 5
    assert sorted(path.name for path in folder.iterdir()) == ["log.csv", "model.pt", "state.pt"]
