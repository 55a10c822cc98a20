"""Builds a release into dist/: wheel, source distribution, their hashes, and the list of what a server installs.

    make dist                                        # in an environment of its own, .venv/release
    python -m benchmarks.release.run --out dist      # in one that has build, twine and cyclonedx-bom

The last commit is what is built, never the working tree. It is cloned twice, into folders of different names, and both
builds must give the same bytes. Every time in them is that of the commit (SOURCE_DATE_EPOCH), and constraints.txt in
this folder says which setuptools builds them, so anybody can build them again from the commit and compare the hashes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVED_WITH = "serve,ort,generate"
"""Extras of the container image (deploy/Dockerfile)."""
CONSTRAINTS = "benchmarks/release/constraints.txt"
BILL, SUMS = "mod_export-serving.cdx.json", "SHA256SUMS"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a command and returns its output.

    Raises:
        SystemExit: it failed; its own messages are shown.
    """
    listed = [str(argument) for argument in command]
    done = subprocess.run(
        listed,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,  # Files of a wheel keep their permissions.
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(listed)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def time_of(commit: str, root: Path = ROOT) -> int:
    """Returns the time of a commit, in seconds since 1970."""
    return int(run("git", "log", "-1", "--format=%ct", commit, cwd=root))


def built(clone: Path, out: Path, commit: str, root: Path = ROOT) -> list[Path]:
    """Clones a commit into `clone`, builds it, and returns the source distribution and the wheel in `out`.

    The wheel is built from the source distribution, so that it also shows that nothing is missing there.
    """
    out.mkdir(parents=True)
    run("git", "clone", "--quiet", "--no-checkout", root, clone, cwd=out)
    run("git", "checkout", "--quiet", "--detach", commit, cwd=clone)
    epoch = time_of(commit, root)
    environment = {"SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(clone / CONSTRAINTS)}
    raw, unpacked = out / "raw", out / "unpacked"
    run(sys.executable, "-m", "build", "--sdist", "--outdir", raw, clone, cwd=out, **environment)
    (archive,) = raw.glob("*.tar.gz")
    name = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    packed_again(unpacked / name, out / archive.name, epoch)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, unpacked / name, cwd=out, **environment)
    shutil.rmtree(raw)
    shutil.rmtree(unpacked)
    return sorted(path for path in out.iterdir() if path.is_file())


def packed_again(folder: Path, archive: Path, epoch: int) -> None:
    """Packs a source distribution so that its bytes depend on its files alone.

    setuptools 84 takes the time of each file, its owner, and the time of packing into the archive.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = epoch
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with (
        archive.open("wb") as file,
        # An empty name, because gzip would write that of the file into its header.
        gzip.GzipFile("", "wb", 9, file, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as packed,
    ):
        # `add` goes through a folder in the order of names.
        packed.add(folder, folder.name, filter=plain)


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """File name -> SHA-256."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Returns the names of files that only one build has, or that are not the same in both."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def bill_of_materials(wheel: Path, out: Path, folder: Path) -> Path:
    """Installs the wheel as a server does, into an empty environment, and lists what is there (CycloneDX, JSON)."""
    environment = folder / "serving"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet",
        "--constraint", ROOT / "constraints.txt", f"{wheel}[{SERVED_WITH}]", cwd=folder,
    )  # fmt: skip
    path = out / BILL
    run(
        sys.executable, "-m", "cyclonedx_py", "environment", environment / "bin" / "python",
        "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--validate", "--output-format", "JSON",
        "--output-file", path, cwd=folder,
    )  # fmt: skip
    return path


def main(arguments: Sequence[str]) -> int:
    """Builds a release. Returns 1 if the two builds differ."""
    parser = argparse.ArgumentParser(description="Builds a release of the last commit, twice, and checks it.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="replaced if it exists; default: dist")
    parser.add_argument("--commit", default="HEAD", help="what to build; default: HEAD")
    options = parser.parse_args(arguments)
    commit = run("git", "rev-parse", f"{options.commit}^{{commit}}", cwd=ROOT).strip()
    if run("git", "status", "--porcelain", cwd=ROOT):
        print(f"the working tree has changes, which are left out: this builds {commit[:12]}")
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        paths = built(work / "one" / "clone", work / "first", commit)
        again = built(work / "another-clone", work / "second", commit)
        if changed := differing(digests(paths), digests(again)):
            print(f"two builds of {commit[:12]} differ: {', '.join(changed)}; diffoscope shows where", file=sys.stderr)
            return 1
        print(run(sys.executable, "-m", "twine", "check", "--strict", *paths, cwd=work), end="")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        paths = [Path(shutil.copy(path, out)) for path in paths]
        (wheel,) = (path for path in paths if path.suffix == ".whl")
        paths.append(bill_of_materials(wheel, out, work))
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests(paths).items())
    (out / SUMS).write_text(sums, encoding="utf-8")
    print(f"{out}: built twice from {commit[:12]} with the same bytes\n{sums}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
