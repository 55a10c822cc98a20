"""Predicts what routing gains on a machine from a model's layers and the machine's roofline. Nothing is built or run.

A matrix product takes at least as long as its FLOPs take at the machine's peak, and at least as long as its weights
take to be read (Williams, Waterman and Patterson, CACM 52(4), 2009). The prediction adds the longer of these two times
over all products, once for the model and once for its dense baseline. It leaves out everything else: norms, softmax,
selection, gather and scatter, and the start of kernels. So the measured gain is smaller than the predicted one, and a
model without a predicted gain gains nothing.

Weights of a part are read once for all rows. While n texts are written, a routed part of capacity c runs for c n rows
on average, but its weights are read whenever any row runs: with probability 1 - (1 - c) ** n if rows decide
independently.

Shape legend: B rows, S tokens of a prompt, L tokens of a text, k slots, n texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mod_export.environment import describe_machine
from mod_export.errors import UsageError
from mod_export.measure.roofline import cached_roofline
from mod_export.model.model import LayerCost, Model
from mod_export.types import Site, is_expert

FLOAT32_BYTES = 4
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Machine:
    """A roofline.

    Attributes:
        name: what it is, for people to read.
        dtype: dtype of weights and products.
        flops: FLOPs per second of matrix products in this dtype.
        bandwidth: bytes per second that memory delivers.
        weight_bytes: bytes of a weight.
        cache_bytes: bytes of a number in the cache of keys and values, which stays in floats if weights do not.
        tile_rows: rows that a kernel computes at once, so that it takes as long for fewer; 1 if that is not known.
    """

    name: str
    dtype: str
    flops: float
    bandwidth: float
    weight_bytes: float
    cache_bytes: float
    tile_rows: int = 1

    @property
    def fewest_rows(self) -> float:
        """Rows of a product below which its weights take longer to read than its FLOPs: 2 FLOPs per row and weight."""
        return self.flops * self.weight_bytes / (2 * self.bandwidth)

    def seconds(self, flops: float, weight_bytes: float = 0.0, cache_bytes: float = 0.0) -> float:
        """Returns the time of a product that reads weights or the cache. Sizes are given as if they were in float32."""
        read = (weight_bytes * self.weight_bytes + cache_bytes * self.cache_bytes) / FLOAT32_BYTES
        return max(flops / self.flops, read / self.bandwidth)


MACHINES: Mapping[str, Machine] = {
    "h100": Machine("NVIDIA H100 SXM", "bfloat16", 989e12, 3.35e12, 2, 2, 128),
    "a100": Machine("NVIDIA A100 80 GB SXM", "bfloat16", 312e12, 2.04e12, 2, 2, 128),
    "rtx4090": Machine("NVIDIA GeForce RTX 4090", "bfloat16", 165e12, 1.008e12, 2, 2, 128),
}
"""Data-sheet figures of GPUs: dense Tensor-core FLOPs with float32 accumulation, and memory bandwidth. The tiles of
their fastest kernels have 128 or 256 rows.

Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/, tile quantization.
"""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A way to route a dense model.

    Attributes:
        parts: `block`, `attention` or `mlp`.
        layers: the routed layers.
        capacity: share of the tokens that a routed layer selects.
        keys_values: whether skipped tokens keep their keys and values: `absent` or `kept`.
    """

    parts: str
    layers: tuple[int, ...]
    capacity: float
    keys_values: str = "absent"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a model gains over its dense baseline on a machine, by the roofline alone.

    Attributes:
        flops: FLOPs of a prompt in the dense model / in this model.
        prefill: time of a prompt in the dense model / in this model.
        texts: number of texts -> time of a step in the dense model / in this model.
        cache: bytes of keys and values in this model / in the dense model.
        slots: rows of the narrowest routed product in the prompt.
    """

    flops: float
    prefill: float
    texts: Mapping[int, float]
    cache: float
    slots: int


def gain_of(
    model: Model, dense: Model, machine: Machine, rows: int, prompt: int, length: int, texts: Sequence[int]
) -> Gain:
    """Predicts the gain of a model whose layers can be calculated.

    Args:
        model: the model.
        dense: its dense baseline.
        machine: the roofline.
        rows: prompts that are read at once.
        prompt: tokens of a prompt.
        length: tokens of a text in the cache, for steps.
        texts: numbers of texts that are written at once.
    """
    prompt_layers, dense_prompt_layers = _layers(model, rows, prompt), _layers(dense, rows, prompt)
    step_layers, dense_step_layers = _layers(model, 1, length), _layers(dense, 1, length)
    token = _layers(dense, 1, 1)
    steps = {
        n: _step_seconds(dense_step_layers, dense_step_layers, token, machine, n, length)
        / _step_seconds(step_layers, dense_step_layers, token, machine, n, length)
        for n in texts
    }
    slots = [k for layer in prompt_layers for k in layer.selected.values()]
    return Gain(
        flops=_flops(dense_prompt_layers) / _flops(prompt_layers),
        prefill=_prompt_seconds(dense_prompt_layers, token, machine, rows)
        / _prompt_seconds(prompt_layers, token, machine, rows),
        texts=steps,
        cache=sum(layer.kv_bytes for layer in step_layers) / max(1, sum(layer.kv_bytes for layer in dense_step_layers)),
        slots=rows * min(slots, default=prompt),
    )


def _layers(model: Model, batch: int, seq: int) -> Sequence[LayerCost]:
    layers = model.layers(batch, seq)
    assert layers is not None, "the caller has checked that the layers can be calculated"
    return layers


def _flops(layers: Sequence[LayerCost]) -> float:
    return sum(sum(layer.flops.values()) for layer in layers)


def _part_bytes(token: LayerCost, part: str) -> float:
    """Returns the float32 bytes of the weights of a part: every weight of a dense layer costs a token two FLOPs."""
    return 0.0 if part == "attention" else token.flops.get(part, 0) / 2 * FLOAT32_BYTES


def _prompt_seconds(layers: Sequence[LayerCost], token: Sequence[LayerCost], machine: Machine, rows: int) -> float:
    """Returns the time of prompts. The head computes the last token of each row only."""
    total = 0.0
    for layer, dense in zip(layers, token, strict=True):
        for part, flops in layer.flops.items():
            if part == HEAD:
                flops = dense.flops[HEAD] * rows
            total += machine.seconds(flops, _part_bytes(dense, part))
    return total


def _step_seconds(
    layers: Sequence[LayerCost],
    dense: Sequence[LayerCost],
    token: Sequence[LayerCost],
    machine: Machine,
    texts: int,
    length: int,
) -> float:
    """Returns the time of a step that reads one token of each text. `layers` and `dense` are for a row of `length`
    tokens, `token` for a single token.

    Of a part's FLOPs, a routed layer keeps the share a + (1 - a) c, where a is the share of the part that always runs,
    1 - a the share that runs for routed tokens only, and c the capacity. So a follows from the FLOPs that it keeps.
    """
    total = 0.0
    for layer, dense_layer, token_layer in zip(layers, dense, token, strict=True):
        capacity = _capacity(layer.selected, length)
        for part, flops in layer.flops.items():
            in_dense = dense_layer.flops.get(part)
            if in_dense is None:
                # Routers score every token. Adapters run only for skipped tokens, but `flops` counts every token.
                skipped = 1 - capacity if part == "adapter" else 1.0
                executed = 1 - capacity**texts if part == "adapter" else 1.0
                total += machine.seconds(
                    texts * flops / length * skipped, executed * flops / length / 2 * FLOAT32_BYTES
                )
                continue
            share = flops / in_dense if in_dense else 1.0
            always = 1.0 if capacity == 1 else min(1.0, max(0.0, (share - capacity) / (1 - capacity)))
            read = always + (1 - always) * (1 - (1 - capacity) ** texts)
            if part == "attention":
                # Scores read the cache of the rows that run, and have no weights. A step computes one query of each.
                queries = texts * (capacity if share < 1 else 1.0)
                share_of_cache = layer.kv_bytes / dense_layer.kv_bytes if dense_layer.kv_bytes else 0.0
                total += machine.seconds(
                    queries * in_dense / length * share_of_cache, cache_bytes=queries * layer.kv_bytes
                )
                continue
            total += machine.seconds(
                texts * share * token_layer.flops.get(part, 0), read * _part_bytes(token_layer, part)
            )
    return total


def _capacity(selected: Mapping[Site, int], length: int) -> float:
    """Returns the share of the tokens that the routed part of a layer takes; 1 for a dense layer."""
    return min((k / length for site, k in selected.items() if not is_expert(site)), default=1.0)


CAPACITIES = (0.125, 0.25, 0.5, 0.75)


def proposals(n_layers: int) -> list[Proposal]:
    """Returns the ways to route a dense model that the literature uses: every other block as in the paper; all blocks
    but the first two and the last two; MLPs alone; and blocks whose skipped tokens keep their keys and values.
    """
    every_other = tuple(range(1, n_layers, 2))
    inner = tuple(range(2, n_layers - 2)) or every_other
    return [
        Proposal(parts, layers, capacity, keys_values)
        for parts, layers, keys_values in (
            ("block", every_other, "absent"),
            ("block", every_other, "kept"),
            ("block", inner, "kept"),
            ("mlp", inner, "absent"),
        )
        for capacity in CAPACITIES
    ]


def machine_of(name: str, tflops: float | None, bandwidth: float | None, weight_bytes: float | None) -> Machine:
    """Returns a machine by its name in MACHINES, this one (`this`), or one with the given rates.

    Args:
        name: the name, which the two rates override.
        tflops: TFLOP/s of another machine; None, and so is `bandwidth`, if the name says which machine it is.
        bandwidth: GB/s of that other machine.
        weight_bytes: bytes of a weight, such as 1 for int8; None for those of the machine.

    Raises:
        UsageError: the name is unknown, only one of the two rates is given, or this machine cannot be measured.
    """
    if (tflops is None) != (bandwidth is None):
        raise UsageError("--tflops and --bandwidth describe a machine together; give both or none")
    if tflops is not None and bandwidth is not None:
        return Machine("a machine", "16 bits" if weight_bytes is None else f"{weight_bytes:g} bytes a weight",
                       tflops * 1e12, bandwidth * 1e9, weight_bytes or 2, 2)  # fmt: skip
    if name == "this":
        machine = describe_machine()
        roof = cached_roofline(machine, "float32", 1)
        if roof is None:
            raise UsageError("--machine this: its rates are measured with ONNX Runtime or PyTorch; install one of them")
        known = Machine(
            f"{machine['cpu']}, one thread", "float32", roof.gemm_gflops * 1e9, roof.bandwidth_gbs * 1e9, 4, 4
        )
    elif name in MACHINES:
        known = MACHINES[name]
    else:
        known_names = ", ".join(["this", *MACHINES])
        raise UsageError(f"--machine {name}: unknown; known: {known_names}; or give --tflops and --bandwidth")
    return known if weight_bytes is None else replace(known, weight_bytes=weight_bytes)
