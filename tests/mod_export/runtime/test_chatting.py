"""A transformers model with its tokenizer, from its folder to a conversation: where texts begin and end, how they are
sampled, and that the files which define this move with the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from build_folders import rewrite_manifest
from chat_models import built, random_llama, save_chat_model, text_toml
from chat_templates import LLAMA3
from command_line import invoke, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from mod_export.errors import BuildFolderError, UsageError
from mod_export.folder.manifest import BESIDE_TOKENIZER, read_manifest
from mod_export.runtime.generator import Generator, load_generator
from mod_models.train.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")

BUILD_TOML = text_toml(256, 128, [1])
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the capital of France?"}
WRITTEN = 24


def greedy(model: Any, ids: list[int], **options: Any) -> list[int]:
    """Ids that transformers writes after the prompt."""
    ids_1S = torch.tensor([ids])
    mask_1S = torch.ones_like(ids_1S)
    (found,) = model.generate(ids_1S, attention_mask=mask_1S, max_new_tokens=WRITTEN, do_sample=False, **options)
    return list(map(int, found[len(ids) :]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json names two end tokens: one that greedy text reaches, and another."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    model = random_llama(408, 256, hidden_size=48, intermediate_size=80, num_hidden_layers=3)
    save_chat_model(folder, model, "llama3", LLAMA3)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    prompt = theirs.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, return_dict=False)
    free = greedy(model, prompt, eos_token_id=[401])
    assert len(set(free)) > 8
    end = next(token for token in free[6:] if token not in free[:6])
    config = {"bos_token_id": 400, "eos_token_id": [end, 401], "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its build folder, moved; the source is not read again."""
    root = tmp_path_factory.mktemp("chat")
    built(source, BUILD_TOML, root / "build")
    return Path(shutil.move(root / "build", root / "moved"))


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source).eval()


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> Any:
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Generator]:
    with load_generator(folder) as found:
        yield found


def test_an_answer_is_that_of_transformers(generator: Generator, model: Any, tokenizer: Any) -> None:
    """The prompt, the tokens and the end agree over two turns."""
    messages: list[dict[str, str]] = [SYSTEM, USER]
    for turn in range(2):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = greedy(model, prompt)
        (answer,) = generator.generate(messages, WRITTEN, temperature=0)
        assert list(answer.prompt_ids) == prompt
        ended = expected[-1] in model.generation_config.eos_token_id
        assert answer.ids == (expected[:-1] if ended else expected)
        assert (answer.finish, answer.stop) == (("stop", expected[-1]) if ended else ("length", None))
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ended or turn
        messages = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And Spain?"}]


def test_the_end_can_be_ignored(generator: Generator, model: Any) -> None:
    (answer,) = generator.generate([SYSTEM, USER], WRITTEN, temperature=0, ignore_eos=True)
    assert len(answer.ids) == WRITTEN
    assert set(answer.ids) & set(model.generation_config.eos_token_id)


def test_a_prompt_begins_as_the_tokenizer_says(generator: Generator, tokenizer: Any) -> None:
    for special in (True, False):
        (found,) = generator.generate("a <|eot_id|> b", 1, temperature=0, add_special_tokens=special)
        assert list(found.prompt_ids) == tokenizer.encode("a <|eot_id|> b", add_special_tokens=special)
    prefix = generator.prefix("Once ")
    (found,) = generator.generate("upon", 1, temperature=0, prefix=prefix)
    assert list(found.prompt_ids).count(tokenizer.bos_token_id) == 1
    assert found.prompt_ids[0] == tokenizer.bos_token_id


def test_several_conversations_and_texts_at_once(generator: Generator) -> None:
    found = generator.generate([[SYSTEM, USER], "Once", [USER]], 5, temperature=0)
    alone = [generator.generate(text, 5, temperature=0)[0] for text in ([SYSTEM, USER], "Once", [USER])]  # type: ignore[arg-type]
    assert [text.ids for text in found] == [text.ids for text in alone]


def test_sampling_is_as_the_model_says(generator: Generator) -> None:
    """`do_sample` applies with its settings and the top_k of transformers, unless a request overrides them."""
    assert (generator.defaults.temperature, generator.defaults.top_k, generator.defaults.top_p) == (0.7, 50, 0.9)
    prompt = [SYSTEM, USER]
    (found,) = generator.generate(prompt, WRITTEN, seed=5)
    (same,) = generator.generate(prompt, WRITTEN, seed=5, temperature=0.7, top_p=0.9, top_k=50)
    (changed,) = generator.generate(prompt, WRITTEN, seed=5, top_p=1.0, temperature=2.0)
    assert found.ids == same.ids != changed.ids


def test_special_tokens_stop_a_text_by_name(generator: Generator) -> None:
    """They do not appear in the text, so their names become ids."""
    assert generator.texts("x", stop=["<|eot_id|>", "x"], ignore_eos=True)[0].stop_ids == {404}


def test_a_conversation_continues_no_prefix(generator: Generator) -> None:
    with pytest.raises(
        UsageError, match=r"^a conversation is a whole text, which cannot continue a prefix; leave the "
    ):
        generator.generate([USER], 2, prefix=generator.prefix("a"))


def test_a_closed_generator_ends_the_process_of_its_template(folder: Path) -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    with load_generator(folder) as closed:
        assert closed.ids([USER])
        (renders,) = children() - before
    assert renders not in children()
    assert not psutil.pid_exists(renders)
    with load_generator(folder):
        pass  # One that has read no conversation has no such process.
    assert children() <= before


