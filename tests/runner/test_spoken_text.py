"""Text of tokens as they come, and what ends an answer: strings and ids, across tokens too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as kinds

from families import tiny
from kvweave import models
from kvweave.errors import InvalidArgument
from kvweave.runner import Runner, Sampling
from kvweave.runner.answers.detokenizer import Detokenizer
from kvweave.runner.answers.stop import Stop, StopStrings

WORDS = models.load_tokenizer("smollm2")
HALVES = WORDS("中 😀 é 한 👩‍👩‍👧", add_special_tokens=False).input_ids
"""Tokens of which some end in the middle of a character."""
BYTES = [i for i in range(300) if WORDS.decode([i]) == "\ufffd"]
"""Single bytes that make no character alone."""


def smollm2_text(tokens: Sequence[int]) -> str:
    return str(WORDS.decode(list(tokens), skip_special_tokens=True))


def pieces_of(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


token_lists = st.lists(
    st.one_of(
        st.integers(0, len(WORDS) - 1),
        st.sampled_from(HALVES),
        st.sampled_from(BYTES),
        st.sampled_from(WORDS.all_special_ids),
    ),
    max_size=60,
)


@given(token_lists)
@example([141, *[0] * 7, 218])
@settings(max_examples=300)
def test_pieces_are_the_text_of_all_tokens(tokens: list[int]) -> None:
    whole = smollm2_text(tokens)
    assert "".join(pieces_of(smollm2_text, tokens)) == whole


@given(st.text(max_size=40))
def test_a_character_is_told_with_its_last_byte(text: str) -> None:
    tokens = WORDS(text, add_special_tokens=False).input_ids
    told = ""
    detokenizer = Detokenizer(smollm2_text)
    for count, token in enumerate(tokens, 1):
        told += detokenizer.add(token)
        known = smollm2_text(tokens[:count])
        if not known.endswith("\ufffd"):
            assert told == known
    assert told + detokenizer.finish() == smollm2_text(tokens)


def sentencepiece_like() -> Tokenizer:
    """Blanks are part of words and bytes are tokens, as in Llama 2: a first blank is dropped."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁a", "b", "▁▁", "c▁", "▁das"):
        vocabulary[word] = len(vocabulary)
    made = Tokenizer(kinds.BPE(vocabulary, [], byte_fallback=True, unk_token="<0x00>"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


PIECES = sentencepiece_like()


@given(st.lists(st.one_of(st.integers(256, 261), st.sampled_from("é中😀\n")), max_size=30))
def test_blanks_and_bytes_of_another_kind_of_tokenizer(parts: list[int | str]) -> None:
    tokens = [t for part in parts for t in ([part] if isinstance(part, int) else part.encode())]
    assert "".join(pieces_of(PIECES.decode, tokens)) == PIECES.decode(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        BYTES[:1] * 2000,
        HALVES * 400,
        [WORDS.eos_token_id] * 2000,
        WORDS(" and so on" * 600).input_ids,
        np.random.default_rng(0).choice(BYTES, 2000).tolist(),
    ],
    ids=["one byte", "characters", "special", "words", "bytes"],
)
def test_the_work_grows_with_the_number_of_tokens(tokens: list[int]) -> None:
    decoded = 0

    def counting(some: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return smollm2_text(some)

    assert "".join(pieces_of(counting, tokens)) == smollm2_text(tokens)
    assert decoded <= 60 * len(tokens)


# ---- strings that end a text -----------------------------------------------------------------


def ends_first(text: str, strings: Sequence[str]) -> str | None:
    """The text before the string that ends first, the longest of those, by plain search."""
    for end in range(1, len(text) + 1):
        said = [string for string in strings if text[:end].endswith(string)]
        if said:
            return text[: end - max(map(len, said))]
    return None


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=400)
def test_strings_are_found_across_pieces(text: str, strings: list[str], cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(text)]
    heard, shown = StopStrings(strings), ""
    for start, end in pairwise(ends):
        shown += heard.hear(text[start:end])
        # Nothing is held back but what may yet be the beginning of one.
        if not heard.found:
            held = text[len(shown) : max(end, len(shown))]
            assert not held or any(string.startswith(held) for string in strings)
    shown += heard.rest()
    wanted = ends_first(text, strings)
    assert (shown, heard.found) == ((text, False) if wanted is None else (wanted, True))


def test_a_long_string_is_looked_for_in_time_that_grows_with_the_text() -> None:
    heard = StopStrings(["a" * 100_000 + "b"])
    assert "".join(heard.hear("a" * 50) for _ in range(4000)) == "a" * 100_000
    assert not heard.found
    assert heard.hear("b") == ""
    assert heard.found


def test_what_ends_an_answer() -> None:
    end, vocabulary = WORDS.eos_token_id, len(WORDS)
    made = {
        name: Stop.of(stop, WORDS, vocabulary)
        for name, stop in {
            "none": None,
            "nothing": (),
            "ids": [5, np.int32(6)],
            "string": "eos",
            "strings": ["\n", "\n", "x"],
            "both": ["x", 7],
            "special": ["<|im_end|>", "<|endoftext|>"],
        }.items()
    }
    assert made["none"] == Stop(frozenset({end}))
    assert made["nothing"] == Stop()
    assert made["ids"] == Stop(frozenset({5, 6}))
    assert made["string"] == Stop(frozenset({end}), ("eos",))
    assert made["strings"] == Stop(frozenset({end}), ("\n", "x"))
    assert made["both"] == Stop(frozenset({7}), ("x",))
    special = {WORDS.convert_tokens_to_ids(one) for one in ("<|im_end|>", "<|endoftext|>")}
    assert made["special"] == Stop(frozenset({end, *special}))


@pytest.mark.parametrize("stop", [5, b"ab", [None], [1.5], [True], [""], [-1], [10**9], ["\ud800"]])
def test_what_ends_nothing_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match="^stop: expected .*, got "):
        Stop.of(stop, WORDS, len(WORDS))
    with pytest.raises(InvalidArgument, match="as the runner has no tokenizer, got 'x'"):
        Stop.of("x", None, 10)


