"""Makes the pictures of the README from finished build folders: python -m benchmarks.figures.run [FOLDER] [OUT]

    OUT/report.png     the top of report.html, as a browser shows it; needs Chromium
    OUT/speedup.svg    latency of MoD and of its dense baseline, from FOLDER-timed if that exists

FOLDER is build/demo by default, which `make demo` builds, and OUT is docs/figures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from headless_chromium import BROWSER, NAMES, Chromium

from mod_export.report import render_html
from mod_export.report.pages import light_colours
from mod_export.report.wording import interval_text, ms_text, ratio_text
from mod_export.rows.report import BuildReport, report_from_json

WIDTH, HEIGHT = 1100, 1250
"""Size of the screenshot in pixels."""


def main(folder: Path, out: Path) -> int:
    """Writes both pictures. Without a browser, writes only speedup.svg and returns 2."""
    timed = folder.with_name(f"{folder.name}-timed")
    out.mkdir(parents=True, exist_ok=True)
    speedup_figure(_report(timed if timed.is_dir() else folder), out / "speedup.svg")
    if BROWSER is None:
        print(f"report.png needs a browser: none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 2
    screenshot(_report(folder), out / "report.png")
    return 0


def screenshot(report: BuildReport, path: Path) -> None:
    """Writes the top of the report's page as PNG."""
    # Processes that the browser leaves behind may write to its profile for a moment.
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, Chromium(Path(folder) / "profile") as browser:
        page = Path(folder) / "report.html"
        page.write_text(render_html(report), encoding="utf-8")
        browser.attach()
        browser.open(page, WIDTH, "light")
        browser.screenshot(path, (WIDTH, HEIGHT))


def speedup_figure(report: BuildReport, path: Path) -> None:
    """Draws two bars for each setting, dense above MoD, with the speed-up and its interval beside them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = light_colours()
    median_ms = {(row.target, row.bucket, row.dtype, row.model): row.p50_ms for row in report.latency}
    figure = Figure(figsize=(9, 0.8 + 0.75 * len(report.speedup)), facecolor=colours["card"], layout="constrained")
    axes = figure.subplots()
    largest = max(median_ms.values())
    for index, row in enumerate(report.speedup):
        for kind, offset in (("dense", -0.19), ("mod", 0.19)):
            ms = median_ms[row.target, row.bucket, row.dtype, kind]
            axes.barh(index + offset, ms, 0.36, color=colours[kind])
            axes.text(ms + largest / 100, index + offset, f"{ms_text(ms)} ms", va="center", fontsize=8)
        label = f"{interval_text(row)}\npredicted (FLOPs) {ratio_text(row.predicted_flops)}"
        axes.text(1.13 * largest, index, label, va="center", fontsize=8.5)
    axes.set_yticks(range(len(report.speedup)), [f"{row.target} {row.bucket} {row.dtype}" for row in report.speedup])
    axes.set_xlim(0, 1.45 * largest)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("median latency, ms")
    # The first two patches are one dense and one MoD bar; they represent all others in the legend.
    axes.legend(
        axes.patches[:2], ["dense baseline", "MoD"], loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
    )
    axes.set_title(f"{report.model.name}: speed-up of MoD with its 95 % interval", loc="left", fontsize=10)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mod-export"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _report(folder: Path) -> BuildReport:
    path = folder / "report.json"
    return report_from_json(path.read_text(encoding="utf-8"), str(path))


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [Path("build/demo"), Path("docs/figures")][len(given) :])))
