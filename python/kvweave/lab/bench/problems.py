"""A case's data on a device, and the check that an answer must pass before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from kvweave import ops
from kvweave.lab.bench.pages import PAGE, shuffled_blocks
from kvweave.lab.bench.pool import Pool, Rows, pool
from kvweave.lab.bench.rows import expect
from kvweave.lab.bench.shapes import (
    SINK,
    WINDOW,
    Copy,
    Decode,
    Merge,
    Prefill,
    Rotate,
    Score,
    Work,
    Write,
)

TOLERANCE = 0.02
"""‖answer − f32‖ / ‖f32‖ of one row and head; bf16 operands leave a few thousandths."""
CHECKED_ROWS = 12


@dataclass(frozen=True)
class Attention:
    """q [R, H, D] at positions i32 [R] over a pool; row r is request r's, or the only request's."""

    work: Decode | Prefill
    pool: Pool
    q: torch.Tensor
    positions: Rows

    @property
    def over_fp8(self) -> bool:
        """Whether keys and values are stored in 8 bits."""
        return self.pool.pages.dtype == torch.float8_e4m3fn

    @property
    def widened(self) -> Attention:
        """The same over pages in bf16."""
        return replace(self, pool=self.pool.widened)

    def poison(self) -> None:
        """Nothing: an answer is a tensor of its own."""

    def check(self, out: torch.Tensor) -> None:
        """A sample of rows, first and last among them, against attention in f32."""
        rows = len(self.positions)
        for row in np.unique(np.linspace(0, rows - 1, CHECKED_ROWS).astype(int)).tolist():
            wanted = self._row(row)
            differs(f"row {row}", out[row], wanted)

    def _row(self, row: int) -> torch.Tensor:
        s = self.pool.shape
        request = row if self.pool.batch > 1 else 0
        q = self.q[row].float().view(s.kv_heads, -1, s.head_dim)
        out = []
        for head in range(s.kv_heads):
            k, v, positions = self.pool.keys(request, head)
            scores = q[head] @ k.T * s.head_dim**-0.5
            last, window = int(self.positions[row]), self.pool.group(head).window
            hidden = positions > last
            if window:
                hidden |= (positions <= last - window) & (positions >= SINK)
            out.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
        return torch.cat(out)


@dataclass(frozen=True)
class Layers:
    """The same step in every layer of a pool: an answer is one tensor a layer."""

    work: Decode
    each: tuple[Attention, ...]

    def poison(self) -> None:
        """Nothing: answers are tensors of their own."""

    def check(self, outs: Sequence[torch.Tensor]) -> None:
        """Every layer."""
        expect(len(outs) == len(self.each), f"expected {len(self.each)} layers, got {len(outs)}")
        for layer, out in zip(self.each, outs, strict=True):
            layer.check(out)


@dataclass(frozen=True)
class Scores:
    """Probing rows q [R, H, D] at the end of one request."""

    work: Score
    pool: Pool
    q: torch.Tensor
    positions: Rows

    def poison(self) -> None:
        """Nothing: an answer is a tensor of its own."""

    def check(self, mass: torch.Tensor) -> None:
        """All keys against the softmax written out, f32; each row gives 1 for each query head."""
        s = self.pool.shape
        wanted = torch.zeros(self.pool.tokens, device=self.pool.device)
        rows = self.pool.put(self.positions)
        for head in range(s.kv_heads):
            k, _, positions = self.pool.keys(0, head)
            hidden = positions[None] > rows[:, None]
            for q in self.q.float().view(len(rows), s.kv_heads, -1, s.head_dim)[:, head].unbind(1):
                scores = (q @ k.T * s.head_dim**-0.5).masked_fill(hidden, -torch.inf)
                wanted += scores.softmax(-1).sum(0)
        differs("mass", mass.to(wanted.device), wanted)


@dataclass(frozen=True)
class Copies:
    """Copies i32 [C, 6] of whole blocks from one half of an arena to the other."""

    work: Copy
    pages: torch.Tensor
    copies: torch.Tensor
    rope: ops.RopeTable
    layers: torch.Tensor | None

    def poison(self) -> None:
        """The half that is copied to holds no numbers."""
        self.pages[(self.work.blocks + 1) * self.work.shape.block_pages :] = torch.nan

    def check(self, pages: torch.Tensor) -> None:
        """V of all blocks bit for bit, two blocks' K within one ulp of the definition's."""
        size, kv_heads = self.work.shape.block_pages, self.work.shape.kv_heads
        each = torch.arange(size, device=pages.device)
        source, target = (self.copies[:, at, None].long() + each for at in (0, 2))
        expect(torch.equal(pages[target, 1], pages[source, 1]), "V is not copied as it is")
        expect(bool(pages[target, 0].isfinite().all()), "K was not written everywhere")
        ulp = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[self.work.dtype]
        for row in self.copies[:: max(1, len(self.copies) - 1)].tolist():
            small = torch.zeros(3 * size, *pages.shape[1:], dtype=pages.dtype)
            small[size : 2 * size] = pages[row[0] : row[0] + size].cpu()
            table = np.array([[size, 0, 2 * size, 0, PAGE, self.work.delta]], np.int32)
            ops.copy_rerotate(small, table, self.rope, kv_heads=kv_heads, backend="reference")
            got = pages[row[2] : row[2] + size, 0].cpu().double()
            wanted = small[2 * size :, 0].double()
            apart = (got - wanted).abs() / wanted.abs().amax(-1, keepdim=True)
            worst = float(apart.max())
            expect(worst <= ulp, f"expected K within {ulp}, got {worst}")


@dataclass(frozen=True)
class Writes:
    """k, v [R, G, D] for slots i32 [R, 2], or with a reach [2, R, 2], of zeroed pages."""

    work: Write
    pages: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    reach: ops.Reach | None

    def poison(self) -> None:
        """Pages as they were."""
        self.pages.zero_()

    def check(self, pages: torch.Tensor) -> None:
        """Every element of every page: what was written, and zero elsewhere."""
        wanted = torch.zeros_like(pages)
        for source, page, slot in self.targets():
            wanted[page, 0, slot] = self.k[source]
            wanted[page, 1, slot] = self.v[source]
        expect(torch.equal(pages, wanted), "pages differ from an indexed assignment")

    def targets(self) -> list[Target]:
        """By table: rows and heads of k, and their pages [r, g] and slots [r, 1] in torch's way."""
        work, device = self.work, self.pages.device
        full = work.shape.kv_heads - work.local
        tables = self.slots.view(-1, work.rows, 2)
        parts: list[tuple[Any, torch.Tensor, slice, int]] = [
            (slice(None), tables[0], slice(full), full)
        ]
        if work.local:
            kept = torch.from_numpy(work.kept()).to(device)
            parts.append((kept, tables[1, kept], slice(full, None), work.local))
        return [
            (
                (rows, heads),
                slots[:, :1].long() + torch.arange(count, device=device),
                slots[:, 1:].long(),
            )
            for rows, slots, heads, count in parts
        ]


