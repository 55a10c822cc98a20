"""Turns a captured program into the form that all later code expects: tensors in, tensors out, operations in float32.

Anything else in a program of `torch.export` is removed if nothing is lost by that, and refused otherwise.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from mod_export.errors import CaptureError
from mod_export.graph.program_nodes import inferred_values, with_arguments
from mod_export.model.complex_numbers import NARROW, as_real_parts
from mod_export.model.flex_attention import write_out_flex_attention
from mod_export.model.functional_programs import program_of
from mod_export.model.value_names import free_names, input_names, only_output, output_names

ATEN = torch.ops.aten
ROUTED = "routed_"
STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProgram:
    """A program that reads and returns only tensors, with the names of its inputs and outputs in order.

    An input is named after the key of the dictionary that holds it, or after the parameter of `forward`. An output is
    named after the keys above it, such as `aux_0` for the first of a tuple under `aux`. Several outputs without keys
    are called `output_0` and so on. A single output without keys is called `logits` if it is floating point and has the
    batch dimension and one or two more dimensions, else `output`. Graphs have one name for each value: an output with
    the name of an input or of a weight gets the suffix `_out`, and an input with the name of a weight gets `_in`.

    Floating-point parameters and buffers are in the state_dict in the dtype in which they are stored, each tensor under
    one name. The constants hold everything else that the program reads, including float64 buffers, which stay float64.
    Complex numbers are pairs of real numbers. Operations in 16 bits become operations in float32, and engines in
    narrower dtypes are made from those.
    """

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def constant_outputs(self) -> frozenset[str]:
        """Names of the outputs that depend on no input, such as a weight that is returned."""
        inputs, (returned,) = set(input_nodes(self.program)), self.program.graph.output_node().args
        nodes = zip(self.outputs, cast(Sequence[fx.Node], returned), strict=True)
        return frozenset(name for name, node in nodes if not _reads(node, inputs))


def plain_program(program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]) -> PlainProgram:
    """Returns a plain copy of a program. Tensors are not copied.

    Args:
        program: a result of `functional_program`.
        where: name of the program in messages.
        samples: inputs of runs on which the real form of complex numbers is compared with PyTorch's own.

    Raises:
        CaptureError: the program computes with complex numbers in a way that has no real form, has a float64 weight,
            reads an object that is not a tensor, returns nothing that depends on its inputs, or uses a reserved output
            name.
    """
    module = with_arguments(program.graph_module, dict.fromkeys(NARROW, torch.float32))
    write_out_flex_attention(module)
    specs = list(program.graph_signature.input_specs)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    user_inputs = [node for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
    assert program.call_spec.in_spec is not None
    names = dict(zip(user_inputs, input_names(user_inputs, program.call_spec.in_spec), strict=True))
    tensors = {**program.state_dict, **program.constants}
    targets = {node: str(spec.target) for node, spec in zip(nodes, specs, strict=True) if spec.kind in STATE}
    held = {node: tensors[target] for node, target in targets.items()}
    with _in_float32(where):
        reals = as_real_parts(module, held, [_arguments(specs, tensors, sample) for sample in samples], where)
    tensors |= {targets[node]: tensor for node, tensor in reals.items()}
    kept: list[tuple[fx.Node, InputSpec]] = []
    first: dict[Any, tuple[fx.Node, str]] = {}
    for node, spec in zip(nodes, specs, strict=True):
        same = first.setdefault(_memory(tensors[str(spec.target)]), (node, "")) if spec.kind in STATE else (node, "")
        if isinstance(spec.arg, ConstantArgument):
            _replace(node, spec.arg.value)
        elif same[0] is not node:
            node.replace_all_uses_with(same[0])  # Tied weights become one weight.
        else:
            kept.append((node, spec))
            continue
        module.graph.erase_node(node)
    _check_state(kept, tensors, where)
    feeds = {node for node, spec in kept if spec.kind is InputKind.USER_INPUT}
    outputs, returned = _outputs(program, module, feeds, where)
    _infer(module, kept, where)
    taken = {str(spec.target) for _, spec in kept if spec.kind in STATE}
    if returned == [""]:
        returned = [only_output(outputs[0].meta["val"], next(node.meta["val"] for node, _ in kept if node in feeds))]
    inputs = free_names([names[node] for node, spec in kept if spec.kind is InputKind.USER_INPUT], taken, "_in")
    result_names = free_names(returned, {*taken, *inputs}, "_out")
    for name in result_names:
        if name.startswith(ROUTED):
            raise CaptureError(
                f"{where}: returns {name}; names that begin with {ROUTED} are those of routing sites. Rename the output"
            )
    return PlainProgram(program=_made(program, module, kept, tensors, outputs), inputs=inputs, outputs=result_names)


def _arguments(specs: Sequence[InputSpec], tensors: Mapping[str, Any], sample: Sequence[torch.Tensor]) -> list[Any]:
    """Returns everything that a run of the program reads, in the order of its placeholders."""
    feeds = iter(sample)
    return [
        spec.arg.value
        if isinstance(spec.arg, ConstantArgument)
        else next(feeds)
        if spec.kind is InputKind.USER_INPUT
        else tensors.get(str(spec.target))
        for spec in specs
    ]


@contextlib.contextmanager
def _in_float32(where: str) -> Iterator[None]:
    """Turns errors of a program that runs in float32, although it may be written for another dtype, into refusals."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:  # Any type of error: operators report a wrong dtype in different ways.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(f"{where}: cannot be computed in float32: {reason}") from error


