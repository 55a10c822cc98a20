"""What the site shows besides the pages of docs/: the README, the changelog, notebooks and linked source files.

MkDocs calls these functions (`mkdocs.yml`). Pages link to files as they lie in the repository, so that the links also
work where the repository is browsed; here they become links to pages of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside of docs/ that are pages of the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".js": "javascript", ".sh": "bash", ".yaml": "yaml", ".json": "json"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Begins a page that the search does not find."""
EXECUTED = ROOT / "build" / "notebooks"
"""Where `make notebooks` leaves notebooks with their outputs."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Links models/ under the name that it is imported as, which the API reference reads it by."""
    link = ROOT / "build" / "types" / "mod_models"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to("../../models")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside of docs/ that is a page or is linked, each linked folder, and each notebook."""
    given = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in PAGES]
    given += [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    made = {PAGES[path]: text for path, text in given if path in PAGES}
    for path, text in given:
        for target in {_target(path, link) for _, link, _ in LINK.findall(text)} - PAGES.keys():
            if (ROOT / target).is_dir():
                made[_page_of(target)] = _folder_page(target)
            elif not target.startswith(("docs/", "..")) and (ROOT / target).is_file():
                made[_page_of(target)] = _source_page(target)
    for file in files:
        if file.src_uri.endswith(".ipynb"):
            made[_page_of(f"docs/{file.src_uri}")] = _notebook_page(file)
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to pages of the site."""
    shown = page.file.src_uri
    path = next((path for path, name in PAGES.items() if name == shown), f"docs/{shown}")

    def moved(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target = _target(path, link)
        if not (ROOT / target).exists() or target.startswith(".."):
            return match[0]
        return before + posixpath.relpath(_page_of(target), posixpath.dirname(shown) or ".") + after

    return LINK.sub(moved, markdown)


def _target(path: str, link: str) -> str:
    """Returns the file that a link leads to, relative to the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _page_of(path: str) -> str:
    """Returns the page or file of the site that shows this file or folder of the repository."""
    inside = path.startswith("docs/")
    if path in PAGES:
        return PAGES[path]
    if (ROOT / path).is_dir():
        return f"{path.removeprefix('docs/')}/index.md"
    return path.removeprefix("docs/").replace(".ipynb", ".md") if inside else f"source/{path}.md"


def _folder_page(path: str) -> str:
    names = sorted(file.name for file in (ROOT / path).iterdir() if file.is_file())
    return UNSEARCHED + f"# {path}\n\n" + "".join(f"* [{name}]({name})\n" for name in names)


def _source_page(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    content = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return UNSEARCHED + f"# {path}\n\n~~~~~~{language}\n{content}\n~~~~~~\n"


def _notebook_page(file: File) -> str:
    """Returns a notebook as Markdown, with outputs if `make notebooks` has executed it as it is now."""
    name, notebook = posixpath.basename(file.src_uri), json.loads(file.content_string)
    executed = EXECUTED / name
    if executed.exists():
        found = json.loads(executed.read_text(encoding="utf-8"))
        if [cell["source"] for cell in found["cells"]] == [cell["source"] for cell in notebook["cells"]]:
            notebook = found
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"~~~~~~python\n{source}\n~~~~~~")
            parts += [f'<div class="output" markdown>\n~~~~~~text\n{text}\n~~~~~~\n</div>' for text in _outputs(cell)]
        if number == 0:
            parts.append(f'<a href="{name}" download>Download this notebook</a> and run it in Jupyter.')
    return "\n\n".join(parts) + "\n"


def _outputs(cell: dict[str, Any]) -> list[str]:
    """Returns the outputs of a cell as text."""
    found = ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in cell["outputs"]]
    joined = "\n".join(text.rstrip() for text in found if text.strip())
    return [joined] if joined else []
