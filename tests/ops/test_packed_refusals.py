"""What cannot be packed, or attended packed, is refused by name, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, ops
from paged import rope_table
from versions import VERSIONS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3", 64), "kind: expected int4"),
        (("int4", 72), "head_dim: expected a multiple of 16"),
        (("int4", 0), "head_dim: expected"),
        (("int4", 64, 8), "page_tokens: expected"),
        (("int4", 64, 512), "page_tokens: expected"),
        (("int4", 64, -16), "page_tokens: expected at least 0"),
        (("int4", 64, 64, "f32"), "scales: expected bf16 or f16"),
    ],
)
def test_formats_that_are_none_are_refused(arguments, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ops.PackedFormat(*arguments)


PACKS = np.array([[1, 64, 1, 3, 5, 7]], np.int32)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"packs": PACKS.astype(np.int64)}, "int32"),
        ({"packs": PACKS[:, :5].copy()}, "packs: expected shape"),
        ({"cache": torch.zeros(10, 2, 16, 64).to(torch.float8_e4m3fn)}, "cache: expected float32"),
        ({"cache": torch.zeros(10, 2, 16, 128)}, "cache: expected shape"),
        ({"cache": torch.zeros(10, 2, 24, 64)}, "page_tokens: expected a divisor of 64"),
        ({"cache": torch.zeros(10, 2, 16, 128)[..., ::2]}, "cache: expected C-contiguous"),
        ({"data": torch.zeros(4, 99, dtype=torch.uint8)}, "packed pages: expected shape"),
        ({"data": torch.zeros(4, 4608)}, "packed pages: expected uint8"),
    ],
)
def test_what_cannot_be_packed_is_refused(version, changed, message) -> None:
    of = ops.PackedFormat("int4", 64)
    cache = changed.get("cache", torch.zeros(9, 2, 16, 64))
    data = changed.get("data", torch.zeros(4, of.page_bytes, dtype=torch.uint8))
    packed = ops.PackedPages(data, of)
    with pytest.raises(InvalidArgument, match=message):
        version.pack_pages(cache, packed, changed.get("packs", PACKS), pages=2)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([[0, 64, 1, 3, 5, 7]], "block: expected at least 1"),
        ([[3, 64, 1, 3, 5, 7]], "packed block: expected 2 pages within 4"),
        ([[1, 65, 1, 3, 5, 7]], "tokens of a packed block: expected 1 to 64"),
        ([[1, 0, 1, 3, 5, 7]], "tokens of a packed block: expected 1 to 64"),
        ([[1, 64, 1, 3, 5, 8]], "block: expected a block within"),
        ([[1, 64, 1, 3, 5, 0]], "block: expected at least 1"),
        ([[1, 64, 1, 3, 5, 7], [2, 64, 1, 3, 5, 7]], "written blocks"),
    ],
)
def test_rows_that_point_outside_are_refused_or_skipped(version, packs, message) -> None:
    of, cache = ops.PackedFormat("int4", 64), torch.ones(9, 2, 16, 64)
    packed = ops.PackedPages.zeros(4, of)
    table = np.array(packs, np.int32)
    if version.tables_there:
        version.pack_pages(cache, packed, table[:1], pages=2)
        assert len(packs) == 2 or (packed.data == 0).all()
        return
    with pytest.raises(InvalidArgument, match=message):
        version.pack_pages(cache, packed, table, pages=2)
    assert (packed.data == 0).all(), "nothing is written"
    with pytest.raises(InvalidArgument, match=message):
        version.unpack_pages(packed, cache, table, pages=2)
    assert (cache == 1).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_no_rows_and_no_requests_are_nothing_to_do(version) -> None:
    of = ops.PackedFormat("int4", 64)
    packed = ops.PackedPages.zeros(3, of)
    version.pack_pages(torch.zeros(3, 2, 16, 64), packed, np.zeros((0, 6), np.int32), pages=2)
    assert (packed.data == 0).all()
    out, lse = version.attend_packed(
        torch.zeros(0, 4, 64).bfloat16(),
        np.zeros(0, np.int32),
        np.zeros((0, 5), np.int32),
        ops.PackedKv(packed, 0, 2, 1.0, rope_table(1, 64)),
        entry_offsets=np.zeros(1, np.int32),
    )
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"entries": [[3, 0, 64, 0, 0]]}, "block: expected a block within"),
        ({"entries": [[1, 0, 65, 0, 0]]}, "entry slots"),
        ({"offsets": [0, 2]}, "entry_offsets"),
        ({"q": torch.zeros(1, 4, 128)}, "head_dim of q"),
        ({"q": torch.zeros(1, 3, 64)}, "query heads"),
        ({"layer": 1}, "layer: expected a layer below 1"),
        ({"positions": [-1]}, "positions: expected at least 0"),
        ({"scale": float("nan")}, "scale: expected a finite number"),
    ],
)
def test_what_cannot_be_attended_is_refused(version, changed, message) -> None:
    of = ops.PackedFormat("int4", 64)
    table = "entr" in message or "block" in message or "positions" in message
    if version.tables_there and table:
        pytest.skip("a table on the device is not looked at")
    q = changed.get("q", torch.zeros(1, 4, 64)).bfloat16()
    kv = ops.PackedKv(
        ops.PackedPages.zeros(3, of),
        changed.get("layer", 0),
        2,
        changed.get("scale", 0.125),
        rope_table(1, 64),
    )
    with pytest.raises(InvalidArgument, match=message):
        version.attend_packed(
            q,
            np.array(changed.get("positions", [63]), np.int32),
            np.array(changed.get("entries", [[1, 0, 64, 0, 0]]), np.int32),
            kv,
            entry_offsets=np.array(changed.get("offsets", [0, 1]), np.int32),
        )


def test_objects_that_are_none_of_ours_are_refused() -> None:
    q, table = torch.zeros(1, 4, 64), np.zeros((0, 5), np.int32)
    for kv in (None, ops.PackedPages.zeros(3, ops.PackedFormat("int4", 64))):
        with pytest.raises(InvalidArgument, match="kv: expected a PackedKv"):
            ops.attend_packed(q, np.zeros(1, np.int32), table, kv, entry_offsets=np.zeros(2))
    with pytest.raises(InvalidArgument, match="packed pages: expected PackedPages"):
        ops.pack_pages(torch.zeros(3, 2, 16, 64), torch.zeros(3), PACKS, pages=2)
