"""A pressed context in packed pages, and read in part, against plain torch over the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import random_tokens, tiny
from kvweave import ops
from kvweave.adapters.kvpress import PressedCache
from kvweave.adapters.kvpress.pressed_layer import READS
from kvweave.runner import Packing
from page_meaning import PAGE, random_packing
from press_hooks import hooked, masking, reading
from pressed_decoding import RECENT, SINK, PressedDecoding

CONTEXT, QUESTION, ANSWER = 480, 7, 5
LAYERS, HEADS, DIM = 4, 2, 16
FORMATS = ["int4", "int8", "half-int4", "quarter-bf16", "planes-3"]


def nothing(_layer: int) -> torch.Tensor:
    return torch.zeros(HEADS, CONTEXT, dtype=torch.bool)


def ragged(layer: int) -> torch.Tensor:
    """Other tokens of each head: of some so few that none is packed."""
    generator = torch.Generator().manual_seed(layer)
    shares = torch.tensor([[0.75 - 0.2 * layer], [0.1]])
    return torch.rand(HEADS, CONTEXT, generator=generator) < shares


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def ids_of(seed: int) -> torch.Tensor:
    return torch.as_tensor(random_tokens(CONTEXT + QUESTION + ANSWER, seed))[None].long()


@torch.inference_mode()
def kept_by(model: Any, cache: PressedCache, ids: torch.Tensor, dropped: Any) -> None:
    with hooked(model, masking(dropped), cache):
        model.model(ids[:, :CONTEXT], **by_name(model.model, cache))


@torch.inference_mode()
def asked(model: Any, cache: PressedCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the question in one pass, and of the answer token by token."""
    start = CONTEXT + QUESTION
    parts = [(CONTEXT, start), *((at, at + 1) for at in range(start, start + ANSWER))]
    places, made = torch.arange(ids.shape[1])[None], []
    for first, end in parts:
        given = {"input_ids": ids[:, first:end], "position_ids": places[:, first:end]}
        made.append(model(**given, **by_name(model, cache)).logits[0])
    return torch.cat(made)


def taken_back(cache: PressedCache, lengths: list[list[int]]) -> None:
    """As kvpress' pipeline cuts an answer off."""
    for layer, heads in zip(cache.layers, lengths, strict=True):
        for name in ("keys", "values"):
            setattr(layer, name, getattr(layer, name)[:, :, : max(heads)])


@pytest.mark.parametrize("name", [*FORMATS, "truncated fp8"])
@pytest.mark.parametrize("dropped", [nothing, ragged])
def test_packed_is_attention_over_what_the_pages_stand_for(model, name, dropped) -> None:
    packing, meaning = random_packing(name, LAYERS * HEADS, DIM)
    ids = ids_of(1)
    definition = PressedDecoding(model, CONTEXT, QUESTION, dropped, meaning)
    wanted = definition.logits(ids)
    exact = PressedDecoding(model, CONTEXT, QUESTION, dropped).logits(ids)
    with PressedCache(model, max_tokens=512, kv_dtype=packing) as cache:
        kept_by(model, cache, ids, dropped)
        lengths = cache.lengths
        assert lengths == [(~dropped(layer)).sum(-1).tolist() for layer in range(LAYERS)]
        held = cache.bytes
        for _ in range(2):
            ours = asked(model, cache, ids)
            torch.testing.assert_close(ours, wanted, rtol=5e-4, atol=5e-4)
            taken_back(cache, lengths)
            assert (cache.lengths, cache.bytes) == (lengths, held)
        assert (exact - ours).abs().max() > 3 * (wanted - ours).abs().max()
        cache.kv.check()
        cache.packed.check()
        cache.reset()
        assert cache.bytes == cache.dense_bytes == 0