def copied(program: ExportedProgram) -> ExportedProgram:
    """Returns the same program with a copy of its graph and the same tensors."""
    module = copy.deepcopy(program.graph_module)
    return program_of(program, module, program.graph_signature, program.state_dict, program.constants)


def input_values(program: ExportedProgram) -> list[torch.Tensor]:
    """Returns the shapes and dtypes of the program's inputs, as tensors without values."""
    return [node.meta["val"] for node in input_nodes(program)]


def input_nodes(program: ExportedProgram) -> list[fx.Node]:
    """Returns the placeholders of the program's inputs, without those of weights and constants."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    return [node for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def without_tensors(program: ExportedProgram) -> ExportedProgram:
    """Returns the program with the same graph, and with empty weights and constants."""
    state = {
        name: torch.nn.Parameter(torch.empty(0)) if isinstance(tensor, torch.nn.Parameter) else torch.empty(0)
        for name, tensor in program.state_dict.items()
    }
    constants = {name: torch.empty(0) for name in program.constants}
    return program_of(program, program.graph_module, program.graph_signature, state, constants)


def _memory(tensor: Any) -> Any:
    """Returns a key that is equal for tensors that view the same memory in the same way."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _replace(node: fx.Node, value: Any) -> None:
    for use in list(node.users):
        use.args, use.kwargs = fx.map_arg((use.args, use.kwargs), lambda arg: value if arg is node else arg)


def _check_state(kept: Sequence[tuple[fx.Node, InputSpec]], stored: Mapping[str, Any], where: str) -> None:
    for _, spec in kept:
        if spec.kind is InputKind.USER_INPUT:
            continue
        tensor = stored.get(str(spec.target))
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"{where}: reads {spec.target}, an object that is no tensor; engines take tensors only")
        if tensor.dtype is torch.float64 and spec.kind is InputKind.PARAMETER:
            raise CaptureError(
                f"{where}: the weight {spec.target} is float64; engines compute in float32 at most. Give model.float()"
            )


