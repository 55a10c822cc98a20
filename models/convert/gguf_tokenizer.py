"""Converts the tokenizer of a GGUF file to the tokenizer files of a Hugging Face folder.

A GGUF file only names the split of text before the merges (`tokenizer.ggml.pre`); the regular expression is in the code
of llama.cpp. A name is in the table here if its expression and the rest of the original tokenizer.json are known. For
any other name the model is converted without tokenizer.json, and a note says so. The file itself holds the vocabulary,
the ids of special tokens and the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mod_models.checkpoint import CheckpointError
from mod_models.convert.foreign import MadeFile
from mod_models.convert.gguf_file import Metadata
from mod_models.spec import shown

PREFIX = "tokenizer.ggml."
IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
"""Name of a special token in transformers -> the last part of its key."""
SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""Ids of a SentencePiece vocabulary whose file does not say them, as in llama.cpp. The ids that llama.cpp assumes for
byte-level merges are those of one old model, and ordinary tokens in all other models, so they are not used here.
"""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end a text, or a turn of a chat."""
END_NAMES = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
"""Names of tokens that end a text or a turn whatever the keys say, because many files name only one of their ends
(llama.cpp, `llama_vocab::impl::load`, which also goes by the names)."""
FILL_ENDS = (
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", ("<|file_sep|>",)),
)
"""Keys of tokens between source files, which end a text as well, and names of these tokens if the key is missing."""
NO_ENDS = (
    ("<|end|>", ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"},
                 {"<|return|>", "<|calls|>"})),
    ("</s>", ({"<|tool_response>"},)),
)  # fmt: skip
"""(name, groups): the name does not end a text in a vocabulary that has all tokens of one of the groups."""
SAMPLING = {
    "temperature": ("general.sampling.temp", "a number of at least 0"),
    "top_k": ("general.sampling.top_k", "a whole number"),
    "top_p": ("general.sampling.top_p", "a number from 0 to 1"),
}
"""Setting of generation_config.json -> the key in which a publisher recommends it, and what values it can have."""
TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template. Templates for a purpose have its name behind a dot, such as `tool_use`."""
WHOLE = "tokenizer.huggingface.json"
"""Key of a whole tokenizer.json."""
READ = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    *IDS.values(), *ENDS,
}  # fmt: skip
HARMLESS = {
    "token_type_count", "seperator_token_id", "mask_token_id", "cls_token_id", "fim_pre_token_id", "fim_suf_token_id",
    "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id",
    "suffix_token_id", "middle_token_id",
}  # fmt: skip
"""Keys that do not change the ids of a text."""
NEUTRAL = ("add_sep_token", "remove_extra_whitespaces")
"""Keys that change nothing if they are false."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevel:
    """The split of a text into pieces before byte-level merges.

    Attributes:
        split: regular expression of the pieces; None for that of GPT-2.
        digits: whether every digit is first split off as a piece.
        nfc: whether the text is first normalized to NFC.
        whole_words: whether a piece that is a token is taken without the merges.
        bos: whether texts begin with the BOS token, if the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


