"""The command serve: serves a build folder until a signal ends it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from mod_export.cli.boundary import PATH, command, folder_argument, trusted_keys_option
from mod_export.serve import DRAIN_S, KEEP_ALIVE_S, MAX_QUEUE, MAX_WAIT_S, PREFIX_CACHE_MIB


@click.command()
@folder_argument
@click.option(
    "--host",
    metavar="H",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any address but loopback needs --api-key-file.",
)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."
)
@click.option("--name", metavar="NAME", help="Name of the model for clients; default: that of the checkpoint.")
@click.option(
    "--rows", metavar="N", type=int, help="Texts that one engine writes at once; default: as many as the engines can."
)
@click.option(
    "--max-queue", metavar="N", type=int, default=MAX_QUEUE, show_default=True, help="Texts that may wait for a row."
)
@click.option(
    "--max-wait",
    "max_wait_s",
    metavar="S",
    type=float,
    default=MAX_WAIT_S,
    show_default=True,
    help="Seconds that a request may wait for the row of its first text.",
)
@click.option(
    "--drain", "drain_s", metavar="S", type=float, default=DRAIN_S, show_default=True,
    help="Seconds that texts have to finish after a signal.",
)  # fmt: skip
@click.option(
    "--keep-alive", "keep_alive_s", metavar="S", type=float, default=KEEP_ALIVE_S, show_default=True,
    help="Seconds that a connection stays open between two requests.",
)  # fmt: skip
@click.option(
    "--prefix-cache", "prefix_cache_mib", metavar="MIB", type=click.IntRange(0), default=PREFIX_CACHE_MIB,
    show_default=True, help="Memory for beginnings of texts, which later texts reuse; 0 keeps none.",
)  # fmt: skip
@click.option(
    "--api-key-file", "key_file", metavar="FILE", type=PATH, help="API keys, one per line; requests must send one."
)
@click.option(
    "--allow-origin", "origins", metavar="ORIGIN", multiple=True,
    help="A web page that may use the server, such as https://chat.example; may be given several times. * allows "
    "every page, and needs --api-key-file.",
)  # fmt: skip
@trusted_keys_option
@click.option(
    "--reload", is_flag=True,
    help="Take a new version of the folder when it appears or at a SIGHUP, and let the old one finish its texts.",
)  # fmt: skip
@click.option(
    "--supervise", is_flag=True,
    help="Run the engines in a process of their own. When it crashes, another one starts; until then requests get "
    "status 503.",
)  # fmt: skip
@click.option(
    "--traces", is_flag=True,
    help="Send OpenTelemetry traces by OTLP over HTTP, to where the variable OTEL_EXPORTER_OTLP_ENDPOINT says.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="Form of the log on stderr: lines for people, or an object a line for programs.",
)  # fmt: skip
@click.option("--target", metavar="T", help="Target of the engines; default: the fastest here.")
@click.option(
    "--dtype",
    metavar="D",
    help="Dtype of the engines; default: that of the fastest, or with --target the first that was built.",
)
@click.option("--model", type=click.Choice(["mod", "dense"]), default="mod", show_default=True)
@click.option("--threads", metavar="N", type=int, help="CPU threads of an engine; default: every physical core.")
@command
def serve(
    folder: Path,
    host: str,
    port: int,
    drain_s: float,
    keep_alive_s: float,
    key_file: Path | None,
    origins: Sequence[str],
    reload: bool,
    supervise: bool,
    traces: bool,
    log_format: str,
    verbosity: int,
    **options: Any,
) -> int:
    """Serve a build folder: OpenAI's API, the Open Inference Protocol, and metrics.

    At the first signal the server finishes its texts and ends; a second signal ends it at once. -v logs every request.
    """
    from mod_export.serve.server import ServerOptions, read_keys, serve_folder
    from mod_export.serve.service import ServiceOptions

    server = ServerOptions(
        host=host,
        port=port,
        drain_s=drain_s,
        keep_alive_s=keep_alive_s,
        keys=read_keys(key_file) if key_file else frozenset(),
        origins=frozenset(origins),
        reload=reload,
        supervise=supervise,
        traces=traces,
        log_requests=verbosity > 0,
        log_format=log_format,
    )
    return serve_folder(folder, ServiceOptions(**options), server, say=partial(click.echo, err=True))
