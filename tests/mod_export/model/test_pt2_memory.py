"""A .pt2 cannot demand more memory than it holds data for, and every reader sees the same content in it."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mod_export.errors import CheckpointError
from mod_export.model.operators import is_operator
from mod_export.model.pt2 import read_program

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, WEIGHT = "data/weights/model_weights_config.json", "data/weights/weight_0"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.linear.weight
        self.register_buffer("part", torch.arange(8.0)[4:])
        self.register_buffer("flat", self.linear.weight.detach().t())
        self.register_buffer("none", torch.empty(0, 4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        branch = torch.cond(wanted.sum() > 0, lambda y: y * 2, lambda y: y + 1, (self.linear(x),))
        return self.again(branch) * self.part + x @ self.flat + self.none.sum()


INPUTS = (torch.randn(2, 4), torch.ones(2))


@pytest.fixture(scope="module")
def records() -> dict[str, bytes]:
    """The records of a valid file, by their names below the archive's own folder."""
    torch.manual_seed(0)
    buffer = io.BytesIO()
    # Torch warns about `part`, and writes the whole storage that it is a view of.
    with torch.no_grad(), pytest.warns(UserWarning, match="No complete tensor"):
        torch.export.save(torch.export.export(Tied(), INPUTS), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(path: Path, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"m/{name}", data)
    return path


def test_tensors_are_mapped_as_they_were(tmp_path: Path, records: dict[str, bytes]) -> None:
    torch.manual_seed(0)
    module = Tied()
    program = read_program(written(tmp_path / "m.pt2", records))
    state = program.state_dict
    assert state["linear.weight"].data_ptr() == state["again.weight"].data_ptr() == state["flat"].data_ptr()
    assert state["flat"].stride() == (1, 4)
    assert state["none"].shape == (0, 4)
    with torch.no_grad():
        assert torch.equal(program.module()(*INPUTS), module(*INPUTS))
    assert torch.equal(program.example_inputs[0][0], INPUTS[0])
    before = (tmp_path / "m.pt2").read_bytes()
    with torch.no_grad():
        state["linear.weight"].zero_()
    assert (tmp_path / "m.pt2").read_bytes() == before


def meta(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    """Changes the description of linear.weight, which has 16 numbers."""

    def change(records: dict[str, bytes]) -> None:
        table = json.loads(records[WEIGHTS])
        about = table["config"]["linear.weight"]["tensor_meta"]
        for key, value in changes.items():
            about[key] = [{"as_int": size} for size in value] if isinstance(value, list) else value
        records[WEIGHTS] = json.dumps(table).encode()

    return change


def in_graph(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, bytes]], None]:
    def apply(records: dict[str, bytes]) -> None:
        program = json.loads(records[MODEL])
        change(program["graph_module"]["graph"])
        records[MODEL] = json.dumps(program).encode()

    return apply


def calling(operator: str, place: str = "nodes") -> Callable[[dict[str, Any]], None]:
    """Replaces the operator of the first node, in the graph or in the graph of a branch."""

    def change(graph: dict[str, Any]) -> None:
        if place == "branch":
            call = next(node for node in graph["nodes"] if node["target"].endswith("cond"))
            graph = next(item["arg"]["as_graph"]["graph"] for item in call["inputs"] if "as_graph" in item["arg"])
        graph["nodes"][0]["target"] = f"torch.ops.{operator}"

    return change


def sized(name: str, *sizes: int) -> Callable[[dict[str, Any]], None]:
    def change(graph: dict[str, Any]) -> None:
        graph["tensor_values"][name]["sizes"] = [{"as_int": size} for size in sizes]
        graph["tensor_values"][name]["strides"] = [{"as_int": 1} for _ in sizes]

    return change


def repeated(*times: int) -> Callable[[dict[str, Any]], None]:
    """The first node becomes the input x, repeated this many times along each dimension."""

    def change(graph: dict[str, Any]) -> None:
        node = graph["nodes"][0]
        arguments = [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}]
        arguments += [{"name": "repeats", "arg": {"as_ints": list(times)}, "kind": 1}]
        node.update(target="torch.ops.aten.repeat.default", inputs=arguments)
        sized(node["outputs"][0]["as_tensor"]["name"], *(2 * times[0], 4 * times[1]))(graph)

    return change


