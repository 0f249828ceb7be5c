"""The arithmetic of `capacity`: pages, blocks and requests of a model shape in given memory.

It explains what `capacity_count` finds, and knows nothing of how memory is cut into slabs. As in
`KvCache`: a page holds P tokens of one KV head of one layer, keys then values; a block is the pages
of one head group; the first block of the arena is the null block and holds no tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap, InvalidArgument

ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8_e4m3": 1}
ALIASES = {"smollm2": "smollm2-135m", "qwen-coder": "qwen2.5-0.5b"}
"""The packaged models, by the names that `kvweave.models` has for them."""

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST_BYTES, _MOST_HEADS = 2**60, 2**16


@dataclass(frozen=True)
class ModelShape:
    """What a model's KV depends on; `context` is None where the config does not say."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    context: int | None = None


@dataclass(frozen=True)
class GroupCapacity:
    """The (layer, KV head) pairs of one retention and what they hold for one request."""

    name: str
    pairs: int
    block_bytes: int
    blocks: int


@dataclass(frozen=True)
class Capacity:
    """What one request of `length` tokens holds, and how many of them fit the memory."""

    shape: ModelShape
    length: int
    page_tokens: int
    page_bytes: int
    token_bytes: int
    groups: tuple[GroupCapacity, ...]
    request_blocks: int
    request_bytes: int
    dense_request_bytes: int
    memory_bytes: int
    requests: int

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return asdict(self)


def presets() -> dict[str, dict[str, Any]]:
    """The shapes of well-known models, by name."""
    text = files("kvweave.cli").joinpath("model_shapes.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def shape_of(model: str, dtype: str | None = None) -> ModelShape:
    """The shape of a preset, or of a transformers `config.json` (or the folder it is in).

    Raises InvalidArgument for an unknown name, a config without what is needed, or another dtype.
    """
    known = presets()
    path = Path(model)
    name = ALIASES.get(model.lower(), model.lower())
    if name in known:
        shape = ModelShape(**known[name])
    elif path.is_dir() or path.suffix == ".json":
        shape = _from_config(path / "config.json" if path.is_dir() else path)
    else:
        names = ", ".join([*known, *ALIASES])
        raise InvalidArgument(f"model: expected a config.json or one of {names}, got {model!r}")
    chosen = dtype or shape.dtype
    if chosen not in ITEM_BYTES:
        raise InvalidArgument(f"dtype: expected one of {', '.join(ITEM_BYTES)}, got {chosen!r}")
    return ModelShape(shape.layers, shape.kv_heads, shape.head_dim, chosen, shape.context)


def parse_bytes(text: str) -> int:
    """Bytes from `24GiB`, `80GB`, `512MiB` or a plain number; `GB` is decimal, `GiB` binary.

    Raises InvalidArgument for anything else, and for more than an EiB.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?\s*", text.lower())
    found = 0 if match is None else int(float(match[1]) * _UNITS[match[2] or ""])
    if match is None or found > _MOST_BYTES:
        raise InvalidArgument(f"memory: expected a size such as 24GiB or 80GB, got {text!r}")
    return found


def read_head_map(path: Path, shape: ModelShape) -> HeadClassMap:
    """The `HeadClassMap` of a file, which is valid and of the shape.

    Raises CorruptHeadMap naming what is wrong.
    """
    text = path.read_text(encoding="utf-8")
    try:
        head_map = HeadClassMap.from_json(text)
    except CorruptHeadMap as error:
        raise CorruptHeadMap(f"{path}: {error}") from error
    if (head_map.layers, head_map.kv_heads) != (shape.layers, shape.kv_heads):
        raise CorruptHeadMap(
            f"{path}: expected {shape.layers} layers × {shape.kv_heads} KV heads, "
            f"got {head_map.layers} × {head_map.kv_heads}"
        )
    return head_map


def capacity_of(
    shape: ModelShape,
    length: int,
    page_tokens: int,
    memory_bytes: int,
    head_map: HeadClassMap | None = None,
) -> Capacity:
    """What requests of `length` tokens cost. `top_k` heads keep every token; they read fewer.

    Raises InvalidArgument for a length or page below one token.
    """
    if length < 1 or page_tokens < 1:
        raise InvalidArgument(
            f"capacity: expected length and page tokens >= 1, got {length} and {page_tokens}"
        )
    page_bytes = 2 * page_tokens * shape.head_dim * ITEM_BYTES[shape.dtype]
    pairs = shape.layers * shape.kv_heads
    dense = -(-length // page_tokens)
    groups = _groups(head_map, pairs, page_bytes, length, page_tokens)
    request_bytes = sum(group.blocks * group.block_bytes for group in groups)
    reserved = max(group.block_bytes for group in groups)
    return Capacity(
        shape=shape,
        length=length,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        token_bytes=2 * pairs * shape.head_dim * ITEM_BYTES[shape.dtype],
        groups=groups,
        request_blocks=sum(group.blocks for group in groups),
        request_bytes=request_bytes,
        dense_request_bytes=dense * pairs * page_bytes,
        memory_bytes=memory_bytes,
        requests=max(0, memory_bytes - reserved) // request_bytes,
    )


def _groups(
    head_map: HeadClassMap | None, pairs: int, page_bytes: int, length: int, page_tokens: int
) -> tuple[GroupCapacity, ...]:
    dense = -(-length // page_tokens)
    if head_map is None:
        return (GroupCapacity("full", pairs, pairs * page_bytes, dense),)
    counts: dict[tuple[Any, ...], int] = {}
    for head in json.loads(head_map.to_json())["heads"]:
        key = tuple(sorted(head["class"].items()))
        counts[key] = counts.get(key, 0) + 1
    made = []
    for key, count in sorted(counts.items(), key=str):
        settings = dict(key)
        blocks = dense
        if settings["kind"] == "window":
            sink = -(-int(settings["sink"]) // page_tokens)
            # The next token sees itself and the `recent` - 1 tokens before it.
            first = max(0, length + 1 - int(settings["recent"])) // page_tokens
            blocks = min(dense, sink + dense - max(sink, min(first, dense)))
        kind = settings.pop("kind")
        name = " ".join([str(kind), *(f"{k}={v}" for k, v in settings.items())])
        made.append(GroupCapacity(name, count, count * page_bytes, blocks))
    return tuple(made)


def _from_config(path: Path) -> ModelShape:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        config = loaded.get("text_config", loaded)
        heads = int(config["num_attention_heads"])
        context = config.get("max_position_embeddings")
        shape = ModelShape(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            dtype=_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16"),
            context=None if context is None else int(context),
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidArgument(f"{path}: expected a transformers config, got {error!r}") from error
    sizes = (shape.layers, shape.kv_heads, shape.head_dim)
    if min(sizes) < 1 or max(sizes) > _MOST_HEADS:
        raise InvalidArgument(f"{path}: expected sizes from 1 to {_MOST_HEADS}, got {sizes}")
    return shape