@dataclass(frozen=True)
class Rotations:
    """Rows [R, H + G, D], queries then keys, rotated in place by cos and sin [R, D].

    `given` are the rows as they were; every call turns them once more.
    """

    work: Rotate
    rows: torch.Tensor
    given: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def poison(self) -> None:
        """Rows as they were."""
        self.rows.copy_(self.given)

    def parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [R, H, D] and keys [R, G, D], views."""
        heads = self.work.shape.heads
        return rows[:, :heads], rows[:, heads:]

    def check(self, out: torch.Tensor) -> None:
        """All rows, turned once, against f32."""
        x, half = self.given.float(), self.work.shape.head_dim // 2
        partner = torch.cat((-x[..., half:], x[..., :half]), -1)
        turned = x * self.cos[:, None].float() + partner * self.sin[:, None].float()
        differs("rows", out, turned)


@dataclass(frozen=True)
class Merges:
    """Partial results outs [S, R, H, D] with lses f32 [S, R, H]."""

    work: Merge
    outs: torch.Tensor
    lses: torch.Tensor

    def poison(self) -> None:
        """Nothing: an answer is a tensor of its own."""

    def check(self, out: torch.Tensor) -> None:
        """All rows against weights from the log-sum-exps, f32."""
        weights = self.lses.softmax(0)[..., None]
        differs("rows", out, (self.outs.float() * weights).sum(0))


Target: TypeAlias = tuple[tuple[Any, slice], torch.Tensor, torch.Tensor]
Problem: TypeAlias = Attention | Layers | Scores | Copies | Writes | Rotations | Merges


def differs(what: str, got: torch.Tensor, wanted: torch.Tensor, limit: float = TOLERANCE) -> None:
    """Raises `WrongAnswer` where a vector along the last axis is off by more than the limit.

    NaN never passes.
    """
    expect(got.shape == wanted.shape, f"expected {tuple(wanted.shape)}, got {tuple(got.shape)}")
    apart = (got.float() - wanted.float()).norm(dim=-1)
    worst = float((apart / wanted.float().norm(dim=-1).clamp(min=1e-20)).max())
    expect(worst <= limit, f"{what}: expected a relative error <= {limit:g}, got {worst:.3g}")


def problem(work: Work, device: torch.device) -> Problem:
    """Fresh random data for a case."""
    torch.manual_seed(0)
    match work:
        case Decode():
            return _decode(work, device)
        case Prefill():
            return _prefill(work, device)
        case Score():
            data = pool(work.shape, 1, work.tokens, full_heads=work.shape.kv_heads, device=device)
            positions = np.arange(work.tokens - work.rows, work.tokens, dtype=np.int32)
            return Scores(work, data, _queries(data, work.rows), positions)
        case Copy():
            return _copies(work, device)
        case Write():
            return _writes(work, device)
        case Rotate():
            return _rotations(work, device)
        case Merge():
            s = work.shape
            size = (work.parts, work.rows, s.heads, s.head_dim)
            outs = torch.randn(size, device=device).bfloat16()
            return Merges(work, outs, torch.randn(size[:3], device=device))


def _decode(work: Decode, device: torch.device) -> Attention | Layers:
    dtype = torch.float8_e4m3fn if work.fp8 else torch.bfloat16
    heads = work.full_heads
    data = pool(work.shape, work.batch, work.tokens, full_heads=heads, device=device, dtype=dtype)
    positions = np.full(work.batch, work.tokens - 1, np.int32)
    each = tuple(
        Attention(work, data.layer(layer), _queries(data, work.batch), positions)
        for layer in range(work.shape.layers)
    )
    return Layers(work, each) if len(each) > 1 else each[0]


def _prefill(work: Prefill, device: torch.device) -> Attention:
    heads, positions = work.full_heads, work.positions()
    data = pool(work.shape, 1, work.tokens, full_heads=heads, device=device, rows_anywhere=True)
    return Attention(work, data, _queries(data, len(positions)), positions)


def _queries(data: Pool, rows: int) -> torch.Tensor:
    s = data.shape
    return torch.randn(rows, s.heads, s.head_dim, device=data.device).bfloat16()


def _copies(work: Copy, device: torch.device) -> Copies:
    s, count = work.shape, work.blocks
    source = shuffled_blocks(s, count, seed=1)
    target = shuffled_blocks(s, count, seed=2) + count * s.block_pages
    zero = np.zeros(count)
    columns = (source, zero, target, zero, zero + PAGE, zero + work.delta)
    copies = torch.from_numpy(np.stack(columns, 1).astype(np.int32)).to(device)
    size = ((2 * count + 1) * s.block_pages, 2, PAGE, s.head_dim)
    pages = torch.empty(size, dtype=getattr(torch, work.dtype), device=device).normal_()
    of_pages = np.repeat(np.arange(s.layers, dtype=np.int32), s.kv_heads)
    layers = torch.from_numpy(of_pages).to(device) if work.grouped else None
    return Copies(work, pages, copies, ops.RopeTable(s.rope().inv_freq, work.pairing), layers)


def _rotations(work: Rotate, device: torch.device) -> Rotations:
    s = work.shape
    given = torch.randn(work.rows, s.heads + s.kv_heads, s.head_dim, device=device).bfloat16()
    inv_freq = torch.from_numpy(s.rope().inv_freq[0]).to(device)
    angles = (torch.arange(work.rows, device=device)[:, None] * inv_freq).repeat(1, 2)
    return Rotations(work, given.clone(), given, angles.cos().bfloat16(), angles.sin().bfloat16())


def _writes(work: Write, device: torch.device) -> Writes:
    s = work.shape
    count = 2 * -(-work.rows // PAGE)
    size = ((count + 1) * s.kv_heads, 2, PAGE, s.head_dim)
    pages = torch.zeros(size, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, work.rows, s.kv_heads, s.head_dim, device=device).bfloat16()
    chosen = np.random.default_rng(3).permutation(count * PAGE)[: work.rows]
    block, slot = chosen // PAGE + 1, chosen % PAGE
    if not work.local:
        slots = np.stack((block * s.kv_heads, slot), 1).astype(np.int32)
        return Writes(work, pages, k, v, torch.from_numpy(slots).to(device), None)
    # The full heads' blocks first, then the local ones'.
    full = s.kv_heads - work.local
    own = np.stack((np.stack((block * full, slot), 1), np.full((work.rows, 2), -1)))
    kept = work.kept()
    first = (count + 1) * full
    own[1, kept] = np.stack((first + block[kept] * work.local - work.local, slot[kept]), 1)
    heads = [(0, rank, 0, 0) for rank in range(full)]
    heads += [(1, rank, WINDOW, SINK) for rank in range(work.local)]
    reach = ops.Reach(2, np.array(heads, np.int32))
    return Writes(work, pages, k, v, torch.from_numpy(own.astype(np.int32)).to(device), reach)
