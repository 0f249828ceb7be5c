"""Runs the notebooks for the site, and leaves them with what they showed in build/notebooks."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600


def main() -> None:
    """Each in a kernel of its own, from its first cell to its last; an error of one ends it."""
    into = ROOT / "build" / "notebooks"
    into.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": str(ROOT)}}
        nbclient.NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=where
        ).execute()
        nbformat.write(notebook, into / path.name)


if __name__ == "__main__":
    main()
