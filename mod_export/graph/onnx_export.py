"""Exports programs to portable ONNX graphs: standard operators, static shapes, weights named as in the state_dict."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import opset23 as op
from onnxscript import optimizer
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

from mod_export.errors import GraphError
from mod_export.graph.capture import Captured, seldom_collected
from mod_export.graph.lowering import lower
from mod_export.graph.nodes import NAME_SCOPES
from mod_export.graph.refusals import place_of
from mod_export.types import Bucket, Site, routed_output

OPSET = 23
"""The lowest opset with Attention and RMSNormalization as single operators; every target accepts it."""
IR_VERSION = 10
"""The highest version that TensorRT 10's parser and older ONNX Runtimes in serving containers accept."""


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Writes aten::sort.stable, which has no ONNX function, as TopK over the whole axis: ties go to the lower index."""
    # To mypy a Constant may be of any type, and Gather takes integers.
    size: Any = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))  # type: ignore[type-var]
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _mish(self: Any) -> Any:
    """Mish by its definition (arXiv 1908.08681, equation 1), because TensorRT has no operator Mish in bfloat16."""
    return op.Mul(self, op.Tanh(op.Softplus(self)))


FAILURES = (torch.onnx.errors.OnnxExporterError, RuntimeError)
"""What torch's exporter raises."""
OPERATOR = re.compile(
    r"No ONNX function found for <OpOverload\(op='(?P<name>[\w.]+)', overload='(?P<overload>\w+)'"
    r"|target=torch\.ops\.(?P<target>\w+\.\w+)\."
)
"""Matches the exporter's name of an operator that it does not know, or that it fails to translate."""
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mish.default: _mish,
    torch.ops.aten.sort.stable: _stable_sort,
}


def _without_neutral(op_type: str, neutral: float) -> RewriteRule:
    """Removes `x op c` if the scalar c is exactly the neutral element. onnxscript's own rules also match numbers close
    to it, such as the epsilon 1e-8 of a norm, which is close to 0.
    """

    def is_neutral(context: Any, c: ir.Value, **_: Any) -> bool:
        array = ir.convenience.get_const_tensor(c)
        return array is not None and array.numpy().ndim == 0 and bool(array.numpy() == neutral)

    return RewriteRule(lambda op, x, c: getattr(op, op_type)(x, c), lambda op, x, **_: op.Identity(x), is_neutral)


RULES = RewriteRuleSet(
    [
        *RewriteRuleSet([_without_neutral("Mul", 1), _without_neutral("Add", 0)], commute=True).rules,
        _without_neutral("Sub", 0),
        _without_neutral("Div", 1),
        rules.dropout_zero_rule,
        rules.dropout_inference_rule,
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.flatten_to_reshape_rule,
        rules.reshape_reshape_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
        rules.no_op_dynamic_scatter_nd_rule,
        rules.no_op_static_scatter_nd_rule,
        rules.remove_optional_bias_from_gemm_rule,
    ]
)
"""The rules of onnxscript's optimizer that help a language model and change no number, in the optimizer's order.

`slice_split_rule` is left out: it searches the whole graph at every node, which took three quarters of the optimization
time. Rules about convolutions, clipping and batch norms are left to the engines, which have them all. No rule here
compares numbers with a tolerance.
"""
OPTIMIZE = (
    common.RemoveUnusedNodesPass(),
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.LiftSubgraphInitializersToMainGraphPass(),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.OutputFixPass(),
    common.NameFixPass(),
)
ROUNDS = 2
"""The most rounds of constant folding and rewriting: a round may fold what the previous one has rewritten."""
CLEAN_UP = (
    common.CommonSubexpressionEliminationPass(),
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.DeduplicateHashedInitializersPass(),
    common.RemoveUnusedNodesPass(),
    common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # Its __init__ has no annotations.
    common.RemoveUnusedOpsetsPass(),
)
_TRANSLATIONS: dict[Any, Any] = {}
"""What torch's table of translations depends on -> the table that was made last."""


