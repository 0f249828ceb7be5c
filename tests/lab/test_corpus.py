"""Texts to make samples of: packaged ones, the user's own, and hostile ones."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import draw, task_encoder, task_of
from kvweave.lab.eval.corpus import Corpus, TextUnavailable, corpus_of, package_folder
from kvweave.runner import Segment


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("smollm2")


def test_the_bible_is_whole_and_plain() -> None:
    books = dict(corpus_of("kjv").documents)
    assert len(books) == 66
    text = "\n".join(books.values())
    assert 4_000_000 < len(text) < 4_500_000
    assert not re.search(r"\d", text)
    assert books["The Book of Psalms"].split("\n\n")[22].startswith("The LORD is my shepherd;")


def test_code_is_the_standard_library() -> None:
    modules = dict(corpus_of("python").documents)
    assert "class JSONEncoder" not in modules["argparse"]
    assert "class ArgumentParser" in modules["argparse"]


@pytest.mark.parametrize("name", ["sotu", "kjv", "python"])
def test_slices_are_of_one_document(name: str, tokenizer) -> None:
    corpus = corpus_of(name)
    ids = corpus.token_slice(np.random.default_rng(3), task_encoder(tokenizer), 400)
    assert len(ids) == 400
    middle = tokenizer.decode(ids).strip("\ufffd")[5:-5]
    assert any(middle in text for _, text in corpus.documents)


@pytest.mark.parametrize("name", ["lm", "needle", "needles", "chain", "two-hop", "agents"])
def test_tasks_take_their_text_from_the_corpus(name: str, tokenizer) -> None:
    (ours,) = draw(task_of(name, 512, "kjv"), tokenizer, 1, seed=1)
    (other,) = draw(task_of(name, 512), tokenizer, 1, seed=1)
    assert ours != other
    bible = " ".join(" ".join(text.split()) for _, text in corpus_of("kjv").documents)
    segment = next(part for part in ours.parts if isinstance(part, Segment))
    written = segment.text or tokenizer.decode(segment.tokens)
    assert any(piece.strip() in bible for piece in written.split(".") if len(piece) > 30)


def test_tables_use_no_text() -> None:
    with pytest.raises(InvalidArgument, match="lookup: expected no corpus, as it uses no text"):
        task_of("lookup", 512, "kjv")


def test_own_texts_are_taken_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("b/x.txt", " two "), ("a.txt", "one"), ("e.txt", ""), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    corpus = corpus_of(str(tmp_path))
    assert corpus.documents == (("a", "one"), ("b/x", "two"))
    assert corpus_of(str(tmp_path / "c.md")).documents == (("c", "no"),)
    assert corpus.digest == Corpus("other name", corpus.documents).digest
    assert corpus.digest != Corpus("moved", (("a", "on"), ("b/x", "etwo"))).digest


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected one of sotu, kjv, python, a file or"):
        corpus_of(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidArgument, match="expected text, got none"):
        corpus_of(str(tmp_path))
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"expected UTF-8 text, got .*weights\.bin"):
        corpus_of(str(binary))
    short = Corpus("short", (("a", "one word"),))
    with pytest.raises(InvalidArgument, match="corpus short: expected a document of at least 9"):
        short.token_slice(np.random.default_rng(0), lambda text: [1] * len(text), 9)


def test_what_is_not_installed_is_named_with_its_command() -> None:
    with pytest.raises(TextUnavailable, match="pip install --no-deps moon==1"):
        package_folder("moon==1", "no_such_module_here", "data")
