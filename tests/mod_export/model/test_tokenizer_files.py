"""A tokenizer that was published in any form gives the ids and texts of transformers when a build keeps it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizer_folders import FAMILIES, SAID, TEXTS, opened, write_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mod_export.errors import UsageError
from mod_export.model.tokenizer_files import files_in, has_tokenizer, read_tokenizer, settings_in
from mod_export.runtime.request import defaults_of
from mod_export.runtime.tokenizer import TokenizersFile

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
NASTY = [
    *SAID, "\n", "\r\n", "a\r\nb", "\t\tx", "Hello", " Hello", "Hello ", "Hello  world", "don't won't I'm he'll we've",
    "x != y , right ? yes .", "the word 'social' , ok ! 's 'm n't 've 're", "2024 31337 3.14", "<s>", "</s>x",
    "a</s> b", "[INST] hi [/INST]", " [INST]  hi", "hi<|im_end|> there", "hi <|im_end|>", "<|im_end|>", "<pad><pad>",
    "\u00e9", "\ufb01 ligature", "\u2581under", "\u00a0nbsp", "\u200b\u200d", "\U0001f468\u200d\U0001f469", "\x00",
    "\x7f", "\ufffd", "\ufeffBOM", "\u2028sep\u2029", "A" * 50, "<0x41>", "<0x0A>", "\u0130stanbul \u017f", "WORD wORD",
    "_x_ x_ _x", "a<mask>b", "a <mask> b", "aXb", "aXXb X", " . , ? ! ' ", "<|a|> <|b|><|new|> <|image|>",
]  # fmt: skip
"""Texts with special tokens, odd spaces, unusual characters and punctuation after spaces."""
SENTENCES = [*TEXTS * 3, "x != y and a.b == c ; the word 'social' and don't , won't ? yes !\n"] * 8


def _write(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    (folder / CONFIG).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "always")
    tokenizer.decoder = decoders.Metaspace("\u2581", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=250, show_progress=False, special_tokens=["[UNK]", "[SEP]"])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def of_family(name: str, **changed: Any) -> Callable[[Path], None]:
    return lambda folder: (write_folder(folder, name, **changed), None)[1]


def with_files(name: str, files: dict[str, Any], **changed: Any) -> Callable[[Path], None]:
    """A folder of a family with more files, whose tokenizer_config.json lists no added tokens."""

    def write(folder: Path) -> None:
        write_folder(folder, name)
        config = json.loads((folder / CONFIG).read_text())
        del config["added_tokens_decoder"]
        (folder / CONFIG).write_text(json.dumps({**config, **changed}))
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))

    return write


def with_words(name: str, *tokens: AddedToken) -> Callable[[Path], None]:
    """A folder of a family with more tokens in its tokenizer.json."""

    def write(folder: Path) -> None:
        write_folder(folder, name)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        tokenizer.add_tokens(list(tokens))
        tokenizer.save(str(folder / TOKENIZER))

    return write


def for_training(folder: Path) -> None:
    write_folder(folder, "llama3")
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(folder / TOKENIZER))


def normalized(name: str, tokenizer_class: str) -> Callable[[Path], None]:
    """A folder of a family whose special tokens are matched in normalized text."""

    def write(folder: Path) -> None:
        write_folder(folder, name, tokenizer_class=tokenizer_class)
        content = json.loads((folder / TOKENIZER).read_text())
        for token in content["added_tokens"]:
            token["normalized"] = True
        (folder / TOKENIZER).write_text(json.dumps(content))
        config = json.loads((folder / CONFIG).read_text())
        for token in config["added_tokens_decoder"].values():
            token["normalized"] = True
        (folder / CONFIG).write_text(json.dumps(config))

    return write


def versioned(folder: Path) -> None:
    """A folder whose configuration names another file for this release of transformers."""
    write_folder(folder, "llama3", fast_tokenizer_files=["tokenizer.json", "tokenizer.4.0.0.json"])
    (folder / TOKENIZER).rename(folder / "tokenizer.4.0.0.json")
    write_folder(folder / "other", "smollm2")
    (folder / "other" / TOKENIZER).rename(folder / TOKENIZER)


def cleaning(make: Callable[[], Tokenizer], cleans: bool) -> Callable[[Path], None]:
    return lambda folder: _write(folder, make(), clean_up_tokenization_spaces=cleans)


def sentence_piece_file(kind: str, model_type: str, tokenizer_class: str) -> Callable[[Path], None]:
    """A folder with tokenizer.model alone, as the package sentencepiece writes it."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "text").write_text("".join(SENTENCES))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type=kind, vocab_size=360,
            byte_fallback=True, character_coverage=1.0, minloglevel=2, num_threads=1,
            normalization_rule_name="identity", pad_id=-1 if model_type == "llama" else 3,
        )  # fmt: skip
        (folder / CONFIG).write_text(json.dumps({"tokenizer_class": tokenizer_class}))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    return write


