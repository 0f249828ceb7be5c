"""The demo: questions over a small knowledge base of real speeches, under every policy.

The passages are encoded once, each alone. Every prompt is interleaved fresh text and passages,
`[O1, R1, O2, R2, …]`, and names them in another order, so no passage stands where it was encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvweave.lab.eval import Encoded, Measurement, Sample, SampleMeasurer, task_encoder
from kvweave.lab.eval.text import passage
from kvweave.runner import Part, Runner, Segment, chat_parts

NAMESPACE = "demo"
POLICIES = ("full", "prefix", "naive", "epic", "cacheblend", "sparsex", "foresight")
"""Those that need no head map."""
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Passage:
    """Paragraphs of one speech, from the one that begins with `opening`."""

    name: str
    said_by: str
    speech: str
    opening: str
    max_tokens: int


@dataclass(frozen=True)
class Question:
    """A question, the order in which the passages stand, and what a right answer contains."""

    text: str
    order: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table: one policy on one prompt; `prompt` 0 is the mean of all prompts."""

    prompt: int
    question: str
    policy: str
    tokens: float
    reused_prefix: float
    reused_segment: float
    recomputed: float
    row_share: float
    ttft_s: float
    ttft_ratio: float
    kv_bytes: float
    shared_kv_bytes: float
    first_token: float
    kl: float
    answer: str
    mode: str
    mode_reason: str

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)


PASSAGES = (
    Passage("roosevelt", "Franklin Roosevelt, 1941", "1941-Roosevelt-1", "In the future days", 340),
    Passage("johnson", "Lyndon Johnson, 1964", "1964-Johnson-1", "This administration today", 400),
    Passage("kennedy", "John Kennedy, 1962", "1962-Kennedy-1", "With the approval of this", 360),
    Passage("clinton", "Bill Clinton, 1996", "1996-Clinton-1", "We know big Government", 360),
    Passage("lincoln", "Abraham Lincoln, 1862", "1862-Lincoln-1", "Fellow-citizens, we can", 400),
)

QUESTIONS = (
    Question(
        "What did President Johnson declare unconditional war on?",
        ("clinton", "johnson", "lincoln", "kennedy", "roosevelt"),
        ("poverty",),
    ),
    Question(
        "Which four freedoms does President Roosevelt name?",
        ("kennedy", "lincoln", "roosevelt", "johnson", "clinton"),
        ("speech", "worship", "want", "fear"),
    ),
    Question(
        "What does President Clinton say that big Government does not have?",
        ("lincoln", "roosevelt", "clinton", "kennedy", "johnson"),
        ("answers",),
    ),
)

_INSTRUCTION = "Read these passages from speeches, then answer the question.\n\n"


def knowledge(tokenizer: Any) -> dict[str, str]:
    """The passages' texts by name.

    Raises TextUnavailable when the package that carries the speeches is not installed.
    """
    encode = task_encoder(tokenizer)
    return {p.name: passage(p.speech, p.opening, encode, p.max_tokens) for p in PASSAGES}


def prompt_parts(tokenizer: Any, question: Question, texts: dict[str, str]) -> list[Part]:
    """The chat prompt: instruction, then each passage behind the name of its speaker."""
    speakers = {p.name: p.said_by for p in PASSAGES}
    parts: list[Part] = [_INSTRUCTION]
    for place, name in enumerate(question.order):
        gap = "\n\n" if place else ""
        parts += [f"{gap}{speakers[name]}:\n", Segment(text=texts[name], namespace=NAMESPACE)]
    parts.append(f"\n\nQuestion: {question.text} Answer in one short sentence.")
    return chat_parts(tokenizer, parts)


def opening(tokenizer: Any) -> list[Part]:
    """What every prompt begins with, word for word: system prompt and instruction.

    It is all that a prefix cache can use, since the passages stand in another order each time.
    """
    return chat_parts(tokenizer, [_INSTRUCTION])[:2]


def run(
    runner: Runner, questions: Sequence[Question], max_new_tokens: int = MAX_NEW_TOKENS
) -> Iterator[Row]:
    """Fills the knowledge base, then yields a row a policy for each prompt, as they are done.

    The prompts' common opening is remembered too, as if an earlier prompt had been answered.
    `full` comes first: it is what the others are measured against.
    """
    tokenizer = runner.prompts.tokenizer
    texts = knowledge(tokenizer)
    runner.insert_many(list(texts.items()), NAMESPACE)
    runner.prefill(opening(tokenizer), "full", namespace=NAMESPACE).release()
    for number, question in enumerate(questions, 1):
        parts = prompt_parts(tokenizer, question, texts)
        sample = Sample(tuple(parts), question.answers)
        measurer = SampleMeasurer(runner, Encoded(sample), number, NAMESPACE, max_new_tokens)
        full = measurer.full()
        for policy in POLICIES:
            measured = full if policy == "full" else measurer.policy(policy)
            yield _row(number, question, measured, full)


def means(rows: Sequence[Row]) -> list[Row]:
    """One row a policy: the mean over all prompts."""
    made = []
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row.to_dict() for row in rows if row.policy == policy]
        numbers = {
            key: sum(row[key] for row in mine) / len(mine)
            for key, value in mine[0].items()
            if isinstance(value, (int, float)) and key != "prompt"
        }
        same = {key: mine[0][key] for key in ("policy", "mode", "mode_reason")}
        made.append(Row(prompt=0, question="", answer="", **same, **numbers))
    return made


def _row(number: int, question: Question, measured: Measurement, full: Measurement) -> Row:
    return Row(
        prompt=number,
        question=question.text,
        policy=measured.policy,
        tokens=measured.tokens,
        reused_prefix=measured.reused_prefix,
        reused_segment=measured.reused_segment,
        recomputed=measured.recomputed,
        row_share=measured.row_share,
        ttft_s=measured.ttft_s,
        ttft_ratio=measured.ttft_s / full.ttft_s,
        kv_bytes=measured.kv_bytes,
        shared_kv_bytes=measured.shared_kv_bytes,
        first_token=float(measured.first_token),
        kl=sum(measured.kl) / len(measured.kl),
        answer=measured.answer,
        mode=measured.mode,
        mode_reason=measured.mode_reason,
    )
