"""Serves build folders on Ray Serve. Each replica runs the application of `mod-export serve`.

    serve run mod_export.serve.ray_app:app folder=build/writing threads=2 max_replicas=4

Ray picks a replica for each request, starts and stops replicas with the load, and replaces those that fail. The
application decides how many requests a replica accepts at once, and how it answers the others.
"""

# No `from __future__ import annotations`: Ray reads the annotation of `app` to check its arguments.
import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from mod_export.errors import ModExportError, UsageError
from mod_export.folder.manifest import MANIFEST, open_folder
from mod_export.serve import DRAIN_S, MAX_QUEUE, MAX_WAIT_S, PREFIX_CACHE_MIB
from mod_export.serve.cors import Cors, check_origins
from mod_export.serve.endpoint import RETRY_S, ApiError, Guard, problem_of
from mod_export.serve.folder_app import OpenFolder
from mod_export.serve.request_log import RequestLog
from mod_export.serve.scheduler import LOG
from mod_export.serve.server import LOOPBACK, read_keys
from mod_export.serve.service import ServiceOptions
from mod_export.types import ModelKind, having

BESIDE_TEXTS = 16
"""Requests that a replica accepts beyond those that it answers with texts or scores, or queues. They are requests for
metrics, health and lists of models, and requests that are refused; each takes milliseconds.
"""
HEALTH_S = 2.0
"""Seconds between two health checks of a replica. Ray replaces it after three failures in a row."""
FEW = Annotated[int, Field(ge=1)]
SECONDS = Annotated[float, Field(ge=0, le=threading.TIMEOUT_MAX, allow_inf_nan=False)]


class Arguments(BaseModel):
    """Arguments of `serve run ... NAME=VALUE`, and of `args:` in a file for `serve deploy`.

    Attributes:
        folder: a build folder, at this path on every node.
        folders: name -> build folder, where clients choose by name; or a folder that contains build folders.
        open_folders: maximum number of `folders` that a replica has open, besides the first, which is always open.
        replicas: number of replicas; with `max_replicas`, the minimum.
        max_replicas: maximum number of replicas; None keeps their number at `replicas`.
        target_ongoing_requests: average number of requests of a replica above which another replica is started; None
            means one request for each row.
        upscale_delay_s: seconds for which the load must stay higher before a replica is started.
        downscale_delay_s: seconds for which the load must stay lower before a replica is stopped.
        threads: threads of a CPU engine inside one operator, and CPUs that a replica reserves.
        gpus: GPUs that a replica reserves.
        drain_s: seconds that texts have to finish when a replica stops, or a folder is closed to open another.
        api_key_file: file with API keys, one per line, at this path on every node; each request must send one of them.
        hosts: host names, besides `localhost`, that the server answers to if it has no API keys; separated by commas or
            as a list. `*` means any.
        allow_origins: web pages of other origins that may use the server, such as `https://chat.example`; separated by
            commas or as a list. `*` means any, and needs API keys or `hosts=*`.
        trusted_keys: public keys, each a PEM file at this path on every node, separated by commas or as a list; every
            folder must be signed by the owner of one.
        name: see `ServiceOptions`, also for `rows`, `max_queue`, `max_wait_s`, `target`, `dtype`, `model` and
            `prefix_cache_mib`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = None
    folders: dict[str, Path] | Path | None = None
    open_folders: FEW = 2
    replicas: FEW = 1
    max_replicas: FEW | None = None
    target_ongoing_requests: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    upscale_delay_s: SECONDS = 10.0
    downscale_delay_s: SECONDS = 300.0
    threads: FEW = 1
    gpus: SECONDS = 0.0
    drain_s: SECONDS = DRAIN_S
    api_key_file: Path | None = None
    hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    name: str | None = None
    rows: FEW | None = None
    max_queue: Annotated[int, Field(ge=0)] = MAX_QUEUE
    max_wait_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = MAX_WAIT_S
    target: str | None = None
    dtype: str | None = None
    model: ModelKind = "mod"
    prefix_cache_mib: Annotated[int, Field(ge=0)] = PREFIX_CACHE_MIB
    trusted_keys: tuple[Path, ...] | None = None

    @field_validator("hosts", "allow_origins", "trusted_keys", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [entry.strip() for entry in value.split(",")] if isinstance(value, str) else value

    @field_validator("hosts")
    @classmethod
    def _as_compared(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Returns host names as those of requests are compared."""
        return tuple(host.strip().lower() for host in hosts)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.folder is None) == (self.folders is None):
            raise ValueError("expected a build folder as folder=DIR, or several as folders=DIR, and not both")
        if self.folders is not None and self.name is not None:
            raise ValueError("name: is for one folder; those of `folders` have their own names")
        try:
            check_origins(
                self.allow_origins, "allow_origins", public=self.api_key_file is not None or "*" in self.hosts
            )
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def options(self) -> ServiceOptions:
        """The options with which each folder is served."""
        names = {field.name for field in dataclasses.fields(ServiceOptions)}
        return ServiceOptions(**self.model_dump(include=names))

    def by_name(self) -> dict[str | None, Path]:
        """Returns model name -> build folder. The name None stands for the name of the checkpoint.

        Raises:
            UsageError: there is no build folder.
        """
        if self.folder is not None:
            return {self.name: self.folder.absolute()}
        if isinstance(self.folders, Path):
            paths = sorted(self.folders.absolute().glob(f"*/{MANIFEST}"))
            folders: dict[str | None, Path] = {path.parent.name: path.parent for path in paths}
        else:
            folders = {name: folder.absolute() for name, folder in (self.folders or {}).items()}
        if not folders:
            raise UsageError(f"folders: expected build folders, and there is none in {self.folders}")
        return folders


