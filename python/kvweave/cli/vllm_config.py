"""`kvweave vllm-config`: what `vllm serve MODEL --config FILE` wants for a part of the plugin."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    from kvweave.cli.vllm_model import ServedModel

GIB = 2**30
SUFFIXES = (".yaml", ".yml")
"""Files that `vllm serve --config` takes."""

SegmentsGib = Annotated[
    float | None, typer.Option(min=0.001, help="Reuse segments; GiB of each device's store.")
]
FrozenShare = Annotated[
    float | None, typer.Option(min=0, max=1, help="Of the store, for knowledge bases.")
]
SegmentDtype = Annotated[
    str | None, typer.Option(help="Of the store: its pages are packed, as int4 or planes-3.")
]
ExactFirst = Annotated[
    int | None,
    typer.Option(help="Of packed pages: first tokens of a document that stay exact, 0 to 64."),
]
StoreFolder = Annotated[
    Path | None, typer.Option(help="A folder that keeps documents, or what is offloaded.")
]
StoreGib = Annotated[float | None, typer.Option(min=0.001, help="GiB that the folder may take.")]
StoreQuotaGib = Annotated[
    float | None, typer.Option(min=0.001, help="GiB of that for a namespace.")
]
StoreReads = Annotated[
    str | None, typer.Option(help="Documents are read where that is faster, or always.")
]


@user_errors
def vllm_config(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    heads: Annotated[Path | None, typer.Option(help="A head class map of this model.")] = None,
    segments_gib: SegmentsGib = None,
    frozen_share: FrozenShare = None,
    segment_dtype: SegmentDtype = None,
    exact_first: ExactFirst = None,
    virtual_pages: Annotated[
        bool, typer.Option("--virtual-pages", help="vLLM 0.33: block numbers are virtual.")
    ] = False,
    host_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Of virtual pages: GiB of hosts for heads that choose."),
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Of a head map too: what its heads hold.")
    ] = False,
    store: StoreFolder = None,
    store_shared: Annotated[
        bool, typer.Option("--store-shared", help="Several models may use the folder.")
    ] = False,
    store_gib: StoreGib = None,
    store_quota_gib: StoreQuotaGib = None,
    store_reads: StoreReads = None,
    offload_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="vLLM 0.33: offload KV to so much memory, and the store."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="GPUs that share the heads: --tensor-parallel-size.")
    ] = 1,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write it here.")] = None,
) -> None:
    """Print a configuration for `vllm serve`; without options, that of the attention backend."""
    from kvweave.adapters.vllm.serving import server_config
    from kvweave.cli.vllm_model import served_model

    _check_share(frozen_share, segments_gib)
    sizes = {
        "segment_bytes": _bytes("segments-gib", segments_gib),
        "host_bytes": _bytes("host-gib", host_gib),
        "store_bytes": _bytes("store-gib", store_gib),
        "store_quota_bytes": _bytes("store-quota-gib", store_quota_gib),
    }
    offloaded = _bytes("offload-gib", offload_gib)
    _check_suffix(out_file)
    given = {
        "heads": None if heads is None else str(heads.resolve(strict=True)),
        "frozen_share": frozen_share,
        "segment_dtype": segment_dtype,
        "exact_first": exact_first,
        "virtual_pages": virtual_pages or None,
        "store": None if store is None else str(store.resolve()),
        "store_shared": store_shared or None,
        "store_reads": store_reads,
        **sizes,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if offloaded is not None:
        text = _offloading(offloaded, metrics, chosen)
    else:
        read = served_model(model)
        text = server_config(read.architecture, metrics=metrics, **chosen)
        if heads is not None:
            _check_map(heads, read, ranks, virtual_pages, host_gib is not None)
    _tell(text, model, out_file)


def _check_share(frozen_share: float | None, segments_gib: float | None) -> None:
    if frozen_share is not None and segments_gib is None:
        text = "frozen-share: expected it beside segments-gib, got it alone"
        raise InvalidArgument(text, expected="segments-gib", got="none")


def _check_map(
    heads: Path, model: ServedModel, ranks: int, virtual_pages: bool, host: bool
) -> None:
    """Refuses a map that this model cannot be served with, and says how that is known."""
    from kvweave.adapters.vllm.heads.same_model import check_files
    from kvweave.adapters.vllm.heads.served_map import check_map

    sizes = model.layers, model.kv_heads, ranks
    check_map(heads, *sizes, virtual_pages=virtual_pages, host=host)
    told = check_files(heads, model.folder)
    err().print(told, markup=False, highlight=False, soft_wrap=True)


def _tell(text: str, model: str, out_file: Path | None) -> None:
    """Prints a configuration, or writes it and prints the command that reads it."""
    if out_file is None:
        out().print(text, end="", markup=False, highlight=False, soft_wrap=True)
        return
    out_file.write_text(text, encoding="utf-8")
    command = shlex.join(["vllm", "serve", model, "--config", str(out_file)])
    out().print(command, markup=False, highlight=False, soft_wrap=True)


def _check_suffix(out_file: Path | None) -> None:
    if out_file is not None and out_file.suffix not in SUFFIXES:
        expected = " or ".join(SUFFIXES)
        text = f"out: expected a file that ends in {expected}, got {out_file.name}"
        raise InvalidArgument(text, expected=expected, got=out_file.name)


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is not None and not math.isfinite(gib):
        text = f"{name}: expected a finite number, got {gib}"
        raise InvalidArgument(text, expected="a finite number", got=str(gib))
    return None if gib is None else int(gib * GIB)


def _offloading(host_bytes: int, metrics: bool, chosen: dict[str, Any]) -> str:
    """The text for vLLM's own offloading, beside which nothing else of the plugin goes."""
    from kvweave.adapters.vllm.serving import config_text, offloading_options

    names = {"store_bytes": "capacity_bytes", "store_quota_bytes": "quota_bytes"}
    names["store_shared"] = "shared"
    others = [name for name in chosen if name != "store" and name not in names]
    others += ["metrics"] if metrics else []
    if others or "store" not in chosen:
        expected, got = "it beside store alone", f"it beside {', '.join(others) or 'none'}"
        text = f"offload-gib: expected {expected}, got {got}"
        raise InvalidArgument(text, expected=expected, got=got)
    settings = {names[name]: value for name, value in chosen.items() if name in names}
    return config_text(offloading_options(chosen["store"], host_bytes, **settings))
