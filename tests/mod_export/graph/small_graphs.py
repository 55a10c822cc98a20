"""Small graphs, exported or written as text, and helpers that run them in the tests of the rewrites."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from captures import captured_module
from onnx_ir.passes import common

from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites.cast_floats import CastFloats
from mod_export.graph.weights import state_of
from mod_export.types import TOKEN_INPUTS, Bucket, TargetLimits
from mod_models.spec import ModelSpec, RoutingSpec
from mod_models.transformer import Transformer

TENSORRT = TargetLimits(
    name="TensorRT",
    max_opset=23,
    topk_limit=3840,
    scatter_reduction=False,
    attention_dtypes=frozenset({"float16", "bfloat16"}),
)


def make_spec(**routing: Any) -> ModelSpec:
    """Spec of two blocks, the second one routed, with the narrowest heads that TensorRT's attention takes."""
    return ModelSpec(
        vocab_size=40, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=48, max_positions=64,
        routing=RoutingSpec(**{"capacity": 0.25, **routing}),
    )  # fmt: skip


def make_model(spec: ModelSpec) -> Transformer:
    """Model with weights larger than an untrained model's, so that every block changes the result."""
    module = Transformer(spec).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15, generator=generator)
    return module


class Does(torch.nn.Module):
    """A model that applies one function to ids and lengths."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> Any:
        return self.function(ids_BS, lengths_B)


class TwoWays(torch.nn.Module):
    """Computes one of two products, by a condition on the data; the other branch does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))

    def forward(self, x_B2: torch.Tensor, flag_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y_B3 = torch.cond(flag_B.any(), lambda x: x @ self.weight, lambda x: (x * 0) @ self.weight, (x_B2,))
        return y_B3, flag_B.sum()[None]


def portable_graph(spec: ModelSpec, batch: int = 2, seq: int = 16) -> ir.Model:
    """The graph of `make_model(spec)` as the exporter returns it, but with the weights in it.

    An export takes a second or more and runs once for each spec and bucket; most tests use `make_spec()`.
    """
    return ir.from_proto(_portable_proto(spec, batch, seq))


@functools.cache
def _portable_proto(spec: ModelSpec, batch: int, seq: int) -> onnx.ModelProto:
    module = make_model(spec)
    state = state_of(module)
    model = onnx_from_captured(captured_module(module, Bucket(batch, seq), "test"), state, TOKEN_INPUTS, ["logits"])
    for name, value in model.graph.initializers.items():
        if name in state:
            value.const_value = ir.tensor(state[name].detach().numpy(), name=name)
    return ir.to_proto(model)


def parsed(text: str, opset: int = 23) -> ir.Model:
    """A graph from ONNX's text form, with all shapes inferred."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    common.ShapeInferencePass()(model)
    return model


def narrowed(text: str) -> ir.Model:
    """Like `parsed`, but cast to float16."""
    model = parsed(text)
    CastFloats().run(model, TENSORRT, "float16")
    assert CastFloats().ensures(model, TENSORRT, "float16") == []
    return model


def attention(B: int, H: int, G: int, T: int, E: int, attributes: str = "is_causal = 1") -> ir.Model:
    """A graph of one Attention node with q (B, H, T, E), k and v (B, G, T, E)."""
    return parsed(
        f"""g (float[{B},{H},{T},{E}] q, float[{B},{G},{T},{E}] k, float[{B},{G},{T},{E}] v)
        => (float[{B},{H},{T},{E}] y) {{ y = Attention <{attributes}> (q, k, v) }}"""
    )


def run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns all outputs of ONNX Runtime's CPU kernels, after onnx.checker's full check."""
    return session(model).run(None, dict(feeds))


def session(model: ir.Model) -> Any:
    import onnxruntime as ort

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def random_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    """Random float32 numbers for every input."""
    rng = np.random.default_rng(0)
    return {str(v.name): rng.normal(size=v.shape.numpy()).astype(np.float32) for v in model.graph.inputs if v.shape}


def feeds() -> dict[str, np.ndarray]:
    """Ids and lengths for the graphs of two rows of 16 tokens; the second row is mostly padding."""
    return {"input_ids": np.random.default_rng(0).integers(0, 40, (2, 16)), "lengths": np.array([16, 5])}


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]
