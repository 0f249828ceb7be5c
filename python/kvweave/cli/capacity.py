"""`kvweave capacity`: how many sessions fit a model's KV memory, and what each of them costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvweave.cli.capacity_count import Sessions, count_sessions
from kvweave.cli.capacity_plan import Capacity, capacity_of, parse_bytes, read_head_map, shape_of
from kvweave.cli.console import out, user_errors, write_json


@dataclass(frozen=True)
class _Found:
    """One length: what was counted without and with the head map, and what was reckoned."""

    dense: Sessions
    mapped: Sessions | None
    reckoned: Capacity

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return {
            "length": self.reckoned.length,
            "counted": {
                "dense": asdict(self.dense),
                "mapped": None if self.mapped is None else asdict(self.mapped),
            },
            "reckoned": self.reckoned.to_dict(),
        }


@user_errors
def capacity(
    model: Annotated[str, typer.Argument(help="A preset name, or a config.json (or its folder).")],
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens a session holds; may be repeated.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory for KV, such as 24GiB or 80GB.")] = "24GiB",
    page_tokens: Annotated[int, typer.Option(min=8, max=64)] = 16,
    dtype: Annotated[
        str | None, typer.Option(help="f32, bf16, f16, fp8_e4m3; default: model's.")
    ] = None,
    heads: Annotated[Path | None, typer.Option(help="A head class map (JSON).")] = None,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens that a session with a map prefills at a time.")
    ] = 512,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Say how many sessions fit: admitted for real, in memory that is not there."""
    shape, size = shape_of(model, dtype), parse_bytes(memory)
    head_map = read_head_map(heads, shape) if heads is not None else None
    found = []
    for tokens in length or [4096]:
        dense = count_sessions(shape, tokens, page_tokens, size)
        mapped = None
        if head_map is not None:
            mapped = count_sessions(shape, tokens, page_tokens, size, head_map, chunk)
        reckoned = capacity_of(shape, tokens, page_tokens, size, head_map)
        found.append(_Found(dense, mapped, reckoned))
    _print_counted(f"{model}, {shape.dtype}, {_size(size)} for KV", found)
    _print_reckoned(found[0].reckoned, [f.reckoned for f in found])
    if json is not None:
        data = {"model": model, "memory_bytes": size, "page_tokens": page_tokens}
        write_json(json, {**data, "chunk": chunk, "lengths": [f.to_dict() for f in found]})


def _print_counted(title: str, found: list[_Found]) -> None:
    from rich.table import Table

    table = Table("tokens", "sessions", "KV of one", title=f"{title}: sessions admitted")
    with_map = found[0].mapped is not None
    for heading in ("with the map", "KV of one", "times") if with_map else ():
        table.add_column(heading)
    for column in table.columns:
        column.justify = "right"
    for one in found:
        cells = [f"{one.reckoned.length:,}", *_cells(one.dense)]
        if one.mapped is not None:
            ratio = f"{one.mapped.fit / one.dense.fit:.2f}" if one.dense.fit else "–"
            cells += [*_cells(one.mapped), ratio]
        table.add_row(*cells)
    out().print(table)


def _cells(sessions: Sessions) -> list[str]:
    return [f"{sessions.fit:,}", _size(sessions.session_bytes) if sessions.fit else "–"]


def _print_reckoned(shared: Capacity, each: list[Capacity]) -> None:
    """The arithmetic behind the table, in the model's sizes."""
    shape = shared.shape
    lines = [
        "By arithmetic, before memory is cut into slabs:",
        f"{shape.layers} layers × {shape.kv_heads} KV heads × {shape.head_dim} dims: "
        f"{_size(shared.token_bytes)} a token; a page is {shared.page_tokens} tokens of one head, "
        f"{_size(shared.page_bytes)}",
    ]
    for one in each:
        line = f"{one.length:,} tokens: {_size(one.request_bytes)} in {one.request_blocks:,} blocks"
        if len(one.groups) > 1:
            line += f", {_size(one.dense_request_bytes)} without the map"
        lines.append(f"{line}; {one.requests:,} fit")
        lines += [
            f"  group {group.name}: {group.pairs} (layer, KV head) pairs, "
            f"{group.blocks:,} blocks of {_size(group.block_bytes)}"
            for group in (one.groups if len(one.groups) > 1 else ())
        ]
        if shape.context is not None and one.length > shape.context:
            lines.append(f"  longer than the model's context of {shape.context:,} tokens")
    for line in lines:
        out().print(line, highlight=False)


def _size(count: int) -> str:
    """Bytes in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"
