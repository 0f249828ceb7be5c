"""Pages in a basis that tensor cores take back out of it: near to what the definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basis_formats import plane_formats, top_r_formats
from kvweave import ops
from packed_texts import drawn_bases, on_cuda, text_of
from versions import needs_cuda

pytestmark = needs_cuda

SIZES = [16, 64, 80, 128, 256], [16, 48, 64, 128]
FORMATS = plane_formats(*SIZES) | top_r_formats(*SIZES)
LEFT = 2**-15
"""Of a direction what two numbers of bf16 leave of it, at most, and what sums lose beside."""


@settings(max_examples=200)
@given(
    of=FORMATS,
    tokens=st.integers(1, 400),
    kv_heads=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    odd=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 15)), max_size=3),
    seed=st.integers(0, 2**20),
)
def test_restored_pages_are_near_to_the_definition(of, tokens, kv_heads, dtype, odd, seed) -> None:
    """Vectors of a text whose blocks have two bases in turns; of what is NaN all numbers are."""
    generator = torch.Generator().manual_seed(seed)
    bases = drawn_bases(generator, of, kv_heads)
    text = text_of(generator, tokens, of=of, kv_heads=kv_heads, bases=bases)
    for token, channel in odd:
        block = int(text.packs[token % tokens // of.page_tokens, 2])
        text.cache[block, token % 2, 0, channel] = torch.nan
    ops.pack_pages(text.cache, text.packed, text.packs, pages=text.pages)
    wanted, numbers = (torch.full_like(text.cache, 7.0) for _ in range(2))
    ops.unpack_pages(text.packed, wanted, text.packs, pages=text.pages)
    ops.unpack_pages(text.packed, numbers, text.packs, pages=text.pages, in_basis=True)
    there = on_cuda(text.packed)
    got = torch.full_like(text.cache, 7.0, dtype=dtype, device="cuda")
    packs = torch.from_numpy(text.packs).cuda()
    ops.unpack_pages(there, got, packs, pages=text.pages, in_order=False)
    got = got.cpu().float()
    assert torch.equal(got.isnan(), wanted.isnan())
    largest = float(bases.abs().max())
    sums = numbers.abs().sum(-1, keepdim=True) * largest
    near = LEFT * sums + torch.finfo(dtype).eps * wanted.abs() + torch.finfo(dtype).tiny
    fine = ~wanted.isnan()
    assert ((got - wanted).abs() <= near)[fine].all()


@pytest.mark.parametrize("name", ["half-int4", "quarter-bf16", "planes-3"])
def test_rows_that_point_outside_are_skipped(name: str) -> None:
    """Beside one that does not."""
    of = ops.packed_format(name, 128)
    generator = torch.Generator().manual_seed(0)
    bases = drawn_bases(generator, of, 2)
    text = text_of(generator, 2 * of.page_tokens, of=of, bases=bases)
    there = on_cuda(text.packed)
    packs = torch.from_numpy(text.packs).cuda()
    packs[0, 0] = 1 << 20
    got = torch.full_like(text.cache, 7.0, dtype=torch.bfloat16, device="cuda")
    ops.unpack_pages(there, got, packs, pages=2, in_order=False)
    other = set(text.packs[1, 2:].tolist())
    for block in range(len(got)):
        changed = bool((got[block] != 7.0).any())
        assert changed == any(first <= block < first + 2 for first in other)
