"""`PoolBases`: the bases that a pool's blocks are packed in, and how the shared one is found.

There are three kinds. The first basis rotates nothing. The next are those of all text without one
of its own: one that is given, or one made of the first tokens that are packed, and another for
longer texts. The others belong to one document each, for as long as a block says that it was packed
in it.

A basis of short texts is far from that of longer ones, since keys are rotated to their positions:
of pairs that turn slowly all that it knows is where they begin. It is the better for short texts,
so it stays until a longer one comes. Then it gives way to one of the same tokens at any position,
and what was packed in it stays as it is, since every block has the number of its own.

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
from kvweave.plan import Rows
from kvweave.runner.kv.exact_firsts import add_without_first
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.tables import Int32

UNROTATED = 0
"""The basis whose directions are the axes. That of top-r pages has mean 0, that of planes has mean,
bits and steps of the tokens that were packed first."""

SHARED = 1
"""The basis of text that has none of its own: that which is given, or the first that is made."""

REFINED = 2
"""The same from the time on when texts are longer than that is made of, in pools that make one."""

OWN_SHARE = 8
"""A document has a basis of its own where this takes at most one of so many of its pages' bytes."""

SHARED_TOKENS = 512
"""Tokens that the shared basis is made of, at least, where none is given."""

LONGER = 1.25
"""A text is longer than others where a page of it begins so many times as far as theirs end."""

MOVES, GOLDEN = 64, (5**0.5 - 1) / 2
"""So many moves have tokens stand anywhere; the step between two of them, as a share of the way."""

QUERY_ROWS = 64
"""Rows of a chunk whose queries are taken note of, at most."""


def shared_bases(*, refines: bool) -> int:
    """How many bases of a pool belong to no document; the next is the first of those that do.

    `refines`: whether it makes a second shared one.
    """
    return 1 + (REFINED if refines else SHARED)


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


@dataclass(frozen=True)
class PositionRange:
    """Where keys of coming texts may stand: at positions below `tokens`, turned as `rope` says.

    `first_layer`: of the layers of `kv_heads` heads that bases are of.
    """

    rope: ops.RopeTable
    tokens: int
    kv_heads: int
    first_layer: int = 0

    def all_over(self, moments: ops.Moments) -> ops.Moments:
        """What the sums of tokens and queries are where these stand anywhere in the range.

        The golden ratio's multiples lie evenly, and their steps are no period of any pair.
        """
        places = np.arange(MOVES) * GOLDEN % 1.0
        deltas = (places * self.tokens).astype(np.int32)
        known = {"kv_heads": self.kv_heads, "first_layer": self.first_layer}
        return moments.moved(self.rope, deltas, **known)


