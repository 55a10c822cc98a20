"""Fields of config.json that a spec cannot express are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hugging_face import LLAMA3, change_config, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mod_models.checkpoint import CheckpointError
from mod_models.convert import gguf_model, read_foreign
from mod_models.convert.gguf_file import BLOCKS
from mod_models.convert.gguf_tokenizer import BYTE_LEVEL
from mod_models.convert.hugging_face import FAMILIES

WINDOW = (
    "sliding_window: a token sees 8 tokens of up to 128, and a spec has no window; for rows of up to 8 tokens, where "
    "it hides nothing, give --max-positions 8"
)
UNKNOWN = "it could change what the model computes. Where it does not, name it with --ignore-field"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    names = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi-3", "Gemma")
    for name in names:
        saved(name, root / name)
    return {name: root / name for name in names}


@pytest.fixture
def source(sources: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Folder with a copy of config.json that can be changed, and links to the same weights."""
    name = getattr(request, "param", "Llama")
    (tmp_path / "source").mkdir()
    for path in sources[name].iterdir():
        (tmp_path / "source" / path.name).symlink_to(path)
    config = tmp_path / "source" / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text)
    return tmp_path / "source"


def said(source: Path, **changes: Any) -> str:
    """Message of the refusal, without the path in front of it."""
    change_config(source, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_foreign(source)
    path, _, message = str(caught.value).partition(": ")
    assert path in (str(source / "config.json"), str(source))
    return message


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("Llama", {"model_type": "deepseek_v3"}, "model_type: 'deepseek_v3' is no family that can be converted; known: "
         "llama, mistral, qwen2, qwen3, phi3, gemma"),
        ("Llama", {"model_type": ["llama"]}, "model_type: ['llama'] is no family that can be converted; known: llama, "
         "mistral, qwen2, qwen3, phi3, gemma"),
        ("Llama", {"architectures": ["LlamaForSequenceClassification"]},
         "architectures: expected LlamaForCausalLM, got ['LlamaForSequenceClassification']"),
        ("Llama", {"hidden_size": ...}, "hidden_size: missing"),
        ("Llama", {"vocab_size": 0}, "vocab_size: expected a whole number above 0, got 0"),
        ("Llama", {"num_hidden_layers": "3"}, "num_hidden_layers: expected a whole number above 0, got '3'"),
        ("Llama", {"num_hidden_layers": True}, "num_hidden_layers: expected a whole number above 0, got True"),
        ("Llama", {"vocab_size": 2**30}, f"spec.vocab_size: expected a whole number from 1 to {2**24}, got {2**30}"),
        ("Llama", {"rms_norm_eps": -1}, "rms_norm_eps: expected a number above 0, got -1"),
        ("Llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
        ("Llama", {"num_attention_heads": 5, "head_dim": None, "num_key_value_heads": 5},
         "head_dim: missing, and num_attention_heads 5 does not divide hidden_size 48"),
        ("Llama", {"hidden_act": "relu2"}, "hidden_act: 'relu2' has no counterpart here; known: silu, swish, gelu, "
         "gelu_pytorch_tanh, gelu_new"),
        ("Llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}},
         "rope_scaling.rope_type: a spec cannot say 'yarn'; known: default, linear, llama3"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
         "rope_parameters.factor: expected a number above 0, got None"),
        ("Llama", {"rope_parameters": 5}, "rope_parameters: expected a table, got 5"),
        ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "rope_parameters.partial_rotary_factor: a spec cannot say 0.5 with default angles"),
        ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": "8"}},
         "rope_parameters.original_max_position_embeddings: expected a whole number above 0, got '8'"),
        ("Llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
         "spec.rope_scaling.low_freq_factor: expected less than high_freq_factor 4.0, got 4.0"),
        ("Llama", {"rope_theta": 0, "rope_parameters": ...}, "rope_theta: expected a number above 0, got 0"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: a spec cannot say 0.5; expected 1 or 1.0"),
        ("Llama", {"rope_interleaved": True}, "rope_interleaved: a spec cannot say True; expected false"),
        ("Llama", {"quantization_config": {"bits": 4}},
         f"quantization_config: unknown field with the value {{'bits': 4}}; {UNKNOWN}"),
        ("Llama", {"attention_bia": True},
         f"attention_bia: unknown field with the value True (did you mean 'attention_bias'?); {UNKNOWN}"),
        ("Llama", {"num_local_experts": 8}, f"num_local_experts: unknown field with the value 8; {UNKNOWN}"),
        ("Llama", {"kv_lora_rank": 512}, f"kv_lora_rank: unknown field with the value 512; {UNKNOWN}"),
        ("Mistral", {"sliding_window": 8}, WINDOW),
        ("Mistral", {"sliding_window": "8"}, "sliding_window: expected a whole number above 0, got '8'"),
        ("Mistral", {"attention_bias": True}, "attention_bias: a spec cannot say True; expected false"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
         WINDOW),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8,
                   "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, WINDOW),
        ("Qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
         "layer_types: expected full_attention in every layer, got ['full_attention', 'chunked_attention', "
         "'full_attention']"),
        ("Qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "layer_types: expected full_attention in every layer, got ['full_attention', 'sliding_attention', "
         "'full_attention']"),
        ("Llama", {"layer_types": ["full_attention", "sliding_attention"]},
         f"layer_types: unknown field with the value ['full_attention', 'sliding_attention']; {UNKNOWN}"),
        ("Llama", {"layer_types": []}, f"layer_types: unknown field with the value []; {UNKNOWN}"),
        ("Qwen2", {"layer_types": "full_attention"},
         "layer_types: expected full_attention in every layer, got 'full_attention'"),
        ("Qwen2", {"use_mrope": True}, "use_mrope: a spec cannot say True; expected false"),
        ("Phi-3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
         "rope_scaling.rope_type: a spec cannot say 'longrope'; known: default, linear, llama3"),
        ("Phi-3", {"sliding_window": 8}, WINDOW),
        ("Gemma", {"final_logit_softcapping": 30.0},
         f"final_logit_softcapping: unknown field with the value 30.0; {UNKNOWN}"),
        ("Gemma", {"use_bidirectional_attention": True},
         "use_bidirectional_attention: a spec cannot say True; expected false"),
        ("Gemma", {"hidden_activation": "silu"}, "hidden_activation: a spec cannot say 'silu'; expected "
         "gelu_pytorch_tanh"),
    ],
    indirect=["source"],
)  # fmt: skip
def test_what_a_spec_cannot_say(source: Path, changes: dict[str, Any], message: str) -> None:
    assert said(source, **changes) == message


