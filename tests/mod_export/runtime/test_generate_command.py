"""`mod-export generate`: its outputs, its refusals, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from build_folders import Silent, file_entry, rewrite_manifest
from click.testing import CliRunner
from command_line import command, invoke, refused
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from mod_export.cli import cli
from mod_export.config import config_from_toml
from mod_export.environment import usable_cores
from mod_export.errors import UsageError
from mod_export.folder.manifest import read_manifest
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.runtime.deployment import load
from mod_export.runtime.generator import Generator, load_generator
from mod_models.checkpoint import load_checkpoint, save_checkpoint

PROMPT = "def f("


def word_file(path: Path, words: int) -> Path:
    """Writes a tokenizer with `words` ids, for the words w0, w1, ..."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def same_tokenizer(path: Path, other: Path) -> bool:
    one, two = (json.loads(file.read_text())["model"] for file in (path, other))
    return bool(one == two)


def test_text_goes_to_stdout_and_a_line_about_it_to_stderr(written: Path, generator: Generator) -> None:
    result = invoke("generate", written, "--prompt", PROMPT, "--max-new-tokens", 20)
    assert result.exit_code == 0, result.output
    (expected,) = generator.generate(PROMPT, 20)
    assert result.stdout == expected.text + "\n"
    assert re.fullmatch(
        r"20 tokens in [\d.]+ s, first token after \d+ ms, then [\d,]+ tokens/s, [\d,]+ steps/s, "
        r"routed layers ran [\d.]+ to [\d.]+ % of the tokens, (\d+ tokens found no slot, )?cache 0\.0 MiB, "
        rf"ort-cpu float32, {usable_cores()} threads?\n",
        result.stderr,
    ), result.stderr
    quiet = invoke("generate", written, "--prompt", PROMPT, "--max-new-tokens", 20, "-q", "--threads", 1)
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, result.stdout, "")


