"""`Packing`: in which format a runner packs full pages, and in which bases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from kvweave import ops
from kvweave.arguments import flag, shown, whole
from kvweave.errors import InvalidArgument
from kvweave.ops.packed_kv import Preset

FORMATS: tuple[str, ...] = get_args(Preset)
"""Names of the formats that full pages are packed in."""


@dataclass(frozen=True)
class Packing:
    """What a runner makes of full pages, given as its `kv_dtype`; a name alone has the defaults.

    `format`: a name of `ops.packed_format`. The others say something of formats in a basis.
    `basis` f32 [pages, 2, rows, D], as `ops.Moments.basis` makes it of all layers and KV heads: in
    which everything is packed that has no basis of its own. None has it made of the first tokens
    that the runner packs, whoever's they are; until there are enough of them nothing is rotated.
    `copy_bytes`: so much of the host's memory for exact copies of documents, from which they are
    packed once more in a basis of their own, behind whoever inserted them (MosaicKV, section 5.4).
    `beside`: whether each layer of a prompt is packed while the layers behind it are computed
    (section 5.2), which changes no byte; False packs what rows fill once all layers have them.
    """

    format: str
    basis: torch.Tensor | None = None
    copy_bytes: int = 1 << 33
    beside: bool = True

    def __post_init__(self) -> None:
        given: Any = self.format
        if not isinstance(given, str) or given not in FORMATS:
            raise InvalidArgument(
                f"kv_dtype: expected None or one of {', '.join(FORMATS)}, got {shown(given)}"
            )
        if self.basis is not None and not isinstance(self.basis, torch.Tensor):
            raise InvalidArgument(f"basis: expected a tensor or None, got {shown(self.basis)}")
        whole("copy_bytes", self.copy_bytes, 0)
        flag("beside", self.beside)

    @staticmethod
    def of(kv_dtype: object) -> Packing | None:
        """What a runner was asked for.

        # Errors
        `InvalidArgument` for what is neither None, a name nor a `Packing`.
        """
        if kv_dtype is None or isinstance(kv_dtype, Packing):
            return kv_dtype
        given: Any = kv_dtype
        return Packing(given)

    def pages(self, head_dim: int, page_tokens: int, scales: str) -> ops.PackedFormat:
        """The format of a model's pages.

        # Errors
        `InvalidArgument` for a head dim that it has not.
        """
        name: Any = self.format
        return ops.packed_format(name, head_dim, page_tokens, scales)
