"""Fields of a header of any origin: each is what it has to be, or is named in the error."""

from __future__ import annotations

import json
from typing import Any

from kvweave.errors import CorruptPayload

MOST_TOKENS = 2**31 - 1


def parsed(text: str) -> Any:
    """Data of a JSON text.

    # Errors
    `CorruptPayload` for text that is none, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptPayload(f"payload header: expected JSON, got {error}") from error


def expect(holds: bool, what: str, expected: str, got: object) -> None:
    """Raises `CorruptPayload`, naming a field, where something does not hold."""
    if not holds:
        text = f"payload {what}: expected {expected}, got {brief(got)}"
        raise CorruptPayload(text, expected=expected, got=brief(got))


def expect_count(what: str, value: object, least: int, most: int) -> None:
    """Raises `CorruptPayload` for a field that is no integer of a range."""
    right = type(value) is int and least <= value <= most
    expect(right, what, f"an integer from {least} to {most}", value)


def fields_of(data: Any, what: str, names: set[str]) -> dict[str, Any]:
    """The fields of a mapping; `CorruptPayload` for others than these names."""
    expect(isinstance(data, dict), what, "a mapping", type(data).__name__)
    wrong = names ^ data.keys()
    expect(not wrong, what, f"the fields {', '.join(sorted(names))}", f"another: {brief(wrong)}")
    return dict(data)


def list_of(what: str, data: Any) -> list[Any]:
    """A list; `CorruptPayload` for anything else."""
    expect(isinstance(data, list), what, "a list", type(data).__name__)
    return list(data)


def pairs_of(what: str, data: Any) -> tuple[tuple[int, int], ...]:
    """A list of pairs of integers; `CorruptPayload` for anything else."""
    pairs = list_of(what, data)
    for pair in pairs:
        right = isinstance(pair, list) and len(pair) == 2 and {type(x) for x in pair} == {int}
        expect(right, what, "pairs of integers", pair)
    return tuple((first, second) for first, second in pairs)


def is_text(value: object) -> bool:
    """Whether it is a string of characters, none of them half of one."""
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


def brief(value: object) -> str:
    """A value of unknown origin in a few characters: a number may have thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
