"""Converts a captured program to functional form: no operator writes into a tensor, and it has no nested graphs.

torch itself makes a program functional (`run_decompositions` without decompositions): operators that write into a
tensor become operators that return a new one, and the content of nested graphs (autocast, no_grad, checkpoints, vmap)
moves into the program itself. A static graph has only one path, so both branches of a `torch.cond` are computed, and
the condition selects between their results. In functional form no value shares memory with another, so `view`, which
fails if strides do not fit, can become `reshape`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, InputKind, OutputKind

from mod_export.errors import CaptureError
from mod_export.graph.program_nodes import METADATA, argument_of, replace_by
from mod_export.graph.refusals import place_of
from mod_export.model.flex_attention import FLEX
from mod_export.model.operators import is_operator
from mod_export.model.strided_views import AS_STRIDED, write_out_strided_views

ATEN = torch.ops.aten
COND = torch.ops.higher_order.cond
VIEWS = {ATEN.view.default, ATEN._unsafe_view.default}
MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
STOPPED = re.compile(r"While executing %(?P<name>\w+) :")
METHODS = {name for name in dir(torch.nn.Module) if not name.startswith("_")}
DRAWS = 2
"""Number of random states that are tried, to see whether results depend on the state."""


def functional_program(
    program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]
) -> ExportedProgram:
    """Returns the program without operators that write into a tensor, and without nested graphs except those of
    flex_attention. It computes the same bits. Tensors are not copied.

    State that a run writes and no run reads, such as a cache that is filled anew, is no longer written.

    Args:
        program: a program of `torch.export` at fixed sizes, on the CPU.
        where: name of the program in messages.
        samples: inputs of runs that test whether results depend on state from an earlier run.

    Raises:
        CaptureError: the program draws random numbers, changes its inputs, depends on state that it changes, or has a
            loop.
    """
    _check_names(program, where)
    _check_operators(program, where)
    program = without_writes(program, where)
    _compute_both_branches(program.graph_module)
    write_out_strided_views(program.graph, where)
    _refuse_loops(program.graph_module, where)
    for node in list(calls_of(program.graph_module)):
        if node.target in VIEWS:
            node.target = ATEN.reshape.default
        elif node.target is ATEN._assert_tensor_metadata.default:
            node.graph.erase_node(node)  # It asserts the dtype of the original model.
    for inner in (item for item in program.graph_module.modules() if isinstance(item, fx.GraphModule)):
        for node in inner.graph.nodes:
            # Other metadata names graphs by numbers that differ from process to process.
            node.meta = {key: item for key, item in node.meta.items() if key in ("val", *METADATA)}
    _check_mutation(program, where, samples)
    return _without_state(program)


def without_writes(program: ExportedProgram, where: str) -> ExportedProgram:
    """Returns the program as torch itself makes it functional.

    Raises:
        CaptureError: the program writes into a tensor in a way that torch cannot follow.
    """
    try:
        with warnings.catch_warnings():
            # torch warns about its own code.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            functional: ExportedProgram = program.run_decompositions({})
    except RuntimeError as error:
        # torch's message names the node at which it stopped.
        stopped = STOPPED.search(str(error))
        node = next((call for call in program.graph.nodes if stopped and call.name == stopped["name"]), None)
        if node is None:
            raise
        raise CaptureError(
            f"{where}: calls {node.target},{place_of(node)}\nwhich writes into a part of a tensor in a way that torch "
            "cannot follow. Write it with an operator that returns a new tensor, such as torch.where"
        ) from error
    return functional


def _compute_both_branches(module: fx.GraphModule) -> None:
    """Replaces each condition by both branches. Inner graphs come first, so no condition moves into an outer graph."""
    for inner in reversed([part for part in module.modules() if isinstance(part, fx.GraphModule)]):
        for node in inner.graph.find_nodes(op="call_function", target=COND):
            replace_by(inner.graph, node, _both)
        inner.graph.eliminate_dead_code()
        inner.recompile()
    module.delete_all_unused_submodules()


def _both(condition: Any, true: Callable[..., Any], false: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
    if not isinstance(condition, torch.Tensor):
        return list(true(*args) if condition else false(*args))
    pairs = zip(true(*args), false(*args), strict=True)
    return [torch.where(condition.reshape(()), yes, no) if isinstance(yes, torch.Tensor) else yes for yes, no in pairs]


def _refuse_loops(module: fx.GraphModule, where: str) -> None:
    for node in calls_of(module):
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not FLEX:
            name = str(node.target).removesuffix("_impl")
            raise CaptureError(
                f"{where}: calls {name}, which holds a graph of its own,{place_of(node)}\n"
                "which engines do not take. Write a loop in Python, over a range or `x.unbind(0)`: its length is "
                "fixed, so all its steps become parts of one graph"
            )


def _without_state(program: ExportedProgram) -> ExportedProgram:
    """Returns the program with only the model's outputs, without the state that it writes."""
    module, signature = program.graph_module, program.graph_signature
    output = module.graph.output_node()
    values: Any = output.args[0]
    own_outputs = [
        (out, spec) for out, spec in zip(values, signature.output_specs, strict=True) if spec.kind not in MUTATIONS
    ]
    output.args = (tuple(out for out, _ in own_outputs),)
    # The result of a condition has a new name.
    specs = [
        replace(spec, arg=replace(spec.arg, name=out.name)) if isinstance(out, fx.Node) else spec
        for out, spec in own_outputs
    ]
    module.graph.eliminate_dead_code()
    module.recompile()
    signature = ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)
    return program_of(program, module, signature, program.state_dict, program.constants)


