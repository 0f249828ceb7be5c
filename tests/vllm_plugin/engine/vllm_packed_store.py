"""A packed store without an engine: random keys and values, and what pages of them stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers, HeadPart
from kvweave.adapters.vllm.segments.packed_store import PackedSegmentStore, page_tokens_of
from kvweave.adapters.vllm.segments.store import Geometry
from kvweave.cache import KvRequest
from kvweave.policies import Full, Naive

LAYERS, HEADS, DIM, SIZE = 2, 2, 32, 16
PAGE = 64
POOL = 300
"""Pages that an engine has for each KV head of a class."""
INV_FREQ = 1e4 ** -(np.arange(DIM // 2) / (DIM // 2))


@dataclass(frozen=True)
class Attends:
    """What a store asks of an attention layer."""

    first_head: int = 0
    num_kv_heads: int = HEADS


class Engine:
    """A store, and pages of an engine whose tokens have random keys and values.

    `sizes`: tokens of a block of each class of heads, which have as many each; all but the first
    lose what lies behind their `window`. `written` are keys and values [layers, heads, 2, D] of the
    positions that were written last.
    """

    def __init__(
        self,
        kind: Any = "int8",
        arena: int = 1 << 22,
        sizes: tuple[int, ...] = (SIZE,),
        device: str = "cpu",
        window: int | None = None,
        others: bool = True,
        seed: int = 0,
        exact_first: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        geometry = Geometry(LAYERS, HEADS, DIM, dtype, self.device, INV_FREQ)
        self.sizes, self.heads, self.window = sizes, HEADS // len(sizes), window
        page = page_tokens_of(math.lcm(*sizes))
        asked = kind, page, others, exact_first
        self.store = PackedSegmentStore(geometry, arena, 0.5, "m", *asked)
        parts = [[self._part(layer, n) for n in range(len(sizes))] for layer in range(LAYERS)]
        self.layers = AttentionLayers(parts, [None] * LAYERS)
        self.written: dict[int, torch.Tensor] = {}
        self._draws = np.random.default_rng(seed)

    def _part(self, layer: int, number: int) -> HeadPart:
        shape = POOL * self.heads, 2, self.sizes[number], DIM
        pages = torch.zeros(shape, dtype=self.dtype, device=self.device)
        attends: Any = Attends(number * self.heads, self.heads)
        return HeadPart(f"{layer}.{number}", attends, pages, self.heads, number, None)

    def blocks(self, tokens: int) -> list[torch.Tensor]:
        """Of each class, pages for a prompt, in no order."""
        found = []
        for size in self.sizes:
            count = -(-tokens // size)
            own = self._draws.permutation(np.arange(1, POOL))[:count] * self.heads
            found.append(torch.from_numpy(own.astype(np.int32)).to(self.device))
        return found

    def _places(
        self, blocks: list[torch.Tensor], positions: np.ndarray
    ) -> Iterator[tuple[HeadPart, torch.Tensor, torch.Tensor]]:
        """Of each part, in the order of layers, the pages and slots of tokens of its first head."""
        at = torch.from_numpy(np.asarray(positions, np.int64)).to(self.device)
        for part in self.layers.parts:
            size = part.page_tokens
            yield part, blocks[part.number].long()[at // size], at % size

    def write(self, blocks: list[torch.Tensor], positions: np.ndarray) -> None:
        """Random keys and values of some of a prompt's tokens, in all layers."""
        drawn = []
        for part, page, slot in self._places(blocks, positions):
            for head in range(self.heads):
                values = self._draws.normal(size=(len(page), 2, DIM)).astype(np.float32)
                drawn.append(torch.from_numpy(values))
                part.pages[page + head, :, slot] = drawn[-1].to(part.pages)
        every = torch.stack(drawn).unflatten(0, (LAYERS, HEADS))
        self.written |= dict(zip(np.asarray(positions).tolist(), every.unbind(2), strict=True))

    def read(self, blocks: list[torch.Tensor], positions: np.ndarray) -> torch.Tensor:
        """Keys and values [layers, heads, tokens, 2, D] of tokens."""
        found = [
            part.pages[page + head, :, slot]
            for part, page, slot in self._places(blocks, positions)
            for head in range(self.heads)
        ]
        return torch.stack(found).unflatten(0, (LAYERS, HEADS)).cpu()

    def let_go(self, blocks: list[torch.Tensor], end: int) -> None:
        """Blocks that windows have left behind, where `end` tokens are there, are somebody else's.

        What is left is what row `end` sees.
        """
        if self.window is None:
            return
        for part in self.layers.parts:
            gone = max(end - self.window + 1, 0) // part.page_tokens if part.number else 0
            for head in range(self.heads):
                part.pages[blocks[part.number][:gone].long() + head] = torch.nan

    def encode(
        self, tokens: list[int], namespace: str = "", seed: int = 2
    ) -> tuple[KvRequest, torch.Tensor]:
        """A document that is encoded alone, and its exact KV [layers, heads, tokens, 2, D]."""
        admitted = self.store.admit(tokens, [], namespace, Full(), discover=False)
        shape = LAYERS, HEADS, len(tokens), 2, DIM
        exact = torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype("f4"))
        with self.store.encoding(admitted) as room:
            at = torch.from_numpy(room.request.slots(np.arange(len(tokens), dtype=np.int32))).long()
            for page, values in enumerate(exact.flatten(0, 1).to(room.pages)):
                room.pages[at[:, 0] + page, :, at[:, 1]] = values
        return admitted.request, exact

    def prefill(self, tokens: list[int], chunk: int, **asked: Any) -> tuple[Any, ...]:
        """A prompt through the engine in chunks: admitted, its blocks, what was copied."""
        spans, of = asked.get("spans", []), asked.get("namespace", "")
        policy = asked.get("policy", Naive())
        admitted = self.store.admit(tokens, spans, of, policy, discover=False)
        blocks, came = self.blocks(len(tokens)), {}
        for start in range(0, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            self.let_go(blocks, start)
            self.write(blocks, np.arange(start, end))
            reused = np.flatnonzero(admitted.reused[start:end]).astype(np.int32) + start
            if len(reused):
                pairs = zip(blocks, self.sizes, strict=True)
                copies = [self.store.copies(admitted, reused, *of) for of in pairs]
                for layer, parts in enumerate(self.layers.layers):
                    for part in parts:
                        self.store.copy(copies[part.number], layer, part)
                came |= dict(zip(reused.tolist(), self.read(blocks, reused).unbind(2), strict=True))
            self.store.keep(admitted, end, self.layers, blocks)
        return admitted, blocks, came


def packed(
    values: torch.Tensor, kind: Any, size: int = PAGE, basis: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens [layers, heads, n, 2, D] of a page, packed and unpacked, by the definition.

    `basis` f32 [layers · heads, 2, rows, D] of a format that has one.
    """
    form = ops.packed_format(kind, DIM, size)
    exact = torch.zeros(2 * LAYERS * HEADS, 2, size, DIM)
    pages = values.flatten(0, 1).transpose(1, 2)
    exact[LAYERS * HEADS :, :, : values.shape[2]] = pages
    bases = None if basis is None else basis[None].contiguous()
    held = ops.PackedPages.zeros(len(exact), form, bases=bases)
    packs = np.array([[LAYERS * HEADS, values.shape[2], LAYERS * HEADS]], np.int32)
    asked: dict[str, Any] = {"pages": LAYERS * HEADS, "backend": "reference"}
    ops.pack_pages(exact, held, packs, **asked)
    found = torch.zeros_like(exact)
    ops.unpack_pages(held, found, packs, **asked)
    there = found[LAYERS * HEADS :, :, : values.shape[2]]
    return there.transpose(1, 2).unflatten(0, (LAYERS, HEADS))


def expect_top_r(exact: torch.Tensor, found: torch.Tensor, basis: torch.Tensor, kind: str) -> None:
    """That of vectors f64 [N, D] the numbers of most energy in a basis are there, and no others.

    In f64, by what a format says: of four bits within half a step, of bf16 within its rounding.
    `basis` [1 + D, D]: a mean and orthonormal directions.
    """
    mean, directions = basis[:1].double(), basis[1:].double()
    torch.testing.assert_close(
        directions @ directions.T, torch.eye(DIM).double(), atol=1e-5, rtol=0
    )
    was, now = (exact - mean) @ directions.T, (found - mean) @ directions.T
    length = was.norm(dim=1, keepdim=True)
    kept = now.abs() > 1e-4 * length
    of = ops.packed_format(kind, DIM)
    assert (kept.sum(1) == of.kept).all()
    least = was.abs().where(kept, torch.inf).amin(1)
    most = was.abs().where(~kept, torch.zeros(())).amax(1)
    assert (least >= most - 1e-4 * length[:, 0]).all()
    step = was.abs().amax(1, keepdim=True) / 7.5 * (1 + 2**-7)
    allowed = step / 2 if of.numbers == "int4" else was.abs() * 2**-8
    assert ((now - was).abs() <= allowed + 1e-4 * length)[kept].all()


def turned(values: torch.Tensor, delta: int) -> torch.Tensor:
    """Keys of [..., 2, D] moved by so many positions, in f64; values as they are."""
    angle = torch.from_numpy(delta * INV_FREQ)
    first, second = values[..., 0, :].double().chunk(2, -1)
    key = torch.cat(
        (
            first * angle.cos() - second * angle.sin(),
            first * angle.sin() + second * angle.cos(),
        ),
        -1,
    )
    return torch.stack((key, values[..., 1, :].double()), -2)
