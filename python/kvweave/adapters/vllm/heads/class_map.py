"""A head class map, read for a model that vLLM is about to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

from kvweave.adapters.vllm.require import require
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument

HeadClass: TypeAlias = dict[str, "int | str"]


def read_map(path: Path) -> HeadClassMap:
    """Reads a map of any model.

    Errors: `InvalidArgument` when the file cannot be read, `CorruptHeadMap`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise InvalidArgument(f"heads: expected a readable file, got {path}: {reason}") from error
    return HeadClassMap.from_json(text)


def read_classes(path: Path, layers: int, kv_heads: int) -> list[list[HeadClass]]:
    """Reads the class of each head [L, G] of a model of L layers and G KV heads.

    Errors: as `read_map`, and `InvalidArgument` for a map of another shape.
    """
    known = read_map(path)
    got = (known.layers, known.kv_heads)
    expected = f"a map of {layers} layers of {kv_heads} KV heads"
    found = f"{got[0]} of {got[1]}"
    require("heads", got == (layers, kv_heads), expected, found, InvalidArgument)
    classes: list[list[HeadClass]] = [[{"kind": "full"}] * kv_heads for _ in range(layers)]
    for head in json.loads(known.to_json())["heads"]:
        classes[head["layer"]][head["head"]] = head["class"]
    return classes
