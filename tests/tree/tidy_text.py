"""Rules of style that read one file at a time; `test_tidy.py` runs them.

A rule takes the root of a tree and returns complaints, one a line, `path:line: what`.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

LINE = 100
FUNCTION = 70
FILE = 500
# Nothing below these is ours: built, fetched or generated.
FOREIGN = {"target", "dist", "build", "out", "__pycache__", "node_modules"}
CODE = {".rs", ".py", ".pyi", ".cu", ".cuh", ".h"}
TEXT = CODE | {".md", ".toml", ".sh", ".json", ""}
# These state the patterns they look for.
RULES = {"tests/tree/tidy_text.py", "tests/tree/tidy_imports.py", "tests/tree/test_tidy.py"}

NAMES = re.compile(r"(^|_)(utils?|common|helpers?|misc|stuff|v\d+)(_|$)")
# A function may well find what two things have in common; a file of such things is no idea.
DEFINED_NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|v\d+)(_|$)")
DEFINED = re.compile(r"^\s*(?:pub(?:\(\w+\))? )?(?:mod|fn|struct|enum|class|def) (\w+)")
TOKENS = {
    ".rs": r"\btodo!|\bunimplemented!|\bdbg!|#!?\[allow\b|\b(?:FIXME|TODO|XXX)\b",
    ".py": r"\bNotImplementedError\b|\b(?:FIXME|TODO|XXX)\b|\bassert True\b|\bbreakpoint\("
    r"|# noqa(?!:)|# type: ignore(?!\[)|pytest\.skip\(\)|mark\.(?:skip|xfail)$"
    r"|mark\.(?:skip|xfail)\((?!.*reason)|except:",
    ".cu": r"\b(?:FIXME|TODO|XXX)\b|\bexit\(",
}
PLACES = re.compile(r"(?<![\w.~$}])/(?:work|tmp|root|home|Users)/\w")
HOSTS = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|crates\.io|huggingface\.co)\b")
TICKETS = re.compile(r"\b(?:issues?|PRs?|pull requests?|tickets?)[ -]#?\d+", re.IGNORECASE)
LEFT_OUT = re.compile(r"^\s*// (?:\}|(?:let|return|use|mod|pub|self\.|[\w.:]+\().*;)$")


def files(root: Path, kinds: set[str]) -> Iterator[tuple[str, Path]]:
    """Our files of some suffixes under root, by relative path; hidden folders only `.ci`."""
    found = []
    for folder, inner, names in os.walk(root):
        # What is not ours is not walked through: an environment has more files than all else.
        inner[:] = [one for one in inner if one not in FOREIGN and _is_shown(one)]
        shown = (Path(folder) / name for name in names if _is_shown(name))
        found += [path for path in shown if path.suffix in kinds and path.is_file()]
    return ((path.relative_to(root).as_posix(), path) for path in sorted(found))


def _is_shown(name: str) -> bool:
    return not name.startswith(".") or name == ".ci"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lifted(text: str) -> bool:
    """Whether the first line gives a reason, of three words or more, for being long."""
    first = text.split("\n", 1)[0]
    found = re.match(r"(?://|#) long because (.+)", first)
    return found is not None and len(found[1].split()) >= 3


def long_lines(root: Path) -> list[str]:
    return [
        f"{name}:{number}: {len(line)} characters, at most {LINE}"
        for name, path in files(root, CODE)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if len(line) > LINE
    ]


def long_files(root: Path) -> list[str]:
    counted = ((name, text_of(path)) for name, path in files(root, CODE))
    return [
        f"{name}:1: {text.count(chr(10))} lines, at most {FILE}: split it by idea"
        for name, text in counted
        if text.count("\n") > FILE and not lifted(text)
    ]


def long_functions(root: Path) -> list[str]:
    complaints = []
    for name, path in files(root, {".py", ".rs"}):
        text = text_of(path)
        spans = _python_functions(text) if path.suffix == ".py" else _rust_functions(text)
        complaints += [
            f"{name}:{start}: `{function}` has {end - start + 1} lines, at most {FUNCTION}"
            for function, start, end in spans
            if end - start + 1 > FUNCTION and not lifted(text)
        ]
    return complaints


def _python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def _rust_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """rustfmt puts a function's closing brace alone at the indent of its `fn`."""
    start = re.compile(r"^( *)(?:pub(?:\([\w: ]+\))? )?(?:[a-z]+ (?:\"C\" )?)*fn (\w+)")
    lines = text.splitlines()
    for first, line in enumerate(lines, 1):
        found = start.match(line)
        if found is None:
            continue
        close = re.compile(rf"{found[1]}(?:\}}|\).*;)$")
        ends = (last for last in range(first + 1, len(lines) + 1) if close.match(lines[last - 1]))
        yield found[2], first, first if line.endswith((";", "}")) else next(ends, first)


