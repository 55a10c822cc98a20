"""Text in int8 and int4: judged, served, independent of the rows beside it, and equal as a prompt and as steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from build_folders import Silent, changed
from writing import LAX, SPEC, WINDOW, writing_checkpoint

import mod_export
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.folder.manifest import open_folder
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.runtime.prompts import Prompts
from mod_export.types import KINDS, QUANTIZED, Bucket, QuantizedDType
from mod_models.checkpoint import save_checkpoint

TOLERANCE = 1e-3
"""Largest difference of logits between a prompt and steps, which round to the same bits but sum in another order."""


pytestmark = pytest.mark.slow
"""Whole rows in these dtypes (`test_low_precision.py`) and texts in float32 (`test_generation.py`) are built faster."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("low") / "build"


@pytest.fixture(scope="module")
def report(root: Path, writing_config: BuildConfig) -> BuildReport:
    save_checkpoint(root.parent / "writing.pt", writing_checkpoint())
    config = changed(writing_config, {"target/ort-cpu/dtypes": ["float32", *QUANTIZED], **LAX})
    return build(Request.checkpoint(root.parent / "writing.pt").models, config, root, Silent(), "mod-export build")


def test_every_engine_is_judged_and_passes(report: BuildReport) -> None:
    assert report.verdict.status == "pass", report.verdict.reasons
    judged = {(row.dtype, row.model, row.role) for row in report.parity if row.target == "ort-cpu"}
    assert judged >= {(dtype, model, role) for dtype in QUANTIZED for model in KINDS for role in ("prefill", "decode")}
    assert {row.dtype for row in report.generation.texts} == {"float32", *QUANTIZED}
    assert {row.dtype for row in report.generation.decode} == {"float32", *QUANTIZED}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_it_is_served_on_request(dtype: QuantizedDType, root: Path, report: BuildReport) -> None:
    # Without a name the fastest dtype is served, and which one that is depends on the load of this machine.
    fastest = next(row.dtype for row in report.served if (row.model, row.role) == ("mod", "decode"))
    with mod_export.load_generator(root) as usual, mod_export.load_generator(root, dtype=dtype) as narrow:
        assert (usual.dtype, narrow.dtype) == (fastest, dtype)
        (text,) = narrow.generate("import ", max_new_tokens=12)
        assert len(text.ids) == 12
        # Each of several texts equals the same text alone.
        several = narrow.generate(["import ", "class A", "x"], max_new_tokens=12)
        assert several[0].ids == text.ids


@contextlib.contextmanager
def opened(root: Path, dtype: QuantizedDType, rows: int) -> Iterator[tuple[Prompts, Decoder]]:
    manifest = open_folder(root, verify=False)
    engines = [item for item in manifest.engines if item.dtype == dtype and item.model == "mod"]
    found = DecodingEngines(
        engines, lambda engine: ENGINES["ort-cpu"].load(root, engine, manifest.config, 1), manifest.config
    )
    (decode,) = (item for item in engines if item.role == "decode" and item.bucket == Bucket(rows, WINDOW))
    with found.prompts("mod", "ort-cpu", dtype) as prompts, found.decoder(decode) as decoder:
        yield prompts, decoder


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: QuantizedDType, root: Path, report: BuildReport) -> None:
    """The rows agree bit for bit: one scale for the activations of all rows would change at least the last digits."""
    rng = np.random.default_rng(0)
    ids_S = rng.integers(0, SPEC.vocab_size, 24)
    read = []
    with opened(root, dtype, 3) as (_, decoder):
        for _ in range(3):
            decoder.wipe()
            others_SB = rng.integers(0, SPEC.vocab_size, (24, 2))
            read.append(
                [
                    decoder.step(np.array([token, *others_B]), np.full(3, position))[0].copy()
                    for position, (token, others_B) in enumerate(zip(ids_S, others_SB, strict=True))
                ]
            )
    np.testing.assert_array_equal(read[0], read[1])
    np.testing.assert_array_equal(read[0], read[2])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_text_is_the_same_wherever_its_prompt_ends(dtype: QuantizedDType, root: Path, report: BuildReport) -> None:
    """Reads a prompt of every length, and continues token by token from there."""
    ids_S = np.random.default_rng(1).integers(0, SPEC.vocab_size, 20)
    found = {}
    with opened(root, dtype, 1) as (prompts, decoder):
        for split in range(1, 17):
            kept = prompts.read(ids_S[:split].tolist())
            decoder.put(0, kept)
            logits_SV = [kept.logits_V.copy()]
            logits_SV += [decoder.step(ids_S[t : t + 1], np.array([t]))[0].copy() for t in range(split, len(ids_S))]
            found[split] = (np.stack(logits_SV), decoder.cache["counts"].copy(), decoder.overflow_BN)
    for split, (logits_SV, counts, overflow) in found.items():
        np.testing.assert_allclose(logits_SV, found[1][0][split - 1 :], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(counts, found[1][1])
        np.testing.assert_array_equal(overflow, found[1][2])
