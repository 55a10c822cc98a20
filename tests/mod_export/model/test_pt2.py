"""A .pt2 file is read without running code from it, and refused in one sentence where that is impossible."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from mod_export.errors import CheckpointError, ModExportError
from mod_export.model.pt2 import read_program
from mod_export.model.pt2_models import model_from_pt2

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
MUTATIONS = 300


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.topk(self.linear(x)[..., 0], 2).indices
        wide = index[..., None].expand(-1, -1, 4)
        return x.scatter(1, wide, torch.gather(x, 1, wide) * self.scale)


class Runs:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def records(small: nn.Module) -> dict[str, bytes]:
    """The records of a valid file, by their names below the archive's own folder."""
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(small, (torch.randn(2, 8, 4),)), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(path: Path, records: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(f"m/{name}", data)
    return path


def test_a_sound_file_is_the_program(small: nn.Module, records: dict[str, bytes], tmp_path: Path) -> None:
    x = torch.randn(2, 8, 4)
    assert torch.equal(read_program(written(tmp_path / "m.pt2", records)).module()(x), small(x))
    torch.export.save(torch.export.export(small, (x,)), tmp_path / "own.pt2")
    assert torch.equal(read_program(tmp_path / "own.pt2").module()(x), small(x))


class Usual(nn.Module):
    """Has casts, constants, a dictionary of outputs, and operators whose names begin with an underscore."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.where(x > x.amin(-1, keepdim=True), x, -torch.inf).softmax(-1).to(torch.float64)
        return {"a": hidden.float() * nn.functional.one_hot(x.argmax(-1), 4).float(), "b": x.masked_fill(x < 0, 0)}


@pytest.mark.parametrize("decomposed", [False, True])
def test_usual_programs_are_read(decomposed: bool, tmp_path: Path) -> None:
    program = torch.export.export(Usual(), (torch.randn(2, 8, 4),))
    program = program.run_decompositions() if decomposed else program
    torch.export.save(program, tmp_path / "m.pt2")
    x = torch.randn(2, 8, 4)
    outputs, expected = read_program(tmp_path / "m.pt2").module()(x), Usual()(x)
    assert all(torch.equal(outputs[name], expected[name]) for name in ("a", "b"))


def in_json(change: Callable[[Any], object], record: str) -> Callable[[dict[str, bytes], Path], None]:
    def apply(records: dict[str, bytes], canary: Path) -> None:
        data = json.loads(records[record])
        change(data)
        records[record] = json.dumps(data).encode()

    return apply


def nodes(program: dict[str, Any]) -> list[dict[str, Any]]:
    return program["graph_module"]["graph"]["nodes"]


def sample_inputs_that_run(records: dict[str, bytes], canary: Path) -> None:
    buffer = io.BytesIO()
    torch.save(((Runs(canary),), {}), buffer)
    records[SAMPLES] = buffer.getvalue()


def bare_pickle(records: dict[str, bytes], canary: Path) -> None:
    records[SAMPLES] = pickle.dumps(Runs(canary))


def pickled_weight(records: dict[str, bytes], canary: Path) -> None:
    in_json(lambda data: data["config"]["linear.weight"].update(use_pickle=True), WEIGHTS)(records, canary)
    records["data/weights/weight_0"] = records[SAMPLES]


def opaque_object(records: dict[str, bytes], canary: Path) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    records["data/constants/model_constants_config.json"] = json.dumps({"config": {"evil": entry}}).encode()
    records["data/constants/opaque_obj_0"] = pickle.dumps(Runs(canary))


def older_format(records: dict[str, bytes], canary: Path) -> None:
    records["serialized_state_dict.pt"] = pickle.dumps(Runs(canary))


def another_input(name: str) -> Callable[[dict[str, Any]], None]:
    """Adds an input; torch pastes the names of inputs into Python code that it runs."""

    def change(program: dict[str, Any]) -> None:
        graph = program["graph_module"]["graph"]
        graph["tensor_values"][name] = graph["tensor_values"]["x"]
        graph["inputs"].append({"as_tensor": {"name": name}})
        spec = {"user_input": {"arg": {"as_tensor": {"name": name}}}}
        program["graph_module"]["signature"]["input_specs"].append(spec)

    return change


def output_structure(kind: str, context: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the output structure; torch imports the modules that such structures name."""

    def change(program: dict[str, Any]) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, {"type": kind, "context": context, "children_spec": []}])

    return change