def banned_names(root: Path) -> list[str]:
    complaints = []
    for name, path in files(root, CODE):
        complaints += [
            f"{name}:1: name it for its idea, not `{part}`"
            for part in (*Path(name).parts[:-1], path.stem)
            if NAMES.search(part)
        ]
        complaints += [
            f"{name}:{number}: name it for its idea, not `{found[1]}`"
            for number, line in enumerate(text_of(path).splitlines(), 1)
            if (found := DEFINED.match(line)) and DEFINED_NAMES.search(found[1])
        ]
    return complaints


def banned_tokens(root: Path) -> list[str]:
    kinds = {".pyi": ".py", ".cuh": ".cu", ".h": ".cu"}
    return [
        f"{name}:{number}: `{found[0]}` is not for this tree"
        for name, path in files(root, CODE)
        if name not in RULES
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if (found := re.search(TOKENS[kinds.get(path.suffix, path.suffix)], line))
    ]


def commented_out_code(root: Path) -> list[str]:
    """Rust and CUDA; ruff's ERA looks at Python."""
    return [
        f"{name}:{number}: code in a comment; delete it"
        for name, path in files(root, CODE - {".py", ".pyi"})
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if LEFT_OUT.match(line)
    ]


def machine_paths(root: Path) -> list[str]:
    return _matches(root, PLACES, "a path of one machine")


def registry_hosts(root: Path) -> list[str]:
    return _matches(root, HOSTS, "a host name; say what to install instead")


def ticket_numbers(root: Path) -> list[str]:
    return _matches(root, TICKETS, "a ticket number; say the reason itself")


def _matches(root: Path, pattern: re.Pattern[str], what: str) -> list[str]:
    return [
        f"{name}:{number}: `{found[0]}` is {what}"
        for name, path in files(root, TEXT)
        if name not in RULES
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if (found := pattern.search(line))
    ]


def titles(root: Path) -> list[str]:
    complaints = []
    for name, path in files(root, {".md"}):
        prose = re.sub(r"^```.*?^```", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
        count = len(re.findall(r"^# ", prose, flags=re.MULTILINE))
        if count != 1:
            complaints.append(f"{name}:1: {count} titles, expected exactly one")
    return complaints


def readme_commands(root: Path) -> list[str]:
    """Both commands stand in the README's first code block: a newcomer needs no other."""
    readme = root / "README.md"
    text = text_of(readme) if readme.exists() else ""
    block = re.search(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    shown = [line.split("#")[0].strip() for line in (block[1] if block else "").splitlines()]
    return [
        f"README.md:1: expected `{command}` in the first code block"
        for command in ("make demo", "make test")
        if command not in shown
    ]


TOP_LEVEL = {
    *("Cargo.toml", "Cargo.lock", "pyproject.toml", "mkdocs.yml", "Makefile", "LICENSE"),
    *("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("rust", "python", "csrc", "tests", "benchmarks", "notebooks", "examples", "docs"),
}


def top_level(root: Path) -> list[str]:
    return [
        f"{path.name}:1: not among the names that may stand at the top"
        for path in sorted(root.iterdir())
        if not path.name.startswith(".") and path.name not in TOP_LEVEL | FOREIGN
    ]
