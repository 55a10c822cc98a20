"""Loads a build folder and runs it. A server needs mod-export with its base dependencies and one engine library
(`pip install "mod-export[ort]"`). It does not need the checkpoint. Only an AOTInductor engine needs PyTorch.

    import mod_export
    with mod_export.load("build/demo") as deployment:
        logits = deployment.run(ids)
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from mod_export.engines import ENGINES
from mod_export.engines.protocol import Runner
from mod_export.environment import usable_cores
from mod_export.errors import EngineError, TargetError, UnverifiedWarning, UsageError
from mod_export.folder.files import verify_files
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.folder.signature import check_signature
from mod_export.rows.base import FailedRow
from mod_export.rows.speed import served_of
from mod_export.runtime.logits import log_softmax, negative_log_likelihood, perplexity_of
from mod_export.types import PRIMARY, ROUTED, Bucket, DType, Engine, ModelKind, graph_of, primary_output, writes_text

NO_CACHE = "its cache is kept on the device by the server that uses it; see docs/text.md#tensorrt"
SHOWN = 5
"""Number of next tokens that a `Score` lists."""


def runnable_engines(
    folder: Path,
    engines: Sequence[Engine],
    targets: Sequence[str],
    *,
    texts: bool = False,
    failed: Sequence[FailedRow] = (),
) -> list[Engine]:
    """Returns those of `engines` that run on this machine, of the named targets, or of all targets if none is named.

    Args:
        folder: the build folder, for messages.
        engines: the engines to choose from.
        targets: names of targets; each must be present and runnable.
        texts: whether the engines must also be able to use a cache in host memory, which writing text needs.
        failed: failures of the build, which explain in messages why a target is missing.

    Raises:
        TargetError: no engine runs here, or a named target is not in the folder or cannot run.
    """
    engine_kind = f"engine{' that writes text' if texts else ''}"
    names = list(dict.fromkeys(engine.target for engine in engines))
    missing = [name for name in targets if name not in names]
    if missing:
        lost = _why_missing([row for row in failed if row.target in (None, *missing)])
        built = f"built for {', '.join(names)}" if names else "built for none"
        raise TargetError(f"{folder}: holds no {engine_kind} for {', '.join(missing)}{lost}; {built}")
    availability = {name: ENGINES[name].availability() for name in (targets or names)}
    reasons = {name: status.refusal(e for e in engines if e.target == name) for name, status in availability.items()}
    if texts:
        reasons = {name: reason or ("" if ENGINES[name].binds else NO_CACHE) for name, reason in reasons.items()}
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if refused and (targets or len(refused) == len(availability)):
        raise TargetError(f"{folder}: no {engine_kind} runs here: {'; '.join(refused)}")
    runnable = [name for name, reason in reasons.items() if not reason]
    return [engine for engine in engines if engine.target in runnable and availability[engine.target].can_run(engine)]


def _why_missing(failed: Iterable[FailedRow]) -> str:
    """Returns the first failure in brackets, or "" if there is none."""
    return next((f" ({row.sentence})" for row in failed), "")


def served_engines(
    folder: Path, manifest: Manifest, model: ModelKind, target: str | None, dtype: str | None, *, texts: bool = False
) -> list[Engine]:
    """Chooses the engines to serve: all of one model, target and dtype, which run here and met their gates.

    With `texts` these are prefill and decode engines, otherwise forward engines. Without a target, the choice is the
    pair of target and dtype (`dtype`, if given) that met its gates and was the fastest in the build, or the first pair
    if nothing was measured. Pairs that were made on another machine and cannot be loaded on this one are left out. With
    a target but no dtype, the choice is the first dtype built. Engines that missed a gate are never replaced by those
    of another dtype: the user has to name one.

    Raises:
        UsageError: the folder has no engine of this model.
        TargetError: nothing runs here, the target or dtype is missing, or the engines missed their gates.
    """
    engine_kind = f"engine{' that writes text' if texts else ''}"
    engines = [engine for engine in manifest.engines if engine.model == model and engine.writes_text == texts]
    failed = [
        row
        for row in manifest.failed
        if row.model in (None, model) and (row.role is None or writes_text(row.role) == texts)
    ]
    if not engines and failed:
        raise TargetError(f"{folder}: holds no {engine_kind} of model {model!r}{_why_missing(failed)}; build again")
    if not engines:
        raise UsageError(
            f"{folder}: holds no {engine_kind} of model {model!r}; expected {' or '.join(map(repr, manifest.models))}"
        )
    runnable = runnable_engines(folder, engines, [target] if target else [], texts=texts, failed=failed)
    engines_of_dtype = [engine for engine in runnable if dtype in (None, engine.dtype)]
    if not engines_of_dtype:
        lost = _why_missing(row for row in failed if row.target in (None, target) and row.dtype in (None, dtype))
        names = ", ".join(dict.fromkeys(candidate.target for candidate in runnable))
        raise TargetError(f"{folder}: holds no {dtype} {engine_kind} for {names}{lost}")

    def chosen() -> list[Engine]:
        first = (engines_of_dtype[0].target, engines_of_dtype[0].dtype)
        pair = first if target else fastest_engines(manifest, engines_of_dtype, texts=texts) or first
        return [engine for engine in engines_of_dtype if (engine.target, engine.dtype) == pair]

    served, refusals = chosen(), []
    while not target and (refusal := _refusal(folder, manifest, served[0])):
        refusals.append(refusal)
        engines_of_dtype = [engine for engine in engines_of_dtype if engine not in served]
        if not engines_of_dtype:
            raise TargetError(f"{folder}: no {engine_kind} runs here: {'; '.join(refusals)}")
        served = chosen()
    missed = [reason for engine in served for reason in manifest.refused.get(engine.path, ())]
    if missed:
        raise TargetError(
            f"{folder}: the {served[0].dtype} engines for {served[0].target} missed their gates and are not served "
            f"({'; '.join(dict.fromkeys(missed))}); name another dtype, or build with another gate if this one is "
            "wrong for your use"
        )
    return served


def _refusal(folder: Path, manifest: Manifest, engine: Engine) -> str:
    """Says why this machine cannot run an engine; empty if it can. An engine is loaded only if it was made elsewhere.

    Raises:
        BuildFolderError: a file has changed since the build.
    """
    builder = ENGINES[engine.target]
    if builder.made_here(folder, engine):
        return ""
    verify_files(folder, manifest.entries(engine.files))  # Engines are code.
    try:
        with builder.load(folder, engine, manifest.config, 1):
            return ""
    except (TargetError, EngineError) as error:  # TensorRT says no more about a plan for another GPU.
        return str(error)


def fastest_engines(manifest: Manifest, engines: Sequence[Engine], *, texts: bool) -> tuple[str, DType] | None:
    """Returns target and dtype of the fastest of `engines` that met their gates; None if none was measured."""
    refused = {
        (entry.model, entry.writes_text, entry.target, entry.dtype)
        for entry in manifest.engines
        if entry.path in manifest.refused
    }
    offered = {(entry.model, entry.target, entry.dtype) for entry in engines}
    measured = [
        entry
        for entry in manifest.measured
        if (entry.model, entry.target, entry.dtype) in offered and writes_text(entry.role) == texts
    ]
    return next(((entry.target, entry.dtype) for entry in served_of(measured, refused)), None)


def load(
    root: str | Path,
    target: str | None = None,
    dtype: str | None = None,
    model: ModelKind = "mod",
    threads: int | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> Deployment:
    """Opens a build folder for inference.

    Args:
        root: the folder.
        target: an engine family. None selects the fastest engines that run here and met their gates, by the build's
            measurements, or the first in the folder if nothing was measured.
        dtype: dtype of the engines. None selects the fastest, or the first dtype built if `target` is given.
        model: `mod`, or `dense` for the dense baseline.
        threads: threads of a CPU engine inside one operator. None uses every physical core that this process may use
            (`environment.usable_cores`); 0 leaves the choice to the library.
        trusted_keys: public keys, each a PEM file: the folder must be signed by the owner of one. None asks for no
            signature.

    Raises:
        BuildFolderError: the folder is not a complete build folder, a needed file is missing or has the wrong size, or
            the folder is not signed by the owner of one of `trusted_keys`. Hashes are checked later, when a bucket that
            needs the file first runs.
        UsageError: a file of `trusted_keys` holds no key.
        TargetError: nothing in it runs here, or the target is not in it, or its engines missed their gates.
    """
    folder = Path(root)
    check_signature(folder, trusted_keys)
    manifest = open_folder(folder, verify=False)
    chosen = served_engines(folder, manifest, model, target, dtype)
    warn_unverified(folder, manifest)
    return Deployment(folder, manifest, chosen, threads_to_use(threads))


def warn_unverified(folder: Path, manifest: Manifest) -> None:
    """Warns that a folder was built without evidence. The warning points at the caller's caller."""
    if not manifest.verified:
        warnings.warn(
            f"{folder}: nothing in it was verified: it was built with --no-evidence. `mod-export validate {folder}` "
            "compares its engines with PyTorch",
            UnverifiedWarning,
            stacklevel=3,
        )


