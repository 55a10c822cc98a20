"""Reads the tokenizer of a model as transformers reads it, whatever files it has, and returns it as files that need no
transformers to run.

Tokenizers are published in many forms: tokenizer.json alone or corrected by files beside it, a SentencePiece model,
vocab.json with merges.txt, tiktoken. Which of them counts, and how the special tokens are matched, depends on the class
of the tokenizer and on the release of transformers. So transformers reads them, once, and what it made is kept: one
tokenizer.json that holds everything, and a tokenizer_config.json with the few facts that have no place in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.errors import UsageError, first_line
from mod_export.folder.manifest import TOKENIZER
from mod_export.model.other_files import what_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
VOCABULARIES = (
    TOKENIZER, "tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model",
    "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files that hold a vocabulary, each enough for a folder to have a tokenizer."""
READ = (
    *VOCABULARIES, "merges.txt", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE,
    "*.tiktoken", "tokenizer.*.json", f"{MORE_TEMPLATES}/*.jinja", GENERATION_CONFIG, CONFIG,
)  # fmt: skip
"""Files that transformers reads of a folder for its tokenizer and for the ends of texts."""
VOCABULARY_PACKAGES = ("sentencepiece", "tiktoken")
"""Packages that transformers needs to read tokenizers that are not a tokenizer.json."""
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p")
"""Settings that older releases of transformers kept in config.json."""
TOP_K = 50
"""Value that transformers uses for `top_k` if a model samples and does not set it."""
CLASS = "PreTrainedTokenizerFast"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that every tokenizer can have; further names are the model's own."""
PROBES = (
    "Hello world, it's 2024!", "  two  spaces \n\n\tx", "d\u00e9j\u00e0 vu \u6771\u4eac \U0001f600",
    "def f(x):\n    return x ** 2\r\n", "don't , we 've . A_B <0x41> \u2581",
)  # fmt: skip
"""Texts on which a tokenizer of transformers is compared with the part of it that is kept."""
SAMPLED_IDS = 256
"""Number of ids whose text is compared as well."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer that was read, or what a model without one says about text: where it ends, and a chat template.

    Attributes:
        path: the folder or file that it was read from.
        contents: name -> content of tokenizer.json, tokenizer_config.json, generation_config.json (if the folder says
            anything about generation) and chat_template.jinja (if it has a single template).
        in_python: steps that the class of the tokenizer does in Python and that the files cannot hold, one sentence
            each.
    """

    path: Path
    contents: Mapping[str, bytes]
    in_python: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this tokenizer, one sentence each."""
        generation = json.loads(self.contents.get(GENERATION_CONFIG, b"{}"))
        end = json.loads(self.contents.get(TOKENIZER_CONFIG, b"{}")).get("eos_token")
        if end is None or generation.get("eos_token_id", end) is not None:
            return self.in_python
        return (
            *self.in_python,
            f"{self.path}: the model's {GENERATION_CONFIG}, or else its {CONFIG}, names no eos_token_id, so texts go "
            f"on to their limit, as in transformers; to end them at {end}, write the id of that token to "
            f"{GENERATION_CONFIG}",
        )

    @property
    def has_vocabulary(self) -> bool:
        """Whether the ids of the model represent text."""
        return TOKENIZER in self.contents

    def of_model(self, own: Mapping[str, bytes]) -> TokenizerFiles:
        """Returns this tokenizer for a model that says something about text itself: `own` decides where texts end, and
        gives the chat template if the tokenizer has none.
        """
        contents = dict(self.contents)
        if GENERATION_CONFIG in own:
            contents[GENERATION_CONFIG] = own[GENERATION_CONFIG]
        config = json.loads(contents[TOKENIZER_CONFIG])
        if TEMPLATE not in contents and "chat_template" not in config:
            template = json.loads(own.get(TOKENIZER_CONFIG, b"{}")).get("chat_template")
            if TEMPLATE in own:
                contents[TEMPLATE] = own[TEMPLATE]
            elif template is not None:
                contents[TOKENIZER_CONFIG] = _json({**config, "chat_template": template})
        return replace(self, contents=contents)

    def write(self, folder: Path) -> Path:
        """Writes the files into a folder, and returns the path of its tokenizer.json."""
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)
        return folder / TOKENIZER


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a vocabulary that transformers knows."""
    return any((folder / name).is_file() for name in VOCABULARIES) or any(folder.glob("*.tiktoken"))


def files_in(folder: Path) -> TokenizerFiles | None:
    """Returns the tokenizer of a folder, or else what it says about text without one; None if it says nothing.

    Raises:
        UsageError: see `read_tokenizer`.
    """
    if has_tokenizer(folder):
        return read_tokenizer(folder)
    contents = settings_in(folder)
    return TokenizerFiles(folder, contents) if contents else None


