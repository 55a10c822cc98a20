"""`mod_export.build`: the build of the command line as a function, also for a module in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mod_export.config import config_from_toml
from mod_export.console import Progress
from mod_export.errors import UsageError
from mod_export.folder.workspace import check_root
from mod_export.model.model import Model
from mod_export.model.request import Request, title_of
from mod_export.pipeline.plan import check_names
from mod_export.types import Bucket

if TYPE_CHECKING:
    import torch

    from mod_export.model.module import Inputs
    from mod_export.rows.report import BuildReport


def build(
    model: torch.nn.Module | str | Path | Sequence[str | Path],
    inputs: Inputs | None = None,
    buckets: Sequence[tuple[int, int]] = (),
    baseline: torch.nn.Module | str | Path | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    targets: str | Sequence[str] = (),
    *,
    config: str | Path | None = None,
    name: str | None = None,
    samples: str | Path | None = None,
    text: str | Path | None = None,
    verbosity: int = 0,
) -> BuildReport:
    """Builds engines of a model, judges them against PyTorch, and measures them.

    Progress is shown on stderr, in a notebook too. The computation of a module is captured once for each bucket, and
    the module is left as it was.

    Args:
        model: a module on the CPU, in any mode, which also needs `inputs` and `buckets`. Or anything that `mod-export
            build` takes: a checkpoint, a model of Hugging Face or its name (hf://ORG/NAME), a GGUF file, .pt2 files of
            one model, `my_model.py:make_model`. A tokenizer is kept if it is in the model's folder or GGUF file, or
            beside model.pt.
        inputs: `inputs(batch, seq)` or `inputs(batch, seq, seed)` returns the arguments of `forward`: a tensor, a
            tuple, or a dict by name. A third parameter with a default gets a seed only if it is called `seed`. The
            arguments are used for capture, parity and timing. For a single bucket, they can be given instead.
        buckets: (rows, tokens of a row) of every shape to build.
        baseline: a dense model with the same inputs, given like `model`, to compare the speed with. Without one,
            latency is measured and no speed-up is demanded.
        out: the build folder; build/NAME by default.
        targets: name of a target, or names; by default all that can build on this machine.
        config: a configuration file.
        name: name of the model in messages and reports; by default the class name of a module, or the stem of a file
            name.
        samples: a safetensors file of inputs, for .pt2 files.
        text: a file of UTF-8 text to judge and time on, for a model with a tokenizer; its first 4 MiB count. By default
            held-out text of the model, or else Python's documentation.
        verbosity: -1 shows nothing, 0 stages, 1 every step.

    Returns:
        The report, as in report.json; `report.verdict` sums it up. A missed gate is not an error. Neither is a target,
        dtype or bucket that could not be built while others were: `report.failed` lists these with the reasons.

    Raises:
        ModExportError: the request cannot be met, or nothing could be built. Messages are those of the command line.
    """
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    overrides = {"targets": names, "buckets": tuple((int(batch), int(seq)) for batch, seq in buckets)}
    settings = config_from_toml(
        None if config is None else Path(config), {key: value for key, value in overrides.items() if value}
    )
    check_names(settings.targets)
    shapes = [Bucket(batch, seq) for batch, seq in settings.buckets]
    title = name or _name_of(model)
    root = Path("build") / title if out is None else Path(out)
    check_root(root)

    from mod_export.pipeline.stages import build as run

    request = _request(model, samples)
    dense_request = None if baseline is None else _request(baseline, None)
    tokenizer, notes = (None, ()) if request is None else request.tokenizer()

    def load() -> tuple[Model, Model | None]:
        if request is None:
            loaded, dense = _captured(model, inputs, shapes, title, samples), None
        else:
            loaded, dense = request.models(shapes)
        if dense_request is not None:
            dense, _ = dense_request.models(shapes, loaded)
        elif baseline is not None:
            dense = _captured(baseline, inputs, shapes, f"{title}-dense", None)
        return loaded, dense

    shared: dict[str, object] = {"inputs": inputs, "baseline": baseline, "samples": samples, "text": text, "name": name}
    called = {
        "buckets": list(overrides["buckets"]) or None,
        "out": out,
        "targets": list(names) or None,
        "config": config,
    }
    # The resolved configuration contains buckets and targets.
    repeat = {"out": "BUILD", "config": "config.toml"}
    console = Console(stderr=True)
    if console.is_jupyter:  # A notebook would show each line as a block of HTML, or a live line as control codes.
        console = Console(stderr=True, force_jupyter=False, force_terminal=False)
    with Progress(console, verbosity) as progress:
        for note in notes if verbosity >= 0 else ():
            console.print(f"note: {note}", highlight=False, markup=False)
        command, again = _call(model, shared | called), _call(model, shared | repeat)
        return run(
            load,
            settings,
            root,
            progress,
            command,
            tokenizer=tokenizer,
            rebuild=again,
            text=None if text is None else Path(text),
        )


def _call(model: object, named: Mapping[str, object]) -> str:
    """Returns the call of `build` as code, without the arguments that were left out."""
    arguments = [f"{key}={_written(value)}" for key, value in named.items() if value is not None]
    return f"mod_export.build({', '.join([_written(model), *arguments])})"


def _written(value: object) -> str:
    """Returns a value as it stands in code. Modules, functions and tensors are replaced by the name of their class or
    function.
    """
    if isinstance(value, (str, Path)):
        return repr(str(value))
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_written, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, int):
        return str(value)
    name = str(getattr(value, "__name__", type(value).__name__))
    return "inputs" if name == "<lambda>" else name


def _name_of(model: object) -> str:
    if isinstance(model, (str, Path)):
        return title_of(model)
    if isinstance(model, (list, tuple)) and model:
        return _name_of(model[0])
    return type(model).__name__


def _request(model: torch.nn.Module | str | Path | Sequence[str | Path], samples: str | Path | None) -> Request | None:
    """Returns the request for a model that is named, fetched if it is on the hub; None for a module."""
    if isinstance(model, (str, Path)):
        sources: Sequence[str | Path] = (model,)
    else:
        import torch

        if isinstance(model, torch.nn.Module):
            return None
        sources = tuple(model)

    from mod_export.model.hub import fetched

    request = Request(
        sources=tuple(fetched(str(source)) for source in sources), samples=None if samples is None else Path(samples)
    )
    request.check()
    return request


def _captured(
    module: object, inputs: Inputs | None, buckets: Sequence[Bucket], name: str, samples: str | Path | None
) -> Model:
    import torch

    from mod_export.model.module import model_from_module

    assert isinstance(module, torch.nn.Module)
    if samples is not None:
        raise UsageError(f"{name}: samples belong to .pt2 files; of a module, inputs(batch, seq, seed) gives several")
    if inputs is None:
        raise UsageError(f"{name}: of a module the inputs must be given: inputs=lambda batch, seq: ...")
    return model_from_module(module, inputs, buckets, name)