def app(args: Arguments) -> serve.Application:
    """Builds the application.

    Raises:
        UsageError: there is no build folder.
        BuildFolderError: `rows` is not given, and a folder whose engines would tell it is damaged or missing.
    """
    folders = args.by_name()
    rows = args.rows or max(map(_most_rows, folders.values()))
    # A request for each text that has or waits for a row, and for each prompt that is scored or waits for scoring.
    most_waiting = rows + args.max_queue + 1 + args.max_queue
    most_requests = most_waiting * min(len(folders), 1 + args.open_folders) + BESIDE_TEXTS
    number: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        scaling = {
            "min_replicas": args.replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": args.target_ongoing_requests or max(1, rows),
            "upscale_delay_s": args.upscale_delay_s,
            "downscale_delay_s": args.downscale_delay_s,
        }
        number = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        name="mod-export",
        ray_actor_options={"num_cpus": args.threads, "num_gpus": args.gpus},
        max_ongoing_requests=most_requests,
        # The application refuses excess requests itself. This limit is for requests that wait while a replica starts,
        # or that come faster than the proxy hands them over. Ray answers those beyond it with 429 and a plain text.
        max_queued_requests=most_requests * (args.max_replicas or args.replicas),
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_S},
        graceful_shutdown_timeout_s=args.drain_s,
        health_check_period_s=HEALTH_S,
        **number,
    )
    application: serve.Application = deployment(serve.ingress()(Replica)).bind(args, folders)
    return application


def _most_rows(folder: Path) -> int:
    """Returns the largest number of texts that an engine of a build folder writes at once; 0 if none writes text."""
    engines = open_folder(folder, verify=False).engines
    return max((engine.bucket.batch for engine in having(engines, role="decode")), default=0)


class Replica:
    """A process with open build folders.

    Attributes:
        open_folders: folders that were opened. Closed ones are removed when the next one is opened.
    """

    def __init__(self, args: Arguments, folders: Mapping[str | None, Path]) -> None:
        self.open_folders: list[OpenFolder] = []
        self._args, self._folders = args, folders
        self._keys = read_keys(args.api_key_file) if args.api_key_file else frozenset[str]()
        self._hosts = None if self._keys or "*" in args.hosts else {*LOOPBACK, *args.hosts}
        self._guard = Guard(self._keys, self._hosts, args.allow_origins)

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Builds the application; Ray calls this before the replica gets requests. The first folder stays open. Ray's
        cache opens the others on demand and closes the least recently used one.
        """
        self._first = await self._opened(next(iter(self._folders)))

        async def load(name: str) -> OpenFolder:
            try:
                return await self._opened(name)
            except ModExportError as error:  # An internal error whose text contains paths, so clients do not see it.
                LOG.error("%s: cannot be opened: %s", name, error)
                raise ApiError(500, f"model {name!r}: cannot be opened; the log says why", code="failed") from error

        self._cached = serve.multiplexed(max_num_models_per_replica=self._args.open_folders)(load)
        return Starlette(routes=[Mount("/", app=self._answer)], lifespan=self._until_shutdown)

    def check_health(self) -> None:
        """Raises an error if this replica must be replaced; Ray calls it regularly.

        Raises:
            EngineError: the replica must be replaced.
        """
        for folder in self.open_folders:
            folder.check()

    @contextlib.asynccontextmanager
    async def _until_shutdown(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for folder in self.open_folders:
            await asyncio.to_thread(folder.close)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            # No await separates this from the folder's own count of requests, so the folder cannot close in between.
            folder = await self._chosen(request)
        except Exception as error:  # Handled as in `create_app`.
            answer = Cors(problem_of(error).response(request.url.path), self._args.allow_origins)
            await RequestLog(answer)(scope, receive, send)
        else:
            await folder(scope, receive, send)

    async def _chosen(self, request: Request) -> OpenFolder:
        name = serve.get_multiplexed_model_id()
        if not name or len(self._folders) == 1:
            return self._first
        # Checked first: clients without access must not make the server open and close folders.
        self._guard.check(request)
        if name not in self._folders:
            names = ", ".join(repr(known_name) for known_name in self._folders)
            message = f"model {name[:80]!r}: not served here; this server has {names}"
            raise ApiError(404, message, code="model_not_found")
        if name == next(iter(self._folders)):
            return self._first
        folder: OpenFolder = await self._cached(name)
        return folder

    async def _opened(self, name: str | None) -> OpenFolder:
        args = self._args
        options = dataclasses.replace(args.options, name=name)
        folder = await asyncio.to_thread(
            OpenFolder.of, self._folders[name], options, self._keys, self._hosts, args.drain_s, args.allow_origins
        )
        self.open_folders = [opened for opened in self.open_folders if not opened.closed] + [folder]
        return folder
