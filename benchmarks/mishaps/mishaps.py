"""What happens to a command: it is killed, its disk is full, a rename fails, or the clock jumps.

Disks are real ones (tmpfs) in a mount namespace of the tool's own. Renames and clocks are those of `shim.c`, which is
loaded before libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.001
EARLIEST = 0.02
"""The command is not killed before this share of its time has passed: until then it imports modules."""
PATIENCE_S = 600.0
PAGE = 4096
PLENTY = "2G"
RENAME_ERRORS = (errno.EIO, errno.ESTALE, errno.EBUSY, errno.EACCES, errno.EXDEV)
"""What a rename may fail with on a network file system."""
LOADED = ctypes.CDLL(None)
"""The libraries of this process; the shim is one of them if it was loaded."""


@dataclass(frozen=True)
class Undisturbed:
    """A run of a command to which nothing happened.

    Attributes:
        seconds: time that it took.
        size: bytes that it wrote and left.
        renames: number of files that it renamed or linked in its folder; 0 without the shim.
    """

    seconds: float
    size: int
    renames: int


class Mishap(ABC):
    """Something that happens to one run of a command. Its moment is random.

    Attributes:
        needs_shim: whether shim.c must be loaded.
        needs_disk: whether file systems must be mounted.
        of_writers: whether it happens only to commands that write files.
        harmless: whether the command must succeed nevertheless.
    """

    needs_shim = needs_disk = of_writers = harmless = False

    def __init__(self, chance: random.Random, alone: Undisturbed) -> None:
        self.chance, self.alone = chance, alone

    @contextlib.contextmanager
    def around(self, folder: Path) -> Iterator[None]:
        """Prepares the file system of `folder`, in which the command then runs."""
        yield

    def strike(self, folder: Path) -> None:  # noqa: B027  # Most happen later.
        """Happens before the command starts."""

    def within(self) -> None:  # noqa: B027
        """Happens in the process of the command, before it begins."""

    def end(self, process: int) -> int | None:
        """Waits for the command; returns its exit code, or None if it was killed.

        Raises:
            HangError: it does not end.
        """
        return ended_by_itself(process)

    def struck(self, code: int | None) -> bool:
        """Whether it happened before the command had ended, which then gave `code`."""
        return True

    def relieve(self, folder: Path) -> None:  # noqa: B027
        """Ends the mishap, before the command runs again."""

    @abstractmethod
    def __str__(self) -> str:
        """What happened, in a few words."""


class Kill(Mishap):
    """SIGKILL."""

    def __init__(self, chance: random.Random, alone: Undisturbed) -> None:
        super().__init__(chance, alone)
        self._after_s = chance.uniform(EARLIEST, 1) * alone.seconds

    def end(self, process: int) -> int | None:
        code = ended(process, self._after_s)
        if code is None:
            kill(process)
        return code

    def struck(self, code: int | None) -> bool:
        return code is None

    def __str__(self) -> str:
        return f"killed after {self._after_s:.3f} s"


class FullDisk(Mishap):
    """A disk with less room than the command needs."""

    needs_disk = of_writers = True

    def __init__(self, chance: random.Random, alone: Undisturbed) -> None:
        super().__init__(chance, alone)
        self._free = int(chance.uniform(0, 1) * alone.size)

    @contextlib.contextmanager
    def around(self, folder: Path) -> Iterator[None]:
        _mount(folder, PLENTY)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)

    def strike(self, folder: Path) -> None:
        used = shutil.disk_usage(folder).used
        _mount(folder, str((used + self._free) // PAGE * PAGE + PAGE), remount=True)

    def struck(self, code: int | None) -> bool:
        return code != 0

    def relieve(self, folder: Path) -> None:
        _mount(folder, PLENTY, remount=True)

    def __str__(self) -> str:
        return f"{self._free:,} bytes free on the disk"


class FailingRename(Mishap):
    """A rename that fails, or that seems to fail although the server of a network file system has done it."""

    needs_shim = of_writers = True

    def __init__(self, chance: random.Random, alone: Undisturbed) -> None:
        super().__init__(chance, alone)
        self._number, self._done = chance.randrange(alone.renames), chance.random() < 0.5
        # After such a rename the client asks again, and this time the source is not there.
        self._error = errno.ENOENT if self._done else chance.choice(RENAME_ERRORS)

    def within(self) -> None:
        LOADED.mishap_fail_rename(self._number, self._error, self._done)

    def __str__(self) -> str:
        done = ", though it was done" if self._done else ""
        return f"rename {self._number + 1} of {self.alone.renames} failed ({errno.errorcode[self._error]}{done})"


class JumpingClock(Mishap):
    """A clock of the day that jumps by up to twenty years at every look."""

    needs_shim = harmless = True

    def __init__(self, chance: random.Random, alone: Undisturbed) -> None:
        super().__init__(chance, alone)
        self._seed = chance.getrandbits(32)

    def within(self) -> None:
        LOADED.mishap_jump(ctypes.c_ulong(self._seed))

    def __str__(self) -> str:
        return f"the clock jumped, seed {self._seed}"


MISHAPS: Mapping[str, type[Mishap]] = {"kill": Kill, "disk": FullDisk, "rename": FailingRename, "clock": JumpingClock}


class HangError(Exception):
    """A command did not end."""


def ended_by_itself(process: int) -> int:
    """Waits for a process, and returns its exit code.

    Raises:
        HangError: it does not end; it is killed then.
    """
    code = ended(process, PATIENCE_S)
    if code is None:
        kill(process)
        raise HangError(f"it did not end within {PATIENCE_S:g} s")
    return code


def ended(process: int, within_s: float) -> int | None:
    """Waits for a process; returns its exit code, or None if it takes longer."""
    end = time.monotonic() + within_s
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)


def kill(process: int) -> None:
    """Kills a process and what it has started, and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _mount(folder: Path, size: str, *, remount: bool = False) -> None:
    options = f"{'remount,' if remount else ''}size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
