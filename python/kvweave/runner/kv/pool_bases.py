"""`PoolBases`: the bases that a pool's blocks are packed in, and how the shared one is found.

There are three kinds. The first basis rotates nothing. The second is that of all text without one
of its own: given, or made of the first tokens that are packed. The others belong to one document
each, for as long as a block says that it was packed in it.

A basis of planes has the steps of their codes, so the first one is of no use before it has been
made of some tokens: those that are packed first of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.device_memory import sent
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.runner.kv.exact_firsts import add_without_first
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.tables import Int32

UNROTATED = 0
"""The basis whose directions are the axes. That of top-r pages has mean 0, that of planes has mean,
bits and steps of the tokens that were packed first."""

SHARED = 1
"""The basis of text that has none of its own."""

FIRST_OWN = 2
"""The first of the bases that belong to a document each."""

OWN_SHARE = 8
"""A document has a basis of its own where this takes at most one of so many of its pages' bytes."""

SHARED_TOKENS = 512
"""Tokens that the shared basis is made of, at least, where none is given."""


QUERY_ROWS = 64
"""Rows of a chunk whose queries are taken note of, at most."""


def basis_shape(of: ops.PackedFormat, pages: int) -> tuple[int, ...]:
    """The shape of a basis of blocks of so many pages; () for a format that is packed in none."""
    return () if of.basis_rows is None else (pages, 2, of.basis_rows, of.head_dim)


def basis_bytes(of: ops.PackedFormat, pages: int) -> int:
    """Its bytes, 0 where there is none."""
    shape = basis_shape(of, pages)
    return 4 * prod(shape) if shape else 0


def needs_steps(of: ops.PackedFormat) -> bool:
    """Whether every block needs a basis made of tokens, as codes have their steps there alone."""
    return of.kind == "planes"


