"""A captured program as everything behind it expects one: tensors in, tensors out, weights in float32, nothing kept.

What a program of `torch.export` may have beside that is removed where nothing is lost by it, and refused where it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from mod_export.model.complex_numbers import as_real_parts
from mod_export.model.flex_attention import write_out_flex_attention
from mod_export.model.functional_programs import program_of
from mod_export.model.value_names import free_names, input_names, only_output, output_names

ATEN = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
ROUTED = "routed_"
STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProgram:
    """A program that reads and returns tensors only, and the names of what it reads and returns, in order.

    An input is called as the key of the dictionary that holds it, or as the parameter of `forward`. An output is called
    as the keys above it, `aux_0` for the first of a tuple under `aux`; without keys `output`, or `output_0` and so on;
    the only output of a model is called `logits` if it is floating point, has a first dimension of the size of the
    batch, and at least one and at most two more. An output that has the name of an input or of a weight gets `_out`
    after it, because graphs have one name for each value; an input with the name of a weight gets `_in`.

    Its parameters and buffers in floating point are in the state_dict, as they are stored, each tensor under one name;
    everything else that it reads is among its constants, float64 buffers included, which stay so. Complex numbers are
    pairs of real ones. Its operations are those of float32 where they were of 16 bit:
    narrower engines are made of that.
    """

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def plain_program(program: ExportedProgram, where: str) -> PlainProgram:
    """A copy; tensors are not copied.

    Args:
        program: of `functional_program`.
        where: what messages call it.

    Raises:
        CaptureError: it computes with complex numbers in a way that has no real form, reads what is no tensor, or
            returns what is no result of its inputs.
    """
    module = with_arguments(program.graph_module, dict.fromkeys(NARROW, torch.float32))
    write_out_flex_attention(module)
    specs = list(program.graph_signature.input_specs)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = [node for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
    assert program.call_spec.in_spec is not None
    names = dict(zip(own, input_names(own, program.call_spec.in_spec), strict=True))
    held = {**program.state_dict, **program.constants}
    targets = {node: str(spec.target) for node, spec in zip(nodes, specs, strict=True) if spec.kind in STATE}
    reals = as_real_parts(module, {node: held[target] for node, target in targets.items()}, where)
    held |= {targets[node]: tensor for node, tensor in reals.items()}
    kept: list[tuple[fx.Node, InputSpec]] = []
    first: dict[Any, tuple[fx.Node, str]] = {}
    for node, spec in zip(nodes, specs, strict=True):
        same = first.setdefault(_memory(held[str(spec.target)]), (node, "")) if spec.kind in STATE else (node, "")
        if isinstance(spec.arg, ConstantArgument):
            _replace(node, spec.arg.value)
        elif same[0] is not node:
            node.replace_all_uses_with(same[0])  # Tied weights are one.
        else:
            kept.append((node, spec))
            continue
        module.graph.erase_node(node)
    _check_state(kept, held, where)
    given = {node for node, spec in kept if spec.kind is InputKind.USER_INPUT}
    outputs, returned = _outputs(program, module, given, where)
    _infer(module, kept, held, where)
    taken = {str(spec.target) for _, spec in kept if spec.kind in STATE}
    if returned == [""]:
        returned = [only_output(outputs[0].meta["val"], next(node.meta["val"] for node, _ in kept if node in given))]
    inputs = free_names([names[node] for node, spec in kept if spec.kind is InputKind.USER_INPUT], taken, "_in")
    found = free_names(returned, {*taken, *inputs}, "_out")
    for name in found:
        if name.startswith(ROUTED):
            raise CaptureError(
                f"{where}: returns {name}; names that begin with {ROUTED} are those of routing sites. Rename the output"
            )
    return PlainProgram(program=_made(program, module, kept, held, outputs), inputs=inputs, outputs=found)


def copied(program: ExportedProgram) -> ExportedProgram:
    """The same program with a graph of its own, and the same tensors."""
    module = copy.deepcopy(program.graph_module)
    return program_of(program, module, program.graph_signature, program.state_dict, program.constants)


def input_values(program: ExportedProgram) -> list[torch.Tensor]:
    """The shapes and dtypes of what it reads, as tensors without values."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    return [node.meta["val"] for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def without_tensors(program: ExportedProgram) -> ExportedProgram:
    """The same graph; weights and constants are empty."""
    state = {
        name: torch.nn.Parameter(torch.empty(0)) if isinstance(one, torch.nn.Parameter) else torch.empty(0)
        for name, one in program.state_dict.items()
    }
    constants = {name: torch.empty(0) for name in program.constants}
    return program_of(program, program.graph_module, program.graph_signature, state, constants)