@seldom_collected()
def onnx_from_captured(
    captured: Captured, weights: Mapping[str, torch.Tensor], inputs: Sequence[str], outputs: Sequence[str]
) -> ir.Model:
    """Exports a captured program to ONNX and optimizes the graph without touching the weights.

    Constant folding would transpose weights and rename them, with a different name in every bucket. So the values of
    weights are hidden from it, and the graph keeps the names and the layout of the state_dict.

    Args:
        captured: from `capture.py`; its graph is lowered in place.
        weights: name -> tensor of all parameters and buffers.
        inputs: names of the graph's inputs, in order.
        outputs: names of the model's own outputs, in order; the outputs of routing sites follow them.

    Returns:
        A model whose weights have no values; `weights.bind_weights` adds them.

    Raises:
        GraphError: the exporter failed, or the graph is not standard ONNX.
    """
    program = captured.program
    lower(program.graph_module)
    translate = partial(
        torch.onnx.export,
        program,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        custom_translation_table=TRANSLATIONS,
        input_names=list(inputs),
        output_names=[*outputs, *captured.routed],
        verbose=False,
    )
    with _quiet(), _translations_found_once():
        try:
            with _decomposed_if_needed(program):
                exported = translate()
        except FAILURES:
            # A few operators have no translation and are in no table of decompositions: tracing decomposes them.
            try:
                exported = translate()
            except FAILURES as error:
                raise GraphError(_untranslated(error, program)) from error
    assert exported is not None
    model = exported.model
    model.ir_version = IR_VERSION
    for name, value in model.graph.initializers.items():
        if name in weights:
            value.const_value = None
    with _quiet():
        _optimize(model)
        _in_order_of_memory(model)
        for clean_up in (*OPTIMIZE, *CLEAN_UP):
            clean_up(model)
    _strip_metadata(model)
    foreign = sorted({node.domain for node in model.graph.all_nodes() if node.domain not in ("", "ai.onnx")})
    if foreign:
        raise GraphError(f"the portable graph holds operators of {', '.join(foreign)}; only standard ONNX is allowed")
    return model


def _optimize(model: ir.Model) -> None:
    """Runs the first part of `onnxscript.optimizer.optimize`, with RULES as its rules."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        folded = optimizer.fold_constants(model, onnx_shape_inference=True).modified
        rewritten = RULES.apply_to_model(model)
        for remove in (common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass):
            remove()(model)
        if not (folded or rewritten):
            break


def _in_order_of_memory(model: ir.Model) -> None:
    """Makes constants contiguous, which hashing and writing need; folding leaves views such as a transpose."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            array = None if value.const_value is None else value.const_value.numpy()
            if array is not None and not array.flags.c_contiguous:
                value.const_value = ir.tensor(np.ascontiguousarray(array), dtype=value.dtype, name=value.name)


def _untranslated(error: BaseException, program: torch.export.ExportedProgram) -> str:
    """Says which operator the exporter cannot translate, and in which line of the model. The exporter hides this in
    several layers of advice.
    """
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    named = next((match for text in reversed(texts) for match in [OPERATOR.search(text)] if match), None)
    cause = next((line for line in texts[-1].splitlines() if line.strip()), type(error).__name__)
    if named is None:
        return f"torch.onnx.export failed: {cause}"
    name = named["name"] or named["target"]
    if named["overload"] not in (None, "default"):
        name = f"{name}.{named['overload']}"
    node = _node_of(program, name) or _node_of(program.run_decompositions(), name)
    place = "" if node is None else place_of(node)
    missing = "has no ONNX form in torch.onnx" if named["name"] else "cannot be translated by torch.onnx"
    reason = "" if named["name"] else f"\n{cause}"
    return f"{name} {missing},{place}{reason}\nWrite it with other operators; docs/models.md has static forms of many"


def _node_of(program: torch.export.ExportedProgram, name: str) -> torch.fx.Node | None:
    """A call of an operator. `aten.cummax` matches any overload, and `aten.scatter.reduce` only this one. Namespaces
    and underscores are ignored, so that `prims.erf_inv` matches `aten.erfinv`.
    """
    wanted = [part.replace("_", "") for part in name.split(".")[1:]]
    named = ((node, str(node.target).split(".")) for node in program.graph.nodes if node.op == "call_function")
    return next(
        (node for node, parts in named if [part.replace("_", "") for part in parts[1:]][: len(wanted)] == wanted), None
    )


