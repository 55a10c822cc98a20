"""ExportedProgram to the portable ONNX graph: standard operators, static shapes, weights named as in the state_dict."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from mod_export.graph.capture import Captured
from mod_export.graph.lowering import lower
from mod_export.graph.nodes import NAME_SCOPES
from mod_export.graph.not_static import place_of
from mod_export.types import Bucket, Site, routed_output

OPSET = 23
"""The lowest opset with Attention and RMSNormalization as single operators, taken by every target."""
IR_VERSION = 10
"""The highest that TensorRT 10's parser and older ONNX Runtimes in serving containers take."""


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """aten::sort.stable has no ONNX function; TopK over the whole axis, ties to the lower index, is the same."""
    # To mypy a Constant may be of any type, and Gather takes integers.
    size: Any = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))  # type: ignore[type-var]
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _mish(self: Any) -> Any:
    """By its definition (arXiv 1908.08681, equation 1): TensorRT has no operator Mish in bfloat16."""
    return op.Mul(self, op.Tanh(op.Softplus(self)))


OPERATOR = re.compile(
    r"No ONNX function found for <OpOverload\(op='(?P<name>[\w.]+)', overload='(?P<overload>\w+)'"
    r"|target=torch\.ops\.(?P<target>\w+\.\w+)\."
)
"""How the exporter names an operator that it cannot translate: one that it does not know, or one that it fails at."""
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mish.default: _mish,
    torch.ops.aten.sort.stable: _stable_sort,
}


def _without_neutral(op_type: str, neutral: float) -> RewriteRule:
    """Removes `x op c` where the scalar c is the neutral element itself. onnxscript's own rules for this also take what
    is close to it, as the epsilon 1e-8 of a norm is to 0.
    """

    def is_neutral(context: Any, c: ir.Value, **_: Any) -> bool:
        array = ir.convenience.get_const_tensor(c)
        return array is not None and array.numpy().ndim == 0 and bool(array.numpy() == neutral)

    return RewriteRule(lambda op, x, c: getattr(op, op_type)(x, c), lambda op, x, **_: op.Identity(x), is_neutral)


REWRITES = RewriteRuleSet(
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
"""Those of onnxscript's optimizer that a graph of a language model has a use for and that change no number, in its
order. Its `slice_split_rule`
looks through the whole graph at every node, which took three quarters of the time of optimizing; those about
convolutions, clipping and batch norms are left to the engines, which have them all. None that is here compares numbers
with a tolerance.
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
"""Of folding constants and rewriting: what one leaves the next may fold."""
CLEAN_UP = (
    common.CommonSubexpressionEliminationPass(),
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.DeduplicateHashedInitializersPass(),
    common.RemoveUnusedNodesPass(),
    common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # Its __init__ has no annotations.
    common.RemoveUnusedOpsetsPass(),
)


def onnx_from_captured(
    captured: Captured, weights: Mapping[str, torch.Tensor], inputs: Sequence[str], outputs: Sequence[str]
) -> ir.Model:
    """Converts and optimises without touching the weights.

    Constant folding would transpose weights and rename them, with a different name in every bucket. So the weights'
    values are hidden from it, and the graph keeps the state_dict's names and layout.

    Args:
        captured: from `capture`; its graph is lowered in place.
        weights: name -> tensor of all parameters and buffers.
        inputs: names of its inputs in order.
        outputs: names of the model's own outputs in order; those of its routing sites come after them.

    Returns:
        A model whose weights have no value; `weights.bind_weights` gives them one.

    Raises:
        GraphError: the exporter failed, or left something that is not standard ONNX.
    """
    lower(captured.program.graph)
    with _quiet():
        try:
            exported = torch.onnx.export(
                captured.program,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                custom_translation_table=TRANSLATIONS,
                input_names=list(inputs),
                output_names=[*outputs, *captured.routed],
                verbose=False,
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            raise GraphError(_untranslated(error, captured.program)) from error
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
    """As `onnxscript.optimizer.optimize` begins, with REWRITES."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        folded = optimizer.fold_constants(model, onnx_shape_inference=True).modified
        rewritten = REWRITES.apply_to_model(model)
        for remove in (common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass):
            remove()(model)
        if not (folded or rewritten):
            break


def _in_order_of_memory(model: ir.Model) -> None:
    """Folding leaves views, such as a transpose; what hashes and writes constants reads memory from end to end."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            array = None if value.const_value is None else value.const_value.numpy()
            if array is not None and not array.flags.c_contiguous:
                value.const_value = ir.tensor(np.ascontiguousarray(array), dtype=value.dtype, name=value.name)


def _untranslated(error: BaseException, program: torch.export.ExportedProgram) -> str:
    """What the exporter cannot translate, and at which line of the model; the exporter itself wraps that in several
    layers of advice.
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
    return f"{name} {missing},{place}{reason}\nWrite it with other operators; docs/porting.md has static forms of many"


def _node_of(program: torch.export.ExportedProgram, name: str) -> torch.fx.Node | None:
    """A call of an operator: of `aten.cummax` any overload, of `aten.scatter.reduce` this one; for `prims.erf_inv` one
    of `aten.erfinv`.
    """
    wanted = [part.replace("_", "") for part in name.split(".")[1:]]
    named = ((node, str(node.target).split(".")) for node in program.graph.nodes if node.op == "call_function")
    return next(
        (node for node, parts in named if [part.replace("_", "") for part in parts[1:]][: len(wanted)] == wanted), None
    )


def _strip_metadata(model: ir.Model) -> None:
    """Keeps each node's module path, which names the layer in messages; drops stack traces with the builder's paths."""
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
    """The exporter prints progress, and torch and onnx_ir comment on their own internals; none is for our user."""
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


def assert_capacity(
    model: ir.Model, bucket: Bucket, k_by_layer: Mapping[Site, int], results: Iterable[str] = ("logits",)
) -> None:
    """The graph must route exactly the constant number of tokens that was captured, and have the outputs `results`.

    Raises:
        GraphError: a routed output is missing, or is not (rows, k).
    """
    outputs = {value.name: value for value in model.graph.outputs}
    for layer, k in k_by_layer.items():
        if k == 0:
            continue
        value = outputs.get(routed_output(layer))
        if value is None or value.shape is None:
            raise GraphError(f"layer {layer}: the graph has no output {routed_output(layer)} of known shape")
        # Rows may be those of the batch, one for all of it, or one of them; k is what the cost depends on.
        if value.shape.rank() != 2 or value.shape.dims[1] != k:
            raise GraphError(
                f"layer {layer}: the graph routes {value.shape}, expected [{bucket.batch}, {k}] at {bucket.name}"
            )
    expected = {*results, *(routed_output(layer) for layer, k in k_by_layer.items() if k)}
    if set(outputs) != expected:
        raise GraphError(f"the graph's outputs are {sorted(map(str, outputs))}, expected {sorted(expected)}")


def check_model(path: str) -> None:
    """onnx.checker's full check with strict shape inference, on the file with its external data.

    Raises:
        GraphError: the file is not sound ONNX.
    """
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"{path}: {error}") from error
