"""Policies with their settings as text: `epic:first=32` is read, `epic(first=32)` is a title.

A setting is a field of the policy's dataclass. A policy that is made of others has its parts'
fields behind a dot: `weave:foresight.share=0.1`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.policies import POLICIES, Policy, policy_of

_BOOLS = {"true": True, "false": False}


def read_policies(text: str) -> list[Policy]:
    """Policies written `name:setting=value:setting=value`, with commas between them.

    Raises InvalidArgument for an unknown policy or setting (naming the known ones), a value that
    the setting cannot have, or a setting given twice.
    """
    return [read_policy(one) for one in text.split(",")]


def read_policy(text: str) -> Policy:
    """One policy written `name:setting=value:…`; see `read_policies`."""
    name, *settings = text.strip().split(":")
    policy = policy_of(name.strip())
    seen: set[str] = set()
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        known = [path for path, _ in settings_of(policy)]
        if not equals or key not in known:
            wanted = f"setting=value with one of {', '.join(known)}" if known else "no settings"
            raise InvalidArgument(f"policy {name}: expected {wanted}, got {shown(setting)}")
        if key in seen:
            raise InvalidArgument(f"policy {name}: expected {key} once, got {shown(setting)} too")
        seen.add(key)
        changes[key] = _value(f"policy {name}: {key}", value, dict(settings_of(policy))[key])
    return cast(Policy, with_settings(policy, changes))


def title_of(policy: str | Policy) -> str:
    """The name that a policy is measured under: its own, with the settings that are not default.

    `foresight`, `foresight(share=0.1)`. What has no default to compare with keeps its name alone.
    """
    chosen = policy_of(policy)
    made = POLICIES.get(chosen.name)
    default = made() if made is not None else None
    if default is None or type(default) is not type(chosen):
        return chosen.name
    told = [f"{path}={value}" for path, value in _differing(chosen, default)]
    return f"{chosen.name}({', '.join(told)})" if told else chosen.name


def text_of(policy: str | Policy) -> str:
    """A policy as `read_policy` reads it: `foresight:share=0.1`, settings of other values alone.

    Raises InvalidArgument for a policy that has no such text, as one of a class of the user's own.
    """
    chosen = policy_of(policy)
    made = POLICIES.get(chosen.name)
    default = made() if made is not None else None
    if type(default) is not type(chosen):
        raise InvalidArgument(
            f"policy: expected one of {', '.join(POLICIES)}, got a {type(chosen).__name__}"
        )
    told = [f"{path}={value}" for path, value in _differing(chosen, default)]
    return ":".join([chosen.name, *told])


def titled(policies: Sequence[str | Policy]) -> dict[str, Policy]:
    """Policies by the names that they are measured under, each once.

    Raises InvalidArgument where two that differ have one name.
    """
    given: dict[str, Policy] = {}
    for policy in map(policy_of, policies):
        title = title_of(policy)
        if given.setdefault(title, policy) != policy:
            raise InvalidArgument(
                f"policies: expected one {title}, got {given[title]!r} and {policy!r}"
            )
    return given


def settings_of(policy: object, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's path and type, those of parts behind the part's name."""
    if not is_dataclass(policy):
        return
    kind: Any = type(policy)
    types = _types_of(kind)
    for field in fields(policy):
        value = getattr(policy, field.name)
        if is_dataclass(value):
            yield from settings_of(value, f"{before}{field.name}.")
        else:
            yield before + field.name, types[field.name]


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a class's fields, whose text takes a part of a millisecond to be read."""
    return get_type_hints(kind)


def with_settings(policy: Any, changes: dict[str, Any]) -> Any:
    """The policy with other settings, made at once: a check may look at several of them."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        part, dot, rest = path.partition(".")
        if dot:
            parts.setdefault(part, {})[rest] = value
        else:
            own[path] = value
    own |= {part: with_settings(getattr(policy, part), inner) for part, inner in parts.items()}
    return replace(policy, **own) if own else policy


def _differing(policy: Any, default: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(policy):
        mine, other = getattr(policy, field.name), getattr(default, field.name)
        if is_dataclass(mine) and type(mine) is type(other):
            yield from _differing(mine, other, f"{before}{field.name}.")
        elif mine != other:
            yield before + field.name, mine


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types that a setting may have, in the order in which it names them."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _value(what: str, text: str, kind: Any) -> Any:
    """The text as a value of a type: bool, int, float, str, None, some literals, or one of these.

    Types are tried in the order in which the setting names them.
    """
    choices = kinds_of(kind)
    for choice in choices:
        found = list(_read(text, choice))
        if found:
            return found[0]
    raise InvalidArgument(f"{what}: expected {' or '.join(map(told, choices))}, got {shown(text)}")


def _read(text: str, kind: Any) -> Iterator[Any]:
    """The value, or nothing where the text is none of this type."""
    if kind is NoneType and text.lower() == "none":
        yield None
    elif kind is bool and text.lower() in _BOOLS:
        yield _BOOLS[text.lower()]
    elif get_origin(kind) is Literal:
        yield from (value for value in get_args(kind) if str(value) == text)
    elif kind is str and text:
        yield text
    elif kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            return
        # Whole numbers have no bounds of their own, and floats do not hold all of them.
        if abs(number) < 2**63 if kind is int else math.isfinite(number):
            yield number


def told(kind: Any) -> str:
    """What values a type has, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if kind is NoneType:
        return "none"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}, which no text can say")
