"""`kvweave capacity`: KV bytes of a model at a length, and how many requests fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.capacity_plan import Capacity, capacity_of, parse_bytes, read_head_map, shape_of
from kvweave.cli.console import out, user_errors, write_json


@user_errors
def capacity(
    model: Annotated[str, typer.Argument(help="A preset name, or a config.json (or its folder).")],
    length: Annotated[int, typer.Option(min=1, help="Tokens a request holds.")] = 4096,
    memory: Annotated[str, typer.Option(help="Memory for KV, such as 24GiB or 80GB.")] = "24GiB",
    page_tokens: Annotated[int, typer.Option(min=8, max=64)] = 16,
    dtype: Annotated[str | None, typer.Option(help="f32, bf16 or f16; default: model's.")] = None,
    heads: Annotated[Path | None, typer.Option(help="A head class map (JSON).")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Say what a model's KV costs: bytes a token, blocks a request, requests in memory."""
    from rich.table import Table

    shape = shape_of(model, dtype)
    head_map = read_head_map(heads, shape) if heads is not None else None
    found = capacity_of(shape, length, page_tokens, parse_bytes(memory), head_map)
    table = Table(show_header=False, title=f"{model} at {length:,} tokens, {shape.dtype}")
    for name, value in _lines(found):
        table.add_row(name, value)
    out().print(table)
    for group in found.groups if len(found.groups) > 1 else ():
        out().print(
            f"group {group.name}: {group.pairs} (layer, KV head) pairs, "
            f"{group.blocks:,} blocks of {_size(group.block_bytes)} a request",
            highlight=False,
        )
    if json is not None:
        write_json(json, {"model": model, **found.to_dict()})


def _lines(found: Capacity) -> list[tuple[str, str]]:
    shape = found.shape
    lines = [
        ("shape", f"{shape.layers} layers × {shape.kv_heads} KV heads × {shape.head_dim} dims"),
        ("KV a token", _size(found.token_bytes)),
        ("page", f"{found.page_tokens} tokens of one head: {_size(found.page_bytes)}"),
        ("KV a request", f"{_size(found.request_bytes)} in {found.request_blocks:,} blocks"),
        ("KV memory", _size(found.memory_bytes)),
        ("requests that fit", f"{found.requests:,}"),
        ("tokens that fit", f"{found.requests * found.length:,}"),
    ]
    if len(found.groups) > 1:
        lines.insert(4, ("without the head map", _size(found.dense_request_bytes)))
    if shape.context is not None and found.length > shape.context:
        lines.append(("note", f"longer than the model's context of {shape.context:,} tokens"))
    return lines


def _size(count: int) -> str:
    """Bytes in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"
