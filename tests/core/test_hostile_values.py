"""Values of a wrong kind or beyond all numbers: refused by name, in an error of kvweave's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvweave
from kvweave import (
    CorruptPayload,
    InvalidArgument,
    KvCache,
    KvShape,
    KvweaveError,
    Provenance,
    Store,
    ops,
)
from kvweave.payload import KvPayload
from kvweave.scheduler import Scheduler
from paged import reads, rope_table

HALF = "\ud800"
"""Half of a character, which Python's str may hold and UTF-8 may not."""


def small_cache() -> KvCache:
    return KvCache(KvShape(1, 2, 8, 4), blocks=6)


def reading(**other: object) -> dict:
    """A call that reads an empty cache, of any op that does."""
    call = {
        "q": torch.zeros(1, 2, 8),
        "positions": np.zeros(1, np.int32),
        "entries": np.zeros((0, 5), np.int32),
        "cache": torch.zeros(20, 2, 4, 8),
        "layer": 0,
        "kv_heads": 2,
        "scale": 1.0,
        "rope": rope_table(1, 8),
    }
    return {**call, **other}


def writing(**other: object) -> dict:
    vectors, slots = torch.zeros(1, 2, 8), np.array([[2, 0]], np.int32)
    call = {"cache": torch.zeros(20, 2, 4, 8), "layer": 0, "k": vectors, "v": vectors}
    return {**call, "slots": slots, **other}


NO_TENSORS = (None, np.zeros((1, 2, 8), np.float32), [[0.0]], "q", 3)


@pytest.mark.parametrize("wrong", NO_TENSORS, ids=lambda wrong: type(wrong).__name__)
def test_rows_that_are_no_tensors_of_torch_are_refused_by_name(wrong) -> None:
    offsets = np.zeros(2, np.int32)
    expected = "expected a tensor of torch, got an object of type"
    for name, call in [
        ("q", lambda: reads(ops.attend_prefill, **reading(q=wrong))),
        ("q", lambda: reads(ops.attend_decode, **reading(q=wrong), entry_offsets=offsets)),
        ("q", lambda: reads(ops.score_tokens, **reading(q=wrong))),
        ("k", lambda: ops.write_pages(**writing(k=wrong))),
        ("v", lambda: ops.write_pages(**writing(v=wrong))),
        ("outs", lambda: ops.merge_states(wrong, torch.zeros(1, 1, 2))),
        ("lses", lambda: ops.merge_states(torch.zeros(1, 1, 2, 8), wrong)),
        ("q", lambda: ops.rotate_rows(wrong, None, torch.ones(1, 8), torch.ones(1, 8))),
        ("cos", lambda: ops.rotate_rows(torch.zeros(1, 2, 8), None, wrong, torch.ones(1, 8))),
    ]:
        with pytest.raises(InvalidArgument, match=f"^{name}: {expected}"):
            call()


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**70, 1.5, "3"])
def test_a_count_of_tokens_is_one(wrong) -> None:
    with pytest.raises(InvalidArgument, match=r"tokens: expected a number from 0 to 2\^31 − 1"):
        reads(ops.score_tokens, **reading(), tokens=wrong)


def test_entries_that_are_no_table_are_refused_by_name() -> None:
    for wrong in (None, [[1, 0, 1, 0, 0]], "entries"):
        with pytest.raises(InvalidArgument, match="entries: expected a tensor"):
            reads(ops.score_tokens, **reading(entries=wrong))