@pytest.mark.parametrize("dropped", [nothing, ragged])
def test_bytes_are_those_of_both_allocators(model, dropped) -> None:
    page = ops.packed_format("int4", DIM).page_bytes
    with PressedCache(model, max_tokens=512, kv_dtype="int4") as cache:
        kept_by(model, cache, ids_of(2), dropped)
        counts = torch.tensor(cache.lengths).flatten()
        packed = (counts - SINK - RECENT).clamp_min(0) // PAGE
        exact = -((PAGE * packed - counts) // 16)
        assert cache.packed.stats()["held"] == packed.sum() > 0
        assert cache.kv.stats()["held"] == exact.sum()
        assert cache.bytes == packed.sum() * page + exact.sum() * 2 * 16 * DIM * 4
        assert cache.dense_bytes == CONTEXT * LAYERS * HEADS * 2 * DIM * 4
        assert repr(cache).startswith(f"PressedCache(context={CONTEXT}, blocks held={exact.sum()},")


@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_a_basis_is_made_of_what_is_packed(model, name) -> None:
    """Nearer to exact than a random one. Too little text for it is packed along the axes."""
    ids = ids_of(3)
    exact = PressedDecoding(model, CONTEXT, QUESTION, nothing).logits(ids)
    far = []
    for packing in (name, random_packing(name, LAYERS * HEADS, DIM)[0]):
        with PressedCache(model, max_tokens=4096, kv_dtype=packing) as cache:
            kept_by(model, cache, ids, nothing)
            far.append((asked(model, cache, ids) - exact).square().mean())
    assert far[0] < far[1]
    of = ops.packed_format("half-int4", DIM)
    axes = torch.cat((torch.zeros(1, DIM), torch.eye(DIM))).expand(LAYERS * HEADS, 2, -1, -1)
    said, held = [], []
    for packing in ("half-int4", Packing("half-int4", axes.contiguous())):
        with PressedCache(model, max_tokens=480, kv_dtype=packing) as cache:
            kept_by(model, cache, ids, nothing)
            said.append(asked(model, cache, ids))
            held.append(cache.bytes)
    torch.testing.assert_close(*said)
    assert held[1] - held[0] == (LAYERS * HEADS - 1) * 2 * of.basis_rows * DIM * 4


@pytest.mark.parametrize("dropped", [nothing, ragged])
@pytest.mark.parametrize(("name", "most"), [(None, 3), (None, 8), ("int4", 3), ("half-int4", 3)])
def test_few_pages_are_the_definition(model, name, most, dropped) -> None:
    packing, meaning = (None, None)
    if name is not None:
        packing, meaning = random_packing(name, LAYERS * HEADS, DIM)
    ids = ids_of(4)
    wanted = PressedDecoding(model, CONTEXT, QUESTION, dropped, meaning, most).logits(ids)
    dense = PressedDecoding(model, CONTEXT, QUESTION, dropped, meaning).logits(ids)
    with PressedCache(model, max_tokens=512, kv_dtype=packing, top_k_pages=most) as cache:
        kept_by(model, cache, ids, dropped)
        lengths = cache.lengths
        for _ in range(2):
            ours = asked(model, cache, ids)
            torch.testing.assert_close(ours, wanted, rtol=5e-4, atol=5e-4)
            taken_back(cache, lengths)
    if name is None or dropped is nothing:
        assert (dense - ours).abs().max() > 10 * (wanted - ours).abs().max()


def unlike(layer: int, head: int) -> tuple[int, str] | None:
    """Of every third head three pages by their bounds, of every third four by their means."""
    return [(3, "min-max"), None, (4, "mean")][(layer * HEADS + head) % 3]


@pytest.mark.parametrize("others", [None, 6])
@pytest.mark.parametrize("name", [None, "int4", "planes-3"])
def test_each_head_reads_as_many_pages_as_a_press_says(model, name, others) -> None:
    """By its own score; heads of which it says nothing read as the cache says."""
    packing, meaning = (None, None)
    if name is not None:
        packing, meaning = random_packing(name, LAYERS * HEADS, DIM)
    ids = ids_of(9)

    def reads(layer: int, head: int) -> tuple[int, str] | None:
        return unlike(layer, head) or (others and (others, "min-max"))

    wanted = PressedDecoding(model, CONTEXT, QUESTION, nothing, meaning, reads=reads).logits(ids)
    dense = PressedDecoding(model, CONTEXT, QUESTION, nothing, meaning).logits(ids)
    with PressedCache(model, max_tokens=512, kv_dtype=packing, top_k_pages=others) as cache:
        with hooked(model, reading(unlike), cache), torch.inference_mode():
            model.model(ids[:, :CONTEXT], **by_name(model.model, cache))
        ours = asked(model, cache, ids)
        torch.testing.assert_close(ours, wanted, rtol=5e-4, atol=5e-4)
        assert (dense - ours).abs().max() > 10 * (wanted - ours).abs().max()
        assert not any(hasattr(layer.self_attn, READS) for layer in model.model.layers)
        # The next context has no press: all heads read as the cache says.
        cache.reset()
        kept_by(model, cache, ids, nothing)
        plain = asked(model, cache, ids)
    most = PressedDecoding(model, CONTEXT, QUESTION, nothing, meaning, others).logits(ids)
    torch.testing.assert_close(plain, most, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("name", [None, "int4", "planes-3"])
def test_as_many_pages_as_there_are_change_no_bit(model, name) -> None:
    ids, said = ids_of(5), []
    for most in (None, 40):
        with PressedCache(model, max_tokens=512, kv_dtype=name, top_k_pages=most) as cache:
            kept_by(model, cache, ids, ragged)
            said.append(asked(model, cache, ids))
    assert torch.equal(*said)


def test_generate_goes_on_behind_a_packed_prompt(model) -> None:
    """Greedy answers of transformers' own generate are the likeliest tokens of the definition."""
    packing, meaning = random_packing("int8", LAYERS * HEADS, DIM)
    ids = ids_of(8)[:, :CONTEXT]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with PressedCache(model, max_tokens=512, kv_dtype=packing) as cache:
        said = model.generate(ids, **by_name(model, cache), **options)
        assert cache.lengths[0] == [CONTEXT + 5] * HEADS
    definition = PressedDecoding(model, CONTEXT, 1, nothing, meaning)
    likeliest = definition.logits(said[:, :-1]).argmax(-1)
    assert torch.equal(likeliest, said[0, CONTEXT + 1 :])


def test_a_short_context_stays_exact(model) -> None:
    """A head with less than the sink, the newest tokens and a page has nothing packed."""
    ids = ids_of(6)[:, :260]
    wanted = model(ids, use_cache=False).logits[0, 250:]
    with PressedCache(model, max_tokens=512, kv_dtype="int4") as cache, torch.inference_mode():
        model.model(ids[:, :250], **by_name(model.model, cache))
        places = torch.arange(250, 260)[None]
        given = {"input_ids": ids[:, 250:], "position_ids": places}
        ours = model(**given, **by_name(model, cache)).logits[0]
        assert cache.packed.stats()["held"] == 0
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_and_nothing_lost(model) -> None:
    ids = ids_of(7)
    few = torch.arange(CONTEXT)[None].repeat(HEADS, 1) >= 290
    with PressedCache(model, max_tokens=300, kv_dtype="int4", answer_tokens=40) as cache:
        with pytest.raises(kvweave.PoolFull):
            kept_by(model, cache, ids, nothing)
        cache.reset()
        assert (cache.bytes, cache.packed.stats()["held"]) == (0, 0)
        kept_by(model, cache, ids, lambda _layer: few)
        held, lengths, wanted = cache.bytes, cache.lengths, asked(model, cache, ids)
        many = {"input_ids": ids[:, :300], "position_ids": torch.arange(300)[None] + CONTEXT}
        with pytest.raises(kvweave.PoolFull), torch.inference_mode():
            model(**many, **by_name(model, cache))
        taken_back(cache, lengths)
        assert (cache.bytes, cache.lengths) == (held, lengths)
        assert torch.equal(asked(model, cache, ids), wanted)
        cache.kv.check()
        cache.packed.check()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_dtype": "int5"}, "kv_dtype: expected None or one of int4"),
        ({"kv_dtype": Packing("int4", torch.zeros(8, 2, 4, 16))}, "basis: expected None beside"),
        ({"kv_dtype": Packing("half-int4", torch.zeros(8, 2, 4, 16))}, "basis: expected finite"),
        ({"top_k_pages": 2}, "top_k_pages: expected"),
        ({"kv_dtype": "int4", "answer_tokens": -1}, "answer_tokens: expected"),
    ],
)
def test_settings_that_are_none_are_refused(model, settings, says) -> None:
    with pytest.raises(kvweave.InvalidArgument, match=says):
        PressedCache(model, **settings)
