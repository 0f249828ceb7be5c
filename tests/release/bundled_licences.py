"""What a wheel bundles besides our own code, and under which licences: `make licences` writes it.

The crates that the extension module is linked of, by cargo's own account; what only runs while it
is compiled (procedural macros, build scripts) is not in it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "rust" / "THIRD-PARTY-LICENSES.txt"
ALLOWED = ROOT / "rust" / "deny.toml"
TARGET = "x86_64-unknown-linux-gnu"
TEXTS = re.compile(r"(un)?licen[sc]e|copying|notice|copyright", re.IGNORECASE)
HEAD = """\
Licences of what a wheel of kvweave bundles. kvweave itself is under the Apache License 2.0, in
LICENSE.

The extension module is linked with the Rust crates below and with the Rust standard library (MIT
or Apache-2.0). Its GPU kernels are ours; nvcc compiles into them inline functions of the CUDA
headers cuda_bf16.h, cuda_fp16.h and cuda_fp8.h, which NVIDIA licenses by the End User License
Agreement of the CUDA Toolkit. No library of CUDA is bundled.
"""


@dataclass(frozen=True)
class Crate:
    """A crate that is linked: its licence as an SPDX expression, and where its source lies."""

    name: str
    version: str
    licence: str
    folder: Path

    def texts(self) -> list[str]:
        """The licence files beside its source."""
        found = sorted(path for path in self.folder.iterdir() if TEXTS.match(path.name))
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in found)
        return [text.strip() for text in texts if text.strip()]


def bundled() -> list[Crate]:
    """The crates, by name."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--offline"]
    command += ["--filter-platform", TARGET]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    packages = {package["id"]: package for package in document["packages"]}
    nodes = {node["id"]: node for node in document["resolve"]["nodes"]}
    (start,) = [key for key, package in packages.items() if package["name"] == "kvweave-python"]
    linked, ahead = set[str](), [start]
    while ahead:
        crate = ahead.pop()
        if crate not in linked and not _is_macro(packages[crate]):
            linked.add(crate)
            ahead += [
                dependency["pkg"]
                for dependency in nodes[crate]["deps"]
                if any(kind["kind"] is None for kind in dependency["dep_kinds"])
            ]
    foreign = [packages[key] for key in linked if packages[key]["source"] is not None]
    return sorted(
        (
            Crate(
                package["name"],
                package["version"],
                package["license"] or "",
                Path(package["manifest_path"]).parent,
            )
            for package in foreign
        ),
        key=lambda crate: (crate.name, crate.version),
    )


def _is_macro(package: dict[str, list[dict[str, list[str]]]]) -> bool:
    return any("proc-macro" in target["kind"] for target in package["targets"])


def allowed() -> set[str]:
    """The licences that `cargo deny` lets pass."""
    listed = re.search(r"^allow = \[(.*?)\]", ALLOWED.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert listed is not None
    return set(re.findall(r'"([^"]+)"', listed[1]))


def permits(expression: str, licences: set[str]) -> bool:
    """Whether an SPDX expression can be met by some licences; an older one has a slash for OR."""
    words = re.findall(r"[()]|[^\s()]+(?: WITH [^\s()]+)?", expression.replace("/", " OR "))
    try:
        return _any_of(words, licences) and not words
    except IndexError:  # it ends where more is wanted
        return False


def _any_of(words: list[str], licences: set[str]) -> bool:
    """What stands before a closing bracket, which takes its words."""
    found = _all_of(words, licences)
    while words[:1] == ["OR"]:
        words.pop(0)
        found = _all_of(words, licences) or found
    return found


def _all_of(words: list[str], licences: set[str]) -> bool:
    found = _one(words, licences)
    while words[:1] == ["AND"]:
        words.pop(0)
        found = _one(words, licences) and found
    return found


def _one(words: list[str], licences: set[str]) -> bool:
    if (word := words.pop(0)) != "(":
        return word in licences
    found = _any_of(words, licences)
    return words.pop(0) == ")" and found


def document() -> str:
    """The file: each licence text once, behind the crates that have it."""
    by_text: dict[str, list[Crate]] = {}
    bare = []
    for crate in bundled():
        texts = crate.texts()
        bare += [] if texts else [crate]
        for text in texts:
            by_text.setdefault(_same(text, by_text), []).append(crate)
    return "".join(_parts(by_text, bare))


def _same(text: str, known: dict[str, list[Crate]]) -> str:
    """A text that is known already and differs in white space alone, or the text itself."""
    words = text.split()
    return next((one for one in known if one.split() == words), text)


def _parts(by_text: dict[str, list[Crate]], bare: list[Crate]) -> Iterator[str]:
    yield HEAD
    if bare:
        yield "\nThese bring no text of their own; what they name is among the licences below:\n\n"
        yield from (f"- {crate.name} {crate.version} ({crate.licence})\n" for crate in bare)
    for text, crates in by_text.items():
        yield f"\n{'=' * 80}\n"
        yield from (f"{crate.name} {crate.version} ({crate.licence})\n" for crate in crates)
        yield f"{'-' * 80}\n{text}\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