TOKENS = np.arange(4, dtype=np.int32)
NUMBERS: list[Callable[[int], object]] = [
    lambda n: KvShape(n, 1, 8),
    lambda n: KvShape(1, 1, 8, n),
    lambda n: KvCache(KvShape(1, 2, 8, 4), blocks=n, memory=False),
    lambda n: KvCache(KvShape(1, 2, 8, 4), arena_bytes=n, memory=False),
    lambda n: small_cache().admit(TOKENS, reserve_tokens=n),
    lambda n: small_cache().admit(TOKENS, segments=[(0, n, "")]),
    lambda n: small_cache().head_rows(n),
    lambda n: small_cache().page_layers(n),
    lambda n: small_cache().admit(TOKENS).entries(n),
    lambda n: small_cache().admit(TOKENS).commit(n, 0),
    lambda n: small_cache().admit(TOKENS).commit(4, n),
    lambda n: small_cache().admit(TOKENS).advance(0, n),
    lambda n: small_cache().admit(TOKENS).freeze("x", 0, n),
    lambda n: ops.Reach(n, np.zeros((2, 4), np.int32)) if n < 0 else KvShape(1, n, 8),
    lambda n: reads(ops.attend_prefill, **reading(layer=n)),
    lambda n: reads(ops.attend_prefill, **reading(kv_heads=n)),
    lambda n: ops.write_pages(**writing(layer=n)),
    lambda n: ops.copy_rerotate(
        torch.zeros(20, 2, 4, 8), np.zeros((0, 6), np.int32), rope_table(1, 8), kv_heads=n
    ),
]


@pytest.mark.parametrize("op", [ops.attend_prefill, ops.attend_decode, ops.score_tokens])
@pytest.mark.parametrize("wrong", [None, 3, torch.zeros(20, 2, 4, 8), {"layer": 0}])
def test_what_is_read_is_a_paged_kv(op, wrong) -> None:
    call = reading()
    rows = [call[name] for name in ("q", "positions", "entries")]
    offsets = {"entry_offsets": np.zeros(2, np.int32)}
    with pytest.raises(InvalidArgument, match="kv: expected a PagedKv, got"):
        op(*rows, wrong, **offsets)


@pytest.mark.parametrize("call", range(len(NUMBERS)))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [63, 64, 1400])
def test_numbers_beyond_64_bits_are_out_of_range(call, bits, sign) -> None:
    number = sign * (1 << bits) - (sign < 0)
    with pytest.raises(InvalidArgument, match="expected .*, got") as told:
        NUMBERS[call](number)
    assert len(str(told.value)) < 700


SIZES = {"dtype": "bf16", "layout": "payload", "layers": 1, "kv_heads": 2, "head_dim": 8}
NAMED: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(
        ("capacity_bytes", "quota_bytes", "threads"), lambda folder, given: Store(folder, **given)
    ),
    "bytes": lambda folder, given: Store(folder).set_quota("tenant", **given),
    **dict.fromkeys(
        ("layers", "kv_heads", "head_dim"),
        lambda _, given: Provenance("model", **{**SIZES, **given}),
    ),
    "page_tokens": lambda _, given: KvShape(1, 2, 8, **given),
    **dict.fromkeys(
        ("blocks", "arena_bytes"), lambda _, given: KvCache(KvShape(1, 2, 8, 4), **given)
    ),
    **dict.fromkeys(
        ("token_budget", "chunk_tokens", "max_running", "span_tokens"),
        lambda _, given: Scheduler(small_cache(), **given),
    ),
    "kept": lambda _, given: ops.PackedFormat("top-r", 8, 4, **given),
    "layer": lambda _, given: ops.write_pages(**writing(**given)),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("wrong", ["1G", "", b"1", 1.5, True, np.float32(1), [1], float("nan")])
def test_what_is_no_whole_number_is_refused_by_name(name, wrong, tmp_path) -> None:
    with pytest.raises(InvalidArgument) as told:
        NAMED[name](str(tmp_path / "kv"), {name: wrong})
    assert str(told.value) == f"{name}: expected a whole number, got {wrong!r}"
    assert (told.value.expected, told.value.got) == ("a whole number", repr(wrong))


