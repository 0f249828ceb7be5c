"""Tasks by name: what is asked, and how it is laid out."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.agents import Agents, Debate
from kvweave.lab.eval.conversation import Conversation
from kvweave.lab.eval.corpus import DEFAULT_CORPUS, corpus_of
from kvweave.lab.eval.encoded_otherwise import Edited, Moved, Nested, Permuted, Short, TailOnly
from kvweave.lab.eval.key_value import KeyValue
from kvweave.lab.eval.laid_out import LaidOut
from kvweave.lab.eval.language_model import LanguageModel
from kvweave.lab.eval.layout import Even, Interleaved, Plain, Uneven
from kvweave.lab.eval.natural_questions import NaturalQuestions, natural_questions
from kvweave.lab.eval.needle import Needle
from kvweave.lab.eval.problem import Family
from kvweave.lab.eval.two_hop import TwoHop
from kvweave.lab.eval.variable_chain import VariableChain
from kvweave.lab.eval.word_counts import WordCounts

LAYOUTS: tuple[type[Plain], ...] = (
    Plain, Even, Moved, Permuted, Interleaved, Uneven, Nested, Edited, TailOnly, Short,
)  # fmt: skip
LAYOUT_NAMES = tuple(layout.name for layout in LAYOUTS)
_TEXT: dict[str, Callable[[str], Family]] = {
    "lm": lambda corpus: LanguageModel(corpus=corpus),
    "needle": lambda corpus: Needle(corpus=corpus),
    "needles": lambda corpus: Needle(asked=4, corpus=corpus),
    "chain": lambda corpus: VariableChain(corpus=corpus),
    "two-hop": lambda corpus: TwoHop(corpus=corpus),
    "chat": lambda corpus: Conversation(corpus=corpus),
    "agents": lambda corpus: Agents(corpus=corpus),
    "debate": lambda corpus: Debate(corpus=corpus),
}
_TABLES: dict[str, Callable[[], Family]] = {
    "lookup": lambda: KeyValue(),
    "lookups": lambda: KeyValue(asked=4),
    "common-words": lambda: WordCounts(),
    "frequent-words": lambda: WordCounts(asked=3, coded=True),
}
_QUESTIONS: dict[str, Callable[[str], Family]] = {
    "natural": lambda path: NaturalQuestions(path),
    "natural-pair": lambda path: NaturalQuestions(path, asked=2),
}
FOUR_EVEN_SEGMENTS = ("lm", "needle", "needles", "lookup", "lookups", "chain")
"""Tasks that are laid out as `even` with four documents unless a layout is named."""

TASK_NAMES = (
    *FOUR_EVEN_SEGMENTS,
    *(name for name in (*_TEXT, *_TABLES, *_QUESTIONS) if name not in FOUR_EVEN_SEGMENTS),
)


def task_of(
    name: str,
    length: int,
    corpus: str | None = None,
    layout: str | None = None,
    documents: int | None = None,
) -> LaidOut:
    """A task by its name, at a prompt length in tokens, on a corpus, in a layout.

    `corpus`: see `corpus_of`; for natural questions the path of a JSON Lines file, which must be
    given. `layout`: one of LAYOUT_NAMES (default: `even` for the tasks of FOUR_EVEN_SEGMENTS,
    `plain` for the others) with so many documents (default: the layout's own).

    Raises InvalidArgument naming the known tasks or layouts, for a layout that the task cannot
    have, a length that it cannot fill, or a corpus where the task uses no text; what `corpus_of`
    raises for a corpus that is not there.
    """
    family = _family(name, corpus)
    if isinstance(family, LanguageModel) and length < 2 * family.continuation:
        raise InvalidArgument(
            f"lm: expected a length of at least twice its continuation of {family.continuation} "
            f"tokens, got {length}"
        )
    chosen = layout_of(layout or ("even" if name in FOUR_EVEN_SEGMENTS else "plain"), documents)
    return LaidOut(family, chosen, length)


def layout_of(name: str, documents: int | None = None) -> Plain:
    """A layout by its name, with so many documents or its own number of them.

    Raises InvalidArgument naming the known layouts, or for fewer documents than it can lay out.
    """
    known = {layout.name: layout for layout in LAYOUTS}
    if name not in known:
        raise InvalidArgument(f"layout: expected one of {', '.join(known)}, got {shown(name)}")
    return known[name]() if documents is None else known[name](documents)


def _family(name: str, corpus: str | None) -> Family:
    if name in _TEXT:
        family = _TEXT[name](corpus or DEFAULT_CORPUS)
        if corpus is not None:
            corpus_of(corpus)  # what is missing is said now, not after a model was loaded
        return family
    if name in _TABLES:
        if corpus is not None:
            raise InvalidArgument(f"{name}: expected no corpus, as it uses no text, got {corpus!r}")
        return _TABLES[name]()
    if name not in _QUESTIONS:
        raise InvalidArgument(f"task: expected one of {', '.join(TASK_NAMES)}, got {shown(name)}")
    if corpus is None:
        raise InvalidArgument(
            f"{name}: expected as corpus the path of a JSON Lines file of questions, got none"
        )
    natural_questions(corpus)
    return _QUESTIONS[name](corpus)
