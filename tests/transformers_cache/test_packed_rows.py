"""`PagedCache(kv_dtype=…)`: full pages packed, against attention over what these stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from cache_names import by_name
from families import tiny
from generated import computed_rows, padded, prompt_ids, said
from kvweave import ops
from kvweave.errors import InvalidArgument, PoolFull, Unsupported
from kvweave.runner import Packing
from packed_decoding import PackedDecoding
from page_meaning import PAGE, random_packing
from ranked_pages import best_pages, page_score

LAYERS, HEADS, DIM = 4, 2, 16
SINK, RECENT = 64, 128
FORMATS = ["int4", "int8", "half-int4", "quarter-bf16", "planes-3"]
ROOM = {"max_tokens": 2048, "check": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone() -> Any:
    """The same weights, which attend by themselves while the others have a cache."""
    return tiny("llama")


@torch.inference_mode()
def fed(model: Any, cache: Any, ids: torch.Tensor, parts: list[int], at: int = 0) -> torch.Tensor:
    """Logits [N, V] behind parts of a text [1, T], one forward each, from a position on."""
    made = []
    for count in parts:
        places = torch.arange(at, at + count)[None]
        given: dict[str, Any] = {"input_ids": ids[:, at : at + count], "position_ids": places}
        given["logits_to_keep"] = 1
        made.append(model(**given, **by_name(model, cache)).logits[0, -1].float())
        at += count
    return torch.stack(made)


def meant(definition: PackedDecoding, ids: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """The same by the definition, which goes on from the tokens that it has."""
    made, at = [], definition.length
    for count in parts:
        made.append(definition.prefill(ids[0, at : at + count].tolist(), count))
        at += count
    return torch.stack(made)


def expect_definition(ours: Any, wanted: Any, exact: Any) -> None:
    """But for rounding nothing differs, save numbers at the edge of two codes."""
    effect, error = (exact - wanted).abs().max(), (ours - wanted).abs().max()
    assert effect > 1e-4
    assert error < 0.05 * effect


@pytest.mark.parametrize("name", [*FORMATS, "truncated fours"])
@pytest.mark.parametrize("parts", [[430, *[1] * 70], [50, 300, 7, 1, 1, 90, *[1] * 40]])
def test_it_is_the_definition(model: Any, alone: Any, name: str, parts: list[int]) -> None:
    """A prompt at once or in parts, and decode steps in which pages come to be full."""
    packing, meaning = random_packing(name, LAYERS * HEADS, DIM)
    ids = prompt_ids(sum(parts), 1)
    wanted = meant(PackedDecoding(alone, 1, meaning), ids, parts)
    exact = meant(PackedDecoding(alone, 1, None), ids, parts)
    with kvweave.PagedCache(model, kv_dtype=packing, **ROOM) as cache:
        ours = fed(model, cache, ids, parts)
        expect_definition(ours, wanted, exact)
        cache.kv.check()
        cache.packed.check()
        cache.reset()
        assert (cache.bytes, cache.packed.stats()["held"]) == (0, 0)


@pytest.mark.parametrize("family", ["qwen3", "gemma", "phi", "granite", "olmo2", "gpt-neox"])
def test_families_say_what_the_definition_says(family: str) -> None:
    """Through `generate`, whose tokens are the likeliest ones of the definition."""
    model, alone = tiny(family), tiny(family)
    ids = prompt_ids(330, 2)
    with kvweave.PagedCache(model, kv_dtype="int4", max_tokens=1024) as cache:
        answer = torch.tensor(said(model, ids, cache=cache))
        assert cache.lengths == [341]
        # The page in progress has its room.
        assert cache.packed.stats()["held"] == 6
    of = PackedDecoding(alone, 1, random_packing("int4", 1, DIM)[1])
    likeliest = meant(of, answer, [330, *[1] * 11]).argmax(-1)
    assert likeliest.tolist() == answer[0, 330:].tolist()


def test_a_prompt_in_chunks_is_the_definition(model: Any, alone: Any) -> None:
    """As `generate` cuts it: each chunk reads what lies before its newest tokens packed."""
    ids = prompt_ids(500, 9)
    with kvweave.PagedCache(model, kv_dtype="int4", **ROOM) as cache:
        answer = torch.tensor(said(model, ids, cache=cache, prefill_chunk_size=150))
    of = PackedDecoding(alone, 1, random_packing("int4", 1, DIM)[1])
    logits = meant(of, answer, [150, 150, 150, 50, *[1] * 11])[3:]
    assert logits.argmax(-1).tolist() == answer[0, 500:].tolist()


# ---- prompts that go on behind others -------------------------------------------------------


@pytest.mark.parametrize(("count", "same"), [(500, 400), (500, 499), (460, 64), (210, 210)])
def test_a_prompt_goes_on_behind_whole_packed_pages(
    model: Any, alone: Any, count: int, same: int
) -> None:
    packing, meaning = random_packing("half-int4", LAYERS * HEADS, DIM)
    ids = prompt_ids(count + 20, 1)
    first = ids[:, :count].clone()
    first[0, same:] = prompt_ids(count, 3)[0, same:]
    found = min(same, count) // PAGE * PAGE
    of, exact = PackedDecoding(alone, 1, meaning), PackedDecoding(alone, 1, None)
    for each in (of, exact):
        meant(each, ids, [found])
    of.packed_at_least = found
    parts = [count - found, *[1] * 20]
    wanted, others = meant(of, ids, parts), meant(exact, ids, parts)
    with kvweave.PagedCache(model, kv_dtype=packing, **ROOM) as cache:
        fed(model, cache, first, [count])
        with computed_rows(model) as counts:
            ours = fed(model, cache, ids, [count, *[1] * 20])
        assert counts[0] == count - found
        assert cache.plans[0].reused_prefix == found
        assert sum(span.end - span.start for span in cache.plans[0].spans) == count
        assert cache.plans[0].recomputed == count - found
    if found == SINK:
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    else:
        expect_definition(ours, wanted, others)


def test_an_answer_is_found_by_the_next_turn(model: Any) -> None:
    with kvweave.PagedCache(model, kv_dtype="int8", **ROOM) as cache:
        talk = torch.tensor(said(model, prompt_ids(250, 8), cache=cache, max_new_tokens=90))
        said(model, padded(torch.cat((talk, prompt_ids(9, 9)), 1)), cache=cache)
        # 339 tokens have their KV, of which 320 lie in whole pages.
        assert cache.plans[0].reused_prefix == 320


def test_logits_of_all_rows_are_there_beside_what_is_found(model: Any, alone: Any) -> None:
    ids = prompt_ids(400, 4)
    with kvweave.PagedCache(model, kv_dtype="int8", **ROOM) as cache, torch.inference_mode():
        known = by_name(model, cache)
        made = [model(ids, position_ids=torch.arange(400)[None], **known).logits for _ in "ab"]
        assert cache.plans[0].reused_prefix == 384
        wanted = alone(ids).logits
    torch.testing.assert_close(made[0], wanted, rtol=1e-4, atol=1e-4)
    assert (made[1] - wanted).abs().max() < 0.05


# ---- batches --------------------------------------------------------------------------------


def test_rows_of_a_batch_say_what_each_says_alone(model: Any) -> None:
    """Rows of unlike lengths, of which some have nothing packed, and the same text twice."""
    prompts = [prompt_ids(count, count) for count in (431, 7, 300, 300)]
    with kvweave.PagedCache(model, kv_dtype="int4", **ROOM) as cache:
        alone = [said(model, ids, cache=cache, max_new_tokens=70)[0] for ids in prompts]
    with kvweave.PagedCache(model, kv_dtype="int4", **ROOM) as cache:
        together = said(model, padded(*prompts), cache=cache, max_new_tokens=70)
        assert cache.lengths == [500, 76, 369, 369]
        assert [row[-70:] for row in together] == [row[-70:] for row in alone]
        cache.reset()
        for each in (cache.kv, cache.packed):
            each.check()
            assert each.stats()["held"] == 0


def test_beams_share_packed_pages_until_they_part(model: Any, alone: Any) -> None:
    """A search over beams scores what each beam scores alone."""
    packing, meaning = random_packing("int4", LAYERS * HEADS, DIM)
    ids = prompt_ids(310, 3)
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0}
    with kvweave.PagedCache(model, kv_dtype=packing, **ROOM) as cache:
        rows = said(model, ids, cache=cache, max_new_tokens=14, **options)
        assert len({tuple(row) for row in rows}) == 3
        # Three beams, of which each has filled the fifth page.
        assert cache.packed.stats()["held"] <= 4 + 3 * 2
        known = by_name(model, cache)
        found = model.generate(
            ids, **known, **options, max_new_tokens=14, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        cache.reset()
        assert (cache.bytes, cache.packed.stats()["held"]) == (0, 0)
        cache.packed.check()
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        of = PackedDecoding(alone, 1, meaning)
        meant(of, row[None], [256])
        of.packed_at_least = 256
        logits = meant(of, row[None], [310 - 256, *[1] * 13])
        each = logits.log_softmax(-1).gather(1, row[310:, None]).sum()
        torch.testing.assert_close(each, score, rtol=1e-3, atol=1e-3)


# ---- beside exact pages ---------------------------------------------------------------------


def test_int8_is_near_exact_pages(model: Any) -> None:
    """A step of INT8 is 1/255 of a channel's range: logits move by less than 2 % of their own."""
    ids, parts = prompt_ids(700, 5), [600, *[1] * 100]
    made = []
    for kv_dtype in (None, "int8", "int4"):
        with kvweave.PagedCache(model, kv_dtype=kv_dtype, **ROOM) as cache:
            made.append(fed(model, cache, ids, parts))
    error, coarse = ((x - made[0]).abs().max() for x in made[1:])
    assert 0 < error < 0.02 * made[0].std()
    assert error < coarse


