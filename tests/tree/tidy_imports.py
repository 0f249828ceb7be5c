"""Rules about who may import whom, and that everything is imported by somebody.

Rust is read line by line, Python through its syntax tree. A complaint is `path:line: what`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tidy_text import files, text_of

CRATES = {
    "core": set(),
    "reference": {"core"},
    "cpu": {"core"},
    "cuda": {"core"},
    "store": set(),
    "python": {"core", "reference", "cpu", "cuda", "store"},
}
CORE_LAYERS = [
    {"ids", "error"},
    {"shape", "reserve"},
    {"heads", "ops"},
    {"pool"},
    {"content", "virtual_pages"},
    {"plan", "tier", "scheduler"},
    {"cache"},
]
SAFE_CRATES = ("core", "reference", "store")
# Lower layers first; a package may import itself and what lies below, never sideways.
PYTHON_LAYERS = [
    {"_native_ops", "_native_store", "_native_virtual_pages"},
    {"_native"},
    {"errors"},
    {"always_read", "arguments", "closing", "device_memory", "flops", "packed_page"}
    | {"power_of_two", "spare_slots"},
    {"cache", "ops", "scheduler", "store"},
    {"remote", "weight_sample"},
    {"drawn", "plan", "models", "payload"},
    {"plan_walk", "question"},
    {"policies"},
    {"runner"},
    {"adapters"},
    {"lab"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
# Importing kvweave must not cost a framework: these are for those who need them.
HEAVY = {"torch", "transformers", "matplotlib", "vllm", "kvpress"}
HEAVY_FREE = {"__init__", "always_read", "errors", "flops", "cache", "remote", "scheduler", "store"}
HEAVY_FREE |= {"packed_page", "weight_sample"}
FRAMEWORKS = {
    "transformers": {"runner", "adapters", "models", "demo"},
    "vllm": {"adapters"},
    "kvpress": {"adapters"},
}


def _rank(layers: list[set[str]], name: str) -> int | None:
    return next((rank for rank, layer in enumerate(layers) if name in layer), None)


def outside_tests(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a Rust file up to its test module, comments left out."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#[cfg(test)]"):
            return
        if not line.lstrip().startswith("//"):
            yield number, line


def crate_direction(root: Path) -> list[str]:
    complaints = []
    for name, path in files(root / "rust", {".rs"}):
        crate, folder = name.split("/")[0], name.split("/")[1]
        if crate not in CRATES:
            complaints.append(f"rust/{name}:1: crate `{crate}` has no place in the order")
        elif folder == "src":
            complaints += [
                f"rust/{name}:{number}: `{crate}` must not use `{used}`"
                for number, line in outside_tests(text_of(path))
                for used in re.findall(r"\bkvweave_(\w+)", line)
                if used != crate and used not in CRATES[crate]
            ]
    return complaints


def core_layers(root: Path) -> list[str]:
    complaints = []
    source = root / "rust/core/src"
    for name, path in files(source, {".rs"}):
        module = Path(name).parts[0].removesuffix(".rs")
        if module in ("lib", "testing"):
            continue
        own = _rank(CORE_LAYERS, module)
        if own is None:
            complaints.append(f"rust/core/src/{name}:1: `{module}` has no layer")
            continue
        for number, line in outside_tests(text_of(path)):
            for used in re.findall(r"\bcrate::([a-z]\w*)", line):
                rank = _rank(CORE_LAYERS, used)
                if used != module and rank is not None and rank >= own:
                    complaints.append(
                        f"rust/core/src/{name}:{number}: `{module}` must not use `{used}`"
                    )
    return complaints


def safe_crates(root: Path) -> list[str]:
    roots = [root / "rust" / crate / "src/lib.rs" for crate in SAFE_CRATES]
    return [
        f"{path.relative_to(root)}:1: expected #![forbid(unsafe_code)]"
        for path in roots
        if path.exists() and "#![forbid(unsafe_code)]" not in text_of(path)
    ]


def kernel_includes(root: Path) -> list[str]:
    """Kernels know no framework, and headers never include a kernel."""
    banned = re.compile(r'#include\s*[<"](torch|ATen|c10|Python|pybind11|[^>"]*\.cu[>"])')
    return [
        f"csrc/{name}:{number}: kernels must not include `{found[1]}`"
        for name, path in files(root / "csrc", {".cu", ".cuh", ".h"})
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if (found := banned.search(line))
    ]


def unused_rust(root: Path) -> list[str]:
    """A `.rs` file that no `mod` names is compiled by nobody."""
    complaints = []
    for name, path in files(root / "rust", {".rs"}):
        parts = Path(name).parts
        if parts[1] not in ("src", "tests", "benches") or path.stem in ("lib", "main"):
            continue
        if parts[1] != "src" and len(parts) == 3:
            continue
        folder, module = path.parent, path.stem
        if module == "mod":
            folder, module = path.parent.parent, path.parent.name
        near = [folder / "lib.rs", folder / "mod.rs", folder.with_suffix(".rs")]
        near += [p for p in folder.glob("*.rs") if parts[1] != "src" and p != path]
        named = re.compile(rf"^\s*(?:pub(?:\(\w+\))? )?mod {module}\b", re.MULTILINE)
        if not any(p.is_file() and named.search(text_of(p)) for p in near):
            complaints.append(f"rust/{name}:1: no `mod {module}` names it")
    return complaints


def unused_kernels(root: Path) -> list[str]:
    """A header that no source includes, or a kernel that no Rust file launches by its name."""
    sources = list(files(root / "csrc", {".cu", ".cuh", ".h"}))
    included = {
        Path(found).name
        for _, path in sources
        for found in re.findall(r'#include\s*"([^"]+)"', text_of(path))
    }
    launches = [text_of(path) for _, path in files(root / "rust/cuda/src", {".rs"})]
    launched = {name for text in launches for name in re.findall(r'"(\w+)"', text)}
    return [
        f"csrc/{name}:1: nothing {'launches' if path.suffix == '.cu' else 'includes'} it"
        for name, path in sources
        if (path.stem not in launched if path.suffix == ".cu" else path.name not in included)
    ]


def _imports(path: Path, package: str) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted module, at import time) for each import of a Python file.

    `from a import b` yields both `a` and `a.b`, because b may be a module.
    """
    tree = ast.parse(text_of(path))
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        now = id(node) not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, now
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, node.module or ""]).strip(".") if node.level else node.module
            yield node.lineno, str(base), now
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", now


