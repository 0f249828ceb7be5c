"""A request's KV leaves one cache and goes on in another: what is carried, and where to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvweave import InvalidArgument, KvCache, KvShape, NamespaceConflict, PoolFull, Unsupported
from kvweave.payload import KvPayload, export_kv, import_kv
from kvweave.payload.header import positions_of
from kvweave.payload.pages import TURNED_AT_ONCE
from paged import rope_table, rotated
from payloads import (
    DTYPES,
    SHAPE,
    D,
    G,
    L,
    P,
    cache_of,
    expect_what_is_seen,
    fill,
    nothing_held,
    pages_of,
    prefilled,
    prompt,
    random_kv,
    read,
    receiver_of,
    sample,
)


@pytest.fixture(scope="module")
def payload() -> KvPayload:
    return sample()


# ---- from one cache to another ---------------------------------------------------------------


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 200),
    local=st.integers(0, G),
    chunk=st.sampled_from([0, 1, 7, 16, 64]),
    dtype=st.sampled_from(sorted(DTYPES)),
    promoted=st.booleans(),
    through_bytes=st.booleans(),
)
def test_what_is_exported_is_read_again(tokens, local, chunk, dtype, promoted, through_bytes):
    shape = KvShape(L, G, D, P, dtype)
    kv = random_kv(tokens, dtype)
    sender, receiver = (cache_of(local=local, shape=shape) for _ in range(2))
    request = sender.admit(prompt(tokens), reuse="none", chunk_tokens=chunk)
    promoted = promoted and local > 0 and chunk == 0
    for place in ((2, 0), (0, local - 1)) if promoted else ():
        request.promote(*place)
    for start in range(0, tokens, chunk or tokens):
        end = min(start + (chunk or tokens), tokens)
        if start:
            request.advance(start, end)
        fill(sender, request, kv, range(start, end))
    request.advance(tokens, tokens)
    expect_what_is_seen(sender, request, kv, tokens)
    sent = export_kv(sender, pages_of(sender), request)
    if through_bytes:
        sent = KvPayload.from_bytes(sent.to_bytes())
    request.release()
    nothing_held(sender)
    pages_of(receiver).fill_(torch.nan)
    went_on = import_kv(receiver, pages_of(receiver), sent, reserve_tokens=3)
    assert went_on.length == tokens
    assert sorted(went_on.promoted) == ([(0, local - 1), (2, 0)] if promoted else [])
    expect_what_is_seen(receiver, went_on, kv, tokens)
    went_on.append(prompt(3))
    assert went_on.slots(np.asarray([tokens + 2], np.int32), 0)[0, 0] > 0
    receiver.check()
    went_on.release()
    nothing_held(receiver)


def test_a_payload_carries_what_the_next_token_sees() -> None:
    cache, kv = cache_of(blocks=200), random_kv(1000)
    request = prefilled(cache, prompt(1000), kv, chunk=64, namespace="a", regime=2**64 - 1)
    sent = export_kv(cache, pages_of(cache), request)
    full, window = sent.header.groups
    assert (full.kind, full.spans) == ("full", ((0, 1000),))
    # 1000 − 40 + 1 = 961 lies in the block that begins at 960.
    assert (window.kind, window.spans) == ("window", ((0, 16), (960, 1000)))
    sizes = sent.sizes()
    token = 2 * D * 4
    assert sizes.parts == {"group.0": 3 * 1000 * token, "group.1": 9 * 56 * token}
    assert sizes.dense == 12 * 1000 * token
    assert sizes.total == sum(sizes.parts.values())
    assert sizes.saving == pytest.approx(12 * 1000 / (3 * 1000 + 9 * 56))
    header = sent.header
    assert (header.namespace, header.regime, header.tokens) == ("a", 2**64 - 1, 1000)
    assert sent.tokens.tolist() == prompt(1000).tolist()
    assert sent.logits is None


def test_a_prefill_that_never_let_go_sends_no_more() -> None:
    kv = random_kv(300)
    spans = []
    for chunk in (0, 32):
        cache = cache_of()
        request = cache.admit(prompt(300), reuse="none", chunk_tokens=chunk)
        for start in range(0, 300, chunk or 300):
            end = min(start + (chunk or 300), 300)
            if start:
                request.advance(start, end)
            fill(cache, request, kv, range(start, end))
        spans.append(export_kv(cache, pages_of(cache), request).header.groups)
    assert spans[0] == spans[1]


def test_a_payload_is_a_safetensors_file(payload: KvPayload, tmp_path) -> None:
    payload.save(tmp_path / "kv.safetensors")
    again = KvPayload.load(tmp_path / "kv.safetensors")
    assert again.header == payload.header
    assert again.parts.keys() == payload.parts.keys()
    assert all(torch.equal(again.parts[name], part) for name, part in payload.parts.items())
    with safe_open(tmp_path / "kv.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(payload.parts)
    assert (tmp_path / "kv.safetensors").read_bytes() == payload.to_bytes()
    for kind in (bytes, bytearray, memoryview):
        assert KvPayload.from_bytes(kind(payload.to_bytes())).header == payload.header


def test_pages_of_the_receiver_may_be_of_another_size() -> None:
    kv = random_kv(150)
    sender = cache_of()
    sent = export_kv(sender, pages_of(sender), prefilled(sender, prompt(150), kv))
    for width in (8, 32):
        cache = cache_of(blocks=1024 // width, shape=KvShape(L, G, D, width))
        pages_of(cache).fill_(torch.nan)
        request = import_kv(cache, pages_of(cache), sent)
        seen = expect_what_is_seen(cache, request, kv, 150, exactly=False)
        # Where longer pages keep more than was sent, nothing of earlier requests is left.
        assert not any(pair.isnan().any() for held in seen.values() for pair in held.values())


def test_an_export_leaves_the_request_as_it_was() -> None:
    cache, kv = cache_of(), random_kv(100)
    request = prefilled(cache, prompt(100), kv)
    before = pages_of(cache).clone()
    held = request.kv_bytes()
    first, second = (export_kv(cache, pages_of(cache), request) for _ in range(2))
    assert first.to_bytes() == second.to_bytes()
    assert torch.equal(pages_of(cache), before)
    assert request.kv_bytes() == held
    pages_of(cache).zero_()
    assert first.to_bytes() == second.to_bytes()


# ---- keys that others rotated ----------------------------------------------------------------


@pytest.mark.parametrize("local", [0, 3])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_keys_leave_at_their_final_rotation(local: int, pairing: str) -> None:
    """A share-mode request and a materialised one send the same keys, bit for bit."""
    rope = rope_table(L, D, pairing)
    inv_freq = torch.from_numpy(rope.inv_freq[0])
    fresh, segment = prompt(21, 1), prompt(96, 2)
    moved = np.concatenate((fresh, segment, prompt(9, 3)))
    raw = random_kv(len(moved))
    places = torch.arange(len(moved))
    final = turned(raw, inv_freq, places, pairing)
    old = turned(raw[:, :, :, 21:117], inv_freq, torch.arange(96), pairing)
    sent = {}
    for mode in ("share", "materialise"):
        cache = cache_of(local=local)
        with cache.admit(segment) as donor:
            fill(cache, donor, old, range(96))
            donor.commit(96, 96)
            request = cache.admit(moved, segments=[(21, 117, "")], mode=mode)
            materialise(cache, request, rope)
            assert request.plan.reused_segment > 0
            fill(cache, request, final, range(21))
            fill(cache, request, final, range(117, len(moved)))
            request.advance(len(moved), len(moved))
            deltas = np.concatenate([request.entries(t)[:, 4] for t in range(request.tables)])
            assert bool(deltas.any()) == (mode == "share")
            sent[mode] = export_kv(cache, pages_of(cache), request, rope=rope)
            if mode == "share":
                with pytest.raises(InvalidArgument, match="rope: expected"):
                    export_kv(cache, pages_of(cache), request)
    whole = sent["share"].parts["group.0"]
    for index, (layer, head) in enumerate(sent["share"].header.heads_of(0)):
        assert torch.allclose(whole[index], final[layer, head], atol=1e-5)
    for index, (shared, own) in enumerate(
        zip(sent["share"].header.groups, sent["materialise"].header.groups, strict=True)
    ):
        # A donor that is seen in part stays whole, and its neighbours go: their spans may differ.
        places = [positions_of(group.spans) for group in (shared, own)]
        both, *chosen = np.intersect1d(*places, assume_unique=True, return_indices=True)
        assert set(positions_of(own.visible(len(moved)))) <= set(both)
        parts = [
            sent[mode].parts[f"group.{index}"][:, :, torch.from_numpy(at)]
            for mode, at in zip(sent, chosen, strict=True)
        ]
        assert torch.equal(*parts)
    receiver = cache_of(local=local)
    pages_of(receiver).fill_(torch.nan)
    request = import_kv(receiver, pages_of(receiver), sent["share"])
    seen = read(receiver, request)
    assert not any(pair.isnan().any() for held in seen.values() for pair in held.values())


def turned(kv: torch.Tensor, inv_freq: torch.Tensor, places: torch.Tensor, pairing: str):
    """K of [L, G, 2, T, D] rotated to positions, V as it is."""
    keys = kv[:, :, 0].permute(2, 0, 1, 3).flatten(1, 2)
    keys = rotated(keys, inv_freq, places, pairing).float().unflatten(1, (L, G))
    return torch.stack((keys.permute(1, 2, 0, 3), kv[:, :, 1]), 2)


def materialise(cache: KvCache, request: Any, rope: Any) -> None:
    """Carries out the copies that admission asked for."""
    from kvweave import ops

    for group in range(len(cache.groups)):
        copies, layers = request.take_copies(group), cache.page_layers(group)
        if len(copies):
            ops.copy_rerotate(pages_of(cache), copies, rope, kv_heads=G, layers=layers)
    request.finish_copies()


def test_more_keys_are_rotated_than_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    test_keys_leave_at_their_final_rotation(3, "half")
    monkeypatch.setattr("kvweave.payload.pages.TURNED_AT_ONCE", 7)
    test_keys_leave_at_their_final_rotation(3, "half")
    assert TURNED_AT_ONCE > 96


# ---- payloads of others ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (lambda: cache_of(fingerprint="other"), "fingerprint: expected other, got m"),
        (lambda: cache_of(fingerprint="m", local=2), "head map"),
        (lambda: cache_of(fingerprint="m", local=0), "head classes"),
        (lambda: cache_of(fingerprint="m", local=4), "head classes"),
        (lambda: cache_of(fingerprint="m", shape=KvShape(2, G, D, P)), "layers: expected 2, got 3"),
        (lambda: cache_of(fingerprint="m", shape=KvShape(L, 6, D, P)), "kv_heads"),
        (lambda: cache_of(fingerprint="m", shape=KvShape(L, G, 8, P)), "head_dim"),
        (lambda: cache_of(fingerprint="m", shape=KvShape(L, G, D, P, "bf16")), "dtype"),
    ],
)
def test_other_caches_refuse(payload: KvPayload, cache: Any, says: str) -> None:
    other = cache()
    with pytest.raises(InvalidArgument, match=says):
        import_kv(other, pages_of(other), payload)
    nothing_held(other)


def test_the_receiver_says_whose_it_is(payload: KvPayload) -> None:
    cache = receiver_of(payload)
    with pytest.raises(NamespaceConflict, match="namespace: expected 'b', got 'a'"):
        import_kv(cache, pages_of(cache), payload, namespace="b")
    nothing_held(cache)
    import_kv(cache, pages_of(cache), payload, namespace="a").release()
    assert cache.match_prefix(prompt(150), "a", regime=7) == 0


def test_what_does_not_fit_takes_nothing(payload: KvPayload) -> None:
    for blocks in range(2, 12):
        cache = receiver_of(payload, blocks=blocks)
        try:
            import_kv(cache, pages_of(cache), payload).release()
        except PoolFull:
            nothing_held(cache)
        else:
            break
    assert 4 < blocks < 11
    nothing_held(cache)
    tokens = payload.tokens.clone()
    tokens[3] = -1
    with pytest.raises(InvalidArgument, match="tokens: expected ids"):
        import_kv(
            cache, pages_of(cache), KvPayload(payload.header, {**payload.parts, "tokens": tokens})
        )
    nothing_held(cache)


def test_pages_must_be_the_caches_own(payload: KvPayload) -> None:
    cache = receiver_of(payload)
    pages = pages_of(cache)
    for wrong in (pages[1:], pages.transpose(2, 3), pages.double(), torch.zeros(0)):
        with pytest.raises(InvalidArgument, match="pages: expected"):
            import_kv(cache, wrong, payload)
    nothing_held(cache)
    request = import_kv(cache, pages, payload)
    with pytest.raises(InvalidArgument, match="pages: expected"):
        export_kv(cache, pages[1:], request)
    request.release()
    with pytest.raises(InvalidArgument, match="released"):
        export_kv(cache, pages, request)
    bare = KvCache(SHAPE, blocks=32, memory=False)
    with pytest.raises(InvalidArgument, match="memory"):
        import_kv(bare, pages, payload)
    small = KvCache(KvShape(L, G, D, P, "fp8_e4m3"), blocks=32)
    with pytest.raises(Unsupported, match="got fp8_e4m3"):
        import_kv(small, pages_of(small), payload)


def test_what_was_brought_in_is_not_kept_for_other_prompts(payload: KvPayload) -> None:
    cache = receiver_of(payload)
    request = import_kv(cache, pages_of(cache), payload)
    length = len(request.tokens)
    with pytest.raises(InvalidArgument, match="commit: expected .* prefilled here, got one"):
        request.commit(length, length)
    assert cache.match_prefix(request.tokens, payload.header.namespace, regime=7) == 0
    request.append(np.array([1], np.int32))
    request.release()
    nothing_held(cache)
