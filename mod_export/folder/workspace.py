"""The build folder: what was made, from which inputs, and whether it is still whole.

Work is divided into *steps*. A step has a name, inputs (plain data: settings, versions, hashes of what it reads),
output files and a small result. The manifest keeps the hash of the inputs and the hash of every output, so the next
build reuses a step exactly if nothing that it depends on has changed. Files are made in a temporary folder and renamed
into place, the manifest last: a killed build leaves whole steps, and temporary files that the next build removes. A
finished build adds facts, which are removed before any of its files changes. The manifest has a checksum of its own, so
a reader can rely on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from mod_export.environment import EXPORTERS, versions
from mod_export.errors import BuildFolderError
from mod_export.folder.files import PARTIAL, FileEntry, changed_file, entry_of, replace_file
from mod_export.folder.manifest import EMPTY, MANIFEST, checksum, open_folder, read_manifest, with_checksum

LOCK = ".lock"
PATIENCE_S, POLL_S = 10.0, 0.05
"""Seconds for which another run that amends a finished folder is waited for, and between two looks. Writing a report
takes less than one."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT,
}  # fmt: skip
FAILED = {errno.EIO, errno.ESTALE, errno.EBUSY, errno.EXDEV, errno.ETIMEDOUT, errno.ENOTCONN}
"""Errors of disks, and of servers of network file systems, that occur although nothing is wrong with the request."""
Make = Callable[[Sequence[Path]], Any]
"""Writes the outputs of a step to these paths and returns its result, which is plain data."""
Amendment = tuple[Mapping[str, Any], Mapping[str, str]]
"""Facts, and the contents of text files, each by name."""


class Step(BaseModel):
    """A finished step, as the manifest records it. `seconds` is the time that it took when it was made; `reused` says
    that an earlier run made it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(exclude=True)
    fingerprint: str = ""
    outputs: dict[str, FileEntry] = {}
    result: Any
    seconds: float = 0.0
    reused: bool = Field(False, exclude=True)

    def is_of(self, fingerprint: str, outputs: Sequence[str]) -> bool:
        """Whether it was made from the same inputs and made these files."""
        return self.fingerprint == fingerprint and [*self.outputs] == [*outputs]


class Workspace:
    """A build folder that is being written: a context manager that holds the folder's lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._steps: dict[str, Step] = {}
        self._facts: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._lock: int | None = None
        self._guard = threading.RLock()  # Steps may be made in parallel, but are looked up and placed one at a time.

    def __enter__(self) -> Self:
        with _explained(self.root):
            self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def step(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        make: Make,
        is_reusable: Callable[[Any], bool] = lambda result: True,
    ) -> Step:
        """Does a step, or reuses it.

        `inputs` must contain everything that its outputs and its result depend on, as plain data. `make` writes each
        output to the path that it is given, and returns the result, also plain data. A result that is not `is_reusable`
        is made again.

        Raises:
            BuildFolderError: the folder cannot be written, or is full.
        """
        fingerprint = checksum([name, inputs])
        with self._guard:
            known = self._steps.get(name)
        is_known = known is not None and known.is_of(fingerprint, outputs) and self._is_whole(known)
        if known is not None and is_known and is_reusable(known.result):
            with self._guard:
                self._seen.add(name)
            return known.model_copy(update={"reused": True})
        begin = time.perf_counter()
        with _explained(self.root), tempfile.TemporaryDirectory(dir=self.root, prefix=PARTIAL) as partial:
            paths = [Path(partial) / output for output in outputs]
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            result = make(paths)
            with self._guard:
                self._reopen()
                for path, output in zip(paths, outputs, strict=True):
                    _place(path, self.root / output)
                step = Step(
                    name=name,
                    fingerprint=fingerprint,
                    outputs={output: entry_of(self.root / output) for output in outputs},
                    result=json.loads(json.dumps(result)),
                    seconds=round(time.perf_counter() - begin, 3),
                )
                self._steps[name] = step
                # Only after success, because a build can go on without a step that failed.
                self._seen.add(name)
                self._write_manifest()
        return step

    def leave_out(self, name: str) -> None:
        """Marks a step of this run as no longer needed: its files are removed when the build is closed."""
        with self._guard:
            self._seen.discard(name)

    def _is_whole(self, step: Step) -> bool:
        return not any(changed_file(self.root, output, entry) for output, entry in step.outputs.items())

    def hash_of(self, output: str) -> str:
        """Returns the SHA-256 of an output of a finished step."""
        with self._guard:
            entries = {path: entry for step in self._steps.values() for path, entry in step.outputs.items()}
        return entries[output].sha256

    def files(self) -> dict[str, FileEntry]:
        """Returns every output of the steps that this build did or reused."""
        return {path: entry for name in sorted(self._seen) for path, entry in self._steps[name].outputs.items()}

    def close(self, facts: Mapping[str, Any]) -> None:
        """Ends a successful build: drops the steps that this build did not request, removes their files, and adds the
        facts that a reader of the folder needs (a `Manifest` as plain data).
        """
        files = self.files()
        with _explained(self.root):
            self._reopen()
            for name in self._steps.keys() - self._seen:
                for output in self._steps.pop(name).outputs.keys() - files.keys():
                    self._remove(output)
            self._facts = {**facts, "files": {path: entry.model_dump() for path, entry in files.items()}}
            self._write_manifest()

    def _open(self) -> None:
        check_root(self.root)
        is_new = not self.root.exists()
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.root)
        try:
            if (self.root / MANIFEST).exists():
                data = read_manifest(self.root)
                self._steps = {name: Step(name=name, **step) for name, step in data["steps"].items()}
                self._facts = {name: value for name, value in data.items() if name not in EMPTY}
            # Leftovers of a run that was killed: folders of unfinished outputs, and single files.
            for leftover in [*self.root.glob(f"{PARTIAL}*"), *self.root.glob(f"*/{PARTIAL}*")]:
                shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
            self._write_manifest()
        except BaseException:  # An interrupt too must release the lock and remove a new folder.
            os.close(self._lock)
            if is_new:
                shutil.rmtree(self.root)
            raise

    def _reopen(self) -> None:
        """Removes the facts before files of a finished build change. A folder without facts counts as unfinished."""
        if self._facts:
            self._facts = {}
            self._write_manifest()

    def _remove(self, output: str) -> None:
        path = self.root / output
        path.unlink(missing_ok=True)
        for folder in path.relative_to(self.root).parents[:-1]:
            with contextlib.suppress(OSError):  # A folder that is not empty stays.
                (self.root / folder).rmdir()

    def _write_manifest(self) -> None:
        steps = {name: step.model_dump() for name, step in self._steps.items()}
        data = with_checksum({**EMPTY, "steps": steps, **self._facts})
        replace_file(self.root / MANIFEST, json.dumps(data, indent=1))


