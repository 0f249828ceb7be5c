"""What a payload says of itself: the model, the request, the head groups, and what each part holds.

A header is plain data that was checked when it was made, whether from a live request or from
bytes of unknown origin: sizes that follow from it can be trusted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.errors import CorruptPayload

SCHEMA = 1
KINDS = ("full", "window", "top_k")
DTYPES = ("f32", "bf16", "f16")
ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}

Span: TypeAlias = tuple[int, int]
"""Positions [begin, end) of the request."""

_MOST_TOKENS = 2**31 - 1
_MOST_HEADS = 2**20
_MOST_GROUPS = 64


@dataclass(frozen=True)
class GroupSpans:
    """One head group: its class, as `HeadGroup` has it, and the positions whose KV is carried."""

    kind: str
    sink: int
    recent: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Positions that are carried."""
        return sum(end - begin for begin, end in self.spans)

    def visible(self, tokens: int) -> tuple[Span, ...]:
        """What the rows after `tokens` tokens can see of them: all, or a sink and a window."""
        if self.kind != "window":
            return ((0, tokens),)
        sink, begin = min(self.sink, tokens), max(0, tokens - self.recent + 1)
        if begin <= sink:
            return ((0, tokens),)
        return tuple((b, e) for b, e in ((0, sink), (begin, tokens)) if b < e)