def second_model(records: dict[str, bytes], canary: Path) -> None:
    records["models/modelXjson"] = records[MODEL]


def symbol(program: dict[str, Any]) -> None:
    expression = {"as_expr": {"expr_str": "__import__('os').mkdir('x')", "hint": {"as_int": 8}}}
    next(iter(program["graph_module"]["graph"]["tensor_values"].values()))["sizes"][0] = expression


def hidden_symbol(program: dict[str, Any], name: str) -> None:
    """Puts an expression into a value that has the name of a field that is not checked elsewhere."""
    values = program["graph_module"]["graph"]["tensor_values"]
    expression = {"as_expr": {"expr_str": "__import__('os').mkdir('x')", "hint": {"as_int": 8}}}
    values[name] = {**values["x"], "sizes": [expression]}


REFUSED: dict[str, tuple[Callable[[dict[str, bytes], Path], None], str]] = {
    "sample inputs": (sample_inputs_that_run, "its sample inputs are more than plain tensors, and could run code"),
    "bare pickle": (bare_pickle, "its sample inputs are more than plain tensors, and could run code"),
    "pickled weight": (pickled_weight, "linear.weight: an object in place of a raw tensor, which could run code"),
    "opaque object": (opaque_object, "holds data/constants/opaque_obj_0, which is no part of a program"),
    "older format": (older_format, "holds serialized_state_dict.pt, which is no part of a program"),
    "no model": (lambda records, _: records.pop(MODEL), f"holds no {MODEL}; expected an archive of torch.export.save"),
    "a function": (
        in_json(lambda data: nodes(data)[0].update(target="torch.os.system"), MODEL),
        "calls torch.os.system, which is no operator",
    ),
    "an attribute": (
        in_json(lambda data: nodes(data)[0].update(target="torch.ops.aten.__init__.__globals__"), MODEL),
        "calls torch.ops.aten.__init__.__globals__, which is no operator",
    ),
    "a file": (
        in_json(lambda data: nodes(data)[0].update(target="torch.ops.aten.from_file.default"), MODEL),
        "calls torch.ops.aten.from_file.default, which is no operator",
    ),
    "an expression": (in_json(symbol, MODEL), "has a dynamic size, and a k such as int(c * T) was fixed"),
    "a name that is code": (
        in_json(another_input("y=__import__('os').mkdir('x')"), MODEL),
        "y=__import__('os').mkdir('x'): no name of a value",
    ),
    "a name of an argument": (
        in_json(lambda data: nodes(data)[0]["inputs"][0].update(name="x)\nimport os"), MODEL),
        "x)\\nimport os: no name of a value (name)",
    ),
    "an enumeration": (
        in_json(output_structure("builtins.tuple", '{"__enum__": 1, "fqn": "antigravity:E", "name": "A"}'), MODEL),
        "out_spec: more than tuples, lists and dictionaries of tensors",
    ),
    "a default": (
        in_json(output_structure("collections.defaultdict", {"default_factory_module": "antigravity"}), MODEL),
        "out_spec: more than tuples, lists and dictionaries of tensors",
    ),
    "a second model": (second_model, "holds models/modelXjson, which is no part of a program"),
    "a text as input": (
        in_json(lambda data: data["graph_module"]["graph"]["inputs"].append({"as_string": "'+str(1)+'"}), MODEL),
        "'+str(1)+': no name of a value (as_string)",
    ),
    "a weight without a name": (
        in_json(lambda data: data["config"].update({"a\nb": data["config"]["scale"]}), WEIGHTS),
        "a\\nb: not the name of a weight",
    ),
    "an expression of a value called metadata": (
        in_json(lambda data: hidden_symbol(data, "metadata"), MODEL),
        "has a dynamic size, and a k such as int(c * T) was fixed",
    ),
    "an expression of a value called torch_version": (
        in_json(lambda data: hidden_symbol(data, "torch_version"), MODEL),
        "has a dynamic size, and a k such as int(c * T) was fixed",
    ),
    "guards": (
        in_json(lambda data: data.update(guards_code=["__import__('os').mkdir('x')"]), MODEL),
        "has guards, which are Python code; export it at one length",
    ),
    "an object": (
        in_json(lambda data: nodes(data)[0]["inputs"][0].update(arg={"as_custom_obj": {"name": "x"}}), MODEL),
        "uses an object (as_custom_obj) that only Python can restore",
    ),
    "a device": (
        in_json(lambda data: data["config"]["scale"]["tensor_meta"]["device"].update(type="cuda"), WEIGHTS),
        "scale: is on cuda; export the model from the CPU, or move the program",
    ),
    "no data": (
        lambda records, _: records.update({"data/weights/weight_0": b""}),
        "linear.weight: has the shape [4, 4] and no data",
    ),
    "no json": (lambda records, _: records.update({MODEL: b"{"}), "not a program of torch.export.save ("),
    "another operator": (
        in_json(lambda data: nodes(data)[0].update(target="torch.ops.aten.topk.default"), MODEL),
        "torch cannot read this program (",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_run_code_is_refused(case: str, records: dict[str, bytes], tmp_path: Path) -> None:
    change, message = REFUSED[case]
    changed, canary = dict(records), tmp_path / "canary"
    change(changed, canary)
    with pytest.raises(CheckpointError) as refused:
        read_program(written(tmp_path / "m.pt2", changed))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not canary.exists()


def test_a_dynamic_length_is_refused_with_the_line_to_write(small: nn.Module, tmp_path: Path) -> None:
    program = torch.export.export(
        nn.Linear(4, 4), (torch.randn(8, 4),), dynamic_shapes=({0: Dim("T", min=2, max=64)},)
    )  # fmt: skip
    torch.export.save(program, tmp_path / "dynamic.pt2")
    with pytest.raises(
        CheckpointError, match=r"dynamic size, and a k such as int\(c \* T\) was fixed.*without `dynamic"
    ):
        read_program(tmp_path / "dynamic.pt2")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"", "not a program of torch.export.save ("), (b"\x80\x04.", "not a program of torch")],
)
def test_what_is_no_archive(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_program(path)
    assert message in str(refused.value)


def mutated(rng: random.Random, value: Any) -> Any:
    """Replaces one value somewhere in the JSON."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.95:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(rng, value[place]), *value[place + 1 :]]
    return rng.choice([None, -1, 2**70, "", "torch.os.system", [], {}, {"as_int": -5}, True, 1.5, "x" * 1000])


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, MUTATIONS), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_files_that_were_changed_anywhere(seeds: range, records: dict[str, bytes], tmp_path: Path) -> None:
    """A changed file is either read, or refused with an error of one line."""
    messages: list[str] = []
    for seed in seeds:
        rng, changed = random.Random(seed), dict(records)
        name = rng.choice([MODEL, MODEL, MODEL, WEIGHTS, SAMPLES, *records])
        if name.endswith(".json") and rng.random() < 0.8:
            changed[name] = json.dumps(mutated(rng, json.loads(changed[name]))).encode()
        else:
            data = bytearray(changed[name])
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            changed[name] = bytes(data[: rng.choice([len(data), len(data), len(data) // 2])])
        path = written(tmp_path / "m.pt2", changed)
        if rng.random() < 0.2:
            whole = path.read_bytes()
            path.write_bytes(whole[: rng.randrange(len(whole))])
        try:
            model_from_pt2([path])
        except ModExportError as error:
            messages.append(str(error))
    assert len(messages) > len(seeds) / 2
    assert not [message for message in messages if "\n" in message]
