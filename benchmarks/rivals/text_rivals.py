"""Rivals that write text on the CPU: llama.cpp, onnxruntime-genai, OpenVINO GenAI and transformers, each with the files
that its own tools make of the dense model.

All get the same ids and always choose the most probable token. None keeps anything of an earlier request.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.rivals.text_models import TextCase

BLOCK = 32
"""Weights that share a scale in onnxruntime-genai, as in a block of llama.cpp."""
GROUP = 64
"""Weights that share a scale in NNCF. Its default of 128 does not divide the width of the model of 135 M parameters."""
GENAI_PRECISIONS = {"float32": "fp32", "int8": "int8", "int4": "int4"}


class Written(NamedTuple):
    """One request.

    Attributes:
        first_s: seconds until every row had its first token.
        rest_s: seconds from then to the end.
        rest: tokens of all rows that were written in `rest_s`.
        rows: written ids of each row.
        ran: share of the tokens, prompts included, that ran at each routing site.
    """

    first_s: float
    rest_s: float
    rest: int
    rows: list[list[int]]
    ran: dict[Any, float] = {}  # noqa: RUF012  # A NamedTuple copies no default, and nobody writes to it.


class Writer(Protocol):
    """An opened program."""

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        """Continues prompts of equal length, int32, by `new` tokens each."""

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Returns the logits after every token of a text, float32 (S, V)."""


def write_llama_cpp(precision: str, case: TextCase, folder: Path) -> None:
    """Quantizes the float32 file with llama.cpp's own tool: BF16, Q8_0 or Q4_0."""
    import llama_cpp as ll

    kinds = {
        "bfloat16": ll.LLAMA_FTYPE_MOSTLY_BF16,
        "int8": ll.LLAMA_FTYPE_MOSTLY_Q8_0,
        "int4": ll.LLAMA_FTYPE_MOSTLY_Q4_0,
    }
    options = ll.llama_model_quantize_default_params()
    options.ftype = kinds[precision]
    source, out = (os.fsencode(folder / f"{name}.gguf") for name in ("float32", precision))
    if code := ll.llama_model_quantize(source, out, ctypes.byref(options)):
        raise RuntimeError(f"llama_model_quantize ended with {code}")


class LlamaCpp:
    """llama.cpp through its C interface, used as in its own batched benchmark. The cache is float16, its default."""

    def __init__(self, precision: str, case: TextCase, folder: Path, threads: int, batches: Sequence[int]) -> None:
        import llama_cpp as ll

        self._ll, rows = ll, max(batches)
        ll.llama_backend_init()
        path = os.fsencode(folder / f"{precision}.gguf")
        self._model = ll.llama_model_load_from_file(path, ll.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {precision}.gguf")
        options = ll.llama_context_default_params()
        options.n_ctx = case.cache * rows
        options.n_seq_max = rows
        options.n_batch = max(case.prompt, case.judged)
        options.n_threads = options.n_threads_batch = threads
        self._context = ll.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp cannot open a context")
        self._batch = ll.llama_batch_init(options.n_batch, 0, 1)
        self._vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        self._clear()
        begin = time.perf_counter()
        rows = [[self._last(row, self._read(ids, row))] for row, ids in enumerate(ids_BS)]
        first = time.perf_counter()
        for position in range(ids_BS.shape[1], ids_BS.shape[1] + new - 1):
            entries = [(ids[-1], position, row, True) for row, ids in enumerate(rows)]
            self._decode(entries)
            for row, ids in enumerate(rows):
                ids.append(self._last(row, row))
        end = time.perf_counter()
        return Written(first - begin, end - first, len(rows) * (new - 1), rows)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        self._clear()
        self._decode([(token, position, 0, True) for position, token in enumerate(ids)])
        return np.stack([self._logits(index).copy() for index in range(len(ids))])

    def _clear(self) -> None:
        self._ll.llama_memory_clear(self._ll.llama_get_memory(self._context), True)

    def _read(self, ids: np.ndarray, row: int) -> int:
        """Reads a prompt into a row, and returns the index of its last token."""
        last = len(ids) - 1
        self._decode([(token, position, row, position == last) for position, token in enumerate(ids)])
        return last

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, row, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = int(token), position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if code := self._ll.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode ended with {code}")

    def _logits(self, index: int) -> np.ndarray:
        pointer = self._ll.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab,))

    def _last(self, row: int, index: int) -> int:
        return int(self._logits(index).argmax())


