"""Numbers of packed pages along their bases, and attention whose rows are turned to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basis_formats import plane_formats, top_r_formats
from kvweave import InvalidArgument, ops
from kvweave.runner.kv.turned_rows import LayerBasis, attend_turned
from packed_texts import Text, drawn_bases, pages_of, read_back, text_of
from paged import rope_table
from versions import CPU, RUNNABLE

HOST = [version for version in RUNNABLE if version.device == "cpu"]


SIZES = [16, 64, 80, 128], [16, 48, 64]
FORMATS = plane_formats(*SIZES) | top_r_formats(*SIZES)


def directions_of(of: ops.PackedFormat, bases: torch.Tensor) -> torch.Tensor:
    """Of bases [·, 2, rows, D] what a number along each direction stands for, [·, 2, C, D]."""
    return bases[:, :, 2 : 2 + of.head_dim] if of.kind == "planes" else bases[:, :, 1:]


def channels_of(of: ops.PackedFormat, bases: torch.Tensor) -> int:
    """Directions behind which no page has a number."""
    return int((bases[:, :, 1] > 0).sum(-1).max()) if of.kind == "planes" else of.channels


@settings(max_examples=80)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    version=st.sampled_from(RUNNABLE),
    odd=st.lists(st.tuples(st.integers(0, 149), st.integers(0, 15)), max_size=3),
    seed=st.integers(0, 2**20),
)
def test_numbers_by_directions_are_what_vectors_stand_for(
    of, tokens, kv_heads, version, odd, seed
) -> None:
    """In f64, and the same bits by every version; of a vector that is NaN all numbers are."""
    generator = torch.Generator().manual_seed(seed)
    bases = drawn_bases(generator, of, kv_heads, 1)
    text = text_of(generator, tokens, of=of, kv_heads=kv_heads, bases=bases)
    for token, channel in odd:
        block = int(text.packs[token % tokens // of.page_tokens, 2])
        text.cache[block, token % 2, 0, channel] = torch.nan
    ops.pack_pages(text.cache, text.packed, text.packs, pages=text.pages)
    rows = directions_of(of, bases[0].double())
    found = read_back(text, version, in_basis=True)
    by_definition = read_back(text, HOST[0], in_basis=True)
    wanted = read_back(text, HOST[0])
    for side, numbers in enumerate(found):
        assert torch.equal(numbers.nan_to_num(7.0), by_definition[side].nan_to_num(7.0))
        finite = numbers.isfinite().all(-1)
        assert torch.equal(finite, wanted[side].isfinite().all(-1))
        behind = numbers[finite][:, channels_of(of, bases[0]) :]
        assert (behind == 0).all()
        mean, along = bases[0, :, side, 0].double(), rows[:, side]
        means = torch.einsum("tgc,gcd->tgd", numbers[..., : along.shape[1]].double(), along) + mean
        near = 1e-5 * (1 + wanted[side].abs().amax(-1, keepdim=True).nan_to_num())
        assert ((means - wanted[side]).abs() <= near)[finite].all()


def entries_of(text: Text) -> np.ndarray:
    """The entries of a row that reads a text from position 20 on, in pages as large as packed."""
    starts = 20 + text.packed.format.page_tokens * np.arange(len(text.packs))
    none = np.zeros(len(text.packs))
    entries = np.stack([text.packs[:, 0], none, text.packs[:, 1], starts, none], 1)
    return entries.astype(np.int32)


@settings(max_examples=60)
@given(
    of=FORMATS,
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    rows=st.integers(1, 20),
    seed=st.integers(0, 2**20),
)
def test_rows_that_are_turned_say_what_unpacked_pages_do(
    of, tokens, kv_heads, group, rows, seed
) -> None:
    """Rows that see all, a part and nothing of it."""
    generator = torch.Generator().manual_seed(seed)
    bases = drawn_bases(generator, of, kv_heads, 1)
    text = text_of(generator, tokens, of=of, kv_heads=kv_heads, bases=bases, version=CPU)
    q = torch.randn((rows, kv_heads * group, of.head_dim), generator=generator)
    positions = np.sort(np.random.default_rng(seed).integers(0, 190, rows)).astype(np.int32)
    rope = rope_table(1, of.head_dim)
    ends = np.asarray([0, len(text.packs)], np.int32)

    def read(*, in_basis: bool) -> ops.PagedKv:
        return ops.PagedKv(pages_of(text, CPU, in_basis=in_basis), 0, kv_heads, 0.2, rope)

    entries, exact = entries_of(text), read(in_basis=False)
    wanted = ops.attend_prefill(q, positions, entries, exact, entry_offsets=ends)
    directions = directions_of(of, bases[0])
    basis = LayerBasis(bases[0, :, 0, 0], directions[:, 0], bases[0, :, 1, 0], directions[:, 1])
    out, lse = attend_turned(basis, (q, positions), (read(in_basis=True), entries, ends))
    seen = wanted[1].isfinite()
    assert torch.equal(seen.all(-1), torch.from_numpy(positions >= 20))
    assert torch.equal(lse.isfinite(), seen)
    assert torch.allclose(lse[seen], wanted[1][seen], atol=2e-4, rtol=2e-4)
    assert torch.allclose(out[seen], wanted[0][seen], atol=2e-4, rtol=2e-4)
    assert torch.equal(out.isfinite(), wanted[0].isfinite())


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("version", RUNNABLE, ids=lambda version: version.name)
def test_pages_without_a_basis_have_no_numbers_in_it(kind, version) -> None:
    text = text_of(torch.Generator().manual_seed(1), 40, of=ops.packed_format(kind, 64))
    with pytest.raises(InvalidArgument, match=f"in_basis: expected .* basis, got {kind}"):
        read_back(text, version, in_basis=True)
    with pytest.raises(InvalidArgument, match="in_basis: expected True or False"):
        read_back(text, version, in_basis=1)  # type: ignore[arg-type]