def _memory(tensor: Any) -> Any:
    """The same for tensors that are one."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _replace(node: fx.Node, value: Any) -> None:
    for use in list(node.users):
        use.args, use.kwargs = fx.map_arg((use.args, use.kwargs), lambda one: value if one is node else one)


def _check_state(kept: Sequence[tuple[fx.Node, InputSpec]], held: Mapping[str, Any], where: str) -> None:
    for _, spec in kept:
        if spec.kind is InputKind.USER_INPUT:
            continue
        tensor = held.get(str(spec.target))
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"{where}: reads {spec.target}, an object that is no tensor; engines take tensors only")
        if tensor.dtype is torch.float64 and spec.kind is InputKind.PARAMETER:
            raise CaptureError(
                f"{where}: the weight {spec.target} is float64; engines compute in float32 at most. Give model.float()"
            )


def _outputs(
    program: ExportedProgram, module: fx.GraphModule, given: set[fx.Node], where: str
) -> tuple[list[fx.Node], list[str]]:
    """The nodes that are returned, each another one and none of them an input, and the names that they have by their
    keys, empty without any.
    """
    tree = program.call_spec.out_spec
    assert tree is not None
    output = module.graph.output_node()
    values: Any = output.args[0]
    own = [
        value
        for value, spec in zip(values, program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    nodes: list[fx.Node] = []
    names: list[str] = []
    for value, name in zip(own, output_names(own, tree), strict=True):
        if value is None:
            continue
        if not isinstance(value, fx.Node):
            raise CaptureError(f"{where}: returns the number {value!r} beside its tensors; return tensors only")
        if not _reads(value, given):
            raise CaptureError(
                f"{where}: returns {name or 'output'}, which does not depend on its inputs; an engine has nothing to "
                "compute there. Leave it out of what forward returns"
            )
        if value.op == "placeholder" or value in nodes:
            with module.graph.inserting_before(output):
                copied = module.graph.call_function(ATEN.clone.default, (value,))
            copied.meta = {key: one for key, one in value.meta.items() if key != "val"}
            value = copied
        nodes.append(value)
        names.append(name)
    if not nodes:
        raise CaptureError(f"{where}: returns no tensor")
    output.args = (tuple(nodes),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return nodes, names


def _reads(node: fx.Node, given: set[fx.Node]) -> bool:
    """Whether it depends on one of these."""
    found, waiting = {node}, [node]
    for one in waiting:  # Which grows meanwhile.
        new = [source for source in one.all_input_nodes if source not in found]
        found.update(new)
        waiting += new
    return not found.isdisjoint(given)


def _infer(
    module: fx.GraphModule, kept: Sequence[tuple[fx.Node, InputSpec]], held: Mapping[str, Any], where: str
) -> None:
    """Gives every node the value that it has now, of float32 where it was of 16 bit."""
    mode = detect_fake_mode([node.meta["val"] for node, _ in kept])
    for node, _ in kept:
        value = node.meta["val"]
        if value.dtype in NARROW:
            assert mode is not None
            with mode:
                node.meta["val"] = value.to(torch.float32)
    try:
        for node, value in inferred_values(module, [node.meta["val"] for node, _ in kept]):
            node.meta["val"] = value
    except Exception as error:  # Of any type: operators say in their own ways that a dtype does not fit.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(f"{where}: cannot be computed in float32: {reason}") from error


def _made(
    program: ExportedProgram,
    module: fx.GraphModule,
    kept: Sequence[tuple[fx.Node, InputSpec]],
    held: Mapping[str, torch.Tensor],
    outputs: Sequence[fx.Node],
) -> ExportedProgram:
    state: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    specs = []
    for node, spec in kept:
        # Where a name is one of Python's own, the copy of a graph calls the node otherwise.
        spec = replace(spec, arg=TensorArgument(name=node.name))
        if spec.kind is not InputKind.USER_INPUT:
            name = str(spec.target)
            tensor = held[name]
            if not tensor.is_contiguous():
                # What writes files reads memory from its beginning to its end.
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                tensor = tensor.detach().contiguous()
                tensor = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            # What programs hold by themselves is read as it is; weights become what an engine's dtype is.
            if name in program.state_dict and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                state[name] = tensor
            else:
                constants[name] = tensor.detach().to(torch.float32) if tensor.dtype in NARROW else tensor.detach()
                if spec.kind is not InputKind.CONSTANT_TENSOR:
                    spec = replace(spec, kind=InputKind.BUFFER, persistent=False)
        specs.append(spec)
    own = [node for node, spec in kept if spec.kind is InputKind.USER_INPUT]
    root = program.module_call_graph[0]
    assert root.signature is not None
    call = copy.copy(root.signature)
    call.inputs = [TensorArgument(name=node.name) for node in own]
    call.outputs = [TensorArgument(name=node.name) for node in outputs]
    call.in_spec = pytree.tree_structure(((0,) * len(own), {}))
    call.out_spec = pytree.tree_structure((0,) * len(outputs))
    call.forward_arg_names = None
    signature = ExportGraphSignature(
        input_specs=specs,
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=one.name), None) for one in outputs],
    )
    return program_of(program, module, signature, state, constants, [ModuleCallEntry(fqn=root.fqn, signature=call)])
