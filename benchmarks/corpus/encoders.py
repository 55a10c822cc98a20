"""Text encoders and encoder-decoders of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.corpus.entry import TOKENS, Entry, Inputs
from benchmarks.corpus.queries import QueriesOfKeyValueStates
from benchmarks.corpus.routers import Apart, BatchFirst, OneHot, Paper, Routed, ScatterAdd, SequenceFirst, SoftmaxGate
from benchmarks.corpus.small import FIRST, LACKS, SIZES, VOCABULARY, small, token_ids

READ = 20
"""Tokens that the encoder of an encoder-decoder reads. The decoder has another number, so that sizes are distinct."""


def encoder(of: str, manner: type[Routed], blocks: str, variant: str = "", **changes: Any) -> Entry:
    """An entry of a class that reads ids."""
    return Entry("transformers", of, partial(small, of, **changes), token_ids, blocks, manner, variant)


def padded_ids(batch: int, seq: int) -> Inputs:
    """Ids of texts of different lengths, padded on the right, and their attention mask."""
    lengths = torch.linspace(seq // 2, seq, batch).long()
    mask = (torch.arange(seq) < lengths[:, None]).long()
    return {"input_ids": torch.randint(FIRST, VOCABULARY, (batch, seq)) * mask, "attention_mask": mask}


def padded(of: str, manner: type[Routed], blocks: str, **changes: Any) -> Entry:
    """An entry of a class that reads ids and an attention mask."""
    make = partial(small, of, **changes)
    return Entry("transformers", of, make, padded_ids, blocks, manner, "padded rows")


def both_ids(batch: int, seq: int) -> Inputs:
    """Ids for the encoder and ids for the decoder."""
    return {
        "input_ids": torch.randint(FIRST, VOCABULARY, (batch, READ)),
        "decoder_input_ids": torch.randint(FIRST, VOCABULARY, (batch, seq)),
    }


def seq2seq(
    of: str, manner: type[Routed], blocks: str, variant: str = "", tokens: int = TOKENS, **changes: Any
) -> Entry:
    """An entry of a class with an encoder and a decoder."""
    return Entry("transformers", of, partial(small, of, **changes), both_ids, blocks, manner, variant, tokens)


def both_with_masks(batch: int, seq: int) -> Inputs:
    """Like `both_ids`, with masks of ones, which Switch Transformers makes itself only when it is not traced."""
    masks = {"attention_mask": torch.ones(batch, READ).long(), "decoder_attention_mask": torch.ones(batch, seq).long()}
    return both_ids(batch, seq) | masks


def t5(of: str, manner: type[Routed], **changes: Any) -> Entry:
    """An entry of T5 or a relative, whose blocks return the position bias of the first block for the next block."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    make = partial(small, of, **sizes | changes)
    return Entry(
        "transformers", of, make, both_ids, "encoder.block.* decoder.block.*", manner, handed_on=((1, 1), (2, 4))
    )