def _check_mutation(program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuses a program whose writes matter. A write can be left out if it does not change the state, or if no run
    reads the state before writing it.
    """
    specs = program.graph_signature.output_specs
    nodes: Any = program.graph.output_node().args[0]
    written = {n: str(spec.target) for n, spec in enumerate(specs) if spec.kind in MUTATIONS}
    if not written:
        return
    state = {**program.state_dict, **program.constants}
    runs = [_results(program, state, inputs) for inputs in samples]
    changed = {
        n: name
        for n, name in written.items()
        if name not in state or not runs or not all(_same_bits(run[n], state[name]) for run in runs)
    }
    drawn_states = [{**state, **_drawn(state, [*changed.values()], seed)} for seed in range(DRAWS)]
    results = [n for n, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
    drawn_runs = [_results(program, drawn, inputs) for drawn in drawn_states for inputs in samples]
    pairs = list(zip(drawn_runs, runs * DRAWS, strict=True))
    is_unread = bool(pairs) and all(_same_bits(drawn_run[n], run[n]) for drawn_run, run in pairs for n in results)
    for n, name in changed.items():
        if name in state and is_unread:
            continue
        is_weight = specs[n].kind is OutputKind.PARAMETER_MUTATION
        kind = "weight" if is_weight else "buffer" if name in state else "input"
        reason = "each run begins with the same weights" if name in state else "what they are given is read alone"
        raise CaptureError(
            f"{where}: changes its {kind} {name} in place,{place_of(nodes[n])}\n"
            f"which engines do not: {reason}. Return the new value as an output, or write to a copy"
        )


def _results(program: ExportedProgram, state: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Returns all results of a run: the state that it writes, then its outputs."""
    feeds = iter(inputs)
    arguments: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            arguments.append(state[str(spec.target)])
        else:
            arguments.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else next(feeds))
    with torch.no_grad():
        return list(fx.Interpreter(program.graph_module).run(*arguments, enable_io_processing=False))


def _drawn(state: Mapping[str, torch.Tensor], names: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """Returns random values for the named tensors of the state."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name in dict.fromkeys(names):
        if name in state:
            noise = torch.randint(0, 100, state[name].shape, generator=generator)
            values[name] = noise > 50 if state[name].dtype is torch.bool else noise.to(state[name].dtype)
    return values


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def program_of(
    program: ExportedProgram,
    module: fx.GraphModule,
    signature: ExportGraphSignature,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    calls: Sequence[ModuleCallEntry] | None = None,
) -> ExportedProgram:
    """Returns a program like `program` with this graph and these tensors."""
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


def _check_names(program: ExportedProgram, where: str) -> None:
    for spec in program.graph_signature.input_specs:
        method_names = [part for part in str(spec.target).split(".") if part in METHODS]
        if method_names:
            raise CaptureError(
                f"{where}: the weight {spec.target} is called as a method of every module ({method_names[0]}), which "
                "torch.export does not take; rename it"
            )


def _check_operators(program: ExportedProgram, where: str) -> None:
    for node in calls_of(program.graph_module):
        name = str(node.target)
        is_unknown = isinstance(node.target, torch._ops.OpOverload) and not is_operator(f"torch.ops.{name}")
        if is_unknown and node.target not in AS_STRIDED:
            hint = " (in transformers, experts_implementation='batched_mm')" if "grouped_mm" in name else ""
            raise CaptureError(
                f"{where}: calls {name},{place_of(node)}\nwhich engines do not have, or which trusts sizes unchecked. "
                f"Write it with operators of torch that return a new tensor{hint}"
            )
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_off(node):
            raise CaptureError(
                f"{where}: draws random numbers ({name}),{place_of(node)}\nand no two runtimes draw the same; give the "
                "noise as an input, or switch it off in eval mode"
            )


def calls_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yields every operator call of the module, including those in nested graphs."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    return (node for graph in graphs for node in graph.nodes if node.op == "call_function")


def _is_off(node: fx.Node) -> bool:
    """Returns whether the node is dropout that drops nothing."""
    return argument_of(node, "train", "training") is False or argument_of(node, "dropout_p", "p") in (0, 0.0)
