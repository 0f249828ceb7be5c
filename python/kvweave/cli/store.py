"""`kvweave store`: what a store on disk holds, whether it is whole, and what may go."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvweave.cli.console import err, out, user_errors, write_json
from kvweave.errors import InvalidArgument, KvweaveError
from kvweave.remote import RemoteStore, StoredObject
from kvweave.store import Store, StoredShard

_FIELDS = (
    *("namespace", "model", "dtype", "regime", "heads"),
    *("layout", "layers", "kv_heads", "head_dim"),
)

app = typer.Typer(name="store", help="Look after a store of KV on disk.", no_args_is_help=True)

Root = Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")]
Described = Annotated[
    Path, typer.Argument(help="The store's folder, or a remote store's file.", metavar="STORE")
]
Remote = Annotated[
    bool, typer.Option("--remote", help="STORE is a JSON file that describes a remote store.")
]
Namespace = Annotated[str | None, typer.Option(help="Of one namespace alone.")]


@app.command("ls")
@user_errors
def ls(
    store: Described,
    namespace: Namespace = None,
    remote: Remote = False,
    json: Annotated[Path | None, typer.Option(help="Also write all that is known.")] = None,
) -> None:
    """List shards: their texts' tokens, their files' sizes, and the documents that keep them."""
    shards: Sequence[StoredShard | StoredObject]
    names: dict[str, list[str]] = {}
    if remote:
        shards = RemoteStore.from_file(store).list(namespace)
    else:
        opened = _opened(store)
        for _, name, kept in opened.documents(namespace):
            names.setdefault(kept, []).append(name)
        shards = opened.list(namespace)
    # Within 80 columns, whatever names it shows.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("shard", "namespace", "documents", "tokens", "size", "used"):
        right = column in ("tokens", "size")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for shard in shards:
        of, named = shard.provenance, ", ".join(names.get(shard.name, []))
        table.add_row(
            shard.name[:12],
            _cut(of.namespace if of else "?", 12),
            _cut(named if of else shard.error or "", 16),
            str(shard.tokens) if of else "?",
            _size(shard.file_bytes),
            _day(shard.used) if shard.used else "?",
        )
    out().print(table)
    total = sum(shard.file_bytes for shard in shards)
    out().print(f"{len(shards)} shards, {_size(total)}", style="dim")
    if json is not None:
        write_json(json, [_plain(shard, names.get(shard.name, [])) for shard in shards])


@app.command("verify")
@user_errors
def verify(store: Described, namespace: Namespace = None, remote: Remote = False) -> None:
    """Read every byte and hold it to its checksums and names. Exit code 1 where something is wrong.

    Nothing is removed: `kvweave store gc --spoiled` does that.
    """
    opened = RemoteStore.from_file(store) if remote else _opened(store)
    wrong = _wrong(opened, namespace)
    if isinstance(opened, Store):
        wrong.update(opened.verify_documents())
    for name, why in wrong.items():
        out().print(Text(f"{name[:12]}  {why}"))
    count = len(opened.list(namespace))
    out().print(f"{count} shards read, {len(wrong)} files are wrong")
    if wrong:
        raise typer.Exit(1)


@app.command("gc")
@user_errors
def gc(
    store: Described,
    remote: Remote = False,
    spoiled: Annotated[
        bool, typer.Option("--spoiled", help="Read every byte first, to find what is spoiled.")
    ] = False,
) -> None:
    """Remove what dead writers left, what has expired, and what is spoiled by its header."""
    if remote:
        far = RemoteStore.from_file(store)
        removed = far.collect(spoiled=tuple(_wrong(far, None)) if spoiled else ())
    else:
        opened = _opened(store)
        if spoiled:
            _wrong(opened, None)
        removed = opened.collect()
    size = _size(removed.pop("bytes"))
    out().print(", ".join(f"{count} {what}" for what, count in removed.items()) + f": {size}")


@app.command("export")
@user_errors
def export(
    store: Root,
    shard: Annotated[str, typer.Argument(help="Its name, or the beginning of it.")],
    to: Annotated[Path, typer.Argument(help="A file that does not exist yet.")],
) -> None:
    """Write one shard, verified, to a file that another store can import."""
    opened = _opened(store)
    name = _named(opened, shard)
    opened.export_shard(name, to)
    out().print(f"{name[:12]} written to {to}", soft_wrap=True)


@app.command("import")
@user_errors
def import_(
    store: Root,
    files: Annotated[list[Path], typer.Argument(help="Files that were exported.")],
    document: Annotated[
        str | None, typer.Option(help="Name it so; it is kept until the name is taken away.")
    ] = None,
) -> None:
    """Take shards in. Each is verified first; a store that is not there yet is made."""
    if document is not None and len(files) != 1:
        raise InvalidArgument(f"document: expected one file to name, got {len(files)}")
    opened = Store(store)
    for file in files:
        name, _ = opened.import_shard(file)
        if document is not None:
            opened.name(opened.shard(name).provenance.namespace, document, name)
        out().print(f"{name[:12]} from {file}", soft_wrap=True)


@app.command("pin")
@user_errors
def pin(
    store: Root,
    shard: Annotated[str, typer.Argument(help="Its name, or the beginning of it.")],
    document: Annotated[str, typer.Argument(help="The name that keeps it from being evicted.")],
) -> None:
    """Keep a shard by a name of its namespace, until `kvweave store unpin`."""
    opened = _opened(store)
    name = _named(opened, shard)
    opened.name(opened.shard(name).provenance.namespace, document, name)
    out().print(Text(f"{name[:12]} is kept as {document}"), soft_wrap=True)


@app.command("unpin")
@user_errors
def unpin(
    store: Root,
    document: Annotated[str, typer.Argument(help="The name.")],
    namespace: Annotated[str, typer.Option(help="Whose name it is.")] = "",
) -> None:
    """Take a name away; its shard stays until room is wanted. Exit code 1 where there is none."""
    if not _opened(store).forget(document, namespace):
        err().print(Text(f"no document {document} of that namespace"), soft_wrap=True)
        raise typer.Exit(1)
    out().print(Text(f"{document} is no longer kept"), soft_wrap=True)


def _opened(root: Path) -> Store:
    return Store(root, create=False)


def _wrong(store: Store | RemoteStore, namespace: str | None) -> dict[str, str]:
    """What is not whole, with why."""
    wrong = {}
    shards = store.list(namespace)
    with err().status("reading"):
        for shard in shards:
            try:
                store.verify(shard.name)
            except KvweaveError as error:
                wrong[shard.name] = str(error)
    return wrong


def _named(store: Store, beginning: str) -> str:
    found = [shard.name for shard in store.list() if shard.name.startswith(beginning)]
    if len(found) != 1:
        got = f"{len(found)} that begin with {beginning[:64]!r}"
        raise InvalidArgument(f"shard: expected one shard, got {got}")
    return found[0]


def _cut(text: str, width: int) -> Text:
    """A text of unknown origin in a column: nothing of it is markup or moves the cursor."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text)
    cut = Text(shown)
    cut.truncate(width, overflow="ellipsis")
    return cut


def _size(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _day(milliseconds: int) -> str:
    try:
        return dt.datetime.fromtimestamp(milliseconds / 1000, dt.timezone.utc).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return "?"


def _plain(shard: StoredShard | StoredObject, documents: list[str]) -> dict[str, Any]:
    of = shard.provenance
    return {
        "name": shard.name,
        "documents": documents,
        "tokens": shard.tokens,
        "file_bytes": shard.file_bytes,
        "used": shard.used,
        "expires": shard.expires,
        "error": shard.error,
        "provenance": None if of is None else {field: getattr(of, field) for field in _FIELDS},
    }