def test_whole_numbers_of_numpy_and_torch_are_taken(tmp_path) -> None:
    for one in (np.int64(1), np.uint8(1), torch.tensor(1)):
        Store(tmp_path / "kv", capacity_bytes=one, threads=one)
        assert KvShape(one, one, 8) == KvShape(1, 1, 8)
        assert Provenance("model", **{**SIZES, "layers": one}) == Provenance("model", **SIZES)


def test_what_shows_itself_by_an_error_is_refused_too(tmp_path) -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(InvalidArgument, match="^capacity_bytes: expected a whole number, got"):
        Store(tmp_path / "kv", capacity_bytes=Mute())  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 2**64, -(2**70), "1", 1.5, None, True])
def test_a_regime_is_64_bits(number) -> None:
    cache = small_cache()
    assert cache.match_prefix(TOKENS, regime=2**64 - 1) == 0
    cache.admit(TOKENS, regime=2**64 - 1).release()
    for call in (cache.admit, cache.match_prefix):
        with pytest.raises(InvalidArgument, match=r"regime: expected a number from 0 to 2\^64"):
            call(TOKENS, regime=number)


def test_a_window_beyond_all_positions_is_none() -> None:
    out, _ = reads(ops.attend_prefill, **reading(window=2**64))
    assert torch.equal(out, reads(ops.attend_prefill, **reading())[0])


@pytest.mark.parametrize("name", [HALF, "a" + HALF, HALF * 3])
def test_halves_of_characters_are_refused(name) -> None:
    cache = small_cache()
    request = cache.admit(TOKENS)
    request.commit(4, 4)
    for call in [
        lambda: cache.admit(TOKENS, namespace=name),
        lambda: cache.admit(TOKENS, segments=[(0, 2, name)]),
        lambda: cache.match_prefix(TOKENS, name),
        lambda: cache.frozen(name),
        lambda: cache.delete(name),
        lambda: cache.delete("x", name),
        lambda: request.freeze(name, 0, 4),
        lambda: KvCache(KvShape(1, 2, 8, 4), blocks=6, fingerprint=name),
        lambda: kvweave.HeadClassMap.from_json(name),
        lambda: kvweave.HeadClassMap.full(KvShape(1, 2, 8, 4), name),
    ]:
        with pytest.raises(InvalidArgument, match="expected"):
            call()
    assert cache.frozen() == []


def test_a_document_has_a_name() -> None:
    cache = small_cache()
    with cache.admit(TOKENS) as request:
        request.commit(4, 4)
        with pytest.raises(InvalidArgument, match="name: expected at least one character"):
            request.freeze("", 0, 4)
        request.freeze(" ", 0, 4)
    assert [segment.name for segment in cache.frozen()] == [" "]


def test_what_came_is_told_in_few_words() -> None:
    """A name of megabytes is shown by its beginning and its length."""
    huge = "x" * 10_000_000
    field = kvweave.HeadClassMap.full(KvShape(1, 2, 8, 4), "m").to_json()
    field = json.dumps({**json.loads(field), huge: 1})
    for call in [
        lambda: kvweave.HeadClassMap.from_json(field),
        lambda: KvCache(KvShape(1, 2, 8, 4), blocks=6, hash=huge),
        lambda: small_cache().admit(TOKENS, mode=huge),
        lambda: small_cache().delete(huge),
    ]:
        with pytest.raises(KvweaveError, match="expected") as told:
            call()
        assert len(str(told.value)) < 1000
        assert len(told.value.got or "") < 400


def safetensors_of(metadata: object) -> bytes:
    text = json.dumps({"__metadata__": metadata}).encode()
    return len(text).to_bytes(8, "little") + text


@given(
    st.one_of(
        st.none(),
        st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3),
        st.sampled_from(
            [{"kvweave.payload": ""}, {"kvweave.payload": "0 {}"}, {}, [], "text", 7, True]
        ),
    )
)
def test_payloads_with_any_metadata_are_refused(metadata) -> None:
    with pytest.raises(CorruptPayload, match="payload"):
        KvPayload.from_bytes(safetensors_of(metadata))
