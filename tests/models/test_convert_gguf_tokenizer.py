"""The tokenizer of a GGUF file next to the one that it was made from, and what cannot be said."""

from __future__ import annotations

import functools
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import as_gguf, metadata_of, tensors_of, write_gguf
from hugging_face import CONFIGS, made, of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from mod_models.convert import read_foreign
from mod_models.convert.foreign import ForeignModel
from mod_models.convert.gguf_tokenizer import BYTE_LEVEL

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = "<think>"
TEXTS = [
    "", " ", "Hello world", "  two spaces", "a  1 b  22  2024", "12345.678 ١٢٣ ½ Ⅷ", "don't WE'LL I'm", "naïve café",
    "cafe\u0301 A\u030a", "你好,世界 😀👩‍👩‍👧", "tab\t\tnew\n\n\n  line\r\nend ", "<|im_start|>user\nhi<|im_end|>\n",
    "x<|endoftext|>y", "<think>so</think>", "def f(x):\n    return x ** 2  # 10\n", "\x00\x7f\u00a0\u3000",
    "\uff21\uff22\u2026—",
]  # fmt: skip
MORE = [Path(__file__).read_text(encoding="utf-8"), (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")]


@functools.cache
def trained(pre: str) -> Tokenizer:
    """Byte-level merges of this page, cut up as the original of that name does it."""
    how = BYTE_LEVEL[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=how.whole_words))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.split is None)
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if how.digits else []
    if how.split is not None:
        from tokenizers import Regex

        split = PRETOKENIZE_REGEX if pre == "qwen2" else how.split
        first.append(pre_tokenizers.Split(Regex(split), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if how.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(bytes_to_unicode().values())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *MORE], trainer)
    tokenizer.add_tokens([USER])
    return tokenizer


def keys_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if token in SPECIAL else 4 if token == USER else 1 for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


def model_with(keys: dict[str, Any], folder: Path, kind: type = LlamaConfig, **more: Any) -> ForeignModel:
    """A tiny model with this vocabulary; a key that is None is left out."""
    keys = {key: value for key, value in {**keys, **more}.items() if value is not None}
    CONFIGS["with a vocabulary"] = of(kind, vocab_size=len(keys["tokenizer.ggml.tokens"]))
    try:
        model = made("with a vocabulary")
    finally:
        del CONFIGS["with a vocabulary"]
    write_gguf(folder / "model.gguf", {**metadata_of(model), **keys}, tensors_of(model))
    return read_foreign(folder / "model.gguf")


def files_of(model: ForeignModel, folder: Path) -> dict[str, Any]:
    """What is beside the model, written into a folder."""
    folder.mkdir(exist_ok=True)
    for companion in model.companions:
        (folder / companion.name).write_bytes(companion.read_bytes())
    return {one.name: json.loads(one.read_bytes()) for one in model.companions}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_merges(pre: str, tmp_path: Path) -> None:
    """Ids and decoded texts agree with the tokenizer from which the file was made."""
    theirs = trained(pre)
    model = model_with(keys_of(theirs, pre), tmp_path)
    assert model.notes == ()
    files_of(model, tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert ours.get_vocab() == theirs.get_vocab()
    for text in [*TEXTS, *MORE]:
        found = ours.encode(text).ids
        assert found == theirs.encode(text).ids, text
        assert ours.decode(found, skip_special_tokens=False) == theirs.decode(found, skip_special_tokens=False)
        assert ours.decode(found) == theirs.decode(found)


@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", LlamaConfig), ("llama-bpe", LlamaConfig), ("tekken", LlamaConfig),
                                           ("qwen2", Qwen2Config), ("smollm", LlamaConfig)])  # fmt: skip
