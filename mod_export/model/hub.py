"""Models of the Hugging Face hub, hf://ORG/NAME[@REVISION]: fetched into the hub's own cache, and then a folder.

What is fetched is what a model is read from: its config, its weights (safetensors, or pickles of tensors where there
are none) and the files of its tokenizer; of a repository of GGUF files the one that is named, hf://ORG/NAME/FILE.gguf.
The package `huggingface_hub` knows the endpoint, the cache, tokens and whether it is offline (HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from pathlib import Path

from mod_export.errors import CheckpointError

PREFIX = "hf://"
NAMED = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[^@]+\.gguf))?(@(?P<revision>.+))?")
ABOUT = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
WEIGHTS = (
    ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"),
)
"""In order of preference; the first kind that a repository has is fetched."""


def fetched(source: str) -> str:
    """The folder or file of a model on the hub; anything else stays as it is.

    Raises:
        CheckpointError: not such a name, no such repository, revision or file, no access to it, or no network.
        ImportError: the package `huggingface_hub` is missing, which comes with the extra `convert`.
    """
    if not source.startswith(PREFIX):
        return source
    named = NAMED.fullmatch(source)
    if named is None:
        raise CheckpointError(f"{source}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError

    try:
        return _fetched(named["repo"], named["file"], named["revision"])
    except (HfHubHTTPError, HFValidationError, FileMetadataError, OSError) as error:
        raise CheckpointError(f"{source}: {_reason(error)}") from error


def _fetched(repo: str, file: str | None, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download, snapshot_download

    if file is not None:
        return hf_hub_download(repo, file, revision=revision)
    for weights in WEIGHTS:
        folder = snapshot_download(repo, revision=revision, allow_patterns=[*ABOUT, *weights])
        if any((Path(folder) / name).is_file() for name in (weights[0], weights[-1])):
            break
    if not (Path(folder) / ABOUT[0]).is_file():
        raise CheckpointError(
            f"{PREFIX}{repo}: the repository holds no {ABOUT[0]}, so no model of transformers; of a repository of GGUF "
            f"files name one, {PREFIX}{repo}/FILE.gguf"
        )
    return folder


def _reason(error: Exception) -> str:
    """What is wrong, for a person; the library's own messages are paragraphs."""
    from huggingface_hub import errors

    known: dict[type[Exception], str] = {
        # The first that fits; the hub's errors are subclasses of each other.
        errors.GatedRepoError: "access has to be asked for on the hub; then set HF_TOKEN",
        errors.RepositoryNotFoundError: "no such repository on the hub, or a private one without its HF_TOKEN",
        errors.RevisionNotFoundError: "the repository has no such revision",
        errors.RemoteEntryNotFoundError: "the repository has no such file",
    }
    said = next((text for kind, text in known.items() if isinstance(error, kind)), None)
    first = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return said or f"cannot be fetched, and is not in the hub's cache ({first})"


def name_of(path: Path) -> str:
    """What the model at a path is called: its folder or file, and in the hub's cache the repository."""
    resolved = path.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.rpartition("--")[2]
    return resolved.name if not _in_blobs(resolved) else path.name


def _in_blobs(path: Path) -> bool:
    """A file of the hub's cache is a link to one that is named after its content."""
    return path.parent.name == "blobs"