def vocabulary_and_merges(model_type: str, tokenizer_class: str) -> Callable[[Path], None]:
    """A folder with vocab.json and merges.txt, and no tokenizer.json."""

    def write(folder: Path) -> None:
        write_folder(folder, "qwen2")
        model = json.loads((folder / TOKENIZER).read_text())["model"]
        (folder / TOKENIZER).unlink()
        (folder / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": len(model["vocab"])}))
        merges = "\n".join(" ".join(pair) for pair in model["merges"])
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        (folder / CONFIG).write_text(json.dumps({"tokenizer_class": tokenizer_class, "eos_token": "<|endoftext|>"}))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    return write


FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
ADDED = {"<|im_end|>": 500, "<|im_start|>": 501}
MASK = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
MANNERS: dict[str, Callable[[Path], None]] = {
    **{family: of_family(family) for family in FAMILIES},
    "a new end": of_family("llama3", added_tokens_decoder={}, eos_token="<|new|>"),
    "unnamed, old key": of_family("llama3", added_tokens_decoder={}, additional_special_tokens=["<|a|>", "<|b|>"]),
    "unnamed": of_family("llama3", extra_special_tokens=["<|a|>", "<mask>"]),
    "named by the model": of_family("llama3", extra_special_tokens={"image_token": "<|image|>"}),
    "named by the model, old": of_family("llama3", image_token="<|image|>"),
    "an end as an object": of_family("llama3", eos_token={"__type": "AddedToken", "content": "<|end_of_text|>"}),
    "lstrip": of_family("qwen2", mask_token={"__type": "AddedToken", "special": True, **MASK}),
    "rstrip": of_family("smollm2", mask_token={"__type": "AddedToken", **MASK, "lstrip": False, "rstrip": True}),
    "special tokens are text": of_family("llama3", split_special_tokens=True),
    "no bos by flag": of_family("llama3", add_bos_token=False),
    "eos by flag": of_family("llama3", add_eos_token=True),
    "bos by flag": of_family("qwen2", add_bos_token=True, bos_token="<|endoftext|>"),
    "space by flag": of_family("smollm2", add_prefix_space=True),
    "legacy": of_family("llama2", legacy=True),
    "not legacy": of_family("llama2", legacy=False),
    "mistral as llama": of_family("mistral", legacy=True, add_eos_token=True),
    "cleans BPE": of_family("qwen2", clean_up_tokenization_spaces=True),
    "cleans BPE by force": of_family("smollm2", clean_up_tokenization_spaces=True, **{FORCED: True}),
    "added_tokens.json": with_files("smollm2", {"added_tokens.json": {"<|a|>": 400, "<|b|>": 401}}, eos_token="<|a|>"),
    "added_tokens.json with gaps": with_files("smollm2", {"added_tokens.json": ADDED}),
    "added_tokens.json swapped": with_files("smollm2", {"added_tokens.json": {"<|b|>": 404, "<|a|>": 403}}),
    "added_tokens.json of sentencepiece": with_files("phi3", {"added_tokens.json": {"<|a|>": 900}}),
    "special_tokens_map.json": with_files("mistral", {"special_tokens_map.json": {
        "bos_token": "<s>", "eos_token": {"content": "[/INST]", "normalized": False}}}),
    "special_tokens_map.json with lstrip": with_files("smollm2", {"special_tokens_map.json": {"mask_token": MASK}}),
    "map and added": with_files("smollm2", {
        "added_tokens.json": {"<|a|>": 403}, "special_tokens_map.json": {"additional_special_tokens": ["<|a|>"]}}),
    "words": with_words("mistral", AddedToken("X", single_word=True), AddedToken("WORD", normalized=True)),
    "words that strip": with_words("qwen3", AddedToken("<mask>", lstrip=True, rstrip=True)),
    "words of bytes": with_words("smollm2", AddedToken("\u6771\u4eac"), AddedToken(" .")),
    "words of llama": with_words("llama2", AddedToken("X", special=True), AddedToken("WORD")),
    "a name of the model's own for templates": of_family("smollm2", extra_special_tokens={"think": "<|im_start|>"}),
    "special tokens that are normalized": normalized("llama2", "PreTrainedTokenizerFast"),
    "special tokens that are normalized, of Llama": normalized("llama2", "LlamaTokenizer"),
    "a file for this release": versioned,
    "for training": for_training,
    "unigram": cleaning(_unigram, cleans=False),
    "unigram cleans": cleaning(_unigram, cleans=True),
    "word pieces": cleaning(_word_piece, cleans=False),
    "word pieces clean": cleaning(_word_piece, cleans=True),
    "sentencepiece BPE": sentence_piece_file("bpe", "llama", "LlamaTokenizer"),
    "sentencepiece BPE of mistral": sentence_piece_file("bpe", "mistral", "LlamaTokenizer"),
    "sentencepiece BPE of gemma": sentence_piece_file("bpe", "gemma", "GemmaTokenizer"),
    "sentencepiece unigram": sentence_piece_file("unigram", "llama", "LlamaTokenizer"),
    "merges of GPT-2": vocabulary_and_merges("gpt2", "GPT2Tokenizer"),
    "merges of Qwen2": vocabulary_and_merges("qwen2", "Qwen2Tokenizer"),
    "merges of RoBERTa": vocabulary_and_merges("roberta", "RobertaTokenizer"),
}  # fmt: skip
"""Manners of publishing a tokenizer -> writes a folder of that manner."""


@pytest.mark.parametrize("manner", MANNERS)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, manner: str) -> None:
    MANNERS[manner](tmp_path / "folder")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "folder")
    ours = opened(tmp_path / "folder")
    assert ours.special == theirs.special_tokens_map
    assert ours.end == theirs.eos_token_id
    assert len(NASTY) > 50
    for text in NASTY:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.ids(text, special) == ids, text
            expected = theirs.decode(ids, skip_special_tokens=True)
            reader = ours.reader()
            assert ours.decode(ids) == expected, text
            assert "".join(map(reader.feed, ids)) + reader.close() == expected, text


