"""Lines that people write in their models are captured, exported, and equal to the module in ONNX Runtime.

Each line represents a kind of code: views of the results of operators that change the layout, writes in place, graphs
inside a graph, state that is written and not read, and code that is compiled already.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mod_manners import graph_of
from small_graphs import run
from torch import Tensor, nn
from torch._higher_order_ops.map import map as hop_map
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from mod_export.errors import CaptureError
from mod_export.graph.capture import captured, exported
from mod_export.graph.sites import routing_sites
from mod_export.model.module import model_from_module
from mod_export.model.programs import ProgramModel
from mod_export.types import Bucket

B, S, D, H, K = 2, 16, 16, 2, 4


class Block(nn.Module):
    """A block on the selected tokens (B, K, D); subclasses write `attend` in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.view(*part.shape[:2], H, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return y.transpose(1, 2).contiguous().view(x.shape)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x + self.out(self.attend(x, index))


class Routed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(D, 1), block

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).squeeze(-1).topk(K).indices.sort().values
        wide = index[..., None].expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide), index))


class ViewAlone(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.heads(x), is_causal=True).transpose(1, 2).view(x.shape)


class Einops(Block):
    """Attention in basic operators; `flatten` of a permuted tensor."""

    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        y = (q @ k.mT / math.sqrt(D // H)).softmax(-1) @ v
        return y.permute(0, 2, 1, 3).flatten(2)


class Sdp(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.backends.cuda.sdp_kernel(enable_flash=False):
                return super().attend(x, index)


class Sdpa(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            return super().attend(x, index)


class Checkpointed(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().attend, x, index, use_reentrant=False)
        return result


class InPlace(Block):
    """Rotary positions of interleaved pairs, written into slices of a new tensor."""

    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(self.turned(q, index), self.turned(k, index), v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)

    def turned(self, x: Tensor, index: Tensor) -> Tensor:
        angle = index[:, None, :, None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2).flip(0)
        out = torch.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * angle.cos() - x[..., 1::2] * angle.sin()
        out[..., 1::2] = x[..., 1::2] * angle.cos() + x[..., 0::2] * angle.sin()
        return out.mul_(1.5)


class Flex(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        def seen(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(index[b, q] >= index[b, k], score - 0.1 * h, -torch.inf)

        y: Any = flex_attention(*self.heads(x), score_mod=seen)
        return y.transpose(1, 2).reshape(x.shape)


class FlexMask(Block):
    """A block mask under which some queries see no key; all heads of queries share one head of keys."""

    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mask = create_block_mask(lambda b, h, q, k: (q > k) & (q != 2), B, H, K, K, device="cpu")
        y: Any = flex_attention(q, k[:, :1], v[:, :1], block_mask=mask, scale=0.3, enable_gqa=True)
        return y.transpose(1, 2).reshape(x.shape)


class Cached(Block):
    """A cache that every run fills again, as in Llama 2's own code, and a counter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(B, S, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        self.cache = self.cache.to(x)
        self.calls += 1
        self.cache[:B, :K] = super().attend(x, index)
        return self.cache[:B, :K].clone()


class Compiled(Block):
    @torch.compile(backend="aot_eager")
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        return super().attend(x, index)


class Printing(Block):
    def attend(self, x: Tensor, index: Tensor) -> Tensor:
        print(x.shape)  # noqa: T201  # It is what this is about.
        warnings.warn("attends", stacklevel=1)
        return super().attend(x, index)


class Mapped(nn.Module):
    """`vmap` of a function of one row gathers tokens and writes them back."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(D, 1), block

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).squeeze(-1).topk(K).indices.sort().values
        chosen = torch.vmap(lambda row, at: row[at])(x, index)
        return torch.vmap(lambda row, at, new: row.index_copy(0, at, new))(x, index, self.block(chosen, index))


class Autocast(Routed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            index = self.router(x.float()).squeeze(-1).topk(K).indices.sort().values
            wide = index[..., None].expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide), index))


class Conditional(Routed):
    """Routes inside two nested conditions that are computed."""

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward

        def routed(x: Tensor) -> Any:
            return torch.cond(x.sum() < -1e6, torch.zeros_like, lambda x: run(x), (x,))

        result: Tensor = torch.cond(x.mean() < 1e6, routed, torch.clone, (x,))
        return result


class Region(Routed):
    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        result: Tensor = torch.compiler.nested_compile_region(lambda x: run(x))(x)
        return result


def compiled_in_place() -> nn.Module:
    module = Routed(Block())
    module.compile()
    return module


def together() -> nn.Module:
    """Has five of the lines below in three routed layers, because most of the time is that of captures."""
    compiled: Any = torch.compile(ViewAlone())
    return nn.Sequential(Autocast(InPlace()), Mapped(compiled), Routed(Sdp()))


LINES: dict[str, Callable[[], nn.Module]] = {
    "together": together,
    "attention, contiguous, view": lambda: Routed(Block()),
    "attention, view": lambda: Routed(ViewAlone()),
    "permute, flatten": lambda: Routed(Einops()),
    "sdp_kernel": lambda: Routed(Sdp()),
    "sdpa_kernel": lambda: Routed(Sdpa()),
    "checkpoint": lambda: Routed(Checkpointed()),
    "written in place": lambda: Routed(InPlace()),
    "flex_attention": lambda: Routed(Flex()),
    "flex_attention under a mask": lambda: Routed(FlexMask()),
    "a cache that is filled anew": lambda: Routed(Cached()),
    "vmap": lambda: Mapped(Block()),
    "autocast": lambda: Autocast(Block()),
    "a compiled method": lambda: Routed(Compiled()),
    "a compiled module": lambda: torch.compile(Routed(Block())),  # type: ignore[dict-item,return-value]
    "a compiled part": lambda: Routed(torch.compile(Block())),  # type: ignore[arg-type]
    "compiled in place": compiled_in_place,
    "torch.cond": lambda: Conditional(Block()),
    "a region that is compiled once": lambda: Region(Block()),
    "a print and a warning": lambda: Routed(Printing()),
}
IGNORED = (
    "ignore:attends:UserWarning",
    "ignore:.*flex_attention called without torch.compile.*:UserWarning",
    # Raised inside torch by its own code.
    "ignore:.*script_method.*:DeprecationWarning",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*lru_cache.*:UserWarning",
)


@pytest.mark.fast("together", "torch.cond")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.filterwarnings(*IGNORED)
def test_what_people_write_is_captured_and_has_its_site(line: str) -> None:
    torch.manual_seed(0)
    module = LINES[line]().eval().requires_grad_(False)
    x = torch.randn(B, S, D)
    model = model_from_module(module, lambda batch, seq: torch.randn(batch, seq, D), [Bucket(B, S)], "mine")
    assert isinstance(model, ProgramModel)
    restored = model.module()
    with torch.compiler.set_stance("force_eager"):
        expected = module(x)
    torch.testing.assert_close(restored(x)[0], expected, rtol=1e-5, atol=1e-6)
    # Graphs are captured without values.
    skeleton, meta_x = model.skeleton().to("meta"), x.to("meta")
    layers = len(module) if isinstance(module, nn.Sequential) else 1
    assert [site.k for site in routing_sites(exported(skeleton, (meta_x,), line))] == [K] * layers
    graph = graph_of(captured(restored, (x,), line), restored)
    computed = run(graph, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(computed), expected, rtol=1e-5, atol=1e-5)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x - self.mean


def test_state_that_a_run_reads_of_the_run_before_is_refused() -> None:
    message = r"^mine at b2s16: changes its buffer mean in place, at .*test_ordinary_lines\.py:\d+\n +self\.mean\.mul_"
    with pytest.raises(CaptureError, match=message):
        model_from_module(Remembering(), torch.randn(B, S, D), [Bucket(B, S)], "mine")


class CountsAndWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x += 1
        return x * 2


def test_a_counter_that_nothing_reads_hides_no_input_that_is_written_to() -> None:
    with pytest.raises(CaptureError, match=r"^mine at b2s16: changes its input x in place, at .*\n +x \+= 1"):
        model_from_module(CountsAndWrites(), torch.randn(B, S, D), [Bucket(B, S)], "mine")


class Mapping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = hop_map(lambda row: row * 2, x)
        return found


@pytest.mark.filterwarnings(*IGNORED)
def test_a_loop_that_is_a_graph_of_its_own_is_refused() -> None:
    message = r"^mine at b2s16: calls map, which holds a graph of its own, at .*\n +found: Tensor = hop_map\("
    with pytest.raises(CaptureError, match=message):
        model_from_module(Mapping(), torch.randn(B, S, D), [Bucket(B, S)], "mine")
