"""A request's KV leaves one cache and goes on in another: what is carried, and what is refused."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from kvweave import (
    CorruptPayload,
    InvalidArgument,
    KvCache,
    KvShape,
    NamespaceConflict,
    PoolFull,
    Unsupported,
)
from kvweave.payload import KvPayload, export_kv, import_kv
from kvweave.payload.header import positions_of
from kvweave.payload.pages import TURNED_AT_ONCE
from local_heads import local_heads
from paged import rope_table, rotated

L, G, D, P = 3, 4, 16, 16
SHAPE = KvShape(L, G, D, P)
WINDOW = (5, 40)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def cache_of(blocks: int = 64, local: int = 3, shape: KvShape = SHAPE, **more: Any) -> KvCache:
    """A cache in which `local` heads of each layer keep a window (0: there is no map)."""
    model = more.get("fingerprint") or "m"
    heads = local_heads(shape, local, *WINDOW, model=model) if local else None
    pages = blocks * shape.layers * shape.kv_heads
    return KvCache(shape, arena_bytes=pages * shape.page_bytes, heads=heads, **more)


def pages_of(cache: KvCache) -> torch.Tensor:
    return torch.from_dlpack(cache.arena)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


def random_kv(tokens: int, dtype: str = "f32", seed: int = 0) -> torch.Tensor:
    """K and V of every head: [L, G, 2, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(L, G, 2, tokens, D, generator=generator).to(DTYPES[dtype])


def heads_by_table(cache: KvCache, request: Any) -> dict[int, list[tuple[int, int, int]]]:
    """The heads that each table serves: (page of a block, layer, head)."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for layer in range(cache.shape.layers):
        for head, (table, rank, _, _) in enumerate(request.head_rows(layer).tolist()):
            found.setdefault(table, []).append((rank, layer, head))
    return found


def fill(cache: KvCache, request: Any, kv: torch.Tensor, positions: range) -> None:
    """Writes K and V of some positions wherever the request keeps them."""
    pages = pages_of(cache)
    for table, heads in heads_by_table(cache, request).items():
        slots = request.slots(np.asarray(positions, np.int32), table).tolist()
        for position, (block, slot) in zip(positions, slots, strict=True):
            for rank, layer, head in heads if block >= 0 else ():
                pages[block + rank, :, slot] = kv[layer, head, :, position]


def read(cache: KvCache, request: Any) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    """K and V [2, D] that each head reads, by position; keys as they are stored."""
    pages = pages_of(cache)
    found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for table, heads in heads_by_table(cache, request).items():
        for block, begin, end, position, _ in request.entries(table).tolist():
            for rank, layer, head in heads:
                held = found.setdefault((layer, head), {})
                for slot in range(begin, end):
                    held[position + slot - begin] = pages[block + rank, :, slot].clone()
    return found


def prefilled(cache: KvCache, tokens: np.ndarray, kv: torch.Tensor, chunk: int = 0, **more: Any):
    """A request that was prefilled, whole or in chunks."""
    request = cache.admit(tokens, reuse="none", chunk_tokens=chunk, **more)
    length = len(tokens)
    for start in range(0, length, chunk or length):
        end = min(start + (chunk or length), length)
        if start:
            request.advance(start, end)
        fill(cache, request, kv, range(start, end))
    request.advance(length, length)
    return request


def expect_what_is_seen(
    cache: KvCache, request: Any, kv: torch.Tensor, tokens: int, exactly: bool = True
) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    """Each head reads the right K and V of all that the next token sees.

    `exactly`: and of whatever else is kept.
    """
    sink, recent = WINDOW
    seen = read(cache, request)
    for layer in range(L):
        for head, (_, _, window, _) in enumerate(request.head_rows(layer).tolist()):
            held = seen[layer, head]
            near = [p for p in range(tokens) if not window or p < sink or p > tokens - recent]
            assert set(near) <= held.keys()
            for position in held if exactly else near:
                pair = held[position]
                assert torch.equal(pair, kv[layer, head, :, position]), (layer, head, position)
    return seen


def nothing_held(cache: KvCache) -> None:
    cache.check()
    assert cache.stats()["held"] == 0


def sealed(text: str) -> dict[str, str]:
    """Metadata whose checksum is right."""
    return {"kvweave.payload": f"{zlib.crc32(text.encode()):08x} {text}"}


def resealed(payload: KvPayload, header: Any = None, **parts: torch.Tensor | None) -> bytes:
    """Bytes with right checksums whose header or parts were changed: no accident made them."""
    kept = {name: part for name, part in {**payload.parts, **parts}.items() if part is not None}
    sums = {n: zlib.crc32(p.contiguous().view(torch.uint8).numpy().data) for n, p in kept.items()}
    fields = payload.header.to_json() if header is None else header
    whole = {**fields, "crc32": sums} if isinstance(fields, dict) else fields
    return save(kept, sealed(json.dumps(whole)))


@pytest.fixture(scope="module")
def payload() -> KvPayload:
    """A request of 150 tokens with a promoted head and logits."""
    cache, kv = cache_of(fingerprint="m"), random_kv(150)
    request = cache.admit(prompt(150), reuse="none", namespace="a", regime=7)
    request.promote(1, 0)
    fill(cache, request, kv, range(150))
    request.advance(150, 150)
    return export_kv(cache, pages_of(cache), request, logits=torch.arange(8.0))


# ---- from one cache to another ---------------------------------------------------------------


@settings(max_examples=40, deadline=None)
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


# ---- bytes of any origin ---------------------------------------------------------------------


def refused(data: bytes, says: str | None = None) -> None:
    with pytest.raises(CorruptPayload, match=says):
        KvPayload.from_bytes(data)


def test_bytes_that_are_cut_or_go_on(payload: KvPayload) -> None:
    data = payload.to_bytes()
    for end in [*range(0, 64), *range(64, len(data), 997), len(data) - 1]:
        refused(data[:end])
    for more in (b"\0", b"x" * 100, data):
        refused(data + more)
    refused(b"", "safetensors")
    refused((2**64 - 1).to_bytes(8, "little") + data[8:], "safetensors")
    with pytest.raises(InvalidArgument, match="expected bytes, got str"):
        KvPayload.from_bytes("kv")  # type: ignore[arg-type]


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_bytes_that_were_spoiled(payload: KvPayload, data: st.DataObject) -> None:
    """Nothing but what was sent is ever taken for it."""
    sent = payload.to_bytes()
    spoiled = bytearray(sent)
    header = int.from_bytes(sent[:8], "little") + 8
    most = st.one_of(st.integers(0, header - 1), st.integers(0, len(sent) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        at, length = data.draw(most), data.draw(st.integers(0, 9))
        spoiled[at : at + length] = data.draw(st.binary(max_size=9))
    try:
        taken = KvPayload.from_bytes(bytes(spoiled))
    except CorruptPayload:
        return
    assert taken.header == payload.header
    assert taken.parts.keys() == payload.parts.keys()
    assert all(torch.equal(taken.parts[name], part) for name, part in payload.parts.items())


HUGE = 10**4000
WRONG: list[tuple[str, Any, str]] = [
    ("schema", 2, "schema: expected 1, got 2"),
    ("schema", True, "schema"),
    ("fingerprint", 3, "fingerprint"),
    ("fingerprint", "\ud800", "fingerprint"),
    ("namespace", None, "namespace"),
    ("layers", 0, "layers"),
    ("layers", L + 1, "head_groups"),
    ("layers", 2**70, "layers"),
    ("kv_heads", -1, "kv_heads"),
    ("kv_heads", 2.0, "kv_heads"),
    ("head_dim", 8, "group.0"),
    ("head_dim", True, "head_dim"),
    ("page_tokens", 0, "page_tokens"),
    ("dtype", "f64", "dtype"),
    ("dtype", "bf16", "group.0: expected BF16"),
    ("dtype", ["f32"], "dtype"),
    ("tokens", 149, "span"),
    ("tokens", 2**31, "tokens"),
    ("tokens", -150, "tokens"),
    ("regime", -1, "regime"),
    ("regime", 2**64, "regime"),
    ("groups", [], "groups"),
    ("groups", {}, "groups"),
    ("groups", [1], "group: expected a mapping"),
    ("head_groups", [0] * 12, "a head of every group"),
    ("head_groups", [2] * 12, "head_groups"),
    ("head_groups", [0], "head_groups"),
    ("head_groups", ["0"] * 12, "head_groups"),
    ("promoted", [[1, 0], [1, 0]], "promoted"),
    ("promoted", [[1, 3]], "promoted: expected a head of a window group"),
    ("promoted", [[3, 0]], "promoted layer"),
    ("promoted", [[0, -1]], "promoted head"),
    ("promoted", [[0]], "pairs"),
    ("promoted", [], "part promoted.1.0: expected none"),
    ("promoted", [[1, 0], [2, 0]], "part promoted.2.0: expected F32"),
    ("more", 1, "another"),
]


@pytest.mark.parametrize(("field", "value", "says"), WRONG)
def test_headers_that_cannot_be(payload: KvPayload, field: str, value: Any, says: str) -> None:
    header = json.loads(json.dumps(payload.header.to_json()))
    refused(resealed(payload, {**header, field: value}), says)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "all", "kind"),
        ("sink", 6.5, "sink"),
        ("sink", -1, "sink"),
        ("recent", 0, "recent"),
        ("recent", 2**40, "recent"),
        ("recent", 100, "expected \\[51, 150\\) among them"),
        ("spans", [[0, 16]], "expected \\[111, 150\\) among them"),
        ("spans", [[96, 150], [0, 16]], "sorted spans"),
        ("spans", [[0, 96], [96, 150]], "sorted spans with gaps"),
        ("spans", [[0, 16], [96, 151]], "span end"),
        ("spans", [[-1, 16], [96, 150]], "span begin"),
        ("spans", [[0, 0], [0, 16], [96, 150]], "span end"),
        ("spans", [[0, 150]], "part group.1"),
        ("spans", "all", "spans: expected a list"),
    ],
)
def test_groups_that_cannot_be(payload: KvPayload, field: str, value: Any, says: str) -> None:
    header = json.loads(json.dumps(payload.header.to_json()))
    assert header["groups"][1]["spans"] == [[0, 16], [96, 150]]
    header["groups"][1][field] = value
    refused(resealed(payload, header), says)


def test_headers_that_are_none(payload: KvPayload) -> None:
    for header in ([], "x", 1, {}, {"schema": 1}):
        refused(resealed(payload, header))
    parts = dict(payload.parts)
    refused(save(parts), "metadata: expected kvweave.payload")
    for text in ("[" * 100_000, "1" * 5000, "{", "\x00", '{"a": NaN'):
        refused(save(parts, sealed(text)), "expected JSON")
        refused(save(parts, {"kvweave.payload": text}), "header: expected its CRC-32")
    for sums in ([], {}, 3, {"tokens": "1"}, {"tokens": 1}, None):
        text = json.dumps({**payload.header.to_json(), "crc32": sums})
        refused(save(parts, sealed(text)), "part .*: expected its CRC-32")
    refused(save(parts, sealed(json.dumps(payload.header.to_json()))), "part .*: expected its CRC")


def test_parts_that_cannot_be(payload: KvPayload) -> None:
    group = payload.parts["group.1"]
    for parts, says in (
        ({"group.1": group[:, :, 1:].contiguous()}, "part group.1"),
        ({"group.1": group.double()}, "part group.1"),
        ({"group.1": group.transpose(0, 2).contiguous()}, "part group.1"),
        ({"group.1": None}, "part group.1: expected F32 .* got none"),
        ({"group.2": group.clone()}, "part group.2: expected none"),
        ({"tokens": payload.tokens[1:].contiguous()}, "part tokens"),
        ({"tokens": payload.tokens.long()}, "part tokens"),
        ({"logits": torch.zeros(2, 2)}, "part logits"),
        ({"logits": torch.zeros(2, dtype=torch.bool)}, "part logits"),
    ):
        refused(resealed(payload, **parts), says)
    with pytest.raises(CorruptPayload, match="part group.0: expected .* got none"):
        KvPayload(payload.header, {})
    kept = resealed(payload)
    at = kept.index(group.numpy().tobytes()[:64])
    refused(kept[:at] + b"\1\2\3\4" + kept[at + 4 :], "part group.1: expected its CRC-32")


def json_values() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(HUGE)
    )
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_headers_of_any_origin(payload: KvPayload, data: st.DataObject) -> None:
    """Whatever a header says: it is refused with a type, or admitted, and nothing stays behind."""
    header = json.loads(json.dumps(payload.header.to_json()))
    for _ in range(data.draw(st.integers(1, 3))):
        at = header
        while True:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
                break
            at = at[key]
        at[key] = data.draw(st.one_of(json_values(), st.integers(-2, 200)))
    cache = receiver_of(payload)
    try:
        request = import_kv(cache, pages_of(cache), KvPayload.from_bytes(resealed(payload, header)))
    except (CorruptPayload, InvalidArgument, PoolFull):
        nothing_held(cache)
        return
    request.release()
    nothing_held(cache)


# ---- payloads of others ----------------------------------------------------------------------


def receiver_of(payload: KvPayload, **more: Any) -> KvCache:
    return cache_of(fingerprint=payload.header.fingerprint, **more)


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
