"""The notebooks run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
SAYS = {
    "own_module": ["module 2: 16 of 64 tokens run", "largest difference from PyTorch:", "no static graph because of"],
    "retrofit": ["routed: ", "times as fast as the dense model", "routed layers ran"],
    "evidence": ["units, 16 allowed", "near-ties", "exit code 4", "weights-float32.data"],
}
"""What the outputs of each notebook must contain."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_links_exist(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert set(SAYS) == {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", "--timeout=600", path.name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / path.name).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", ())]
    for words in SAYS[path.stem]:
        assert words in "\n".join(texts)
