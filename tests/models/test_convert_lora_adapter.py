"""LoRA adapters merged into their base models, compared with peft; what is no such adapter is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hugging_face import made, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mod_models.checkpoint import CheckpointError, load_checkpoint
from mod_models.convert import foreign, read_foreign
from mod_models.convert.foreign import ForeignModel, write_folder
from mod_models.convert.lora_adapter import HARMLESS, ONLY, PROMPTS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LENGTH = 20
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def adapt(model: PreTrainedModel, folder: Path, base: Path | None = None, seed: int = 5, **options: Any) -> PeftModel:
    """Adds an adapter with random numbers to a model, and saves it."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(
        model, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **options})
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.05 if "modules_to_save" in name else 0.2))
    adapted.peft_config["default"].base_model_name_or_path = None if base is None else str(base)
    adapted.save_pretrained(folder)
    return adapted.eval()


def pair(name: str, tmp_path: Path, **options: Any) -> tuple[Path, PeftModel]:
    """Saves a base model, and an adapter that names it."""
    saved(name, tmp_path / "base")
    return tmp_path / "adapter", adapt(made(name), tmp_path / "adapter", tmp_path / "base", **options)


def ids() -> Tensor:
    return torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids()).logits
    return found


def ours(model: ForeignModel) -> Tensor:
    with torch.no_grad():
        (found_BSV,) = model.checkpoint().module()(ids(), torch.tensor([LENGTH, LENGTH]))
    return found_BSV


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Llama", {"use_rslora": True}),
        ("Llama", {"target_modules": "all-linear"}),
        ("Llama", {"rank_pattern": {"k_proj": 2, r"^model\.layers\.1\.self_attn\.q_proj": 3},
                   "alpha_pattern": {"k_proj": 9, "layers.2.self_attn.(q|o)_proj": 1}}),
        ("Llama", {"layers_to_transform": [1], "init_lora_weights": "gaussian"}),
        ("Llama", {"target_modules": ["lm_head", "embed_tokens", "down_proj"]}),
        ("Llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
        ("Llama with biases", {"bias": "all", "target_modules": [*ATTENTION, "up_proj"]}),
        ("Mistral", {"target_modules": ["gate_proj", "v_proj"], "lora_alpha": 3.5}),
        ("Qwen2", {"bias": "lora_only"}),
        ("Qwen3", {"target_modules": "all-linear", "modules_to_save": ["q_norm"]}),
        ("Phi-3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
        ("Gemma", {"target_modules": ["o_proj", "down_proj"], "modules_to_save": ["input_layernorm"]}),
    ],
)  # fmt: skip
def test_logits_and_weights_are_those_of_peft(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    adapter, adapted = pair(name, tmp_path, **options)
    found = read_foreign(adapter)
    assert found.notes == (f"{adapter}: merged into {tmp_path / 'base'}",)
    expected_BSV = logits(adapted)
    assert (logits(made(name)) - expected_BSV).abs().max() > 0.05
    assert (ours(found) - expected_BSV).abs().max() < 2e-5
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = read_foreign(tmp_path / "merged").checkpoint().weights
    weights = found.checkpoint().weights
    assert weights.keys() == expected.keys()
    assert all((weights[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_the_base_model(dtype: torch.dtype, tmp_path: Path) -> None:
    made("Llama").to(dtype).save_pretrained(tmp_path / "base")
    adapted = adapt(made("Llama").to(dtype), tmp_path / "adapter", tmp_path / "base", target_modules="all-linear")
    write_folder(read_foreign(tmp_path / "adapter"), tmp_path / "out")
    weights = load_checkpoint(tmp_path / "out").weights
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = read_foreign(tmp_path / "merged").checkpoint().weights
    for name, tensor in expected.items():
        # peft rounds the product before it is added, and the sum once more.
        assert torch.allclose(weights[name].float(), tensor.float(), rtol=2 * torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
)
def test_a_head_that_is_no_longer_the_embedding(options: dict[str, Any], tmp_path: Path) -> None:
    """The adapted model computes with both of them. `merge_and_unload` of peft would change both by the sum of one."""
    adapter, adapted = pair("SmolLM", tmp_path, **options)
    found = read_foreign(adapter)
    base = tmp_path / "base"
    assert found.notes == (
        f"{adapter}: changes the head or the embedding, which are one in {base}, so they are two now",
        f"{adapter}: merged into {base}",
    )
    assert not found.spec.tie_embeddings
    assert (ours(found) - logits(adapted)).abs().max() < 2e-5


def test_an_adapter_that_changes_head_and_embedding_together(tmp_path: Path) -> None:
    adapter, _ = pair("SmolLM", tmp_path, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(CheckpointError) as caught:
        read_foreign(adapter)
    assert str(caught.value) == (
        f"{adapter / CONFIG}: ensure_weight_tying: an adapter of an embedding that stays the head is not merged here; "
        f"{PEFT_MERGES}"
    )


def test_an_adapter_of_a_base_model(tmp_path: Path) -> None:
    """Its names have no `model.`, and the base model has them with it."""
    saved("Llama", tmp_path / "base")
    adapted = adapt(made("Llama").model, tmp_path / "adapter", tmp_path / "base", alpha_pattern={"^layers.1.*": 2})
    theirs = made("Llama")
    theirs.model = adapted.merge_and_unload()
    assert (ours(read_foreign(tmp_path / "adapter")) - logits(theirs)).abs().max() < 2e-5


def test_a_base_model_with_more_tokens(tmp_path: Path) -> None:
    """peft saves the embeddings whole if there are more of them than the base model has."""
    saved("Llama", tmp_path / "base")
    model = made("Llama")
    model.resize_token_embeddings(100)
    adapted = adapt(model, tmp_path / "adapter", tmp_path / "base")
    message = r"\[100, 48\], the base model has \[96, 48\]; resize its embeddings as in training"
    with pytest.raises(CheckpointError, match=message):
        read_foreign(tmp_path / "adapter")
    base = made("Llama")
    base.resize_token_embeddings(100)
    base.save_pretrained(tmp_path / "resized")
    found = read_foreign(tmp_path / "adapter", base=tmp_path / "resized")
    assert found.spec.vocab_size == 100
    assert (ours(found) - logits(adapted)).abs().max() < 2e-5


def test_an_adapter_in_a_pickle(tmp_path: Path) -> None:
    adapter, adapted = pair("Llama", tmp_path)
    torch.save(load_file(adapter / WEIGHTS), adapter / "adapter_model.bin")
    (adapter / WEIGHTS).unlink()
    assert (ours(read_foreign(adapter)) - logits(adapted)).abs().max() < 2e-5


def test_a_model_with_its_adapter_beside_the_weights(tmp_path: Path) -> None:
    """A training script saved the state of the adapted model."""
    _, adapted = pair("Llama", tmp_path)
    save_file(adapted.state_dict(), tmp_path / "base" / "model.safetensors")
    found = re.fullmatch(
        r"SOURCE: holds '(\S+)', so it is a model with an adapter of PEFT that is not merged; save what "
        "merge_and_unload of peft returns, or convert the adapter alone",
        refused(tmp_path / "base"),
    )
    assert found is not None
    assert ".base_layer." in found[1] or ".lora_" in found[1]


def test_where_the_base_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, adapted = pair("Llama", tmp_path)
    expected = logits(adapted)
    base = (tmp_path / "base").rename(tmp_path / "tiny")
    named = f"a LoRA adapter of {tmp_path / 'base'}, and no model; name the folder of that model: mod-export convert"
    assert refused(adapter) == f"SOURCE: {named} SOURCE OUT --base FOLDER"
    assert (ours(read_foreign(adapter, base=base)) - expected).abs().max() < 2e-5
    change(adapter, base_model_name_or_path="tiny")
    monkeypatch.chdir(tmp_path)
    assert read_foreign(adapter).notes == (f"{adapter}: merged into tiny",)
    monkeypatch.undo()
    change(adapter, base_model_name_or_path="org/tiny")
    assert refused(adapter).startswith("SOURCE: a LoRA adapter of org/tiny, and no model; ")
    inside = adapter.rename(base / "adapter")
    assert read_foreign(inside).notes == (f"{inside}: merged into {base}",)
    for other in ("org/another", None, "x" * 300, "a\0b", 7):
        change(inside, base_model_name_or_path=other)
        assert ", and no model; name the folder of that model: " in refused(inside)
    change(inside, base_model_name_or_path=None)
    assert refused(inside).startswith("SOURCE: a LoRA adapter of a base model that it does not name, and no model; ")
    assert refused(inside, base=tmp_path) == (
        f"{tmp_path}: the base model of an adapter is a Hugging Face folder (config.json with a model_type), and this "
        "is none"
    )


def test_a_model_and_an_adapter_in_one_folder(tmp_path: Path) -> None:
    """The model may be the base model, or both of them merged."""
    adapter, adapted = pair("Llama", tmp_path)
    for name in ("config.json", "model.safetensors"):
        (adapter / name).write_bytes((tmp_path / "base" / name).read_bytes())
    assert refused(adapter) == (
        f"SOURCE: holds a model and a LoRA adapter of {tmp_path / 'base'}, and not whether they are merged already; to "
        "convert the model alone, remove adapter_config.json, and to merge them, name the base model: mod-export "
        "convert SOURCE OUT --base FOLDER"
    )
    assert (ours(read_foreign(adapter, base=adapter)) - logits(adapted)).abs().max() < 2e-5


def test_a_base_model_for_what_is_no_adapter(tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    base = tmp_path / "base"
    assert refused(base, base=base) == "--base SOURCE: is for an adapter, and SOURCE holds no adapter_config.json"
    assert (
        refused(adapter, base=base, implementation="dlo")
        == f"--base {base}: is for an adapter, and SOURCE has an --implementation"
    )


def test_the_tokenizer_is_that_of_the_adapter(tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    base = tmp_path / "base"
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("base")
    found = read_foreign(adapter)
    assert found.tokenizer is None
    assert {file.name: file for file in found.companions} == {
        name: base / name for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    }
    (adapter / "tokenizer.json").write_text("{}")
    found = read_foreign(adapter)
    assert found.tokenizer == adapter
    assert {file.name: file for file in found.companions} == {
        "tokenizer.json": adapter / "tokenizer.json", "generation_config.json": base / "generation_config.json",
    }  # fmt: skip


def test_a_template_without_a_tokenizer(tmp_path: Path) -> None:
    """A chat template for the tokenizer of the base model, which a user may want, is named."""
    adapter, _ = pair("Llama", tmp_path)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    for name in ("chat_template.jinja", "generation_config.json", "special_tokens_map.json"):
        (adapter / name).write_text("{}")
    found = read_foreign(adapter)
    assert (found.tokenizer, {file.parent for file in found.companions}) == (None, {tmp_path / "base"})
    assert found.notes == (
        *(
            f"{adapter / name}: not used, because there is no tokenizer beside it; if the adapter was trained with it, "
            "copy it into OUT"
            for name in ("generation_config.json", "chat_template.jinja")
        ),
        f"{adapter}: merged into {tmp_path / 'base'}",
    )
    (adapter / "tokenizer.json").write_text("{}")
    found = read_foreign(adapter)
    assert found.notes == (f"{adapter}: merged into {tmp_path / 'base'}",)
    assert {file.parent for file in found.companions} == {adapter}


def refused(source: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_foreign(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(source), "SOURCE")


def change(adapter: Path, **changes: Any) -> None:
    """Changes fields of adapter_config.json; a field that becomes `...` is removed."""
    fields = json.loads((adapter / CONFIG).read_text()) | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    (adapter / CONFIG).write_text(json.dumps(fields))


PEFT_MERGES = "merge it with merge_and_unload of peft, and convert what save_pretrained then writes"
MORE = f"is more than LoRA, which is all that is merged here; {PEFT_MERGES}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, f"use_dora: True {MORE}"),
        ({"lora_bias": True}, f"lora_bias: True {MORE}"),
        ({"init_lora_weights": "pissa_niter_4"}, f"init_lora_weights: 'pissa_niter_4' {MORE}"),
        ({"init_lora_weights": "olora"}, f"init_lora_weights: 'olora' {MORE}"),
        ({"trainable_token_indices": [1]}, rf"trainable_token_indices: \[1\] {MORE}"),
        ({"target_parameters": ["a"]}, rf"target_parameters: \['a'\] {MORE}"),
        ({"layer_replication": [[0, 2]]}, rf"layer_replication: \[\[0, 2\]\] {MORE}"),
        ({"alora_invocation_tokens": [7]}, rf"alora_invocation_tokens: \[7\] {MORE}"),
        ({"use_qalora": True}, f"use_qalora: True {MORE}"),
        ({"peft_type": "ADALORA"}, f"peft_type: 'ADALORA' is not merged here, only LORA is; {PEFT_MERGES}"),
        ({"peft_type": "IA3"}, f"peft_type: 'IA3' is not merged here, only LORA is; {PEFT_MERGES}"),
        ({"peft_type": ...}, f"peft_type: None is not merged here, only LORA is; {PEFT_MERGES}"),
        ({"peft_type": "PREFIX_TUNING"},
         "peft_type: PREFIX_TUNING changes no weights, so it cannot be merged into a model"),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false, got 'yes'"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no regular expression \(.*\)"),
        ({"alpha_pattern": {"(.+)+x": 2}},
         r"alpha_pattern: '\(\.\+\)\+x' repeats a group, and such patterns can take for ever to match"),
        ({"new_kind": 3}, "new_kind: unknown field with the value 3; it could change what the model computes. Where it "
         "does not, name it with --ignore-field"),
    ],
)  # fmt: skip
def test_other_adapters(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    change(adapter, **changes)
    assert re.fullmatch(rf"SOURCE/{CONFIG}: {message}", refused(adapter))


def test_a_field_that_the_user_knows(tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    change(adapter, note="mine", r=..., use_dora=None)
    assert refused(adapter).startswith("SOURCE/adapter_config.json: note: unknown field")
    assert "adapter_config.json says rank 8" in refused(adapter, ignored=["note"])
    change(adapter, r=4)
    read_foreign(adapter, ignored=["note"])


def test_every_kind_of_peft_is_known() -> None:
    """A kind of adapter that has no weights to merge is not said to be mergeable."""
    assert {*PROMPTS} <= {kind.value for kind in peft.PeftType}
    prompts = {kind.value for kind, tuner in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
               if issubclass(tuner, peft.PromptLearningConfig)}  # fmt: skip
    assert prompts <= {*PROMPTS}


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q_PROJ}.lora_B.weight": None}, f"{MODULE} has lora_A alone, expected lora_A and lora_B"),
        ({f"{Q_PROJ}.lora_magnitude_vector": torch.ones(48)},
         f"'{MODULE}.lora_magnitude_vector' changes nothing that the base model has"),
        ({f"{Q_PROJ}.bias": torch.ones(48)}, f"'{MODULE}.bias' changes nothing that the base model has"),
        ({f"{Q_PROJ}.lora_A.weight": torch.ones(3, 48), f"{Q_PROJ}.lora_B.weight": torch.ones(48, 3)},
         f"{MODULE} has lora_A [3, 48] and lora_B [48, 3], adapter_config.json says rank 4"),
        ({f"{Q_PROJ}.lora_B.weight": torch.ones(48)},
         f"{MODULE} has lora_A [4, 48] and lora_B [48], adapter_config.json says rank 4"),
        ({f"{Q_PROJ}.lora_B.weight": torch.ones(50, 4)},
         f"{MODULE} adds numbers of shape [50, 48], the base model has [48, 48]"),
        ({f"{Q_PROJ}.lora_B.weight": torch.ones(48, 4, dtype=torch.int8)},
         f"'{MODULE}.lora_B.weight' holds I8, expected floating-point numbers of 16, 32 or 64 bits; {MODULE} has "
         "lora_A alone, expected lora_A and lora_B"),
        ({"base_model.model.model.embed_tokens.weight": torch.ones(98, 48)},
         "model.embed_tokens.weight has shape [98, 48], the base model has [96, 48]; resize its embeddings as in "
         "training (resize_token_embeddings of transformers), and name what is saved then"),
        ({"base_model.model.model.norm.weight": torch.ones(47)},
         "model.norm.weight has shape [47], the base model has [48]"),
        ({"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)},
         "model.layers.7.self_attn.q_proj.weight is adapted, and the base model has none"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tensors: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    changed = {**load_file(adapter / WEIGHTS), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, adapter / WEIGHTS)
    assert refused(adapter) == f"SOURCE/{WEIGHTS}: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": {"layers.0.self_attn.q_proj": "4"}}, "has the rank '4', expected a whole number above 0"),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 0}}, "has the rank 0, expected a whole number above 0"),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": True}}, "has the lora_alpha True, expected a number"),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": float("nan")}}, "has the lora_alpha nan, expected a number"),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 1e40}}, "has the lora_alpha 1e+40, expected a number"),
    ],
)
def test_scales_that_are_none(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    change(adapter, **changes)
    assert refused(adapter) == f"SOURCE/{WEIGHTS}: {MODULE} {message}"


def test_an_adapter_without_weights(tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    (adapter / WEIGHTS).unlink()
    assert refused(adapter) == (
        "SOURCE: holds no weights of the adapter; expected adapter_model.safetensors or adapter_model.bin"
    )


def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, _ = pair("Phi-3", tmp_path, target_modules=["qkv_proj", "gate_up_proj", "embed_tokens"])
    model = read_foreign(adapter)
    whole = model.checkpoint().weights
    monkeypatch.setattr(foreign, "PIECE_BYTES", 4 * 48 * 7)
    write_folder(model, tmp_path / "out")
    for name, tensor in load_checkpoint(tmp_path / "out").weights.items():
        assert torch.allclose(tensor, whole[name], rtol=0, atol=1e-6)


def test_a_product_that_is_not_finite(tmp_path: Path) -> None:
    adapter, _ = pair("Llama", tmp_path)
    tensors = load_file(adapter / WEIGHTS)
    tensors[f"{Q_PROJ}.lora_B.weight"][0, 0] = float("inf")
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"layers.0.attention.q_proj.weight holds values that are NaN"):
        write_folder(read_foreign(adapter), tmp_path / "out")
    assert not (tmp_path / "out").exists()


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 200), st.floats(), st.text(max_size=5),
    st.sampled_from([10**400, 4, "LORA", "q_proj", "(", "a{99999999999}", "x" * 5000]),
)  # fmt: skip
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["q_proj", "layers.1", ".*", "(", "a{99999999999}", ""]), SCALARS, max_size=3),
)
FIELDS = (*ONLY, *HARMLESS, "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save")


@settings(max_examples=150)
@given(changes=st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=3)), VALUES, max_size=3))
def test_arbitrary_configurations(damaged: Path, changes: dict[str, Any]) -> None:
    """The result is a model or a CheckpointError of one line."""
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": str(damaged / "base"), **changes}
    (damaged / "adapter" / CONFIG).write_text(json.dumps(fields))
    message = ""
    try:
        read_foreign(damaged / "adapter")
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 10_000


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and an adapter."""
    folder = tmp_path_factory.mktemp("damaged")
    pair("Llama", folder)
    return folder
