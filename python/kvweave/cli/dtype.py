"""`--dtype`: in what a command has a model computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

Dtype = Annotated[
    str | None,
    typer.Option(help="f32, bf16 or f16; else a folder's own, or f32 on a CPU, bf16 on a GPU."),
]


def read_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by its short name, None for none; raises InvalidArgument for another name."""
    import torch

    known = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if name is not None and name not in known:
        raise InvalidArgument(f"dtype: expected one of {', '.join(known)}, got {name!r}")
    return None if name is None else known[name]
