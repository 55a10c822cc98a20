"""The surface: the cost of importing, public names, exit codes of errors, and shared values."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import mod_export
from mod_export import errors
from mod_export.types import Availability, Bucket, Engine, Setting

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "polygraphy", "tensorrt", "tensorrt_rtx", "numpy")


NOT_NUMPY = (*HEAVY[:-1], "tokenizers", "mod_models")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [(("cli", "errors"), HEAVY), (("runtime.deployment", "runtime.generator"), NOT_NUMPY)],
    ids=["cli", "runtime"],
)
def test_importing_loads_nothing_heavy(modules: tuple[str, ...], absent: tuple[str, ...]) -> None:
    imports = "; ".join(f"import mod_export.{module}" for module in modules)
    code = f"{imports}; import sys; print(*(name for name in {absent} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_public_names() -> None:
    names = ["Deployment", "Generator", "ModExportError", "__version__", "build", "load", "load_generator"]
    assert mod_export.__all__ == [*names, "mark_selection"]
    assert all(getattr(mod_export, name) for name in mod_export.__all__)
    with pytest.raises(AttributeError, match="module 'mod_export' has no attribute 'nonsense'"):
        _ = mod_export.nonsense


def test_every_error_has_an_exit_code_and_stands_in_the_tree() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.ModExportError)]
    assert {one.__name__ for one in classes} == set(errors.__all__)
    for one in classes:
        assert one.exit_code in (2, 3)
        assert one.__name__ in str(errors.__doc__)


RTX = Availability(builds=True, runs=True, reason="TensorRT-RTX", arch="sm89")


def engine(arch: str | None) -> Engine:
    return Engine(target="t", model="mod", bucket=Bucket(1, 8), dtype="float16", path="p", arch=arch)


def test_which_engines_run_here() -> None:
    assert [RTX.can_run(engine(arch)) for arch in (None, "sm89", "sm120")] == [True, True, False]
    assert RTX.refusal([engine("sm86"), engine("sm120")]) == "built for sm86, sm120, and the GPU here is sm89"
    assert RTX.refusal([engine("sm86"), engine("sm89")]) == ""
    absent = Availability(builds=True, runs=False, reason="no CUDA device")
    assert not absent.can_run(engine(None))
    assert absent.refusal([engine("sm89")]) == "no CUDA device"


def test_stem_of_an_engine() -> None:
    engine = Engine(target="tensorrt", model="mod", bucket=Bucket(1, 512), dtype="float16", path="p", arch="sm89")
    assert engine.stem == "mod-b1s512-float16-sm89"
    step = Setting(target="ort-cpu", dtype="float32", model="dense", role="decode", bucket=Bucket(2, 64))
    assert step.name == "dense-decode-b2s64-float32"
    assert (str(step), str(engine.setting)) == ("ort-cpu decode b2s64 float32", "tensorrt b1s512 float16")
    assert step.of("mod").model == "mod"