def settings_in(folder: Path) -> dict[str, bytes]:
    """Returns what a folder says about text beside its vocabulary: generation_config.json, and chat templates."""
    generation, config = _generation_of(folder), _read_json(folder / TOKENIZER_CONFIG)
    contents = {} if generation is None else {GENERATION_CONFIG: _json(generation)}
    if config is not None:
        contents[TOKENIZER_CONFIG] = _json(config)
    if (folder / TEMPLATE).is_file():
        contents[TEMPLATE] = (folder / TEMPLATE).read_bytes()
    return contents


def read_tokenizer(path: Path, model: Path | None = None, shown: Path | None = None) -> TokenizerFiles:
    """Reads a tokenizer with transformers.

    Args:
        path: a folder, or one file of it; a file of another name than those of `VOCABULARIES` is a tokenizer.json.
        model: folder of the model's configuration, if the tokenizer is beside an adapter of it.
        shown: path for messages, if `path` is temporary.

    Raises:
        UsageError: there is no such file, transformers is missing or cannot read it, or it has a form that the package
            tokenizers cannot run.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder, expected a tokenizer.json or a folder with a tokenizer")
    with tempfile.TemporaryDirectory() as name, _quiet_transformers(path):
        copy = Path(name)
        _copy(path, copy, model)
        path = shown or path
        tokenizer = _load(path, copy)
        contents = _contents(path, tokenizer)
        in_python = _beyond_the_files(path, tokenizer, contents[TOKENIZER])
        if (generation := _generation_of(copy)) is not None:
            contents[GENERATION_CONFIG] = _json(generation)
    return TokenizerFiles(path, contents, tuple(in_python))


def _copy(path: Path, copy: Path, model: Path | None) -> None:
    """Copies what transformers reads. A config.json of another library is left out, because transformers would take its
    fields for its own.
    """
    source = path if path.is_dir() else path.parent
    for pattern in READ:
        for file in source.glob(pattern):
            target = copy / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    if path.is_file() and path.name not in VOCABULARIES:
        shutil.copyfile(path, copy / TOKENIZER)
    elif path.is_file() and path.name != TOKENIZER:
        (copy / TOKENIZER).unlink(missing_ok=True)
    for name in (CONFIG, GENERATION_CONFIG):
        if model is not None and not (copy / name).is_file() and (model / name).is_file():
            shutil.copyfile(model / name, copy / name)
    config = _read_json(copy / CONFIG)
    if config is not None and not _is_published(config):
        (copy / CONFIG).unlink()


def _is_published(config: Mapping[str, Any] | None) -> bool:
    """Whether a config.json is that of a model of transformers."""
    return config is not None and isinstance(config.get("model_type"), str)


def _load(path: Path, copy: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            copy, trust_remote_code=False, local_files_only=True, mistral_format=False
        )
    except ImportError as error:
        raise UsageError(
            f"{path}: transformers needs another package to read this tokenizer ({first_line(error)})"
        ) from error
    except Exception as error:  # The files can hold anything, and transformers does not check them first.
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{path}: the class of this tokenizer is code in its folder, which is not run here; if you trust it, "
                f"load it with AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True), and name what its "
                f"save_pretrained writes with --tokenizer"
            ) from error
        source = path if path.is_dir() else path.parent
        files = [path, *(source / file.relative_to(copy) for file in sorted(copy.rglob("*")))]
        if damaged := next(filter(None, map(what_file, files)), ""):
            raise UsageError(damaged) from error
        reason = first_line(error).replace(str(copy), str(path))
        hint = "" if (copy / TOKENIZER).is_file() else _hint_about_readers()
        raise UsageError(f"{path}: transformers cannot read this tokenizer ({reason}){hint}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(
            f"{path}: transformers reads this tokenizer as {type(tokenizer).__name__}, which runs in Python only; a "
            f"tokenizer.json is needed"
        )
    return tokenizer


def _hint_about_readers() -> str:
    """Says which package that reads tokenizers is missing or does not work; empty if all of them do."""
    missing = [name for name in VOCABULARY_PACKAGES if find_spec(name) is None]
    if missing:
        return f"; it may need {' and '.join(missing)}: pip install 'mod-export[convert]'"
    try:
        # sentencepiece needs the protobuf that it was generated with, or a newer one, and does not declare it.
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception as error:  # protobuf has errors of its own.
        return f"; sentencepiece does not work here ({first_line(error)}): pip install --upgrade protobuf sentencepiece"
    return ""


def _contents(path: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    backend: Any = tokenizer.backend_tokenizer
    # Truncation and padding, if set for training, would silently change a prompt.
    backend.no_truncation()
    backend.no_padding()
    own_names = {name: text for name, text in tokenizer.special_tokens_map.items() if name not in NAMED}
    config: dict[str, Any] = {
        "tokenizer_class": CLASS,
        **{name: text for name, text in tokenizer.special_tokens_map.items() if name in NAMED},
        **({"extra_special_tokens": own_names} if own_names else {}),
        "split_special_tokens": bool(backend.encode_special_tokens),
        "clean_up_tokenization_spaces": _cleans(tokenizer, backend),
    }
    contents = {TOKENIZER: backend.to_str().encode()}
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        contents[TEMPLATE] = templates.encode()
    elif isinstance(templates, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates is not None:
        raise UsageError(f"{path}: chat_template in {TOKENIZER_CONFIG}: expected a text, or templates by name")
    return contents | {TOKENIZER_CONFIG: _json(config)}


def _beyond_the_files(path: Path, tokenizer: PreTrainedTokenizerBase, kept: bytes) -> list[str]:
    """Compares a tokenizer with the part of it that is kept, which the package tokenizers runs. Some classes also
    change texts in Python code.

    Returns:
        A note for each special token that makes texts differ.

    Raises:
        UsageError: ordinary texts differ.
    """
    from tokenizers import Tokenizer

    # Not the backend itself, which some classes change while they read a text.
    backend = Tokenizer.from_buffer(kept)
    backend.encode_special_tokens = tokenizer.split_special_tokens
    name = type(tokenizer).__name__
    special = [f"a{token}b" for token in tokenizer.special_tokens_map.values()]
    read = {text: _ids(tokenizer.encode, text) for text in (*PROBES, *special)}
    kept_ids = {text: _ids(lambda text: backend.encode(text).ids, text) for text in read}
    written = [ids for ids in read.values() if ids is not None] + [
        list(range(min(SAMPLED_IDS, backend.get_vocab_size())))
    ]
    ordinary = [text for text in PROBES if read[text] != kept_ids[text]]
    for ids in written:
        text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        ordinary += [] if text == backend.decode(ids, skip_special_tokens=True) else [text]
    if ordinary:
        raise UsageError(
            f"{path}: {name} of transformers reads and writes texts in Python beyond its tokenizer.json, such as "
            f"{ordinary[0][:40]!r}; give a tokenizer.json of a class that does not, with --tokenizer"
        )
    tokens = [text[1:-1] for text in special if read[text] != kept_ids[text]]
    return [
        f"{path}: {name} of transformers treats {token} in Python, in a way that a tokenizer.json cannot hold; here it "
        f"is an ordinary token"
        for token in dict.fromkeys(tokens)
    ]


def _ids(encode: Callable[[str], Any], text: str) -> list[int] | None:
    """Ids of a text; None if the vocabulary cannot represent it."""
    try:
        return list(encode(text))
    except Exception:  # The Rust side raises nothing narrower.
        return None


def _cleans(tokenizer: PreTrainedTokenizerBase, backend: Any) -> bool:
    """Whether decoding removes the spaces before punctuation: if configured, but not for BPE unless that is forced."""
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    is_bpe = type(backend.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe))


def _generation_of(folder: Path) -> dict[str, Any] | None:
    """Returns the generation settings of a folder: generation_config.json, or else, in a folder of transformers, what
    config.json says; None if there are none. In a folder of transformers, `eos_token_id` is always among them; if it is
    null, texts have no end.
    """
    settings, config = _read_json(folder / GENERATION_CONFIG), _read_json(folder / CONFIG)
    if config is None or not _is_published(config):
        return settings
    if settings is None:
        settings = {name: config[name] for name in GENERATION if config.get(name) is not None}
    return {"eos_token_id": None, **_usable(settings)}


def _usable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Generation settings as transformers understands them: whole numbers may be written as floats, ids below 0 never
    end a text, and settings of sampling do not matter for a model that does not sample, whatever they are.
    """
    usable = dict(settings)
    ends = usable.get("eos_token_id")
    if ends is not None:
        ids = [_whole(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
        end_ids = [end for end in ids if not isinstance(end, int) or end >= 0]
        usable["eos_token_id"] = (end_ids if isinstance(ends, list) else end_ids[0]) if end_ids else None
    if "top_k" in usable:
        usable["top_k"] = _whole(usable["top_k"])
    if usable.get("do_sample") is True:
        return {"top_k": TOP_K, **{name: value for name, value in usable.items() if value is not None}}
    ranges = {"top_k": (0, None), "top_p": (0, 1), "temperature": (0, None)}
    for name, (least, most) in ranges.items():
        value = usable.get(name)
        if value is not None and not (isinstance(value, int | float) and value >= least and value <= (most or value)):
            del usable[name]
    return usable


def _whole(value: Any) -> Any:
    """Returns a number without a fraction as an int, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@contextlib.contextmanager
def _quiet_transformers(path: Path) -> Iterator[None]:
    """Silences the log of transformers, which warns about problems that are handled here.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            f"{path}: needs the package transformers, which reads tokenizers; pip install 'mod-export[convert]'"
        ) from error
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if there is no such file, or it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
