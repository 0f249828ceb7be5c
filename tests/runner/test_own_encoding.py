"""Answers over a document do not depend on what was inserted before it, on the real model."""

from __future__ import annotations

import pytest
import torch

from kvweave.runner import Runner, Segment

BODY = (
    " The bridge over the river was built of stone. It has seven arches and a tower at each end, "
    "of which the eastern one holds a clock. In the flood of that year the water rose to the "
    "height of the second arch, and the miller's house was carried away with all that it held. "
    "The town rebuilt the house on the hill, where it stands to this day."
)
DOCUMENTS = {
    "old": "In 1744 the council paid for everything that follows." + BODY,
    "new": "In 1921 the council paid for everything that follows." + BODY,
}
QUESTION = "\nQuestion: in which year did the council pay, and for what?\nAnswer:"


def answered(smollm2: tuple, changes: list[tuple[str, str | None]], asked: str) -> torch.Tensor:
    """Logits of the question over a document, after (name, document to insert or None)."""
    model, tokenizer = smollm2
    runner = Runner(model, tokenizer, max_tokens=2048, check=False, progress=False)
    for name, document in changes:
        if document is None:
            runner.delete(name)
        else:
            runner.insert(DOCUMENTS[document], name)
    prompt = ["Read this.", Segment(text=DOCUMENTS[asked]), QUESTION]
    with runner.prefill(prompt, "naive") as done:
        spans = [span for span in done.request.plan.spans if span.kind == "segment"]
        assert [(span.source, span.own) for span in spans] == [(changes[-1][0], True)]
        return done.logits.clone()


def test_a_replaced_document_is_answered_from_as_if_it_had_been_the_first(smollm2) -> None:
    alone = answered(smollm2, [("book", "new")], "new")
    replaced = answered(smollm2, [("book", "old"), ("book", "new")], "new")
    anew = answered(smollm2, [("book", "old"), ("book", None), ("book", "new")], "new")
    assert torch.equal(replaced, alone)
    assert torch.equal(anew, alone)


@pytest.mark.parametrize("asked", ["old", "new"])
def test_the_order_of_insertion_moves_no_answer(smollm2, asked) -> None:
    other = next(name for name in DOCUMENTS if name != asked)
    alone = answered(smollm2, [(asked, asked)], asked)
    assert torch.equal(answered(smollm2, [(other, other), (asked, asked)], asked), alone)
