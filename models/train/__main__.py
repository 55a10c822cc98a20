"""Trains a Mixture-of-Depths model: `python -m mod_models.train`, alone or under `torchrun`.

Nothing is downloaded: the text is the standard library, or any folder (`corpus.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from mod_models.checkpoint import ARCHITECTURE, Checkpoint, CheckpointError, ForeignArchitectureError, load_checkpoint
from mod_models.declarations import KEYS_VALUES, PARTS
from mod_models.spec import ModelSpec, SpecError
from mod_models.train import DEFAULT_SPEC, TrainConfig, TrainError
from mod_models.train.corpus import read_corpus, tokenizer_beside
from mod_models.train.log import LOGS, show
from mod_models.train.parallel import PARALLEL, Workers, launched
from mod_models.train.retrofit import (
    ADAPTER_SHARE,
    FITTED,
    LAYERS,
    LEARNED,
    RETROFIT_ADAPTERS,
    RETROFIT_ROUTERS,
    SELECTIONS,
    layers_of,
    retrofitted,
    routed_spec,
    with_predictors,
)
from mod_models.train.run import train


def _read_spec(path: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mod_models.train",
        description="Trains a Mixture-of-Depths model on text: this Python's standard library, or a folder of yours. "
        "Stop it at any time: the same command goes on from the last evaluation.",
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("build/train"),
        metavar="DIR",
        help="folder of model.pt, state.pt and log.csv (%(default)s)",
    )
    add(
        "--spec",
        type=_read_spec,
        metavar="FILE",
        help="the model, as JSON; without it and without --init the model that ships with this package",
    )
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="a folder of text, JSON lines and Parquet, or one such file; without it the source of this Python's "
        "standard library",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json of the package tokenizers; without it the one in the folder of --init, and without "
        "that every byte is a token",
    )
    add(
        "--parallel",
        choices=PARALLEL,
        default="ddp",
        help="under torchrun: every process holds the model (ddp), or a share of it (fsdp) (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (%(default)s)")
    add(
        "--log",
        choices=LOGS,
        default="csv",
        help="log.csv, or tensorboard for TensorBoard's files beside it (%(default)s)",
    )
    add("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 leaves PyTorch's choice")
    _add_retrofit(parser.add_argument_group("from a trained model (docs/training.md)"))
    run = parser.add_argument_group("the run; a resumed one needs the same values")
    for option in fields(TrainConfig):
        flag = {"nargs": "?", "const": option.metadata["const"]} if "const" in option.metadata else {}
        run.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            default=option.default,
            choices=option.metadata.get("choices"),
            metavar=None if "choices" in option.metadata else "N",
            help=f"{option.metadata['help']} (%(default)s)",
            **flag,
        )
    return parser


def _add_retrofit(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--init", type=Path, metavar="PATH", help="a checkpoint to start from: a folder, or model.pt")
    group.add_argument("--route", metavar="LAYERS", help=f"layers of a dense model that are to route: {LAYERS}")
    group.add_argument("--capacity", type=float, metavar="C", help="share of the tokens that they run (0.5)")
    group.add_argument("--parts", choices=PARTS, help="what of them routes (block)")
    group.add_argument(
        "--selection",
        choices=SELECTIONS,
        help="what selects once the model is trained (predictor); without --route, predictor is for a model that "
        "selects by top-k, and adds predictors",
    )
    group.add_argument(
        "--skipped-keys", choices=KEYS_VALUES, help="whether routed attention sees the keys of skipped tokens (absent)"
    )
    group.add_argument(
        "--adapter",
        choices=RETROFIT_ADAPTERS,
        help="what skipped tokens run instead: a linear map, or some neurons of the MLP (gated); both are fitted to "
        "the dense model (none)",
    )
    group.add_argument(
        "--adapter-share",
        type=float,
        metavar="C",
        help=f"share of the MLP's neurons that a gated adapter has ({ADAPTER_SHARE:g})",
    )
    group.add_argument(
        "--routers",
        choices=RETROFIT_ROUTERS,
        help="fitted: select the tokens that adapters approximate worst, by a regression on the dense model; learned: "
        "by gradient, from an arbitrary choice (fitted)",
    )


def _initial(options: argparse.Namespace) -> tuple[ModelSpec, Checkpoint | None]:
    """Returns the spec to train, and the checkpoint to start from, if there is one."""
    names = ("capacity", "parts", "selection", "skipped_keys", "adapter", "adapter_share", "routers")
    routing_options = [name.replace("_", "-") for name in names if getattr(options, name) is not None]
    adds_predictors = options.route is None and options.init is not None and routing_options == ["selection"]
    if options.route is None and routing_options and not adds_predictors:
        raise TrainError(f"--{routing_options[0]}: is for layers that are to route; name them with --route")
    if options.init is None:
        if options.route is not None:
            raise TrainError("--route: needs the dense model that is to route, --init PATH")
        return options.spec or DEFAULT_SPEC, None
    if options.spec is not None:
        raise TrainError("--spec: the checkpoint of --init has a spec of its own; give one of the two")
    loaded = load_checkpoint(options.init)
    if adds_predictors:
        if options.selection != "predictor":
            raise TrainError(
                f"--selection {options.selection}: is for layers that are to route; name them with --route"
            )
        loaded = with_predictors(loaded, options.seed, calibrated=options.calibrate > 0)
    if options.route is None:
        return loaded.spec, loaded
    if options.adapter_share is not None and options.adapter != "gated":
        raise TrainError("--adapter-share: is for --adapter gated; leave it out")
    parts = options.parts or "block"
    layers = layers_of(options.route, loaded.spec.n_layers, parts)
    capacity = 0.5 if options.capacity is None else options.capacity
    spec = routed_spec(
        loaded.spec, layers, capacity, parts, options.selection or "predictor",
        skipped_keys=options.skipped_keys or "absent", adapter=options.adapter or "none",
        adapter_share=ADAPTER_SHARE if options.adapter_share is None else options.adapter_share,
        routers=options.routers or FITTED, calibrated=options.calibrate > 0,
    )  # fmt: skip
    return spec, retrofitted(loaded, spec, options.seed)


def _run(options: argparse.Namespace, config: TrainConfig, workers: Workers) -> None:
    spec, initial = _initial(options)
    beside = tokenizer_beside(options.init) if options.init is not None else None
    corpus = read_corpus(options.data, options.tokenizer or beside)
    fit = options.route is not None and (options.routers != LEARNED or options.adapter not in (None, "none"))
    events = train(spec, config, options.out, initial=initial, corpus=corpus, workers=workers, log=options.log, fit=fit)
    if workers.first:
        show(events)
    else:
        for _ in events:
            pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; 2 if the run cannot start. Fields of TrainConfig are options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    config = {option.name: getattr(options, option.name) for option in fields(TrainConfig)}
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    try:
        with launched(options.parallel, options.device) as workers:
            _run(options, TrainConfig(**config), workers)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last evaluation", file=sys.stderr)
        return 130
    except (TrainError, CheckpointError, SpecError, OSError) as error:
        parser.error(str(error))
    except ForeignArchitectureError as error:
        parser.error(f"{options.init}: holds the architecture {error}, expected {ARCHITECTURE}")
    return 0


if __name__ == "__main__":
    exit_code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Threads of gloo outlive destroy_process_group. If one frees a tensor while Python exits, the process aborts
        # (pytorch/pytorch#179291), and torchrun reports a finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