@dataclass(frozen=True)
class PayloadHeader:
    """A payload's request and geometry.

    `fingerprint` names the weights; `regime` the frequencies of RoPE that keys are rotated by, each
    at its position in the request. `tokens` is T. `head_groups` [L · G] is the group of each
    (layer, KV head), layer by layer; the heads of a group follow each other in this order.
    `promoted` are the (layer, KV head) pairs of window groups whose every token is carried besides.

    # Errors
    `CorruptPayload` naming the field that cannot be.
    """

    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    tokens: int
    namespace: str
    regime: int
    groups: tuple[GroupSpans, ...]
    head_groups: tuple[int, ...]
    promoted: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("fingerprint", "namespace"):
            _expect(_is_text(getattr(self, name)), name, "a string", getattr(self, name))
        for name, most in (
            ("layers", _MOST_HEADS),
            ("kv_heads", _MOST_HEADS),
            ("head_dim", 2**16),
            ("page_tokens", 2**16),
            ("tokens", _MOST_TOKENS),
        ):
            _expect_count(name, getattr(self, name), 1, most)
        _expect_count("regime", self.regime, 0, 2**64 - 1)
        _expect(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        self._check_groups()
        self._check_promoted()

    def _check_groups(self) -> None:
        count = len(self.groups)
        _expect(1 <= count <= _MOST_GROUPS, "groups", f"1 to {_MOST_GROUPS} groups", count)
        pairs = self.layers * self.kv_heads
        named = self.head_groups
        _expect(len(named) == pairs, "head_groups", f"{pairs} groups of heads", len(named))
        for index in named:
            _expect_count("head_groups", index, 0, count - 1)
        _expect(len(set(named)) == count, "head_groups", "a head of every group", "one without")
        for group in self.groups:
            _check_group(group, self.tokens)

    def _check_promoted(self) -> None:
        _expect(
            list(self.promoted) == sorted(set(self.promoted)),
            "promoted",
            "sorted heads, each once",
            _brief(self.promoted),
        )
        for layer, head in self.promoted:
            _expect_count("promoted layer", layer, 0, self.layers - 1)
            _expect_count("promoted head", head, 0, self.kv_heads - 1)
            group = self.groups[self.head_groups[layer * self.kv_heads + head]]
            _expect(group.kind == "window", "promoted", "a head of a window group", (layer, head))

    @property
    def dense_bytes(self) -> int:
        """K and V of all tokens in every head."""
        size = 2 * self.head_dim * ITEM_BYTES[self.dtype]
        return self.tokens * self.layers * self.kv_heads * size

    def heads_of(self, group: int) -> list[tuple[int, int]]:
        """The (layer, KV head) pairs of a group, in the order of its pages."""
        found = (place for place, own in enumerate(self.head_groups) if own == group)
        return [divmod(place, self.kv_heads) for place in found]

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parts that hold K and V, and their shapes: heads, K and V, positions, D."""
        pairs = np.bincount(self.head_groups, minlength=len(self.groups)).tolist()
        shapes = {
            group_part(index): (pairs[index], 2, group.tokens, self.head_dim)
            for index, group in enumerate(self.groups)
        }
        whole = (1, 2, self.tokens, self.head_dim)
        return {**shapes, **{promoted_part(*place): whole for place in self.promoted}}

    def to_json(self) -> dict[str, Any]:
        """The header as plain data."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(data: Any) -> PayloadHeader:
        """A header from what `json.loads` made, which may be anything.

        # Errors
        `CorruptPayload` for another schema, a field that is missing, unknown or of another type.
        """
        fields = _fields(data, "header", {"schema", *PayloadHeader.__dataclass_fields__})
        schema = fields.pop("schema")
        _expect(type(schema) is int and schema == SCHEMA, "schema", str(SCHEMA), _brief(schema))
        groups = []
        for entry in _list("groups", fields["groups"]):
            group = _fields(entry, "group", set(GroupSpans.__dataclass_fields__))
            groups.append(GroupSpans(**{**group, "spans": _pairs("spans", group["spans"])}))
        read = {
            "groups": tuple(groups),
            "head_groups": tuple(_list("head_groups", fields["head_groups"])),
            "promoted": _pairs("promoted", fields["promoted"]),
        }
        return PayloadHeader(**{**fields, **read})


def positions_of(spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """The positions of spans, i32 [n], sorted as they are."""
    runs = [np.arange(begin, end, dtype=np.int32) for begin, end in spans]
    return np.concatenate([np.zeros(0, np.int32), *runs])


def group_part(index: int) -> str:
    """The name of the part of a group."""
    return f"group.{index}"


def promoted_part(layer: int, head: int) -> str:
    """The name of the part of a promoted head."""
    return f"promoted.{layer}.{head}"


def parsed(text: str) -> Any:
    """Data of a JSON text.

    # Errors
    `CorruptPayload` for text that is none, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptPayload(f"payload header: expected JSON, got {error}") from error


def _check_group(group: GroupSpans, tokens: int) -> None:
    _expect(group.kind in KINDS, "group kind", f"one of {', '.join(KINDS)}", group.kind)
    _expect_count("sink", group.sink, 0, _MOST_TOKENS)
    _expect_count("recent", group.recent, 0, _MOST_TOKENS)
    if group.kind == "window":
        _expect(group.recent >= 1, "recent", "at least 1 in a window group", group.recent)
    else:
        _expect(group.sink == group.recent == 0, "sink and recent", "0 of each", "others")
    before = -1
    for begin, end in group.spans:
        _expect_count("span begin", begin, 0, tokens)
        _expect_count("span end", end, begin + 1, tokens)
        _expect(begin > before, "spans", "sorted spans with gaps between them", (begin, end))
        before = end
    for begin, end in group.visible(tokens):
        held = any(b <= begin and end <= e for b, e in group.spans)
        _expect(held, f"spans of a {group.kind} group", f"[{begin}, {end}) among them", "others")


def _expect(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        text = f"payload {what}: expected {expected}, got {_brief(got)}"
        raise CorruptPayload(text, expected=expected, got=_brief(got))


def _expect_count(what: str, value: object, least: int, most: int) -> None:
    right = type(value) is int and least <= value <= most
    _expect(right, what, f"an integer from {least} to {most}", value)


def _fields(data: Any, what: str, names: set[str]) -> dict[str, Any]:
    _expect(isinstance(data, dict), what, "a mapping", type(data).__name__)
    wrong = names ^ data.keys()
    _expect(not wrong, what, f"the fields {', '.join(sorted(names))}", f"another: {_brief(wrong)}")
    return dict(data)


def _list(what: str, data: Any) -> list[Any]:
    _expect(isinstance(data, list), what, "a list", type(data).__name__)
    return list(data)


def _pairs(what: str, data: Any) -> tuple[tuple[int, int], ...]:
    pairs = _list(what, data)
    for pair in pairs:
        right = isinstance(pair, list) and len(pair) == 2 and {type(x) for x in pair} == {int}
        _expect(right, what, "pairs of integers", pair)
    return tuple((first, second) for first, second in pairs)


def _is_text(value: object) -> bool:
    """Whether it is a string of characters, none of them half of one."""
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _brief(value: object) -> str:
    """A value of unknown origin in a few characters: a number may have thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
