"""Loads a build folder and runs it. A server needs mod-export with its base dependencies and one engine library
(`pip install "mod-export[ort]"`). It does not need the checkpoint, and PyTorch only for an AOTInductor engine.

    import mod_export
    with mod_export.load("build/demo") as deployment:
        logits = deployment.run(ids)
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from mod_export.engines import ENGINES
from mod_export.engines.protocol import Runner
from mod_export.environment import usable_cores
from mod_export.errors import TargetError, UnverifiedWarning, UsageError
from mod_export.folder.files import verify_files
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.rows.failures import FailedRow
from mod_export.rows.serving import served_of
from mod_export.types import PRIMARY, ROUTED, Bucket, DType, Engine, ModelKind, graph_of, primary_output, writes_text

NO_CACHE = "its cache is kept on the device by the server that uses it; see docs/generation.md"


def runnable_engines(
    folder: Path,
    engines: Sequence[Engine],
    targets: Sequence[str],
    *,
    texts: bool = False,
    failed: Sequence[FailedRow] = (),
) -> list[Engine]:
    """The engines of a folder that run here, of all targets or of those named; with `texts`, those that keep a cache.
    `failed` is what the build could not build, for the message.

    Raises:
        TargetError: nothing in it runs here, or a named target is not in it or cannot run.
    """
    what = f"engine{' that writes text' if texts else ''}"
    names = list(dict.fromkeys(engine.target for engine in engines))
    missing = [name for name in targets if name not in names]
    if missing:
        lost = _why_missing([row for row in failed if row.target in (None, *missing)])
        built = f"built for {', '.join(names)}" if names else "built for none"
        raise TargetError(f"{folder}: holds no {what} for {', '.join(missing)}{lost}; {built}")
    found = {name: ENGINES[name].availability() for name in (targets or names)}
    reasons = {name: one.refusal(e for e in engines if e.target == name) for name, one in found.items()}
    if texts:
        reasons = {name: reason or ("" if ENGINES[name].binds else NO_CACHE) for name, reason in reasons.items()}
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if refused and (targets or len(refused) == len(found)):
        raise TargetError(f"{folder}: no {what} runs here: {'; '.join(refused)}")
    here = [name for name, reason in reasons.items() if not reason]
    return [engine for engine in engines if engine.target in here and found[engine.target].can_run(engine)]


def _why_missing(failed: Iterable[FailedRow]) -> str:
    """The first reason, in brackets; empty where nothing failed."""
    return next((f" ({row.sentence})" for row in failed), "")


def served_engines(
    folder: Path, manifest: Manifest, model: ModelKind, target: str | None, dtype: str | None, *, texts: bool = False
) -> list[Engine]:
    """Engines of one model, target and dtype that run here and met their gates, and read whole rows or write `texts`.

    Where no target is named, they are the fastest that met their gates, as the build measured them, of the dtype if one
    is named; where nothing was measured, the first. Of a named target no dtype is the first built. There is no fallback
    to another dtype where a gate was missed: the user has to name it.

    Raises:
        UsageError: there is no engine of this model.
        TargetError: nothing runs here, the target or the dtype is not among them, or they missed their gates.
    """
    what = f"engine{' that writes text' if texts else ''}"
    engines = [one for one in manifest.engines if one.model == model and one.writes_text == texts]
    failed = [
        row
        for row in manifest.failed
        if row.model in (None, model) and (row.role is None or writes_text(row.role) == texts)
    ]
    if not engines and failed:
        raise TargetError(f"{folder}: holds no {what} of model {model!r}{_why_missing(failed)}; build again")
    if not engines:
        raise UsageError(
            f"{folder}: holds no {what} of model {model!r}; expected {' or '.join(map(repr, manifest.models))}"
        )
    here = runnable_engines(folder, engines, [target] if target else [], texts=texts, failed=failed)
    wanted = [one for one in here if dtype in (None, one.dtype)]
    if not wanted:
        lost = _why_missing(row for row in failed if row.target in (None, target) and row.dtype in (None, dtype))
        names = ", ".join(dict.fromkeys(engine.target for engine in here))
        raise TargetError(f"{folder}: holds no {dtype} {what} for {names}{lost}")
    first = (wanted[0].target, wanted[0].dtype)
    pair = first if target else _fastest(manifest, wanted, texts=texts) or first
    served = [one for one in wanted if (one.target, one.dtype) == pair]
    missed = [reason for one in served for reason in manifest.refused.get(one.path, ())]
    if missed:
        raise TargetError(
            f"{folder}: the {served[0].dtype} engines for {served[0].target} missed their gates and are not served "
            f"({'; '.join(dict.fromkeys(missed))}); name another dtype, or build with another gate if this one is "
            "wrong for your use"
        )
    return served


def _fastest(manifest: Manifest, engines: Sequence[Engine], *, texts: bool) -> tuple[str, DType] | None:
    """Target and dtype of those of `engines` that were measured and met their gates; None where none was."""
    refused = {
        (one.model, one.writes_text, one.target, one.dtype) for one in manifest.engines if one.path in manifest.refused
    }
    here = {(one.model, one.target, one.dtype) for one in engines}
    measured = [
        one
        for one in manifest.measured
        if (one.model, one.target, one.dtype) in here and writes_text(one.role) == texts
    ]
    return next(((one.target, one.dtype) for one in served_of(measured, refused)), None)


def load(
    root: str | Path,
    target: str | None = None,
    dtype: str | None = None,
    model: ModelKind = "mod",
    threads: int | None = None,
) -> Deployment:
    """Opens a build folder for inference.

    Args:
        root: the folder.
        target: an engine family; None is that of the fastest engines that run on this machine and met their gates, as
            the build measured them, or the first in the folder where nothing was measured.
        dtype: of the engine; None is that of the fastest, and of a named target the first built.
        model: `mod`, or `dense` for the dense baseline.
        threads: of a CPU engine inside one operator; None is every physical core that this process may use
            (`environment.usable_cores`), 0 is the library's own choice.

    Raises:
        BuildFolderError: not a complete build folder, or a needed file is missing or has another size. The content of
            a file is compared with its hash when a bucket that needs it is first run.
        TargetError: nothing in it runs here, or the target is not in it, or its engines missed their gates.
    """
    folder = Path(root)
    manifest = open_folder(folder, verify=False)
    chosen = served_engines(folder, manifest, model, target, dtype)
    warn_unverified(folder, manifest)
    return Deployment(folder, manifest, chosen, threads_to_use(threads))


def warn_unverified(folder: Path, manifest: Manifest) -> None:
    """Says, on behalf of the caller's caller, that a folder was built without evidence; Python shows it once."""
    if not manifest.verified:
        warnings.warn(
            f"{folder}: nothing of it was verified: it was built with --no-evidence. `mod-export validate {folder}` "
            "compares its engines with PyTorch",
            UnverifiedWarning,
            stacklevel=3,
        )


