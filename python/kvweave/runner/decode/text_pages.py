"""`TextPages`: where texts of a batch that are packed finally have the pages of each KV head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from kvweave.power_of_two import power_of_two
from kvweave.runner.kv.final_text import FinalText
from kvweave.runner.kv.packed_pool import PackedPool

IN_POOL = 0
"""The row of what no such text has, and its form: the pool's format. Texts are the rows from 1 on,
and the pool's final formats the forms."""

Layers = dict[int, tuple[bool, ...]]
"""By form the layers in which it is read."""


def joined(layers: Layers, others: Layers) -> Layers:
    """What is read in either."""
    none = (False,) * max(map(len, (*layers.values(), *others.values())), default=0)
    pairs = {
        form: (layers.get(form, none), others.get(form, none))
        for form in sorted(layers.keys() | others.keys())
    }
    return {form: tuple(map(any, zip(*both, strict=True))) for form, both in pairs.items()}


class TextPages:
    """Tables i64 [T, L, G] of the texts of a batch, which stay where they are while there is room.

    `forms`: in which format a layer's KV head lies; `firsts`: its page of the text's first block,
    among all pages of this format; `steps`: how many pages behind a block's the next one's is.
    """

    def __init__(self, pool: PackedPool, texts: int) -> None:
        self.shape = pool.heads.budget_of.shape
        self.formats = pool.final_formats
        self.tables = torch.zeros((3, texts, *self.shape), dtype=torch.int64, device=pool.device)
        self.forms, self.firsts, self.steps = self.tables
        self.named: dict[FinalText, int] = {}
        self._forms = np.zeros((0, *self.shape), np.int64)

    @staticmethod
    def of(pool: PackedPool, texts: Iterable[FinalText], before: TextPages | None) -> TextPages:
        """Those of these texts; where there is room `before` they lie there: that is returned."""
        listed = list(dict.fromkeys(texts))
        rows = 1 + len(listed)
        if before is None or rows > before.tables.shape[1]:
            before = TextPages(pool, power_of_two(rows))
        before._write(listed)
        return before

    def _write(self, texts: list[FinalText]) -> None:
        rows = 1 + len(texts)
        made = np.zeros((3, rows, int(np.prod(self.shape))), np.int64)
        for row, text in enumerate(texts, 1):
            for part in text.parts:
                made[0, row, part.ranks] = 1 + self.formats.index(part.format)
                made[1, row, part.ranks] = part.firsts()
                made[2, row, part.ranks] = len(part.ranks)
        shaped = made.reshape(3, rows, *self.shape)
        self.tables[:, :rows].copy_(torch.from_numpy(shaped))
        self.named = {text: row for row, text in enumerate(texts, 1)}
        self._forms = shaped[0]

    def layers(self, heads: npt.NDArray[np.bool_]) -> Layers:
        """By form the layers in which any of some heads [L, G] has it in any text."""
        forms = np.where(heads, self._forms, IN_POOL)
        some = np.unique(forms[forms != IN_POOL]).tolist()
        return {form: tuple((forms == form).any((0, 2)).tolist()) for form in some}
