"""Fetches models of the Hugging Face hub, hf://ORG/NAME[@REVISION], into folders of the hub's own cache.

Only files that a model is read from are fetched: its config, its weights (safetensors, or pickles of tensors if there
are none), an adapter and the files of its tokenizer. From a repository of GGUF files, the named one is fetched:
hf://ORG/NAME/FILE.gguf. The package `huggingface_hub` handles the endpoint, the cache, tokens and offline mode
(HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from pathlib import Path

from mod_export.errors import CheckpointError

PREFIX = "hf://"
NAMED = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[^@]+\.gguf))?(@(?P<revision>.+))?")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
ABOUT = (
    CONFIG, "generation_config.json", ADAPTER_CONFIG, "adapter_model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
WEIGHTS = (
    ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.bin", "pytorch_model.bin.index.json"),
)
"""Kinds of weights in order of preference. The first kind that a repository has is fetched."""


def fetched(source: str) -> str:
    """Fetches a model of the hub and returns its folder or file. Other sources are returned unchanged.

    Raises:
        CheckpointError: the name is malformed, the repository, revision or file does not exist, access is denied, or
            there is no network.
        ImportError: the package `huggingface_hub` is missing, which comes with the extra `convert`.
    """
    if not source.startswith(PREFIX):
        return source
    match = NAMED.fullmatch(source)
    if match is None:
        raise CheckpointError(f"{source}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError

    try:
        return _fetched(match["repo"], match["file"], match["revision"])
    except (HfHubHTTPError, HFValidationError, FileMetadataError, OSError) as error:
        raise CheckpointError(f"{source}: {_reason(error)}") from error


def _fetched(repo: str, file: str | None, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download, snapshot_download

    if file is not None:
        return hf_hub_download(repo, file, revision=revision)
    for weights in WEIGHTS:
        folder = snapshot_download(repo, revision=revision, allow_patterns=[*ABOUT, *weights])
        if any((Path(folder) / name).is_file() for name in (weights[0], weights[-1], "adapter_model.safetensors")):
            break
    if not any((Path(folder) / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise CheckpointError(
            f"{PREFIX}{repo}: the repository holds no {CONFIG}, so no model of transformers; of a repository of GGUF "
            f"files name one, {PREFIX}{repo}/FILE.gguf"
        )
    return folder


def _reason(error: Exception) -> str:
    """Returns the reason of a failure in one line; the library's own messages are paragraphs."""
    from huggingface_hub import errors

    known: dict[type[Exception], str] = {
        # The first match counts: the hub's errors are subclasses of each other.
        errors.GatedRepoError: "access has to be asked for on the hub; then set HF_TOKEN",
        errors.RepositoryNotFoundError: "no such repository on the hub, or a private one without its HF_TOKEN",
        errors.RevisionNotFoundError: "the repository has no such revision",
        errors.RemoteEntryNotFoundError: "the repository has no such file",
    }
    reason = next((text for kind, text in known.items() if isinstance(error, kind)), None)
    first = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return reason or f"cannot be fetched, and is not in the hub's cache ({first})"


def name_of(path: Path) -> str:
    """Returns the name of the model at a path: its folder or file, or its repository in the hub's cache."""
    resolved = path.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.rpartition("--")[2]
    return resolved.name if not _in_blobs(resolved) else path.name


def _in_blobs(path: Path) -> bool:
    """Returns whether a path is in the hub's `blobs`. Files in the hub's cache are links to blobs named by content."""
    return path.parent.name == "blobs"
