"""A captured program in functional form: no operator writes into a tensor, and no graph stands inside it.

torch itself makes a program functional (`run_decompositions` without decompositions): operators that write into a
tensor become operators that return a new one, and what stood in graphs of its own (autocast, no_grad, checkpoints,
vmap) stands in the program itself. Of `torch.cond` both branches are computed, and the condition selects between their
results: a static graph has one way through it. Only then no value shares its memory with another, so `view`, which
fails where strides do not fit, may be `reshape`.
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
from mod_export.graph.not_static import place_of
from mod_export.graph.program_nodes import METADATA, argument_of, replace_by
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
"""Other values of state that a program may depend on."""


def functional_program(
    program: ExportedProgram, where: str, samples: Sequence[Sequence[torch.Tensor]]
) -> ExportedProgram:
    """The program without operators that write into a tensor, and without graphs inside it but those of flex_attention.
    It computes the same bits. Tensors are not copied.

    State that a run writes and no run reads, such as a cache that is filled anew, is not written any more.

    Args:
        program: from `torch.export`, at fixed sizes, on the CPU.
        where: what messages call it.
        samples: inputs, on which it is tried whether results depend on what the run before has written.

    Raises:
        CaptureError: it draws random numbers, changes its inputs, depends on state that it changes, or holds a loop.
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
            node.graph.erase_node(node)  # It asserts the dtype that the model had.
    for inner in (one for one in program.graph_module.modules() if isinstance(one, fx.GraphModule)):
        for node in inner.graph.nodes:
            # The history of a node names graphs by numbers, which another process gives otherwise.
            node.meta = {key: one for key, one in node.meta.items() if key in ("val", *METADATA)}
    _check_mutation(program, where, samples)
    return _without_state(program)


def without_writes(program: ExportedProgram, where: str) -> ExportedProgram:
    """The program as torch itself makes it functional.

    Raises:
        CaptureError: it writes into a tensor in a way that torch cannot follow.
    """
    try:
        with warnings.catch_warnings():
            # torch warns of its own doings.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            functional: ExportedProgram = program.run_decompositions({})
    except RuntimeError as error:
        # torch names the node that it stopped at.
        stopped = STOPPED.search(str(error))
        node = next((one for one in program.graph.nodes if stopped and one.name == stopped["name"]), None)
        if node is None:
            raise
        raise CaptureError(
            f"{where}: calls {node.target},{place_of(node)}\nwhich writes into a part of a tensor in a way that torch "
            "cannot follow. Write it with an operator that returns a new tensor, such as torch.where"
        ) from error
    return functional


def _compute_both_branches(module: fx.GraphModule) -> None:
    """Inner graphs come first, so that there is no condition in what is put into an outer one."""
    for inner in reversed([one for one in module.modules() if isinstance(one, fx.GraphModule)]):
        for node in inner.graph.find_nodes(op="call_function", target=COND):
            replace_by(inner.graph, node, _both)
        inner.graph.eliminate_dead_code()
        inner.recompile()
    module.delete_all_unused_submodules()


def _both(condition: Any, true: Callable[..., Any], false: Callable[..., Any], given: Sequence[Any] = ()) -> list[Any]:
    if not isinstance(condition, torch.Tensor):
        return list(true(*given) if condition else false(*given))
    pairs = zip(true(*given), false(*given), strict=True)
    return [
        torch.where(condition.reshape(()), one, other) if isinstance(one, torch.Tensor) else one for one, other in pairs
    ]


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
    """The program that returns its own outputs only."""
    module, signature = program.graph_module, program.graph_signature
    output = module.graph.output_node()
    values: Any = output.args[0]
    own = [(one, spec) for one, spec in zip(values, signature.output_specs, strict=True) if spec.kind not in MUTATIONS]
    output.args = (tuple(one for one, _ in own),)
    # The result of a condition has another name now.
    specs = [
        replace(spec, arg=replace(spec.arg, name=one.name)) if isinstance(one, fx.Node) else spec for one, spec in own
    ]
    module.graph.eliminate_dead_code()
    module.recompile()
    signature = ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)
    return program_of(program, module, signature, program.state_dict, program.constants)


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
    found = [_results(program, other, inputs) for other in others for inputs in samples]
    pairs = list(zip(found, runs * DRAWS, strict=True))
    is_unread = bool(pairs) and all(_same_bits(one[n], run[n]) for one, run in pairs for n in results)
    for n, name in changed.items():
        if name in held and is_unread:
            continue
        is_weight = specs[n].kind is OutputKind.PARAMETER_MUTATION
        what = "weight" if is_weight else "buffer" if name in held else "input"
        reason = "each run begins with the same weights" if name in held else "what they are given is read alone"
        raise CaptureError(
            f"{where}: changes its {what} {name} in place,{place_of(nodes[n])}\n"
            f"which engines do not: {reason}. Return the new value as an output, or write to a copy"
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


def program_of(
    program: ExportedProgram,
    module: fx.GraphModule,
    signature: ExportGraphSignature,
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    calls: Sequence[ModuleCallEntry] | None = None,
) -> ExportedProgram:
    """A program of another graph, or of other tensors, in the place of one."""
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
        taken = [part for part in str(spec.target).split(".") if part in METHODS]
        if taken:
            raise CaptureError(
                f"{where}: the weight {spec.target} is called as a method of every module ({taken[0]}), which "
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
    """Every call of an operator, in graphs inside the module as well."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    return (node for graph in graphs for node in graph.nodes if node.op == "call_function")


def _is_off(node: fx.Node) -> bool:
    """Whether it is dropout that drops nothing."""
    return argument_of(node, "train", "training") is False or argument_of(node, "dropout_p", "p") in (0, 0.0)
