"""Decoders of transformers with experts, state spaces or linear attention."""

from __future__ import annotations

from benchmarks.corpus.decoders import BATCHED, EXPLICIT, KINDS, MOE, PARTS, decoder
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, ScatterAdd, SequenceFirst, SoftmaxGate

LINEAR = ["linear_attention", "full_attention"]
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
ENTRIES = [
    decoder("CwmForCausalLM", Paper, layer_types=KINDS),
    decoder("GPTNeoXJapaneseForCausalLM", SoftmaxGate, "gpt_neox_japanese.layers.*"),
    decoder("GptOssForCausalLM", ScatterAdd, num_local_experts=4, num_experts_per_tok=2, layer_types=KINDS, **BATCHED),
    decoder("GraniteSWAForCausalLM", BatchFirst, **EXPLICIT),
    decoder("Jais2ForCausalLM", Paper),
    decoder("Ministral3ForCausalLM", OneHot),
    decoder("Qwen2MoeForCausalLM", Paper, shared_expert_intermediate_size=48, **MOE, **BATCHED),
    decoder("PhimoeForCausalLM", ScatterAdd, num_local_experts=4, **BATCHED),
    decoder("GraniteMoeForCausalLM", SequenceFirst, num_local_experts=4, **BATCHED),
    decoder("FlexOlmoForCausalLM", Apart, PARTS, num_experts=4, num_experts_per_tok=2, **BATCHED),
    decoder(
        "Mamba2ForCausalLM", Paper, "backbone.layers.*",
        state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=8,
    ),
    decoder("FalconMambaForCausalLM", SoftmaxGate, "backbone.layers.*", state_size=8),
    decoder(
        "JambaForCausalLM", Paper, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=4, expert_layer_offset=3, use_mamba_kernels=False, mamba_d_state=8,
    ),
    decoder("BambaForCausalLM", Paper, attn_layer_indices=[1], **STATES),
    decoder("FalconH1ForCausalLM", ScatterAdd, mamba_d_ssm=128, **STATES),
    decoder("Qwen3NextForCausalLM", Paper, layer_types=LINEAR, **DELTA, **MOE, **BATCHED),
    decoder(
        "Qwen3NextForCausalLM", Paper, variant="linear routed", layer_types=LINEAR[::-1], **DELTA, **MOE, **BATCHED
    ),
    decoder("OlmoHybridForCausalLM", ScatterAdd, layer_types=LINEAR),
    decoder(
        "MiniMaxForCausalLM", Paper, num_local_experts=4, layer_types=LINEAR, block_size=8, **BATCHED
    ),
]  # fmt: skip
