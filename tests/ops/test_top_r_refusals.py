"""What is no top-r page, or has no basis, is refused by name, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, ops
from packed_texts import random_bases, text_of
from paged import rope_table
from versions import RUNNABLE

HOST = [version for version in RUNNABLE if version.device == "cpu"]
OF = ops.PackedFormat("top-r", 64, 32, kept=16)
NAMES = {"ids": lambda version: version.name}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "kept: expected a number, got none"),
        ({"kept": 0}, "kept: expected a multiple of 1 from 1 to 64"),
        ({"kept": 65}, "kept: expected"),
        ({"kept": -1}, "kept: expected at least 0"),
        ({"kept": 18, "group": 4}, "kept: expected a multiple of 4"),
        ({"kept": 15, "numbers": "int4"}, "kept: expected a multiple of 2"),
        ({"kept": 16, "group": 3}, "group: expected 1, 2 or 4"),
        ({"kept": 16, "channels": 80}, "channels: expected"),
        ({"kept": 16, "group": 2, "channels": 33}, "channels: expected a multiple of 2"),
        ({"kept": 34, "channels": 32}, "kept: expected a multiple of 1 from 1 to 32"),
        ({"kept": 16, "numbers": "int3"}, "numbers: expected bf16, fp8 or int4"),
    ],
)
def test_formats_that_are_none_are_refused(sizes, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ops.PackedFormat("top-r", 64, **sizes)


def test_what_is_for_top_r_alone_is_refused_elsewhere() -> None:
    for sizes in ({"kept": 16}, {"group": 2}, {"channels": 32}, {"numbers": "bf16"}):
        with pytest.raises(InvalidArgument, match="kind: expected top-r"):
            ops.PackedFormat("int4", 64, **sizes)
    with pytest.raises(InvalidArgument, match="packed format: expected int4, int8, quarter-bf16"):
        ops.packed_format("int3", 64)
    with pytest.raises(InvalidArgument, match="format: expected top-r pages"):
        ops.Moments(ops.PackedFormat("int4", 64), 2)
    for pages in (0, 2**40):
        with pytest.raises(InvalidArgument, match="pages: expected 1 to 43018"):
            ops.Moments(OF, pages)
    with pytest.raises(InvalidArgument, match="pages: expected 1 to 170"):
        ops.Moments(ops.PackedFormat("top-r", 1024, kept=64), 256)


@pytest.mark.parametrize("version", HOST, **NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bases: None, "bases: expected some"),
        (lambda bases: ops.PackedBases(bases.data[:0], bases.of), "basis of a packed block"),
        (lambda bases: ops.PackedBases(bases.data.double(), bases.of), "bases: expected float32"),
        (lambda bases: ops.PackedBases(bases.data[..., :-1, :], bases.of), "bases: expected shape"),
        (lambda bases: ops.PackedBases(bases.data[:, :1].clone(), bases.of), "pages of a basis"),
        (lambda bases: ops.PackedBases(bases.data, bases.of[1:]), "basis of each packed page"),
        (lambda bases: ops.PackedBases(bases.data, bases.of + 2), "basis of a packed block"),
        (lambda bases: ops.PackedBases(bases.data, bases.of - 2), "basis of a packed block"),
        (lambda bases: (bases.data, bases.of), "bases: expected PackedBases"),
    ],
)
def test_pages_without_their_bases_are_refused(generator, version, change, message) -> None:
    text = text_of(generator, 40, of=OF, bases=random_bases(generator, OF, 2))
    packed = ops.PackedPages(text.packed.data, OF, change(text.packed.bases))
    before, cache = packed.data.clone(), text.cache.clone()
    with pytest.raises(InvalidArgument, match=message):
        version.pack_pages(text.cache, packed, text.packs, pages=2)
    with pytest.raises(InvalidArgument, match=message):
        version.unpack_pages(packed, text.cache, text.packs, pages=2)
    kv = ops.PackedKv(packed, 0, 2, 0.125, rope_table(1, 64))
    with pytest.raises(InvalidArgument, match=message):
        version.attend_packed(
            torch.zeros(1, 4, 64),
            np.array([39], np.int32),
            text.entries(),
            kv,
            entry_offsets=np.array([0, 2], np.int32),
        )
    assert torch.equal(packed.data, before)
    assert torch.equal(text.cache.nan_to_num(), cache.nan_to_num())


@pytest.mark.parametrize("version", HOST, **NAMES)
def test_bases_of_pages_that_need_none_are_refused(generator, version) -> None:
    of = ops.PackedFormat("int4", 64, 32)
    text = text_of(generator, 32, of=of)
    bases = ops.PackedBases(random_bases(generator, OF, 2), torch.zeros(3, dtype=torch.int32))
    packed = ops.PackedPages(text.packed.data, of, bases)
    with pytest.raises(InvalidArgument, match="bases: expected none for int4"):
        version.pack_pages(text.cache, packed, text.packs, pages=2)


@pytest.mark.parametrize("version", HOST, **NAMES)
def test_no_rows_and_no_requests_are_nothing_to_do(generator, version) -> None:
    packed = ops.PackedPages.zeros(3, OF, bases=random_bases(generator, OF, 2))
    nothing = np.zeros((0, 4), np.int32)
    version.pack_pages(torch.zeros(3, 2, 16, 64), packed, nothing, pages=2)
    assert (packed.data == 0).all()
    out, lse = version.attend_packed(
        torch.zeros(1, 4, 64),
        np.zeros(1, np.int32),
        np.zeros((0, 5), np.int32),
        ops.PackedKv(packed, 0, 2, 1.0, rope_table(1, 64)),
        entry_offsets=np.zeros(2, np.int32),
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
