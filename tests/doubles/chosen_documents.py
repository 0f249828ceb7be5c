"""Documents in packed pages of which steps read what heads choose, in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from document_decoding import DocumentDecoding
from kvweave.runner import Runner
from kvweave.runner.decode.decoding import Decoding
from packed_decoding import RECENT, SINK


class ReadingChosen(DocumentDecoding):
    """`DocumentDecoding` whose steps leave out what heads have not chosen, as `left` is told."""

    left: Any = None
    """bool [L, G, T]."""

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        if self.left is None:
            return super()._attend(module, query, key, value, mask, **named)
        layer, rows = self.layers[module.layer_idx], torch.from_numpy(self._rows)
        layer[0][:, rows], layer[1][:, rows] = key[0].double(), value[0].double()
        keys, values = self._read(module.layer_idx, layer)
        hidden = torch.from_numpy(self.left[module.layer_idx])
        group = query.shape[1] // keys.shape[0]
        keys, values, hidden = (x.repeat_interleave(group, 0) for x in (keys, values, hidden))
        logits = query[0].double() @ keys.transpose(1, 2) * named["scaling"]
        out = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ values
        return out[None].to(query.dtype).transpose(1, 2).contiguous(), None


def left_out(runner: Runner, sequence: Decoding) -> Any:
    """What the newest step's heads left out of all tokens, bool [L, G, T]."""
    slots = next(s for s in runner._decoder._slots if sequence in s.members)
    choice, pool, total = slots.packed._choice, runner.packed, sequence.request.length
    entries = sequence.packed.entries()
    layers, heads = pool.heads.budget_of.shape
    left = np.zeros((layers, heads, total), bool)
    row = choice._rows[sequence]
    for layer in range(layers):
        for head in range(heads):
            window, sink = pool.heads.sights[layer, head].tolist()
            if window:
                left[layer, head, sink : total - window] = True
            if pool.heads.budget_of[layer, head] < 0:
                continue
            count = int(choice.selected[row, layer, head])
            chosen = choice.chosen[row, layer, head, :count].tolist()
            for at, (_, begin, end, position, _) in enumerate(entries.tolist()):
                span = slice(max(position, SINK), min(position + end - begin, total - RECENT))
                left[layer, head, span] |= at not in chosen
    return left