def _outputs(
    program: ExportedProgram, module: fx.GraphModule, inputs: set[fx.Node], where: str
) -> tuple[list[fx.Node], list[str]]:
    """Returns the output nodes and their names. The nodes are all different, and none of them is an input. The name of
    a single output without keys is empty.
    """
    tree = program.call_spec.out_spec
    assert tree is not None
    output = module.graph.output_node()
    values: Any = output.args[0]
    returned = [
        value
        for value, spec in zip(values, program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    nodes: list[fx.Node] = []
    names: list[str] = []
    for value, name in zip(returned, output_names(returned, tree), strict=True):
        if not isinstance(value, fx.Node):
            continue  # None, or a number that is the same in every call.
        if value.op == "placeholder" or value in nodes:
            with module.graph.inserting_before(output):
                copied = module.graph.call_function(ATEN.clone.default, (value,))
            copied.meta = {key: item for key, item in value.meta.items() if key != "val"}
            value = copied
        nodes.append(value)
        names.append(name)
    if not nodes:
        raise CaptureError(f"{where}: returns no tensor")
    if not any(_reads(node, inputs) for node in nodes):
        raise CaptureError(
            f"{where}: returns nothing that depends on its inputs; an engine has nothing to compute there"
        )
    output.args = (tuple(nodes),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return nodes, names


def _reads(node: fx.Node, inputs: set[fx.Node]) -> bool:
    """Returns whether a node depends on one of the nodes in `inputs`."""
    seen, waiting = {node}, [node]
    for current in waiting:  # The loop appends to this list.
        new = [source for source in current.all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return not seen.isdisjoint(inputs)


def _infer(module: fx.GraphModule, kept: Sequence[tuple[fx.Node, InputSpec]], where: str) -> None:
    """Infers the values of all nodes again, with float32 in place of 16-bit dtypes."""
    mode = detect_fake_mode([node.meta["val"] for node, _ in kept])
    for node, _ in kept:
        value = node.meta["val"]
        if value.dtype in NARROW:
            assert mode is not None
            with mode:
                node.meta["val"] = value.to(torch.float32)
    with _in_float32(where):
        for node, value in inferred_values(module, [node.meta["val"] for node, _ in kept]):
            node.meta["val"] = value


def _made(
    program: ExportedProgram,
    module: fx.GraphModule,
    kept: Sequence[tuple[fx.Node, InputSpec]],
    stored: Mapping[str, torch.Tensor],
    outputs: Sequence[fx.Node],
) -> ExportedProgram:
    state: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    specs = []
    for node, spec in kept:
        # A node whose name is a builtin of Python has another name in the copied graph.
        spec = replace(spec, arg=TensorArgument(name=node.name))
        if spec.kind is not InputKind.USER_INPUT:
            name = str(spec.target)
            tensor = stored[name]
            if not tensor.is_contiguous():
                # Code that writes files reads a tensor's memory from its beginning to its end.
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                tensor = tensor.detach().contiguous()
                tensor = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            # The state_dict is converted to the dtype of an engine; constants are read as they are.
            if name in program.state_dict and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                state[name] = tensor
            else:
                constants[name] = tensor.detach().to(torch.float32) if tensor.dtype in NARROW else tensor.detach()
                if spec.kind is not InputKind.CONSTANT_TENSOR:
                    spec = replace(spec, kind=InputKind.BUFFER, persistent=False)
        specs.append(spec)
    inputs = [node for node, spec in kept if spec.kind is InputKind.USER_INPUT]
    root = program.module_call_graph[0]
    assert root.signature is not None
    call = copy.copy(root.signature)
    call.inputs = [TensorArgument(name=node.name) for node in inputs]
    call.outputs = [TensorArgument(name=node.name) for node in outputs]
    call.in_spec = pytree.tree_structure(((0,) * len(inputs), {}))
    call.out_spec = pytree.tree_structure((0,) * len(outputs))
    call.forward_arg_names = None
    signature = ExportGraphSignature(
        input_specs=specs,
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=output.name), None) for output in outputs],
    )
    return program_of(program, module, signature, state, constants, [ModuleCallEntry(fqn=root.fqn, signature=call)])
