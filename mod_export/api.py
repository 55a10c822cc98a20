"""`mod_export.build`: the builds of the command line, of a module in this process."""

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
from mod_export.model.request import Request
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
    verbosity: int = 0,
) -> BuildReport:
    """Builds engines of a model, judges them against PyTorch, and measures them.

    Progress is shown on stderr, in a notebook too. What a module computes is captured once for each bucket; afterwards
    the module is as it was.

    Args:
        model: a module, in any mode, on the CPU, of which `inputs` and `buckets` must be given; or what the command
            `mod-export build` takes: a checkpoint, .pt2 files of one model, `my_model.py:make_model`.
        inputs: `inputs(batch, seq)` or `inputs(batch, seq, seed)` gives what `forward` takes: a tensor, a tuple, or a
            dict by name. It is used for capture, parity and timing; for one bucket, the inputs themselves will do.
        buckets: (rows, tokens of a row) of every shape to build.
        baseline: a dense model of the same inputs, which the speed is compared with; as `model`. Without one, latency
            is measured and no speed-up is demanded.
        out: the build folder; build/NAME by default.
        targets: name of a target, or names; by default all that can build on this machine.
        config: a configuration file.
        name: of the model in messages and reports; by default that of the module's class.
        samples: a safetensors file of inputs, for .pt2 files.
        verbosity: -1 shows nothing, 0 stages, 1 every step.

    Returns:
        The report, as in report.json; `report.verdict` sums it up. A gate that is missed is no error, and neither is a
        target, dtype or bucket that could not be built while others were: `report.failed` has it, with the reason.

    Raises:
        ModExportError: as on the command line, with the same messages: a request that cannot be met, or nothing that
            could be built.
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

    def load() -> tuple[Model, Model | None]:
        own, dense = _model(model, inputs, shapes, title, samples, None)
        if baseline is not None:
            dense, _ = _model(baseline, inputs, shapes, f"{title}-dense", None, own)
        return own, dense

    given: dict[str, object] = {"inputs": inputs, "baseline": baseline, "samples": samples, "name": name}
    chosen = {
        "buckets": list(map(tuple, buckets)) or None,
        "out": out,
        "targets": list(names) or None,
        "config": config,
    }
    # Buckets and targets are in the resolved configuration.
    again = {"out": "BUILD", "config": "config.toml"}
    console = Console(stderr=True)
    if console.is_jupyter:  # A block of HTML for every line, or else a live line in control codes.
        console = Console(stderr=True, force_jupyter=False, force_terminal=False)
    with Progress(console, verbosity) as progress:
        return run(load, settings, root, progress, _call(model, given | chosen), rebuild=_call(model, given | again))


def _call(model: object, named: Mapping[str, object]) -> str:
    """The call of `build`, without what was left out."""
    arguments = [f"{key}={_written(value)}" for key, value in named.items() if value is not None]
    return f"mod_export.build({', '.join([_written(model), *arguments])})"


def _written(value: object) -> str:
    """As it stands in code; a module, a function or tensors as the name of what they are."""
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
        return Path(str(model).rpartition(":")[0] or str(model)).stem
    if isinstance(model, (list, tuple)) and model:
        return _name_of(model[0])
    return type(model).__name__


def _model(
    given: torch.nn.Module | str | Path | Sequence[str | Path],
    inputs: Inputs | None,
    buckets: Sequence[Bucket],
    name: str,
    samples: str | Path | None,
    like: Model | None,
) -> tuple[Model, Model | None]:
    import torch

    if not isinstance(given, torch.nn.Module):
        sources = (given,) if isinstance(given, (str, Path)) else tuple(given)
        request = Request(sources=tuple(map(str, sources)), samples=None if samples is None else Path(samples))
        request.check()
        return request.models(buckets, like)

    from mod_export.model.module import model_from_module

    if samples is not None:
        raise UsageError(f"{name}: samples belong to .pt2 files; of a module, inputs(batch, seq, seed) gives several")
    if inputs is None:
        raise UsageError(f"{name}: of a module the inputs must be given: inputs=lambda batch, seq: ...")
    return model_from_module(given, inputs, buckets, name), None
