"""Trains a Mixture-of-Depths model: `python -m mod_models.train`, alone or under `torchrun`.

Nothing is downloaded: the text is the standard library, or any folder (`corpus.py`). Every batch is a function of
(seed, step), so a resumed run gets the batches of an uninterrupted run, and two processes get those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch

from mod_models.calibration import LEAST_HIDDEN
from mod_models.checkpoint import ARCHITECTURE, Checkpoint, CheckpointError, ForeignArchitectureError, load_checkpoint
from mod_models.corpus import TOKENIZER, Corpus, keep_tokenizer, read_corpus
from mod_models.declarations import PARTS
from mod_models.evaluation import summary
from mod_models.parallel import PARALLEL, Workers, launched
from mod_models.retrofit import LAYERS, SELECTIONS, layers_of, retrofitted, routed_spec
from mod_models.spec import ModelSpec, SpecError
from mod_models.train_config import DEFAULT_SPEC, TrainConfig, TrainError
from mod_models.train_log import LOGS, Event, Log, show
from mod_models.train_run import Run, fingerprint_of, reproducible


def train(
    spec: ModelSpec,
    config: TrainConfig,
    folder: Path,
    *,
    initial: Checkpoint | None = None,
    corpus: Corpus | None = None,
    workers: Workers | None = None,
    log: str = "csv",
    stop_after: int | None = None,
) -> Iterator[Event]:
    """Trains a model, resumes if `folder` holds a state of the same run, and yields an event after every step.

    Args:
        spec: spec of the model.
        config: settings of the run.
        folder: gets state.pt (to resume), model.pt (float16 weights), log.csv, and the tokenizer of the corpus.
        initial: weights to start from, which fit the spec; None to draw weights from the seed.
        corpus: the text; None for the source of the standard library as bytes.
        workers: the processes of the run, from `launched`; None for this process on the CPU.
        log: `csv`, or `tensorboard` to write the folder `tensorboard` as well.
        stop_after: stop after this step of the run and save the state. A later call continues from there.

    Raises:
        TrainError: the model cannot read these rows, the rows do not divide among the processes, `folder` has the state
            or the log of another run, or the gradient is no longer finite.
        CheckpointError: the state is damaged.
        OSError: `folder` is full or not writable.
    """
    corpus, workers = corpus or read_corpus(), workers or Workers()
    _check(spec, config, corpus, workers, initial)
    identity: dict[str, object] = {"spec": spec.to_dict(), **asdict(config), "data": corpus.fingerprint}
    identity["initial weights"] = None if initial is None else fingerprint_of(initial)
    if not workers.agree(identity):
        raise TrainError(f"{corpus.name}: the processes do not have the same text, or not the same settings")
    if corpus.skipped:
        yield Event(0, config.steps, f"{corpus.name}: {corpus.files} files, {corpus.skipped} skipped as not UTF-8 text")
    with reproducible(workers.device):
        run = Run.start(spec, config, corpus, workers, initial)
        folder.mkdir(parents=True, exist_ok=True)
        if workers.first and corpus.tokenizer is not None:
            keep_tokenizer(corpus.tokenizer, folder)
        first = run.resume(folder, identity)
        if first:
            yield Event(first, config.steps, f"resumed at step {first}")
        log_writer = Log(folder, first, log) if workers.first else None
        try:
            last = min(config.steps, config.steps if stop_after is None else stop_after)
            for done in _steps(run, first, last, log_writer):
                if done.evaluated is not None or done.step == stop_after:
                    run.save(folder, done.step, identity)
                yield from done.events
        finally:
            if log_writer is not None:
                log_writer.close()


class _Done(NamedTuple):
    step: int
    evaluated: dict[str, float] | None
    events: list[Event]


def _steps(run: Run, first: int, last: int, log_writer: Log | None) -> Iterator[_Done]:
    """Runs the steps after `first` up to `last`, and evaluates and logs when due."""
    config = run.config
    begin = time.perf_counter()
    for step in range(first + 1, last + 1):
        trained = run.step(step)
        evaluated = None
        if step % config.eval_every == 0 or step == config.steps:
            run.calibrate()
            evaluated = run.evaluate()
        events = []
        if step % config.log_every == 0 or evaluated is not None:
            numbers, metrics = run.numbers(step, trained)
            if log_writer is not None:
                log_writer.write(step, numbers, metrics, evaluated)
            rate = (step - first) / (time.perf_counter() - begin)
            events.append(_progress(step, config, numbers["train_bits_per_byte"], rate))
        if evaluated is not None:
            events.append(Event(step, config.steps, f"step {step}/{config.steps}  held out: {summary(evaluated)}"))
        yield _Done(step, evaluated, events or [Event(step, config.steps)])


def _progress(step: int, config: TrainConfig, bits: float, rate: float) -> Event:
    brief = f"loss {bits:.3f} bits/byte  {rate * config.batch * config.seq:,.0f} tokens/s"
    left = f"{(config.steps - step) / rate / 60:.0f} min left"
    return Event(step, config.steps, f"step {step}/{config.steps}  {brief}  {left}", brief)


def _check_routing(spec: ModelSpec, config: TrainConfig, given: bool) -> None:
    if spec.routing is not None and spec.routing.selection == "threshold" and config.router_loss == 0:
        raise TrainError(
            "router_loss: where tokens choose (spec.routing.selection=threshold) it is what teaches them how many may, "
            "and it is 0; give --router-loss 0.01"
        )
    if spec.routing is None and (config.train != "all" or config.anneal > 0):
        name = "train" if config.train != "all" else "anneal"
        raise TrainError(f"{name}: {getattr(config, name)} is for models that route, and this one does not")
    if config.anneal > 0 and spec.routing is not None and spec.routing.capacity_rule == "absolute":
        raise TrainError("anneal: lowers a share of the tokens, and spec.routing.capacity_rule is absolute")
    if config.distill > 0 and not (given and spec.routing is not None):
        raise TrainError("distill: the dense model to learn from is the one that --init and --route start from")


def _check_calibration(spec: ModelSpec, workers: Workers) -> None:
    routing = spec.routing
    if routing is None or routing.predictor_hidden < LEAST_HIDDEN or not routing.router.startswith("linear"):
        raise TrainError(
            "calibrate: sets predictors of at least two hidden units to what linear routers say (spec.routing: "
            "predictor_hidden, router=linear), and this model has none"
        )
    if workers.parallel == "fsdp":
        raise TrainError("calibrate: needs whole routers and predictors, and --parallel fsdp cuts them")


def _check(spec: ModelSpec, config: TrainConfig, corpus: Corpus, workers: Workers, initial: Checkpoint | None) -> None:
    if spec.vocab_size < corpus.vocab_size:
        raise TrainError(
            f"spec.vocab_size: the tokens of {corpus.name} need at least {corpus.vocab_size}, got {spec.vocab_size}"
        )
    _check_routing(spec, config, initial is not None)
    if config.calibrate > 0:
        _check_calibration(spec, workers)
    if config.seq > spec.max_positions:
        raise TrainError(f"seq: {config.seq} is more than spec.max_positions {spec.max_positions}")
    shortest = min(len(corpus.train.id_N), len(corpus.held_out.id_N))
    if shortest <= config.seq + 1:
        lengths = f"{len(corpus.train.id_N)} to train on, {len(corpus.held_out.id_N)} held out"
        raise TrainError(f"seq: {config.seq} tokens and the next are too long for {corpus.name} ({lengths})")
    if config.batch % workers.size:
        raise TrainError(f"batch: {config.batch} rows do not divide among {workers.size} processes")
    share = config.batch // workers.size
    if config.micro_batch and share % config.micro_batch:
        raise TrainError(f"micro_batch: {config.micro_batch} does not divide the {share} rows of a process")


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
    group.add_argument("--selection", choices=SELECTIONS, help="what selects once the model is trained (predictor)")


def _initial(options: argparse.Namespace) -> tuple[ModelSpec, Checkpoint | None]:
    """Returns the spec to train, and the checkpoint to start from, if there is one."""
    given = [name for name in ("capacity", "parts", "selection") if getattr(options, name) is not None]
    if options.route is None and given:
        raise TrainError(f"--{given[0]}: is for layers that are to route; name them with --route")
    if options.init is None:
        if options.route is not None:
            raise TrainError("--route: needs the dense model that is to route, --init PATH")
        return options.spec or DEFAULT_SPEC, None
    if options.spec is not None:
        raise TrainError("--spec: the checkpoint of --init has a spec of its own; give one of the two")
    loaded = load_checkpoint(options.init)
    if options.route is None:
        return loaded.spec, loaded
    parts = options.parts or "block"
    layers = layers_of(options.route, loaded.spec.n_layers, parts)
    capacity = 0.5 if options.capacity is None else options.capacity
    spec = routed_spec(loaded.spec, layers, capacity, parts, options.selection or "predictor")
    return spec, retrofitted(loaded, spec, options.seed)


def _run(options: argparse.Namespace, config: TrainConfig, workers: Workers) -> None:
    spec, initial = _initial(options)
    beside = options.init / TOKENIZER if options.init is not None else None
    tokenizer = options.tokenizer or (beside if beside is not None and beside.is_file() else None)
    corpus = read_corpus(options.data, tokenizer)
    events = train(spec, config, options.out, initial=initial, corpus=corpus, workers=workers, log=options.log)
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
