"""The page of models and settings shows what the code does."""

from __future__ import annotations

import re

import pytest

import code_tables
from families import FAMILIES, OTHERS
from kvweave.adapters.vllm.model_names import FAMILIES as SERVED

TEXT = code_tables.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", code_tables.TABLES)
def test_a_table_is_what_the_code_does(name: str) -> None:
    made = code_tables.TABLES[name]()
    assert code_tables.filled(TEXT, name, made) == TEXT, "make tables"


def test_what_is_named_as_a_test_is_one() -> None:
    for path, names in re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:,\s)?)+)", TEXT):
        source = (code_tables.ROOT / path).read_text(encoding="utf-8")
        assert all(f"def {name}(" in source for name in re.findall(r"`(\w+)`", names))


def test_what_is_said_of_an_engine_has_a_test() -> None:
    for pair, named in code_tables.IN_ENGINES.items():
        path, name = named.split("::")
        assert f"def {name}(" in (code_tables.ENGINE / path).read_text(encoding="utf-8"), pair
        assert pair[1] not in code_tables.engine.NOT_BESIDE[pair[0]]


def test_every_family_and_every_class_of_the_plugin_has_its_place() -> None:
    table = TEXT.partition("<!-- families -->")[2].partition("<!-- end")[0]
    rows = re.findall(r"^\| ([\w-]+) \| `(\w+)` ", table, re.MULTILINE)
    assert [name for name, _ in rows] == [*FAMILIES, *OTHERS]
    served = {kind for name, kind in rows if "segments |" in line_of(name)}
    assert served == {f"{family}ForCausalLM" for family in SERVED}


def line_of(name: str) -> str:
    return next(line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))


def test_a_setting_is_refused_the_same_from_either_side() -> None:
    table = TEXT.partition("<!-- together -->\n")[2].partition("<!-- end")[0]
    lines = [line.strip("|").split(" | ") for line in table.strip().splitlines()]
    heads, rows = [cell.strip() for cell in lines[0]], lines[2:]
    cells = {
        (row[0].strip(), heads[at]): row[at].strip() for row in rows for at in range(1, len(row))
    }
    settings = [row[0].strip() for row in rows]
    assert all(cells[a, b] == cells[b, a] for a in settings for b in settings)
    assert set(cells.values()) == {"yes", "–", ""}
