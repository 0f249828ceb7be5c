"""`PolicyProfile`: the policy and head map that keep a stated bound on one model, with evidence.

Plain data that a file holds. A file's origin is not trusted: every field is checked, and what is
wrong is said without repeating the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap, CorruptProfile, InvalidArgument
from kvweave.policies import Policy
from kvweave.policies.policy_text import read_policy

SCHEMA_VERSION = 2
MOST_BYTES = 1 << 22
"""Of a profile's text. A search writes some 40 KB, and a head map some 0.4 KB a head."""
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

BoundKind = Literal["kl", "score-drop"]
Stage = Literal["search", "certify"]


@dataclass(frozen=True)
class Bound:
    """What a policy may lose against `full`, in the mean over jobs, each weighing alike.

    `kind`: "kl" (nats a token) or "score-drop" (of a task's score, 0..1). `level`: of the interval
    whose upper end is within `value`.

    Raises InvalidArgument for another kind, a value that is not above 0, or a level outside (0, 1).
    """

    kind: BoundKind
    value: float
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.kind not in ("kl", "score-drop"):
            raise InvalidArgument(f"bound: expected kl or score-drop, got {self.kind!r}")
        if not 0.0 < self.value < math.inf:
            raise InvalidArgument(f"bound: expected a number above 0, got {self.value}")
        if not 0.0 < self.level < 1.0:
            raise InvalidArgument(f"bound: expected 0 < level < 1, got {self.level}")

    def __str__(self) -> str:
        unit = "nats of KL a token" if self.kind == "kl" else "of score lost"
        return f"{self.value:g} {unit}"


@dataclass(frozen=True)
class Evidence:
    """What one candidate lost on one job, or on all of them together (`job` "all jobs").

    `heads`: the digest of the head map that the policy ran under, None without one. `samples`: how
    many, of which `lost` gave no number and count as a failure. `value`, `low`, `high`: the mean
    and its interval, None where there is none. `flops_share` and `kv_share`: FLOPs of the prefill
    and bytes of KV that it left, over those of full without a map.
    """

    stage: Stage
    policy: str
    heads: str | None
    job: str
    task: str
    layout: str | None
    length: int
    samples: int
    lost: int
    value: float | None
    low: float | None
    high: float | None
    flops_share: float
    kv_share: float


@dataclass(frozen=True)
class TriedHeads:
    """A head map that was tried: its digest, and how many of its heads keep every token."""

    digest: str
    whole: int
    heads: int


@dataclass(frozen=True)
class Text:
    """A text that was measured on, and which of its documents: name and digest."""

    name: str
    digest: str


