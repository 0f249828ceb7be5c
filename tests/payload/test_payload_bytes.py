"""Payloads as bytes of any origin: they are what was sent, or refused by type."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kvweave import CorruptPayload, InvalidArgument, PoolFull
from kvweave.payload import KvPayload, import_kv
from payloads import (
    L,
    nothing_held,
    pages_of,
    receiver_of,
    refused,
    resealed,
    sample,
    sealed,
    spoiled_bytes_are_refused,
)


@pytest.fixture(scope="module")
def payload() -> KvPayload:
    return sample()


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


@settings(max_examples=250)
@given(data=st.data())
def test_bytes_that_were_spoiled(payload: KvPayload, data: st.DataObject) -> None:
    spoiled_bytes_are_refused(payload, data)


HUGE = 10**4000
WRONG: list[tuple[str, Any, str]] = [
    ("schema", 4, "schema: expected 1 to 3, got 4"),
    ("schema", 2, "header: expected the fields .*, got another: {'packed'}"),
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


@settings(max_examples=150)
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
