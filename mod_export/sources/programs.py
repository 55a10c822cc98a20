"""A model that is captured already: programs of torch.export, one for each shape, with the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import traceback

from mod_export.export.program_nodes import with_arguments
from mod_export.types import Bucket, Outputs

CPU, META = torch.device("cpu"), torch.device("meta")


class ProgramModel:
    """An `ExportableModel` with `SampledInputs`, made of programs."""

    def __init__(
        self,
        programs: Mapping[Bucket, ExportedProgram],
        weights: Mapping[str, torch.Tensor],
        samples: Mapping[Bucket, Sequence[Mapping[str, np.ndarray]]],
        output_names: Sequence[str],
    ) -> None:
        """`samples` are inputs of each shape by name, at least one, in the order of the arguments."""
        self.weights, self.output_names = weights, tuple(output_names)
        self.buckets = tuple(sorted(programs))
        self._programs, self._samples = dict(programs), {bucket: list(found) for bucket, found in samples.items()}

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"buckets": [bucket.name for bucket in self.buckets], "outputs": list(self.output_names)}

    def sample(self, bucket: Bucket, seed: int) -> Mapping[str, np.ndarray]:
        found = self._samples[bucket]
        return found[seed % len(found)]

    def module(self, outputs: Outputs = "logits") -> nn.Module:
        return _Programs(self._programs, self.weights)

    def skeleton(self, outputs: Outputs = "logits") -> nn.Module:
        return _Programs(self._programs, {name: one.to("meta") for name, one in self.weights.items()}, META)


class _Programs(nn.Module):
    """Runs the program that was captured for the shapes of the inputs.

    When it is captured again, as every module is, it gives the same operations with the same module paths and lines of
    source. Its state is the weights and the programs' constants: those that all programs share under their own name,
    others as `b1s512.name`.
    """

    def __init__(
        self,
        programs: Mapping[Bucket, ExportedProgram],
        weights: Mapping[str, torch.Tensor],
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        parameters = {name for program in programs.values() for name in program.graph_signature.parameters}
        for name, tensor in weights.items():
            self._register(name, tensor, is_parameter=name in parameters)
        self._graphs = []
        shared = _shared_constants(list(programs.values()))
        for bucket, program in programs.items():
            names = {name: name if name in shared else f"{bucket.name}.{name}" for name in program.constants}
            for name, tensor in program.constants.items():
                self._register(names[name], tensor.detach(), is_parameter=False)
            self._graphs.append(_Graph(program, names, device))
        self.eval()

    def _register(self, name: str, tensor: torch.Tensor, *, is_parameter: bool) -> None:
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in path:
            # Not by attribute: a weight may have the name of a method.
            parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if is_parameter:
            parent._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            parent._buffers[last] = tensor

    def forward(self, *inputs: torch.Tensor) -> Any:
        graph = next(one for one in self._graphs if one.shapes == [tuple(tensor.shape) for tensor in inputs])
        state = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        given = iter(inputs)
        values = [next(given) if name is None else state[name] for name in graph.inputs]
        if torch.compiler.is_dynamo_compiling():
            return graph.module(*values)
        # Operations keep the module paths that sites and messages are named after.
        with traceback.preserve_node_meta():
            return fx.Interpreter(graph.module).run(*values, enable_io_processing=False)


class _Graph:
    """The operations of a program. `inputs` are names in the state, None for the program's own inputs."""

    def __init__(self, program: ExportedProgram, constants: Mapping[str, str], device: torch.device) -> None:
        specs = program.graph_signature.input_specs
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.inputs = [
            None if spec.kind is InputKind.USER_INPUT else constants.get(str(spec.target), str(spec.target))
            for spec in specs
        ]
        own = [node for node, name in zip(nodes, self.inputs, strict=True) if name is None]
        self.shapes = [tuple(node.meta["val"].shape) for node in own]
        self.module = program.graph_module
        if device != CPU:
            self.module = with_arguments(self.module, {CPU: device})


def _shared_constants(programs: Sequence[ExportedProgram]) -> set[str]:
    """Names of constants that are the same in every program that has them."""
    found: dict[str, torch.Tensor] = {}
    other = set()
    for program in programs:
        for name, tensor in program.constants.items():
            if name in found and not torch.equal(found[name], tensor):
                other.add(name)
            found[name] = tensor
    return found.keys() - other
