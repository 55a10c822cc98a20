"""Reader of a Hugging Face config.json, its rotary angles, and the fields that are known to change no number.

A field that is not read could change what the model computes, so an unknown field is refused by name. A null field
counts as not set, as in transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from mod_models.spec import RopeScaling, shown

HARMLESS = frozenset(
    {
        # Origin, loading and storage.
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path", "_name_or_path",
        "architectures", "attn_implementation", "auto_map", "dtype", "is_llama_config", "max_sequence_length",
        "model_max_length", "model_type", "name_or_path", "tokenizer_class", "torch_dtype", "torchscript",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_flash_attn",
        # Training.
        "attention_dropout", "embd_pdrop", "finetuning_task", "gradient_checkpointing", "hidden_dropout",
        "initializer_range", "label2id", "id2label", "num_labels", "problem_type", "resid_pdrop",
        "task_specific_params", "use_cache",
        # Outputs, and computation in pieces; `pretraining_tp` only changes the order of sums.
        "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict",
        "tie_last_hidden_states",
        # Sampling of tokens, and special tokens.
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
        "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
        "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
        "unk_token_id",
    }
)  # fmt: skip
"""Fields that change no logit of a text, for any value."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
"""Field -> the values with which it changes nothing. With any other value, a spec cannot describe the model."""
FULL = ["full_attention"]
QUOTES = "'"
DEFAULT_THETA = 10_000.0
ROPE_FIELDS = ("rope_type", "type", "rope_theta")
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kind of rotary angles -> its parameters."""
ROPE_ONLY: Mapping[str, tuple[Any, ...]] = {"partial_rotary_factor": (1, 1.0), "attention_factor": (1, 1.0)}
"""Other field of the table of rotary angles -> the values with which it changes nothing."""


class Config:
    """The fields of a config.json or a similar table. The methods that read a field record its problems.

    Attributes:
        problems: the problems so far, one line for each field.
    """

    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """`defaults` are the values of fields that the file leaves out."""
        self.fields, self.defaults = fields, defaults
        self.problems: list[str] = []
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Returns the JSON value of a field, or its default if the file leaves it out; None without a default."""
        self._read.add(name)
        return self.fields.get(name, self.defaults.get(name))

    def problem(self, name: str, said: str) -> None:
        """Records a problem of a field."""
        self.problems.append(f"{name}: {said}")

    def whole(self, name: str) -> int:
        """Reads a whole number of at least 1."""
        value = self.get(name)
        if type(value) is int and value > 0:
            return value
        missing = value is None and name not in self.fields
        self.problem(name, "missing" if missing else f"expected a whole number above 0, got {shown(value)}")
        return 1

    def number(self, name: str) -> float:
        """Reads a number above 0."""
        return self.positive(name, self.get(name))

    def positive(self, name: str, value: Any) -> float:
        """Like `number`, for a value that the caller has read."""
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return value
        self.problem(name, f"expected a number above 0, got {shown(value)}")
        return 1.0

    def flag(self, name: str) -> bool:
        """Reads true or false; null and a missing field are false."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            self.problem(name, f"expected true or false, got {shown(value)}")
        return value is True

    def named(self, name: str, table: Mapping[str, str]) -> str:
        """Reads a name and returns its entry in the table."""
        value = self.get(name)
        if isinstance(value, str) and value in table:
            return table[value]
        self.problem(name, f"{shown(value)} has no counterpart here; known: {', '.join(table)}")
        return next(iter(table.values()))

    def only(self, name: str, values: tuple[Any, ...]) -> None:
        """Accepts only these values and null."""
        value = self.get(name)
        if value is not None and value not in values:
            self.problem(name, f"a spec cannot say {shown(value)}; expected {' or '.join(map(_as_json, values))}")

    def check_others(
        self,
        ignored: Collection[str],
        harmless: Collection[str] = HARMLESS,
        only: Mapping[str, tuple[Any, ...]] = ONLY,
    ) -> None:
        """Records a problem for every field that was not read, is not known to be harmless and is not `ignored`."""
        for name, values in only.items():
            if name in self.fields and name not in self._read:
                self.only(name, values)
        known = sorted({*self._read, *harmless})
        for name, value in self.fields.items():
            if name in self._read or name in harmless or name in ignored or value is None:
                continue
            if name == "layer_types" and isinstance(value, list) and value and value == FULL * len(value):
                continue  # All layers see all tokens, as they do without the field.
            if name == "quantization_config" and value == self.fields.get("quantization"):
                continue  # MLX writes its field twice.
            method = value.get("quant_method") if name == "quantization_config" and isinstance(value, Mapping) else None
            if method == "gguf":
                continue  # Transformers saves a model from a GGUF file with dequantized floats.
            if name == "quantization" and isinstance(value, Mapping) and {"group_size", "bits"} <= value.keys():
                method = "MLX"
            if isinstance(method, str):
                self.problem(
                    name,
                    f"weights quantized by {shown(method).strip(QUOTES)}, which are not read here; name the folder of "
                    "the original model, or a GGUF file of it",
                )
                continue
            near = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.85)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            self.problem(
                shown(name).strip(QUOTES),
                f"unknown field with the value {shown(value)}{hint}; it could change what the model computes. Where it "
                f"does not, name it with --ignore-field",
            )


def _as_json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def rope_of(config: Config) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling), and records in `config.problems` why a spec cannot describe them.

    The fields are `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5).
    """
    tables = {name: config.get(name) for name in ("rope_scaling", "rope_parameters")}
    # If both are given, transformers takes the older one.
    name = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    table, theta = tables[name] or {}, config.get("rope_theta")
    if not isinstance(table, Mapping):
        config.problem(name, f"expected a table, got {shown(table)}")
        return DEFAULT_THETA, None
    theta = table.get("rope_theta", DEFAULT_THETA if theta is None else theta)
    kind = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        config.problem(f"{name}.rope_type", f"a spec cannot say {shown(kind)}; known: {', '.join(ROPE_KINDS)}")
        return DEFAULT_THETA, None
    _check_other_rope_fields(config, name, table, kind)
    parameters = {
        parameter: config.positive(f"{name}.{parameter}", table.get(parameter)) for parameter in ROPE_KINDS[kind]
    }
    theta = config.positive(f"{name}.rope_theta" if "rope_theta" in table else "rope_theta", theta)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=parameters["factor"])
    return theta, RopeScaling(
        kind=kind,
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_positions=_original_positions(config, name, table),
    )


def _original_positions(config: Config, name: str, table: Mapping[str, Any]) -> int:
    """Positions before scaling; if they are left out, transformers takes `max_position_embeddings`."""
    value = table.get("original_max_position_embeddings")
    value = config.get("max_position_embeddings") if value is None else value
    if type(value) is int and value > 0:
        return value
    config.problem(f"{name}.original_max_position_embeddings", f"expected a whole number above 0, got {shown(value)}")
    return 1


def _check_other_rope_fields(config: Config, name: str, table: Mapping[str, Any], kind: str) -> None:
    # The length before scaling is often given although nothing depends on it.
    known = {*ROPE_FIELDS, *ROPE_KINDS[kind], "original_max_position_embeddings"}
    for field, value in table.items():
        if field in known or value is None or value in ROPE_ONLY.get(field, ()):
            continue
        config.problem(
            f"{name}.{shown(field)}".replace("'", ""), f"a spec cannot say {shown(value)} with {kind} angles"
        )