# ---- answers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Runner:
    """A random model, which says random words."""
    model = tiny("llama", vocab_size=len(WORDS), num_hidden_layers=1)
    return Runner(model, WORDS, max_tokens=2048, progress=False, check=False)


HOT = Sampling(temperature=1.5, seed=3)
HOW = {"policy": "full", "max_new_tokens": 40, "sampling": HOT, "remember": False}


def test_a_stream_is_the_answer_and_reads_each_token_a_few_times(runner: Runner) -> None:
    for seed in range(2):
        how = {**HOW, "sampling": Sampling(temperature=1.5, seed=seed), "stop": []}
        whole = runner.generate("Say 中 😀", **how)
        said = list(runner.stream("Say 中 😀", **how))
        assert [one.token for one in said] == whole.tokens
        assert "".join(one.text for one in said) == whole.text
        assert sum(one.text != "" for one in said) > 20


def test_a_string_ends_an_answer_wherever_its_tokens_are_cut(runner: Runner) -> None:
    free = runner.generate("Once", **HOW, stop=[])
    texts = ["".join(smollm2_text([t]) for t in free.tokens[:n]) for n in range(41)]
    # From the middle of one token to the middle of the next but one.
    middle = (len(texts[10]) + len(texts[11])) // 2
    across = free.text[middle : (len(texts[12]) + len(texts[13])) // 2 + 1]
    for stop in (across, [across], ["never said", across], [across, across[:-1] + "no"]):
        at = free.text.index(across)
        ended = runner.generate("Once", **HOW, stop=stop)
        assert ended.text == free.text[:at]
        count = len(ended.tokens)
        assert ended.tokens == free.tokens[:count]
        assert across in smollm2_text(ended.tokens)
        assert across not in smollm2_text(ended.tokens[:-1])
        said = list(runner.stream("Once", **HOW, stop=stop))
        assert [one.token for one in said] == ended.tokens
        assert "".join(one.text for one in said) == ended.text
    assert runner.generate("Once", **HOW, stop=["never said"]).text == free.text
    assert runner.generate("Once", **HOW, stop=[free.tokens[5]]).tokens == free.tokens[:6]


def test_one_answer_of_a_batch_ends_and_others_go_on(runner: Runner) -> None:
    free = runner.generate_batch(["Once", "Twice upon"], **HOW, stop=[])
    words = [smollm2_text([token]) for token in free[0].tokens[:-5]]
    word = next(word for word in words if word not in free[1].text)
    ended = runner.generate_batch(["Once", "Twice upon"], **HOW, stop=word)
    assert len(ended[0].tokens) < 40
    assert ended[1].tokens == free[1].tokens
    assert runner.cache.stats()["held"] == 0


def test_strings_end_answers_of_prefilled_prompts_and_of_conversations(runner: Runner) -> None:
    free = runner.generate("Once", **HOW, stop=[])
    word = smollm2_text([free.tokens[4]])
    wanted = runner.generate("Once", **HOW, stop=word)
    how = {"max_new_tokens": 40, "sampling": HOT, "stop": word}
    with runner.prefill("Once", "full", remember=False, reserve_tokens=40) as done:
        assert runner.decode(done, **how).text == wanted.text
    with runner.prefill("Once", "full", remember=False) as done:
        assert runner.resume(runner.export(done), **how).text == wanted.text
    with runner.conversation("full", remember=False) as talk:
        said = talk.ask("Once", **how)
        assert (said.text, said.tokens) == (wanted.text, wanted.tokens)
        prompt = len(runner.tokenize("Once").tokens)
        assert talk.tokens == prompt + len(wanted.tokens) - 1
        assert talk.ask(" and", **how).text is not None