def write_onnxruntime_genai(precision: str, case: TextCase, folder: Path) -> None:
    """Runs onnxruntime-genai's model builder. Int8 and int4 use int8 activations (accuracy_level 4): it is faster."""
    import onnxruntime_genai  # noqa: F401  Where it is not installed, this says so.

    options = ["prune_lm_head=true"]
    if precision != "float32":
        options += ["accuracy_level=4", f"block_size={BLOCK}"]
    words = ["-m", str(folder / "hf"), "-o", str(folder / f"onnxruntime-genai-{precision}")]
    words += ["-p", GENAI_PRECISIONS[precision], "-e", "cpu", "-c", str(folder / "cache"), "--extra_options", *options]
    module = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    done = subprocess.run([*module, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"onnxruntime_genai.models.builder: {done.stderr.strip().splitlines()[-1]}")


class OnnxRuntimeGenai:
    """onnxruntime-genai with a cache as long as the request."""

    def __init__(self, precision: str, case: TextCase, folder: Path, threads: int) -> None:
        import onnxruntime_genai as og

        self._og = og
        config = og.Config(str(folder / f"onnxruntime-genai-{precision}"))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        batch, length = ids_BS.shape
        writer = self._writer(batch, length + new)
        begin = time.perf_counter()
        writer.append_tokens(ids_BS)
        writer.generate_next_token()
        first = time.perf_counter()
        for _ in range(new - 1):
            writer.generate_next_token()
        end = time.perf_counter()
        rows = [[int(token) for token in writer.get_sequence(row)[length:]] for row in range(batch)]
        return Written(first - begin, end - first, batch * (new - 1), rows)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Computes the logits token by token."""
        writer, rows = self._writer(1, len(ids) + 1), []
        for token in ids:
            writer.append_tokens(np.array([[token]], dtype=np.int32))
            rows.append(np.array(writer.get_logits()).reshape(-1).astype(np.float32))
        return np.stack(rows)

    def _writer(self, batch: int, length: int) -> Any:
        options = self._og.GeneratorParams(self._model)
        options.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
        return self._og.Generator(self._model, options)


def write_openvino_genai(case: TextCase, folder: Path) -> None:
    """Converts the GGUF file with OpenVINO GenAI's reader, which takes float16 but not float32."""
    import openvino as ov
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    out = folder / "openvino-genai"
    out.mkdir(exist_ok=True)
    words = AutoTokenizer.from_pretrained(folder / "hf")
    for name, model in zip(("tokenizer", "detokenizer"), convert_tokenizer(words, with_detokenizer=True), strict=True):
        ov.save_model(model, out / f"openvino_{name}.xml")
    # The pipeline writes the model beside the GGUF file.
    tokenizer = openvino_genai.Tokenizer(str(out))
    openvino_genai.LLMPipeline(str(folder / "float16.gguf"), tokenizer, "CPU", enable_save_ov_model=True)
    for suffix in ("xml", "bin"):
        (folder / f"openvino_model.{suffix}").replace(out / f"openvino_model.{suffix}")


def write_openvino_compressed(precision: str, case: TextCase, folder: Path) -> None:
    """Runs nncf.compress_weights on the converted model, as optimum-intel does: int8 by channel, or int4 in groups with
    embedding and head in int8.
    """
    import shutil

    import nncf
    import openvino as ov

    modes: dict[str, dict[str, Any]] = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": GROUP, "ratio": 1.0},
    }
    source, out = folder / "openvino-genai", folder / f"openvino-genai-{precision}"
    out.mkdir(exist_ok=True)
    model = nncf.compress_weights(ov.Core().read_model(source / "openvino_model.xml"), **modes[precision])
    ov.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
    for path in source.glob("openvino_*tokenizer.*"):
        shutil.copy(path, out / path.name)


class OpenVinoGenai:
    """OpenVINO GenAI's LLMPipeline with paged attention, its default. It reads a whole batch of prompts at once.

    With int8 and int4 weights, products are in bfloat16, the default on this processor, with the dynamic quantization
    of activations that OpenVINO chooses.
    """

    def __init__(self, precision: str, case: TextCase, folder: Path, threads: int, batches: Sequence[int]) -> None:
        import openvino as ov
        import openvino_genai

        whole = precision in ("float32", "bfloat16")
        files = folder / ("openvino-genai" if whole else f"openvino-genai-{precision}")
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision == "float32":
            options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        core = ov.Core()
        if precision == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("OpenVINO names no BF16 among the capabilities of this processor")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(batches) * case.prompt
        scheduler.max_num_seqs = max(batches)
        self._ov, self._genai = ov, openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(str(files), "CPU", scheduler_config=scheduler, **options)
        self._alone, self._options = files / "openvino_model.xml", options

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new, False, True
        config.apply_chat_template = False
        ids = np.ascontiguousarray(ids_BS, dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._ov.Tensor(ids), self._ov.Tensor(np.ones_like(ids)))
        result = self._pipeline.generate(inputs, config)
        metrics = result.perf_metrics
        whole_s, first_s = metrics.get_generate_duration().mean / 1e3, metrics.get_ttft().mean / 1e3
        rows = [[int(token) for token in row] for row in result.tokens]
        return Written(first_s, whole_s - first_s, len(rows) * (new - 1), rows)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Runs the same file as a whole row with OpenVINO itself, because the pipeline returns no logits."""
        model = self._ov.Core().compile_model(self._alone, "CPU", self._options)
        request, ids_1S = model.create_infer_request(), np.ascontiguousarray(ids[None], dtype=np.int64)
        feeds = {
            "input_ids": ids_1S,
            "attention_mask": np.ones_like(ids_1S),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = [port.get_any_name() for port in model.inputs]
        outputs = request.infer({name: array for name, array in feeds.items() if name in names})
        logits: np.ndarray = np.array(next(iter(outputs.values())), dtype=np.float32)[0]
        return logits


class Transformers:
    """transformers, eager, with a greedy loop like `generate` and a cache that grows."""

    def __init__(self, precision: str, case: TextCase, folder: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        dtype = getattr(torch, precision)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=dtype).eval()

    def write(self, ids_BS: np.ndarray, new: int) -> Written:
        torch, rows = self._torch, []
        with torch.inference_mode():
            begin = time.perf_counter()
            output = self._model(torch.from_numpy(ids_BS).long(), use_cache=True, logits_to_keep=1)
            next_B1 = output.logits[:, -1:].argmax(-1)
            rows.append(next_B1)
            first = time.perf_counter()
            for _ in range(new - 1):
                output = self._model(next_B1, past_key_values=output.past_key_values, use_cache=True)
                next_B1 = output.logits[:, -1:].argmax(-1)
                rows.append(next_B1)
            end = time.perf_counter()
        written = torch.cat(rows, 1).tolist()
        return Written(first - begin, end - first, len(written) * (new - 1), written)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        with self._torch.inference_mode():
            output = self._model(self._torch.from_numpy(ids[None]).long()).logits[0]
        logits: np.ndarray = output.float().numpy()
        return logits
