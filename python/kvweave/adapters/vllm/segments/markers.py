"""What a request says of its segments: `extra_args={"kvweave": {…}}` of its sampling parameters.

Through the OpenAI server the same comes in `vllm_xargs`, as a JSON string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from kvweave.errors import InvalidArgument
from kvweave.policies import DEFAULT_POLICY, POLICIES, Policy, is_exact
from kvweave.policies.policy_text import kinds_of, settings_of, told, with_settings

SECTION = "kvweave"
FIELDS = ("segments", "namespace", "policy", "discover")
CARRIED = "kvweave_marks"
"""The same in `kv_transfer_params`, for routes that pass no arguments on."""
LAYER_SETTINGS = (("sparsex", "boundary"), ("infoflow", "layers"))
"""Policies and settings of theirs that say which of a model's layers do something."""
MOST_SEGMENTS = 4096
LONGEST = 256


@dataclass(frozen=True)
class MarkedSegment:
    """Tokens [start, end) of the prompt; `name`, if any, is what refusals call it."""

    start: int
    end: int
    name: str | None = None


@dataclass(frozen=True)
class Markers:
    """A request's segments, sorted and apart, and how they may be reused.

    `namespace`: segments of different namespaces never match. `policy`: which rows of a reused
    segment are computed again, one of `POLICIES`; "full" reuses nothing (its segments are kept for
    later prompts). `discover`: known text is found without marks too. `settings` are those of the
    policy that the request names, a part's behind the part's name and a dot; `names_policy`:
    whether it names one.
    """

    segments: tuple[MarkedSegment, ...] = ()
    namespace: str = ""
    policy: str = DEFAULT_POLICY
    discover: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    names_policy: bool = field(default=False, compare=False)

    @property
    def approximates(self) -> bool:
        """Whether some KV of the request may have been computed in another context."""
        return not is_exact(self.recovery()) and not self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to act on: no segment, and nothing is to be discovered."""
        return not (self.segments or self.discover)

    @property
    def names_layers(self) -> bool:
        """Whether the policy's settings name layers of a model."""
        return any(self._layer_settings())

    def exact_tokens(self, length: int) -> int:
        """Leading tokens whose KV is that of a full prefill, whatever the store holds."""
        if not self.approximates:
            return length
        if self.discover:
            return 0
        return self.segments[0].start

    def recovery(self) -> Policy:
        """The policy."""
        policy: Policy = with_settings(POLICIES[self.policy](), dict(self.settings))
        return policy

    def check_acts(self) -> None:
        """Refuses a policy that has nothing to act on: no segment, and nothing to discover.

        A namespace alone is no mistake: it says whose the prompt is.

        Errors: `InvalidArgument`.
        """
        if self.names_policy and self.is_idle:
            raise _invalid("policy", "segments or discover beside it", f"{self.policy} alone")

    def check_layers(self, layers: int) -> None:
        """Refuses a policy whose settings name layers that a model of that many does not have.

        Errors: `InvalidArgument` naming the setting.
        """
        for path, value in self._layer_settings():
            # A boundary is a number of layers, the others are layers counted from 0.
            beyond = max(value) >= layers if isinstance(value, tuple) else value > layers
            if beyond:
                raise _invalid(f"policy.{path}", f"layers of {layers}", _shown(value))

    def _layer_settings(self) -> Iterator[tuple[str, Any]]:
        for path, value in self.settings:
            if (self.policy, path) in LAYER_SETTINGS and value is not None:
                yield path, value

    def check_within(self, tokens: int) -> None:
        """Refuses segments that reach beyond a prompt of that many tokens.

        Errors: `InvalidArgument` naming the segment.
        """
        for index, span in enumerate(self.segments):
            if span.end > tokens:
                where = f"segments[{index}]" if span.name is None else f"segment {span.name!r}"
                raise _invalid(where, f"an end <= {tokens}, the prompt's tokens", str(span.end))


def markers_of(extra_args: Any) -> Markers | None:
    """The markers in a request's `extra_args`; None where it has none.

    Errors: `InvalidArgument` naming the field, what was expected and what came.
    """
    if not isinstance(extra_args, Mapping):
        return None
    given = extra_args.get(SECTION)
    if given is None:
        carried = extra_args.get("kv_transfer_params")
        given = carried.get(CARRIED) if isinstance(carried, Mapping) else None
    return None if given is None else parse(given)


