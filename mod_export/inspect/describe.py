"""Recognises a checkpoint, an ONNX graph, a .pt2 program or a build folder, and describes it as text."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.config import config_from_toml
from mod_export.errors import UsageError
from mod_export.folder.files import check_place, write_whole
from mod_export.folder.manifest import MANIFEST
from mod_export.inspect.layers import layer_lines, layers_of
from mod_export.inspect.page import render_html
from mod_export.inspect.routed_text import lane_lines, routed_text
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.report.tables import table_lines
from mod_export.report.wording import causality_text
from mod_export.rows.cost import CostRow, not_counted_text
from mod_export.types import Bucket

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_COLUMNS = 120


def describe(path: Path, *, text: str | None = None, html: Path | None = None) -> str:
    """Describes a build folder, an ONNX graph, a program of `torch.export.save`, or else a checkpoint.

    Args:
        path: the file or folder.
        text: a text to route, or the name of a file that holds one; only for a checkpoint. The result and the page show
            its routing map. Without it, the page shows that of held-out text.
        html: where to write a page; only for a checkpoint.

    Raises:
        ModExportError: the path is none of these, or it does not support these options.
    """
    folder = (path / MANIFEST).exists()
    if not folder and path.suffix not in (".onnx", ".pt2"):
        return _model(path, text, html)
    if options := _named([("--text", text), ("--html", html)]):
        kind = "a build folder, which report --format html shows" if folder else "a graph"
        raise UsageError(f"{options}: {path} is {kind}; give the checkpoint of a model")
    if path.suffix == ".pt2" and not folder:
        from mod_export.inspect.program import describe_program

        return describe_program(path)
    return _folder(path) if folder else _graph(path)


def _named(options: Sequence[tuple[str, object]]) -> str:
    return ", ".join(name for name, value in options if value is not None)


def _model(path: Path, text: str | None, html: Path | None) -> str:
    if html is not None:
        check_place(html, "--html")  # Before the model is loaded and run.
    model = model_from_checkpoint(path)
    origin, tokens, looks_ahead = model.origin, model.tokens, model.looks_ahead
    about = [
        f"{model.name}  {origin.architecture}  {model.parameters:,} parameters  sha256 {origin.checkpoint_sha256[:16]}",
        "",
        *_spec_lines(model.spec),
        "",
    ]
    layers = None if tokens is None else layers_of(model, config_from_toml(None).bucket_list(tokens.max_positions))
    if layers is None or looks_ahead is None:
        if options := _named([("--text", text), ("--html", html)]):
            raise UsageError(f"{options}: {path} does not declare its layers; build it, and look at its report")
        return "\n".join([*about, "its layers are not declared; build it, and inspect the build folder"]) + "\n"
    routed = None if text is None and html is None else routed_text(model, text)
    lines = [*about, causality_text(looks_ahead), "", *layer_lines(layers)]
    if text is not None:
        lines += ["", *(lane_lines(routed) if routed else ["no routing map: every layer runs every token"])]
    if html is not None:
        write_whole(html, render_html(model, layers, routed), "--html")
    return "\n".join(lines) + "\n"


def _graph(path: Path) -> str:
    from mod_export.graph.nodes import graph_from_file

    model = graph_from_file(path)
    operators = Counter(node.op_type for node in model.graph)
    counts = [[name, str(count)] for name, count in operators.most_common()]
    lines = [
        f"{path.name}  opset {model.opset_imports.get('')}  IR {model.ir_version}  {sum(operators.values())} nodes",
        *(f"in   {value.name} {value.dtype} {value.shape}" for value in model.graph.inputs),
        *(f"out  {value.name} {value.dtype} {value.shape}" for value in model.graph.outputs),
        _cost_line(model),
        "",
        *table_lines(["operator", "count"], counts, numbers_from=1),
    ]
    return "\n".join(lines) + "\n"


def _cost_line(model: ir.Model) -> str:
    """Returns FLOPs and bytes of weights, and names operators that could not be counted: the graph may be any graph."""
    from mod_export.measure.cost import cost_row

    ids = model.graph.inputs[0].shape if model.graph.inputs else None
    if ids is None or len(ids) != 2 or not all(isinstance(size, int) for size in ids):
        return "FLOPs not counted: the first input is not (batch, sequence) of fixed size"
    cost = cost_row(model, "mod", Bucket(*(int(size) for size in ids)))  # type: ignore[arg-type]  # None is symbolic.
    missing = f"; not counted: {not_counted_text(cost.not_counted)}" if cost.not_counted else ""
    return f"{cost.flops:,} FLOPs, {cost.weight_bytes:,} bytes of weights{missing}"


def _folder(path: Path) -> str:
    from mod_export.folder.manifest import open_folder

    manifest = open_folder(path)
    model = manifest.models["mod"]
    dense = {row.bucket: row for row in manifest.cost if row.model == "dense"}
    flops = [[row.bucket, f"{row.flops:,}", *_beside(row, dense)] for row in manifest.cost if row.model == "mod"]
    missing = [
        f"not counted: {row.model} {row.bucket}: {not_counted_text(row.not_counted)}"
        for row in manifest.cost
        if row.not_counted
    ]
    files = [[entry.sha256[:16], f"{entry.bytes:>12,}", name] for name, entry in manifest.files.items()]
    lines = [
        f"{path}  {model.name}  {model.architecture}  every file is as it was built",
        "",
        *_spec_lines(model.spec),
        "",
        *table_lines(["bucket", "FLOPs", *(["dense FLOPs", "ratio"] if dense else [])], flops, numbers_from=1),
        *missing,
        "",
        *table_lines(["sha256", "bytes", "file"], files),
    ]
    return "\n".join(lines) + "\n"


def _beside(row: CostRow, dense: Mapping[str, CostRow]) -> list[str]:
    """Returns cells with the baseline's FLOPs and the ratio, or "-" if unknown; none if there is no dense baseline."""
    if not dense:
        return []
    baseline = dense.get(row.bucket)
    if baseline is None:
        return ["-", "-"]
    is_whole = row.flops and not row.not_counted and not baseline.not_counted
    return [f"{baseline.flops:,}", f"{baseline.flops / row.flops:.2f}x" if is_whole else "-"]


def _spec_lines(spec: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in spec.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in spec.items() if isinstance(value, Mapping)}
    lines = _wrapped("", plain)
    for key, value in nested.items():
        lines += _wrapped(f"{key}: ", value)
    return lines


def _wrapped(start: str, fields: Mapping[str, Any]) -> list[str]:
    """Writes fields side by side, and wraps lines between fields only."""
    text = start + "  ".join(f"{name}={json.dumps(value)}".replace(" ", "\0") for name, value in fields.items())
    lines = textwrap.wrap(
        text, MOST_COLUMNS, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]