def threads_to_use(threads: int | None) -> int:
    """Returns `threads`, or the number of physical cores that this process may use for None.

    Raises:
        UsageError: the number is negative.
    """
    if threads is not None and threads < 0:
        raise UsageError(f"threads: expected 1 or more, or 0 for the library's own choice, got {threads}")
    return usable_cores() if threads is None else threads


class Deployment:
    """The buckets of one model, target and dtype. Engines are opened on first use; several threads may run them.

    Attributes:
        target: target of the engines.
        dtype: dtype of the engines.
        threads: threads of a CPU engine inside one operator; 0 leaves the choice to the library.
        vocab_size: vocabulary size; None if the model does not read token ids.
        buckets: the buckets, smallest first.
    """

    def __init__(self, root: Path, manifest: Manifest, engines: Sequence[Engine], threads: int) -> None:
        """`engines` holds one engine for each bucket.

        Raises:
            BuildFolderError: a file that they need is missing or has the wrong size.
        """
        self.target, self.dtype, self.threads = engines[0].target, engines[0].dtype, threads
        self.vocab_size = manifest.models[engines[0].model].vocab_size
        self._root, self._config = root, manifest.config
        graphs = {engine.bucket: graph_of(engine, manifest.graphs) for engine in engines}
        self._graphs = {bucket: graph for bucket, graph in graphs.items() if graph is not None}
        self._engines = {engine.bucket: engine for engine in engines}
        self.buckets = tuple(sorted(self._engines, key=lambda bucket: (bucket.batch * bucket.seq, bucket)))
        self._unread = manifest.entries(path for engine in engines for path in engine.files)
        verify_files(root, self._unread, read=False)
        self._opening = threading.Lock()
        self._opened = contextlib.ExitStack()
        self._runners: dict[Bucket, Runner] = {}

    @property
    def inputs(self) -> dict[Bucket, dict[str, tuple[str, tuple[int, ...]]]]:
        """Bucket -> input name -> dtype and shape, as `infer` expects them."""
        return {bucket: dict(graph.inputs) for bucket, graph in self._graphs.items()}

    @property
    def outputs(self) -> dict[Bucket, dict[str, tuple[int, ...]]]:
        """Bucket -> output name -> shape, for the model's own outputs."""
        return {bucket: dict(graph.results) for bucket, graph in self._graphs.items()}

    def __repr__(self) -> str:
        buckets = ", ".join(bucket.name for bucket in self.buckets)
        return f"<Deployment of {self.target} in {self.dtype}: {buckets}>"

    def bucket_for(self, batch: int, seq: int) -> Bucket:
        """Returns the smallest bucket that fits a request.

        Raises:
            UsageError: no bucket is large enough.
        """
        for bucket in self.buckets:
            if bucket.batch >= batch and bucket.seq >= seq:
                return bucket
        built = ", ".join(bucket.name for bucket in self.buckets)
        raise UsageError(f"no bucket holds a batch of {batch} x {seq} tokens; built: {built}. Build a larger one")

    def run(self, ids_BS: np.ndarray, lengths_B: np.ndarray | None = None) -> np.ndarray:
        """Returns logits of a batch, or the output that the folder was built for (`outputs` of its configuration).

        The request is padded to its bucket. Padding gets a slot only after every real token has one. But the number of
        slots k belongs to the bucket, so a long bucket selects a larger share of the tokens of a short request.

        Args:
            ids_BS: int64 (B, S).
            lengths_B: int64 (B,), number of real tokens of each row; S by default.

        Returns:
            float32 logits (B, S, V) or hidden states (B, S, D), meaningless at positions at or after a row's length;
            or logits (B, V) of each row's last real token.

        Raises:
            UsageError: the input is not a batch of token ids or fits no bucket, or the model does not read token ids.
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
        given_ids = ids_BS
        # Engines treat ids outside the vocabulary differently: some index from the end of the table, some read past
        # it, some fail. Viewed as unsigned, negative ids are the largest, so one comparison finds both kinds.
        ids_BS = np.ascontiguousarray(ids_BS, dtype=np.int64)
        if ids_BS.view(np.uint64).max() >= self.vocab_size:
            raise UsageError(
                f"expected token ids from 0 to {self.vocab_size - 1}, got {given_ids.min()} to {given_ids.max()}"
            )
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
        """Returns the model's own outputs by name, for inputs whose shapes are exactly those of a bucket.

        Args:
            feeds: every input by name. Arrays are cast to the dtype that the model reads ("same_kind" casts of numpy).

        Raises:
            UsageError: the names, shapes or dtypes fit no bucket.
            BuildFolderError: a file has changed since the build.
        """
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        ports = self.inputs
        by_bucket = {bucket: {name: shape for name, (_, shape) in inputs.items()} for bucket, inputs in ports.items()}
        bucket = next((bucket for bucket, expected in by_bucket.items() if expected == shapes), None)
        if bucket is None:
            built = "; ".join(map(_shapes, by_bucket.values()))
            raise UsageError(f"no bucket was built for {_shapes(shapes)}; built: {built}")
        runner = self._runner(bucket)
        used = {
            name: _of_dtype(name, array, np.dtype(ports[bucket][name][0]))
            for name, array in arrays.items()
            if name in runner.inputs
        }
        return runner.run(used, [name for name in runner.outputs if not name.startswith(ROUTED)])

    def answer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Answers a request of a server: runs token ids with `run`, and other inputs with `infer`.

        Raises:
            UsageError: a name is unknown, or `run` or `infer` refuses the inputs.
            BuildFolderError: a file has changed since the build.
        """
        if self.vocab_size is None:
            return self.infer(feeds)
        if "input_ids" not in feeds or feeds.keys() - {"input_ids", "lengths"}:
            raise UsageError(f"expected the inputs input_ids and, if rows are padded, lengths; got {', '.join(feeds)}")
        name = next(iter(next(iter(self.outputs.values()))))
        return {name: self.run(feeds["input_ids"], feeds.get("lengths"))}

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