def modules(root: Path) -> Iterator[tuple[str, str, Path, str]]:
    """(path, dotted name, file, package) of each module of the Python package."""
    for name, path in files(root / "python", {".py", ".pyi"}):
        dotted = name.rsplit(".", 1)[0].replace("/", ".").removesuffix(".__init__")
        package = dotted if path.stem == "__init__" else dotted.rpartition(".")[0]
        yield f"python/{name}", dotted, path, package


def python_layers(root: Path) -> list[str]:
    complaints = []
    for name, dotted, path, package in modules(root):
        module = dotted.split(".")[1] if "." in dotted else "__init__"
        own = len(PYTHON_LAYERS) if module == "__init__" else _rank(PYTHON_LAYERS, module)
        if own is None:
            complaints.append(f"{name}:1: `{module}` has no layer")
            continue
        for number, imported, _ in _imports(path, package):
            parts = imported.split(".")
            used = parts[1] if parts[0] == "kvweave" and len(parts) > 1 else module
            rank = _rank(PYTHON_LAYERS, used)
            if used != module and rank is not None and rank >= own:
                complaints.append(f"{name}:{number}: `{module}` must not import `{used}`")
    return list(dict.fromkeys(complaints))


def heavy_imports(root: Path) -> list[str]:
    """torch and company only where they are needed, and never by `import kvweave`."""
    complaints = []
    for name, dotted, path, package in modules(root):
        module = dotted.split(".")[1] if "." in dotted else "__init__"
        for number, imported, now in _imports(path, package):
            top = imported.split(".")[0]
            if top in HEAVY and now and module in HEAVY_FREE:
                complaints.append(f"{name}:{number}: `import kvweave` would import `{top}`")
            if module not in FRAMEWORKS.get(top, {module}):
                complaints.append(f"{name}:{number}: `{module}` must not import `{top}`")
    return list(dict.fromkeys(complaints))


def unused_python(root: Path) -> list[str]:
    """A module that no other file of ours imports, unless a command starts there."""
    importers = [(path, package) for _, _, path, package in modules(root)]
    for folder in ("tests", "benchmarks"):
        for name, path in files(root / folder, {".py"}):
            importers.append((path, f"{folder}/{name}".rpartition("/")[0].replace("/", ".")))
    used: dict[str, set[Path]] = {}
    for path, package in importers:
        for _, imported, _ in _imports(path, package):
            used.setdefault(imported, set()).add(path)
    ours = [(name, dotted, path) for name, dotted, path, _ in modules(root)]
    ours += [
        (f"{f}/{n}", _dotted(f, n), p)
        for f in ("tests", "benchmarks")
        for n, p in files(root / f, {".py"})
    ]
    return [
        f"{name}:1: nothing imports it"
        for name, dotted, path in ours
        if not used.get(dotted, set()) - {path} and not _is_start(root, dotted, path)
    ]


def _dotted(folder: str, name: str) -> str:
    """Tests are imported by file name (pytest puts their folder on the path), the rest whole."""
    bare = name.removesuffix(".py").replace("/", ".")
    return bare.rpartition(".")[2] if folder == "tests" else f"{folder}.{bare}"


def _is_start(root: Path, dotted: str, path: Path) -> bool:
    project = root / "pyproject.toml"
    entry_points = text_of(project) if project.exists() else ""
    return (
        path.stem in ("__init__", "__main__", "conftest")
        or path.stem.startswith("test_")
        or f'"{dotted}:' in entry_points
        or 'if __name__ == "__main__"' in text_of(path)
    )
