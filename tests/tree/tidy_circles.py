"""Rules about circles: a file imports nothing that imports it, at however many removes.

What a folder's own file (`mod.rs`, `__init__.py`) hands on counts as an import of the file that has
it, so that a folder may gather names. What it has itself is its own.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tidy_imports import modules, outside_tests
from tidy_text import files, text_of

Graph = dict[str, set[str]]
# The names that a path goes through: `crate::pool::Pool` is ("pool", "Pool").
Names = tuple[str, ...]


def _circles(graph: Graph) -> Iterator[list[str]]:
    """One circle after another, each broken at its last step before the next is looked for."""
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            # A node is followed by one that needs it.
            circle = list(reversed(error.args[1]))
            graph[circle[-2]].discard(circle[-1])
            least = circle.index(min(circle[:-1]))
            yield [*circle[least:-1], *circle[: least + 1]]
        else:
            return


def _complaints(graph: Graph) -> list[str]:
    return [f"{circle[0]}:1: a circle: {' → '.join(circle)}" for circle in _circles(graph)]


def _leaves(tree: str) -> Iterator[tuple[Names, str]]:
    """(path, name it gets) of each name of a `use`: `a::{b, c as d}` has a::b and a::c."""
    tree = tree.strip()
    opens = tree.find("{")
    if opens < 0:
        path, _, name = tree.partition(" as ")
        names = tuple(part.strip() for part in path.split("::"))
        yield names, name.strip() or names[-1]
        return
    before = tuple(part.strip() for part in tree[:opens].split("::") if part.strip())
    depth, start, inner = 0, 0, tree[opens + 1 : tree.rindex("}")]
    for at, letter in enumerate(inner + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if inner[start:at].strip():
                for names, name in _leaves(inner[start:at]):
                    own = names[:-1] if names[-1] == "self" else names
                    yield before + own, before[-1] if names[-1] == "self" else name
            start = at + 1


class _Crate:
    """The modules of one crate: which file has which name, and whose names it hands on."""

    def __init__(self, source: Path, prefix: str) -> None:
        self.file_of: dict[Names, str] = {}
        self.code: dict[Names, str] = {}
        self.uses: dict[Names, list[Names]] = {}
        self.handed_on: dict[Names, dict[str, Names]] = {}
        for name, path in files(source, {".rs"}):
            parts = Path(name).with_suffix("").parts
            module = parts[:-1] if parts[-1] in ("lib", "mod", "main") else parts
            self.file_of[module] = prefix + name
            code = "\n".join(line for _, line in outside_tests(text_of(path)))
            self.code[module] = re.sub(r"//.*", "", code)
        for module, code in self.code.items():
            self._read(module, code)

    def _read(self, module: Names, code: str) -> None:
        self.uses[module], self.handed_on[module] = [], {}
        for public, tree in re.findall(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", code):
            for names, name in _leaves(tree):
                target = self._absolute(module, names)
                if target is not None:
                    self.handed_on[module][name] = target
                if target is not None and not public:
                    self.uses[module].append(target)
        self.code[module] = re.sub(r"\b(?:pub(?:\([^)]*\))?\s+)?use\s+[^;]+;", "", code)

    def _absolute(self, module: Names, names: Names) -> Names | None:
        """A path from the crate's root on; none for one of another crate."""
        if names[0] == "crate":
            return names[1:]
        if (*module, names[0]) in self.file_of:
            return module + names
        here = module if names[0] in ("self", "super") else None
        while here is not None and names and names[0] in ("self", "super"):
            here, names = here[:-1] if names[0] == "super" else here, names[1:]
        return None if here is None else here + names

    def owner(self, names: Names) -> str | None:
        """The file in which what a path names is written."""
        for _ in range(8):
            known = (n for n in range(len(names), -1, -1) if names[:n] in self.file_of)
            depth = next(known, None)
            if depth is None:
                return None
            module = names[:depth]
            target = self.handed_on[module].get(names[depth]) if depth < len(names) else None
            if target is None:
                return self.file_of[module]
            names = target + names[depth + 1 :]
        return None

    def graph(self) -> Graph:
        graph: Graph = {file: set() for file in self.file_of.values()}
        for module, code in self.code.items():
            targets = list(self.uses[module])
            inline = re.findall(r"\b[a-z_]\w*(?:::\w+)+", code)
            named = (self._absolute(module, tuple(path.split("::"))) for path in inline)
            targets += [target for target in named if target is not None]
            handed = self.handed_on[module].items()
            targets += [to for name, to in handed if re.search(rf"\b{name}\b", code)]
            file, owners = self.file_of[module], {self.owner(target) for target in targets}
            graph[file] = {owner for owner in owners if owner is not None and owner != file}
        return graph


def rust_circles(root: Path) -> list[str]:
    """Files of a crate, tests left out."""
    complaints = []
    for source in sorted((root / "rust").glob("*/src")):
        crate = _Crate(source, f"rust/{source.parent.name}/src/")
        complaints += _complaints(crate.graph())
    return complaints


class _Package:
    """The modules of the Python package, and what each imports under which name."""

    def __init__(self, root: Path) -> None:
        self.file_of = {dotted: name for name, dotted, _, _ in modules(root)}
        self.plain: dict[str, list[str]] = {}
        self.named: dict[str, dict[str, str]] = {}
        self.used: dict[str, set[str]] = {}
        for _, dotted, path, package in modules(root):
            tree = ast.parse(text_of(path))
            self.plain[dotted], self.named[dotted] = [], {}
            self.used[dotted] = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    self.plain[dotted] += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    whole = [*(above if node.level else []), *filter(None, [node.module])]
                    for alias in node.names:
                        name = alias.asname or alias.name
                        self.named[dotted][name] = ".".join([*whole, alias.name])

    def owner(self, name: str, left: int = 8) -> str | None:
        """The file in which what a dotted name means is written."""
        if name in self.file_of or not left:
            return self.file_of.get(name)
        base, _, last = name.rpartition(".")
        if self._is_package(base) and last in self.named[base]:
            return self.owner(self.named[base][last], left - 1)
        return self.owner(base, left - 1) if base else None

    def _is_package(self, dotted: str) -> bool:
        return self.file_of.get(dotted, "").endswith("__init__.py")

    def graph(self) -> Graph:
        graph: Graph = {}
        for dotted, file in self.file_of.items():
            needed = [
                target
                for name, target in self.named[dotted].items()
                if not self._is_package(dotted) or name in self.used[dotted]
            ]
            owners = {self.owner(target) for target in [*self.plain[dotted], *needed]}
            graph[file] = {owner for owner in owners if owner is not None and owner != file}
        return graph


def python_circles(root: Path) -> list[str]:
    """Files of the package; an import for the type checker alone counts, and one in a function."""
    return _complaints(_Package(root).graph())