def test_transformers_reads_the_same_tokenizer(pre: str, kind: type, tmp_path: Path) -> None:
    """The file is the same. transformers departs from the original tokenizers in two cases: for `smollm` it does not
    part digits from spaces before them, and for `qwen2` it normalizes nothing.
    """
    files_of(model_with(keys_of(trained(pre), pre), tmp_path, kind), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    left_out = {"smollm": "  1", "qwen2": "\u0301"}.get(pre, "\ud800")
    for text in [one for one in [*TEXTS, MORE[1]] if left_out not in one and not (pre == "smollm" and "½" in one)]:
        assert ours(text).input_ids == theirs(text).input_ids, text


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    keys = keys_of(trained("llama-bpe"), "llama-bpe")
    more = {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_eos_token": True,
    }
    found = files_of(model_with(keys, tmp_path, **more), tmp_path / "out")
    assert found["generation_config.json"] == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    assert found["tokenizer_config.json"] == {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages }}",
    }  # fmt: skip
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(ours, PreTrainedTokenizerFast)
    plain = ours("one", add_special_tokens=False).input_ids
    assert ours("one").input_ids == [1, *plain, 2]
    assert ours("one", "one").input_ids == [1, *plain, 2, 1, *plain, 2]
    assert ours.decode([1, *plain, 2], skip_special_tokens=True) == "one"


