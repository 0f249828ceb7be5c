"""One layer of a `PressedCache`, as presses of kvpress see it: its keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvweave.adapters.kvpress.head_pages import HeadPages
from kvweave.adapters.transformers.paged_step import Attends
from kvweave.adapters.transformers.ranked_rows import PageRead
from kvweave.errors import InvalidArgument, Unsupported

READS = "kvweave_page_reads"
"""Where a press leaves, on its attention module, what heads read in a decode step: `PageRead` by
their numbers. Whoever moves the layer into pages puts an empty dict there before."""


def ask_reads(modules: Iterable[torch.nn.Module]) -> None:
    """Says that presses may name what heads of these attention modules read."""
    for module in modules:
        setattr(module, READS, {})


def forget_reads(modules: Iterable[torch.nn.Module]) -> None:
    """Says that nobody would read what presses name any more."""
    for module in modules:
        if hasattr(module, READS):
            delattr(module, READS)


@dataclass(frozen=True)
class KeptTokens:
    """What stands for the keys or values of a layer once they lie in pages.

    Heads may have kept unlike tokens, so there is no tensor of them: all that it does is to be cut
    to its first tokens, `kept[:, :, :length]`, as kvpress' pipeline does behind an answer.
    """

    length: int

    def __getitem__(self, index: Any) -> KeptTokens:
        whole = slice(None)
        if isinstance(index, tuple) and len(index) == 3 and index[:2] == (whole, whole):
            last = index[2]
            if isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1):
                stop = self.length if last.stop is None else int(last.stop)
                return KeptTokens(min(stop, self.length))
        raise Unsupported(
            f"kept tokens: expected a cut [:, :, :length], got {index}; a press reads keys and "
            "values while the context is prefilled"
        )


def expect_plain(how: Attends) -> None:
    """Refuses attention with a window, a soft cap or sinks: `Unsupported`."""
    if how.window is not None or how.softcap is not None or how.sinks is not None:
        raise Unsupported("attention: expected no window, soft cap or sinks, got one of them")


class PressedLayer(CacheLayerMixin):
    """Keys and values [1, G, T, D] of a context, which a press replaces; then pages of them.

    `settle` moves them: until the next layer begins they are tensors, as the press wants them.
    """

    is_initialized = True
    is_sliding = False
    is_compileable = False

    def __init__(self, pages: HeadPages) -> None:
        self.pages = pages
        self._whole: list[torch.Tensor | None] = [None, None]
        self._is_settled = False

    @property
    def is_open(self) -> bool:
        """Whether keys and values are tensors now."""
        return self._whole[0] is not None

    @property
    def keys(self) -> Any:
        """Keys [1, G, T, D], or what stands for them."""
        return self._shown(0)

    @keys.setter
    def keys(self, given: Any) -> None:
        self._replace(0, given)

    @property
    def values(self) -> Any:
        """Values [1, G, T, D], or what stands for them."""
        return self._shown(1)

    @values.setter
    def values(self, given: Any) -> None:
        self._replace(1, given)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a context's keys and values; those of an answer go to pages when it attends.

        Returns them as they are: whoever attends over pages needs no others.
        """
        if keys.shape[0] != 1:
            raise Unsupported(f"batch: expected one row, got {keys.shape[0]}")
        if not self._is_settled:
            self._whole = [keys, values]
        return keys, values

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: pages are there when tokens are kept."""

    def get_max_length(self) -> int:
        """−1: a head may be as long as there is room."""
        return -1

    get_max_cache_shape = get_max_length
    """Its name before transformers 5.24."""

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Those of the new rows alone, of which there are so many, or which have these places."""
        return (query if isinstance(query, int) else len(query)), 0

    def settle(
        self,
        dropped: tuple[torch.Tensor, ...] | None,
        reads: Mapping[int, PageRead] | None = None,
    ) -> None:
        """Writes what is kept into pages, and lets go of the tensors.

        `dropped`: rows, heads and tokens that a press masks (AdaKV, DuoAttention) are not kept.
        `reads`: of some heads, by their numbers, what they read in a decode step.

        # Errors
        `InvalidArgument` for a head that would keep nothing, `PoolFull`; the tensors stay then.
        """
        keys, values = self._whole
        if keys is None or values is None:
            return
        if keys.shape != values.shape:
            raise InvalidArgument(
                f"press: expected keys and values of one shape, got {list(keys.shape)} and "
                f"{list(values.shape)}"
            )
        kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
        if dropped is not None:
            kept[tuple(index.to(keys.device) for index in dropped)] = False
        counts = kept[0].sum(-1).tolist()
        if not all(counts):
            raise InvalidArgument("press: expected a token of every head to be kept, got none")
        each = ([x[0, head][kept[0, head]] for head in range(len(counts))] for x in (keys, values))
        keys_of, values_of = each
        self.pages.keep(keys_of, values_of, reads)
        self._whole, self._is_settled = [None, None], True

    def get_seq_length(self) -> int:
        """Tokens of the head that has most."""
        whole = self._whole[0]
        return whole.shape[2] if whole is not None else max(self.pages.lengths, default=0)

    def reorder_cache(self, *args: Any) -> None:
        """For beams, which are several rows: `Unsupported`."""
        raise Unsupported("rows: expected one row that goes on, got beams")

    def batch_repeat_interleave(self, *args: Any) -> None:
        """For several rows of one text: `Unsupported`."""
        raise Unsupported("rows: expected one row that goes on, got several")

    def batch_select_indices(self, *args: Any) -> None:
        """For some of several rows: `Unsupported`."""
        raise Unsupported("rows: expected one row that goes on, got a choice of them")

    def reset(self) -> None:
        """Gives everything back."""
        self.release()

    def release(self) -> None:
        """Gives everything back."""
        self.pages.release()
        self._whole, self._is_settled = [None, None], False

    def _shown(self, which: int) -> Any:
        if self._is_settled:
            return KeptTokens(self.get_seq_length())
        return self._whole[which]

    def _replace(self, which: int, given: Any) -> None:
        if isinstance(given, KeptTokens):
            self.pages.back_to(given.length)
        elif isinstance(given, torch.Tensor) and self.is_open:
            self._whole[which] = given
        else:
            raise Unsupported(
                "press: expected one that replaces keys and values while the context is prefilled, "
                f"got a {type(given).__name__} {'then' if self.is_open else 'later'}"
            )
