"""Lays the site out as the tree is, for mkdocs: links between pages then hold in both.

mkdocs knows one folder of pages; ours are `docs` and the documents of the top level. What pages
link to besides (records, notebooks) is carried along as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\]\(([^)#:]+)\)")


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
    return Files([*theme, *ours])
