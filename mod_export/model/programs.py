"""A model that is already captured: programs of torch.export, one for each shape, with the same weights."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.export.pt2_archive import PT2ArchiveReader
from torch.fx import traceback

from mod_export.environment import let_go
from mod_export.errors import CheckpointError
from mod_export.graph.program_nodes import argument_of
from mod_export.model.complex_numbers import NARROW
from mod_export.model.model import Model
from mod_export.model.plain_programs import PlainProgram, input_values, without_tensors
from mod_export.types import Bucket, Outputs

ATEN = torch.ops.aten
SAME_IDS = {
    ATEN.to.dtype, ATEN.to.dtype_layout, ATEN._to_copy.default, ATEN.clone.default, ATEN.alias.default,
    ATEN.contiguous.default, ATEN.detach.default, ATEN.view.default, ATEN.reshape.default, ATEN.flatten.using_ints,
    ATEN.slice.Tensor, ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.transpose.int,
}  # fmt: skip
"""Operators that leave token ids unchanged on their way to an embedding."""


class ProgramModel(Model):
    """A model made of programs (`plain_programs.py`), with any inputs at the shapes at which it was captured.

    Its weights keep the dtype in which they are stored; its module computes in float32.
    """

    def __init__(
        self, programs: Mapping[Bucket, PlainProgram], samples: Mapping[Bucket, Sequence[Sequence[torch.Tensor]]]
    ) -> None:
        """`samples` holds at least one sample for each shape, its tensors in the order of the program's inputs.

        Raises:
            CheckpointError: the programs do not belong to one model.
        """
        self._programs = {bucket: programs[bucket] for bucket in sorted(programs)}
        self._weights: Mapping[str, torch.Tensor] = _one_model(self.programs)
        first = next(iter(self.programs.values()))
        self.input_names, self._output_names = first.inputs, first.outputs
        self.samples = {
            bucket: [
                {name: _array(tensor) for name, tensor in zip(self.input_names, sample, strict=True)}
                for sample in samples[bucket]
            ]
            for bucket in self.buckets
        }

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    @property
    def programs(self) -> Mapping[Bucket, PlainProgram]:
        return self._programs

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self.programs)

    def output_names(self, outputs: Outputs = "logits") -> tuple[str, ...]:
        return self._output_names

    @cached_property
    def constant_outputs(self) -> frozenset[str]:
        return next(iter(self.programs.values())).constant_outputs

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """Plain data: `buckets`, `inputs` of each (name, dtype, shape), `outputs`, and the SHA-256 of each graph
        (`programs`), of the `constants` and of the `samples`. If one of them changes, everything made from this model
        is built again.
        """
        return {
            "buckets": [bucket.name for bucket in self.buckets],
            "inputs": {
                bucket.name: [
                    {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
                    for name, array in self.samples[bucket][0].items()
                ]
                for bucket in self.buckets
            },
            "outputs": list(self._output_names),
            "programs": {bucket.name: hashlib.sha256(self.graph_texts[bucket]).hexdigest() for bucket in self.buckets},
            "constants": digest_of_arrays(self.constants),
            "samples": digest_of_arrays(self.named_samples),
        }

    @cached_property
    def graph_texts(self) -> Mapping[Bucket, bytes]:
        """The graph of each program as JSON, as in a .pt2, without tensors."""
        return {bucket: _graph_text(plain.program) for bucket, plain in self.programs.items()}

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Arrays that programs read besides weights and inputs, by name (see `constant_names`)."""
        arrays = {}
        for bucket, names in constant_names({key: plain.program for key, plain in self.programs.items()}).items():
            tensors = self.programs[bucket].program.constants
            arrays.update({stored: tensors[name].numpy() for name, stored in names.items()})
        return arrays

    @property
    def named_samples(self) -> dict[str, np.ndarray]:
        """Arrays of all given samples: `b1s512/ids.0` is the input `ids` of the first sample of that bucket."""
        return {
            f"{bucket.name}/{name}.{number}": array
            for bucket, samples in self.samples.items()
            for number, sample in enumerate(samples)
            for name, array in sample.items()
        }

    def sample(self, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
        """Returns inputs of one run. The first seeds, from 0, give the samples of the model; higher ones draw values.

        * token ids, which are integers that index an embedding: uniform in its rows;
        * floating point: normal with the mean and standard deviation of a given sample, unless that sample has at most
          two different values (a mask) or infinities;
        * everything else (masks, lengths, positions) is copied from the given sample.
        """
        samples = self.samples[bucket]
        base = samples[seed % len(samples)]
        if seed < len(samples):
            return base
        rng = np.random.default_rng(seed)
        rows = self._embedding_rows[bucket]
        return {name: _drawn(array, rows.get(name, 0), rng) for name, array in base.items()}

    @cached_property
    def _embedding_rows(self) -> Mapping[Bucket, Mapping[str, int]]:
        return {bucket: _embedding_rows(plain) for bucket, plain in self.programs.items()}

    def module(self, outputs: Outputs = "logits") -> nn.Module:
        return self._module({name: _widened(tensor) for name, tensor in self.weights.items()})

    def skeleton(self, outputs: Outputs = "logits") -> nn.Module:
        return self._module({name: _widened(tensor.to("meta")) for name, tensor in self.weights.items()})

    def _module(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        return _Programs({bucket: plain.program for bucket, plain in self.programs.items()}, weights)


def constant_names(programs: Mapping[Bucket, ExportedProgram]) -> dict[Bucket, dict[str, str]]:
    """Returns bucket -> constant -> its name among the constants of all programs. A constant keeps its name if all
    programs that have it agree on its value; otherwise the bucket is put before it, as in `b1s512.name`.
    """
    values: dict[str, torch.Tensor] = {}
    differing = set()
    for program in programs.values():
        for name, tensor in program.constants.items():
            if name in values and not _same(values[name], tensor):
                differing.add(name)
            values[name] = tensor
    return {
        bucket: {name: f"{bucket.name}.{name}" if name in differing else name for name in program.constants}
        for bucket, program in programs.items()
    }


class _Programs(nn.Module):
    """Runs the program that was captured for the shapes of the inputs.

    Like every module it is captured for export, which gives the same operations again, with the same module paths and
    source lines. Its state is the weights and the programs' constants.
    """

    def __init__(self, programs: Mapping[Bucket, ExportedProgram], weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        parameters = {name for program in programs.values() for name in program.graph_signature.parameters}
        for name, tensor in weights.items():
            self._register(name, tensor, is_parameter=name in parameters)
        self._graphs = []
        names = constant_names(programs)
        for bucket, program in programs.items():
            for name, tensor in program.constants.items():
                self._register(names[bucket][name], tensor, is_parameter=False)
            self._graphs.append(_Graph(program, names[bucket]))
        self.eval()

    def _register(self, name: str, tensor: torch.Tensor, *, is_parameter: bool) -> None:
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in path:
            # Not by attribute: a weight may have the name of a method.
            parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]  # It is not None.
        if is_parameter:
            parent._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            parent._buffers[last] = tensor

    def forward(self, *inputs: torch.Tensor) -> Any:
        shapes = [tuple(tensor.shape) for tensor in inputs]
        matching = [g for g in self._graphs if g.shapes == shapes]
        if not matching:
            known = "; ".join(str(g.shapes) for g in self._graphs)
            raise ValueError(f"inputs of the shapes {shapes}; this model was captured at {known}")
        graph = matching[0]
        state = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        feeds = iter(inputs)
        values = [next(feeds) if name is None else state[name] for name in graph.inputs]
        if torch.compiler.is_dynamo_compiling():
            return graph.module(*values)
        # Keeps the module paths of operations, because sites and messages are named after them.
        with traceback.preserve_node_meta():
            return fx.Interpreter(graph.module).run(*values, enable_io_processing=False)


class _Graph:
    """The operations of a program. `inputs` holds names in the state, or None for the program's own inputs."""

    def __init__(self, program: ExportedProgram, constants: Mapping[str, str]) -> None:
        specs = program.graph_signature.input_specs
        self.inputs = [
            None if spec.kind is InputKind.USER_INPUT else constants.get(str(spec.target), str(spec.target))
            for spec in specs
        ]
        self.shapes = [tuple(value.shape) for value in input_values(program)]
        self.module = program.graph_module


def _one_model(programs: Mapping[Bucket, PlainProgram]) -> dict[str, torch.Tensor]:
    """Checks that the programs belong to one model. All then share the weights of the first, which are returned."""
    (bucket, first), *others = programs.items()
    weights = {name: tensor.detach() for name, tensor in sorted(first.program.state_dict.items())}
    for other_bucket, plain in others:
        both = f"{bucket.name} and {other_bucket.name}"
        state = plain.program.state_dict
        for name in sorted(weights.keys() ^ state.keys()):
            has, lacks = (bucket, other_bucket) if name in weights else (other_bucket, bucket)
            raise CheckpointError(f"{both}: the weight {name} is in {has.name} and not in {lacks.name}")
        for name, tensor in weights.items():
            if not _same(tensor, state[name].detach()):
                raise CheckpointError(f"{both}: the weight {name} differs; a model's programs have the same weights")
            state[name] = first.program.state_dict[name]
        ports = (("reads", first.inputs, plain.inputs), ("returns", first.outputs, plain.outputs))
        for what, names, other_names in ports:
            if names != other_names:
                raise CheckpointError(
                    f"{both}: one {what} {', '.join(names)}, the other {', '.join(other_names)}; programs of one model "
                    "are alike"
                )
    shapes: dict[str, Bucket] = {}
    for bucket, plain in programs.items():
        shape = str([tuple(value.shape) for value in input_values(plain.program)])
        if shape in shapes:
            raise CheckpointError(f"{shapes[shape].name} and {bucket.name}: both read inputs of the shapes {shape}")
        shapes[shape] = bucket
    return weights


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0 or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True
    equal = torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))
    let_go([a, b])  # Gives back pages of mapped files.
    return equal


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in NARROW else tensor


