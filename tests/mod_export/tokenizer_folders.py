"""Folders with a tokenizer in the style of model families: trained on a page of several scripts, with the files that
say how it is used, as in a Hugging Face folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mod_export.model.tokenizer_files import read_tokenizer
from mod_export.runtime.tokenizer import TokenizersFile

SPACE = "\u2581"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It doesn't mind, and 12345 others don't either.\n",
    "\u00dcber den W\u00e4ldern liegt Nebel; na\u00efve fa\u00e7ade, d\u00e9j\u00e0 vu.\n",
    "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430 \u043f\u0440\u044b\u0433\u0430\u0435\u0442.\n",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002\n",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\n",
    "def main(argv):\n    return [x for x in argv if x]\n\n\tprint('done')\n"
    "# \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\n",
]
SAID = [*TEXTS, "", " ", "  two  spaces ", "Hi\r\n", "e\u0301", "\U0001f1eb\U0001f1f7!", "a\u0000b", "\u2581odd\u2581"]

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT, QWEN2_SPLIT = SPLIT.replace("DIGITS", r"\p{N}{1,3}"), SPLIT.replace("DIGITS", r"\p{N}")


def _byte_level(special: list[str], split: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        plain if split is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), plain])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _sentence_piece(special: list[AddedToken]) -> Tokenizer:
    """Words keep their space as U+2581, and unseen characters become bytes; special tokens come first."""
    trained = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    # Only some scripts are in the vocabulary; the others become bytes.
    trained.train_from_iterator(
        TEXTS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    )
    model = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [item for item in model["vocab"] if item != "<unk>"]
    vocab = {item: number for number, item in enumerate([*(item.content for item in special), *bytes_, *words])}
    merges = [tuple(item) for item in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _special(*texts: str, rstrip: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in texts]


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _of_llama(tokenizer: Tokenizer, *, prefix: bool = True) -> None:
    prepend = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


Made = tuple[Tokenizer, dict[str, Any], str]


def smollm2() -> Made:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return tokenizer, {**config, "tokenizer_class": "PreTrainedTokenizerFast"}, "llama"


def llama3() -> Made:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(names, LLAMA3_SPLIT)
    bos = names[0]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    config = {"bos_token": bos, "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}
    return tokenizer, {**config, "tokenizer_class": "PreTrainedTokenizerFast"}, "llama"


def qwen2() -> Made:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], QWEN2_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    config: dict[str, Any] = {"add_bos_token": False, "add_prefix_space": False, "bos_token": None}
    config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "split_special_tokens": False}
    config["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    return tokenizer, {**config, "tokenizer_class": "Qwen2Tokenizer"}, "qwen2"


def qwen3() -> Made:
    """Thoughts are between added tokens that are not special, so the text shows them."""
    tokenizer, config, _ = qwen2()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer, config, "qwen3"


def llama2() -> Made:
    """Legacy Llama puts a space before every piece of text, and decoding removes it once."""
    tokenizer = _sentence_piece(_special("<unk>", "<s>", "</s>"))
    _of_llama(tokenizer)
    _begin_with(tokenizer, "<s>")
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return tokenizer, {**config, "add_eos_token": False, "legacy": False, "tokenizer_class": "LlamaTokenizer"}, "llama"


def mistral() -> Made:
    tokenizer = _sentence_piece(_special("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    _begin_with(tokenizer, "<s>")
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}
    return tokenizer, {**config, "tokenizer_class": "LlamaTokenizerFast"}, "mistral"


def gemma() -> Made:
    tokenizer = _sentence_piece(_special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"))
    _of_llama(tokenizer, prefix=False)
    _begin_with(tokenizer, "<bos>")
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, {**config, "tokenizer_class": "GemmaTokenizer"}, "gemma"


def phi3() -> Made:
    """The special tokens swallow white space after them."""
    tokenizer = _sentence_piece(_special("<unk>", "<s>", "</s>", "<|endoftext|>"))
    tokenizer.add_special_tokens(_special("<|assistant|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True))
    _of_llama(tokenizer)
    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<|endoftext|>"}
    config["tokenizer_class"] = "LlamaTokenizer"
    return tokenizer, {**config, "add_bos_token": False, "add_eos_token": False, "legacy": False}, "phi3"


FAMILIES: dict[str, Callable[[], Made]] = {
    made.__name__: made for made in (smollm2, llama3, qwen2, qwen3, llama2, mistral, gemma, phi3)
}


def added_tokens_of(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder` of tokenizer_config.json."""
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        str(number): {name: getattr(token, name) for name in names}
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }


def write_folder(folder: Path, family: str, **changed: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and the config.json from which transformers knows the family."""
    tokenizer, config, model_type = FAMILIES[family]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"added_tokens_decoder": added_tokens_of(tokenizer), **config, **changed}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def opened(folder: Path) -> TokenizersFile:
    """The tokenizer of a folder, as a build keeps and opens it."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    return TokenizersFile(read_tokenizer(folder).write(kept))