def absurd_in_a_branch(graph: dict[str, Any]) -> None:
    """A branch repeats its operand a million times along both dimensions; nothing reads the result."""
    call = next(node for node in graph["nodes"] if node["target"].endswith("cond"))
    graph = next(item["arg"]["as_graph"]["graph"] for item in call["inputs"] if "as_graph" in item["arg"])
    node, name = graph["nodes"][0], graph["inputs"][0]["as_tensor"]["name"]
    large = {**node, "target": "torch.ops.aten.repeat.default", "outputs": [{"as_tensor": {"name": "large"}}]}
    large["inputs"] = [
        {"name": "self", "arg": {"as_tensor": {"name": name}}, "kind": 1},
        {"name": "repeats", "arg": {"as_ints": [10**6, 10**6]}, "kind": 1},
    ]
    graph["tensor_values"]["large"] = dict(graph["tensor_values"][name])
    sized("large", 2 * 10**6, 4 * 10**6)(graph)
    graph["nodes"].insert(0, large)


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def compressed(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


UNSAFE = "its sample inputs are more than plain tensors, and could run code"
REFUSED: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "a larger shape": (meta(sizes=[4, 5]), "linear.weight: has the shape [4, 5] and data for 16 numbers"),
    "a huge shape": (meta(sizes=[2**40, 2**20], strides=[0, 0]), "[1099511627776, 1048576] and data for 16 numbers"),
    "an expanded shape": (meta(sizes=[4, 8], strides=[4, 0]), "and data for 16 numbers; save it with .contiguous()"),
    "strides beyond the end": (meta(strides=[8, 1]), "linear.weight: has the shape [4, 4] and data for 16 numbers"),
    "negative strides": (meta(strides=[-4, 1]), "linear.weight: has the shape [4, 4] at strides [-4, 1]"),
    "a negative size": (meta(sizes=[-4, 4]), "linear.weight: has the shape [-4, 4] at strides"),
    "less strides": (meta(strides=[1]), "linear.weight: has the shape [4, 4] at strides [1]"),
    "an offset": (meta(storage_offset={"as_int": 1}), "linear.weight: has the shape [4, 4] and data for 16 numbers"),
    "a wider dtype": (meta(dtype=8), "linear.weight: has the shape [4, 4] and data for 8 numbers"),
    "another dtype": (
        meta(dtype=4, requires_grad=False), "linear.weight: is int32 [4, 4], and the graph reads float32 [4, 4]"),
    "another shape": (
        meta(sizes=[2, 8], strides=[8, 1]), "linear.weight: is float32 [2, 8], and the graph reads float32 [4, 4]"
    ),
    "no data": (
        lambda records: records.update({WEIGHT: b""}), "linear.weight: has the shape [4, 4] and no data; save it with"
    ),
    "a value of another size": (in_graph(sized("linear_1", 7, 7)), "and the file says float32 [7, 7]"),
    "an absurd value": (in_graph(repeated(10**6, 10**6)), "is float32 [2000000, 4000000], which no machine can hold"),
    "an absurd value in a branch": (
        in_graph(absurd_in_a_branch), "large: is float32 [2000000, 4000000], which no machine can hold"
    ),
    "control characters": (
        in_graph(lambda graph: graph["nodes"][0]["metadata"].update(stack_trace="\x1b[2J")),
        "metadata holds control characters",
    ),
    "compressed samples": (lambda records: records.update({SAMPLES: compressed(records[SAMPLES])}), UNSAFE),
    "expanded samples": (
        lambda records: records.update({SAMPLES: saved(((torch.zeros(1).expand(2, 4), torch.ones(2)), {}))}), UNSAFE
    ),
    "samples elsewhere": (
        lambda records: records.update({SAMPLES: saved(((torch.zeros(2, 4, device="meta"), INPUTS[1]), {}))}), UNSAFE
    ),
    "sparse samples": (
        lambda records: records.update({SAMPLES: saved(((torch.eye(4).to_sparse(), INPUTS[1]), {}))}), UNSAFE
    ),
    "other samples": (
        lambda records: records.update({SAMPLES: saved(((INPUTS[0],), {}))}),
        "its sample inputs are not those of the program (",
    ),
    "another format": (
        lambda records: records.update({"archive_format": b"pt3"}), "archive_format is b'pt3'; expected pt2"
    ),
    "another byte order": (
        lambda records: records.update({"byteorder": b"big"}), "byteorder is b'big'; expected little"
    ),
    **{
        operator: (in_graph(calling(operator, place)), f"calls torch.ops.{operator}, which is no operator")
        for operator, place in {
            "aten.as_strided.default": "nodes", "aten.as_strided_scatter.default": "branch",
            "aten.set_.source_Tensor_storage_offset": "nodes", "aten.resize_.default": "branch",
            "aten.empty_strided.default": "nodes", "aten.new_empty_strided.default": "branch",
            "aten.add.out": "nodes", "aten._nested_view_from_buffer.default": "nodes",
            "aten._sparse_coo_tensor_unsafe.default": "nodes", "aten.segment_reduce.default": "nodes",
            "aten.max_pool2d_with_indices_backward.default": "nodes", "aten._cudnn_init_dropout_state.default": "nodes",
            "aten._flash_attention_forward.default": "nodes", "prims.as_strided.default": "branch",
            "prims.empty_strided.default": "nodes", "aten.tensorboard.default": "nodes",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_in_the_file_is_refused(case: str, records: dict[str, bytes], tmp_path: Path) -> None:
    change, message = REFUSED[case]
    changed = dict(records)
    change(changed)
    with pytest.raises(CheckpointError) as refused:
        read_program(written(tmp_path / "m.pt2", changed))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def twice(path: Path, records: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"m/{MODEL}", b"{}")


def second_folder(path: Path, records: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"other/{MODEL}", b"{}")


def deflated(path: Path, records: dict[str, bytes]) -> None:
    written(path, {**records, WEIGHT: bytes(2**20)}, zipfile.ZIP_DEFLATED)


def in_table(name: str, place: int, form: str, value: int) -> Callable[[Path, dict[str, bytes]], None]:
    """Writes a value into the table of contents, `place` bytes after the start of a record's entry.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.12.
    """

    def change(path: Path, records: dict[str, bytes]) -> None:
        data = bytearray(path.read_bytes())
        entry = data.rindex(f"m/{name}".encode()) - 46
        assert data[entry : entry + 4] == b"PK\1\2"
        struct.pack_into(form, data, entry + place, value)
        path.write_bytes(data)

    return change


def beyond_the_end(path: Path, records: dict[str, bytes]) -> None:
    for place in (20, 24):
        in_table(WEIGHT, place, "<L", 2**30)(path, records)


def sharing(path: Path, records: dict[str, bytes]) -> None:
    """Several records claim the same bytes, the first half of the file."""
    for name in ("data/weights/weight_1", "data/weights/weight_2", "archive_format", "byteorder"):
        in_table(name, 42, "<L", 0)(path, records)
        for place in (20, 24):
            in_table(name, place, "<L", path.stat().st_size // 2)(path, records)


ARCHIVES: dict[str, tuple[Callable[[Path, dict[str, bytes]], None], str]] = {
    "twice": (twice, f"holds {MODEL} twice"),
    "two folders": (second_folder, "not a program of torch.export.save (an archive of several folders)"),
    "compressed": (deflated, "is compressed, which torch.export.save does not do"),
    "another size": (in_table(WEIGHT, 24, "<L", 2**30), f"{WEIGHT} is compressed, which torch.export.save does not do"),
    "beyond the end": (beyond_the_end, f"{WEIGHT} of 1,073,741,824 bytes ends behind the end of the file"),
    "encrypted": (in_table(WEIGHT, 8, "<H", 1), f"{WEIGHT} is encrypted"),
    "elsewhere": (in_table(WEIGHT, 42, "<L", 5), f"{WEIGHT} does not begin where the table of contents says"),
    "at the end": (in_table(WEIGHT, 42, "<L", 2**31), f"{WEIGHT} does not begin where the table of contents says"),
    "sharing": (sharing, "its records share their bytes"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_are_not_as_torch_writes_them(case: str, records: dict[str, bytes], tmp_path: Path) -> None:
    change, message = ARCHIVES[case]
    change(written(tmp_path / "m.pt2", records), records)
    with pytest.raises(CheckpointError) as refused:
        read_program(tmp_path / "m.pt2")
    assert message in str(refused.value)


def test_tensors_at_odd_places_are_read(records: dict[str, bytes], tmp_path: Path) -> None:
    """Torch aligns records, but other writers need not; tensors at any byte are read."""
    for extra in range(5):
        path = written(tmp_path / f"{extra}.pt2", {".data/serialization_id": b"x" * extra, **records})
        torch.manual_seed(0)
        state = Tied().state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in read_program(path).state_dict.items())


def test_what_models_call_is_read() -> None:
    """Every operator of Core ATen is read, except the backward pass, `sym_` operators and a few known ones."""
    refused = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        overload = schema.overload_name or "default"
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None) if namespace == "aten" else None
        if torch.Tag.core in getattr(operator, "tags", ()) and not is_operator(f"torch.ops.aten.{name}.{overload}"):
            refused.add(f"{name}.{overload}")
    known = {
        "_embedding_bag.default", "_local_scalar_dense.default", "_pdist_forward.default", "as_strided.default",
        "atan2.out", "empty_strided.default", "resize_.default",
    }  # fmt: skip
    assert {entry for entry in refused if "backward" not in entry and not entry.startswith("sym_")} == known


@pytest.mark.parametrize("sign", ["and", "or", "xor", "lshift", "rshift"])
def test_what_signs_of_python_call_is_read(sign: str) -> None:
    """`mask & other`, `mask &= other` and similar expressions have their own operators."""
    for name in (f"__{sign}__", f"__i{sign}__"):
        assert is_operator(f"torch.ops.aten.{name}.Tensor")
        assert is_operator(f"torch.ops.aten.{name}.Scalar")
