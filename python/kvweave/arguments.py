"""Arguments of any origin, checked by kind: what is wrong is told as "what: expected X, got Y"."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100


def shown(value: Any) -> str:
    """A value in few words, whatever it is: the beginning and the end of what is long."""
    return _SHOWN.repr(value)


def whole(
    what: str, value: Any, least: int | None = None, most: int | None = None, *, name: str = ""
) -> int:
    """A whole number in a range; `name`: of which setting of `what`, if that has several.

    # Errors
    `InvalidArgument` for what is no whole number (True is none), or one outside the range.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise _refusal(what, name, "a whole number", value)
    _ranged(what, name, value, least, most)
    return int(value)


def real(
    what: str, value: Any, least: float | None = None, most: float | None = None, *, name: str = ""
) -> float:
    """A number in a range; `name` as for `whole`.

    # Errors
    `InvalidArgument` for what is no number, is not finite, or is outside the range.
    """
    numbers = (int, float, np.integer, np.floating)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers):
        raise _refusal(what, name, "a number", value)
    _ranged(what, name, value, least, most)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise _refusal(what, name, "a finite number", value)
    return found


def word(what: str, value: Any) -> str:
    """A text that UTF-8 can hold.

    # Errors
    `InvalidArgument` for what is no str, or has halves of characters.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what}: expected a str, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise InvalidArgument(
            f"{what}: expected text that UTF-8 can hold, got {half!r} at {error.start}"
        ) from None
    return value


def flag(what: str, value: Any) -> bool:
    """True or False.

    # Errors
    `InvalidArgument` for anything else, also for what counts as true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{what}: expected True or False, got {shown(value)}")
    return bool(value)


def several(what: str, value: Any, of: str) -> Sequence[Any]:
    """A sequence of things, called `of`, which text and bytes are not.

    # Errors
    `InvalidArgument` for anything else.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument(f"{what}: expected a sequence of {of}, got {shown(value)}")
    return value


def _refusal(what: str, name: str, kind: str, value: Any) -> InvalidArgument:
    expected = f"{name} as {kind}" if name else kind
    return InvalidArgument(f"{what}: expected {expected}, got {shown(value)}")


def _ranged(what: str, name: str, value: Any, least: float | None, most: float | None) -> None:
    if (least is None or value >= least) and (most is None or value <= most):
        return
    named = name or what.rpartition(" ")[2]
    if most is None:
        expected = f"{name} >= {least:g}".lstrip()
    elif least is None:
        expected = f"{name} <= {most:g}".lstrip()
    else:
        expected = f"{least} <= {named} <= {most}"
        if isinstance(least, float):
            expected = f"{least:g} <= {named} <= {most:g}"
    raise InvalidArgument(f"{what}: expected {expected}, got {shown(value)}")