@settings(max_examples=8)
@given(count=st.integers(1, 191), page_tokens=st.sampled_from([1, 16, 64]))
def test_what_stays_exact_is_as_without(model: Any, count: int, page_tokens: int) -> None:
    """Up to sink and newest tokens a text says what a cache of exact pages says, to the bit."""
    ids, parts = prompt_ids(192, count), [count, *[1] * (192 - count)]
    made = []
    for kv_dtype in (None, "int4"):
        pages = {"page_tokens": page_tokens, "kv_dtype": kv_dtype}
        with kvweave.PagedCache(model, **pages, **ROOM) as cache:
            made.append(fed(model, cache, ids, parts))
    torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_basis_is_made_of_what_is_packed_first(model: Any, name: str) -> None:
    """It is nearer to exact pages than a random one, and pages keep the one they were packed in."""
    ids, parts = prompt_ids(1100, 6), [300, 700, *[1] * 20]
    made = []
    for kv_dtype in (None, name, random_packing(name, LAYERS * HEADS, DIM)[0]):
        with kvweave.PagedCache(model, kv_dtype=kv_dtype, **ROOM) as cache:
            made.append(fed(model, cache, ids, parts))
            if cache.packed is not None:
                # What was packed before there was a basis is read as it was packed.
                cache.reset()
                again = fed(model, cache, ids, [1000, *[1] * 20])
                assert cache.plans[0].reused_prefix == 960
                assert (again[1:] - made[-1][2:]).abs().mean() < 0.2 * made[0].std()
    own, drawn = ((x - made[0]).square().mean() for x in made[1:])
    assert own < drawn


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_longer_text_has_a_second_basis(model: Any, name: str) -> None:
    """Once, in each layer; what was packed in the first reads that, to the bit."""
    short, long = prompt_ids(650, 6), prompt_ids(1300, 7)
    with kvweave.PagedCache(model, kv_dtype=name, **ROOM) as cache:
        made = []
        for longer in (False, True):
            cache.reset()
            fed(model, cache, short, [600])
            if longer:
                cache.reset()
                fed(model, cache, long, [1300])
            bases = cache._live.pool.packed.pages.bases
            made.append(
                (bases.data.clone(), cache._live.pool.packed.pages.data.clone(), bases.of.clone())
            )
            cache.reset()
            made[-1] += (fed(model, cache, short, [600, *[1] * 20]),)
            assert cache.plans[0].reused_prefix == 576
        (first, pages, of, said_before), (second, later, after, said_behind) = made
        assert torch.equal(first[: 2 * LAYERS], second[: 2 * LAYERS])
        assert not first[2 * LAYERS :].any()
        assert second[2 * LAYERS :].any((1, 2, 3, 4)).all()
        packed = torch.nonzero(of >= LAYERS)[:, 0]
        assert len(packed) == LAYERS * 9
        assert torch.equal(of[packed], after[packed])
        assert set(after.tolist()) >= set(range(2 * LAYERS, 3 * LAYERS))
        assert torch.equal(said_before, said_behind)
        index = (packed[:, None] + torch.arange(HEADS)).reshape(-1)
        assert torch.equal(pages[index], later[index])