def some_queries(q: torch.Tensor) -> torch.Tensor:
    """Of a chunk's queries [R, H, D] those that are taken note of, f32 on the host."""
    return q[:: -(-len(q) // QUERY_ROWS)].float().cpu().contiguous()


def check_basis(packing: Packing, of: ops.PackedFormat, pages: int) -> None:
    """Refuses a given basis that is none of blocks of so many pages of a format.

    # Errors
    `InvalidArgument` for one beside a format without any, of another shape, that is not finite, or
    has bits that are no planes or too many for a page.
    """
    given, wanted = packing.basis, basis_shape(of, pages)
    if given is None:
        return
    if not wanted:
        raise InvalidArgument(f"basis: expected None beside kv_dtype={packing.named}, got one")
    if tuple(given.shape) != wanted or not bool(given.isfinite().all()):
        raise InvalidArgument(
            f"basis: expected finite numbers [{', '.join(map(str, wanted))}], "
            f"got {given.dtype} {list(given.shape)}"
        )
    of.check_bases(given[None].float().cpu().contiguous())


@dataclass(frozen=True)
class BlockBases:
    """The bases that blocks [N] are packed in, away from any pool.

    `which` i32 [N]: of each block the number of its basis, from 1 on, and 0 where nothing is
    rotated and the basis is nowhere written down, which blocks of planes never have. `bases` f32
    [k, pages, 2, rows, D] lie on the host.
    """

    which: npt.NDArray[np.int32]
    bases: tuple[torch.Tensor, ...]

    @staticmethod
    def of(each: Sequence[torch.Tensor | None]) -> BlockBases:
        """Of the basis of each block, None where nothing is rotated."""
        known = {id(basis): basis for basis in each if basis is not None}
        number = {name: 1 + at for at, name in enumerate(known)}
        which = [0 if basis is None else number[id(basis)] for basis in each]
        return BlockBases(np.asarray(which, np.int32), tuple(known.values()))

    def of_each(self) -> list[torch.Tensor | None]:
        """The basis of each block."""
        return [None if at == 0 else self.bases[at - 1] for at in self.which.tolist()]


class PoolBases:
    """The bases of the blocks of one pool, each of so many `pages`.

    `shared`: that of all text that has none of its own, as `check_basis` takes it.
    """

    def __init__(
        self,
        bases: ops.PackedBases,
        of: ops.PackedFormat,
        pages: int,
        shared: torch.Tensor | None,
    ) -> None:
        self.bases, self.format, self.pages = bases, of, pages
        self._given = shared
        # What `bases.of` says, wherever that lies.
        self._of = np.zeros(len(bases.of), np.int32)
        # The basis that is known to every pool of the format, if there is one.
        self._known_to_all = None if needs_steps(of) else UNROTATED
        self.begin_anew()

    def begin_anew(self) -> None:
        """Has no block be packed in any of them, whatever lies in their memory now.

        The shared one is the given one, or made of what is packed from now on.
        """
        self._of[:] = 0
        self.bases.of.zero_()
        self.bases.data.zero_()
        if self._known_to_all is not None:
            axes = torch.eye(self.format.head_dim)[: self.format.channels]
            self.bases.data[UNROTATED, :, :, 1:] = axes.to(self.bases.data.device)
        self.shared = UNROTATED
        # Of bases by their numbers what they are on the host, and by what these are known again.
        self._known: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._moments: ops.Moments | None = None
        if self._given is None:
            self._moments = ops.Moments(self.format, self.pages)
            return
        self._share(self._given)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.bases.data.nbytes

    @property
    def basis_bytes(self) -> int:
        """Bytes of one."""
        return basis_bytes(self.format, self.pages)

    @property
    def wants_moments(self) -> bool:
        """Whether the shared basis is still to be made of what is packed."""
        return self._moments is not None

    def add(self, cache: torch.Tensor, packs: Int32, left_out: int = 0) -> None:
        """Takes note of exact pages on the host that are to be packed, until they are enough.

        So many tokens at the beginning of the first pack count for nothing.
        """
        assert self._moments is not None
        begun = self._begun
        add_without_first(self._moments, cache, packs, self.pages, left_out)
        if self._moments.tokens >= SHARED_TOKENS:
            self._share(torch.from_numpy(self._moments.basis()))
            self._moments = None
        elif needs_steps(self.format) and not begun:
            self.write(UNROTATED, torch.from_numpy(self._moments.basis(rotated=False)))

    @property
    def wants_queries(self) -> bool:
        """Whether that basis spends its bits by what queries read."""
        return self.wants_moments and needs_steps(self.format)

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Takes note of queries, as `Moments.add_queries`, before what they read is packed."""
        assert self._moments is not None
        self._moments.add_queries(q, first=first, kv_heads=kv_heads)

    def of_pages(self, number: int, first: int, count: int) -> ops.PackedBases:
        """A basis of the pages [first, first + count) of a block, for blocks of so many pages.

        All blocks are said to be packed in it.
        """
        return ops.PackedBases(self.bases.data[number, first : first + count][None], self._first)

    @cached_property
    def _first(self) -> torch.Tensor:
        return torch.zeros_like(self.bases.of)

    def numbers(self, blocks: Int32) -> npt.NDArray[np.int32]:
        """The basis of each block [N]."""
        found: npt.NDArray[np.int32] = self._of[blocks]
        return found

    def assign(self, blocks: Int32, number: int) -> None:
        """Says which basis blocks [N] are packed in."""
        pages = (blocks[:, None].astype(np.int64) + np.arange(self.pages)).reshape(-1)
        self._of[pages] = number
        self.bases.of.index_fill_(0, sent(pages, self.bases.of.device), number)

    def forget(self, blocks: Int32) -> None:
        """Says that blocks [N] are packed in no basis of their own."""
        self.assign(blocks, UNROTATED)

    def let_go(self, runs: Int32) -> None:
        """Hears of free pages, rows [N, 2] of a first one and how many: nobody reads these.

        What the device has of them is written anew with the next blocks that are packed there.
        """
        for first, count in runs.tolist():
            self._of[first : first + count] = UNROTATED

    def own_bytes(self, blocks: Int32) -> int:
        """Bytes of the bases of their own that blocks are packed in."""
        numbers = np.unique(self.numbers(blocks))
        return int((numbers >= FIRST_OWN).sum()) * self.basis_bytes

    def held(self) -> int:
        """How many bases belong to a document."""
        return len(np.setdiff1d(self._of, [UNROTATED, SHARED]))

    def free(self) -> int | None:
        """A basis that no block is packed in; None where all are taken."""
        left = self._free()
        return int(left[0]) if len(left) else None

    def _free(self) -> npt.NDArray[np.int64]:
        """The bases that no block is packed in."""
        return np.setdiff1d(np.arange(FIRST_OWN, len(self.bases.data)), np.unique(self._of))

    def write(self, number: int, basis: torch.Tensor) -> None:
        """Makes a free basis this one."""
        self.bases.data[number] = basis.to(self.bases.data.device)
        self._known.pop(number, None)

    def on_host(self, number: int) -> torch.Tensor:
        """A basis on the host, the same tensor for as long as it stays."""
        return self._known_as(number)[1]

    def _known_as(self, number: int) -> tuple[bytes, torch.Tensor]:
        if number not in self._known:
            basis = self.bases.data[number].cpu().clone()
            self._known[number] = _digest(basis), basis
        return self._known[number]

    def of_blocks(self, blocks: Int32) -> BlockBases:
        """What blocks [N] are packed in."""
        return self._away(self.numbers(blocks))

    def of_text(self, blocks: Int32) -> tuple[BlockBases, int | None]:
        """The same, with the basis that text is packed in now: its number as `which` has them.

        None where there is none yet, as nothing has been packed by which it could be made.
        """
        bases = self._away(np.append(self.numbers(blocks), np.int32(self.shared)))
        named = int(bases.which[-1])
        if self.shared == UNROTATED and self._known_to_all is None and not self._begun:
            # What is there are no steps of any tokens.
            return self.of_blocks(blocks), None
        return BlockBases(bases.which[:-1], bases.bases), named

    @property
    def _begun(self) -> bool:
        """Whether any tokens have been packed while the shared basis is to be made."""
        return self._moments is not None and self._moments.tokens > 0

    def _away(self, numbers: npt.NDArray[np.int32]) -> BlockBases:
        """Bases by their numbers [N], away from the pool."""
        used = [n for n in np.unique(numbers).tolist() if n != self._known_to_all]
        which = np.zeros(len(numbers), np.int32)
        others = numbers != self._known_to_all
        which[others] = 1 + np.searchsorted(used, numbers[others])
        return BlockBases(which, tuple(self.on_host(n) for n in used))

    def put(self, blocks: Int32, given: BlockBases) -> None:
        """Says that blocks [N] are packed in some bases, which are found here or written.

        # Errors
        `PoolFull` where there is no room for one of them.
        """
        self.forget(blocks)
        for index, basis in enumerate(given.bases, 1):
            number = self._find(_digest(basis))
            if number is None:
                number = self.free()
                if number is None:
                    most = len(self.bases.data) - FIRST_OWN
                    raise PoolFull(f"bases: expected room for one more, got {most} that are used")
                self.write(number, basis)
            self.assign(blocks[given.which == index], number)

    def expect_room(self, given: BlockBases) -> None:
        """Refuses bases that `put` may have no room for, whichever blocks it is given.

        What is accepted `put` takes, for as long as no other basis has been written: what it
        forgets first leaves it more room, and never less.

        # Errors
        `PoolFull` where fewer are free than are not found here.
        """
        needed = sum(self._find(digest) is None for digest in set(map(_digest, given.bases)))
        free = len(self._free())
        if needed > free:
            most = len(self.bases.data) - FIRST_OWN
            raise PoolFull(f"bases: expected room for {needed} more of {most}, got {free}")

    def _find(self, digest: bytes) -> int | None:
        """A basis of the pool that is the same, number for number; None where there is none."""
        there = [self.shared, *np.unique(self._of).tolist()]
        return next((n for n in there if n and self._known_as(n)[0] == digest), None)

    def _share(self, basis: torch.Tensor) -> None:
        self.write(SHARED, basis)
        self.shared = SHARED


def _digest(basis: torch.Tensor) -> bytes:
    return sha256(basis.contiguous().numpy().tobytes()).digest()