def test_a_process_without_pytorch_writes(written: Path, generator: Generator) -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnx', 'onnx_ir', 'onnxscript')))"
    result = command("generate", written, "--prompt", PROMPT, "--max-new-tokens", 5, code=code, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert result.stdout == generator.generate(PROMPT, 5)[0].text + "\n"


def test_nothing_is_reported_to_anybody(written: Path, tmp_path: Path) -> None:
    """ONNX Runtime would keep a device id and a queue of reports in the user's folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    environment = {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    result = command(
        "generate", written, "--prompt", PROMPT, "--max-new-tokens", 5, "--target", "ort-cpu", env=environment
    )
    assert result.returncode == 0, result.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_json_lines(written: Path, generator: Generator) -> None:
    arguments = ["--ids", "1,2 3", "--prompt", PROMPT, "--max-new-tokens", 6, "--json"]
    result = invoke("generate", written, *arguments, "--temperature", 0.9, "--top-k", 30, "--top-p", 0.9, "--seed", 5)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    expected = generator.generate([PROMPT, [1, 2, 3]], 6, temperature=0.9, top_k=30, top_p=0.9, seed=5)
    for row, completion in enumerate(expected):
        pieces = [line for line in lines if line["row"] == row and "done" not in line]
        assert [piece["token"] for piece in pieces if piece["token"] is not None] == completion.ids
        assert "".join(piece["text"] for piece in pieces) == completion.text
    ends = [line for line in lines if "done" in line]
    assert [end["row"] for end in ends] == [0, 1]
    assert lines[-2:] == ends
    done = ends[1]["done"]
    assert done["ids"] == expected[1].ids
    assert (done["finish"], done["stop"], done["read"]) == ("length", None, 3 + 5)
    assert done["ran"] == {str(site): count for site, count in expected[1].ran.items()}
    assert done["first_token_s"] > 0


def test_several_prompts_one_after_the_other(written: Path, generator: Generator, tmp_path: Path) -> None:
    """Texts come first, then files, then ids, each in the given order."""
    (tmp_path / "p.txt").write_text("x = \N{EURO SIGN}", encoding="utf-8")
    arguments = ["--ids", "1, 2", "--prompt-file", tmp_path / "p.txt", "--prompt", PROMPT, "--ids", "3"]
    result = invoke("generate", written, *arguments, "--max-new-tokens", 4)
    found = generator.generate([PROMPT, "x = \N{EURO SIGN}", [1, 2], [3]], 4)
    assert result.stdout == "".join(f"--- {i} ---\n{done.text}\n" for i, done in enumerate(found))


def test_stop_and_roll_and_the_dense_baseline(written: Path, generator: Generator) -> None:
    (completion,) = generator.generate(PROMPT, 80, rolling=True)
    rolled = invoke("generate", written, "--prompt", PROMPT, "--max-new-tokens", 80, "--roll")
    assert rolled.stdout == completion.text + "\n"
    stop = completion.text[9:11]
    stopped = invoke("generate", written, "--prompt", PROMPT, "--max-new-tokens", 80, "--roll", "--stop", stop)
    assert stopped.stdout == completion.text[: completion.text.index(stop)] + "\n"
    dense = invoke("generate", written, "--prompt", PROMPT, "--max-new-tokens", 8, "--model", "dense")
    with load_generator(written, model="dense") as baseline:
        assert dense.stdout == baseline.generate(PROMPT, 8)[0].text + "\n"
    assert "routed layers" not in dense.stderr


def test_ids_where_there_is_no_text(written_copy: Path, generator: Generator) -> None:
    rewrite_manifest(written_copy, lambda manifest: manifest.update(tokenizer=None))
    result = invoke("generate", written_copy, "--ids", "5 6", "--max-new-tokens", 3)
    expected = " ".join(map(str, generator.generate([5, 6], 3)[0].ids))
    assert result.stdout == f"{expected} \n"
    two = invoke("generate", written_copy, "--ids", "5 6", "--ids", "7", "--max-new-tokens", 3)
    assert two.stdout.startswith(f"--- 0 ---\n{expected}\n--- 1 ---\n")
    for more in ([], ["--selection", "topk-prefill"]):
        found = invoke("generate", written_copy, "--prompt", "x", *more)
        refused(found, "this model's ids stand for no text.*; give prompts as ids")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "a byte order mark"])
def test_a_file_is_the_prompt_to_the_last_character(
    written: Path, generator: Generator, tmp_path: Path, mark: bytes
) -> None:
    prompt = "a\r\nb\rc\n\ufeff\x85\u2028d\n"
    (tmp_path / "p.txt").write_bytes(mark + prompt.encode())
    (expected,) = generator.generate([list(prompt.encode())], 4)
    options = ["--max-new-tokens", 4, "--json"]
    for where, sent in ((tmp_path / "p.txt", b""), ("-", mark + prompt.encode())):
        arguments = ["generate", written, "--prompt-file", where, *options]
        result = CliRunner().invoke(cli, list(map(str, arguments)), input=sent)
        done = json.loads(result.stdout.splitlines()[-1])["done"]
        assert (done["ids"], done["read"]) == (expected.ids, len(prompt.encode()) + 3)


def test_a_file_that_is_no_utf8(written: Path, tmp_path: Path) -> None:
    for content, what in (
        (b"abc\xe9t", "byte 0xe9 at offset 3"),
        (b"\xef\xbb\xbfa\xff", "byte 0xff at offset 4"),
        ("é".encode("utf-16-le"), "byte 0xe9 at offset 0"),
    ):
        (tmp_path / "p.txt").write_bytes(content)
        message = rf"p\.txt: {what} is not UTF-8; a prompt is text in UTF-8$"
        refused(invoke("generate", written, "--prompt-file", tmp_path / "p.txt"), message)
        result = CliRunner().invoke(cli, ["generate", str(written), "--prompt-file", "-"], input=content)
        refused(result, f"^error: stdin: {what} is not UTF-8; a prompt is text in UTF-8$")


def test_seeds_and_top_p_of_the_command(written: Path, generator: Generator) -> None:
    options = ["generate", written, "--prompt", PROMPT, "--max-new-tokens", 20, "--temperature", 5]
    (greedy,) = generator.generate(PROMPT, 20)
    assert invoke(*options, "--top-p", 0, "--seed", 3).stdout == greedy.text + "\n"
    assert len({invoke(*options, "--seed", -1).stdout for _ in range(3)}) == 3
    refused(invoke(*options, "--seed", -2), "seed: got -2, expected a whole number of at least 0; -1 draws a seed")


SCORED = ["--selection", "topk-prefill"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["--prompt", "x", *SCORED, *option], "topk-prefill scores prompts and writes nothing: leave out --stop,")
            for option in (["--roll"], ["--stop", "x"], ["--model", "dense"])
        ),
        ([], "expected a prompt; give it as TEXT, or with --prompt, --prompt-file or --ids"),
        (["--chat", "x"], "this model's tokens are bytes, for which there is no chat template; give plain prompts"),
        (["--ids", "1,x"], "--ids: expected whole numbers, got '1,x'"),
        (["--prompt-file", "absent.txt"], "absent.txt: cannot be read as a prompt ("),
        (["--prompt", "x", "--target", "tensorrt"], "holds no engine that writes text for tensorrt;"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)) or "nothing",
)
def test_refusals(written: Path, arguments: list, message: str) -> None:
    refused(invoke("generate", written, *arguments), re.escape(message))


def test_a_model_that_ranks_scores_prompts(built: Path) -> None:
    ids = list(b"import os\n")
    result = invoke("generate", built, "--prompt", "import os\n", "--ids", "7", "--selection", "topk-prefill", "--json")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    with load(built) as deployment:
        logits_SV = torch.from_numpy(np.array(deployment.run(np.array([ids])))[0]).double()
    expected = torch.nn.functional.cross_entropy(logits_SV[:-1], torch.tensor(ids[1:]))
    assert first["tokens"] == 10
    assert first["nll"] == pytest.approx(float(expected), rel=1e-6)
    share_V = logits_SV[-1].softmax(0)
    assert [token for token, _ in first["following"]] == share_V.topk(5).indices.tolist()
    np.testing.assert_allclose([share for _, share in first["following"]], share_V.topk(5).values, rtol=1e-6)
    # A single token has nothing before it that could predict it.
    assert second["tokens"] == 1
    assert second["nll"] is None
    shown = invoke("generate", built, "--prompt", "import os\n", "--selection", "topk-prefill").stdout
    assert shown.startswith(f"prompt 0: 10 tokens, perplexity {np.exp(first['nll']):.3f}\n  next ")
    assert len(shown.splitlines()) == 6


def test_a_prompt_is_scored_with_or_without_special_tokens(written_copy: Path) -> None:
    path = word_file(written_copy / "tokenizer.json", 256)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    tokenizer.save(str(path))
    entry = {path.name: file_entry(path)}
    rewrite_manifest(written_copy, lambda found: (found.update(tokenizer=path.name), found["files"].update(entry)))
    for more, tokens in (([], 4), (["--no-special-tokens"], 3)):
        result = invoke("generate", written_copy, "w3 w4 w5", *SCORED, "--json", *more)
        assert (result.exit_code, json.loads(result.stdout)["tokens"]) == (0, tokens), result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "an empty prompt has no score; expected at least one token"),
        (["--prompt", "x" * 65], "no bucket holds a batch of 1 x 65 tokens"),
        (["--ids", "-1"], "expected token ids from 0 to 255, got -1 to -1"),
    ],
)
def test_prompts_without_a_score(built: Path, arguments: list[str], message: str) -> None:
    refused(invoke("generate", built, *arguments, *SCORED), message)


@pytest.mark.slow
def test_a_tokenizer_is_kept_and_reads_and_writes_the_text(writing_folder: Path, tmp_path: Path) -> None:
    """Nothing else is made again."""
    copy = Path(shutil.copytree(writing_folder / "build", tmp_path / "out"))
    file = word_file(tmp_path / "words.json", 256)
    arguments = ["-c", writing_folder / "writing.toml", "-o", copy, "--tokenizer", file, "-q"]
    result = invoke("build", writing_folder / "writing.pt", *arguments)
    assert result.exit_code == 0, result.output
    assert same_tokenizer(copy / "tokenizer.json", file)
    assert read_manifest(copy)["tokenizer"] == "tokenizer.json"
    assert "tokenizer.json" in read_manifest(copy)["files"]
    with load_generator(copy) as generator:
        (found,) = generator.generate("w3 w7", 5)
        assert found.prompt_ids == (3, 7)
        assert found.ids == generator.generate([3, 7], 5)[0].ids
        assert found.text.split() == [f"w{token}" for token in found.ids]
    shown = invoke("generate", copy, "--prompt", "w3 w7", "--max-new-tokens", 5)
    assert shown.stdout == found.text + "\n"
    scored = invoke("generate", copy, "--prompt", "w3 w7", "--selection", "topk-prefill")
    assert re.search(r"^  next +\d+ 'w\d+'", scored.stdout, re.MULTILINE)
    (copy / "tokenizer.json").write_bytes(b"{}")
    refused(invoke("generate", copy, "--prompt", "w3"), r"tokenizer\.json")
    # A build without a tokenizer deletes it.
    build(
        Request.checkpoint(writing_folder / "writing.pt").models,
        config_from_toml(writing_folder / "writing.toml"),
        copy,
        Silent(),
        "again",
    )
    assert not (copy / "tokenizer.json").exists()
    assert read_manifest(copy)["tokenizer"] == "bytes"


def test_tokenizers_of_other_models_are_refused(writing_folder: Path, tmp_path: Path) -> None:
    """A tokenizer in the model's own folder is refused as well."""
    model, out, words = tmp_path / "model", tmp_path / "out", tmp_path / "words.json"
    save_checkpoint(model, load_checkpoint(writing_folder / "writing.pt"))
    word_file(words, 300)
    word_file(model / "tokenizer.json", 300)
    for path, options in ((words, ["--tokenizer", words]), (model, [])):
        message = f"{path}: has ids up to 299, and the model 256 ids; name its own"
        refused(invoke("build", model, "-o", out, *options), message)
    assert not out.exists()
    words.write_text("{}")
    for path, said in ((words, "transformers cannot read this tokenizer"), (tmp_path / "no.json", "no such file or ")):
        refused(invoke("build", model, "-o", out, "--tokenizer", path), f"{path}: {said}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
def test_a_token_that_the_model_has_no_row_for(writing_folder: Path, tmp_path: Path) -> None:
    """Fine-tuned models often have a token for padding that was never given a row; only its use is refused."""
    model, out = tmp_path / "model", tmp_path / "out"
    save_checkpoint(model, load_checkpoint(writing_folder / "writing.pt"))
    tokenizer = Tokenizer.from_file(str(word_file(tmp_path / "words.json", 256)))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(model / "tokenizer.json"))
    result = invoke("build", model, "--no-evidence", "-c", writing_folder / "writing.toml", "-o", out, "-q")
    assert result.exit_code == 0, result.output
    with load_generator(out) as generator:
        assert generator.ids("w3 w7") == [[3, 7]]
        with pytest.raises(
            UsageError, match=r"^prompt 0: holds '<pad>', token 256, and the model has tokens 0 to 255 o"
        ):
            generator.ids("w3 <pad> w7")
        with pytest.raises(UsageError, match=r"^prompt 0: expected text, or token ids from 0 to 255, got 256$"):
            generator.ids([3, 256])


@pytest.mark.slow
def test_a_folder_that_only_scores_has_its_tokenizer(writing_folder: Path, tmp_path: Path, small_folder: Path) -> None:
    model = tmp_path / "model"
    save_checkpoint(model, load_checkpoint(writing_folder / "writing.pt"))
    word_file(model / "tokenizer.json", 200)
    result = invoke("build", model, "-c", small_folder / "small.toml", "-o", tmp_path / "out", "-q")
    assert result.exit_code == 0, result.output
    assert same_tokenizer(tmp_path / "out" / "tokenizer.json", model / "tokenizer.json")
    scored = invoke("generate", tmp_path / "out", "--prompt", "w1 w2 w3", "--selection", "topk-prefill")
    assert "prompt 0: 3 tokens, perplexity " in scored.stdout
    message = r"it was built with generation\.build = never; build it again with auto"
    refused(invoke("generate", tmp_path / "out", "--prompt", "w1"), message)
