"""A pool whose first prompts were short: a second shared basis, made once a text is longer."""

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
    GOLDEN,
    MOVES,
    REFINED,
    SHARED,
    UNROTATED,
    FoundBasis,
    PoolBases,
    PositionRange,
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

INV_FREQ = 10.0 ** -torch.linspace(0, 4, DIM // 2)
ROPE = ops.RopeTable(INV_FREQ[None].contiguous())
WIDE = PositionRange(ROPE, 1 << 16, PAGES)


def drawn(pages: int, seed: int) -> torch.Tensor:
    """Keys and values f32 [n, PAGES, 2, 64, D] whose channels are neither alike nor independent."""
    made = torch.Generator().manual_seed(seed)
    mix = torch.randn(PAGES, 2, DIM, DIM, generator=made)
    x = torch.randn(pages, PAGES, 2, PAGE, DIM, generator=made) @ mix
    return x + 3 * torch.randn(PAGES, 2, 1, DIM, generator=made)


def paged(text: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Pages in a cache, and the packs that name them."""
    room = text.flatten(0, 1)
    blocks = 1 + PAGES * np.arange(len(text))
    packs = np.column_stack((blocks, np.full(len(text), PAGE), blocks)).astype(np.int32)
    return torch.cat((torch.zeros_like(room[:1]), room)), packs


def turned(x: torch.Tensor, by: int, inv_freq: torch.Tensor = INV_FREQ) -> torch.Tensor:
    """Keys f64 [..., D] that have moved by so many positions."""
    angle = by * inv_freq.double()
    one, other = x.split(DIM // 2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


def all_over(pages: torch.Tensor, tokens: int, inv_freq: torch.Tensor = INV_FREQ) -> torch.Tensor:
    """Pages f64 where keys stand at many positions below so many: [n, PAGES, 2, 64·moves, D]."""
    keys, values = pages.double().unbind(2)
    by = [int(tokens * (n * GOLDEN % 1.0)) for n in range(MOVES)]
    moved = torch.cat([turned(keys, delta, inv_freq) for delta in by], 2)
    return torch.stack((moved, values.repeat(1, 1, MOVES, 1)), 2)


def expect_basis_of(basis: torch.Tensor, pages: torch.Tensor) -> None:
    """That one of top-r pages is the mean of what is finite and its directions of most spread."""
    for page in range(PAGES):
        for side in (0, 1):
            x = pages[:, page, side].flatten(0, 1).double().numpy()
            x = x[np.isfinite(x).all(1)]
            mean, spread = x.mean(0), np.cov(x.T, bias=True)
            got = basis[page, side].double().numpy()
            np.testing.assert_allclose(got[0], mean, rtol=1e-5, atol=1e-5 * np.abs(x).max())
            along = np.einsum("cd,de,ce->c", got[1:], spread, got[1:])
            wanted = np.linalg.eigvalsh(spread)[::-1]
            np.testing.assert_allclose(along, wanted, rtol=1e-4, atol=1e-4 * wanted[0])


def told(found: FoundBasis, pages: torch.Tensor, places: list[int]) -> Any:
    """Has pages added that are wanted, at once: the basis that comes of them, if any does."""
    cache, packs = paged(pages)
    at = np.asarray(places, np.int32)
    some = found.wanted(at)
    return found.add(cache, packs[some], at[some]) if some.any() else None


def test_the_second_is_of_the_same_tokens_at_any_position() -> None:
    """Those of the first, and of a longer text what lies behind them."""
    found = FoundBasis(ops.packed_format("half-int4", DIM), PAGES, WIDE)
    first, short, long = drawn(8, 1), drawn(8, 2), drawn(12, 3)
    expect_basis_of(told(found, first, list(range(8))), first)
    assert found.number == SHARED
    assert told(found, short, list(range(8))) is None
    basis = told(found, long, list(range(12)))
    assert found.number == REFINED
    pages = torch.cat((first, long[8:]))
    expect_basis_of(basis, all_over(pages, WIDE.tokens))
    assert not found.wants_moments
    assert not found.wanted(np.arange(99, dtype=np.int32)).any()


@pytest.mark.parametrize(
    ("positions", "texts", "numbers"),
    [
        (WIDE, [4, 4, 5], [SHARED]),
        (WIDE, [4, 4, 5, 6], [SHARED, REFINED]),
        (WIDE, [8, 9, 20, 40], [SHARED, REFINED]),
        (WIDE, [32, 32], [SHARED]),
        (WIDE, [2, 9, 9, 1], [SHARED]),
        (WIDE, [1] * 40, [SHARED]),
        (WIDE, [7], []),
        (None, [4, 9, 32], [SHARED]),
    ],
)
def test_when_there_is_a_longer_text(
    positions: PositionRange | None, texts: list[int], numbers: list[int]
) -> None:
    """Of texts of so many pages; those that are no longer, however many, make no second one."""
    found = FoundBasis(ops.packed_format("half-int4", DIM), PAGES, positions)
    made, taken = [], 0
    for count in texts:
        taken += found.wanted(np.arange(count, dtype=np.int32)).sum()
        if told(found, drawn(count, count), list(range(count))) is not None:
            made.append(found.number)
    assert made == numbers
    assert found.number == (numbers or [UNROTATED])[-1]
    wants = found.number == UNROTATED or (positions is not None and found.number == SHARED)
    assert found.wants_moments == wants
    assert taken <= 8 + 2 * max(texts)


@formats
def test_short_texts_give_what_they_gave_without_a_second(name: str) -> None:
    """All is as in a pool that makes no second one, bit for bit."""
    of, pages = ops.packed_format(name, DIM), drawn(9, 3)
    made = []
    for positions in (None, WIDE):
        found = FoundBasis(of, PAGES, positions)
        places = np.arange(3, dtype=np.int32)
        if found.wants_queries(places):
            draws = torch.Generator().manual_seed(1)
            found.add_queries(torch.randn(8, PAGES, DIM, generator=draws), 0, PAGES)
        bases = [told(found, pages[n : n + 3], [0, 1, 2]) for n in (0, 3, 6, 0, 3)]
        made.append([basis for basis in bases if basis is not None])
        assert found.number == SHARED
    assert len(made[0]) == (2 if name == "planes-3" else 1)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("spoiled", ["constant", "large", "nan", "inf", "all nan"])
@formats
def test_bad_input_among_later_tokens(name: str, spoiled: str) -> None:
    """What is not finite counts for nothing; what does not vary is no direction."""
    pages = drawn(12, 4)
    later = pages[8:]
    if spoiled == "constant":
        later[..., 3] = 5.0
    elif spoiled == "large":
        later[..., 3] *= 1e15
    elif spoiled == "all nan":
        later[..., 5] = torch.nan
    else:
        later[0, :, :, ::7, 5] = float(spoiled)
    found = FoundBasis(ops.packed_format(name, DIM), PAGES, WIDE)
    assert told(found, pages[:8], list(range(8))) is not None
    basis = told(found, later, [8, 9, 10, 11])
    assert found.number == REFINED
    assert basis.isfinite().all()
    if name == "half-int4":
        expect_basis_of(basis, all_over(pages, WIDE.tokens))


def test_a_second_basis_is_for_positions_that_no_token_had() -> None:
    """Of keys there it loses less in as few numbers."""
    of, far = ops.packed_format("half-int4", DIM), PositionRange(ROPE, 1 << 14, PAGES)
    found, text = FoundBasis(of, PAGES, far), drawn(9, 5)
    bases = [
        told(found, text[some], at) for some, at in ((slice(8), [*range(8)]), (slice(8, 9), [12]))
    ]
    moved = turned(text[:, :, 0].double(), 9000)
    lost = []
    for basis in bases:
        mean, directions = basis[:, 0].double().split((1, DIM), 1)
        along = (moved - mean) @ directions.mT
        kept = along.abs().topk(DIM // 4, -1).indices
        left = along.scatter(-1, kept, 0.0)
        lost.append(float(left.square().sum()))
    assert lost[1] < 0.8 * lost[0]


def test_queries_count_where_their_rows_go_further() -> None:
    """So those of short prompts, which may fill no page at all, do not go on for ever."""
    found = FoundBasis(ops.packed_format("planes-3", DIM), PAGES, WIDE)
    none, old, new = (np.asarray(places, np.int32) for places in ([], [7, 8], [7, 12]))
    assert found.wants_queries(none)
    told(found, drawn(8, 1), list(range(8)))
    assert found.number == SHARED
    assert [found.wants_queries(places) for places in (none, old, new)] == [False, False, True]
    rotated = FoundBasis(ops.packed_format("half-int4", DIM), PAGES, WIDE)
    assert not rotated.wants_queries(new)


@formats
def test_a_pool_that_begins_anew_makes_both_anew(name: str) -> None:
    of, own = ops.packed_format(name, DIM), 2
    data = torch.zeros((shared_bases(refines=True) + own, *basis_shape(of, PAGES)))
    pages = ops.PackedPages.zeros(PAGES * 64, of, bases=data)
    assert pages.bases is not None
    pool = PoolBases(pages.bases, of, PAGES, None, refines=True, positions=WIDE)
    assert pool.most_own == own
    for seed in (1, 2):
        text, numbers = drawn(12, seed), []
        for first in range(0, 12, 4):
            places = np.arange(first, first + 4, dtype=np.int32)
            assert pool.wanted(places).all()
            pool.add(*paged(text[first : first + 4]), places)
            numbers.append(pool.shared)
        assert numbers == [UNROTATED, SHARED, REFINED]
        assert not pool.wants_moments
        if name == "half-int4":
            expect_basis_of(pool.bases.data[SHARED], text[:8])
            expect_basis_of(pool.bases.data[REFINED], all_over(text, WIDE.tokens))
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
        first, second = 256 // PAGE, 576 // PAGE
        assert numbers_of(runner, done) == [
            *[UNROTATED] * first,
            *[SHARED] * (second - first),
            *[REFINED] * (2400 // PAGE - second),
        ]
        assert done.report.packed.beside == 2400 // PAGE - 896 // PAGE
        sequence = decoding(runner, done, STEPS + 1)
        logits = [done.logits[-1], *steps_of(runner, sequence, STEPS)]
        said = sequence.tokens
    of, data = runner.packed.pages.format, bases_of(runner).bases.data
    ends = [(0, 256), (256, 576), (576, 1 << 20)]
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
    runner.prefill(random_tokens(1000, 2), "full", remember=False).release()
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
    runner = packed_runner(small, kv_dtype="half-int4", max_tokens=16384)
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

    def heard(cache: torch.Tensor, packs: Any, places: Any, left_out: int) -> Any:
        seen.append((cache.clone(), packs, left_out, places.tolist()))
        return add(cache, packs, places, left_out)

    runner.packed.bases._found.add = heard
    for seed, count in enumerate((320, 330, 300, 2100)):
        runner.encode(random_tokens(count, seed), str(seed))
    runner.flush()
    assert bases_of(runner).shared == REFINED
    # The last page of the second makes no longer text; of the last all behind the others count.
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
    # As many positions as the model is made for, though the pool has room for more.
    wide = all_over(text[None], 8192, small.model.rotary_emb.inv_freq)[0]
    for page in range(4):
        for side in (0, 1):
            x = wide[page, side]
            torch.testing.assert_close(basis[page, side, 0].double(), x.mean(0), atol=1e-5, rtol=0)
            along = basis[page, side, 1:].double() @ torch.cov(x.T, correction=0)
            spread = (along * basis[page, side, 1:]).sum(-1)
            wanted = torch.linalg.eigvalsh(torch.cov(x.T, correction=0)).flip(0)
            torch.testing.assert_close(spread, wanted, rtol=1e-3, atol=1e-4 * float(wanted[0]))
