"""Programs that write text on a CPU: this project, and llama.cpp, onnxruntime-genai, OpenVINO GenAI and transformers.

Each route opens a `Writer` in the process that is timed. Each uses files that its own tools made from the same weights.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rivals import text_rivals as rivals
from benchmarks.rivals.cases import KINDS
from benchmarks.rivals.routes import PRECISIONS, our_dtypes, run_ours
from benchmarks.rivals.text_models import TextCase, judged_ids, prompts_of, write_models
from benchmarks.rivals.text_rivals import Written
from mod_export import load_generator
from mod_export.config import GenerationOptions
from mod_export.runtime.decoder import Decoder
from mod_export.types import Bucket, ModelKind

BATCHES = (1, 8)
SAMPLE_TOKENS = 48
MODELS = "models"
OUR_BUILD = """\
targets = ["{target}"]
buckets = [[1, 16]]
outputs = "last"

[target.{target}]
dtypes = ["{dtype}"]

[generation]
build = "always"
targets = ["{target}"]
window = {window}
caches = [{cache}]
batches = {batches}
"""
FIRST = ("ort-cpu", "float32")
"""The first build. The others start from a copy of it, because they share its captured programs and graphs."""


class Judged(NamedTuple):
    """Quality on a given text: the share of tokens after which the most probable token is the same as in the eager
    float32 model, and the perplexity divided by that model's.
    """

    agreement: float
    perplexity_ratio: float


@dataclass(frozen=True)
class TextRoute:
    """One program at one precision. `open(case, folder, threads)` returns its writer, and `step` writes its files."""

    name: str
    precision: str
    step: str
    open: Callable[[TextCase, Path, int], rivals.Writer]
    kind: str = "dense"
    ours: bool = False


class OurWriter:
    """A writer that uses `mod_export.load_generator`."""

    def __init__(self, target: str, dtype: str, kind: ModelKind, case: TextCase, folder: Path, threads: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It warns that nothing was verified, which `--no-evidence` asked for.
            built = folder / f"ours-{target}-{dtype}"
            self._generator = load_generator(built, target, dtype, model=kind, threads=threads)
        self._cache = case.cache

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        prompts = [row.tolist() for row in ids_BS]
        begin, first, early = time.perf_counter(), {}, 0
        with self._generator.stream(prompts, new, temperature=0.0, ignore_eos=True) as stream:
            for piece in stream:
                if len(first) < len(prompts):
                    first.setdefault(piece.row, time.perf_counter())
                    early += 1
        end = time.perf_counter()
        rows = [list(completion.ids) for completion in stream.completions]
        last = max(first.values())
        read = ids_BS.size + sum(map(len, rows)) - len(rows)
        ran = {
            site: sum(completion.ran[site] for completion in stream.completions) / read
            for site in stream.completions[0].ran
        }
        return Written(last - begin, end - last, sum(map(len, rows)) - early, rows, ran)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Computes the logits token by token with the decode engine."""
        logits = []
        with self._generator._exclusive(Bucket(1, self._cache)) as (decoder,):
            assert isinstance(decoder, Decoder)
            decoder.clear(0)
            for position, token in enumerate(ids):
                logits.append(decoder.step(np.array([token]), np.array([position]))[0].copy())
        return np.stack(logits)


def built(case: TextCase, folder: Path, target: str, dtype: str) -> None:
    """Runs `mod-export build` for the MoD model, whose dense baseline has the same weights as the rivals' models."""
    config, out = folder / f"{target}-{dtype}.toml", folder / f"ours-{target}-{dtype}"
    if (target, dtype) != FIRST:
        shutil.copytree(folder / "-".join(["ours", *FIRST]), out, dirs_exist_ok=True)
    made = {"target": target, "dtype": dtype, "window": case.window, "prompt": case.prompt, "cache": case.cache}
    config.write_text(OUR_BUILD.format(**made, batches=list(BATCHES)), encoding="utf-8")
    words = ["build", str(folder / "mod.pt"), "-c", str(config), "-o", str(out)]
    tokenizer = ["--tokenizer", str(case.tokenizer / "tokenizer.json")] if case.tokenizer else []
    run_ours([*words, *tokenizer, "--no-evidence", "-q"])


def our_targets() -> tuple[str, ...]:
    """Returns our targets that write text on a CPU."""
    return tuple(name for name in ("ort-cpu", "openvino") if name in GenerationOptions().targets)