BERT_PARTS = "bert.encoder.layer.*:attention,intermediate"
LAYERS = "model.encoder.layers.* model.decoder.layers.*"
DECODED = "model.decoder.layers.*:self_attn"
LED = {"max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128}
BART = {"d_model": 64}
GEMMA = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")}
GEMMA |= {
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
}
ENTRIES = [
    encoder("BertForMaskedLM", Paper, "bert.encoder.layer.*"),
    padded("BertForMaskedLM", SoftmaxGate, "bert.encoder.layer.*"),
    encoder("RobertaForMaskedLM", SoftmaxGate, "roberta.encoder.layer.*"),
    encoder("XLMRobertaForMaskedLM", BatchFirst, "roberta.encoder.layer.*"),
    encoder("CamembertForMaskedLM", OneHot, "roberta.encoder.layer.*"),
    encoder(
        "DistilBertForMaskedLM",
        ScatterAdd,
        "distilbert.transformer.layer.*",
        dim=64,
        hidden_dim=96,
        n_layers=2,
        n_heads=4,
    ),
    encoder(
        "AlbertForMaskedLM", Apart, "albert.encoder.albert_layer_groups.0.albert_layers.*:attention", inner_group_num=2
    ),
    encoder("ElectraForMaskedLM", SequenceFirst, "electra.encoder.layer.*"),
    encoder("DebertaV2ForMaskedLM", Paper, "deberta.encoder.layer.*", relative_attention=False),
    encoder(
        "DebertaForMaskedLM", Paper, "deberta.encoder.layer.*", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    encoder("MPNetForMaskedLM", Paper, "mpnet.encoder.layer.*"),
    encoder(
        "ModernBertForMaskedLM",
        BatchFirst,
        "model.layers.*",
        local_attention=16,
        layer_types=["full_attention", "sliding_attention"],
    ),
    padded(
        "ModernBertForMaskedLM",
        Paper,
        "model.layers.*",
        local_attention=16,
        layer_types=["full_attention", "sliding_attention"],
    ),
    encoder("ConvBertForMaskedLM", SoftmaxGate, "convbert.encoder.layer.*"),
    encoder(
        "MobileBertForMaskedLM", ScatterAdd, "mobilebert.encoder.layer.*", intra_bottleneck_size=16, true_hidden_size=16
    ),
    encoder("RoFormerForMaskedLM", Paper, "roformer.encoder.layer.*"),
    encoder("EsmForMaskedLM", SoftmaxGate, "esm.encoder.layer.*", mask_token_id=4, position_embedding_type="rotary"),
    encoder("FNetForMaskedLM", Paper, "fnet.encoder.layer.*"),
    encoder("MegatronBertForMaskedLM", ScatterAdd, "bert.encoder.layer.*"),
    encoder("EuroBertForMaskedLM", SequenceFirst, "model.layers.*"),
    encoder("NomicBertForMaskedLM", OneHot, "nomic_bert.layers.*"),
    encoder(
        "RemBertForMaskedLM", BatchFirst, "rembert.encoder.layer.*", input_embedding_size=64, output_embedding_size=64
    ),
    encoder("ErnieForMaskedLM", SequenceFirst, "ernie.encoder.layer.*"),
    Entry(
        "transformers",
        "XLNetLMHeadModel",
        partial(small, "XLNetLMHeadModel", d_model=64, n_layer=2, n_head=4, d_inner=96, max_position_embeddings=LACKS),
        token_ids,
        "transformer.layer.*:ff",
        Apart,
        dim=0,
    ),
    encoder("CLIPTextModel", SoftmaxGate, "encoder.layers.*"),
    seq2seq("BartForConditionalGeneration", Paper, LAYERS, **BART),
    seq2seq(
        "BartForConditionalGeneration", QueriesOfKeyValueStates, DECODED, "queries", attn_implementation="eager", **BART
    ),
    seq2seq("MBartForConditionalGeneration", SoftmaxGate, LAYERS, **BART),
    seq2seq("PegasusForConditionalGeneration", ScatterAdd, LAYERS, **BART),
    seq2seq("PegasusXForConditionalGeneration", Paper, "model.decoder.layers.*", **BART),
    seq2seq("MarianMTModel", BatchFirst, LAYERS, decoder_vocab_size=VOCABULARY, attn_implementation="eager", **BART),
    seq2seq("BlenderbotForConditionalGeneration", SequenceFirst, LAYERS, **BART),
    seq2seq("BlenderbotSmallForConditionalGeneration", OneHot, LAYERS, **BART),
    seq2seq("M2M100ForConditionalGeneration", Apart, "model.decoder.layers.*:self_attn,encoder_attn", **BART),
    seq2seq(
        "M2M100ForConditionalGeneration",
        QueriesOfKeyValueStates,
        DECODED,
        "queries",
        attn_implementation="eager",
        **BART,
    ),
    seq2seq("PLBartForConditionalGeneration", Paper, LAYERS, **BART),
    seq2seq("MvpForConditionalGeneration", SoftmaxGate, LAYERS, **BART),
    Entry(
        "transformers",
        "LEDForConditionalGeneration",
        partial(small, "LEDForConditionalGeneration", attention_window=4, **LED, **BART),
        both_ids,
        "led.decoder.layers.*",
        Paper,
        refused="if is_global_attn:\nPython chooses its way by a value that depends on the data",
    ),
    seq2seq(
        "ProphetNetForConditionalGeneration",
        Paper,
        "prophetnet.encoder.layers.*",
        tokens=READ,
        num_hidden_layers=LACKS,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
    ),
    t5("T5ForConditionalGeneration", Paper),
    t5("MT5ForConditionalGeneration", SoftmaxGate),
    t5("UMT5ForConditionalGeneration", ScatterAdd),
    replace(
        t5("SwitchTransformersForConditionalGeneration", Paper, num_experts=4, expert_capacity=8),
        inputs=both_with_masks,
    ),
    Entry(
        "transformers",
        "T5GemmaForConditionalGeneration",
        partial(small, "T5GemmaForConditionalGeneration", encoder=GEMMA, decoder=GEMMA),
        lambda batch, seq: both_ids(batch, seq) | {"use_cache": False},
        "model.decoder.layers.*",
        Paper,
    ),
]