def test_bytes_are_those_of_both_allocators(model: Any) -> None:
    page = ops.packed_format("int4", DIM).page_bytes
    with kvweave.PagedCache(model, kv_dtype="int4", **ROOM) as cache:
        fed(model, cache, prompt_ids(1000, 7), [1000])
        # Sink, and what the next row sees of the newest 128 tokens; 15 full pages.
        exact, packed = (64 + 1008 - 864) // 16, 15
        assert cache.kv.stats()["held"] == exact
        assert packed <= cache.packed.stats()["held"] <= packed + 1
        held = cache.packed.stats()["held"] * LAYERS * HEADS * page
        assert cache.bytes == held + exact * LAYERS * HEADS * 2 * 16 * DIM * 4
        assert cache.dense_bytes == 1000 * LAYERS * HEADS * 2 * DIM * 4
        assert cache.bytes < 0.4 * cache.dense_bytes
        assert cache.arena_bytes >= cache.bytes
        assert "packed blocks held=" in repr(cache)


@pytest.mark.parametrize("megabytes", [3, 7])
def test_both_pools_are_within_their_bytes(model: Any, megabytes: int) -> None:
    given = {"arena_bytes": megabytes << 20, "kv_dtype": "half-int4", "top_k_pages": 3}
    with kvweave.PagedCache(model, check=False, **given) as cache:
        assert 0.9 * (megabytes << 20) < cache.arena_bytes <= megabytes << 20