def _array(tensor: torch.Tensor) -> np.ndarray:
    # `ascontiguousarray` would add a dimension to a tensor without one.
    return np.asarray(_widened(tensor.detach().cpu()).numpy(), order="C")


def digest_of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of arrays with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _graph_text(program: ExportedProgram) -> bytes:
    """Returns the graph as JSON without source lines, because they name files of the machine that captured it."""
    buffer = io.BytesIO()
    torch.export.save(without_tensors(program), buffer)
    buffer.seek(0)
    graph = json.loads(PT2ArchiveReader(buffer).read_bytes("models/model.json"))
    _forget_sources(graph)
    return json.dumps(graph, separators=(",", ":")).encode()


def _forget_sources(value: Any) -> None:
    if isinstance(value, dict):
        if isinstance(value.get("metadata"), dict):
            value["metadata"].pop("stack_trace", None)
        for item in value.values():
            _forget_sources(item)
    elif isinstance(value, list):
        for item in value:
            _forget_sources(item)


def _embedding_rows(plain: PlainProgram) -> dict[str, int]:
    """Returns each input that indexes embeddings -> the smallest number of rows of these embeddings."""
    smallest: dict[str, int] = {}
    user_inputs = plain.program.graph_signature.user_inputs
    nodes = [node for node in plain.program.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
    for name, node in zip(plain.inputs, nodes, strict=True):
        ids = [node]
        for value in ids:  # The loop appends to this list.
            for use in value.users:
                if use.target in SAME_IDS and use not in ids:
                    ids.append(use)
                if use.target is ATEN.embedding.default and argument_of(use, "indices") is value:
                    weight: Any = use.args[0]
                    rows = weight.meta["val"].shape[0]
                    smallest[name] = min(smallest.get(name, rows), rows)
    return smallest


def _drawn(array: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    if rows:
        return rng.integers(0, rows, array.shape).astype(array.dtype)
    if not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all() or len(np.unique(array)) <= 2:
        return array
    return rng.normal(array.mean(), array.std(), array.shape).astype(array.dtype)