def _strip_metadata(model: ir.Model) -> None:
    """Keeps the module path of each node, for messages, and drops stack traces, which hold paths of this machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        scopes = node.metadata_props.get(NAME_SCOPES)
        node.metadata_props.clear()
        if scopes:
            node.metadata_props[NAME_SCOPES] = scopes
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's progress and what torch and onnx_ir log about their internals: users do not need it."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _decomposed_if_needed(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Within this context, a program decomposes itself only if it has an operator to decompose.

    torch's exporter asks every program for that, and the program traces itself again, which takes more than a third of
    an export. Most programs then have the same operators as before.
    """
    trace: Callable[[Mapping[Any, Any]], torch.export.ExportedProgram] = program.run_decompositions

    def run_decompositions(table: Mapping[Any, Any]) -> torch.export.ExportedProgram:
        graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
        targets = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
        operators = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
        # The exporter finds outputs by the names in the signature, and lowering may have replaced their nodes.
        outputs: Any = program.graph.output_node().args[0]
        is_renamed = [node.name for node in outputs] != [out.arg.name for out in program.graph_signature.output_specs]
        if is_renamed or any(operator in table or operator._schema.is_mutable for operator in operators):
            return trace(table)
        return program

    program.run_decompositions = run_decompositions  # It is put back below.
    try:
        yield
    finally:
        del program.run_decompositions


@contextlib.contextmanager
def _translations_found_once() -> Iterator[None]:
    """Within this context, torch's exporter copies a table of translations that is made once per process.

    For every export torch parses the source of five hundred functions again, a quarter of the time of a small graph.
    The table depends on the opset and on the operators that are registered; our translations are added to the copy. The
    names used here are internal to torch. In a release of torch with other names, each export makes its own table as
    usual.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry as Table

        make = vars(Table)["from_torchlib"]
    except (ImportError, KeyError):
        make = None
    if not isinstance(make, classmethod):  # An export around this one has installed `copied`.
        yield
        return

    def copied(*args: Any, **kwargs: Any) -> Any:
        key = (args, *kwargs.items(), len(torch._C._dispatch_get_all_op_names()))
        if key not in _TRANSLATIONS:
            _TRANSLATIONS.clear()
            _TRANSLATIONS[key] = make.__func__(Table, *args, **kwargs)
        table = copy.copy(_TRANSLATIONS[key])
        table.functions = {name: list(functions) for name, functions in table.functions.items()}
        return table

    Table.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]  # It is put back below.
    try:
        yield
    finally:
        Table.from_torchlib = make  # type: ignore[assignment,method-assign]  # As above.


def assert_capacity(
    model: ir.Model, bucket: Bucket, k_by_layer: Mapping[Site, int], results: Iterable[str] = ("logits",)
) -> None:
    """Checks that a graph routes the captured number of tokens at each site, and that its other outputs are `results`.

    Raises:
        GraphError: a routed output is missing or is not (rows, k), or the outputs are not the expected ones.
    """
    outputs = {value.name: value for value in model.graph.outputs}
    for layer, k in k_by_layer.items():
        if k == 0:
            continue
        value = outputs.get(routed_output(layer))
        if value is None or value.shape is None:
            raise GraphError(f"layer {layer}: the graph has no output {routed_output(layer)} of known shape")
        # A site may select in each row of the batch, in one row, or in all at once. The cost depends on k alone.
        if value.shape.rank() != 2 or value.shape.dims[1] != k:
            raise GraphError(
                f"layer {layer}: the graph routes {value.shape}, expected [{bucket.batch}, {k}] at {bucket.name}"
            )
    expected = {*results, *(routed_output(layer) for layer, k in k_by_layer.items() if k)}
    if set(outputs) != expected:
        raise GraphError(f"the graph's outputs are {sorted(map(str, outputs))}, expected {sorted(expected)}")


def check_model(path: str) -> None:
    """Runs onnx.checker's full check, with strict shape inference, on a file with its external data.

    Raises:
        GraphError: the file is not valid ONNX.
    """
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"{path}: {error}") from error
