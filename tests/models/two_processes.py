"""Program of each of the two processes of test_parallel.py. Arguments: a spec, a config, and a folder for results."""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from mod_models.checkpoint import Checkpoint, random_checkpoint
from mod_models.spec import ModelSpec
from mod_models.train import TrainConfig, TrainError
from mod_models.train.corpus import read_corpus
from mod_models.train.parallel import Workers, launched
from mod_models.train.retrofit import retrofitted, routed_spec
from mod_models.train.run import Run, train


def message(spec: ModelSpec, config: TrainConfig, folder: Path, workers: Workers, **options: object) -> str:
    try:
        list(train(spec, config, folder, workers=workers, **options))
    except TrainError as error:
        return str(error)
    return ""


def retrofit(spec: ModelSpec, config: TrainConfig) -> tuple[Checkpoint, TrainConfig]:
    """Returns a dense model with routing, and settings that freeze, distil, anneal and recompute layers."""
    dense = random_checkpoint(dataclasses.replace(spec, routing=None), 3)
    routed = retrofitted(dense, routed_spec(dense.spec, (1, 2), 0.5, "mlp", "predictor"), 0)
    settings = {"train": "routed", "distill": 0.5, "anneal": 0.5, "recompute": "layers", "router_learning_rate": 1e-3}
    return routed, dataclasses.replace(config, **settings)


def routers_alone(spec: ModelSpec, config: TrainConfig) -> tuple[Checkpoint, TrainConfig]:
    """Returns a dense model with routing by a threshold, and settings with which only the router loss has a gradient in
    its layers, which are recomputed.
    """
    dense = random_checkpoint(dataclasses.replace(spec, routing=None), 3)
    routed = retrofitted(dense, routed_spec(dense.spec, (1, 2), 0.5, "mlp", "threshold", routers="fitted"), 0)
    return routed, dataclasses.replace(config, train="routers", recompute="layers", steps=3, eval_every=2)


def main(spec_file: str, config_file: str, out: str) -> None:
    spec = ModelSpec.from_dict(json.loads(Path(spec_file).read_text()))
    config = TrainConfig(**json.loads(Path(config_file).read_text()))
    folder = Path(out)
    torch.set_num_threads(1)
    with launched("ddp", "cpu") as ddp:
        fsdp = dataclasses.replace(ddp, parallel="fsdp")
        for workers in (ddp, fsdp):
            list(train(spec, config, folder / workers.parallel, workers=workers))
        # Two processes with a share each stop half-way; one process with everything continues.
        list(train(spec, config, folder / "fsdp-half", workers=fsdp, stop_after=7))
        # One process stopped half-way; two processes continue.
        list(train(spec, config, folder / "one-half", workers=fsdp))
        list(train(spec, dataclasses.replace(config, precision="bfloat16"), folder / "bfloat16", workers=fsdp))
        rows_alone = dataclasses.replace(config, micro_batch=1)
        for workers in (ddp, fsdp):
            list(train(spec, rows_alone, folder / f"rows-alone-{workers.parallel}", workers=workers))
        # Starts from a dense model, with all options of a retrofit; the teacher is sharded too.
        begin, settings = retrofit(spec, config)
        for workers in (ddp, fsdp):
            list(train(begin.spec, settings, folder / f"retrofit-{workers.parallel}", initial=begin, workers=workers))
        begin, settings = routers_alone(spec, config)
        list(train(begin.spec, settings, folder / "routers-alone", initial=begin, workers=fsdp))
        own_text = folder / f"text-{ddp.rank}.txt"
        own_text.write_text(f"process {ddp.rank} " * 100)
        refused = {
            "odd": message(spec, dataclasses.replace(config, batch=3), folder / "odd", ddp),
            "text": message(spec, config, folder / "text", ddp, corpus=read_corpus(own_text)),
            # As on machines without a shared disk, only the first process finds its state.
            "state": message(spec, config, folder / ("fsdp" if ddp.first else "elsewhere"), ddp),
        }
        parameters = Run.start(spec, config, read_corpus(), fsdp).model.parameters()
        (folder / f"held-{ddp.rank}.json").write_text(json.dumps([p.to_local().numel() for p in parameters]))
        (folder / f"refused-{ddp.rank}.json").write_text(json.dumps(refused))


if __name__ == "__main__":
    main(*sys.argv[1:])
