"""Text decoders of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.corpus.entry import Entry
from benchmarks.corpus.queries import QueriesOfProjections
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, Routed, ScatterAdd, SequenceFirst, SoftmaxGate
from benchmarks.corpus.small import small, token_ids


def decoder(of: str, manner: type[Routed], blocks: str = "model.layers.*", variant: str = "", **changes: Any) -> Entry:
    """An entry of a class that reads ids."""
    return Entry("transformers", of, partial(small, of, **changes), token_ids, blocks, manner, variant)


PARTS = "model.layers.*:self_attn,mlp"
KINDS = ["full_attention", "sliding_attention"]
EXPLICIT = {"attn_implementation": "eager"}
"""Makes transformers always pass a mask. Its implicit causal mask would be wrong for tokens in order of score."""
ENTRIES = [
    decoder("LlamaForCausalLM", Paper, num_hidden_layers=4),
    decoder("LlamaForCausalLM", Apart, PARTS, "parts"),
    decoder("LlamaForCausalLM", QueriesOfProjections, "model.layers.*:self_attn", "queries", **EXPLICIT),
    decoder("MistralForCausalLM", SoftmaxGate),
    decoder("MistralForCausalLM", QueriesOfProjections, "model.layers.*:self_attn", "queries", **EXPLICIT),
    decoder("MinistralForCausalLM", ScatterAdd, layer_types=KINDS),
    decoder("Qwen2ForCausalLM", ScatterAdd),
    decoder("Qwen2ForCausalLM", QueriesOfProjections, "model.layers.*:self_attn", "queries", **EXPLICIT),
    decoder("Qwen3ForCausalLM", BatchFirst, **EXPLICIT),
    decoder("GemmaForCausalLM", SequenceFirst),
    decoder("Gemma2ForCausalLM", Apart, PARTS, layer_types=KINDS),
    decoder("Gemma3ForCausalLM", OneHot, layer_types=KINDS),
    decoder("VaultGemmaForCausalLM", Paper, layer_types=KINDS),
    decoder("PhiForCausalLM", Paper),
    decoder("Phi3ForCausalLM", SoftmaxGate),
    decoder("StableLmForCausalLM", ScatterAdd),
    decoder("Starcoder2ForCausalLM", BatchFirst, **EXPLICIT),
    decoder("CohereForCausalLM", SequenceFirst),
    decoder("Cohere2ForCausalLM", Paper, layer_types=KINDS),
    decoder("OlmoForCausalLM", Apart, PARTS),
    decoder("Olmo2ForCausalLM", OneHot),
    decoder("Olmo3ForCausalLM", SoftmaxGate, layer_types=KINDS),
    decoder("GraniteForCausalLM", Paper),
    decoder("HeliumForCausalLM", SoftmaxGate),
    decoder("GlmForCausalLM", ScatterAdd),
    decoder("Glm4ForCausalLM", BatchFirst, **EXPLICIT),
    decoder("SmolLM3ForCausalLM", SequenceFirst),
    decoder("NemotronForCausalLM", Apart, PARTS),
    decoder("PersimmonForCausalLM", OneHot),
    decoder("Ernie4_5ForCausalLM", Paper),
    decoder("HunYuanDenseV1ForCausalLM", SoftmaxGate),
    decoder("SeedOssForCausalLM", ScatterAdd),
    decoder("ArceeForCausalLM", BatchFirst, **EXPLICIT),
    decoder("ApertusForCausalLM", SequenceFirst),
    decoder("BitNetForCausalLM", Apart, PARTS),
    decoder("Exaone4ForCausalLM", Paper, layer_types=KINDS),
    decoder("DiffLlamaForCausalLM", OneHot),
    decoder("NanoChatForCausalLM", SoftmaxGate),
    decoder("ModernBertDecoderForCausalLM", Paper, local_attention=16, layer_types=KINDS),
    decoder("GPT2LMHeadModel", Paper, "transformer.h.*"),
    decoder("GPT2LMHeadModel", Apart, "transformer.h.*:attn,mlp", "parts"),
    decoder(
        "GPTNeoForCausalLM", SoftmaxGate, "transformer.h.*", attention_types=[[["global", "local"], 1]], window_size=16
    ),
    decoder("GPTNeoXForCausalLM", ScatterAdd, "gpt_neox.layers.*"),
    decoder("GPTJForCausalLM", BatchFirst, "transformer.h.*", rotary_dim=8, **EXPLICIT),
    decoder("GPTBigCodeForCausalLM", SequenceFirst, "transformer.h.*"),
    decoder("OPTForCausalLM", Paper, "model.decoder.layers.*", ffn_dim=96, word_embed_proj_dim=64),
    decoder("BloomForCausalLM", SoftmaxGate, "transformer.h.*"),
    decoder("FalconForCausalLM", Paper, "transformer.h.*", "one key and value head"),
    decoder(
        "FalconForCausalLM",
        ScatterAdd,
        "transformer.h.*",
        "grouped heads",
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    decoder("MptForCausalLM", OneHot, "transformer.blocks.*", d_model=64, n_heads=4, n_layers=2, max_seq_len=128),
    decoder("BioGptForCausalLM", Paper, "biogpt.layers.*"),
    decoder("CodeGenForCausalLM", SoftmaxGate, "transformer.h.*", rotary_dim=8),
    decoder("XGLMForCausalLM", ScatterAdd, "model.layers.*", d_model=64, ffn_dim=96, num_layers=2, attention_heads=4),
    decoder("CTRLLMHeadModel", BatchFirst, "transformer.h.*", dff=96, **EXPLICIT),
    decoder("OpenAIGPTLMHeadModel", SoftmaxGate, "transformer.h.*"),
    decoder("DogeForCausalLM", Apart, PARTS),
]