STEPS: dict[str, tuple[str | None, Callable[[TextCase, Path], None]]] = {
    MODELS: (None, write_models),
    **{
        f"llama.cpp-{precision}": (MODELS, partial(rivals.write_llama_cpp, precision))
        for precision in ("bfloat16", "int8", "int4")
    },
    **{
        f"onnxruntime-genai-{precision}": (MODELS, partial(rivals.write_onnxruntime_genai, precision))
        for precision in ("float32", "int8", "int4")
    },
    "openvino-genai": (MODELS, rivals.write_openvino_genai),
    **{
        f"openvino-genai-{precision}": ("openvino-genai", partial(rivals.write_openvino_compressed, precision))
        for precision in ("int8", "int4")
    },
    **{
        f"ours-{target}-{dtype}": (
            MODELS if (target, dtype) == FIRST else "-".join(["ours", *FIRST]),
            partial(built, target=target, dtype=dtype),
        )
        for target in our_targets()
        for dtype in our_dtypes(target)
    },
}
ROUTES: tuple[TextRoute, ...] = (
    *(
        TextRoute(f"mod-export, {target}, {'MoD' if kind == 'mod' else kind}", dtype, f"ours-{target}-{dtype}",
                  partial(OurWriter, target, dtype, kind), kind, ours=True)
        for dtype in PRECISIONS
        for target in our_targets()
        if dtype in our_dtypes(target)
        for kind in KINDS
    ),
    *(
        TextRoute("llama.cpp", dtype, MODELS if dtype == "float32" else f"llama.cpp-{dtype}",
                  partial(rivals.LlamaCpp, dtype, batches=BATCHES))
        for dtype in PRECISIONS
    ),
    *(
        TextRoute("onnxruntime-genai", dtype, f"onnxruntime-genai-{dtype}", partial(rivals.OnnxRuntimeGenai, dtype))
        for dtype in ("float32", "int8", "int4")
    ),
    *(
        TextRoute("OpenVINO GenAI", dtype,
                  "openvino-genai" if dtype in ("float32", "bfloat16") else f"openvino-genai-{dtype}",
                  partial(rivals.OpenVinoGenai, dtype, batches=BATCHES))
        for dtype in PRECISIONS
    ),
    *(
        TextRoute("transformers", dtype, MODELS, partial(rivals.Transformers, dtype))
        for dtype in ("float32", "bfloat16")
    ),
)  # fmt: skip


def opened(route: TextRoute, case: TextCase, folder: Path, threads: int) -> dict[str, Callable[..., Any]]:
    """Actions of a route for a `turns.Worker`: `write` a batch, `quality`, and a `sample` of the text."""
    writer = route.open(case, folder, threads)

    def write(batch: int, turn: int) -> tuple[float, float, int]:
        return writer.write(prompts_of(case, folder, batch, turn), case.new)[:3]

    def quality() -> dict[str, float]:
        ids = judged_ids(folder)
        expected_SV = np.load(folder / f"{route.kind}.logits.npy", mmap_mode="r")
        return judged(writer.logits(ids), expected_SV, ids)._asdict()

    def sample() -> dict[str, Any]:
        written = writer.write(prompts_of(case, folder, 1, 0), min(SAMPLE_TOKENS, case.new))
        return {"sample": written.rows[0], "ran": written.ran}

    return {"write": write, "quality": quality, "sample": sample}


def judged(found_SV: np.ndarray, expected_SV: np.ndarray, ids_S: np.ndarray) -> Judged:
    """Compares the logits after every token of a text. The perplexity is computed on the next tokens."""
    same_S = found_SV.argmax(-1) == expected_SV.argmax(-1)
    losses = [_loss(logits_SV[:-1].astype(np.float64), ids_S[1:]) for logits_SV in (found_SV, np.asarray(expected_SV))]
    return Judged(float(same_S.mean()), float(np.exp(losses[0] - losses[1])))


def _loss(logits_SV: np.ndarray, next_S: np.ndarray) -> float:
    largest_S1 = logits_SV.max(-1, keepdims=True)
    total_S = np.log(np.exp(logits_SV - largest_S1).sum(-1)) + largest_S1[:, 0]
    return float((total_S - logits_SV[np.arange(len(next_S)), next_S]).mean())
