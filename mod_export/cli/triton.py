"""The command triton: a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mod_export.cli.boundary import PATH, command, folder_argument, trusted_keys_option
from mod_export.serve import MAX_QUEUE

if TYPE_CHECKING:
    from mod_export.triton.models import Forward


@click.command()
@folder_argument
@click.option("-o", "--out", "repository", metavar="REPOSITORY", type=PATH, required=True, help="The model repository.")
@click.option(
    "--forward",
    type=click.Choice(["python", "onnxruntime", "tensorrt"]),
    default="python",
    show_default=True,
    help="What runs whole rows. python: mod-export in the Python backend; onnxruntime: the portable graphs; tensorrt: "
    "the plans. For the last two, the container needs no mod-export.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the model; default: that of the checkpoint. The model that writes text is NAME-text.",
)
@click.option(
    "--target", metavar="T", help="Target of the engines that the Python models run; default: the fastest here."
)
@click.option(
    "--dtype", metavar="D", help="Dtype of those engines, or of the plans; default: the fastest, else the first built."
)
@click.option("--threads", metavar="N", type=int, help="CPU threads of an engine; default: every physical core.")
@click.option(
    "--max-queue",
    metavar="N",
    type=int,
    default=MAX_QUEUE,
    show_default=True,
    help="Requests that may wait for a model.",
)
@trusted_keys_option
@click.option("--instances", metavar="N", type=int, default=1, show_default=True, help="Copies of each model.")
@command
def triton(
    folder: Path,
    repository: Path,
    forward: Forward,
    name: str | None,
    target: str | None,
    dtype: str | None,
    threads: int | None,
    max_queue: int,
    trusted_keys: tuple[Path, ...] | None,
    instances: int,
    verbosity: int,
) -> int:
    """Write a model repository for Triton Inference Server from a build folder.

    Models that an earlier run with the same NAME wrote are replaced, and no others.
    """
    from mod_export.folder.signature import check_signature
    from mod_export.triton.models import RepositoryRequest
    from mod_export.triton.repository import write_repository

    check_signature(folder, trusted_keys)
    request = RepositoryRequest(
        folder=folder, forward=forward, name=name, target=target, dtype=dtype, threads=threads, max_queue=max_queue,
        instances=instances,
    )  # fmt: skip
    models, no_text = write_repository(request, repository)
    if verbosity >= 0:
        for model in models:
            click.echo(f"{model.name}  {model.backend}  {model.about}")
        if no_text:
            click.echo(f"note: no {request.model_name}-text: {no_text}", err=True)
    return 0