def threads_to_use(threads: int | None) -> int:
    """Every physical core that this process may use for None; a UsageError for a negative number."""
    if threads is not None and threads < 0:
        raise UsageError(f"threads: expected 1 or more, or 0 for the library's own choice, got {threads}")
    return usable_cores() if threads is None else threads


class Deployment:
    """The buckets of one model, target and dtype. Engines are opened when first needed; several threads may run them.

    Attributes:
        target: of the engines.
        dtype: likewise.
        threads: of a CPU engine inside one operator; 0 is the library's own choice.
        vocab_size: of a model of token ids; None of a model that reads other things.
        buckets: smallest first.
    """

    def __init__(self, root: Path, manifest: Manifest, engines: Sequence[Engine], threads: int) -> None:
        """`engines`: one for each bucket.

        Raises:
            BuildFolderError: a file that they need is missing or has another size.
        """
        self.target, self.dtype, self.threads = engines[0].target, engines[0].dtype, threads
        self.vocab_size = manifest.models[engines[0].model].vocab_size
        self._root, self._config = root, manifest.config
        self._graphs = {engine.bucket: graph_of(engine, manifest.graphs) for engine in engines}
        self._engines = {engine.bucket: engine for engine in engines}
        self.buckets = tuple(sorted(self._engines, key=lambda bucket: (bucket.batch * bucket.seq, bucket)))
        self._unread = manifest.entries(path for engine in engines for path in engine.files)
        verify_files(root, self._unread, read=False)
        self._opening = threading.Lock()
        self._opened = contextlib.ExitStack()
        self._runners: dict[Bucket, Runner] = {}

    @property
    def inputs(self) -> dict[Bucket, dict[str, tuple[str, tuple[int, ...]]]]:
        """Of each bucket: name of an input -> its dtype and shape, what `infer` takes."""
        return {bucket: dict(graph.inputs) for bucket, graph in self._graphs.items() if graph is not None}

    @property
    def outputs(self) -> dict[Bucket, dict[str, tuple[int, ...]]]:
        """Of each bucket: name of an output of the model -> its shape."""
        return {bucket: dict(graph.results) for bucket, graph in self._graphs.items() if graph is not None}

    def __repr__(self) -> str:
        buckets = ", ".join(bucket.name for bucket in self.buckets)
        return f"<Deployment of {self.target} in {self.dtype}: {buckets}>"

    def bucket_for(self, batch: int, seq: int) -> Bucket:
        """The smallest bucket that holds a request.

        Raises:
            UsageError: none does.
        """
        for bucket in self.buckets:
            if bucket.batch >= batch and bucket.seq >= seq:
                return bucket
        known = ", ".join(bucket.name for bucket in self.buckets)
        raise UsageError(f"no bucket holds a batch of {batch} x {seq} tokens; built: {known}. Build a larger one")

    def run(self, ids_BS: np.ndarray, lengths_B: np.ndarray | None = None) -> np.ndarray:
        """Logits of a batch, or the output that the folder was built for (`outputs` of its configuration).

        The request is padded to its bucket. Padding never gets a slot while real tokens are left, but the number of
        slots k is that of the bucket: a larger share of the tokens of a short request is selected in a long bucket.

        Args:
            ids_BS: int64 (B, S).
            lengths_B: int64 (B,), real tokens of each row; all of them by default.

        Returns:
            float32 logits (B, S, V), or hidden states (B, S, D), of which positions at or after a row's length are
            meaningless; or logits (B, V) of each row's last real token.

        Raises:
            UsageError: not a batch of token ids, or larger than every bucket; or the model reads other things.
            BuildFolderError: a file has changed since the build.
        """
        if self.vocab_size is None:
            raise UsageError("this model was built with inputs of its own; give them by name: infer({name: array})")
        ids_BS = np.asarray(ids_BS)
        if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iu" or 0 in ids_BS.shape:
            raise UsageError(
                f"expected token ids as whole numbers (batch, sequence), got {ids_BS.dtype} {ids_BS.shape}"
            )
        B, S = ids_BS.shape
        found = ids_BS
        # Engines treat ids outside the vocabulary differently: some index from the end of the table, some read past
        # it, some fail. As unsigned numbers, negative ids are the largest.
        ids_BS = np.ascontiguousarray(ids_BS, dtype=np.int64)
        if ids_BS.view(np.uint64).max() >= self.vocab_size:
            raise UsageError(f"expected token ids from 0 to {self.vocab_size - 1}, got {found.min()} to {found.max()}")
        real = S if lengths_B is None else _checked(lengths_B, B, S)
        bucket = self.bucket_for(B, S)
        runner = self._runner(bucket)
        primary = primary_output(runner.outputs)
        if (bucket.batch, bucket.seq) != (B, S):
            ids_BS = np.pad(ids_BS, ((0, bucket.batch - B), (0, bucket.seq - S)))
        feeds = {"input_ids": ids_BS}
        if "lengths" in runner.inputs:
            feeds["lengths"] = np.ones(bucket.batch, dtype=np.int64)
            feeds["lengths"][:B] = real
        result = runner.run(feeds, [primary])[primary]
        return result[:B] if primary == PRIMARY["last"] else result[:B, :S]

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model's own outputs, by name, for inputs of exactly the shapes of a bucket.

        Args:
            feeds: every input by name. Numbers of the same kind are converted to the dtype that the model reads.

        Raises:
            UsageError: a name, shape or dtype that no bucket has.
            BuildFolderError: a file has changed since the build.
        """
        given = {name: np.asarray(array) for name, array in feeds.items()}
        shapes = {name: array.shape for name, array in given.items()}
        ports = self.inputs
        known = {bucket: {name: shape for name, (_, shape) in inputs.items()} for bucket, inputs in ports.items()}
        bucket = next((bucket for bucket, expected in known.items() if expected == shapes), None)
        if bucket is None:
            built = "; ".join(map(_shapes, known.values()))
            raise UsageError(f"no bucket was built for {_shapes(shapes)}; built: {built}")
        runner = self._runner(bucket)
        used = {
            name: _of_dtype(name, array, np.dtype(ports[bucket][name][0]))
            for name, array in given.items()
            if name in runner.inputs
        }
        return runner.run(used, [name for name in runner.outputs if not name.startswith(ROUTED)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._runners.clear()
        self._opened.close()

    def _runner(self, bucket: Bucket) -> Runner:
        if bucket not in self._runners:
            with self._opening:
                if bucket not in self._runners:
                    engine = self._engines[bucket]
                    for path in self._unread.keys() & set(engine.files):
                        verify_files(self._root, {path: self._unread[path]})
                        del self._unread[path]
                    runner = ENGINES[engine.target].load(self._root, engine, self._config, self.threads)
                    self._runners[bucket] = self._opened.enter_context(runner)
        return self._runners[bucket]


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"


def _of_dtype(name: str, array: np.ndarray, dtype: np.dtype[np.generic]) -> np.ndarray:
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(f"{name}: expected {dtype}, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=dtype)


def _checked(lengths_B: np.ndarray, rows: int, seq: int) -> np.ndarray:
    lengths_B = np.asarray(lengths_B)
    whole = lengths_B.shape == (rows,) and lengths_B.dtype.kind in "iu"
    if not whole or lengths_B.min() < 1 or lengths_B.max() > seq:
        raise UsageError(f"expected {rows} lengths from 1 to {seq}, got {lengths_B.tolist()}")
    return lengths_B
