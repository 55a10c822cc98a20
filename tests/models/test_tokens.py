"""TokenizedText: ids of a vocabulary, and the number of text bytes of each."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_spec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mod_models.train import TrainConfig, TrainError
from mod_models.train import corpus as corpus_module
from mod_models.train.corpus import as_bytes, load_tokenizer, read_corpus, tokenize, vocabulary_size
from mod_models.train.evaluation import evaluate, held_out, rows_at
from mod_models.train.losses import LossModule
from mod_models.train.parallel import Workers
from mod_models.train.run import train
from mod_models.transformer import Transformer

TEXT = "the quick brown fox jumps over the lazy dog; \u00fcber \u20ac \U0001f600\n" * 50


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A lossless byte-level vocabulary of 280 tokens, made like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A lower-case vocabulary that drops white space and unknown characters."""
    vocabulary = {"t": 0, "h": 1, "e": 2, "th": 3, "the": 4, "q": 5, "gap": 9}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_byte_level_ids_decode_to_the_text(byte_level: Tokenizer) -> None:
    found = tokenize([TEXT.encode(), b"second"], byte_level)
    assert found.id_N.dtype == found.size_N.dtype == torch.int32
    assert byte_level.decode(found.id_N.tolist()) == TEXT + "\0second"
    assert len(found.id_N) < len(TEXT.encode()) / 1.5
    # If each token consists of whole characters, its bytes are those of its own text.
    found = tokenize([b"the quick brown fox"], byte_level)
    assert found.size_N.tolist() == [len(byte_level.decode([token]).encode()) for token in found.id_N.tolist()]


@given(st.lists(st.text(st.sampled_from("the foxquick\n\u00e4\u20ac\U0001f600"), max_size=40), min_size=1, max_size=4))
def test_sizes_sum_to_the_text(byte_level: Tokenizer, words: Tokenizer, texts: list[str]) -> None:
    """No matter what is joined, split or dropped: bits per byte divides by the text, not by what is left of it."""
    documents = [text.encode() for text in texts]
    for tokenizer in (byte_level, words):
        found = tokenize(documents, tokenizer)
        assert len(found.id_N) == len(found.size_N)
        assert bool((found.size_N >= 0).all())
        if len(found.id_N):
            assert int(found.size_N.sum()) == len(b"\0".join(documents))


def test_dropped_text_belongs_to_the_token_after_it(words: Tokenizer) -> None:
    found = tokenize([b"the  lazy QUICK fox.", b"the"], words)
    assert found.id_N.tolist() == [4, 5, 4]
    # Text dropped at the end of a document has no token after it.
    assert found.size_N.tolist() == [3, 8 + 10, 3]
    assert sum(found.size_N.tolist()) == 24


def test_long_documents_go_in_pieces(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = tokenize([TEXT.encode()], byte_level)
    seen: list[str] = []
    pieces = corpus_module._pieces
    monkeypatch.setattr(corpus_module, "PIECE", 200)
    monkeypatch.setattr(corpus_module, "_pieces", lambda d: (seen.append(p) or p for p in pieces(d)))
    parts = tokenize([TEXT.encode()], byte_level)
    assert len(seen) > 10
    assert all(piece.endswith("\n") for piece in seen)
    assert byte_level.decode(parts.id_N.tolist()) == TEXT
    assert int(parts.size_N.sum()) == int(at_once.size_N.sum()) == len(TEXT.encode())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["</s>", "<eos>", "<bos>"], "<eos>"),  # Gemma: `</s>` is a tag of HTML.
        (["<s>", "</s>"], "</s>"),
        (["</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"], "<|endoftext|>"),
    ],
)
def test_the_token_between_documents(names: list[str], expected: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.add_tokens([AddedToken(name) for name in names])
    assert tokenize([b"a", b"a"], tokenizer).id_N.tolist() == [0, tokenizer.token_to_id(expected), 0]


def test_vocabulary_has_room_for_every_id(words: Tokenizer, byte_level: Tokenizer) -> None:
    assert vocabulary_size(words) == 10
    assert vocabulary_size(byte_level) == byte_level.get_vocab_size()
    # There is nothing to tokenize.
    assert len(tokenize([], words).id_N) == len(tokenize([b"abc"], words).id_N) == len(as_bytes([]).id_N) == 0


# A training run with token ids.

SPEC = make_spec(vocab_size=280, predictor_hidden=4, max_positions=32)
CONFIG = TrainConfig(steps=4, batch=2, seq=16, warmup=1, eval_every=4, eval_batches=3, log_every=2)


@pytest.fixture
def tokenizer_file(byte_level: Tokenizer, tmp_path: Path) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT * 4, encoding="utf-8")
    return tmp_path / "text.txt"