def test_every_problem_at_once(source: Path) -> None:
    message = said(source, vocab_size=-1, hidden_act="relu", attn_logit_softcapping=50.0, num_experts=4)
    names = set(re.findall(r"(?:^|; )(\w+): ", message)) - {"known"}
    assert sorted(names) == ["attn_logit_softcapping", "hidden_act", "num_experts", "vocab_size"]
    many = said(source, **{f"field_{number}": 1 for number in range(20)})
    assert many.endswith("; and 16 more")


@pytest.mark.parametrize("source", ["Llama", "Gemma", "Qwen2"], indirect=True)
def test_fields_that_change_nothing(source: Path) -> None:
    """Published models have such fields; null means that a field was not set."""
    before = read_foreign(source).spec
    change_config(
        source, attention_dropout=0.1, pretraining_tp=2, is_llama_config=True, rope_interleaved=False, use_mrope=False,
        torch_dtype="bfloat16", auto_map={"AutoModel": "x.Y"}, quantization_config=None, temperature=0.6,
        partial_rotary_factor=1.0, hidden_activation=None, architectures=None, _model_name_or_path="tuned",
    )  # fmt: skip
    assert read_foreign(source).spec == before
    change_config(source, quantization_config={"quant_method": "gguf", "dequantize": False})
    assert read_foreign(source).spec == before
    change_config(source, layer_types=["full_attention"] * 3)
    assert read_foreign(source).spec == before


def test_a_field_that_the_user_knows(source: Path) -> None:
    change_config(source, my_note="tuned", my_flag=True)
    with pytest.raises(CheckpointError, match=r"my_flag: unknown field"):
        read_foreign(source, ignored=["my_note"])
    read_foreign(source, ignored=["my_note", "my_flag"])


@pytest.mark.parametrize("source", ["Mistral", "Phi-3"], indirect=True)
def test_rows_as_short_as_the_window(source: Path) -> None:
    change_config(source, sliding_window=16)
    assert read_foreign(source, max_positions=16).spec.max_positions == 16
    with pytest.raises(CheckpointError, match=r"sliding_window: a token sees 16 tokens of up to 17"):
        read_foreign(source, max_positions=17)
    with pytest.raises(CheckpointError, match=r"max_position_embeddings: 128, and --max-positions asks for 129"):
        read_foreign(source, max_positions=129)


def test_angles_without_a_length_before_have_that_of_the_longest_row(source: Path) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    change_config(source, rope_parameters=scaling)
    found = read_foreign(source).spec.rope_scaling
    assert found is not None
    assert found.original_positions == 128


def test_families_of_the_help() -> None:
    """`mod-export convert --help` names each family; SmolLM is a Llama."""
    from mod_export.cli.convert import convert

    named = str(convert.help).lower().replace("-", "")
    assert all(name in named for name in (*FAMILIES, "smollm"))


def test_families_of_the_page() -> None:
    """docs/models.md has a row for each family."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.split("\n## Convert a dense model\n")[1].split("\n### Models of the hub\n")[0]
    folders, files = section.split("\n### GGUF files\n")
    assert tuple(re.findall(r"^\| `(\w+)` \|", folders, re.MULTILINE)) == ("model_type", *FAMILIES)
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", files, re.MULTILINE)
    assert re.findall(r"\w+", " ".join(rows)) == [*gguf_model.FAMILIES]
    assert all(re.search(rf"\b{pre}\b", files) for pre in (*BLOCKS, *BYTE_LEVEL) if pre not in ("llama3", "llama-v3"))


def test_what_is_no_folder_of_a_model(tmp_path: Path) -> None:
    expected = f"{tmp_path}: not a Hugging Face folder (a readable config.json with a model_type)"
    for text in (None, "{", "[]", "{}"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            read_foreign(tmp_path)
    with pytest.raises(CheckpointError, match="absent: no such file or folder"):
        read_foreign(tmp_path / "absent")


# For any content of config.json, the result is a model or a CheckpointError.

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 200), st.floats(), st.text(max_size=5),
    st.sampled_from([10**400, 2**30, "x" * 5000, float("inf"), "full_attention", "linear", "llama3", "yarn"]),
)  # fmt: skip
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "architectures", "partial_rotary_factor", "pruned_heads", "quantization_config",
)  # fmt: skip
ROPE = ("rope_type", "type", "factor", "low_freq_factor", "original_max_position_embeddings", "rope_theta")
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.one_of(st.sampled_from(ROPE), st.text(max_size=3)), SCALARS, max_size=4),
)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma", "Mistral"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=4)), VALUES, max_size=4))
def test_arbitrary_values(sources: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "model.safetensors").symlink_to(sources[name] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((sources[name] / "config.json").read_text()) | changes))
    try:
        message = str(read_foreign(tmp_path).path)
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(str(tmp_path))
    assert len(message) < 10_000
