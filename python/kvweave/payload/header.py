"""What a payload says of itself: the model, the request, the head groups, and what each part holds.

A header is plain data that was checked when it was made, whether from a live request or from
bytes of unknown origin: sizes that follow from it can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.payload.header_fields import (
    MOST_TOKENS,
    brief,
    expect,
    expect_count,
    fields_of,
    is_text,
    list_of,
    pairs_of,
)
from kvweave.payload.packed import PackedHeader, PartKind

SCHEMA, PACKED_SCHEMA, TEXTS_SCHEMA = 1, 2, 3
"""Of headers without packed tokens, of those that have some, and of those that have some of texts
which are packed head by head."""

KINDS = ("full", "window", "top_k")
DTYPES = ("f32", "bf16", "f16")
ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}

Span: TypeAlias = tuple[int, int]
"""Positions [begin, end) of the request."""

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
    `packed`: what lies packed beside one window group of all heads, where anything does.

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
    packed: PackedHeader | None = None

    def __post_init__(self) -> None:
        for name in ("fingerprint", "namespace"):
            expect(is_text(getattr(self, name)), name, "a string", getattr(self, name))
        for name, most in (
            ("layers", _MOST_HEADS),
            ("kv_heads", _MOST_HEADS),
            ("head_dim", 2**16),
            ("page_tokens", 2**16),
            ("tokens", MOST_TOKENS),
        ):
            expect_count(name, getattr(self, name), 1, most)
        expect_count("regime", self.regime, 0, 2**64 - 1)
        expect(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        self._check_groups()
        self._check_promoted()
        if self.packed is not None:
            kinds = [group.kind for group in self.groups]
            expect(kinds == ["window"], "groups", "one window group beside packed pages", kinds)
            expect(not self.promoted, "promoted", "none beside packed pages", "some")
            self.packed.check(self.layers * self.kv_heads, self.head_dim, self.tokens)

    def _check_groups(self) -> None:
        count = len(self.groups)
        expect(1 <= count <= _MOST_GROUPS, "groups", f"1 to {_MOST_GROUPS} groups", count)
        pairs = self.layers * self.kv_heads
        named = self.head_groups
        expect(len(named) == pairs, "head_groups", f"{pairs} groups of heads", len(named))
        for index in named:
            expect_count("head_groups", index, 0, count - 1)
        expect(len(set(named)) == count, "head_groups", "a head of every group", "one without")
        for group in self.groups:
            _check_group(group, self.tokens)

    def _check_promoted(self) -> None:
        expect(
            list(self.promoted) == sorted(set(self.promoted)),
            "promoted",
            "sorted heads, each once",
            brief(self.promoted),
        )
        for layer, head in self.promoted:
            expect_count("promoted layer", layer, 0, self.layers - 1)
            expect_count("promoted head", head, 0, self.kv_heads - 1)
            group = self.groups[self.head_groups[layer * self.kv_heads + head]]
            expect(group.kind == "window", "promoted", "a head of a window group", (layer, head))

    @property
    def dense_bytes(self) -> int:
        """K and V of all tokens in every head."""
        size = 2 * self.head_dim * ITEM_BYTES[self.dtype]
        return self.tokens * self.layers * self.kv_heads * size

    def heads_of(self, group: int) -> list[tuple[int, int]]:
        """The (layer, KV head) pairs of a group, in the order of its pages."""
        found = (place for place, own in enumerate(self.head_groups) if own == group)
        return [divmod(place, self.kv_heads) for place in found]

    def part_kinds(self) -> dict[str, PartKind]:
        """The parts that hold K and V: dtypes and shapes, heads, K and V, positions, D.

        What says where packed tokens lie is among them.
        """
        pairs = np.bincount(self.head_groups, minlength=len(self.groups)).tolist()
        kinds: dict[str, PartKind] = {
            group_part(index): (self.dtype, (pairs[index], 2, group.tokens, self.head_dim))
            for index, group in enumerate(self.groups)
        }
        whole = (1, 2, self.tokens, self.head_dim)
        kinds |= {promoted_part(*place): (self.dtype, whole) for place in self.promoted}
        if self.packed is not None:
            heads = self.layers * self.kv_heads
            kinds |= self.packed.part_kinds(heads, self.head_dim, self.dtype)
        return kinds

    def to_json(self) -> dict[str, Any]:
        """The header as plain data: of a request without packed tokens as it ever was."""
        fields = asdict(self)
        if self.packed is None:
            del fields["packed"]
            return {"schema": SCHEMA, **fields}
        schema = TEXTS_SCHEMA if self.packed.texts else PACKED_SCHEMA
        return {"schema": schema, **fields, "packed": self.packed.to_json()}

    @staticmethod
    def from_json(data: Any) -> PayloadHeader:
        """A header from what `json.loads` made, which may be anything.

        # Errors
        `CorruptPayload` for another schema, a field that is missing, unknown or of another type.
        """
        expect(isinstance(data, dict), "header", "a mapping", type(data).__name__)
        schema = data.get("schema")
        known = type(schema) is int and SCHEMA <= schema <= TEXTS_SCHEMA
        expect(known, "schema", f"{SCHEMA} to {TEXTS_SCHEMA}", brief(schema))
        names = {"schema", *PayloadHeader.__dataclass_fields__}
        fields = fields_of(data, "header", names - {"packed"} if schema == SCHEMA else names)
        del fields["schema"]
        groups = []
        for entry in list_of("groups", fields["groups"]):
            group = fields_of(entry, "group", set(GroupSpans.__dataclass_fields__))
            groups.append(GroupSpans(**{**group, "spans": pairs_of("spans", group["spans"])}))
        read: dict[str, Any] = {
            "groups": tuple(groups),
            "head_groups": tuple(list_of("head_groups", fields["head_groups"])),
            "promoted": pairs_of("promoted", fields["promoted"]),
        }
        if schema != SCHEMA:
            texts = schema == TEXTS_SCHEMA
            read["packed"] = PackedHeader.from_json(fields["packed"], texts=texts)
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


def _check_group(group: GroupSpans, tokens: int) -> None:
    expect(group.kind in KINDS, "group kind", f"one of {', '.join(KINDS)}", group.kind)
    expect_count("sink", group.sink, 0, MOST_TOKENS)
    expect_count("recent", group.recent, 0, MOST_TOKENS)
    if group.kind == "window":
        expect(group.recent >= 1, "recent", "at least 1 in a window group", group.recent)
    else:
        expect(group.sink == group.recent == 0, "sink and recent", "0 of each", "others")
    before = -1
    for begin, end in group.spans:
        expect_count("span begin", begin, 0, tokens)
        expect_count("span end", end, begin + 1, tokens)
        expect(begin > before, "spans", "sorted spans with gaps between them", (begin, end))
        before = end
    for begin, end in group.visible(tokens):
        held = any(b <= begin and end <= e for b, e in group.spans)
        expect(held, f"spans of a {group.kind} group", f"[{begin}, {end}) among them", "others")
