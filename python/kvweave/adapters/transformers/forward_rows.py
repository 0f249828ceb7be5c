"""What a caller of the model's forward hands over: for each row of a batch its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import InvalidArgument, Unsupported

Int32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ForwardRows:
    """The B rows of one forward of R columns.

    `tokens`: the new ones of each row, i32 [at most R], without the padding on their left.
    `first`: the position of the first of them, or None where the caller named no positions.
    `before`: of how many earlier tokens each row's mask tells, None without such a mask. `wanted`:
    of how many of the last columns the logits are wanted, up to R.
    """

    tokens: list[Int32]
    first: list[int] | None
    before: list[int] | None
    columns: int
    wanted: int

    @staticmethod
    def of(given: dict[str, Any]) -> ForwardRows:
        """Reads the arguments of a forward.

        # Errors
        `InvalidArgument` for ids, masks or positions that are no [B, R] tables, padding that is
        not on the left, a row without tokens, positions that do not follow one another;
        `Unsupported` for embeddings in place of ids, and for attention weights.
        """
        ids = given.get("input_ids")
        if ids is None or given.get("inputs_embeds") is not None:
            raise Unsupported(
                "inputs: expected input_ids, by which cached text is found, got inputs_embeds"
            )
        if given.get("output_attentions"):
            raise Unsupported(
                "output_attentions: expected False, for pages are read without making a matrix of "
                "weights, got True"
            )
        table = _table("input_ids", ids)
        rows, columns = table.shape
        real, before = _real(given.get("attention_mask"), rows, columns)
        tokens = [np.ascontiguousarray(row[kept]) for row, kept in zip(table, real, strict=True)]
        first = _first(given.get("position_ids"), real)
        return ForwardRows(tokens, first, before, columns, _wanted(given, columns))

    def begins(self, lengths: Sequence[int]) -> bool:
        """Whether the rows begin prompts; else they go on from live rows of these lengths.

        Without positions they go on where as many rows are live, as transformers' caches do.

        # Errors
        `InvalidArgument` for positions or a mask that fit neither.
        """
        count = len(self.tokens)
        if self.first is None:
            begins = len(lengths) != count
        else:
            begins = not any(self.first)
            if not begins and self.first != list(lengths):
                raise InvalidArgument(
                    "position_ids: expected prompts from position 0 on, or rows that go on from "
                    f"{list(lengths)}, got rows that begin at {self.first}"
                )
        known = [0] * count if begins else list(lengths)
        if self.before is not None and self.before != known:
            raise InvalidArgument(
                f"attention_mask: expected it to keep the {known} tokens before these rows, "
                f"got {self.before}"
            )
        return begins


def _table(what: str, given: Any) -> Int32:
    if not isinstance(given, torch.Tensor) or given.ndim != 2 or given.numel() == 0:
        got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidArgument(f"{what}: expected a tensor [B, R] that holds something, got {got}")
    if given.is_floating_point() or given.is_complex():
        raise InvalidArgument(f"{what}: expected whole numbers, got {given.dtype}")
    numbers: npt.NDArray[np.int64] = given.detach().cpu().long().numpy()
    if np.abs(numbers).max() >= 2**31:
        raise InvalidArgument(f"{what}: expected numbers of 32 bits, got {np.abs(numbers).max()}")
    return numbers.astype(np.int32)


def _real(mask: Any, rows: int, columns: int) -> tuple[list[Bools], list[int] | None]:
    """Which columns of each row are tokens, and how many earlier tokens the mask keeps."""
    if mask is None:
        return [np.ones(columns, bool)] * rows, None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        got = f"{mask.ndim}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidArgument(f"attention_mask: expected a tensor [B, T] of 0 and 1, got {got}")
    if mask.shape[0] != rows or mask.shape[1] < columns:
        raise InvalidArgument(
            f"attention_mask: expected [{rows}, {columns} or more], got {list(mask.shape)}"
        )
    kept = mask.detach().cpu().numpy() != 0
    new, old = kept[:, kept.shape[1] - columns :], kept[:, : kept.shape[1] - columns]
    for number, row in enumerate(new):
        if not row[-1] or (np.diff(row.astype(np.int8)) < 0).any():
            got = "none" if not row.any() else "padding behind tokens"
            raise InvalidArgument(
                "attention_mask: expected every row to have tokens, and its padding on their left "
                f'(padding_side="left"), got {got} in row {number}'
            )
    return list(new), [int(count) for count in old.sum(1)]


def _first(positions: Any, real: list[Bools]) -> list[int] | None:
    if positions is None:
        return None
    table = _table("position_ids", positions)
    if table.shape[0] not in (1, len(real)) or table.shape[1] != len(real[0]):
        raise InvalidArgument(
            f"position_ids: expected [{len(real)}, {len(real[0])}], got {list(table.shape)}"
        )
    table = np.broadcast_to(table, (len(real), table.shape[1]))
    first = []
    for number, (row, kept) in enumerate(zip(table, real, strict=True)):
        places = row[kept]
        if places[0] < 0 or (np.diff(places) != 1).any():
            raise InvalidArgument(
                f"position_ids: expected one after the other, got others in row {number}"
            )
        first.append(int(places[0]))
    return first


def _wanted(given: dict[str, Any], columns: int) -> int:
    kept = given.get("logits_to_keep")
    whole = given.get("labels") is not None or bool(given.get("output_hidden_states"))
    if whole or isinstance(kept, torch.Tensor) or not kept:
        return columns
    return min(int(kept), columns)