def test_bits_are_per_byte(tokenizer_file: Path, text_file: Path) -> None:
    """An ignorant model needs log2(V) bits a token; its bits per byte are that over the bytes of a token."""
    corpus = read_corpus(text_file, tokenizer_file)
    assert corpus.vocab_size == 280
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(model.embedding.weight)
    n_tokens = n_bytes = 0
    for i in range(CONFIG.eval_batches):
        ids_BS1, size = rows_at(corpus.held_out, CONFIG, 10_000_000 + i, Workers())
        texts = [load_tokenizer(tokenizer_file).decode(row[1:].tolist()) for row in ids_BS1]
        # A window may begin within a character, which decodes to a replacement of three bytes.
        assert size == pytest.approx(sum(len(text.encode()) for text in texts), abs=6)
        n_tokens, n_bytes = n_tokens + ids_BS1[:, 1:].numel(), n_bytes + size
    found = held_out(LossModule(model), corpus.held_out, CONFIG, Workers())
    assert found["bits_per_byte"] == pytest.approx(math.log2(280) * n_tokens / n_bytes, rel=1e-6)
    assert found["bits_per_byte"] < math.log2(280) / 1.5
    assert evaluate(model, CONFIG, corpus)["bits_per_byte"] == round(found["bits_per_byte"], 4)


def test_truncation_and_padding_stored_in_the_file_leave_the_text_whole(
    tokenizer_file: Path, text_file: Path, tmp_path: Path
) -> None:
    """They are settings of an earlier use of the tokenizer, and would drop most of a document or add padding to it."""
    expected = read_corpus(text_file, tokenizer_file)
    for setting, value in (("truncation", {"max_length": 8}), ("padding", {"length": 10_000})):
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        getattr(tokenizer, f"enable_{setting}")(**value)
        tokenizer.save(str(tmp_path / f"{setting}.json"))
        found = read_corpus(text_file, tmp_path / f"{setting}.json")
        assert torch.equal(found.train.id_N, expected.train.id_N), setting
        assert torch.equal(found.train.size_N, expected.train.size_N), setting
        assert found.fingerprint == expected.fingerprint, setting


def test_a_run_with_a_tokenizer_learns_and_resumes(tokenizer_file: Path, text_file: Path, tmp_path: Path) -> None:
    corpus = read_corpus(text_file, tokenizer_file)
    for folder, stops in (("whole", [None]), ("parts", [3, None])):
        for stop_after in stops:
            list(train(SPEC, CONFIG, tmp_path / folder, corpus=corpus, stop_after=stop_after))
    assert (tmp_path / "whole" / "log.csv").read_text() == (tmp_path / "parts" / "log.csv").read_text()
    with pytest.raises(TrainError, match=r"belongs to a run with other settings \(data\)"):
        list(train(SPEC, CONFIG, tmp_path / "whole", corpus=read_corpus(text_file)))


# Tokenizers that cannot be used.


def test_files_that_are_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=r"nowhere\.json: no such file, expected a tokenizer\.json of the package"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "spec.json").write_text(json.dumps(SPEC.to_dict()))
    with pytest.raises(TrainError, match=r"spec\.json: not a tokenizer\.json of the package tokenizers \("):
        load_tokenizer(tmp_path / "spec.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    expected = r"^--tokenizer: needs the package tokenizers; pip install 'mod-export\[train\]'$"
    with pytest.raises(TrainError, match=expected):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"the": 0})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("another " * 10)
    expected = r"^the tokenizer cannot read this text \(WordLevel error: Missing \[UNK\] token"
    with pytest.raises(TrainError, match=expected):
        read_corpus(tmp_path / "text.txt", tmp_path / "tokenizer.json")