class FoundBasis:
    """What shared bases of blocks of so many `pages` are made of: tokens and queries, as they come.

    The first is made of all that is packed until there are `SHARED_TOKENS`, as they stand. So it is
    of these positions. The second is made of the same tokens all over the range of `positions`,
    once a text is `LONGER` than theirs, and of its pages behind them; there is none for None.
    `number`: of the basis that text is packed in by now. All sums are in f64 on the host, and end
    with the last basis that is made of them.
    """

    def __init__(self, of: ops.PackedFormat, pages: int, positions: PositionRange | None) -> None:
        self.number = UNROTATED
        self._format, self._pages, self._positions = of, pages, positions
        self._moments: ops.Moments | None = ops.Moments(of, pages)
        # The first place in a text from which no page has come.
        self._end = 0

    @property
    def wants_moments(self) -> bool:
        """Whether a basis is still to be made of what is packed."""
        return self._moments is not None

    @property
    def begun(self) -> bool:
        """Whether any tokens have been packed while a basis is to be made."""
        return self._moments is not None and self._moments.tokens > 0

    def wanted(self, places: Rows) -> npt.NDArray[np.bool_]:
        """Of pages [N], by their places in their texts, those that a basis is to be made of.

        Until there is one it is to be made of any, then of those behind all others, where some lie
        so far behind that they are of a longer text.
        """
        if self._moments is None:
            return np.zeros(len(places), np.bool_)
        if self.number == UNROTATED:
            return np.ones(len(places), np.bool_)
        longer = int(places.max(initial=0)) >= LONGER * self._end
        return longer & (places >= self._end)

    def add(
        self, cache: torch.Tensor, packs: Int32, places: Rows, left_out: int = 0
    ) -> torch.Tensor | None:
        """Takes note of exact pages on the host that are wanted, but for some first tokens.

        Returns what the basis `number` is from now on, where these tokens change that.
        """
        moments, begun = self._moments, self.begun
        assert moments is not None
        add_without_first(moments, cache, packs, self._pages, left_out)
        self._end = max(self._end, int(places.max()) + 1)
        if self.number == SHARED:
            assert self._positions is not None
            basis = self._positions.all_over(moments).basis()
            self.number, self._moments = REFINED, None
        elif moments.tokens >= SHARED_TOKENS:
            basis = moments.basis()
            self.number, self._moments = SHARED, None if self._positions is None else moments
        elif needs_steps(self._format) and not begun:
            basis = moments.basis(rotated=False)
        else:
            return None
        return torch.from_numpy(basis)

    def wants_queries(self, places: Rows) -> bool:
        """Whether that basis spends its bits by what queries read, and those of some rows count.

        They do until there is a basis, then where they fill pages [N] of which some are `wanted`.
        """
        if not self.wants_moments or not needs_steps(self._format):
            return False
        return self.number == UNROTATED or bool(self.wanted(places).any())

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Takes note of queries, as `Moments.add_queries`, before what they read is packed."""
        assert self._moments is not None
        self._moments.add_queries(q, first=first, kv_heads=kv_heads)


class PoolBases:
    """The bases of the blocks of one pool, each of so many `pages`.

    `shared`: that of all text that has none of its own, as `check_basis` takes it; None has it made
    of what is packed. `refines`: there is room for a second one, which is made as `FoundBasis` has
    it where the range of `positions` is known. Of `bases` the first `shared_bases` belong to no
    document.
    """

    def __init__(
        self,
        bases: ops.PackedBases,
        of: ops.PackedFormat,
        pages: int,
        shared: torch.Tensor | None,
        *,
        refines: bool = False,
        positions: PositionRange | None = None,
    ) -> None:
        self.bases, self.format, self.pages = bases, of, pages
        self._given, self._positions = shared, positions
        self.first_own = shared_bases(refines=refines)
        # What `bases.of` says, wherever that lies.
        self._of = np.zeros(len(bases.of), np.int32)
        # The basis that is known to every pool of the format, if there is one.
        self._known_to_all = None if needs_steps(of) else UNROTATED
        self.begin_anew()

    def begin_anew(self) -> None:
        """Has no block be packed in any of them, whatever lies in their memory now.

        The shared one is the given one, or those are made of what is packed from now on.
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
        self._found: FoundBasis | None = None
        if self._given is None:
            self._found = FoundBasis(self.format, self.pages, self._positions)
            return
        self.write(SHARED, self._given)
        self.shared = SHARED

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
        """Whether a shared basis is still to be made of what is packed."""
        return self._found is not None and self._found.wants_moments

    def wanted(self, places: Rows) -> npt.NDArray[np.bool_]:
        """As `FoundBasis.wanted`: what is to be added before it is packed."""
        if self._found is None:
            return np.zeros(len(places), np.bool_)
        return self._found.wanted(places)

    def add(self, cache: torch.Tensor, packs: Int32, places: Rows, left_out: int = 0) -> None:
        """Takes note of exact pages on the host that are to be packed, until they are enough.

        `places` [N]: which pages of their texts they are. So many tokens at the beginning of the
        first pack count for nothing. Where a basis is made of them they are packed in it already.
        """
        assert self._found is not None
        made = self._found.add(cache, packs, places, left_out)
        self.shared = self._found.number
        if made is not None:
            self.write(self.shared, made)

    def wants_queries(self, places: Rows) -> bool:
        """As `FoundBasis.wants_queries`."""
        return self._found is not None and self._found.wants_queries(places)

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Takes note of queries, as `Moments.add_queries`, before what they read is packed."""
        assert self._found is not None
        self._found.add_queries(q, first, kv_heads)

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
        return int((numbers >= self.first_own).sum()) * self.basis_bytes

    @property
    def most_own(self) -> int:
        """How many bases may belong to a document each."""
        return len(self.bases.data) - self.first_own

    def held(self) -> int:
        """How many bases belong to a document."""
        return int((np.unique(self._of) >= self.first_own).sum())

    def free(self) -> int | None:
        """A basis that no block is packed in; None where all are taken."""
        left = self._free()
        return int(left[0]) if len(left) else None

    def _free(self) -> npt.NDArray[np.int64]:
        """The bases that no block is packed in."""
        own = np.arange(self.first_own, len(self.bases.data))
        return np.setdiff1d(own, np.unique(self._of))

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
        begun = self._found is not None and self._found.begun
        if self.shared == UNROTATED and self._known_to_all is None and not begun:
            # What is there are no steps of any tokens.
            return self.of_blocks(blocks), None
        return BlockBases(bases.which[:-1], bases.bases), named

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
                    raise PoolFull(
                        f"bases: expected room for one more, got {self.most_own} that are used"
                    )
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
            raise PoolFull(f"bases: expected room for {needed} more of {self.most_own}, got {free}")

    def _find(self, digest: bytes) -> int | None:
        """A basis of the pool that is the same, number for number; None where there is none."""
        shared = range(SHARED, self.shared + 1)
        there = dict.fromkeys((*shared, *np.unique(self._of).tolist()))
        return next((n for n in there if n and self._known_as(n)[0] == digest), None)


def _digest(basis: torch.Tensor) -> bytes:
    return sha256(basis.contiguous().numpy().tobytes()).digest()
