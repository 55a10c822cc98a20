"""Folders with routers that were not declared, or declared wrongly, or that are damaged: one sentence each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from implementation_models import (
    Adapted,
    Astramind,
    ByRow,
    DLlm,
    Dlo,
    FlexiDepth,
    MindSkip,
    Ohara,
    PMod,
    SkipGpt,
    Sramshetty,
)
from recursions_model import Recursions
from safetensors.torch import load_file, save_file

from mod_export.model.transformer import MOD_TRANSFORMER
from mod_models.checkpoint import CheckpointError
from mod_models.convert import read_foreign
from mod_models.convert.implementations import IMPLEMENTATIONS

NAMES_OF: dict[str, tuple[str, ...]] = {
    "epfml": ("transformer.h.0.mod_router.weight", "transformer.h.0.block.attn.c_attn.weight"),
    "kyegomez": ("router.weight", "aux_router.0.weight", "aux_router.2.weight"),
    "mixture-ai": ("router_mlp.weight", "router_mlp.bias", "aux_mlp.weight", "transformer_block.q.weight"),
}
"""Tensor names of implementations that cannot be converted."""
ADAPTED: dict[str, Callable[[], Adapted]] = {
    "flexidepth": lambda: FlexiDepth("Llama", 0),
    "skipgpt": lambda: SkipGpt(0),
    "mindskip": lambda: MindSkip("Llama", 0, "attn_token"),
    "recursions": lambda: Recursions(0),
    "p-mod": lambda: PMod(0),
}
UNLIMITED: dict[str, tuple[Callable[[], ByRow], str]] = {
    "dlo": (lambda: Dlo(0), ". config.json says that dlo_capacity was 0.7"),
    "d-llm": (lambda: DLlm(0), ". dynamic_active_target was 0.6"),
    **{name: (ADAPTED[name], "") for name in ("flexidepth", "skipgpt", "mindskip")},
}
"""Implementation without a capacity -> a model, and what the folder says of the capacity in training."""


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        read_foreign(folder, **options)
    assert "\n" not in str(raised.value)


def with_names(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({name: torch.ones(1, 4) for name in names}, folder / "model.safetensors")
    return folder


def change(folder: Path, without: str = "", **tensors: torch.Tensor) -> None:
    """Changes a model in a safetensors file; two underscores stand for a dot."""
    path = folder / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(path).items() if name != without}
    save_file(state | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


def change_pickle(path: Path, table: str = "", without: str = "", **tensors: torch.Tensor) -> None:
    data = torch.load(path, weights_only=True)
    state = data[table] if table else data
    state.pop(without, None)
    state |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    torch.save(data, path)


@pytest.mark.parametrize("name", ["astramind", "dlo", "ohara", *ADAPTED])
def test_an_implementation_is_not_guessed(name: str, tmp_path: Path) -> None:
    models = {"astramind": lambda: Astramind("Llama", 0), "dlo": lambda: Dlo(0), "ohara": lambda: Ohara(0), **ADAPTED}
    models[name]().save(tmp_path / "source")
    message = "how they route is in no file. Implementations with such names: "
    refused(tmp_path / "source", f"{message}{name}. If one of them stored it, say so: mod-export convert")
    for read in (MOD_TRANSFORMER.read, MOD_TRANSFORMER.look):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "source")


def test_state_dicts_without_an_implementation(tmp_path: Path) -> None:
    Sramshetty(0).save(tmp_path / "one")
    refused(tmp_path / "one", "Implementations with such names: sramshetty. If")
    DLlm(0).save(tmp_path / "two")
    refused(tmp_path / "two", "Implementations with such names: d-llm. If")


@pytest.mark.parametrize("name", NAMES_OF)
def test_implementations_that_cannot_be_converted(name: str, tmp_path: Path) -> None:
    """They are refused with the reason, whether they were declared or not."""
    folder, implementation = with_names(tmp_path / "source", NAMES_OF[name]), IMPLEMENTATIONS[name]
    assert implementation.reason
    refused(
        folder,
        f"--implementation {name} ({implementation.repository}) cannot be converted: {implementation.reason}",
        implementation=name,
    )
    refused(folder, f"{name}, which cannot be converted: {implementation.reason}")


def test_several_candidates(tmp_path: Path) -> None:
    folder = with_names(
        tmp_path / "source",
        ("model.routers.1.weight", "model.layers.0.router.weight", "model.layers.0.mod_router.weight"),
    )
    refused(folder, "Implementations with such names: dlo; mindskip; epfml, which cannot be converted: its blocks are")


def test_every_implementation_is_read_or_has_a_reason() -> None:
    assert {name for name, implementation in IMPLEMENTATIONS.items() if implementation.read is None} == set(NAMES_OF)
    assert all(
        (implementation.read is None) == bool(implementation.reason) for implementation in IMPLEMENTATIONS.values()
    )


def test_another_implementation_than_the_folder(tmp_path: Path) -> None:
    Ohara(0).save(tmp_path / "source")
    refused(
        tmp_path / "source",
        r"not a model of astramind: no tensor is named like model\.layers\.\d+\.router\.weight_predictor\.weight; "
        r"no tensor is named like model\.layers\.\d+\.block\.self_attn\..*. Implementations that do fit: ohara",
        implementation="astramind",
    )
    refused(tmp_path / "source", "--implementation mine: unknown; known: astramind, dlo, ohara", implementation="mine")
    (tmp_path / "file").write_text("")
    refused(
        tmp_path / "file",
        "not a folder; an implementation stores its configuration and its weights in one",
        implementation="dlo",
    )
    save_file(
        {"model.layers.0.router.weight_predictor.weight": torch.ones(1),
         "model.layers.0.block.self_attn.x": torch.ones(1), "model.layers.0.router.hidden_layer.weight": torch.ones(1)},
        with_names(tmp_path / "other", ()) / "model.safetensors",
    )  # fmt: skip
    refused(
        tmp_path / "other", "there is a tensor 'model.layers.0.router.hidden_layer.weight'", implementation="astramind"
    )


def test_a_capacity_without_an_implementation(tmp_path: Path) -> None:
    refused(tmp_path, "--capacity is for routed layers of an --implementation, and none was declared", capacity=0.5)


@pytest.mark.parametrize("name", UNLIMITED)
def test_a_capacity_that_has_to_be_given(name: str, tmp_path: Path) -> None:
    make, trained = UNLIMITED[name]
    make().save(tmp_path / "source")
    refused(
        tmp_path / "source",
        f"give --capacity: {name} runs every token that its router wants, and a graph has a fixed number of slots. "
        "--capacity 1 gives each token a slot and computes what its code computes; with a smaller share, tokens that "
        f"find no slot are skipped{trained}",
        implementation=name,
    )
    with pytest.raises(CheckpointError, match=r"(skipped|in training)$"):
        read_foreign(tmp_path / "source", implementation=name)
    refused(
        tmp_path / "source",
        f"{name}: spec.routing.capacity: expected a share in (0, 1]",
        implementation=name,
        capacity=2.0,
    )


def test_tensors_of_astramind(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    Astramind("Llama", 0).save(folder)
    options = {"implementation": "astramind"}
    change(folder, without="model.layers.1.router.weight_predictor.bias")
    refused(folder, "model.layers.1.router.weight_predictor.bias is missing, expected [1]", **options)
    change(folder, model__layers__1__router__weight_predictor__bias=torch.ones(2))
    refused(folder, "weight_predictor.bias has shape [2], config.json says [1]", **options)
    change(folder, model__layers__1__router__weight_predictor__bias=torch.ones(1, dtype=torch.int64))
    refused(folder, "weight_predictor.bias holds I64, expected floating-point", **options)
    change(folder, model__layers__1__router__weight_predictor__bias=torch.ones(1))
    change(folder, without="model.layers.1.block.mlp.up_proj.weight")
    refused(folder, "model.layers.1.block.mlp.up_proj.weight is missing, expected [80, 48]", **options)
    change(folder, model__layers__1__block__mlp__up_proj__weight=torch.ones(80, 48), model__layers__1__x=torch.ones(1))
    refused(folder, "'model.layers.1.x' belongs to nothing that config.json describes", **options)
    change(folder, without="model.layers.1.x", model__layers__7__router__weight_predictor__weight=torch.ones(1, 48))
    refused(folder, "astramind: spec.routing.layers: expected ascending numbers from 0 to 2", **options)


def test_configurations_of_dlo(tmp_path: Path) -> None:
    changes = {
        "scale_gap: expected a number, got 'wide'": {"scale_gap": "wide"},
        "rescale_hidden_states: expected true or false, got 1": {"rescale_hidden_states": 1},
        "model_type: expected 'llama_dlo', got 'llama_dlo_exattn'": {"model_type": "llama_dlo_exattn"},
        "architectures: expected ['LlamaDLOForCausalLM'], got None": {"architectures": None},
        "is_dlo: expected a list of true and false, got 3": {"is_dlo": 3},
        "model.routers.0.weight is missing, and is_dlo is true there": {"is_dlo": [True] * 3},
        "model.routers.2.weight stands in a layer where is_dlo is not true": {"is_dlo": [False, True, False]},
        "dlo_depth: unknown field with the value 3": {"dlo_depth": 3},
    }
    for number, (message, changed) in enumerate(changes.items()):
        Dlo(0).save(tmp_path / str(number), **changed)
        refused(tmp_path / str(number), message, implementation="dlo", capacity=1.0)


def test_configurations_of_ohara(tmp_path: Path) -> None:
    changes = {
        "ffn: a spec cannot say 'mlp'": {"ffn": "mlp"},
        "mixture_of_expert: a spec cannot say True": {"mixture_of_expert": True},
        "num_kv_heads: a spec cannot say 2": {"num_kv_heads": 2},
        "token_emb_scale: unknown field": {"token_emb_scale": 2},
        "hidden_dim: missing": {"hidden_dim": None},
        "model.layers.1.ff.gate.weight has shape [80, 48], config.json says [96, 48]": {"hidden_dim": 96},
        "spec.d_head: RoPE rotates pairs, so it must be even": {"num_heads": 16},
    }
    for number, (message, changed) in enumerate(changes.items()):
        theirs = Ohara(0)
        theirs.fields = {name: value for name, value in theirs.fields.items() if changed.get(name, 0) is not None}
        theirs.save(tmp_path / str(number), **{name: one for name, one in changed.items() if one is not None})
        refused(tmp_path / str(number), message, implementation="ohara")
    Ohara(0).save(tmp_path / "sound")
    refused(tmp_path / "sound", "seq_len: 64, so its code has 128 positions, and --max-positions asks for 129",
            implementation="ohara", max_positions=129)  # fmt: skip
    change(tmp_path / "sound", model__layers__0__gate__weight=torch.ones(1))
    refused(
        tmp_path / "sound",
        "'model.layers.0.gate.weight' belongs to nothing in a model of ohara",
        implementation="ohara",
    )


def test_tensors_that_ought_to_be_one(tmp_path: Path) -> None:
    Ohara(0).save(tmp_path / "ohara", kept=("model.token_emb.weight", "model.vocab_proj.weight"))
    change(tmp_path / "ohara", model__token_emb__weight=torch.ones(96, 48))
    refused(tmp_path / "ohara", "model.vocab_proj.weight differs from model.token_emb.weight, and both are the same",
            implementation="ohara")  # fmt: skip
    Sramshetty(0).save(tmp_path / "sramshetty")
    change_pickle(tmp_path / "sramshetty" / "checkpoint_epoch-0.pth", layers__3__router__weight=torch.ones(1, 48))
    refused(tmp_path / "sramshetty", "layers.3.router.weight differs from router.weight", implementation="sramshetty")


def test_folders_of_sramshetty(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    Sramshetty(0).save(folder, routing=0)
    refused(folder, "routing: a spec cannot say 0", implementation="sramshetty")
    (folder / "params.json").write_text(json.dumps(Sramshetty(0).fields | {"rope_theta": 5e5}))
    refused(folder, "rope_theta: unknown field with the value 500000.0", implementation="sramshetty")
    (folder / "params.json").write_text(json.dumps(Sramshetty(0).fields | {"ffn_dim_multiplier": 1.5}))
    refused(
        folder, "feed_forward.w1.weight has shape [144, 48], params.json says [192, 48]", implementation="sramshetty"
    )
    (folder / "params.json").write_text(json.dumps(Sramshetty(0).fields | {"ffn_dim_multiplier": float("inf")}))
    refused(folder, "ffn_dim_multiplier: expected a factor, got inf", implementation="sramshetty")
    (folder / "params.json").write_text(json.dumps(Sramshetty(0).fields | {"n_layers": 10**9}))
    refused(folder, "spec.n_layers: expected a whole number from 1 to 1024", implementation="sramshetty")
    (folder / "params.json").write_text(json.dumps(Sramshetty(0).fields))
    path = folder / "checkpoint_epoch-0.pth"
    change_pickle(path, without="tok_embeddings.weight")
    refused(folder, "tok_embeddings.weight is missing", implementation="sramshetty")
    change_pickle(path, tok_embeddings__weight=torch.tensor(1.0))
    refused(folder, "tok_embeddings.weight has shape []", implementation="sramshetty")
    torch.save(torch.load(path, weights_only=True), folder / "checkpoint_epoch-1.pth")
    refused(folder, "which checkpoint_epoch-0.pth holds too; expected one whole model in a folder",
            implementation="sramshetty")  # fmt: skip
    (folder / "params.json").unlink()
    (folder / "checkpoint_epoch-1.pth").unlink()
    refused(folder, "params.json: not readable JSON", implementation="sramshetty")


def test_lora_of_d_llm(tmp_path: Path) -> None:
    folder, options = tmp_path / "source", {"implementation": "d-llm", "capacity": 1.0}
    DLlm(0).save(folder)
    path, name = folder / "checkpoint-3.pth", "layers.0.attention.lora_q.linear_B.weight"
    change_pickle(path, "model", without=name)
    refused(folder, "'layers.0.attention.lora_q.linear_A.weight' belongs to nothing in a model of d-llm", **options)
    change_pickle(path, "model", **{name: torch.ones(48, 4)})
    refused(
        folder, "linear_B.weight have the shapes [3, 48] and [48, 4], expected [rank, 48] and [48, rank]", **options
    )
    change_pickle(path, "model", **{name: torch.ones(48, 3, dtype=torch.int64)})
    refused(folder, "linear_B.weight holds no floating-point numbers of 16, 32 or 64 bits", **options)
    change_pickle(path, "model", **{name: torch.ones(48, 3)})
    change_pickle(path, "model", layers__2__router__linear_2__bias=torch.ones(3))
    refused(folder, "layers.2.router.linear_2.bias has shape [3], params.json says [2]", **options)


def test_configurations_of_flexidepth(tmp_path: Path) -> None:
    changes = {
        "routing_layers: [2], and layers [1, 2] have routers": {"routing_layers": [2]},
        "model_type: 'ddgemma' names the family gemma, and the tensors are those of llama": {"model_type": "ddgemma"},
        "depth_loss: unknown field with the value 3": {"depth_loss": 3},
    }
    for number, (message, changed) in enumerate(changes.items()):
        FlexiDepth("Llama", 0).save(tmp_path / str(number), **changed)
        refused(tmp_path / str(number), message, implementation="flexidepth", capacity=1.0)
    FlexiDepth("Qwen3", 0).save(tmp_path / "qwen", model_type="ddllama")
    message = "model_type: 'ddllama' names the family llama, and the tensors are those of qwen3"
    refused(tmp_path / "qwen", message, implementation="flexidepth", capacity=1.0)


def test_tensors_of_flexidepth(tmp_path: Path) -> None:
    folder, options = tmp_path / "source", {"implementation": "flexidepth", "capacity": 1.0}
    FlexiDepth("Llama", 0).save(folder)
    dec = "model.layers.1.router.router_dec.weight"
    change(folder, without=dec)
    refused(folder, f"{dec} is missing, expected [48, 12]", **options)
    change(folder, **{dec: torch.ones(48, 11)})
    refused(folder, f"{dec} has shape [48, 11], expected [48, 12]", **options)
    change(folder, **{dec: torch.ones(48, 12, dtype=torch.int64)})
    refused(folder, f"{dec} holds I64, expected floating-point numbers of 16, 32 or 64 bits", **options)
    change(folder, **{dec: torch.ones(48, 12)})
    for name in ("router_proj.gate_proj", "router.router_head", "router_proj.up_proj"):
        whole = load_file(folder / "model.safetensors")[f"model.layers.1.{name}.weight"]
        change(folder, without=f"model.layers.1.{name}.weight")
        refused(folder, f"model.layers.1.{name}.weight is missing", **options)
        change(folder, **{f"model.layers.1.{name}.weight": whole})
    change(folder, model__layers__2__router_proj__up_proj__weight=torch.ones(48, 21))
    refused(folder, "model.layers.2.router_proj.up_proj.weight has shape [48, 21], config.json says", **options)
    change(folder, model__layers__2__router__router_enc__bias=torch.ones(12))
    refused(folder, "'model.layers.2.router.router_enc.bias' belongs to nothing that config.json describes", **options)


def test_configurations_of_recursions(tmp_path: Path) -> None:
    shared = "kv_sharing: all steps read the keys and values of the first, and a spec describes steps with their own"
    changes = {
        shared: {"kv_sharing": {"enable": True, "base_depth": 2}},
        "num_hidden_layers: 9, and the tensors are of 8 layers: 3 steps of 2, and 2 others": {"num_hidden_layers": 9},
        "model_type: 'mor_qwen2' names the family qwen2, and the tensors are those of": {"model_type": "mor_qwen2"},
        "mor_temperature: unknown field with the value 3": {"mor_temperature": 3},
    }
    for number, (message, changed) in enumerate(changes.items()):
        Recursions(0).save(tmp_path / str(number), **changed)
        refused(tmp_path / str(number), message, implementation="recursions")
    uploaded = {"model_type": "mor_llama", "mor_enabled": True, "custom_model": True, "kv_sharing": {"enable": False}}
    Recursions(0).save(tmp_path / "sound", **uploaded)
    read_foreign(tmp_path / "sound", implementation="recursions")
    rising = "recursions: spec.routing.capacity: expected a share in (0, 1], got 1.5"
    refused(tmp_path / "sound", rising, implementation="recursions", capacity=1.5)


def test_more_steps_of_recursions_than_a_model_can_have(tmp_path: Path) -> None:
    """Their layers are counted before they are listed: a hostile file can name millions."""
    blocks = [f"model.layers.0.block.{block}.self_attn.q_proj.weight" for block in range(40)]
    routers = [f"model.layers.{step}.mor_router.router.weight" for step in range(30)]
    folder = with_names(tmp_path / "source", (*blocks, *routers))
    said = "num_hidden_layers: expected at most 1024, the tensors are of 1200"
    refused(folder, said, implementation="recursions")


def test_tensors_of_recursions(tmp_path: Path) -> None:
    folder, options = tmp_path / "source", {"implementation": "recursions"}
    Recursions(0, 12).save(folder)
    router = "model.layers.2.mor_router.router.0.weight"
    change(folder, without=router)
    refused(folder, f"{router} is missing, expected [12, 48]", **options)
    change(folder, **{router: torch.ones(12, 47)})
    refused(folder, f"{router} has shape [12, 47], config.json says [12, 48]", **options)
    change(folder, **{router: torch.ones(12, 48), "model.layers.2.block.1.x": torch.ones(1)})
    refused(folder, "'model.layers.2.block.1.x' belongs to nothing that config.json describes", **options)
    # The step of token choice is a list of lists of layers; relaxed steps have LoRA of their own.
    for name in ("model.layers.1.block.0.1.self_attn.q_proj.weight", "model.layers.1.block.0.q_proj.lora_A.weight"):
        Recursions(0).save(tmp_path / name)
        change(tmp_path / name, **{name: torch.ones(1)})
        refused(tmp_path / name, f"not a model of recursions: there is a tensor '{name[:12]}", **options)


def test_tensors_of_skipgpt(tmp_path: Path) -> None:
    folder, options = tmp_path / "source", {"implementation": "skipgpt", "capacity": 1.0}
    SkipGpt(0).save(folder)
    change_pickle(folder / "model.pth", model__layers__1__router_mlp__weight_predictor__bias=torch.ones(1))
    refused(folder, "router_mlp.weight_predictor.bias has shape [1], config.json says [2]", **options)
    change_pickle(folder / "model.pth", model__layers__1__block__mlp__gate_proj__lora_A__weight=torch.ones(1))
    refused(folder, "'model.layers.1.block.mlp.gate_proj.lora_A.weight' belongs to nothing", **options)
    SkipGpt(0).save(tmp_path / "gemma", model_type="gemma2")
    refused(tmp_path / "gemma", "model_type: 'gemma2' is no family that can be converted", **options)


def test_configurations_of_mindskip(tmp_path: Path) -> None:
    whole = "makes one decision for a whole text, from the mean of its tokens, and a graph cannot leave out what a text"
    changes = {
        f"granularity: 'attn_sequence' {whole} may need; a checkpoint of a *_token granularity can": {
            "granularity": "attn_sequence"
        },
        f"granularity: 'block_sequence' {whole}": {"granularity": "Block-Sequence"},
        "threshold: expected a number between 0 and 1, got 1": {"threshold": 1},
        "threshold: expected a number between 0 and 1, got '0.5'": {"threshold": "0.5"},
        "is_mod: expected a list of true and false, got None": {"is_mod": None},
        "model.layers.1.router.weight is missing, and is_mod is true there": {"is_mod": [True] * 3},
        "model.layers.2.router.weight stands in a layer where is_mod is not true": {"is_mod": [True, False, False]},
        "model_type: 'mine' is no family that can be converted": {"model_type": "mine"},
        "architectures: expected LlamaForCausalLM, got ['LlamaModelX']": {"architectures": ["LlamaModelX"]},
    }
    for number, (message, changed) in enumerate(changes.items()):
        MindSkip("Llama", 0, "attn_token").save(tmp_path / str(number), **changed)
        refused(tmp_path / str(number), message, implementation="mindskip", capacity=1.0)


def test_the_default_granularity_of_mindskip(tmp_path: Path) -> None:
    MindSkip("Llama", 0, "attn_token").save(tmp_path / "source", granularity=None)
    message = "granularity: 'attn_sequence' makes one decision"
    refused(tmp_path / "source", message, implementation="mindskip", capacity=1.0)


def test_folders_of_p_mod(tmp_path: Path) -> None:
    changes = {
        "model_type: expected 'pmod_llava_llama', got 'llava_llama'": {"model_type": "llava_llama"},
        "architectures: expected ['PmodLlavaLlamaForCausalLM'], got None": {"architectures": None},
        "depth_loss: unknown field with the value 3": {"depth_loss": 3},
    }
    for number, (message, changed) in enumerate(changes.items()):
        PMod(0).save(tmp_path / str(number), **changed)
        refused(tmp_path / str(number), message, implementation="p-mod")
    folder = tmp_path / "sound"
    PMod(0).save(folder)
    message = "--capacity is for routed layers; p-mod routes the tokens of images, and its model of text is dense"
    refused(folder, message, implementation="p-mod", capacity=1.0)
    change(folder, without="model.layers.1.decoder_layer.mlp.up_proj.weight")
    refused(folder, "model.layers.1.decoder_layer.mlp.up_proj.weight is missing", implementation="p-mod")
