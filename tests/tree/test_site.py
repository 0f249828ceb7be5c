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
    assert named == Counter(TOP | pages)
    assert all((ROOT / name).is_file() for name in named)
    assert settings["strict"] is True


def test_it_builds_and_names_what_is_public(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="not installed: pip install 'kvweave[site]'")
    pytest.importorskip("mkdocstrings", reason="not installed: pip install 'kvweave[site]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
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
    assert (tmp_path / "notebooks" / "reuse_plan.ipynb").is_file()
