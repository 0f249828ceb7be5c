"""Payloads with packed pages as bytes of any origin: what was sent, or refused by type."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens
from kvweave import KvweaveError
from kvweave.payload import KvPayload
from kvweave.runner import Runner
from packed_decoding import nothing_is_held
from packed_payloads import packed_sample
from payloads import refused, resealed, spoiled_bytes_are_refused

Sample = tuple[Runner, KvPayload]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return packed_sample()


@pytest.fixture(scope="module")
def payload(sample: Sample) -> KvPayload:
    return sample[1]


def test_it_has_all_that_there_is(payload: KvPayload) -> None:
    packed = payload.header.packed
    assert packed is not None
    assert payload.header.to_json()["schema"] == 2
    assert (packed.blocks, packed.entries, packed.bases, packed.basis) == (4, 4, 1, 1)
    # First tokens of both documents are exact, and travel so.
    assert packed.aside_tokens == 334 - 64 - (180 - 2)
    names = ["aside", "aside_entries", "bases", "bounds", "entries", "pages", "which"]
    assert [f"packed.{name}" for name in names] == sorted(n for n in payload.parts if "packed" in n)
    again = KvPayload.from_bytes(payload.to_bytes())
    assert again.header == payload.header
    assert all(torch.equal(again.parts[name], part) for name, part in payload.parts.items())


def test_bytes_that_are_cut_or_go_on(payload: KvPayload) -> None:
    data = payload.to_bytes()
    for end in [*range(0, 64), *range(64, len(data), 9973), len(data) - 1]:
        refused(data[:end])
    for more in (b"\0", data):
        refused(data + more)


@settings(max_examples=150)
@given(data=st.data())
def test_bytes_that_were_spoiled(payload: KvPayload, data: st.DataObject) -> None:
    spoiled_bytes_are_refused(payload, data)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("version", 2, "packed version: expected an integer from 1 to 1, got 2"),
        ("version", "1", "packed version"),
        ("format", None, "format: expected a mapping"),
        ("format", {}, "format: expected the fields"),
        ("sights", [[0, 0]], "sights: expected 2 heads"),
        ("sights", [[0, 0], [0, 0]], "packed.pages: expected U8 \\[4, 2"),
        ("sights", [[0, 5], [0, 0]], "sight: expected no sink without a window"),
        ("sights", [[-1, 0], [0, 0]], "sight: expected an integer"),
        ("sights", "all", "sights: expected a list"),
        ("choices", [[4, 1]], "choice: expected pages, steps and a score"),
        ("choices", [[0, 1, "mean"]], "choice pages"),
        ("choices", [[4, 2**40, "mean"]], "choice steps"),
        ("choices", [[4, 1, "best"]], "choice score: expected one of min-max, mean, got best"),
        ("choices", [[4, 1, ["mean"]]], "choice score"),
        ("chooses", [-1], "chooses: expected 2 heads"),
        ("chooses", [0, -1], "chooses: expected an integer from -1 to -1"),
        ("chooses", [-1, 1], "chooses: expected an integer from -1 to 0"),
        ("chooses", [-1, -1], "part packed.bounds: expected none"),
        ("chooses", [-1, "0"], "chooses"),
        ("chooses", None, "chooses: expected a list"),
        ("tokens", 333, "packed tokens: expected 320 or 334, got 333"),
        ("tokens", 320, "each position of \\[64, 320\\) once"),
        ("tokens", True, "packed tokens"),
        ("blocks", 5, "packed blocks: expected an integer from 0 to 4"),
        ("blocks", 3, "part packed.bounds"),
        ("blocks", -1, "packed blocks"),
        ("entries", 10**9, "packed entries: expected an integer from 0 to 334"),
        ("entries", 2.0, "packed entries"),
        ("bases", 6, "packed bases: expected an integer from 0 to 5"),
        ("bases", 2, "part packed.bases"),
        ("bases", 0, "packed basis"),
        ("basis", 0, "packed basis: expected an integer from 1 to 1, got 0"),
        ("basis", 2, "packed basis"),
        ("basis", "1", "packed basis"),
        ("aside_entries", 10**9, "aside entries"),
        ("aside_tokens", 10**9, "aside tokens"),
        ("aside_tokens", None, "aside tokens"),
        ("more", 1, "another"),
    ],
)
def test_headers_that_cannot_be(payload: KvPayload, field: str, value: Any, says: str) -> None:
    header = json.loads(json.dumps(payload.header.to_json()))
    header["packed"][field] = value
    refused(resealed(payload, header), says)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "int3", "payload format: kind"),
        ("kind", 3, "format kind: expected a string"),
        ("kind", "int4", "format"),
        ("page_tokens", 0, "format page_tokens"),
        ("page_tokens", 63, "format"),
        ("page_tokens", 32, "part packed.pages"),
        ("page_tokens", 2**70, "format page_tokens"),
        ("scales", "f64", "payload format: scales"),
        ("kept", 63, "format: expected"),
        ("numbers", "bf16", "format: expected"),
        ("token_bytes", None, "format"),
        ("token_bytes", -1, "format token_bytes"),
        ("token_bytes", 40, "part packed.pages"),
        ("more", 1, "another"),
    ],
)
def test_formats_that_cannot_be(payload: KvPayload, field: str, value: Any, says: str) -> None:
    header = json.loads(json.dumps(payload.header.to_json()))
    header["packed"]["format"][field] = value
    refused(resealed(payload, header), says)


def test_heads_that_choose_have_bounds(payload: KvPayload) -> None:
    bounds = payload.parts["packed.bounds"]
    assert bounds.shape == (4, 1, 3, 64)
    for wrong in (None, bounds[1:].contiguous(), bounds.double()):
        refused(resealed(payload, **{"packed.bounds": wrong}), "part packed.bounds: expected F32")


def test_schemas_say_whether_there_are_packed_tokens(payload: KvPayload) -> None:
    header = json.loads(json.dumps(payload.header.to_json()))
    refused(resealed(payload, {**header, "schema": 1}), "another: {'packed'}")
    refused(resealed(payload, {**header, "schema": 3}), "got another: {'texts'}")
    refused(resealed(payload, {**header, "schema": 4}), "schema: expected 1 to 3, got 4")
    refused(resealed(payload, {**header, "packed": None}), "packed header: expected a mapping")
    del header["packed"]
    refused(resealed(payload, {**header, "schema": 1}), "part packed.aside: expected none")
    header = json.loads(json.dumps(payload.header.to_json()))
    refused(resealed(payload, {**header, "promoted": [[0, 0]]}), "promoted: expected none beside")
    whole = {"kind": "full", "sink": 0, "recent": 0, "spans": [[0, 334]]}
    refused(resealed(payload, {**header, "groups": [whole]}), "expected one window group")


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "says"),
    [
        ("entries", 1, 0, 4, "slots of its blocks"),
        ("entries", 1, 0, -1, "slots of its blocks"),
        ("entries", 1, 0, 0, "all of 4 blocks"),
        ("entries", 0, 1, -1, "slots of its blocks"),
        ("entries", 0, 1, 64, "slots of its blocks"),
        ("entries", 0, 2, 65, "slots of its blocks"),
        ("entries", 0, 2, 63, "each position of"),
        ("entries", 1, 3, 70, "positions in order"),
        ("entries", 1, 3, -5, "slots of its blocks"),
        ("entries", 3, 3, 2**31 - 1, "each position of"),
        ("entries", 1, 4, 2**31 - 1, "slots of its blocks"),
        ("entries", 1, 4, -(2**31), "slots of its blocks"),
        ("aside_entries", 0, 0, 10**6, "slots of its blocks"),
        ("aside_entries", 0, 0, 1, "slots once each"),
        ("aside_entries", 0, 2, 17, "slots of its blocks"),
        ("aside_entries", 0, 4, 3, "keys that have not moved"),
        ("aside_entries", 0, 3, 63, "each position of"),
        ("which", 0, None, 0, "numbers from 1 to 1"),
        ("which", 0, None, 2, "numbers from 1 to 1"),
        ("which", 0, None, -(2**31), "numbers from 1 to 1"),
    ],
)
def test_parts_that_lie(
    payload: KvPayload, name: str, row: int, column: int | None, value: int, says: str
) -> None:
    part = payload.parts[f"packed.{name}"].clone()
    part[row if column is None else (row, column)] = value
    refused(resealed(payload, **{f"packed.{name}": part}), says)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bases_that_are_none(payload: KvPayload, value: float) -> None:
    bases = payload.parts["packed.bases"].clone()
    bases[0, 1, 1, -1, -1] = value
    refused(resealed(payload, **{"packed.bases": bases}), "finite numbers")
    bases = payload.parts["packed.bases"].clone()
    # Every channel of eight bits: more than a token has bytes.
    bases[0, :, :, 1] = 8.0
    refused(resealed(payload, **{"packed.bases": bases}), "payload packed.bases: ")


def test_bytes_of_pages_may_be_anything(sample: Sample) -> None:
    """As in a pool: whatever they are, they are read as numbers, or as none."""
    runner, payload = sample
    pages = payload.parts["packed.pages"]
    bounds = payload.parts["packed.bounds"]
    for fill, bound in ((0, torch.nan), (0x7F, torch.inf), (0xFF, -1e38)):
        parts = {"packed.pages": torch.full_like(pages, fill)}
        parts["packed.bounds"] = torch.full_like(bounds, bound)
        spoiled = resealed(payload, **parts)
        answer = runner.resume(KvPayload.from_bytes(spoiled), max_new_tokens=3, stop=())
        assert len(answer.tokens) == 3
    assert nothing_is_held(runner)
    runner.generate(random_tokens(300, 1), max_new_tokens=3)


@settings(max_examples=80)
@given(data=st.data())
def test_entries_of_any_origin(sample: Sample, data: st.DataObject) -> None:
    """Taken or refused by type; what is taken is decoded from, and nothing stays behind."""
    runner, payload = sample
    parts = {}
    for name in ("packed.entries", "packed.aside_entries", "packed.which"):
        part = payload.parts[name].clone()
        flat = part.view(-1).numpy()
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(flat) - 1))
            near = st.integers(int(flat[at]) - 2, int(flat[at]) + 2)
            one = st.one_of(near, st.integers(-(2**31), 2**31 - 1))
            flat[at] = np.int64(data.draw(one)).astype(np.int32)
        parts[name] = part
    try:
        taken = KvPayload.from_bytes(resealed(payload, **parts))
        runner.resume(taken, max_new_tokens=2, stop=())
    except KvweaveError:
        pass
    assert nothing_is_held(runner)