def test_answers_on_the_command_line(folder: Path, generator: Generator) -> None:
    (expected,) = generator.generate([SYSTEM, USER], WRITTEN, temperature=0)
    for prompt_arguments in (["--prompt", USER["content"], "--chat"], ["--chat", USER["content"]]):
        result = invoke("generate", folder, *prompt_arguments, "--system", "Be brief.", "--max-new-tokens", WRITTEN,
                      "--temperature", 0, "-q")  # fmt: skip
        assert (result.exit_code, result.stdout) == (0, expected.text + "\n"), result.output


def test_a_conversation_on_stdin(folder: Path, generator: Generator) -> None:
    from click.testing import CliRunner

    from mod_export.cli import cli

    command = ["generate", str(folder), "--chat", "--max-new-tokens", "6", "--temperature", "0", "-q"]
    result = CliRunner().invoke(cli, command, input="Hi \U0001f600\n\nAnd?\n")
    messages = [{"role": "user", "content": "Hi \U0001f600"}]
    (first,) = generator.generate(messages, 6, temperature=0)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    (second,) = generator.generate(messages, 6, temperature=0)
    assert (result.exit_code, result.stdout) == (0, f"{first.text}\n{second.text}\n"), result.output


def test_lines_of_stdin_keep_their_characters(folder: Path, generator: Generator) -> None:
    from click.testing import CliRunner

    from mod_export.cli import cli

    command = ["generate", str(folder), "--chat", "--max-new-tokens", "6", "--temperature", "0", "-q"]
    result = CliRunner().invoke(cli, command, input="\ufeffHi\rthere\u2028 \r\n".encode())
    (expected,) = generator.generate([{"role": "user", "content": "Hi\rthere\u2028 "}], 6, temperature=0)
    assert (result.exit_code, result.stdout) == (0, f"{expected.text}\n"), result.output
    result = CliRunner().invoke(cli, command, input=b"\nHi \xff\n")
    assert result.stderr == "error: line 2 of stdin: byte 0xff at offset 3 is not UTF-8; a prompt is text in UTF-8\n"


def test_variables_of_the_template(folder: Path, generator: Generator) -> None:
    (plain,) = generator.generate([USER], WRITTEN, temperature=0)
    (dated,) = generator.generate([USER], WRITTEN, temperature=0, template={"date_string": "the first of May"})
    assert plain.text != dated.text
    variable = 'date_string="the first of May"'
    result = invoke("generate", folder, "--chat", USER["content"], "--template", variable, "--max-new-tokens", WRITTEN,
                  "--temperature", 0, "-q")  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, dated.text + "\n"), result.output


@pytest.mark.parametrize(("options", "message"), [
    (["--system", "x", "a"], "--system: is a message of a conversation; give --chat with it"),
    (["--template", "x=1", "a"], "--template: is about conversations; give --chat with it"),
    (["--chat", "a", "--template", "x=y"], "--template: expected NAME=VALUE with a VALUE in JSON, got 'x=y'"),
    (["--chat", "a", "--template", "x"], "--template: expected NAME=VALUE with a VALUE in JSON, got 'x'"),
    (["--chat", "a", "--template", "x=" + "[" * 50_000], "--template: expected NAME=VALUE with a VALUE in JSON, got "),
    (["--chat", "--ids", "1"], "--ids: a message of --chat is text; give it with --prompt, or leave out --chat"),
    (["--chat", "a", "--selection", "topk-prefill"], "leave out --stop, --roll, --chat and --model"),
])  # fmt: skip
def test_options_that_do_not_go_together(folder: Path, options: list[str], message: str) -> None:
    refused(invoke("generate", folder, *options), message)


def test_a_folder_without_a_template(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "chat_template.jinja").unlink()
    rewrite_manifest(copy, lambda manifest: manifest["files"].pop("chat_template.jinja"))
    refused(invoke("generate", copy, "--chat", "a", "-q"), "this model has no chat template ")
    # With a conversation on stdin, the command refuses before it reads anything.
    refused(invoke("generate", copy, "--chat", "-q"), "this model has no chat template ")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"])
def test_a_changed_file_is_found(folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / name).write_text((copy / name).read_text() + " ")
    with pytest.raises(BuildFolderError, match=name):
        load_generator(copy)


def test_a_configuration_that_lies_is_refused_before_the_build(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (copy / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    refused(invoke("build", copy, "--no-evidence", "-o", tmp_path / "out", "-q"), "eos_token_id: expected a token id, ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_tokenizer_travels_from_conversion_through_training(source: Path, tmp_path: Path) -> None:
    """Trained with routers, built and moved, the tokenizer's files equal those that were converted, and it answers."""
    assert invoke("convert", source, tmp_path / "dense").exit_code == 0
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    options = ["--init", tmp_path / "dense", "--route", "1", "--capacity", 0.5, "--data", texts, "--steps", 2,
               "--batch", 2, "--seq", 32, "--warmup", 1, "--eval-batches", 1, "--threads", 1,
               "--out", tmp_path / "trained"]  # fmt: skip
    assert main([str(option) for option in options]) == 0
    (tmp_path / "c.toml").write_text(BUILD_TOML)
    result = invoke("build", tmp_path / "trained" / "model.pt", "--no-evidence", "-c", tmp_path / "c.toml", "-q",
                  "-o", tmp_path / "build")  # fmt: skip
    assert result.exit_code == 0, result.output
    moved = Path(shutil.move(tmp_path / "build", tmp_path / "moved"))
    for name in ("tokenizer.json", *BESIDE_TOKENIZER):
        assert (moved / name).is_file() == (tmp_path / "dense" / name).is_file()
        if (moved / name).is_file():
            assert (moved / name).read_bytes() == (tmp_path / "dense" / name).read_bytes()
            assert name in read_manifest(moved)["files"]
    with load_generator(moved) as trained:
        (answer,) = trained.generate([SYSTEM, USER], 8)
        assert answer.ran.keys() == {1}
        assert trained.defaults.stop_ids >= {401}