ENDS: list[tuple[list[str], dict[str, int], list[str]]] = [
    # (names in the vocabulary, keys, names of the tokens that end a text)
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 0}, ["<|endoftext|>", "<|im_end|>"]),
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 0, "eot": 2}, ["<|endoftext|>", "<|im_end|>"]),
    (["<s>", "</s>", "<|end|>", "<|user|>"], {"eos": 1}, ["</s>", "<|end|>"]),
    (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos": 1}, ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
    (["<eos>", "<end_of_turn>", "<start_of_turn>"], {"eos": 0}, ["<eos>", "<end_of_turn>"]),
    (["<mine>", "<other>"], {"eos": 0}, ["<mine>"]),
    (["<mine>", "<other>"], {}, []),
    (["<|return|>", "<|call|>", "<|end|>"], {"eos": 0}, ["<|return|>", "<|call|>"]),
    (["<|calls|>", "<|flush|>", "<|end|>"], {"eos": 2}, ["<|flush|>", "<|calls|>"]),
    (["<eos>", "<turn|>", "<|tool_response>", "</s>"], {"eos": 1}, ["<turn|>", "<eos>", "<|tool_response>"]),
    (
        ["<a>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        {"eos": 0},
        ["<a>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    ),
    (["<a>", "<|fim_pad|>", "<b>"], {"eos": 0, "fim_pad": 2}, ["<a>", "<b>"]),
]


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user"])
@pytest.mark.parametrize(("special", "keys", "expected"), ENDS, ids=lambda value: str(value)[:60])
def test_texts_end_where_llama_cpp_ends_them(
    tmp_path: Path, special: list[str], keys: dict[str, int], expected: list[str], kind: int
) -> None:
    """By its keys and by the names of tokens, of whatever type; what ends a text is never shown in it."""
    letters = sorted(bytes_to_unicode().values())
    tokens = [*special, *letters]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [kind] * len(special) + [1] * len(letters),
    }  # fmt: skip
    metadata["tokenizer.ggml.tokens"] = [*tokens, "ab"]
    metadata["tokenizer.ggml.token_type"].append(1)
    numbers = {f"tokenizer.ggml.{name}_token_id": number for name, number in keys.items()}
    files = files_of(model_with(metadata, tmp_path, **numbers), tmp_path / "out")
    ends = files["generation_config.json"].get("eos_token_id", [])
    assert sorted([ends] if isinstance(ends, int) else ends) == sorted(map(tokens.index, expected))
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert ours.decode([tokens.index(name) for name in expected]) == ""


def test_an_id_that_is_no_token_is_ignored(tmp_path: Path) -> None:
    keys = keys_of(trained("gpt-2"), "gpt-2")
    count = len(keys["tokenizer.ggml.tokens"])
    model = model_with(keys, tmp_path, **{"tokenizer.ggml.padding_token_id": count + 7})
    files = files_of(model, tmp_path / "out")
    assert model.notes == (
        f"tokenizer.ggml.padding_token_id is {count + 7}, and the file has {count} tokens, so this key is ignored",
    )
    assert "pad_token" not in files["tokenizer_config.json"]
    assert "pad_token_id" not in files["generation_config.json"]


def ids_of(model: ForeignModel, folder: Path) -> dict[str, Any]:
    config = files_of(model, folder)["generation_config.json"]
    return {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad") if f"{name}_token_id" in config}


def test_ids_that_a_file_does_not_say(tmp_path: Path) -> None:
    """llama.cpp has defaults for SentencePiece. Those that it has for byte-level merges are ordinary tokens."""
    keys = sentencepiece_keys(True)
    count = len(keys["tokenizer.ggml.tokens"])
    names = ("bos_token_id", "eos_token_id", "unknown_token_id")
    left_out = {f"tokenizer.ggml.{name}": None for name in names}
    whole = files_of(model_with(keys, tmp_path), tmp_path / "out")
    model = model_with(keys, tmp_path, **left_out)
    assert files_of(model, tmp_path / "out") == whole
    assert model.notes == ()
    model = model_with(keys, tmp_path, **dict.fromkeys(left_out, 77777))
    assert files_of(model, tmp_path / "out") == whole
    assert model.notes == tuple(
        f"tokenizer.ggml.{name} is 77777, and the file has {count} tokens, so {token} is taken, as in llama.cpp"
        for name, token in zip(names, ("<s>", "</s>", "<unk>"), strict=True)
    )
    merges = keys_of(trained("gpt-2"), "gpt-2")
    assert ids_of(model_with(merges, tmp_path, **{f"tokenizer.ggml.{names[0]}": None}), tmp_path / "out") == {
        "eos": [2, 0], "pad": 0,
    }  # fmt: skip


def test_a_small_vocabulary_without_its_ids(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": [0.0]}
    model = model_with(keys, tmp_path)
    assert model.notes == ("no token of this file ends a text, so texts go on to their limit",)
    assert ids_of(model, tmp_path / "out") == {}


def test_no_token_ends_a_text(tmp_path: Path) -> None:
    keys = keys_of(trained("gpt-2"), "gpt-2")
    keys["tokenizer.ggml.tokens"] = ["<a>", "<b>", "<c>", *keys["tokenizer.ggml.tokens"][3:]]
    keys["tokenizer.ggml.eos_token_id"] = 9999
    model = model_with(keys, tmp_path)
    assert model.notes == (
        f"tokenizer.ggml.eos_token_id is 9999, and the file has {len(keys['tokenizer.ggml.tokens'])} tokens, so this "
        "key is ignored",
        "no token of this file ends a text, so texts go on to their limit",
    )
    assert ids_of(model, tmp_path / "out") == {"bos": 1, "pad": 0}


def test_a_token_between_files_that_is_out_of_range(tmp_path: Path) -> None:
    """It is found by its name then, if there is one."""
    keys = keys_of(trained("gpt-2"), "gpt-2")
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[1] = "<|fim_pad|>"
    more = {"tokenizer.ggml.fim_pad_token_id": 9999, "tokenizer.ggml.fim_sep_token_id": 9999}
    model = model_with(keys, tmp_path, **more)
    assert ids_of(model, tmp_path / "out")["eos"] == [2, 1, 0]
    said = f"is 9999, and the file has {len(tokens)} tokens, so"
    assert model.notes == (
        f"tokenizer.ggml.fim_pad_token_id {said} <|fim_pad|> is taken, as in llama.cpp",
        f"tokenizer.ggml.fim_sep_token_id {said} this key is ignored",
    )


def test_templates_for_tools_and_documents(tmp_path: Path) -> None:
    """transformers and the runtime read templates by name."""
    keys = keys_of(trained("gpt-2"), "gpt-2")
    more = {"tokenizer.chat_template.tool_use": "T{{ messages }}", "tokenizer.chat_template.rag": "R",
            "tokenizer.chat_templates": ["tool_use", "rag"]}  # fmt: skip
    found = files_of(model_with(keys, tmp_path, **more), tmp_path / "out")["tokenizer_config.json"]["chat_template"]
    assert {one["name"]: one["template"] for one in found} == {
        "default": "{{ messages }}", "tool_use": "T{{ messages }}", "rag": "R",
    }  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template["rag"] == "R"
    more["tokenizer.chat_template"] = 5
    found = files_of(model_with(keys, tmp_path, **more), tmp_path / "out")["tokenizer_config.json"]["chat_template"]
    assert [one["name"] for one in found] == ["tool_use", "rag"]


@pytest.mark.parametrize(
    ("name", "value", "kept", "said"),
    [
        ("top_k", 40.0, ("top_k", 40), ""),
        ("top_k", 2.5, None, "2.5, expected a whole number"),
        ("top_k", True, None, "True, expected a whole number"),
        ("top_p", 1, ("top_p", 1), ""),
        ("top_p", 1.5, None, "1.5, expected a number from 0 to 1"),
        ("top_p", -0.5, None, "-0.5, expected a number from 0 to 1"),
        ("temp", 1, ("temperature", 1), ""),
        ("temp", "0.7", None, "'0.7', expected a number of at least 0"),
        ("temp", -1.0, None, "-1.0, expected a number of at least 0"),
        ("temp", float("inf"), None, "inf, expected a number of at least 0"),
        ("temp", float("nan"), None, "nan, expected a number of at least 0"),
        ("temp", [1.0, 2.0], None, "[...], expected a number of at least 0"),
    ],
)
def test_recommendations_of_another_kind(
    name: str, value: object, kept: tuple[str, float] | None, said: str, tmp_path: Path
) -> None:
    """A whole number is one in every type. What no model can be used with is left out; it is no reason to refuse."""
    model = model_with(keys_of(trained("gpt-2"), "gpt-2"), tmp_path, **{f"general.sampling.{name}": value})
    config = files_of(model, tmp_path / "out")["generation_config.json"]
    sampling = {key: config[key] for key in ("do_sample", "temperature", "top_k", "top_p") if key in config}
    assert sampling == ({} if kept is None else {"do_sample": True, kept[0]: kept[1]})
    if kept is not None:
        assert type(sampling[kept[0]]) is type(kept[1])
        assert model.notes == ()
    else:
        (note,) = model.notes
        pattern = re.escape(f"general.sampling.{name} is {said}, so it is left out").replace(re.escape("[...]"), ".*")
        assert re.fullmatch(pattern, note)


@pytest.mark.parametrize(("top_k", "kept"), [(20, 20), (-1, 0)])
def test_what_the_publisher_recommends_for_sampling(tmp_path: Path, top_k: int, kept: int) -> None:
    more = {"general.sampling.temp": 0.7, "general.sampling.top_p": 0.95, "general.sampling.top_k": top_k}
    files = files_of(model_with(keys_of(trained("gpt-2"), "gpt-2"), tmp_path, **more), tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").write_text(json.dumps(files["generation_config.json"]))
    sampling = {name: files["generation_config.json"][name] for name in ("do_sample", "temperature", "top_k", "top_p")}
    assert sampling == {"do_sample": True, "temperature": 0.7, "top_k": kept, "top_p": 0.95}


def sentencepiece_keys(prefix: bool) -> dict[str, Any]:
    """A vocabulary in SentencePiece's form: bytes, letters, and pieces whose scores give the order of merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>"]
    kinds = [2, 3, 3, *([6] * 256), 3]
    letters = sorted(set("".join(MORE) + "▁") - {" "})
    pieces: dict[str, int] = {}
    text = " ".join(MORE).replace(" ", "▁")
    for length in (2, 3, 4, 6):
        for start in range(0, 4000, 7):
            piece = text[start : start + length]
            halves = any(piece[:cut] in pieces or cut == 1 for cut in range(1, length))
            if piece not in pieces and halves and "▁" not in piece[1:]:
                pieces[piece] = len(pieces)
    # Only pieces that merge two others can ever be made.
    tokens += [*pieces, *letters]
    kinds += [1] * (len(pieces) + len(letters))
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip


def merged_by_score(text: str, keys: dict[str, Any]) -> list[int]:
    """Merges like `llm_tokenizer_spm` of llama.cpp: the pair with the best score first, the leftmost of equals."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    number_of = {token: number for number, token in enumerate(tokens)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        best = max(
            ((scores[number_of[a + b]], -at) for at, (a, b) in enumerate(pairwise(pieces))
             if a + b in number_of), default=None)  # fmt: skip
        if best is None:
            break
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [number_of[piece]] if piece in number_of else [3 + byte for byte in piece.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    keys = sentencepiece_keys(prefix)
    files_of(model_with(keys, tmp_path), tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in [one for one in TEXTS if one and "\x00" not in one] + [MORE[0][:1500]]:
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == merged_by_score((" " if prefix else "") + text, keys), text
        assert ours.decode(found) == text
        assert ours.encode(text).ids == [1, *found]
    # A special token stays whole, and the text after it begins anew.
    parts = [merged_by_score((" " if prefix else "") + text, keys) for text in ("one", "two")]
    assert ours.encode("one</s>two").ids == [1, *parts[0], 2, *parts[1]]


def test_sentencepiece_next_to_transformers(tmp_path: Path) -> None:
    """It takes a space in front of a text for the one that is added there."""
    files_of(model_with(sentencepiece_keys(True), tmp_path), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [text for text in TEXTS if text and text[0] not in " <" and "<|" not in text]
    assert len(texts) > 8
    for text in [*texts, MORE[0][:1500]]:
        assert ours(text).input_ids == theirs(text).input_ids, text


@pytest.mark.parametrize("name", ["Phi 3 mini", "Phi-3-mini", "tuned"])
def test_phi_3_takes_the_space_after_a_special_token(name: str, tmp_path: Path) -> None:
    """It keeps that after three tokens, whatever their ids; a file of Llama's architecture says by name what it is."""
    from transformers import Phi3Config

    keys = {**sentencepiece_keys(True), "general.name": name}
    more = {"<|end|>": 3, "<|endoftext|>": 3, "<tool>": 4}
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"] = [*tokens, *more], [*kinds, *more.values()]
    keys["tokenizer.ggml.scores"] = [*keys["tokenizer.ggml.scores"], *[-9999.0] * len(more)]
    keys["tokenizer.ggml.eos_token_id"] = keys["tokenizer.ggml.bos_token_id"] = tokens.index("<|user|>")
    CONFIGS["phi"] = of(Phi3Config, vocab_size=len(keys["tokenizer.ggml.tokens"]))
    try:
        as_gguf("phi", tmp_path / "model.gguf", change=lambda metadata, tensors: metadata.update(keys))
    finally:
        del CONFIGS["phi"]
    found = files_of(read_foreign(tmp_path / "model.gguf"), tmp_path / "out")
    strips = {one["content"]: one["rstrip"] for one in found["tokenizer.json"]["added_tokens"]}
    expected = {
        "<unk>": False, "<s>": False, "</s>": True, "<|user|>": True, "<|end|>": True, "<|endoftext|>": False,
        "<tool>": True,
    }  # fmt: skip
    assert strips == expected
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for special in more:
        gap = ours.encode(f"a{special}  b").ids == ours.encode(f"a{special}b").ids
        assert gap == expected[special], special
    as_llama = files_of(model_with(keys, tmp_path), tmp_path / "out")["tokenizer.json"]["added_tokens"]
    assert any(one["rstrip"] for one in as_llama) == (name == "Phi-3-mini")


def test_a_whole_tokenizer_in_the_file(tmp_path: Path) -> None:
    theirs = trained("gpt-2")
    more = {"tokenizer.huggingface.json": theirs.to_str(), "tokenizer.ggml.pre": "mine"}
    found = files_of(model_with(keys_of(theirs, "gpt-2"), tmp_path, **more), tmp_path / "out")
    assert found["tokenizer.json"] == json.loads(theirs.to_str())


PANICS = (
    '{"version": "1.0", "model": {"type": "BPE", "merges": [["a", "b"]], "continuing_subword_prefix": "##", "vocab": '
    '{"a": 0, "b": 1, "ab": 2}}}'
)
"""The package tokenizers does not check the length of the prefix before it cuts it off a token."""


@pytest.mark.parametrize(
    "stored", ["{", "{}", "[1]", "null", '{"version": "1.0", "model": {"type": "XYZ"}}', PANICS, 7]
)
def test_a_whole_tokenizer_that_is_none(stored: object, tmp_path: Path) -> None:
    """The vocabulary in the other keys is taken, if it can be."""
    theirs = trained("gpt-2")
    note = "tokenizer.huggingface.json holds no tokenizer that can be read, so it is ignored"
    keys = {**keys_of(theirs, "gpt-2"), "tokenizer.huggingface.json": stored}
    model = model_with(keys, tmp_path)
    assert model.notes == (note,)
    files_of(model, tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab() == theirs.get_vocab()
    other = model_with(keys, tmp_path, **{"tokenizer.ggml.pre": "mine"})
    assert other.notes[0] == note
    assert other.notes[1].startswith("its tokenizer cannot be written as tokenizer.json (tokenizer.ggml.pre: 'mine'")
    assert [one.name for one in other.companions] == ["tokenizer_config.json", "generation_config.json"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tokenizer.ggml.pre": "mine"}, "tokenizer.ggml.pre: 'mine' is not known here; known: gpt-2, smollm, "
         "starcoder, llama-bpe, llama3, llama-v3, dbrx, qwen2, deepseek-r1-qwen, tekken"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: 't5' of 'llama' is not known here"),
        ({"tokenizer.ggml.add_space_prefix": True},
         "tokenizer.ggml.add_space_prefix: true has no agreed meaning for byte-level merges"),
        ({"tokenizer.ggml.precompiled_charsmap": "x"},
         "tokenizer.ggml.precompiled_charsmap: unknown key with the value 'x'"),
        ({"tokenizer.ggml.add_sep_token": True}, "tokenizer.ggml.add_sep_token: unknown key with the value True"),
        ({"tokenizer.ggml.merges": ["a b", "no pair here"]}, "tokenizer.ggml.merges: names what is no token"),
    ],
)  # fmt: skip
def test_what_cannot_be_said(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """The model is converted nevertheless, with its special tokens and its chat template."""
    model = model_with(keys_of(trained("gpt-2"), "gpt-2"), tmp_path, **more)
    assert model.notes == (
        f"its tokenizer cannot be written as tokenizer.json ({reason}); give the original one with --tokenizer",
    )
    assert [one.name for one in model.companions] == ["tokenizer_config.json", "generation_config.json"]


def test_vocabularies_that_cannot_be_said(tmp_path: Path) -> None:
    keys = keys_of(trained("gpt-2"), "gpt-2")
    tokens = keys["tokenizer.ggml.tokens"]
    twice = {"tokenizer.ggml.tokens": [*tokens[:-1], tokens[5]]}
    (note,) = model_with(keys, tmp_path, **twice).notes
    assert "(tokenizer.ggml.tokens: a token stands there twice)" in note
    (note,) = model_with(sentencepiece_keys(True), tmp_path, GemmaConfig).notes
    assert "(tokenizer.ggml.model: 'llama' of 'gemma' is not known here)" in note
    spaces = sentencepiece_keys(True)
    spaces["tokenizer.ggml.tokens"][259], spaces["tokenizer.ggml.token_type"][259] = "▁▁", 4
    (note,) = model_with(spaces, tmp_path).notes
    assert "(tokenizer.ggml.token_type: a token that is matched in texts as it is holds a space)" in note
    # The writer of the package `gguf` writes only UTF-8, so a byte of the last token is changed in the file.
    model_with(keys, tmp_path)
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(USER.encode(), b"\xff" + USER.encode()[1:]))
    (note,) = read_foreign(tmp_path / "model.gguf").notes
    assert "(tokenizer.ggml.tokens: holds a token that is no UTF-8)" in note


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    as_gguf("Llama", tmp_path / "model.gguf")
    model = read_foreign(tmp_path / "model.gguf")
    assert (model.companions, model.notes) == ((), ())


def test_scores_as_numbers_of_any_type(tmp_path: Path) -> None:
    """Merges are ordered by score, in any stored type."""
    keys = sentencepiece_keys(True)
    as_it_was = files_of(model_with(keys, tmp_path), tmp_path / "out")["tokenizer.json"]
    keys["tokenizer.ggml.scores"] = [int(np.round(score)) for score in keys["tokenizer.ggml.scores"]]
    assert files_of(model_with(keys, tmp_path), tmp_path / "out")["tokenizer.json"] == as_it_was