def open_smallest(deployment: Deployment) -> None:
    """Opens the engine of the smallest bucket, which its first run would open otherwise.

    Raises:
        BuildFolderError: a file has changed since the build.
        EngineError: the engine cannot be used.
        TargetError: this machine cannot run the engine.
    """
    deployment._runner(deployment.buckets[0])


def graph_files(deployment: Deployment) -> dict[Bucket, Path]:
    """Returns bucket -> file of the graph that its engine was built from. Running the engine does not need it."""
    return {bucket: deployment._root / graph.path for bucket, graph in deployment._graphs.items()}


@dataclass(frozen=True, slots=True)
class Score:
    """How probable a prompt is.

    Attributes:
        tokens: number of tokens of the prompt.
        nll: mean of -log p over all its tokens but the first, in nats; NaN for a prompt of one token.
        following: (id, probability) of the most probable next tokens.
    """

    tokens: int
    nll: float
    following: tuple[tuple[int, float], ...]

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return perplexity_of(self.nll)


def score(deployment: Deployment, ids: Sequence[int]) -> Score:
    """Scores a prompt in the smallest forward bucket that fits. The bucket decides routing: see `Deployment.run`.

    This also works for a model that cannot generate because it needs the whole prompt to select tokens.

    Raises:
        UsageError: the prompt is empty or fits no bucket, or the folder does not return logits of every token.
    """
    if not ids:
        raise UsageError("an empty prompt has no score; expected at least one token")
    ids_1S = np.array([ids], dtype=np.int64)
    logits_1SV = deployment.run(ids_1S)
    if logits_1SV.ndim != 3 or logits_1SV.shape[2] != deployment.vocab_size:
        raise UsageError(
            "this folder gives no logits of every token; build it with outputs = 'logits' to score prompts"
        )
    nll, count = negative_log_likelihood(logits_1SV, ids_1S)
    share_V = np.exp(log_softmax(logits_1SV[0, -1]))
    best = np.argsort(-share_V, kind="stable")[:SHOWN]
    following = tuple((int(token), float(share_V[token])) for token in best)
    return Score(len(ids), nll / count if count else math.nan, following)


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"


def _of_dtype(name: str, array: np.ndarray, dtype: np.dtype[np.generic]) -> np.ndarray:
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(f"{name}: expected {dtype}, got {array.dtype}")
    # `ascontiguousarray` would add a dimension to an array without one.
    return np.asarray(array, dtype=dtype, order="C")


def _checked(lengths_B: np.ndarray, rows: int, seq: int) -> np.ndarray:
    lengths_B = np.asarray(lengths_B)
    whole = lengths_B.shape == (rows,) and lengths_B.dtype.kind in "iu"
    if not whole or lengths_B.min() < 1 or lengths_B.max() > seq:
        raise UsageError(f"expected {rows} lengths from 1 to {seq}, got {lengths_B.tolist()}")
    return lengths_B
