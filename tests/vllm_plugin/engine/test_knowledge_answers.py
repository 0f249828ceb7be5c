"""What workers answer of documents has the fields that the server's schema says, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from answer_schema import answered, undescribed
from kvweave.adapters.vllm.segments import extension
from kvweave.adapters.vllm.segments.knowledge_base import answer
from kvweave.adapters.vllm.server.knowledge import PATH
from kvweave.adapters.vllm.server.openapi import PATHS
from test_segments_room import froze, store_of

TOKENS = list(range(1, 40))


class Kept:
    """A folder that keeps a document, or says why not; it has another one that is not frozen."""

    def names(self, namespace: str | None) -> list[tuple[str, str, int]]:
        return [("", "there", 5), ("", "a", len(TOKENS))]


def worker(monkeypatch: pytest.MonkeyPatch, kept: Kept | None, why: str | None) -> Any:
    """A worker of a real store, in which a document is frozen without a model."""
    store = store_of(0.5)

    def insert(model: Any, name: str, tokens: list[int], namespace: str, config: Any) -> str | None:
        assert froze(store, name, tokens, namespace)
        return why

    made = SimpleNamespace(
        store=store, kept=kept, insert=insert, yielding=list, expect_document=lambda *_: None
    )
    monkeypatch.setattr(extension, "_worker", lambda: made)
    asked = extension.KnowledgeBaseWorker()
    model = SimpleNamespace(get_vocab_size=lambda: 999, max_model_len=99)
    asked.vllm_config = SimpleNamespace(model_config=model)
    asked.get_model = lambda: None
    return asked


CASES = [(None, None), (Kept(), None), (Kept(), "the disk is full")]


@pytest.mark.parametrize(("kept", "why"), CASES)
def test_entries_have_the_fields_of_the_schema(
    monkeypatch: pytest.MonkeyPatch, kept: Kept | None, why: str | None
) -> None:
    asked = worker(monkeypatch, kept, why)
    entry = answer([asked.kvweave_insert("a", TOKENS)])
    assert undescribed(entry, answered(PATHS, "post", PATH)) == []
    assert ("kept" in entry, "not_kept" in entry) == (kept is not None, why is not None)
    listed = {"object": "list", "data": answer([asked.kvweave_list("")])}
    assert len(listed["data"]) == (1 if kept is None else 2)
    assert undescribed(listed, answered(PATHS, "get", PATH)) == []


def test_the_schema_has_no_fields_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    inserted, listed = set[str](), set[str]()
    for kept, why in CASES:
        asked = worker(monkeypatch, kept, why)
        inserted |= answer([asked.kvweave_insert("a", TOKENS)]).keys()
        listed |= {field for one in answer([asked.kvweave_list("")]) for field in one}
    assert inserted == answered(PATHS, "post", PATH)["properties"].keys()
    entries = answered(PATHS, "get", PATH)["properties"]["data"]["items"]
    assert listed == entries["properties"].keys()
