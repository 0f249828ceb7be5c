"""Lays the site out as the tree is, for mkdocs: links between pages then hold in both.

mkdocs knows one folder of pages; ours are `docs` and the documents of the top level. A notebook
becomes a page too, with what it showed where `make site` has run it. What pages link to besides
(records, the notebooks themselves) is carried along as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\]\(([^)#:]+)\)")
NOTEBOOK = re.compile(r"(\]\([^)#:]*\bnotebooks/\w+)\.ipynb\)")
RUN = Path(os.environ.get("KVWEAVE_NOTEBOOKS", ROOT / "build" / "notebooks"))
"""Where `docs/run_notebooks.py` leaves notebooks with what they showed."""


def pages() -> list[Path]:
    """The pages of the site: those of the top level, and all in `docs`."""
    return [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]


def carried() -> list[Path]:
    """Files that pages link to and that are no pages themselves; none from outside the tree."""
    found = {
        (page.parent / link).resolve()
        for page in pages()
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    files = {path for path in found if path.is_file() and path.is_relative_to(ROOT)}
    return sorted(files - set(pages()))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what mkdocs found in `docs` by the tree's pages, at their places in the tree."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [
        File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, True)
        for path in (*pages(), *carried())
    ]
    shown = [
        File.generated(config, name, content=content)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for name, content in shown_notebook(path)
    ]
    return Files([*theme, *ours, *shown])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has links to a notebook lead to its page."""
    return NOTEBOOK.sub(r"\1.md)", markdown)


def shown_notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook's page and its pictures: their places in the site, and what is in them."""
    notebook = as_it_ran(path)
    for cell in notebook.cells:
        # Warnings name files of whoever ran it.
        kept = [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
        cell.update({"outputs": kept} if "outputs" in cell else {})
    about = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources=about)
    title, _, rest = text.lstrip().partition("\n")
    yield f"notebooks/{path.stem}.md", f"{title}\n\n[{path.name}]({path.name})\n{rest}"
    for name, content in resources["outputs"].items():
        yield f"notebooks/{name}", content


def as_it_ran(path: Path) -> Any:
    """The notebook with what it showed; as it is stored, where it was not run since it changed."""
    stored: Any = nbformat.read(path, as_version=4)
    ran = RUN / path.name
    if not ran.is_file():
        return stored
    found: Any = nbformat.read(ran, as_version=4)
    same = [cell.source for cell in found.cells] == [cell.source for cell in stored.cells]
    return found if same else stored
