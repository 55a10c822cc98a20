"""Decides which operators a program may call: those that compute tensors from their arguments and do nothing else.

Other operators run other code, read or write files, or trust what their arguments say about memory. The last group
consists of operators that set sizes and strides (`as_strided`, `set_`, `resize_`), private operators, whose callers
check the arguments, and operators of the backward pass, which do not check indices. ATen checks these arguments when it
runs eagerly; compiled engines do not.
"""

from __future__ import annotations

from typing import Any

import torch

BEYOND_ATEN = {
    "_operator.getitem",
    "torch.ops.mod_export.mark_selection.default",
    "torch.ops.higher_order.cond",
    "torch.ops.higher_order.wrap_with_set_grad_enabled",
    "torch.ops.higher_order.wrap_with_autocast",
    "torch.ops.prims.convert_element_type.default",
    "torch.ops.prims.iota.default",
}
PRIVATE = {
    "__and__", "__iand__", "__ilshift__", "__ior__", "__irshift__", "__ixor__", "__lshift__", "__or__", "__rshift__",
    "__xor__",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_addmm_activation", "_assert_async", "_assert_scalar",
    "_assert_tensor_metadata", "_cdist_forward", "_conj", "_convolution", "_euclidean_dist", "_fft_c2c", "_fft_c2r",
    "_fft_r2c", "_grouped_mm", "_int_mm", "_log_softmax", "_logcumsumexp", "_masked_softmax",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_prelu_kernel", "_reshape_copy", "_safe_softmax",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "_stack",
    "_to_copy", "_trilinear", "_unsafe_index", "_unsafe_index_put", "_unsafe_view", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_weight_norm", "_weight_norm_interface",
}  # fmt: skip
"""Private names of operators that exported programs contain, such as `__and__`, and that check their arguments."""
PARTS = ("as_strided", "empty_strided", "resize", "sparse", "nested", "jagged", "mkldnn", "cudnn", "miopen", "backward")
"""Parts of names of operators that trust sizes, strides or indices, or belong to a layout or a vendor's library."""
SETTERS = {"set", "set_", "set_data", "segment_reduce"}
WRITERS = ("out", "filename")
"""Names of arguments that are written to or name a file."""


def is_operator(target: str) -> bool:
    """Returns whether a program may call an operator, named as in a file: `torch.ops.aten.topk.default`."""
    if target in BEYOND_ATEN:
        return True
    start, _, rest = target.rpartition("torch.ops.")
    parts = rest.split(".")
    if start or len(parts) != 3 or parts[0] != "aten":
        return False
    _, name, overload = parts
    if name in SETTERS or any(part in name for part in PARTS) or (name.startswith("_") and name not in PRIVATE):
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in ["default", *packet._overload_names]:
        return False
    schema = getattr(packet, overload)._schema
    if any(arg.name in WRITERS or arg.is_out for arg in schema.arguments):
        return False
    tensors = all(str(arg.type) in ("Tensor", "List[Tensor]", "Optional[Tensor]") for arg in schema.returns)
    return (tensors and bool(schema.returns)) or name.startswith("_assert")