@dataclass(frozen=True)
class PolicyProfile:
    """What was found cheapest within a bound on one model; `full` without a map where nothing was.

    `policy` as `read_policy` reads it. `heads`: the head map that belongs to it, under which it was
    measured against the model without one; None: every head keeps every token. `flops_share` and
    `kv_share`: as in `Evidence`, on what it was certified with.

    Raises InvalidArgument for a policy text that cannot be read, or a head map of another model.
    """

    model_fingerprint: str
    dtype: str
    policy: str
    bound: Bound
    flops_share: float
    kv_share: float
    evidence: tuple[Evidence, ...]
    tried_heads: tuple[TriedHeads, ...]
    texts: tuple[Text, ...]
    seed: int
    kvweave: str
    date: str
    heads: HeadClassMap | None = None

    def __post_init__(self) -> None:
        read_policy(self.policy)
        if self.heads is not None and self.heads.model_fingerprint != self.model_fingerprint:
            raise InvalidArgument(
                f"heads: expected a map of model {_named(self.model_fingerprint)}, "
                f"got one of {_named(self.heads.model_fingerprint)}"
            )
        known = [tried.digest for tried in self.tried_heads]
        if self.heads is not None and heads_digest(self.heads) not in known:
            raise InvalidArgument(
                f"heads: expected one of the maps tried, {', '.join(known)}, "
                f"got {heads_digest(self.heads)}"
            )

    @property
    def chosen(self) -> Policy:
        """The policy itself."""
        return read_policy(self.policy)

    def to_json(self) -> str:
        """The JSON form; the same profile gives the same text."""
        plain = {"schema_version": SCHEMA_VERSION, **asdict(replace(self, heads=None))}
        if self.heads is not None:
            plain["heads"] = json.loads(self.heads.to_json())
        return json.dumps(plain, indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> PolicyProfile:
        """Reads and checks the JSON form.

        # Errors
        `CorruptProfile` for text that is too long or cut short, another schema version, fields
        that are missing, unknown or of another type, and numbers that are not finite.
        """
        if len(text) > MOST_BYTES:
            _refuse("policy profile", f"at most {MOST_BYTES} characters", str(len(text)))
        try:
            plain = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
        except RecursionError:
            _refuse("policy profile", "JSON", "values nested too deeply")
        except json.JSONDecodeError as error:
            _refuse("policy profile", "JSON", f"{error.msg} at character {error.pos}")
        except CorruptProfile:
            raise
        except ValueError:
            _refuse("policy profile", "numbers of usual length", "a longer one")
        if not isinstance(plain, dict):
            _refuse("policy profile", "an object", type(plain).__name__)
        version = plain.pop("schema_version", None)
        if version != SCHEMA_VERSION or isinstance(version, bool):
            _refuse("policy profile schema_version", str(SCHEMA_VERSION), _short(version))
        made: PolicyProfile = _made(PolicyProfile, plain, "policy profile")
        return made

    @staticmethod
    def read(path: Path) -> PolicyProfile:
        """The profile in a file.

        # Errors
        `CorruptProfile` as `from_json`, and for bytes that are no UTF-8; `OSError`.
        """
        with path.open("rb") as file:
            whole = file.read(MOST_BYTES + 1)
        if len(whole) > MOST_BYTES:
            _refuse(path.name, f"at most {MOST_BYTES} bytes", f"{path.stat().st_size}")
        try:
            return PolicyProfile.from_json(whole.decode("utf-8"))
        except UnicodeDecodeError as error:
            _refuse(path.name, "UTF-8 text", f"{error.reason} at byte {error.start}")

    def check(self, fingerprint: str, dtype: str, heads: HeadClassMap | None) -> None:
        """Raises CorruptProfile unless this is of the model, of its dtype, and of a head map.

        `heads`: a map that is asked for by itself; None takes this profile's.
        """
        mine = {"model": self.model_fingerprint, "dtype": self.dtype}
        theirs = {"model": fingerprint, "dtype": dtype}
        if heads is not None:
            mine["head map"], theirs["head map"] = _digest(self.heads), heads_digest(heads)
        for what, wanted in theirs.items():
            if mine[what] != wanted:
                _refuse(f"policy profile {what}", _named(wanted), _named(mine[what]))


def _digest(heads: HeadClassMap | None) -> str:
    return "none" if heads is None else heads_digest(heads)


def heads_digest(heads: HeadClassMap) -> str:
    """16 hex digits that name what each head keeps; how that was measured makes no difference."""
    plain = json.loads(heads.to_json())["heads"]
    classes = sorted((head["layer"], head["head"], json.dumps(head["class"])) for head in plain)
    return hashlib.sha256(json.dumps(classes).encode()).hexdigest()[:16]


def _made(kind: type[Any], plain: Any, what: str) -> Any:
    """A dataclass of plain data, each field by its type's name."""
    if not isinstance(plain, Mapping):
        _refuse(what, "an object", type(plain).__name__)
    known = {field.name: str(field.type) for field in fields(kind)}
    unknown = [str(name) for name in plain if name not in known]
    if unknown:
        _refuse(what, f"the fields {', '.join(known)}", f"{_short(unknown[0])} too")
    missing = [name for name in known if name not in plain]
    if missing:
        _refuse(what, f"the fields {', '.join(known)}", f"no {missing[0]}")
    read = {name: _field(plain[name], told, f"{what} {name}") for name, told in known.items()}
    try:
        return kind(**read)
    except InvalidArgument as error:
        # What the message repeats was in the file.
        raise CorruptProfile(_cut(f"{what}: {error}", 300)) from error


_PARTS = {"Bound": Bound, "Evidence": Evidence, "Text": Text, "TriedHeads": TriedHeads}


def _head_map(value: Any, what: str) -> HeadClassMap:
    """The map that a JSON value is."""
    if not isinstance(value, dict):
        _refuse(what, "an object", type(value).__name__)
    try:
        return HeadClassMap.from_json(json.dumps(value, allow_nan=False))
    except RecursionError:
        _refuse(what, "a head map", "values nested too deeply")
    except (CorruptHeadMap, ValueError) as error:
        # What the message repeats was in the file.
        raise CorruptProfile(_cut(f"{what}: {error}", 300)) from error


def _field(value: Any, told: str, what: str) -> Any:
    """One value of the type that a dataclass's field names."""
    if told in _PARTS:
        return _made(_PARTS[told], value, what)
    if told == "HeadClassMap":
        return _head_map(value, what)
    if told.startswith("tuple["):
        if not isinstance(value, list):
            _refuse(what, "a list", type(value).__name__)
        inner = told.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_field(one, inner, f"{what}[{i}]") for i, one in enumerate(value))
    if told.endswith(" | None"):
        return None if value is None else _field(value, told.removesuffix(" | None"), what)
    return _plain(value, told, what)


def _plain(value: Any, told: str, what: str) -> Any:
    """A string, a whole number or a finite one."""
    choices = {"BoundKind": ("kl", "score-drop"), "Stage": ("search", "certify")}
    if told in choices:
        if value not in choices[told]:
            _refuse(what, " or ".join(choices[told]), _short(value))
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if told == "float" and number:
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            _refuse(what, "a finite number", _short(value))
        return found
    if told == "int" and number and not isinstance(value, float):
        if value < 0:
            _refuse(what, "a number >= 0", _short(value))
        return value
    if told == "str" and isinstance(value, str):
        return value
    return _refuse(
        what, {"float": "a number", "int": "a whole number"}.get(told, "text"), _short(value)
    )


def _no_number(word: str) -> NoReturn:
    _refuse("policy profile", "finite numbers", word)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys stand there once each."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        _refuse("policy profile", "each field once", f"{_short(twice)} twice")
    return found


def _refuse(what: str, expected: str, got: str) -> NoReturn:
    raise CorruptProfile(f"{what}: expected {expected}, got {got}", expected=expected, got=got)


def _named(name: str) -> str:
    return _cut(name, 16)


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a very long number"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return _cut(repr(value), _SHOWN)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