def parse(given: Any) -> Markers:
    """Markers from a mapping, or from JSON text of one.

    Errors: as `markers_of`.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise _invalid("", "a JSON object", f"text that is none: {error}") from error
    if not isinstance(given, Mapping):
        raise _invalid("", "an object", _shown(given))
    for name in given:
        if name not in FIELDS:
            raise _invalid("", f"the fields {', '.join(FIELDS)}", _shown(name))
    namespace = given.get("namespace", "")
    if not is_text(namespace):
        raise _invalid("namespace", f"a string of up to {LONGEST} characters", _shown(namespace))
    policy, settings = _policy(given.get("policy", DEFAULT_POLICY))
    discover = given.get("discover", False)
    if not isinstance(discover, bool):
        raise _invalid("discover", "true or false", _shown(discover))
    spans = _spans(given.get("segments", []))
    return Markers(spans, namespace, policy, discover, settings, "policy" in given)


def _policy(given: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Its name, or an object {"name": …} with settings of it; those of a part are an object too."""
    settings = dict(given) if isinstance(given, Mapping) else {}
    name = settings.pop("name", None) if isinstance(given, Mapping) else given
    if not isinstance(name, str) or name not in POLICIES:
        raise _invalid("policy", f"one of {', '.join(POLICIES)}", _shown(name))
    policy = POLICIES[name]()
    known = dict(settings_of(policy))
    given_settings: dict[str, Any] = {}
    for path, value in _flat(settings, known):
        if path not in known:
            expected = f"{', '.join(known)} of {name}" if known else f"no settings of {name}"
            raise _invalid("policy", expected, f"{_shown(path)[1:-1]} of {name}")
        given_settings[path] = _setting(path, value, kinds_of(known[path]))
    try:
        with_settings(policy, given_settings)
    except InvalidArgument as error:
        raise _invalid("policy", "settings in range", str(error)) from error
    return name, tuple(sorted(given_settings.items()))


def _flat(settings: Mapping[Any, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings by their path: `{"foresight": {"share": 0.1}}` is `foresight.share`."""
    for key, value in settings.items():
        path = str(key)
        part = any(one.startswith(f"{path}.") for one in known)
        if part and isinstance(value, Mapping):
            yield from ((f"{path}.{inner}", found) for inner, found in value.items())
        else:
            yield path, value


def _setting(path: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """A value of one of some types, as JSON has it: whole numbers are numbers, lists tuples."""
    for kind in kinds:
        if get_origin(kind) is Literal and type(value) is str and value in get_args(kind):
            return value
        whole = type(value) is int and -(2**31) <= value < 2**31
        if kind is float and (whole or (type(value) is float and math.isfinite(value))):
            return value
        if (kind is int and whole) or (kind in (bool, NoneType) and type(value) is kind):
            return value
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            inner = get_args(kind)[:1]
            return tuple(_setting(path, one, inner) for one in value[:MOST_SEGMENTS])
    expected = " or ".join(map(_kind, kinds))
    raise _invalid(f"policy.{path}", expected, _shown(value))


def _kind(kind: Any) -> str:
    return "a list of whole numbers" if get_origin(kind) is tuple else told(kind)


def is_text(given: Any, longest: int = LONGEST) -> bool:
    """Whether something is a string of up to so many characters that UTF-8 has all of."""
    if not isinstance(given, str) or len(given) > longest:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in given)


def _spans(given: Any) -> tuple[MarkedSegment, ...]:
    if not isinstance(given, (list, tuple)):
        raise _invalid("segments", "a list of [start, end]", _shown(given))
    if len(given) > MOST_SEGMENTS:
        raise _invalid("segments", f"up to {MOST_SEGMENTS}", str(len(given)))
    spans = [_span(index, span) for index, span in enumerate(given)]
    for index, (before, span) in enumerate(pairwise(spans), 1):
        if span.start < before.end:
            got = f"{span.start}, where segments[{index - 1}] ends at {before.end}"
            raise _invalid(f"segments[{index}]", "segments in order and apart", got)
    return tuple(spans)


def _span(index: int, given: Any) -> MarkedSegment:
    where, expected = f"segments[{index}]", '[start, end] or [start, end, "name"]'
    if not isinstance(given, (list, tuple)) or len(given) not in (2, 3):
        raise _invalid(where, expected, _shown(given))
    start, end = given[:2]
    if any(not isinstance(x, int) or isinstance(x, bool) for x in (start, end)):
        raise _invalid(where, expected, _shown(given))
    if not 0 <= start < end:
        raise _invalid(where, "0 <= start < end", f"{start}, {end}")
    name = given[2] if len(given) == 3 else None
    if name is not None and not is_text(name):
        raise _invalid(where, "a name that is a string", _shown(name))
    return MarkedSegment(start, end, name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _invalid(field: str, expected: str, got: str) -> InvalidArgument:
    name = f"{SECTION}.{field}" if field else SECTION
    text = f"{name}: expected {expected}, got {got}"
    return InvalidArgument(text, expected=expected, got=got)
