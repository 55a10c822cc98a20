"""Decoders that drop the space before the first word of a text: a completion keeps it, and an answer has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from chat_models import built, random_llama, save_chat_model, text_toml
from chat_templates import TEMPLATES
from serving import PATIENCE_S, Server, serving

from mod_export.runtime.tokenizer import TokenizersFile

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a random Llama with the tokenizer and the template of Llama 2."""
    source = tmp_path_factory.mktemp("spaces") / "llama"
    save_chat_model(source, random_llama(640, 128), "llama2", TEMPLATES["llama2"])
    with serving(built(source, text_toml(128, 64, [2]))) as found:
        yield found


@pytest.fixture
def file(server: Server) -> TokenizersFile:
    vocabulary = server.writing.generator.vocabulary
    assert isinstance(vocabulary, TokenizersFile)
    assert vocabulary.size <= 640
    return vocabulary


def word_of(file: TokenizersFile) -> int:
    """A token that is a space and a letter or more."""
    return next(token for token in range(file.size) if (file.token_bytes(token) or b"")[:2] == b" d")


def ask(server: Server, path: str, word: int, **body: Any) -> Any:
    """Asks for a greedy text that begins with a word, or with this word again and again."""
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logit_bias": {str(word): 100}, **body}
    answer = httpx2.post(f"{server.url}{path}", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_prompt_and_completion_are_the_text_of_all_tokens(server: Server, file: TokenizersFile, as_ids: bool) -> None:
    word, ids = word_of(file), file.ids(PROMPT)
    prompt = ids if as_ids else PROMPT
    whole = file.decode([*ids, word, word, word])
    assert ask(server, "/v1/completions", word, prompt=prompt, echo=True)["text"] == whole
    assert PROMPT + ask(server, "/v1/completions", word, prompt=prompt)["text"] == whole


def test_offsets_are_those_of_tokens_in_the_text(server: Server, file: TokenizersFile) -> None:
    word = word_of(file)
    for prompt, echo in ((PROMPT, True), (PROMPT, False), ("", False)):
        choice = ask(server, "/v1/completions", word, prompt=prompt, echo=echo, logprobs=0)
        listed, text = choice["logprobs"], choice["text"]
        names = [name for name in listed["tokens"] if name != "<s>"]
        if echo or not prompt:  # The first word of a text is shown without its space.
            names[0] = names[0].removeprefix(" ")
        assert "".join(names) == text
        offsets = listed["text_offset"][-len(names) :]
        assert offsets == [len("".join(names[:number])) for number in range(len(names))]


def test_a_stop_string_that_begins_with_a_space_ends_a_text_at_its_first_token(
    server: Server, file: TokenizersFile
) -> None:
    choice = ask(server, "/v1/completions", word_of(file), prompt=PROMPT, stop=[" d"])
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_an_answer_begins_without_a_space(server: Server, file: TokenizersFile) -> None:
    word = word_of(file)
    said = [{"role": "user", "content": PROMPT}]
    answer = ask(server, "/v1/chat/completions", word, messages=said)["message"]["content"]
    assert answer == file.decode([word, word, word])
    assert not answer.startswith(" ")
    (same,) = server.writing.generator.texts(said, 3)  # As from Python, where messages are a prompt.
    assert same.reader is not None
    assert "".join(map(same.reader.feed, [word, word, word])) + same.reader.close() == answer
