"""What the user sets for the plugin: `additional_config={"kvweave": {…}}` of vLLM, or `KVWEAVE_*`.

Of an option that is set in both places the configuration's value counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvweave.adapters.vllm.require import require
from kvweave.errors import InvalidArgument
from kvweave.packed_page import MOST_FIRST

SECTION = "kvweave"
PackedKind = Literal["int4", "int8", "half-int4", "quarter-bf16", "planes-3", "planes-2.5"]
"""What pages of a store of segments may be packed in."""
KINDS = f"one of {', '.join(get_args(PackedKind))}"
FLAGS = {"1": True, "true": True, "0": False, "false": False}
TEXTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "heads": (str, "a path"),
    "segment_bytes": (int, "bytes"),
    "frozen_share": (float, "a share in 0..1"),
    "segment_dtype": (str, KINDS),
    "exact_first": (int, f"0 to {MOST_FIRST} tokens"),
    "store": (str, "a path"),
    "store_bytes": (int, "bytes"),
    "store_quota_bytes": (int, "bytes"),
    "store_reads": (str, "faster or always"),
    "store_shared": (FLAGS.__getitem__, "1 or 0"),
    "host_bytes": (int, "bytes"),
    "virtual_pages": (FLAGS.__getitem__, "1 or 0"),
}
"""The options; how the text of a variable is read, and what is expected."""
BESIDE = {
    **dict.fromkeys(("store", "segment_dtype"), "segment_bytes"),
    "exact_first": "segment_dtype",
    **dict.fromkeys(("store_bytes", "store_quota_bytes", "store_reads", "store_shared"), "store"),
    "host_bytes": "virtual_pages",
}
"""Options that say nothing without another one."""
VARIABLES = {name: f"KVWEAVE_{name.upper()}" for name in TEXTS}


@dataclass(frozen=True)
class Options:
    """`heads`: the file of a head class map (`kvweave profile-heads`), or None.

    `segment_bytes`: the store of segments on each worker's device, None: segments are not reused.
    `frozen_share` of it may be frozen by a knowledge base, and `segment_dtype`, a format's name, is
    what its pages are packed in; None: they are exact. `exact_first`: so many first tokens of a
    document stay exact beside packed pages; None: one where the format has a basis, else none.
    `virtual_pages`: vLLM's block numbers are virtual pages (vLLM 0.33), and `host_bytes` of the
    host's memory have room for pages of heads that choose few, for each worker; None: all pages
    stay on the device.

    `store`: a folder that keeps the knowledge base's documents, or None; each worker may take
    `store_bytes` there, of which a namespace may have `store_quota_bytes`. None: no bound.
    `store_reads`: documents are read where that is "faster" than computing them, or "always".
    `store_shared`: several models may use the folder; else it belongs to the first that did.
    """

    heads: Path | None = None
    segment_bytes: int | None = None
    frozen_share: float = 0.5
    segment_dtype: PackedKind | None = None
    virtual_pages: bool = False
    host_bytes: int | None = None
    # No graph depends on these.
    exact_first: int | None = field(default=None, repr=False)
    store: Path | None = field(default=None, repr=False)
    store_bytes: int | None = field(default=None, repr=False)
    store_quota_bytes: int | None = field(default=None, repr=False)
    store_reads: str = field(default="faster", repr=False)
    store_shared: bool = field(default=False, repr=False)

    def digest(self) -> str:
        """What a graph that was compiled under these options may depend on, the map's text too."""
        text = repr(self) if self.heads is None else repr(self) + self.heads.read_text("utf-8")
        return hashlib.sha256(text.encode()).hexdigest()


def options_of(additional: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """Reads the section of a `VllmConfig.additional_config`, and what it leaves out elsewhere.

    Errors: `InvalidArgument` for a name in the section that is not known or a value of another
    kind; it names the option or the variable, wherever the value came from.
    """
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    here = f"additional_config: {SECTION}"
    _require(here, isinstance(section, Mapping), "a dictionary", section)
    for name in section:
        _require(here, name in TEXTS, f"the options {', '.join(TEXTS)}", name)
    given = _read(environment)
    where = {name: f"{here}.{name}" if name in section else VARIABLES[name] for name in TEXTS}
    given |= section
    for name in ("heads", "store"):
        path = given.get(name)
        _require(where[name], path is None or _is_path(path), "a path", path)
    for name in ("segment_bytes", "store_bytes", "store_quota_bytes", "host_bytes"):
        size = given.get(name)
        counts = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        _require(where[name], size is None or counts, "bytes, at least 1", size)
    for name, beside in BESIDE.items():
        alone = given.get(name) is not None and not given.get(beside)
        _require(where[name], not alone, f"it beside {beside}", given.get(name))
    needed = given.get("host_bytes") is None or given.get("heads") is not None
    _require(where["host_bytes"], needed, "it beside heads", given.get("host_bytes"))
    share = given.get("frozen_share", 0.5)
    in_range = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
    _require(where["frozen_share"], in_range, "a share in 0..1", share)
    reads = given.get("store_reads", "faster")
    _require(where["store_reads"], reads in ("faster", "always"), "faster or always", reads)
    packed = given.get("segment_dtype")
    _require(where["segment_dtype"], packed in (None, *get_args(PackedKind)), KINDS, packed)
    first = given.get("exact_first")
    few = type(first) is int and 0 <= first <= MOST_FIRST
    _require(where["exact_first"], first is None or few, TEXTS["exact_first"][1], first)
    for name in ("virtual_pages", "store_shared"):
        flag = given.get(name, False)
        _require(where[name], isinstance(flag, bool), "true or false", flag)
    paths = {name: Path(given[name]) for name in ("heads", "store") if given.get(name) is not None}
    return Options(**{**given, **paths, "frozen_share": float(share)})


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that the environment sets; an empty variable sets none."""
    read: dict[str, Any] = {}
    for name, (parse, expected) in TEXTS.items():
        text = environment.get(VARIABLES[name], "")
        try:
            read |= {name: parse(text)} if text else {}
        except (ValueError, KeyError):
            _require(VARIABLES[name], False, expected, text)
    return read


def _is_path(given: Any) -> bool:
    """An empty path would be the folder that the engine runs in."""
    return isinstance(given, str) and bool(given)


def _require(what: str, holds: bool, expected: str, got: Any) -> None:
    require(what, holds, expected, repr(got), InvalidArgument)
