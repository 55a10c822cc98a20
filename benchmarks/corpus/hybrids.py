"""Decoders of transformers with experts, state spaces or linear attention."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.corpus.decoders import EXPLICIT, KINDS, PARTS, decoder
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, ScatterAdd, SequenceFirst, SoftmaxGate

BATCHED = {"experts_implementation": "batched_mm"}
"""Experts that use torch operators only. By default, transformers uses an operator of its own for their products."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = ["linear_attention", "full_attention"]
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
ENTRIES = [
    decoder(
        "DeepseekV3ForCausalLM",
        Paper,
        head_dim=8,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **BATCHED,
    ),
    replace(
        decoder("MixtralForCausalLM", Paper, num_local_experts=4),
        refused="calls transformers.grouped_mm_fallback.default, at ",
    ),
    decoder("Qwen3MoeForCausalLM", SoftmaxGate, **MOE, **BATCHED),
    decoder("OlmoeForCausalLM", ScatterAdd, num_experts=4, num_experts_per_tok=2, **BATCHED),
    decoder("MambaForCausalLM", Paper, "backbone.layers.*", state_size=8),
    decoder("Lfm2ForCausalLM", Paper, layer_types=["full_attention", "conv"], block_auto_adjust_ff_dim=False),
    decoder(
        "RecurrentGemmaForCausalLM",
        Paper,
        lru_width=64,
        attention_window_size=16,
        block_types=["recurrent", "attention"],
    ),
    decoder("CwmForCausalLM", Paper, layer_types=KINDS),
    decoder("GPTNeoXJapaneseForCausalLM", SoftmaxGate, "gpt_neox_japanese.layers.*"),
    # With the default weights, expert scores are so close that 16-bit rounding decides the choice for every token.
    decoder(
        "GptOssForCausalLM", ScatterAdd,
        num_local_experts=4, num_experts_per_tok=2, layer_types=KINDS, initializer_range=0.2, **BATCHED,
    ),
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