LLAMA_3 = ByteLevel(split=_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True, bos=True)
BYTE_LEVEL: dict[str, ByteLevel] = {
    "gpt-2": ByteLevel(),
    "smollm": ByteLevel(digits=True),
    "starcoder": ByteLevel(digits=True),
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "dbrx": ByteLevel(split=LLAMA_3.split),
    "qwen2": ByteLevel(split=_WORDS + r"\p{N}" + _REST, nfc=True),
    "deepseek-r1-qwen": ByteLevel(split=_WORDS + r"\p{N}" + _REST),
    "tekken": ByteLevel(split=_TEKKEN, whole_words=True, bos=True),
}
"""`tokenizer.ggml.pre` -> split."""
SENTENCEPIECE = ("llama", "phi3")
"""Architectures whose SentencePiece vocabulary is merged in the order of its scores. Gemma uses another order."""
PHI_3 = ("phi-3", "phi3")
KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 after which spaces are kept. After any other special or user-defined token, spaces are removed."""


class _NotConvertibleError(Exception):
    """The file cannot be converted to a tokenizer.json; the message is the reason."""


def tokenizer_of(path: Path, metadata: Metadata) -> tuple[tuple[MadeFile, ...], tuple[str, ...]]:
    """Returns files (tokenizer.json if exactly known, tokenizer_config.json, generation_config.json) and notes.

    Raises:
        CheckpointError: the lists of the vocabulary do not fit each other, or a key has a value of another type.
    """
    if f"{PREFIX}tokens" not in metadata:
        return (), ()
    vocabulary = _Vocabulary(path, metadata)
    files = {
        "tokenizer_config.json": vocabulary.tokenizer_config(),
        "generation_config.json": vocabulary.generation_config(),
    }
    try:
        files = {"tokenizer.json": vocabulary.tokenizer(), **files}
    except _NotConvertibleError as reason:
        vocabulary.note(
            f"its tokenizer cannot be written as tokenizer.json ({reason}); give the original one with --tokenizer"
        )
    made_files = [MadeFile(name, (json.dumps(data, indent=1) + "\n").encode()) for name, data in files.items()]
    return tuple(made_files), tuple(vocabulary.notes)


class _Vocabulary:
    """The vocabulary in the keys `tokenizer.*`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata
        self.tokens: list[str] = self._strings("tokens")
        self.notes: list[str] = []
        self.is_sentencepiece = self._get("model") == "llama"
        self.ids = {name: self._id(key) for name, key in IDS.items()}
        self.ends = self._ends()
        if not self.ends:
            self.note("no token of this file ends a text, so texts go on to their limit")
        kinds = metadata.get(f"{PREFIX}token_type")
        if kinds is None:
            kinds = np.ones(len(self.tokens), np.int32)
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(self.tokens):
            raise self._wrong("token_type", f"expected {len(self.tokens)} numbers, one for each token")
        self.kinds = kinds.tolist()

    def _wrong(self, key: str, said: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {PREFIX}{key}: {said}")

    def _get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def _strings(self, key: str) -> list[str]:
        strings = self._get(key)
        if not isinstance(strings, list) or not strings:
            raise self._wrong(key, f"expected a list of strings, got {shown(strings)}")
        return strings

    def note(self, note: str) -> None:
        """Adds a note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _id(self, key: str, named: int | None = None) -> int | None:
        """Reads the id of a special token. `named` is the id that follows from the names of the tokens, for a file
        without the key.
        """
        number = self._get(key)
        default = SENTENCEPIECE_IDS.get(key, named) if self.is_sentencepiece else named
        if default is not None and default >= len(self.tokens):
            default = None
        if number is None:
            return default
        if type(number) is not int:
            raise self._wrong(key, f"expected one of the {len(self.tokens)} tokens, got {shown(number)}")
        if 0 <= number < len(self.tokens):
            return number
        consequence = "this key is ignored" if default is None else f"{self.tokens[default]} is taken, as in llama.cpp"
        self.note(f"{PREFIX}{key} is {number}, and the file has {len(self.tokens)} tokens, so {consequence}")
        return default

    def _ends(self) -> list[int]:
        """Ids of all tokens that end a text or a turn, as llama.cpp finds them; the one of `eos_token_id` is first."""
        number_of = {token: number for number, token in enumerate(self.tokens)}
        names = {name for name in END_NAMES if name in number_of}
        excluded = {
            number_of[name] for name, groups in NO_ENDS if name in names and any(group <= names for group in groups)
        }
        ends = [self._id(key) for key in ENDS]
        for key, fallback in FILL_ENDS:
            ends.append(self._id(key, next((number_of[name] for name in fallback if name in number_of), None)))
        ends += [number_of[name] for name in END_NAMES if name in names]
        return list(dict.fromkeys(number for number in ends if number is not None and number not in excluded))

    def _flag(self, key: str, default: bool) -> bool:
        flag = self._get(key)
        if flag is not None and type(flag) is not bool:
            raise self._wrong(key, f"expected true or false, got {shown(flag)}")
        return default if flag is None else flag

    def generation_config(self) -> dict[str, Any]:
        ends = self.ends[0] if len(self.ends) == 1 else self.ends or None
        fields: dict[str, Any] = {
            "bos_token_id": self.ids["bos"],
            "eos_token_id": ends,
            "pad_token_id": self.ids["pad"],
        }
        recommended = {setting: self._recommended(setting) for setting in SAMPLING}
        sampling = {setting: value for setting, value in recommended.items() if value is not None}
        if sampling:
            fields |= {"do_sample": True, **sampling}
        return {key: value for key, value in fields.items() if value is not None}

    def _recommended(self, setting: str) -> float | None:
        """Returns what the publisher recommends for a setting; None, with a note, if no model can be used with it."""
        key, expected = SAMPLING[setting]
        value = self.metadata.get(key)
        if value is None:
            return None
        largest = float(np.finfo(np.float32).max)
        if type(value) in (int, float) and abs(value) <= largest:
            if setting == "top_k" and value == int(value):
                return max(0, int(value))  # In llama.cpp, 0 and every number below it mean all tokens.
            if setting != "top_k" and 0 <= value <= (1 if setting == "top_p" else largest):
                return _shortest(value)
        self.note(f"{key} is {shown(value)}, expected {expected}, so it is left out")
        return None

    def tokenizer_config(self) -> dict[str, Any]:
        names = {f"{name}_token": self.tokens[number] for name, number in self.ids.items() if number is not None}
        keys = {TEMPLATE: "default"} | {
            key: key.removeprefix(f"{TEMPLATE}.") for key in self.metadata if key.startswith(f"{TEMPLATE}.")
        }
        templates = {name: self.metadata.get(key) for key, name in keys.items()}
        texts = {name: text for name, text in templates.items() if isinstance(text, str)}
        listed = [{"name": name, "template": text} for name, text in texts.items()]
        chat_template = listed if texts.keys() - {"default"} else texts.get("default")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
            **({} if chat_template is None else {"chat_template": chat_template}),
        }

    def tokenizer(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        whole = self.metadata.get(WHOLE)
        stored = None if whole is None else _stored_tokenizer(whole)
        if stored is not None:
            return stored
        if whole is not None:
            self.note(f"{WHOLE} holds no tokenizer that can be read, so it is ignored")
        for key, value in self.metadata.items():
            name = key.removeprefix(PREFIX)
            harmless = name in READ | HARMLESS or (name in NEUTRAL and value is False)
            if key.startswith(PREFIX) and not harmless:
                raise _NotConvertibleError(f"{key}: unknown key with the value {shown(value)}")
        if len(set(self.tokens)) < len(self.tokens):
            raise _NotConvertibleError(f"{PREFIX}tokens: a token stands there twice")
        if any("\udc80" <= character <= "\udcff" for token in self.tokens for character in token):
            raise _NotConvertibleError(f"{PREFIX}tokens: holds a token that is no UTF-8")
        model, pre = self._get("model"), self._get("pre")
        if model == "gpt2" and isinstance(pre, str) and pre in BYTE_LEVEL:
            return self._byte_level(BYTE_LEVEL[pre])
        if model == "gpt2":
            raise _NotConvertibleError(f"{PREFIX}pre: {shown(pre)} is not known here; known: {', '.join(BYTE_LEVEL)}")
        architecture, name = self.metadata.get("general.architecture"), str(self.metadata.get("general.name")).lower()
        if self.is_sentencepiece and architecture in SENTENCEPIECE:
            # llama.cpp goes by the name alone. Models that were tuned from Phi-3 have other names and its tokenizer.
            return self._sentencepiece(rstrip=architecture == "phi3" or any(known in name for known in PHI_3))
        raise _NotConvertibleError(f"{PREFIX}model: {shown(model)} of {shown(architecture)} is not known here")

    def _byte_level(self, how: ByteLevel) -> dict[str, Any]:
        if self._flag("add_space_prefix", False):
            raise _NotConvertibleError(f"{PREFIX}add_space_prefix: true has no agreed meaning for byte-level merges")
        # No token holds a space, because the byte-level alphabet writes it as another character.
        merges = [merge.split(" ") for merge in self._strings("merges")]
        known = set(self.tokens)
        if any(len(pair) != 2 or not {*pair, "".join(pair)} <= known for pair in merges):
            raise _NotConvertibleError(f"{PREFIX}merges: names what is no token")
        last = _bytes(use_regex=how.split is None)
        before: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if how.digits else []
        if how.split is not None:
            before.append({"type": "Split", "pattern": {"Regex": how.split}, "behavior": "Isolated", "invert": False})
        return self._whole(
            normalizer={"type": "NFC"} if how.nfc else None,
            pre_tokenizer=_sequence("pretokenizers", [*before, last]),
            post_processor=_sequence("processors", [_bytes(), *self._template(how.bos)]),
            decoder=_bytes(),
            model={"merges": merges, "ignore_merges": how.whole_words},
        )

    def _sentencepiece(self, rstrip: bool) -> dict[str, Any]:
        scores = self._get("scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self.tokens):
            raise self._wrong("scores", f"expected {len(self.tokens)} numbers, one for each token")
        if any(kind == USER_DEFINED and (SPACE in token or " " in token)
               for token, kind in zip(self.tokens, self.kinds, strict=True)):  # fmt: skip
            raise _NotConvertibleError(f"{PREFIX}token_type: a token that is matched in texts as it is holds a space")
        prefix = self._flag("add_space_prefix", True)
        first: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        ]
        unknown = self.ids["unk"]
        return self._whole(
            normalizer=_sequence("normalizers", [*first, spaces]),
            pre_tokenizer=None,
            post_processor=_sequence("processors", self._template(bos=True)),
            decoder=_sequence("decoders", decoders),
            model={
                "merges": _merges(self.tokens, scores.tolist()),
                "ignore_merges": False,
                "byte_fallback": True,
                "fuse_unk": True,
                "unk_token": None if unknown is None else self.tokens[unknown],
            },
            rstrip=rstrip,
        )

    def _whole(self, *, model: dict[str, Any], rstrip: bool = False, **parts: Any) -> dict[str, Any]:
        vocab = {token: number for number, token in enumerate(self.tokens)}
        bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
               "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab}  # fmt: skip
        added = list(self._added(rstrip))
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts,
                "model": {**bpe, **model}}  # fmt: skip

    def _added(self, rstrip: bool) -> Iterator[dict[str, Any]]:
        """Yields the tokens that are matched in a text before it is split."""
        special = {special_id for special_id in (*self.ids.values(), *self.ends) if special_id is not None}
        for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            is_special = kind in (UNKNOWN, CONTROL) or number in special
            if token and (is_special or kind == USER_DEFINED):
                strips = rstrip and token not in KEEP_SPACES
                yield {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": strips,
                       "normalized": False, "special": is_special}  # fmt: skip

    def _template(self, bos: bool) -> list[dict[str, Any]]:
        """Post-processor that puts special tokens around a text; empty if there are none."""
        ends = (("bos", self._flag("add_bos_token", bos)), ("eos", self._flag("add_eos_token", False)))
        first, last = (self.ids[name] if wanted else None for name, wanted in ends)
        used = [self.tokens[token] for token in (first, last) if token is not None]
        if not used:
            return []

        def around(letter: str, number: int) -> list[dict[str, Any]]:
            text = {"Sequence": {"id": letter, "type_id": number}}
            before, after = ([] if token is None else [{"SpecialToken": {"id": self.tokens[token], "type_id": number}}]
                             for token in (first, last))  # fmt: skip
            return [*before, text, *after]

        known = {self.tokens[token]: {"id": self.tokens[token], "ids": [token], "tokens": [self.tokens[token]]}
                 for token in (first, last) if token is not None}  # fmt: skip
        return [{"type": "TemplateProcessing", "single": around("A", 0), "pair": [*around("A", 0), *around("B", 1)],
                 "special_tokens": known}]  # fmt: skip


def _bytes(use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(name: str, parts: list[dict[str, Any]]) -> Mapping[str, Any] | None:
    return parts[0] if len(parts) == 1 else {"type": "Sequence", name: parts} if parts else None


def _shortest(value: float) -> float:
    """Returns the shortest decimal number that float32 rounds to the same value: 0.95 for 0.949999988079071."""
    return float(str(np.float32(value))) if type(value) is float else value


def _stored_tokenizer(whole: object) -> dict[str, Any] | None:
    """Returns the content of a tokenizer.json; None if the package tokenizers cannot read it."""
    from tokenizers import Tokenizer

    try:
        data = json.loads(str(whole))
        Tokenizer.from_str(json.dumps(data))
    except BaseException as error:
        # Any error of the package means that this is no tokenizer. A panic of its Rust code is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return None
        raise
    return data if isinstance(data, dict) else None


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Returns the merges of a SentencePiece vocabulary: every pair of tokens that forms a token, best scores first.

    `generate_merges` of transformers, which made the tokenizer.json of such models, does the same.
    """
    number_of = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in number_of and pair[1] in number_of]
        merges += [(*pair, score) for pair in sorted(known, key=lambda pair: (number_of[pair[0]], number_of[pair[1]]))]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [[left, right] for left, right, _ in merges]
