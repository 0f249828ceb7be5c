"""The page of what goes wrong: each class of ours stands there, and says what the page says."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch

from commands import call
from kvweave import Runner
from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.server.replies import STATUS
from kvweave.errors import KvweaveError
from kvweave.lab.bench.rows import WrongAnswer
from raised_errors import RAISES, WARNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def rows(part: str) -> dict[str, list[str]]:
    """The table between two marks: by class, its example, when it comes and what to do."""
    _, _, rest = PAGE.partition(f"<!-- {part} -->\n")
    lines = [line for line in rest.partition(f"<!-- end of {part} -->")[0].splitlines() if line]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return {name.strip("`"): cells for name, *cells in found}


def public_classes() -> dict[str, set[str]]:
    """Every public class of ours that is an exception, by kind: errors and warnings."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    kinds = {"errors": {"Exception", "BaseException"}, "warnings": {"UserWarning", "Warning"}}
    for known in kinds.values():
        while more := {name for name, of in bases.items() if of & known} - known:
            known |= more
    return {kind: known & set(bases) for kind, known in kinds.items()}


@pytest.mark.parametrize("kind", ["errors", "warnings"])
def test_each_class_stands_there_and_no_other(kind: str) -> None:
    described = rows(kind)
    assert set(described) == public_classes()[kind]
    assert set(described) == set(RAISES if kind == "errors" else WARNS)
    for name, cells in described.items():
        assert len(cells) == 3, name
        assert all(cells), name


def says(example: str, text: str) -> bool:
    """Whether a text is what an example says, with an ellipsis for what varies."""
    fixed = re.split("…", example.strip("`"))
    return re.fullmatch(".*".join(map(re.escape, fixed)), text, re.DOTALL) is not None


@pytest.mark.parametrize("name", RAISES)
def test_an_error_says_what_the_page_says(name: str) -> None:
    if name == "DeviceUnavailable" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises((KvweaveError, WrongAnswer)) as caught:
        RAISES[name]()
    assert type(caught.value).__name__ == name
    assert says(rows("errors")[name][0], str(caught.value)), str(caught.value)


@pytest.mark.parametrize("name", WARNS)
def test_a_warning_says_what_the_page_says(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        WARNS[name]()
    texts = [str(one.message) for one in told if one.category.__name__ == name]
    example = rows("warnings")[name][0]
    assert texts
    assert all(says(example, text) for text in texts), texts


def test_an_example_is_not_matched_by_something_else() -> None:
    assert says("`pool: expected …, got …`", "pool: expected 3 blocks, got 1")
    assert not says("`pool: expected …, got …`", "quota: expected 3 blocks, got 1")
    assert not says("`pool: expected … bytes`", "pool: expected 3 bytes, got 1")


def test_statuses_of_the_server_are_those_of_the_code() -> None:
    said = " ".join(PAGE.partition("vLLM's server answers")[2].partition("\n\n")[0].split())
    for kind, status in STATUS:
        of = next(part for part in re.split(r"(?=\b[45]\d\d for )", said) if kind.__name__ in part)
        assert of.startswith(f"{status} for ")


def test_situations_quote_what_the_code_says() -> None:
    """Each text in code marks that says what was expected is a part of some string of ours."""
    refused = f"vllm: expected version {versions.SUPPORTED[0]}.x …"
    assert refused in PAGE
    table = PAGE.partition("## Situations")[2].partition("## ")[0]
    quoted = [text for text in re.findall(r"`([^`]+)`", table) if "expected" in text]
    quoted.remove(refused)
    quoted += ["no kernels in this build", "torch sees no GPU"]
    assert len(quoted) >= 6
    texts = [text for path in (ROOT / "python").rglob("*.py") for text in strings(path)]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "rust").rglob("src/*.rs")]
    for text in quoted:
        for part in filter(None, (piece.strip(" :") for piece in text.split("…"))):
            assert any(part in found for found in texts), part


def test_commands_and_methods_exist() -> None:
    for words in set(re.findall(r"`kvweave ((?:store )?[a-z-]+)", PAGE)):
        assert call(*words.split(), "--help").exit_code == 0, words
    methods = set(re.findall(r"\brunner\.(\w+)", PAGE)) - {"cache", "tiers"}
    assert methods >= {"serve", "export", "prefill", "delete"}
    assert all(callable(getattr(Runner, name)) for name in methods)


def strings(path: Path) -> list[str]:
    """Texts of a Python file; what varies in one is an ellipsis."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(one, "value", None) for one in node.values]
            found.append("".join(part if isinstance(part, str) else "…" for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
