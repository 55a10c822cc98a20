"""A captured program as everything behind it expects one: tensors in, tensors out, weights in float32, nothing kept.

What a program of `torch.export` may have beside that is removed where nothing is lost by it, and refused where it is.
torch itself makes a program functional (`run_decompositions` without decompositions): operators that write into a
tensor become operators that return a new one, and what stood in graphs of its own (autocast, no_grad, checkpoints,
vmap) stands in the program itself. Only then no value shares its memory with another, so `view`, which fails where
strides do not fit, may be `reshape`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from mod_export.export.not_static import place_of
from mod_export.export.program_nodes import METADATA, argument_of, inferred_values, with_arguments
from mod_export.sources.complex_numbers import as_real_parts
from mod_export.sources.flex_attention import write_out_flex_attention
from mod_export.sources.operators import is_operator
from mod_export.sources.value_names import free_names, input_names, only_output, output_names

ATEN = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
ROUTED = "routed_"
VIEWS = {ATEN.view.default, ATEN._unsafe_view.default}
METHODS = {name for name in dir(torch.nn.Module) if not name.startswith("_")}
MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
DRAWS = 2
"""Other values of state that a program may depend on."""
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


def functional_program(
    program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]
) -> ExportedProgram:
    """The program without operators that write into a tensor, and without graphs inside it but those of conditions and
    of flex_attention. It computes the same bits. Tensors are not copied.

    State that a run writes and no run reads, such as a cache that is filled anew, is not written any more.

    Args:
        program: from `torch.export`, at fixed sizes, on the CPU.
        where: what messages call it.
        samples: inputs, on which it is tried whether results depend on what the run before has written.

    Raises:
        CaptureError: it draws random numbers, changes its inputs, or depends on state that it changes.
    """
    _check_operators(program, where)
    with warnings.catch_warnings():
        # torch warns of its own doings.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = program.run_decompositions({})
    for node in list(_calls(program.graph_module)):
        if node.target in VIEWS:
            node.target = ATEN.reshape.default
        elif node.target is ATEN._assert_tensor_metadata.default:
            node.graph.erase_node(node)  # It asserts the dtype that the model had.
    for inner in (one for one in program.graph_module.modules() if isinstance(one, fx.GraphModule)):
        for node in inner.graph.nodes:
            # The history of a node names graphs by numbers, which another process gives otherwise.
            node.meta = {key: one for key, one in node.meta.items() if key in ("val", *METADATA)}
    _check_mutation(program, where, samples)
    return _without_state(program)


def _without_state(program: ExportedProgram) -> ExportedProgram:
    """The program that returns its own outputs only."""
    module, signature = program.graph_module, program.graph_signature
    output = module.graph.output_node()
    values: Any = output.args[0]
    own = [(one, spec) for one, spec in zip(values, signature.output_specs, strict=True) if spec.kind not in MUTATIONS]
    output.args = (tuple(one for one, _ in own),)
    module.graph.eliminate_dead_code()
    module.recompile()
    signature = ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=[spec for _, spec in own])
    return _program(program, module, signature, program.state_dict, program.constants)


def _check_mutation(program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]) -> None:
    """Of what a program writes, state may be left as it was that is written with the values that it has, or that no run
    reads before it has written it.
    """
    specs = program.graph_signature.output_specs
    nodes: Any = program.graph.output_node().args[0]
    written = {n: str(spec.target) for n, spec in enumerate(specs) if spec.kind in MUTATIONS}
    if not written:
        return
    held = {**program.state_dict, **program.constants}
    runs = [_results(program, held, inputs) for inputs in samples]
    changed = {
        n: name
        for n, name in written.items()
        if name not in held or not runs or not all(_same_bits(run[n], held[name]) for run in runs)
    }
    others = [{**held, **_drawn(held, [*changed.values()], seed)} for seed in range(DRAWS)]
    results = [n for n, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
    for n, name in changed.items():
        if name in held and runs:
            found = [_results(program, other, inputs) for other in others for inputs in samples]
            if all(_same_bits(one[n], run[n]) for one, run in zip(found, runs * DRAWS, strict=True) for n in results):
                return  # None of it is read, whichever it is.
        what = "buffer" if name in held else "input"
        line = place_of(nodes[n])
        raise CaptureError(
            f"{where}: changes its {what} {name} in place,{line}\n"
            "which engines do not: each run begins with the same weights. Return the new value as an output, or write "
            "to a copy"
        )


def _results(program: ExportedProgram, state: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Everything that a run gives: what it writes into its state, then its outputs."""
    given = iter(inputs)
    read: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            read.append(state[str(spec.target)])
        else:
            read.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else next(given))
    with torch.no_grad():
        return list(fx.Interpreter(program.graph_module).run(*read, enable_io_processing=False))


def _drawn(held: Mapping[str, torch.Tensor], names: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """Other values of some state."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in dict.fromkeys(names):
        if name in held:
            noise = torch.randint(0, 100, held[name].shape, generator=generator)
            found[name] = noise > 50 if held[name].dtype is torch.bool else noise.to(held[name].dtype)
    return found


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


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
    return _program(program, module, program.graph_signature, program.state_dict, program.constants)


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
    return _program(program, program.graph_module, program.graph_signature, state, constants)


def _program(
    program: ExportedProgram,
    module: fx.GraphModule,
    signature: ExportGraphSignature,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    calls: Sequence[ModuleCallEntry] | None = None,
) -> ExportedProgram:
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=dict(state),
        range_constraints={},
        module_call_graph=list(program.module_call_graph if calls is None else calls),
        constants=dict(constants),
        verifiers=program.verifiers,
    )


def _check_operators(program: ExportedProgram, where: str) -> None:
    for node in _calls(program.graph_module):
        name = str(node.target)
        if isinstance(node.target, torch._ops.OpOverload) and not is_operator(f"torch.ops.{name}"):
            raise CaptureError(
                f"{where}: calls {name},{place_of(node)}\nwhich engines do not have, or which trusts sizes unchecked. "
                "Write it with operators of torch (in transformers, experts_implementation='batched_mm' for grouped_mm)"
            )
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_off(node):
            raise CaptureError(
                f"{where}: draws random numbers ({name}),{place_of(node)}\nand no two runtimes draw the same; give the "
                "noise as an input, or switch it off in eval mode"
            )


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    return (node for graph in graphs for node in graph.nodes if node.op == "call_function")


def _is_off(node: fx.Node) -> bool:
    """Whether it is dropout that drops nothing."""
    return argument_of(node, "train", "training") is False or argument_of(node, "dropout_p", "p") in (0, 0.0)


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
        taken = [part for part in str(spec.target).split(".") if part in METHODS]
        if taken:
            raise CaptureError(
                f"{where}: the weight {spec.target} is called as a method of every module ({taken[0]}), which "
                "torch.export does not take; rename it"
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
                tensor = tensor.contiguous()  # What writes files reads memory from its beginning to its end.
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
    return _program(program, module, signature, state, constants, [ModuleCallEntry(fqn=root.fqn, signature=call)])
