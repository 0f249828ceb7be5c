"""A pool whose first prompts were short: a second shared basis, made once texts are longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from families import random_tokens, tiny
from kvweave import ops
from kvweave.runner import Packing, Runner
from kvweave.runner.kv.pool_bases import (
    REFINED,
    REFINED_TOKENS,
    SHARED,
    SHARED_TOKENS,
    UNROTATED,
    FoundBasis,
    PoolBases,
    basis_shape,
    shared_bases,
)
from packed_decoding import PackedDecoding, nothing_is_held, packed_runner, steps_of
from page_meaning import PAGE, Layer, of_format

SIZES = {"head_dim": 64, "max_position_embeddings": 8192, "num_hidden_layers": 2}
NAMES = ["half-int4", "planes-3"]
PAGES, DIM = 2, 16
STEPS = 70

formats = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


# ---- what it is made of -----------------------------------------------------------------------

PLACES = REFINED_TOKENS // PAGE


def drawn(pages: int, seed: int) -> torch.Tensor:
    """Keys and values f32 [n, PAGES, 2, 64, D] whose channels are neither alike nor independent."""
    made = torch.Generator().manual_seed(seed)
    mix = torch.randn(PAGES, 2, DIM, DIM, generator=made)
    x = torch.randn(pages, PAGES, 2, PAGE, DIM, generator=made) @ mix
    return x + 3 * torch.randn(PAGES, 2, 1, DIM, generator=made)


def paged(text: torch.Tensor, last: int = PAGE) -> tuple[torch.Tensor, Any]:
    """Pages in a cache, and the packs that name them; the last has so many tokens."""
    room = text.flatten(0, 1)
    blocks = 1 + PAGES * np.arange(len(text))
    packs = np.column_stack((blocks, np.full(len(text), PAGE), blocks)).astype(np.int32)
    packs[-1, 1] = last
    return torch.cat((torch.zeros_like(room[:1]), room)), packs


def expect_basis_of(basis: torch.Tensor, pages: torch.Tensor) -> None:
    """That one of top-r pages is the mean of what is finite and its directions of most spread."""
    for page in range(PAGES):
        for side in (0, 1):
            x = pages[:, page, side].flatten(0, 1).double().numpy()
            x = x[np.isfinite(x).all(1)]
            mean, spread = x.mean(0), np.cov(x.T, bias=True)
            got = basis[page, side].double().numpy()
            np.testing.assert_allclose(got[0], mean, rtol=1e-5, atol=1e-5)
            along = np.einsum("cd,de,ce->c", got[1:], spread, got[1:])
            wanted = np.linalg.eigvalsh(spread)[::-1]
            np.testing.assert_allclose(along, wanted, rtol=1e-4, atol=1e-4 * wanted[0])


def told(found: FoundBasis, pages: torch.Tensor, places: list[int], last: int = PAGE) -> Any:
    """Has pages added that are wanted, at once: the basis that comes of them, if any does."""
    cache, packs = paged(pages, last)
    at = np.asarray(places, np.int32)
    some = found.wanted(at, packs[:, 1])
    return found.add(cache, packs[some], places=at[some]) if some.any() else None


@pytest.mark.parametrize("seed", range(3))
def test_it_is_made_of_what_comes_first_and_then_of_new_places(seed: int) -> None:
    """By a plain account of the pages that count, of texts of any length in any order."""
    of = ops.packed_format("half-int4", DIM)
    draws, found = np.random.default_rng(seed), FoundBasis(of, PAGES, refines=True)
    counted: list[torch.Tensor] = []
    seen, made = set[int](), []
    while found.wants_moments:
        first = int(draws.integers(0, PLACES))
        places = list(range(first, first + int(draws.integers(1, 6))))
        last = int(draws.choice([PAGE, PAGE, 9]))
        pages = drawn(len(places), int(draws.integers(1 << 30)))
        if last < PAGE:
            pages[-1, :, :, last:] = torch.nan
        begun, whole = bool(made), [place for place in places if last == PAGE or place < places[-1]]
        for page, place in zip(pages, places, strict=True):
            if not begun or (place in whole and place not in seen):
                counted.append(page)
        seen |= set(whole)
        basis = told(found, torch.nan_to_num(pages), places, last)
        tokens = sum(int(page[0, 0, :, 0].isfinite().sum()) for page in counted)
        due = seen >= set(range(PLACES)) if begun else tokens >= SHARED_TOKENS
        assert (basis is not None) == due
        if basis is not None:
            made.append(found.number)
            expect_basis_of(basis, torch.stack(counted))
    assert made == [SHARED, REFINED]
    assert not found.wanted(np.arange(9, dtype=np.int32)).any()


@pytest.mark.parametrize(
    ("refines", "texts", "numbers"),
    [
        # Long enough at once: the first is as good as a second would be.
        (True, [32], [SHARED]),
        (True, [4, 32], [SHARED]),
        (True, [4, 9, 32], [SHARED, REFINED]),
        (True, [31, 32, 40], [SHARED, REFINED]),
        (True, [31] * 9, [SHARED]),
        (True, [7] * 40, [SHARED]),
        (True, [7], []),
        (False, [4, 9, 32], [SHARED]),
    ],
)
def test_when_texts_are_long_enough(refines: bool, texts: list[int], numbers: list[int]) -> None:
    """Of texts of so many pages; short ones, however many they are, never make a second."""
    found = FoundBasis(ops.packed_format("half-int4", DIM), PAGES, refines=refines)
    made, taken = [], 0
    for count in texts:
        taken += found.wanted(np.arange(count, dtype=np.int32)).sum()
        if told(found, drawn(count, count), list(range(count))) is not None:
            made.append(found.number)
    assert made == numbers
    assert found.number == (numbers or [UNROTATED])[-1]
    assert found.wants_moments == (max(texts) < PLACES if refines else not numbers)
    assert taken <= 8 + max(texts) + PLACES


@formats
def test_short_texts_give_what_they_gave_without_a_second(name: str) -> None:
    """Up to 2048 tokens all is as in a pool that makes no second one, bit for bit."""
    of, pages = ops.packed_format(name, DIM), drawn(PLACES - 1, 3)
    made = []
    for refines in (False, True):
        found = FoundBasis(of, PAGES, refines=refines)
        if found.wants_queries():
            draws = torch.Generator().manual_seed(1)
            found.add_queries(torch.randn(8, PAGES, DIM, generator=draws), 0, PAGES)
        bases = [told(found, pages[n : n + 3], [n, n + 1, n + 2]) for n in range(0, PLACES - 2, 3)]
        made.append([basis for basis in bases if basis is not None])
        assert found.number == SHARED
    assert len(made[0]) == (2 if name == "planes-3" else 1)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("spoiled", ["constant", "large"])
@formats
def test_odd_channels_among_later_tokens(name: str, spoiled: str) -> None:
    """What does not vary is no direction, and what is large is the first."""
    pages = drawn(PLACES, 4)
    later = pages[8:]
    later[..., 3] = 5.0 if spoiled == "constant" else 1e15 * later[..., 3]
    found = FoundBasis(ops.packed_format(name, DIM), PAGES, refines=True)
    assert told(found, pages[:8], list(range(8))) is not None
    basis = told(found, later, list(range(8, PLACES)))
    assert found.number == REFINED
    assert basis.isfinite().all()
    if name == "half-int4":
        expect_basis_of(basis, pages)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@formats
def test_what_is_not_finite_among_later_tokens(name: str, number: float) -> None:
    """Its vectors count for nothing, and its places wait for another text."""
    pages = drawn(PLACES + 2, 4)
    pages[8, :, :, :, 5] = number
    pages[9, 0, 1, 7, 5] = number
    found = FoundBasis(ops.packed_format(name, DIM), PAGES, refines=True)
    assert told(found, pages[:8], list(range(8))) is not None
    assert told(found, pages[8:PLACES], list(range(8, PLACES))) is None
    wanted = np.flatnonzero(found.wanted(np.arange(PLACES, dtype=np.int32)))
    assert wanted.tolist() == [8, 9]
    basis = told(found, pages[PLACES:], [8, 9])
    assert found.number == REFINED
    assert basis.isfinite().all()
    if name == "half-int4":
        expect_basis_of(basis, pages)


def test_queries_count_where_their_rows_bring_new_places() -> None:
    """So those of short prompts, which may fill no page at all, do not go on for ever."""
    found = FoundBasis(ops.packed_format("planes-3", DIM), PAGES, refines=True)
    none, old, new = (np.asarray(places, np.int32) for places in ([], [0, 7], [7, 8]))
    assert found.wants_queries(none)
    told(found, drawn(8, 1), list(range(8)))
    assert found.number == SHARED
    assert [found.wants_queries(places) for places in (none, old, new)] == [False, False, True]
    assert not found.wants_queries()
    rotated = FoundBasis(ops.packed_format("half-int4", DIM), PAGES, refines=True)
    assert not rotated.wants_queries(new)


@formats
def test_a_pool_that_begins_anew_makes_both_anew(name: str) -> None:
    of, own = ops.packed_format(name, DIM), 2
    data = torch.zeros((shared_bases(refines=True) + own, *basis_shape(of, PAGES)))
    pages = ops.PackedPages.zeros(PAGES * 64, of, bases=data)
    assert pages.bases is not None
    pool = PoolBases(pages.bases, of, PAGES, None, refines=True)
    assert pool.most_own == own
    for seed in (1, 2):
        text, numbers = drawn(PLACES, seed), []
        for first in range(0, PLACES, 4):
            places = np.arange(first, first + 4, dtype=np.int32)
            assert pool.wanted(places).all()
            pool.add(*paged(text[first : first + 4]), 0, places)
            numbers.append(pool.shared)
        assert numbers == [UNROTATED, *[SHARED] * 6, REFINED]
        assert not pool.wants_moments
        if name == "half-int4":
            expect_basis_of(pool.bases.data[REFINED], text)
        pool.assign(np.array([1, 3], np.int32), REFINED)
        assert (pool.held(), pool.own_bytes(np.array([1], np.int32))) == (0, 0)
        assert pool.free() == pool.first_own == REFINED + 1
        pool.begin_anew()
        assert pool.shared == UNROTATED
        assert pool.wants_moments


# ---- in a runner ------------------------------------------------------------------------------


def bases_of(runner: Runner) -> PoolBases:
    assert runner.packed is not None
    assert runner.packed.bases is not None
    return runner.packed.bases


def numbers_of(runner: Runner, done: Any) -> list[int]:
    """The bases of a prompt's whole pages, by their numbers."""
    packed = done.kv.packed
    blocks = packed.request.entries()[: packed.tokens // PAGE, 0]
    found: list[int] = bases_of(runner).numbers(blocks).tolist()
    return found


@formats
def test_a_prompt_across_all_three_is_the_definition(name: str, model: Any) -> None:
    """Each page stands for what the basis makes of it that there was when it filled."""
    chunk, tokens = 300, random_tokens(2400, 5)
    runner = packed_runner(model, kv_dtype=name, max_tokens=4096, chunk_tokens=chunk)
    with runner.prefill(tokens, "full", remember=False, reserve_tokens=STEPS) as done:
        first, second = 256 // PAGE, 1792 // PAGE
        assert numbers_of(runner, done) == [
            *[UNROTATED] * first,
            *[SHARED] * (second - first),
            *[REFINED] * (2400 // PAGE - second),
        ]
        assert done.report.packed.beside == 2400 // PAGE - 2048 // PAGE
        sequence = decoding(runner, done, STEPS + 1)
        logits = [done.logits[-1], *steps_of(runner, sequence, STEPS)]
        said = sequence.tokens
    of, data = runner.packed.pages.format, bases_of(runner).bases.data
    ends = [(0, 256), (256, 1792), (1792, 1 << 20)]
    meanings = [of_format(of, data[number]) for number in (UNROTATED, SHARED, REFINED)]

    def meaning(layer: int, text: Layer) -> Layer:
        parts = [
            each(layer, (text[0][:, begin:end], text[1][:, begin:end]))
            for each, (begin, end) in zip(meanings, ends, strict=True)
            if text[0].shape[1] > begin
        ]
        keys, values = (torch.cat(sides, 1) for sides in zip(*parts, strict=True))
        return keys, values

    answers = []
    for each in (meaning, None, meanings[1]):
        double = PackedDecoding(model, meaning=each)
        answers.append([double.prefill(tokens, chunk), *(double.step(t) for t in said[:-1])])
    wanted, exact, first_alone = answers
    for other in (exact, first_alone):
        effect = apart(other, wanted)
        assert effect > 1e-4
        assert apart(logits, wanted) < 0.1 * effect
    assert nothing_is_held(runner)


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@formats
def test_what_was_packed_before_is_read_as_before(name: str, model: Any) -> None:
    """To the bit, by steps of a request and by a later prompt that finds its pages."""
    text, answers, pages = random_tokens(700, 1), [], []
    behind = np.concatenate((text[:640], random_tokens(40, 8)))
    for more in (0, 2100):
        runner = packed_runner(model, kv_dtype=name, max_tokens=8192)
        asked = {"reserve_tokens": 50, "watched": False}
        with runner.prefill(text, "prefix", **asked) as done:
            blocks = done.kv.packed.request.entries()[:10, 0]
            kept = bases_of(runner).bases.data[: SHARED + 1].clone()
            if more:
                runner.prefill(random_tokens(more, 2), "full", remember=False).release()
            assert bases_of(runner).shared == (REFINED if more else SHARED)
            assert torch.equal(bases_of(runner).bases.data[: SHARED + 1], kept)
            assert numbers_of(runner, done) == [SHARED] * 10
            sequence = decoding(runner, done, 51)
            # No page fills in these steps.
            answers.append(steps_of(runner, sequence, 50))
            index = blocks[:, None] + np.arange(runner.packed.block_pages)
            pages.append(runner.packed.pages.data[torch.from_numpy(index.reshape(-1))])
        with runner.prefill(behind, "prefix", **asked) as done:
            assert done.report.reused_prefix == 640
            answers[-1].append(done.logits[-1])
        assert nothing_is_held(runner)
    assert torch.equal(*pages)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@formats
def test_answers_get_nearer_to_exact_ones(name: str, model: Any) -> None:
    """Where the first prompt was short, and of few words; the same basis alone is what was."""
    first = np.resize(random_tokens(3, 1), 600)
    runner = packed_runner(model, kv_dtype=name, max_tokens=8192)
    runner.prefill(first, "full", remember=False).release()
    given = Packing(name, basis=bases_of(runner).on_host(SHARED).clone())
    alone = packed_runner(model, kv_dtype=given, max_tokens=8192)
    exact = Runner(model, max_tokens=8192, progress=False, check=False)
    for seed in range(2, 12):
        runner.prefill(random_tokens(320, seed), "full", remember=False).release()
    assert bases_of(runner).shared == SHARED
    runner.prefill(random_tokens(REFINED_TOKENS, 2), "full", remember=False).release()
    assert bases_of(runner).shared == REFINED
    assert alone.packed.bases.shared == SHARED
    lost = np.zeros(2)
    for seed in range(10, 13):
        text, rest = random_tokens(900, seed), random_tokens(64, seed + 50).tolist()
        said = []
        for each in (exact, alone, runner):
            with each.prefill(text, "full", remember=False, reserve_tokens=64) as done:
                said.append(each.extend(done, rest).double().log_softmax(-1))
        wanted, *others = said
        lost += [float((wanted.exp() * (wanted - one)).sum(-1).mean()) for one in others]
    assert 0 < lost[1] < 0.7 * lost[0]


def test_requests_of_an_engine_go_on_across_it(model: Any) -> None:
    """Side by side: each says what its pages stand for, in whichever basis they were packed."""
    runner = packed_runner(model, kv_dtype="half-int4", max_tokens=16384)
    engine = runner.engine(token_budget=400, chunk_tokens=64)
    prompts = [random_tokens(count, count) for count in (300, 500, 2100, 700, 2300)]
    asked = {"max_new_tokens": 40, "remember": False, "stop": []}
    waiting = [engine.submit(prompt, **asked) for prompt in prompts]
    engine.run()
    assert bases_of(runner).shared == REFINED
    exact = Runner(model, max_tokens=8192, progress=False, check=False)
    for prompt, request in zip(prompts, waiting, strict=True):
        answer = request.result()
        assert len(answer.tokens) == 40
        text = np.concatenate((prompt, answer.tokens[:-1]))
        with exact.prefill(text, "full", remember=False, logits_from=len(prompt) - 1) as done:
            logits = done.logits
        # A tiny model's likeliest tokens are near others: what is said is near the likeliest.
        best = logits.max(-1).values
        got = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert float((best - got).max()) < 0.2 * float(logits.std())
    assert nothing_is_held(runner)


def test_a_document_of_the_first_basis_may_have_its_own(model: Any) -> None:
    """It is inserted while the first serves, and packed finally once there is a second."""
    small = tiny("llama", head_dim=16, max_position_embeddings=8192, num_hidden_layers=2)
    runner = packed_runner(small, kv_dtype="half-int4", max_tokens=16384, chunk_tokens=400)
    report = runner.encode(random_tokens(1200, 1), "long")
    assert bases_of(runner).shared == SHARED
    other = runner.encode(random_tokens(2100, 2), "next")
    assert bases_of(runner).shared == REFINED
    runner.flush()
    assert (report.packing.basis, other.packing.basis) == ("own", "own")
    numbers = bases_of(runner).bases.of.unique().tolist()
    assert numbers == [UNROTATED, REFINED + 1, REFINED + 2]
    assert runner.packed.stats()["own_bases"] == 2
    runner.delete("long")
    runner.delete("next")
    assert nothing_is_held(runner)


@pytest.mark.parametrize("exact_first", [1, 7])
def test_first_tokens_of_documents_are_in_neither(exact_first: int) -> None:
    """Of documents that are inserted one after another; they are exact beside their pages."""
    small = tiny("llama", head_dim=16, max_position_embeddings=8192, num_hidden_layers=2)
    packing = Packing("half-int4", exact_first=exact_first)
    runner = packed_runner(small, kv_dtype=packing, max_tokens=16384)
    seen: list[Any] = []
    add = runner.packed.bases._found.add

    def heard(cache: torch.Tensor, packs: Any, left_out: int, places: Any) -> Any:
        seen.append((cache.clone(), packs, left_out, places.tolist()))
        return add(cache, packs, left_out, places)

    runner.packed.bases._found.add = heard
    for seed, count in enumerate((320, 330, 300, 2100)):
        runner.encode(random_tokens(count, seed), str(seed))
    runner.flush()
    assert bases_of(runner).shared == REFINED
    # The last page of the second is not whole; of the last the places that others had are left.
    assert [places for *_, places in seen] == [
        *[list(range(5))] * 2,
        list(range(5, 32)),
    ]
    texts = []
    for cache, packs, left_out, places in seen:
        assert left_out == (0 if places[0] else exact_first)
        blocks = packs[:, 2:]
        rows = [torch.cat([cache[b : b + 4] for b in row.tolist() if b], 2) for row in blocks]
        texts.append(torch.cat(rows, 2)[:, :, left_out:])
    text = torch.cat(texts, 2)
    assert text.shape[2] == 2048 + 320 - 2 * exact_first
    basis = bases_of(runner).bases.data[REFINED]
    for page in range(4):
        for side in (0, 1):
            x = text[page, side].double()
            torch.testing.assert_close(basis[page, side, 0].double(), x.mean(0), atol=1e-5, rtol=0)
            along = basis[page, side, 1:].double() @ torch.cov(x.T, correction=0)
            spread = (along * basis[page, side, 1:]).sum(-1)
            wanted = torch.linalg.eigvalsh(torch.cov(x.T, correction=0)).flip(0)
            torch.testing.assert_close(spread, wanted, rtol=1e-3, atol=1e-4 * float(wanted[0]))