def test_what_was_kept_reads_the_same_again(tmp_path: Path) -> None:
    """A converted checkpoint holds what was kept, and its build reads that again."""
    MANNERS["llama2"](tmp_path / "folder")
    first = read_tokenizer(tmp_path / "folder")
    (tmp_path / "kept").mkdir()
    first.write(tmp_path / "kept")
    again = read_tokenizer(tmp_path / "kept")
    assert again.contents[TOKENIZER] == first.contents[TOKENIZER]
    assert json.loads(again.contents[CONFIG]) == json.loads(first.contents[CONFIG])
    assert read_tokenizer(tmp_path / "kept" / TOKENIZER).contents == again.contents


def test_a_file_of_another_name_is_a_tokenizer_json(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm2")
    (tmp_path / TOKENIZER).rename(tmp_path / "mine.json")
    assert not has_tokenizer(tmp_path)
    files = read_tokenizer(tmp_path / "mine.json")
    (tmp_path / "kept").mkdir()
    assert (
        TokenizersFile(files.write(tmp_path / "kept")).ids("Hello")
        == Tokenizer.from_file(str(tmp_path / "mine.json")).encode("Hello").ids
    )


# Ends of texts. (eos_token_id in config.json, generation_config.json or None, eos_token of the tokenizer)
ENDS: dict[str, tuple[Any, dict[str, Any] | None, str | None]] = {
    "a list in config.json": ([3, 4], None, "<|endoftext|>"),
    "a number in config.json": (4, None, "<|endoftext|>"),
    "a generation_config.json without an end": (4, {"bos_token_id": 3}, "<|endoftext|>"),
    "in the tokenizer alone": (None, None, "<|im_end|>"),
    "all three differ": (3, {"eos_token_id": [4]}, "<|endoftext|>"),
    "null in generation_config.json": (4, {"eos_token_id": None}, "<|endoftext|>"),
    "a list in generation_config.json": (None, {"eos_token_id": [4, 3]}, None),
    "nowhere": ("missing", None, "<|endoftext|>"),
    "an id below 0": ([-1, 4], None, "<|endoftext|>"),
    "a number with a point in generation_config.json": (3, {"eos_token_id": 4.0}, "<|endoftext|>"),
    "numbers with a point in generation_config.json": (3, {"eos_token_id": [4.0, 3.0]}, "<|endoftext|>"),
    "an id below 0 with a point in generation_config.json": (3, {"eos_token_id": [4.0, -1.0]}, "<|endoftext|>"),
}


@pytest.mark.parametrize("case", ENDS)
def test_texts_end_where_transformers_ends_them(tmp_path: Path, case: str) -> None:
    configured, generation, end = ENDS[case]
    write_folder(tmp_path, "smollm2", eos_token=end)
    torch_config = LlamaConfig(
        vocab_size=403, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(torch_config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("eos_token_id")
    (tmp_path / "config.json").write_text(
        json.dumps(config if configured == "missing" else {**config, "eos_token_id": configured})
    )
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    files = read_tokenizer(tmp_path)
    (tmp_path / "kept").mkdir()
    file = TokenizersFile(files.write(tmp_path / "kept"))
    expected = frozenset(theirs if isinstance(theirs, list) else [theirs]) - {None, -1}
    assert defaults_of(tmp_path / "kept", file.end).stop_ids == expected
    warned = not expected and end is not None
    assert len(files.notes) == warned
    told = (
        f"{tmp_path}: the model's generation_config.json, or else its config.json, names no eos_token_id, so texts go"
    )
    assert all(note.startswith(told) and f"to end them at {end}, write the id" in note for note in files.notes)


@pytest.mark.parametrize(("given", "kept"), [(2, 2), (2.0, 2), ([2.0], [2]), ([2.0, 3], [2, 3]), ([-1], None)])
def test_ends_are_kept_as_whole_numbers_in_the_form_that_they_have(tmp_path: Path, given: Any, kept: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    found = json.loads(settings_in(tmp_path)["generation_config.json"])["eos_token_id"]
    assert repr(found) == repr(kept)  # 2 and 2.0 are equal.


def test_a_model_of_no_library_ends_its_texts_at_the_tokenizers_end(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm2")
    (tmp_path / "config.json").write_text('{"architecture": "mine", "vocab_size": 403}')
    files = read_tokenizer(tmp_path)
    assert "generation_config.json" not in files.contents
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    files = read_tokenizer(tmp_path)
    assert json.loads(files.contents["generation_config.json"]) == {"temperature": 0.5}
    assert files.notes == ()


def test_templates(tmp_path: Path) -> None:
    """A single template becomes chat_template.jinja; several are kept by name, also those of a folder of their own."""
    write_folder(tmp_path, "smollm2", chat_template="{{ messages }}")
    assert read_tokenizer(tmp_path).contents["chat_template.jinja"] == b"{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    contents = read_tokenizer(tmp_path).contents
    assert "chat_template.jinja" not in contents
    templates = json.loads(contents[CONFIG])["chat_template"]
    by_name = {template["name"]: template["template"] for template in templates}
    assert by_name == {"default": "plain", "tool_use": "tools"}
    template = opened(tmp_path).chat_template
    question = [{"role": "user", "content": ""}]
    assert (template.render(question), template.render(question, {"tools": []})) == ("plain", "tools")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"nowhere\.json: no such file or folder, expected a tokenizer\.json or a folder"
    ):
        read_tokenizer(tmp_path / "nowhere.json")
    write_folder(tmp_path, "smollm2")
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(UsageError, match=r": transformers cannot read this tokenizer \(.") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / CONFIG).write_text('{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}')
    with pytest.raises(
        UsageError, match=r": the class of this tokenizer is code in its folder, which is not run here; "
    ):
        read_tokenizer(tmp_path)
    (tmp_path / CONFIG).write_text('{"tokenizer_class": "CanineTokenizer"}')
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        UsageError, match=r"transformers reads this tokenizer as CanineTokenizer, which runs in Python "
    ):
        read_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(
        UsageError, match=r"needs the package transformers, which reads tokenizers; pip install 'mod-exp"
    ):
        read_tokenizer(tmp_path)


def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MANNERS["sentencepiece BPE"](tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    expected = r": transformers cannot read this tokenizer \(.+\); it may need sentencepiece: pip install 'mod-"
    with pytest.raises(UsageError, match=expected):
        read_tokenizer(tmp_path / "folder")


def test_a_reader_that_does_not_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sentencepiece had been generated for a newer protobuf than the one installed."""
    MANNERS["sentencepiece BPE"](tmp_path / "folder")
    # If transformers has imported it, the package has it as an attribute.
    monkeypatch.delattr(sentencepiece, "sentencepiece_model_pb2", raising=False)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    expected = r"\(.+\); sentencepiece does not work here \(.+\): pip install --upgrade protobuf sentencepiece$"
    with pytest.raises(UsageError, match=expected):
        read_tokenizer(tmp_path / "folder")


def code_llama(folder: Path) -> None:
    write_folder(folder, "llama2", tokenizer_class="CodeLlamaTokenizer")
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.add_special_tokens(["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>"])
    tokenizer.save(str(folder / TOKENIZER))


def clip(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|startoftext|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, end_of_word_suffix="</w>", special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES, trainer)
    names = {"bos_token": special[0], "eos_token": special[1], "unk_token": special[1], "pad_token": special[1]}
    _write(folder, tokenizer, **names)
    (folder / CONFIG).write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **names}))


def test_classes_that_do_more_in_python_are_named(tmp_path: Path) -> None:
    code_llama(tmp_path / "code")
    notes = read_tokenizer(tmp_path / "code").notes
    expected = (
        "CodeLlamaTokenizer of transformers treats <FILL_ME> in Python, in a way that a tokenizer.json cannot hold"
    )
    assert any(expected in note for note in notes)
    clip(tmp_path / "clip")
    with pytest.raises(
        UsageError, match=r"clip: CLIPTokenizer of transformers reads and writes texts in Python beyond"
    ):
        read_tokenizer(tmp_path / "clip")


def test_a_named_file_counts_and_not_the_tokenizer_json_beside_it(tmp_path: Path) -> None:
    MANNERS["sentencepiece BPE"](tmp_path / "folder")
    expected = read_tokenizer(tmp_path / "folder").contents[TOKENIZER]
    write_folder(tmp_path / "other", "smollm2")
    (tmp_path / "other" / TOKENIZER).rename(tmp_path / "folder" / TOKENIZER)
    assert read_tokenizer(tmp_path / "folder" / "tokenizer.model").contents[TOKENIZER] == expected
    assert read_tokenizer(tmp_path / "folder").contents[TOKENIZER] != expected


def test_a_template_that_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm2", chat_template=5)
    with pytest.raises(
        UsageError, match=r": chat_template in tokenizer_config\.json: expected a text, or templates by "
    ):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(("settings", "expected"), [
    ({"do_sample": True}, {"do_sample": True, "top_k": 50}),
    ({"do_sample": True, "top_k": 20.0, "temperature": 0.6}, {"do_sample": True, "top_k": 20, "temperature": 0.6}),
    ({"top_k": -1, "top_p": 1.5, "temperature": -2}, {}),
    ({"top_k": 50.0, "top_p": 0.9}, {"top_k": 50, "top_p": 0.9}),
    ({"do_sample": True, "top_k": None}, {"do_sample": True, "top_k": 50}),
])  # fmt: skip
def test_settings_of_sampling_as_transformers_understands_them(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    write_folder(tmp_path, "smollm2")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4, **settings}))
    kept = json.loads(read_tokenizer(tmp_path).contents["generation_config.json"])
    assert kept == {"eos_token_id": 4, **expected}


def test_what_a_model_says_itself_holds_for_a_named_tokenizer(tmp_path: Path) -> None:
    """Where texts end is the model's own; the chat template is the tokenizer's, if it has one."""
    (tmp_path / "model").mkdir()
    assert files_in(tmp_path / "model") is None
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    (tmp_path / "model" / CONFIG).write_text('{"chat_template": "model"}')
    own = files_in(tmp_path / "model")
    assert own is not None
    assert not own.has_vocabulary
    assert json.loads(own.contents["generation_config.json"])["eos_token_id"] == 7
    write_folder(tmp_path / "plain", "smollm2")
    write_folder(tmp_path / "chat", "smollm2", chat_template="tokenizer")
    for name, template in (("plain", "model"), ("chat", "tokenizer")):
        files = read_tokenizer(tmp_path / name).of_model(settings_in(tmp_path / "model"))
        (tmp_path / name / "kept").mkdir()
        file = TokenizersFile(files.write(tmp_path / name / "kept"))
        assert file.chat_template.render([{"role": "user", "content": ""}]) == template
        assert defaults_of(tmp_path / name / "kept", file.end).stop_ids == {7}
        assert files.notes == ()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (note,) = read_tokenizer(tmp_path / "plain").of_model(settings_in(tmp_path / "model")).notes
    assert "names no eos_token_id, so texts go on to their limit" in note
