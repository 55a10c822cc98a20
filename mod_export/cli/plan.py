"""The command that predicts what routing gains, before anything is trained: plan."""

from __future__ import annotations

from pathlib import Path

import click

from mod_export.cli.boundary import SOURCE, command


class Numbers(click.ParamType):  # type: ignore[type-arg]  # It has a parameter since click 8.4 only.
    """Whole numbers of at least 1, with commas between them."""

    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = tuple(int(item) if item.isdecimal() else 0 for item in str(value).split(","))
        if not all(numbers):
            self.fail(f"expected whole numbers of at least 1 with commas between them, got {value!r}", param, ctx)
        return numbers


@click.command()
@click.argument("source", metavar="MODEL|CONFIG.json", type=SOURCE)
@click.option(
    "--prompt", metavar="N", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of a prompt."
)
@click.option(
    "--rows",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Prompts that are read at once.",
)
@click.option(
    "--texts",
    metavar="N,N,...",
    type=Numbers(),
    default="1,8,32",
    show_default=True,
    help="Texts that are written at once.",
)
@click.option("--length", metavar="N", type=click.IntRange(min=1), help="Tokens of a text; default: twice the prompt.")
@click.option(
    "--machine",
    metavar="NAME",
    default="this",
    show_default=True,
    help="this, whose rates are measured on one thread in float32, or the data sheet of h100, a100, rtx4090.",
)
@click.option("--tflops", type=click.FloatRange(min=0, min_open=True), help="TFLOP/s of another machine.")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), help="GB/s of its memory.")
@click.option(
    "--weight-bytes",
    type=click.FloatRange(min=0, min_open=True),
    help="Bytes of a weight on it; default: those of the named machine, or 2.",
)
@command
def plan(
    source: str,
    prompt: int,
    rows: int,
    texts: tuple[int, ...],
    length: int | None,
    machine: str,
    tflops: float | None,
    bandwidth: float | None,
    weight_bytes: float | None,
    verbosity: int,
) -> int:
    """Predict what routing would gain on a machine, before anything is trained or built.

    MODEL is a checkpoint, or a model that `convert` takes; CONFIG.json is the config.json of a model of the hub, whose
    weights are not needed. For a dense model, several ways to route it are compared.
    """
    from mod_export.inspect.gains import gain_lines
    from mod_export.measure.gain import machine_of
    from mod_export.model.checkpoint import model_from_checkpoint, model_from_outline
    from mod_export.model.hub import fetched

    path = Path(fetched(source))
    model = model_from_outline(path) if path.suffix == ".json" else model_from_checkpoint(path)
    roof = machine_of(machine, tflops, bandwidth, weight_bytes)
    click.echo("\n".join(gain_lines(model, roof, rows, prompt, length or 2 * prompt, texts)))
    return 0
