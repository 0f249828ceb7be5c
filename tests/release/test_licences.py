"""What is bundled may be, and its licences are those in the file that goes with a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import bundled_licences as licences

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")


def test_every_crate_that_is_linked_may_be() -> None:
    crates = licences.bundled()
    assert {"pyo3", "numpy", "serde_json", "faer"} <= {crate.name for crate in crates}
    assert not {"pyo3-macros", "syn", "proptest"} & {crate.name for crate in crates}
    allowed = licences.allowed()
    assert not [crate for crate in crates if not licences.permits(crate.licence, allowed)]


def test_the_file_has_the_licences_of_what_is_linked() -> None:
    assert licences.FILE.read_text(encoding="utf-8") == licences.document(), "make licences"


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("Apache-2.0/MIT", True),
        ("(MIT OR GPL-2.0) AND Zlib", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0 WITH Classpath-exception-2.0", False),
        ("Zlib OR GPL-2.0 AND MIT", True),
        ("MIT OR", False),
        ("(MIT", False),
        ("MIT MIT", False),
        ("", False),
        ("__import__('os')", False),
    ],
)
def test_an_expression_is_met_or_not(expression: str, wanted: bool) -> None:
    allowed = {"MIT", "Zlib", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"}
    assert licences.permits(expression, allowed) is wanted


def test_texts_are_found_by_their_names(tmp_path: Path) -> None:
    names = ("LICENSE-MIT", "license.txt", "UNLICENSE", "COPYING", "NOTICE", "empty-LICENSE")
    for name in names:
        (tmp_path / name).write_text(f"text of {name}\n")
    (tmp_path / "LICENSE-APACHE").write_text("  \n")
    crate = licences.Crate("some", "1.0.0", "MIT", tmp_path)
    assert len(crate.texts()) == 5
