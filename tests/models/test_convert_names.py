"""Weights under the names of a wrapper or of a base model, and shards with and without an index; as in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hugging_face import change_config, made, saved
from safetensors.torch import load_file, save_file
from torch import Tensor

from mod_models.checkpoint import CheckpointError, load_checkpoint
from mod_models.convert import read_foreign
from mod_models.convert.foreign import ForeignModel, write_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def change_tensors(folder: Path, change: Change) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(change(tensors), folder / WEIGHTS)


def beginning(prefix: str) -> Change:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def ids() -> Tensor:
    return torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))


def assert_logits(model: ForeignModel, theirs: torch.nn.Module) -> None:
    with torch.no_grad():
        expected_BSV = theirs(ids()).logits
        (found_BSV,) = model.checkpoint().module()(ids(), torch.tensor([20, 20]))
    assert (found_BSV - expected_BSV).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("prefix", "removed"),
    [
        ("module.", "have the `module.` of a wrapper, which was removed"),
        ("_orig_mod.", "have the `_orig_mod.` of a wrapper, which was removed"),
        ("base_model.model.", "have the `base_model.model.` of a wrapper, which was removed"),
        ("module._orig_mod.", "have the `module.` and `_orig_mod.` of wrappers, which were removed"),
        ("_orig_mod.module.", "have the `_orig_mod.` and `module.` of wrappers, which were removed"),
        ("module.base_model.model.", "have the `module.` and `base_model.model.` of wrappers, which were removed"),
    ],
)
def test_names_of_a_wrapper(prefix: str, removed: str, tmp_path: Path) -> None:
    for name in ("Llama", "Phi-3"):
        source = tmp_path / name
        theirs = saved(name, source)
        change_tensors(source, beginning(prefix))
        found = read_foreign(source)
        assert found.notes == (f"{source}: names of its tensors {removed}",)
        assert_logits(found, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_names_of_wrappers_that_pytorch_writes(tmp_path: Path) -> None:
    """A whole model, and one whose layers are compiled one by one."""
    theirs = saved("Llama", tmp_path / "source")
    layers = made("Llama")
    for number, layer in enumerate(layers.model.layers):
        layers.model.layers[number] = torch.compile(layer)
    for wrapped in (torch.compile(theirs), torch.nn.DataParallel(theirs), layers):
        weights = wrapped.state_dict()
        assert weights.keys() != theirs.state_dict().keys()
        save_file(weights, tmp_path / "source" / WEIGHTS)
        found = read_foreign(tmp_path / "source")
        assert len(found.notes) == 1
        assert_logits(found, theirs)


def test_names_that_become_equal(tmp_path: Path) -> None:
    saved("Llama", tmp_path / "source")
    change_tensors(tmp_path / "source", lambda tensors: {**tensors, "module.model.norm.weight": torch.ones(48)})
    with pytest.raises(CheckpointError) as caught:
        read_foreign(tmp_path / "source")
    found = re.fullmatch(
        r".*/source: '(\S+)' and '(\S+)' both stand for 'model.norm.weight', so it is not known which of them counts; "
        r"save the model again without its wrapper",
        str(caught.value),
    )
    assert found is not None
    assert {*found.groups()} == {"model.norm.weight", "module.model.norm.weight"}


def test_what_is_left_over_has_its_own_name(tmp_path: Path) -> None:
    saved("Llama", tmp_path / "source")
    change_tensors(tmp_path / "source", lambda tensors: beginning("module.")({**tensors, "router.bias": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"source: 'router.bias' belongs to nothing that config.json describes"):
        read_foreign(tmp_path / "source")


@pytest.mark.parametrize("declared", ["LlamaModel", "LlamaForCausalLM", None])
def test_a_base_model_whose_head_is_the_embedding(declared: str | None, tmp_path: Path) -> None:
    saved("SmolLM", tmp_path / "whole").model.save_pretrained(tmp_path / "source")
    assert "embed_tokens.weight" in load_file(tmp_path / "source" / WEIGHTS)
    change_config(tmp_path / "source", architectures=None if declared is None else [declared])
    found = read_foreign(tmp_path / "source")
    added = "names of its tensors are those of a base model, so `model.` was added to them"
    assert found.notes == (f"{tmp_path / 'source'}: {added}",)
    assert_logits(found, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval())
    change_tensors(tmp_path / "source", beginning("module."))
    assert len(read_foreign(tmp_path / "source").notes) == 2


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi-3"])
def test_a_base_model_without_a_head(name: str, tmp_path: Path) -> None:
    """transformers draws a head at random."""
    saved(name, tmp_path / "whole").model.save_pretrained(tmp_path / "source")
    kind = json.loads((tmp_path / "source" / "config.json").read_text())["architectures"][0]
    with pytest.raises(CheckpointError) as caught:
        read_foreign(tmp_path / "source")
    assert str(caught.value) == (
        f"{tmp_path / 'source'}: a base model ({kind}) without lm_head.weight, and tie_word_embeddings is false, so it "
        f"gives no logits; save {kind.replace('Model', 'ForCausalLM')}, the model with its head"
    )


def test_a_model_with_its_head_that_says_it_is_a_base_model(tmp_path: Path) -> None:
    theirs = saved("Llama", tmp_path / "source")
    change_config(tmp_path / "source", architectures=["LlamaModel"])
    found = read_foreign(tmp_path / "source")
    assert found.notes == ()
    assert_logits(found, theirs)


def change_index(folder: Path, **changes: str | None) -> None:
    """Changes entries of the index; one that becomes None is removed. `__` in a name stands for `.`."""
    index = json.loads((folder / INDEX).read_text())
    named = {name.replace("__", "."): shard for name, shard in changes.items()}
    index["weight_map"] = {name: shard for name, shard in {**index["weight_map"], **named}.items() if shard is not None}
    (folder / INDEX).write_text(json.dumps(index))


SHARD = "model-00001-of-00008.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {"model__layers__0__self_attn__rotary_emb__inv_freq": SHARD},
        {"model__layers__0__self_attn__masked_bias": SHARD},
        {"lm_head__weight": SHARD},
        {"model__norm__weight": None},
        {"model__norm__weight": SHARD},
    ],
    ids=["a table of angles", "a mask", "a head that is the embedding", "names too few", "names another shard"],
)
def test_an_index_that_differs_from_its_shards(changes: dict[str, str | None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = saved("SmolLM", source, max_shard_size="60KB")
    assert (source / SHARD).is_file()
    change_index(source, **changes)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert_logits(read_foreign(source), theirs)


def test_derived_tensors_in_a_shard(tmp_path: Path) -> None:
    theirs = saved("SmolLM", tmp_path)
    derived = {f"model.layers.{layer}.self_attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_tensors(tmp_path, lambda tensors: {**tensors, **derived, **angles})
    assert_logits(read_foreign(tmp_path), theirs)


def test_a_tensor_that_only_the_index_names(tmp_path: Path) -> None:
    saved("Llama", tmp_path, max_shard_size="60KB")
    shard = next(path for path in tmp_path.glob("model-*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=r": model.norm.weight is missing, expected \[48\]$"):
        read_foreign(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "pickles"])
def test_shards_without_an_index(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = saved("Llama", source, max_shard_size="60KB")
    (source / INDEX).unlink()
    shards = sorted(source.glob("model-*.safetensors"))
    if form == "pickles":
        for shard in shards:
            torch.save(
                load_file(shard), source / shard.name.replace("model", "pytorch_model").replace("safetensors", "bin")
            )
            shard.unlink()
        shards = sorted(source.glob("pytorch_model-*.bin"))
    assert_logits(read_foreign(source), theirs)
    write_folder(read_foreign(source), tmp_path / "out")
    load_checkpoint(tmp_path / "out")
    lost = [shards[0], shards[3]]
    for shard in lost:
        shard.unlink()
    with pytest.raises(CheckpointError) as caught:
        read_foreign(source)
    assert str(caught.value) == (
        f"{lost[0]}: missing; {shards[1].name} beside it is one of {len(shards)} shards. Also missing: {lost[1].name}"
    )


def test_many_shards_that_are_missing(tmp_path: Path) -> None:
    saved("Llama", tmp_path, max_shard_size="60KB")
    change_index(tmp_path, **{f"a{number:02}": f"other-{number:02}" for number in range(12)})
    with pytest.raises(CheckpointError) as caught:
        read_foreign(tmp_path)
    others = ", ".join(f"other-{number:02}" for number in range(1, 9))
    assert str(caught.value) == (
        f"{tmp_path / 'other-00'}: missing; {INDEX} says that 'a00' is in it. Also missing: {others} and 3 more"
    )


def test_shards_of_two_models(tmp_path: Path) -> None:
    saved("Llama", tmp_path, max_shard_size="60KB")
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read_foreign(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: holds model-00001-of-00002.safetensors and model-00001-of-00005.safetensors, which are shards of "
        "two models"
    )
