"""Style as a test: each rule holds for the tree, and is shown to fail on a planted sample."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tidy_circles
import tidy_imports
import tidy_ops
import tidy_text

Rule = Callable[[Path], list[str]]
ROOT = Path(__file__).resolve().parents[2]

LONG_PY = "def long():\n" + "    x = 1\n" * 70
LONG_RS = "pub fn long(\n    a: u32,\n) -> u32 {\n" + "    let x = a;\n" * 68 + "}\n"
# A second file of a sample, at the path that the comment names.
BESIDE = re.compile(r"^(?://|#) beside: (\S+)\n", re.MULTILINE)
LONG_METHOD = "impl A {\n    fn long(&self) {\n" + "        x();\n" * 69 + "    }\n}\n"

# rule, the path of the bad sample, its text, what the complaint must say
PLANTED: list[tuple[Rule, str, str, str]] = [
    (tidy_text.long_lines, "rust/core/src/a.rs", "//" + "x" * 99, "a.rs:1: 101 characters"),
    (tidy_text.long_files, "python/a.py", "x = 1\n" * 501, "a.py:1: 501 lines"),
    (tidy_text.long_functions, "python/a.py", LONG_PY, "`long` has 71 lines"),
    (tidy_text.long_functions, "rust/core/src/a.rs", LONG_RS, "`long` has 72 lines"),
    (tidy_text.long_functions, "rust/core/src/a.rs", LONG_METHOD, "`long` has 71 lines"),
    (tidy_text.banned_names, "python/kvweave/cache_utils.py", "", "`cache_utils`"),
    (tidy_text.banned_names, "rust/core/tests/common/mod.rs", "", "`common`"),
    (tidy_text.banned_names, "csrc/copy_v2.cu", "", "`copy_v2`"),
    (tidy_text.banned_names, "rust/core/src/a.rs", "pub fn plan_v2() {}", "`plan_v2`"),
    (tidy_text.banned_tokens, "rust/core/src/a.rs", "fn f() { todo!() }", "`todo!`"),
    (tidy_text.banned_tokens, "rust/core/src/a.rs", "fn f() { unimplemented!() }", "unimpl"),
    (tidy_text.banned_tokens, "rust/core/src/a.rs", "#[allow(dead_code)]", "`#[allow`"),
    (tidy_text.banned_tokens, "rust/core/src/a.rs", "#![allow(dead_code)]", "`#![allow`"),
    (tidy_text.banned_tokens, "rust/core/src/a.rs", "// FIXME later", "`FIXME`"),
    (tidy_text.banned_tokens, "python/a.py", "raise NotImplementedError", "NotImplemented"),
    (tidy_text.banned_tokens, "tests/test_a.py", "    assert True", "`assert True`"),
    (tidy_text.banned_tokens, "tests/test_a.py", "    pytest.skip()", "`pytest.skip()`"),
    (tidy_text.banned_tokens, "tests/test_a.py", "@pytest.mark.skip", "`mark.skip`"),
    (tidy_text.banned_tokens, "tests/test_a.py", "@pytest.mark.xfail(strict=True)", "mark.xfail"),
    (tidy_text.banned_tokens, "python/a.py", "x = f()  # type: ignore", "# type: ignore"),
    (tidy_text.banned_tokens, "csrc/a.cu", "  exit(1);", "`exit(`"),
    (tidy_text.commented_out_code, "rust/core/src/a.rs", "    // let x = f();", "a.rs:1"),
    (tidy_text.machine_paths, "benchmarks/a.py", 'open("/home/' + 'me/x")', "a path of one"),
    (tidy_text.machine_paths, "README.md", "see `/tmp/" + "x`", "README.md:1"),
    (tidy_text.registry_hosts, "README.md", "from pypi" + ".org", "a host name"),
    (tidy_text.ticket_numbers, "DESIGN.md", "as in issue" + " 12", "a ticket number"),
    (tidy_text.titles, "README.md", "# One\n\n# Two\n", "2 titles"),
    (tidy_text.titles, "README.md", "no title\n```\n# a comment\n```\n", "0 titles"),
    (tidy_text.readme_commands, "README.md", "```sh\nmake demo\n```\n", "`make test`"),
    (
        tidy_text.readme_commands,
        "README.md",
        "```\nmake test\n```\n```\nmake demo\n```",
        "`make demo`",
    ),
    (tidy_text.top_level, "setup.py", "", "setup.py"),
    (tidy_imports.crate_direction, "rust/core/src/a.rs", "use kvweave_cpu::f;", "`cpu`"),
    (tidy_imports.crate_direction, "rust/cpu/src/a.rs", "kvweave_reference::f()", "reference"),
    (tidy_imports.crate_direction, "rust/extra/src/lib.rs", "", "`extra` has no place"),
    (tidy_imports.core_layers, "rust/core/src/pool/a.rs", "use crate::cache::C;", "`cache`"),
    (tidy_imports.core_layers, "rust/core/src/content.rs", "use crate::plan::P;", "`plan`"),
    (tidy_imports.core_layers, "rust/core/src/extra.rs", "", "`extra` has no layer"),
    (tidy_imports.safe_crates, "rust/core/src/lib.rs", "//! Core.", "forbid(unsafe_code)"),
    (tidy_imports.kernel_includes, "csrc/a.cu", "#include <torch/all.h>", "`torch`"),
    (tidy_imports.kernel_includes, "csrc/a.cuh", '#include "b.cu"', "b.cu"),
    (tidy_imports.unused_rust, "rust/core/src/orphan.rs", "", "no `mod orphan`"),
    (tidy_imports.unused_rust, "rust/core/src/orphan/mod.rs", "", "no `mod orphan`"),
    (tidy_imports.unused_kernels, "csrc/orphan.cuh", "", "nothing includes"),
    (tidy_imports.unused_kernels, "csrc/orphan.cu", "", "nothing launches"),
    (tidy_imports.python_layers, "python/kvweave/ops.py", "from .runner import R", "`runner`"),
    (tidy_imports.python_layers, "python/kvweave/ops.py", "import kvweave.plan", "`plan`"),
    (tidy_imports.python_layers, "python/kvweave/runner/a.py", "from ..lab import x", "`lab`"),
    (tidy_imports.python_layers, "python/kvweave/extra.py", "", "`extra` has no layer"),
    (tidy_imports.heavy_imports, "python/kvweave/cache.py", "import torch", "`torch`"),
    (tidy_imports.heavy_imports, "python/kvweave/ops.py", "import transformers", "`transf"),
    (tidy_imports.unused_python, "python/kvweave/orphan.py", "", "nothing imports it"),
    (tidy_imports.unused_python, "benchmarks/orphan.py", "", "nothing imports it"),
    (
        tidy_circles.rust_circles,
        "rust/core/src/a.rs",
        "use crate::b::{B, C as D};\n// beside: rust/core/src/b.rs\nfn b() { super::a::a() }\n",
        "a.rs → rust/core/src/b.rs → rust/core/src/a.rs",
    ),
    (
        tidy_circles.rust_circles,
        "rust/core/src/a/b.rs",
        "use super::{Own, c};\n// beside: rust/core/src/a/mod.rs\n"
        "mod b;\nmod c;\npub use c::C;\nstruct Own;\nfn own() { b::b() }\n",
        "a/b.rs → rust/core/src/a/mod.rs → rust/core/src/a/b.rs",
    ),
    (
        tidy_circles.python_circles,
        "python/kvweave/a.py",
        "from .b import B\n# beside: python/kvweave/b.py\ndef b():\n    from . import a\n",
        "a.py → python/kvweave/b.py → python/kvweave/a.py",
    ),
    (
        tidy_circles.python_circles,
        "python/kvweave/a/b.py",
        "from . import own\n# beside: python/kvweave/a/__init__.py\nfrom .b import b\nown = b\n",
        "a/__init__.py → python/kvweave/a/b.py → python/kvweave/a/__init__.py",
    ),
    (
        tidy_ops.scattered_ops,
        "rust/python/src/ops/cpu/a.rs",
        "#[pyfunction]\nfn a() {}\n"
        + "".join(f"// beside: {home.format('a')}\n" for home in tidy_ops.HOMES[:-1]),
        "no csrc/a.cu",
    ),
]
RULES = list(dict.fromkeys(rule for rule, *_ in PLANTED))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps(rule: Rule) -> None:
    complaints = rule(ROOT)
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "text", "says"), PLANTED)
def test_rule_sees_a_bad_sample(
    rule: Rule, path: str, text: str, says: str, tmp_path: Path
) -> None:
    first, *others = BESIDE.split(text)
    for at, content in [(path, first), *zip(others[::2], others[1::2], strict=True)]:
        sample = tmp_path / at
        sample.parent.mkdir(parents=True, exist_ok=True)
        sample.write_text(content)
    complaints = rule(tmp_path)
    assert len(complaints) == 1, complaints
    assert says in complaints[0]


def test_every_rule_is_planted() -> None:
    public = {
        value
        for module in (tidy_text, tidy_imports, tidy_circles, tidy_ops)
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
        and getattr(value, "__annotations__", {}) == {"root": Path, "return": list[str]}
    }
    assert public == set(RULES)


def test_a_folder_that_only_gathers_names_is_in_no_circle(tmp_path: Path) -> None:
    for path, text in {
        "rust/core/src/a/mod.rs": "mod b;\nmod c;\npub use b::B;\npub use c::C;\n",
        "rust/core/src/a/b.rs": "use crate::a::C;\npub struct B(C);\n",
        "rust/core/src/a/c.rs": "//! See `super::B`.\npub struct C;\n",
        "python/kvweave/a/__init__.py": "from .b import B\nfrom .c import C\n",
        "python/kvweave/a/b.py": "from . import C\nclass B(C): ...\n",
        "python/kvweave/a/c.py": "class C: ...\n",
    }.items():
        sample = tmp_path / path
        sample.parent.mkdir(parents=True, exist_ok=True)
        sample.write_text(text)
    assert tidy_circles.rust_circles(tmp_path) == []
    assert tidy_circles.python_circles(tmp_path) == []


def test_a_reason_on_the_first_line_lifts_length(tmp_path: Path) -> None:
    sample = tmp_path / "a.py"
    sample.write_text("# long because one table of cases\n" + LONG_PY + "x = 1\n" * 500)
    assert tidy_text.long_functions(tmp_path) == []
    assert tidy_text.long_files(tmp_path) == []
    sample.write_text("# long because yes\n" + LONG_PY)
    assert len(tidy_text.long_functions(tmp_path)) == 1


def test_short_functions_beside_each_other_are_not_one(tmp_path: Path) -> None:
    sample = tmp_path / "a.rs"
    sample.write_text("fn one() {\n    x();\n}\n\nfn two() -> u8 { 1 }\n\n" * 40)
    assert tidy_text.long_functions(tmp_path) == []


def test_importing_kvweave_imports_no_framework() -> None:
    code = (
        "import sys, kvweave; "
        f"found = sorted({tidy_imports.HEAVY!r} & set(sys.modules)); "
        "sys.exit(f'import kvweave imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
