"""Engines that write texts are judged like engines that read them, and no fault of a step passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from observing import observed
from onnx import helper, numpy_helper
from writing import WINDOW, engine_path

from mod_export.config import BuildConfig, GenerationOptions
from mod_export.engines import ENGINES
from mod_export.judge import inputs
from mod_export.judge.decode import (
    Runs,
    compared_lengths,
    decoding_parts,
    parity_of_runs,
    prompt_parts,
    quality_of,
    texts_of,
)
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.judge.text import documentation_of, prompts_of
from mod_export.model.model import GeneratingModel, Model
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import ParityRow
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.prompts import Prompts
from mod_export.runtime.texts import Bytes
from mod_export.types import Bucket, Engine, Setting

AFFORDABLE = 40
"""Tokens per kind of input on which a large eager model runs; fewer than three rows of a prompt and its tail."""
NAME = "mod-decode-b3s48-float32"
BUCKET = Bucket(3, WINDOW)
Judge = Callable[..., ParityRow]


@pytest.fixture(scope="module")
def writer(writing_model: Model) -> GeneratingModel:
    return writing_model.generating(WINDOW)


@pytest.fixture(scope="module")
def reference(writer: GeneratingModel) -> Reference:
    return Reference(writer.whole_rows)


@pytest.fixture(scope="module")
def original(writing_model: Model) -> Reference:
    """The reference of the model as it was trained."""
    return Reference(writing_model)


def engine_of(role: str, bucket: Bucket) -> Engine:
    return Engine(
        target="ort-cpu", model="mod", bucket=bucket, dtype="float32", role=role,
        path=f"engines/ort-cpu/mod-{role}-{bucket.name}-float32.onnx", weights="graphs/weights-float32.data",
    )  # fmt: skip


@contextlib.contextmanager
def opened(
    folder: Path, config: BuildConfig, kind: type[Decoder] = Decoder, bucket: Bucket = BUCKET
) -> Iterator[tuple[Prompts, Decoder]]:
    builder = ENGINES["ort-cpu"]
    with contextlib.ExitStack() as stack:

        def load(engine: Engine) -> Any:
            return stack.enter_context(builder.load(folder, engine, config, 1))

        engines = {seq: load(engine_of("prefill", Bucket(1, seq))) for seq in (8, 16)}
        yield Prompts(engines, WINDOW, "prompts"), kind(load(engine_of("decode", bucket)), bucket.seq, "decoder")


@pytest.fixture(params=["small", "large"])
def judged(
    request: pytest.FixtureRequest,
    writing_config: BuildConfig,
    reference: Reference,
    writer: GeneratingModel,
    monkeypatch: pytest.MonkeyPatch,
) -> Judge:
    """Judges engines as usual for a model of this size, or as for a large model, on fewer tokens."""
    if request.param == "large":
        usual = inputs.affordable_tokens(writer.whole_rows, BUCKET.seq)
        monkeypatch.setattr(inputs, "MOST_FLOPS", AFFORDABLE * inputs.MOST_FLOPS / usual)

    def judge(folder: Path, kind: type[Decoder] = Decoder, bucket: Bucket = BUCKET) -> ParityRow:
        @contextlib.contextmanager
        def runs() -> Iterator[Runs]:
            with opened(folder, writing_config, kind, bucket) as (prompts, decoder):
                yield decoding_parts(prompts, (8, 16), decoder, reference, writing_config)

        return parity_of_runs(runs(), engine_of("decode", bucket), reference, writing_config)

    return judge


@pytest.fixture
def finds(judged: Judge, written_copy: Path) -> Callable[[str, Callable[[onnx.GraphProto], None]], None]:
    """Changes a graph, and checks that its folder does not pass."""

    def check(name: str, change: Callable[[onnx.GraphProto], None]) -> None:
        path = engine_path(written_copy, name)
        model = onnx.load(path, load_external_data=False)
        change(model.graph)
        path.write_bytes(model.SerializeToString())
        row = judged(written_copy)
        # What a faulty engine returns may contradict itself, and that is not the fault of this machine.
        assert row.judged
        assert not row.passed
        assert row.reasons

    return check


@pytest.mark.fast("small-1", "large-3")
@pytest.mark.parametrize("rows", [1, 3])
def test_sound_engines_pass(judged: Judge, written: Path, rows: int, request: pytest.FixtureRequest) -> None:
    row = judged(written, bucket=Bucket(rows, WINDOW))
    assert row.rounding_tokens <= row.tokens
    if "large" in request.node.name:
        # Each row has texts of 16 tokens; after prompts of 8, 16 and 32 tokens, there are two in the last row only.
        assert row.tokens <= rows * 4 * 16 + 2 * 3 * 17
        assert row.rounding_tokens < row.tokens
    else:
        assert row.tokens > rows * (2 * WINDOW + 2 * 3 * 17)
    assert row.passed, row.reasons
    assert row.routing.routed == row.routing.agreed > 0
    assert set(row.inputs) >= {"random", "padded"}


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def constant(graph: onnx.GraphProto, name: str, value: object, dtype: type = np.int64) -> str:
    graph.initializer.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
    return name


def insert(graph: onnx.GraphProto, before: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
    at = list(graph.node).index(before)
    for node in reversed(nodes):
        graph.node.insert(at, node)


def another_layers_cache(graph: onnx.GraphProto) -> None:
    other = {f"{part}_{layer}": f"{part}_{2 - layer}" for part in ("keys", "values") for layer in (0, 2)}
    for node in nodes_of(graph):
        node.input[:] = [other.get(name, name) for name in node.input]


def values_for_keys(graph: onnx.GraphProto) -> None:
    other = {"keys_1": "values_1", "values_1": "keys_1"}
    for node in nodes_of(graph):
        node.input[:] = [other.get(name, name) for name in node.input]


def rotated_one_further(graph: onnx.GraphProto) -> None:
    """Rotates steps by one position more, but not prompts, so that the two are one position further apart."""
    gathers = [node for node in graph.node if node.op_type == "Gather" and node.input[0].startswith("rope_")]
    assert len(gathers) == 2
    one = constant(graph, "one_further", 1)
    insert(graph, gathers[0], helper.make_node("Add", [gathers[0].input[1], one], ["further"]))
    for node in gathers:
        node.input[1] = "further"


def counts_stay(graph: onnx.GraphProto) -> None:
    (node,) = [node for node in graph.node if "new_counts" in node.output]
    node.CopyFrom(helper.make_node("Identity", ["counts"], ["new_counts"]))


def next_slot(graph: onnx.GraphProto) -> None:
    """Writes to the next slot, which is in the cache too, so that only the numbers can show it."""
    lengths = {
        value.name: value.type.tensor_type.shape.dim[2].dim_value for value in graph.input if "keys" in value.name
    }
    writing = [node for node in nodes_of(graph) if node.op_type == "GroupQueryAttention"]
    assert len(writing) == len(lengths) == 3
    one = constant(graph, "slot_one", 1, np.int32)
    makers = {name: node for node in graph.node for name in node.output}
    for slot, cache in {node.input[5]: node.input[3] for node in writing}.items():
        last = constant(graph, f"last_of_{cache}", lengths[cache] - 1, np.int32)
        maker = makers[slot]
        maker.output[0] = f"true_{slot}"
        after = graph.node[list(graph.node).index(maker) + 1]
        insert(
            graph,
            after,
            helper.make_node("Add", [f"true_{slot}", one], [f"later_{slot}"]),
            helper.make_node("Min", [f"later_{slot}", last], [slot]),
        )


def block_is_skipped(graph: onnx.GraphProto) -> None:
    node = [node for node in graph.node if node.op_type == "If"][-1]
    node.input[0] = constant(graph, "never", False, np.bool_)


def runs_are_mixed_up(graph: onnx.GraphProto) -> None:
    """Reports the rows that ran for another layer."""
    (node,) = [node for node in graph.node if "ran" in node.output]
    node.input[:] = list(reversed(node.input))


def nothing_wanted(graph: onnx.GraphProto) -> None:
    (node,) = [node for node in graph.node if "wanted" in node.output]
    node.output[0] = "truly_wanted"
    never = constant(graph, "not_wanted", False, np.bool_)
    graph.node.append(helper.make_node("And", ["truly_wanted", never], ["wanted"]))


def wrong_late_in_the_text(graph: onnx.GraphProto) -> None:
    """Negates the logits of late positions, beyond the texts that are read from the first token on."""
    (node,) = [node for node in graph.node if "logits" in node.output]
    node.output[0] = "true_logits"
    late, two = constant(graph, "late", WINDOW - 4), constant(graph, "late_axis", [1])
    graph.node.extend(
        [
            helper.make_node("GreaterOrEqual", ["positions", late], ["is_late"]),
            helper.make_node("Unsqueeze", ["is_late", two], ["is_late_column"]),
            helper.make_node("Neg", ["true_logits"], ["negated"]),
            helper.make_node("Where", ["is_late_column", "negated", "true_logits"], ["logits"]),
        ]
    )


# A large model is judged on fewer tokens, so a fault is harder to find there.
@pytest.mark.fast(
    *(
        f"large-{name}"
        for name in (
            "another_layers_cache", "values_for_keys", "rotated_one_further", "counts_stay", "next_slot",
            "block_is_skipped", "runs_are_mixed_up", "nothing_wanted", "wrong_late_in_the_text",
        )
    ),
    "small-counts_stay", "small-runs_are_mixed_up", "small-nothing_wanted", "small-wrong_late_in_the_text",
)  # fmt: skip
@pytest.mark.parametrize(
    "fault",
    [
        another_layers_cache, values_for_keys, rotated_one_further, counts_stay, next_slot, block_is_skipped,
        runs_are_mixed_up, nothing_wanted, wrong_late_in_the_text,
    ],
)  # fmt: skip
def test_faults_of_a_graph_are_found(finds: Callable[..., None], fault: Callable[[onnx.GraphProto], None]) -> None:
    finds(NAME, fault)


def no_cache(graph: onnx.GraphProto) -> None:
    zero = constant(graph, "no_cache", 0, np.float32)
    outputs = {value.name for value in graph.output if value.name.startswith(("keys_rows_", "values_rows_"))}
    assert outputs
    for node in list(graph.node):
        for place, name in enumerate(node.output):
            if name in outputs:
                node.output[place] = f"true_{name}"
                graph.node.append(helper.make_node("Mul", [f"true_{name}", zero], [name]))


@pytest.mark.fast("small-16", "large-8", "large-16")
@pytest.mark.parametrize("seq", [8, 16])
def test_a_prompt_that_leaves_no_cache_is_found(finds: Callable[..., None], seq: int) -> None:
    """The logits of the prompt are right; only the steps after it are wrong."""
    finds(f"mod-prefill-b1s{seq}-float32", no_cache)


class LateRows(Decoder):
    """Writes the cache row of a layer without routing one token too late."""

    def step(self, ids_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
        before = {name: array.copy() for name, array in self.cache.items() if name in ("keys_1", "values_1")}
        late = getattr(self, "_late", before)
        logits_BV = super().step(ids_B, position_B)
        self._late = {name: self.cache[name].copy() for name in before}
        for name, array in late.items():
            self.cache[name][:] = array
        return logits_BV


class RowsOfOthers(Decoder):
    """Puts the cache of a text into the wrong row."""

    def put(self, row: int, kept: object) -> None:
        super().put((row + 1) % self.batch, kept)


class Forgetful(Decoder):
    """Keeps the counts of the text that was in the row before."""

    def put(self, row: int, kept: object) -> None:
        counts_N = self.cache["counts"][row].copy()
        super().put(row, kept)
        self.cache["counts"][row] = np.maximum(counts_N, self.cache["counts"][row])


@pytest.mark.fast("small-Forgetful", "large-LateRows", "large-RowsOfOthers", "large-Forgetful")
@pytest.mark.parametrize("kind", [LateRows, RowsOfOthers, Forgetful])
def test_faults_of_a_cache_are_found(judged: Judge, written: Path, kind: type[Decoder]) -> None:
    row = judged(written, kind)
    assert not row.passed
    assert row.reasons


@pytest.mark.fast("16")
@pytest.mark.parametrize("seq", [8, 16])
def test_prompts_are_judged_by_their_last_token(
    written: Path, writing_config: BuildConfig, reference: Reference, seq: int
) -> None:
    last = reference.returning("last")
    engine = engine_of("prefill", Bucket(1, seq))
    with ENGINES["ort-cpu"].load(written, engine, writing_config, 1) as runner:
        parts = prompt_parts(Prompts({seq: runner}, WINDOW, "prompts"), engine, last, writing_config)
        found = parts[0][0]
        assert found.outputs == ("last_logits", "routed_0", "routed_2")
        assert set(found.run({"input_ids": np.zeros((1, seq), np.int64), "lengths": np.array([3])}, ["routed_2"])) == {
            "routed_2"
        }
        # The longer ones are read in parts, of which the last is padded.
        assert [max(batch.ids_BS.shape[1] for batch in batches) for _, batches in parts] == [seq, 40]
        row = judge_runner(parts, last, writing_config.parity.float32, engine.setting)
    assert row.passed, row.reasons
    assert set(row.inputs) >= {"random", "padded"}


@pytest.mark.fast("8")
@pytest.mark.parametrize("seq", [8, 16])
def test_a_prompt_that_does_not_continue_is_found(
    written_copy: Path, writing_config: BuildConfig, reference: Reference, seq: int
) -> None:
    """It forgets what the cache holds, which no prompt shows that is read at once."""
    engine = engine_of("prefill", Bucket(1, seq))
    model = onnx.load(written_copy / engine.path, load_external_data=False)
    nothing = constant(model.graph, "nothing", 0)
    model.graph.node.insert(0, helper.make_node("Mul", ["positions", nothing], ["no_positions"]))
    for node in model.graph.node[1:]:
        node.input[:] = ["no_positions" if name == "positions" else name for name in node.input]
    (written_copy / engine.path).write_bytes(model.SerializeToString())
    last = reference.returning("last")
    with ENGINES["ort-cpu"].load(written_copy, engine, writing_config, 1) as runner:
        short, long = prompt_parts(Prompts({seq: runner}, WINDOW, "prompts"), engine, last, writing_config)
        gate = writing_config.parity.float32
        assert judge_runner([short], last, gate, engine.setting).passed
        assert not judge_runner([short, long], last, gate, engine.setting).passed


def test_logits_of_steps_are_those_of_prompts(
    written: Path, writing_config: BuildConfig, writer: GeneratingModel
) -> None:
    """They are equal at every position that both can read, and equal to those of the eager model."""
    ids_S = np.random.default_rng(4).integers(0, 256, WINDOW)
    with torch.no_grad():
        expected_SV = observed(writer.whole_rows.module(), torch.from_numpy(ids_S)[None], torch.tensor([WINDOW]))[0][
            0
        ].numpy()
    with opened(written, writing_config, bucket=Bucket(1, WINDOW)) as (prompts, decoder):
        decoder.put(0, prompts.read(ids_S[:1].tolist()))
        for t in range(1, WINDOW):
            logits_V = decoder.step(ids_S[t : t + 1], np.array([t]))[0].copy()
            np.testing.assert_allclose(logits_V, expected_SV[t], rtol=0, atol=1e-4)
            if t % 3 == 0:
                kept = prompts.read(ids_S[: t + 1].tolist())
                np.testing.assert_allclose(logits_V, kept.logits_V, rtol=0, atol=1e-4)
                np.testing.assert_array_equal(decoder.cache["counts"][0], kept.count_N)
                np.testing.assert_array_equal(decoder.overflow_BN[0], kept.overflow_N)
                for name, row_GLE in kept.rows.items():
                    slots = t + 1 if name.endswith("_1") else kept.count_N[0 if name.endswith("_0") else 1]
                    found_GLE = decoder.cache[name][0]
                    np.testing.assert_allclose(found_GLE[:, :slots], row_GLE[:, :slots], rtol=0, atol=1e-4)


def test_of_a_large_model_fewer_and_shorter_texts_are_written() -> None:
    options, long, short = GenerationOptions(), engine_of("decode", Bucket(1, 1024)), engine_of("decode", Bucket(1, 40))
    assert (options.compared_texts, options.compared_tokens) == (4, 48)
    # Integer weights change texts sooner or later, so they get longer ones.
    for dtype, seq, affordable, found in (
        ("float32", long, 10**6, (4, 32, 48)),
        ("int8", long, 10**6, (4, 32, 200)),
        ("int8", short, 10**6, (4, 20, 21)),
        ("int8", long, 1000, (2, 32, 200)),
        ("int8", long, 300, (1, 32, 118)),
        ("int8", long, 40, (1, 32, 48)),
        ("float32", long, 40, (1, 32, 48)),
    ):
        assert compared_lengths(options, replace(seq, dtype=dtype), affordable) == found


def test_texts_and_where_they_differ(
    written: Path, writing_config: BuildConfig, writer: GeneratingModel, writing_model: Model
) -> None:
    prompt_NS = prompts_of(writer.whole_rows, 256, 4, 8, 1)
    assert prompt_NS.shape == (4, 8)
    setting = Setting(target="ort-cpu", dtype="float32", model="mod", role="decode", bucket=Bucket(3, 48))
    with opened(written, writing_config) as (prompts, decoder):
        expected, twin = (
            [model.write(ids_S.tolist(), 10) for ids_S in prompt_NS]
            for model in (writer, writing_model.dense().generating(WINDOW))
        )
        same = texts_of(expected, prompts, decoder, prompt_NS, 3, setting)
        different = texts_of(twin, prompts, decoder, prompt_NS, 3, setting)
    assert (same.texts, same.tokens, same.identical, same.first_difference, same.same) == (4, 40, 4, None, 40)
    assert different.identical < 4
    assert 1 <= different.first_difference <= 10
    assert different.first_difference - 1 <= different.same < 40


def test_quality_is_of_the_same_text_read_both_ways(
    writer: GeneratingModel, reference: Reference, original: Reference
) -> None:
    row = quality_of(writer, reference, original, 2, 0)
    assert (row.tokens, row.window) == (2 * (WINDOW - 1), WINDOW)
    assert row.perplexity != row.own_perplexity
    for site in ("0", "2"):
        assert 0 <= row.selected[site] <= min(row.wanted[site], 18 / WINDOW) + 1e-9
        assert row.overflow[site] == round((row.wanted[site] - row.selected[site]) * 2 * WINDOW)
    same = quality_of(writer, reference, reference, 2, 0)
    assert same.perplexity == same.own_perplexity == row.perplexity


class _WithoutText(TransformerModel):
    """Hides that the ids of a model represent text."""

    sample_ids, token_texts, ids_of_text = Model.sample_ids, Model.token_texts, Model.ids_of_text


def test_a_model_without_text_of_its_own_reads_documentation(
    writer: GeneratingModel, writing_model: Model, reference: Reference, original: Reference
) -> None:
    """Too few tokens of it leave quality out."""
    full = Reference(_WithoutText(cast("TransformerModel", writing_model).checkpoint))
    source = documentation_of(Bytes().ids, 256)
    assert quality_of(writer, reference, full, 2, 0) is None
    row = quality_of(writer, reference, full, 2, 0, source)
    assert row is not None
    assert (row.text, row.tokens) == ("documentation", 2 * (WINDOW - 1))
    assert quality_of(writer, reference, full, 2, 0, source) == row
    held_out = quality_of(writer, reference, original, 2, 0, source)
    assert held_out is not None
    assert held_out.text == "held_out"

    short = documentation_of(lambda text: [1] * WINDOW, 256)
    assert quality_of(writer, reference, full, 2, 0, short) is None
