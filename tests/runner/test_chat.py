"""Chats: the template's own text around segments that stay whole, and answers over documents."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvweave
from kvweave.runner import Part, Segment, chat_prompt


class Template:
    """A tokenizer's chat template, and nothing else of it."""

    chat_template = "there is one"

    def __init__(self, drops: str = "", refuses: str = "", twice: bool = False) -> None:
        self.drops, self.refuses, self.twice = drops, refuses, twice

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        roles = [one["role"] for one in messages]
        if self.refuses in roles:
            raise ValueError(f"no {self.refuses} here")
        kept = [one for one in messages if one["role"] != self.drops]
        said = "".join(f"<{one['role']}>{one['content']}<end>\n" for one in kept)
        return "<begin>" + said * (1 + self.twice) + "<assistant>"


def spoken(parts: list[Part]) -> str:
    return "".join(part if isinstance(part, str) else part.text or "" for part in parts)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1e"), max_size=12)
PARTS = st.lists(TEXTS | TEXTS.filter(bool).map(lambda text: Segment(text=text)), max_size=4)
MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PARTS), min_size=1)


@pytest.mark.hypothesis
@given(messages=MESSAGES, documents=st.lists(TEXTS, max_size=3))
def test_a_chat_is_what_the_template_makes_of_it(
    messages: list[tuple[str, list[Part]]], documents: list[str]
) -> None:
    """Its text with the segments in their places, whole and in order, and nothing else."""
    named = [{"role": role, "content": parts} for role, parts in messages]
    parts = chat_prompt(Template(), named, documents)
    before = "".join(f"{one}\n\n" for one in documents if one)
    plain = [{"role": role, "content": spoken(content)} for role, content in messages]
    plain[-1]["content"] = before + plain[-1]["content"]
    assert spoken(parts) == Template().apply_chat_template(plain, False, True)
    said = [[part for part in content if isinstance(part, Segment)] for _, content in messages]
    said[-1] = [*(Segment(text=one) for one in documents if one), *said[-1]]
    assert [part for part in parts if isinstance(part, Segment)] == list(chain(*said))
    assert "" not in parts


def test_a_question_is_a_chat_of_one_message() -> None:
    parts = chat_prompt(Template(), "Who?", ["a book", Segment(text="a page", namespace="mine")])
    assert parts == [
        "<begin><user>",
        Segment(text="a book"),
        "\n\n",
        Segment(text="a page", namespace="mine"),
        "\n\nWho?<end>\n<assistant>",
    ]
    assert chat_prompt(Template(), "Who?", [Segment(tokens=[])]) == chat_prompt(Template(), "Who?")


@pytest.mark.parametrize(
    ("messages", "documents", "says"),
    [
        ([], (), "messages: expected at least one, got none"),
        (7, (), "messages: expected a sequence of messages, got 7"),
        (["Who?"], (), "message: expected role and content, got 'Who\\?'"),
        ([{"role": "user"}], (), "message: expected role and content"),
        ([{"role": 1, "content": "?"}], (), "message role: expected a str, got 1"),
        (
            [{"role": "user", "content": None}],
            (),
            "content: expected a sequence of parts, got None",
        ),
        ([{"role": "user", "content": [1]}], (), "expected text and segments, got int"),
        ([{"role": "user", "content": "\x1e<kvweave-0>\x1e"}], (), "expected no mark of ours"),
        ("Who?", "a book", "documents: expected a list of them, got a single text"),
        ("Who?", [b"a book"], "document: expected a text or a Segment, got bytes"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, documents: Any, says: str) -> None:
    with pytest.raises(kvweave.InvalidArgument, match=says):
        chat_prompt(Template(), messages, documents)


def test_templates_that_do_not_say_what_they_are_given() -> None:
    asked = [
        {"role": "system", "content": [Segment(text="a book")]},
        {"role": "user", "content": "?"},
    ]
    for template in (Template(drops="system"), Template(twice=True)):
        with pytest.raises(kvweave.InvalidArgument, match="expected 1 segments, each once"):
            chat_prompt(template, asked)
    with pytest.raises(kvweave.InvalidArgument, match="got system, user: no system here"):
        chat_prompt(Template(refuses="system"), asked)
    for none in (object(), None):
        with pytest.raises(kvweave.InvalidArgument, match="with a chat template, got none"):
            chat_prompt(none, "Who?")


def test_a_chat_over_inserted_documents_reuses_them(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    runner = kvweave.Runner(model, tokenizer, max_tokens=2048, progress=False, check=False)
    note = "The filter of the pump is changed every spring, by two people. " * 3
    news = "The committee met on Tuesday and agreed to repair the harbour wall. " * 3
    runner.insert(note, "note")
    runner.insert(news, "news")
    asked = "When is the filter changed?"
    answer = runner.chat(asked, [news, note], max_new_tokens=12)
    assert answer.report.reused_segment > 60
    assert "spring" in answer.text
    # The same prompt by hand: the text that the template itself writes, tokens and all.
    whole = chat_prompt(tokenizer, asked, [news, note])
    by_hand = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{news}\n\n{note}\n\n{asked}"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert spoken(whole) == by_hand
    full = runner.generate(whole, "full", max_new_tokens=12, remember=False)
    assert runner.chat(asked, [news, note], "full", max_new_tokens=12).tokens == full.tokens


def test_a_runner_by_the_name_of_its_model() -> None:
    runner = kvweave.Runner.from_pretrained("smollm2", device="cpu", max_tokens=64, check=False)
    assert runner.prompts.tokenizer is not None
    assert (len(runner.spec.layers), runner.spec.device.type) == (30, "cpu")
    with pytest.raises(kvweave.models.ModelUnavailable, match="smollm2, qwen-coder"):
        kvweave.Runner.from_pretrained("gpt-17")
    with pytest.raises(kvweave.models.ModelUnavailable, match="nobody/nothing: expected files"):
        kvweave.Runner.from_pretrained("nobody/nothing", device="cpu")
