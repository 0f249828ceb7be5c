"""What the user sets for the plugin: `additional_config={"kvweave": {…}}` of vLLM, or `KVWEAVE_*`.

An option that stands in both places is the configuration's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidArgument

SECTION = "kvweave"
TEXTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "heads": (str, "a path"),
    "segment_bytes": (int, "bytes"),
    "frozen_share": (float, "a share in 0..1"),
    "virtual_pages": ({"1": True, "true": True, "0": False, "false": False}.__getitem__, "1 or 0"),
}
"""The options; how the text of a variable is read, and what is expected."""
VARIABLES = {name: f"KVWEAVE_{name.upper()}" for name in TEXTS}


@dataclass(frozen=True)
class Options:
    """`heads`: the file of a head class map (`kvweave profile-heads`), or None.

    `segment_bytes`: the store of segments on each worker's device, None: segments are not reused.
    `frozen_share` of it may be frozen by a knowledge base. `virtual_pages`: vLLM's block numbers
    are virtual pages (vLLM 0.33).
    """

    heads: Path | None = None
    segment_bytes: int | None = None
    frozen_share: float = 0.5
    virtual_pages: bool = False

    def digest(self) -> str:
        """What a graph that was compiled under these options may depend on, the map's text too."""
        text = repr(self) if self.heads is None else repr(self) + self.heads.read_text("utf-8")
        return hashlib.sha256(text.encode()).hexdigest()


def options_of(additional: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """Reads the section of a `VllmConfig.additional_config`, and what it leaves out elsewhere.

    Errors: `InvalidArgument` for a name that is not known or a value of another kind.
    """
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise _invalid(SECTION, "a dictionary", repr(section))
    for name in section:
        if name not in TEXTS:
            raise _invalid(SECTION, f"the options {', '.join(TEXTS)}", repr(name))
    section = {**_read(environment), **section}
    heads = section.get("heads")
    if heads is not None and not isinstance(heads, str):
        raise _invalid(f"{SECTION}.heads", "a path", repr(heads))
    size = section.get("segment_bytes")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise _invalid(f"{SECTION}.segment_bytes", "bytes, at least 1", repr(size))
    share = section.get("frozen_share", 0.5)
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        raise _invalid(f"{SECTION}.frozen_share", "a share in 0..1", repr(share))
    virtual = section.get("virtual_pages", False)
    if not isinstance(virtual, bool):
        raise _invalid(f"{SECTION}.virtual_pages", "true or false", repr(virtual))
    return Options(None if heads is None else Path(heads), size, float(share), virtual)


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that the environment sets; an empty variable sets none."""
    read: dict[str, Any] = {}
    for name, (parse, expected) in TEXTS.items():
        text = environment.get(VARIABLES[name], "")
        try:
            read |= {name: parse(text)} if text else {}
        except (ValueError, KeyError):
            what = f"{VARIABLES[name]}: expected {expected}, got {text!r}"
            raise InvalidArgument(what, expected=expected, got=text) from None
    return read


def _invalid(what: str, expected: str, got: str) -> InvalidArgument:
    return InvalidArgument(
        f"additional_config: {what}: expected {expected}, got {got}", expected=expected, got=got
    )