class FinishedFolder:
    """A finished build folder. Its steps write no files and are not recorded."""

    def __init__(self, root: Path, *, verify: bool) -> None:
        """Opens the folder; with `verify`, every file is compared with its hash.

        Raises:
            BuildFolderError: this is not a whole build folder, or a file is not what was built.
        """
        self.root = root
        self.manifest = open_folder(root, verify=verify)

    def step(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        make: Make,
        is_reusable: Callable[[Any], bool] = lambda result: True,
    ) -> Step:
        """Does a step, which is never reused."""
        assert not outputs, name
        return Step(name=name, result=json.loads(json.dumps(make([]))))

    def hash_of(self, output: str) -> str:
        """Returns the SHA-256 of a file as it was built."""
        return self.manifest.files[output].sha256

    @property
    def exports_alike(self) -> bool:
        """Whether a fresh export here must give the same graphs. With other versions of the exporters it can differ."""
        return self.manifest.exporters == versions(*EXPORTERS)


def amend(root: Path, change: Callable[[], Amendment]) -> None:
    """Replaces facts and text files of a finished folder with those of a later run.

    `change` is called while the folder is locked, so what it reads there is what it changes. Another run that amends
    the folder is waited for.

    Raises:
        BuildFolderError: the folder cannot be written, or a build is writing there or was interrupted; or `change`
            refuses.
    """
    with _explained(root):
        lock = _locked(root, PATIENCE_S)
        try:
            data = {**EMPTY, **read_manifest(root)}
            if "files" not in data:
                raise BuildFolderError(f"{root}: another build has begun here and has not ended; build again")
            facts, texts = change()
            data |= facts
            for name, text in texts.items():
                replace_file(root / name, text)
                entry = entry_of(root / name).model_dump()
                for outputs in (data["files"], *(step["outputs"] for step in data["steps"].values())):
                    if name in outputs:
                        outputs[name] = entry
            replace_file(root / MANIFEST, json.dumps(with_checksum(data), indent=1))
        finally:
            os.close(lock)


def _locked(root: Path, patience_s: float = 0.0) -> int:
    """Returns the lock of a build folder as an open file. Closing it releases the lock, and so does the end of the
    process. Another run that has it is waited for, up to `patience_s` seconds.
    """
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            os.close(lock)
            raise BuildFolderError(f"{root}: another build is writing here; wait for it, or name another -o") from error
        return lock


def check_root(root: Path) -> None:
    """Checks that a build may write into `root`, without writing anything.

    Raises:
        BuildFolderError: it is a file, a folder with other files, a damaged build folder, or cannot be written.
    """
    with _explained(root):
        if root.exists() and not root.is_dir():
            raise BuildFolderError(f"{root}: is a file; name a folder with -o")
        if (root / MANIFEST).exists():
            read_manifest(root)
        elif root.is_dir():
            foreign = sorted(p.name for p in root.iterdir() if p.name != LOCK and not p.name.startswith(PARTIAL))
            if foreign:
                raise BuildFolderError(
                    f"{root}: holds files that mod-export did not write ({', '.join(foreign[:3])}); "
                    "name an empty or new folder with -o"
                )
        existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise BuildFolderError(f"{root}: cannot write in {existing}; name another folder with -o")


def _place(path: Path, final: Path) -> None:
    # Temporary files are private by default, but others must be able to read what is built.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
    final.parent.mkdir(parents=True, exist_ok=True)
    path.replace(final)


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turns the operating system's refusals to write here into messages for the user."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in NO_ROOM:
            raise BuildFolderError(
                f"{root}: no room left to write {where} ({error.strerror}); free some space"
            ) from error
        if error.errno in REFUSED:
            raise BuildFolderError(f"{root}: cannot write {where} ({error.strerror})") from error
        # Only errors of the file system name a file. An error of a library that a step uses may have the same number.
        if error.errno in FAILED and error.filename:
            raise BuildFolderError(
                f"{root}: writing {where} failed ({error.strerror}); what is finished is kept, and the same command "
                "goes on after it"
            ) from error
        raise
