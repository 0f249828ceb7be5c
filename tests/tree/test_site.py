"""The site: every page has a place in it, no link is dead, and every public name is described."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvweave

yaml = pytest.importorskip("yaml", reason="mkdocs.yml is read by it: pip install 'kvweave[site]'")

ROOT = Path(__file__).resolve().parents[2]
# A picture of one point, as notebooks keep it.
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
TOP = {"README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md"}


class Settings(yaml.SafeLoader):  # type: ignore[misc]
    """Reads mkdocs.yml without making the functions that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def places(nav: Any) -> Iterator[str]:
    """The files that a nav, or a part of it, names."""
    if isinstance(nav, str):
        yield nav
    for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from places(part)


def test_every_page_has_one_place() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Settings)
    named = Counter(places(settings["nav"]))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    books = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert named == Counter(TOP | pages | books)
    assert all((ROOT / name).is_file() for name in set(named) - books)
    assert settings["strict"] is True


def test_it_builds_and_names_what_is_public(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="not installed: pip install 'kvweave[site]'")
    pytest.importorskip("mkdocstrings", reason="not installed: pip install 'kvweave[site]'")
    pytest.importorskip("nbconvert", reason="not installed: pip install 'kvweave[site]'")
    ran = tmp_path / "ran"
    run_by_hand(ran, "reuse_plan", "head_map")
    tmp_path = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "KVWEAVE_NOTEBOOKS": str(ran)}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = "".join(page.read_text("utf-8") for page in tmp_path.glob("docs/api/*/index.html"))
    shown = {name.rsplit(".", 1)[-1] for name in re.findall(r'id="(kvweave\.[\w.]+)"', api)}
    public = {*kvweave.__all__, *kvweave.ops.__all__, *kvweave.runner.__all__}
    modules = {"lab"}  # a folder of folders, of which two have pages
    values = {"__version__"}
    assert public - modules - values <= shown
    # Nothing is fetched from elsewhere when a page is read.
    pages = [page.read_text("utf-8") for page in tmp_path.rglob("*.html")]
    foreign = r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="https?://'
    assert not [found for page in pages for found in re.findall(foreign, page)]
    books = tmp_path / "notebooks"
    assert (books / "reuse_plan.ipynb").is_file()
    shown = (books / "reuse_plan" / "index.html").read_text("utf-8")
    assert '<div class="by-hand">a picture</div>' in shown
    assert "a warning" not in shown
    assert (books / "reuse_plan_files").is_dir()
    # A copy of another text is not this notebook: it is shown as it is stored.
    assert "by-hand" not in (books / "head_map" / "index.html").read_text("utf-8")
    start = (tmp_path / "docs" / "notebook-start" / "index.html").read_text("utf-8")
    assert 'href="../../notebooks/reuse_plan/"' in start


def run_by_hand(folder: Path, name: str, other: str) -> None:
    """A notebook whose first cell showed a picture, HTML and a warning; and one of other text."""
    nbformat = pytest.importorskip("nbformat")
    folder.mkdir()
    book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    cell = next(one for one in book.cells if one.cell_type == "code")
    html = {"text/html": '<div class="by-hand">a picture</div>'}
    cell.outputs = [
        nbformat.v4.new_output("display_data", data=html),
        nbformat.v4.new_output("display_data", data={"image/png": PIXEL}),
        nbformat.v4.new_output("stream", name="stderr", text="a warning"),
    ]
    nbformat.write(book, folder / f"{name}.ipynb")
    nbformat.write(book, folder / f"{other}.ipynb")