# ---- few pages ------------------------------------------------------------------------------


class Choosing(PackedDecoding):
    """`PackedDecoding` whose steps read of the packed pages `most`: the definition's own sort."""

    most = 3

    def _hidden(self, layer: int, query: Any, key: Any, rows: int, total: int) -> torch.Tensor:
        group = len(query) // len(key)
        hidden = super()._hidden(layer, query, key, rows, total).expand(len(query), rows, total)
        end = total - RECENT
        count = -(-max(0, end - SINK) // PAGE)
        if rows > 1 or count <= self.most:
            return hidden
        hidden = hidden.clone()
        for head in range(len(key)):
            pages = key[head, SINK : SINK + count * PAGE].split(PAGE)
            own = slice(head * group, (head + 1) * group)
            best = best_pages([page_score(query[own, 0], page) for page in pages], self.most)
            at = torch.arange(total)
            left = ~torch.isin((at - SINK) // PAGE, torch.tensor(best))
            hidden[own, 0] |= left & (at >= SINK) & (at < end)
        return hidden


@pytest.mark.parametrize("name", ["int4", "planes-3"])
def test_few_packed_pages_are_the_definition(model: Any, alone: Any, name: str) -> None:
    packing, meaning = random_packing(name, LAYERS * HEADS, DIM)
    ids, parts = prompt_ids(740, 1), [600, *[1] * 140]
    wanted = meant(Choosing(alone, 1, meaning), ids, parts)
    dense = meant(PackedDecoding(alone, 1, meaning), ids, parts)
    with kvweave.PagedCache(model, kv_dtype=packing, top_k_pages=3, **ROOM) as cache:
        expect_definition(fed(model, cache, ids, parts), wanted, dense)
        assert cache.bound_bytes == cache.packed.stats()["arena_pages"] * 3 * DIM * 4
        cache.reset()
        fed(model, cache, torch.cat((ids, ids), 1), [800])
        # What few pages said is no exact prefix: of 600 tokens 9 pages are.
        assert cache.plans[0].reused_prefix == 576


def test_as_many_packed_pages_as_there_are_change_no_bit(model: Any) -> None:
    ids, parts, made = prompt_ids(640, 2), [600, *[1] * 40], []
    for most in (None, 9):
        with kvweave.PagedCache(model, kv_dtype="int4", top_k_pages=most, **ROOM) as cache:
            made.append(fed(model, cache, ids, parts))
    assert torch.equal(*made)


# ---- what is refused ------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_and_nothing_lost(model: Any) -> None:
    settings = {"max_tokens": 512, "kv_dtype": "int4", "check": False, "max_rows": 1}
    with kvweave.PagedCache(model, **settings) as cache:
        wanted = said(model, prompt_ids(400, 1), cache=cache)
        for long in (prompt_ids(600, 2), padded(*(prompt_ids(170, seed) for seed in range(9)))):
            with pytest.raises(PoolFull):
                said(model, long, cache=cache)
            for each in (cache.kv, cache.packed):
                assert each.stats()["held"] == 0
                each.check()
        assert said(model, prompt_ids(400, 1), cache=cache) == wanted


def test_an_answer_that_finds_no_more_room_is_refused(model: Any) -> None:
    with kvweave.PagedCache(model, max_tokens=384, kv_dtype="int4", check=False) as cache:
        with pytest.raises(PoolFull):
            said(model, prompt_ids(380, 1), cache=cache, max_new_tokens=150)
        assert cache.lengths == []
        assert cache.packed.stats()["held"] == 0


def test_a_forward_that_fails_loses_nothing(model: Any) -> None:
    """The forward behind one that raised in its second layer begins anew."""

    def broken(*_given: Any) -> None:
        raise RuntimeError("broken")

    ids = prompt_ids(400, 1)
    with kvweave.PagedCache(model, kv_dtype="planes-3", **ROOM) as cache:
        hook = model.model.layers[1].register_forward_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            said(model, ids, cache=cache)
        hook.remove()
        found = said(model, ids, cache=cache)
        assert cache.plans[0].reused_prefix == 0
        cache.packed.check()
    with kvweave.PagedCache(model, kv_dtype="planes-3", **ROOM) as cache:
        assert said(model, ids, cache=cache) == found


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"kv_dtype": "int5"}, InvalidArgument, "kv_dtype: expected None or one of int4"),
        ({"kv_dtype": 4}, InvalidArgument, "kv_dtype: expected None or one of int4"),
        ({"kv_dtype": "int4", "page_tokens": 24}, InvalidArgument, "divisor of 64"),
        ({"kv_dtype": "int4", "max_rows": 0}, InvalidArgument, "max_rows: expected"),
        ({"kv_dtype": "int4", "top_k_pages": 2}, InvalidArgument, "top_k_pages: expected"),
        ({"kv_dtype": "int4", "arena_bytes": 4096}, InvalidArgument, "arena_bytes: expected at"),
        ({"kv_dtype": "int4", "arena_bytes": 1 << 24, "max_tokens": 1}, InvalidArgument, "both"),
        ({"kv_dtype": "int4", "discover": True}, Unsupported, "discover: expected a cache of ex"),
        (
            {"kv_dtype": Packing("int4", torch.zeros(8, 2, 4, 16))},
            InvalidArgument,
            "basis: expected None beside",
        ),
        (
            {"kv_dtype": Packing("half-int4", torch.zeros(8, 2, 4, 16))},
            InvalidArgument,
            "basis: expected finite",
        ),
    ],
)
def test_settings_that_are_none_are_refused(
    model: Any, settings: dict[str, Any], error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        kvweave.PagedCache(model, **settings)
    assert not model._forward_pre_hooks


def test_what_packed_pages_do_not_serve_is_refused_by_name(model: Any) -> None:
    with pytest.raises(Unsupported, match="without sliding windows beside 'int4'"):
        kvweave.PagedCache(tiny("mistral", sliding_window=64), kv_dtype="int4")
    with kvweave.PagedCache(model, kv_dtype="int4", **ROOM) as cache:
        with pytest.raises(Unsupported, match=r"segments: expected a cache of exact pages"):
            cache.mark([5, 6, 7], [(0, 2)])
        with pytest.raises(Unsupported, match="crop"):
            cache.crop(-1)
