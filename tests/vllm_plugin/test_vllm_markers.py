"""Markers of segments as requests carry them. Needs no vLLM."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.segments.eligibility import checked_markers, eligible_markers
from kvweave.adapters.vllm.segments.markers import (
    MOST_SEGMENTS,
    MarkedSegment,
    Markers,
    markers_of,
    parse,
)
from kvweave.errors import InvalidArgument
from kvweave.policies import (
    DEFAULT_POLICY,
    POLICIES,
    Foresight,
    InfoFlow,
    Naive,
    RedKnot,
    SparseX,
    Weave,
    policy_of,
)

WHOLE: dict[str, Any] = {
    "segments": [[3, 9], [9, 20, "handbook"]],
    "namespace": "acme",
    "policy": "naive",
    "discover": True,
}
PARSED = Markers((MarkedSegment(3, 9), MarkedSegment(9, 20, "handbook")), "acme", "naive", True)


def test_an_object_and_its_text_are_the_same() -> None:
    assert parse(WHOLE) == parse(json.dumps(WHOLE)) == markers_of({"kvweave": WHOLE}) == PARSED
    assert parse({}) == Markers()


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"kvweave": None}])
def test_requests_without_markers(extra: Any) -> None:
    assert markers_of(extra) is None


REFUSED: dict[str, tuple[Any, str]] = {
    "no json": ("{", "kvweave: expected a JSON object, got text that is none"),
    "a number": (3, "kvweave: expected an object, got 3"),
    "a list": ([[0, 4]], "kvweave: expected an object"),
    "other field": ({"spans": []}, "kvweave: expected the fields segments.*got 'spans'"),
    "no list": ({"segments": "0-4"}, r"kvweave.segments: expected a list of \[start, end\]"),
    "one number": ({"segments": [[0, 4], [5]]}, r"kvweave.segments\[1\]: expected \[start, end\]"),
    "float": ({"segments": [[0, 4.0]]}, r"segments\[0\]: expected \[start, end\]"),
    "bool": ({"segments": [[False, 4]]}, r"segments\[0\]: expected \[start, end\]"),
    "negative": ({"segments": [[-1, 4]]}, r"segments\[0\]: expected 0 <= start < end, got -1, 4"),
    "empty": ({"segments": [[4, 4]]}, "expected 0 <= start < end, got 4, 4"),
    "name": ({"segments": [[0, 4, 5]]}, "expected a name that is a string, got 5"),
    "overlap": ({"segments": [[0, 4], [3, 9]]}, r"segments\[1\]: expected segments in order"),
    "too many": ({"segments": [[0, 1]] * (MOST_SEGMENTS + 1)}, "segments: expected up to 4096"),
    "namespace": ({"namespace": None}, "kvweave.namespace: expected a string.*got None"),
    "surrogate": ('{"namespace": "\\ud800"}', "kvweave.namespace: expected a string"),
    "long": ({"namespace": "a" * 257}, "kvweave.namespace: expected a string of up to 256"),
    "policy": ({"policy": "blend"}, "kvweave.policy: expected one of full, .*, weave, got 'blend'"),
    "deep": ("[" * 100_000, "kvweave: expected a JSON object"),
    "setting": ({"policy": {"name": "sparsex", "k": 1}}, "expected boundary, .* got k of sparsex"),
    "of naive": (
        {"policy": {"name": "naive", "tail": 1}},
        "delta_rope of naive, got tail of naive",
    ),
    "of full": ({"policy": {"name": "full", "tail": 1}}, "no settings of full, got tail of full"),
    "of a part": (
        {"policy": {"name": "weave", "foresight": {"shares": 0.1}}},
        "expected foresight.share, .* of weave, got foresight.shares of weave",
    ),
    "a part": ({"policy": {"name": "weave", "redknot": 1}}, "of weave, got redknot of weave"),
    "a path that is none": ({"policy": {"name": "naive", 3: 1}}, "got 3 of naive"),
    "no name": ({"policy": {"tail": 1}}, "kvweave.policy: expected one of full, .*got None"),
    "kind": ({"policy": {"name": "sparsex", "tail": 1.5}}, "policy.tail: expected a whole number"),
    "flag": ({"policy": {"name": "naive", "delta_rope": 1}}, "delta_rope: expected true or false"),
    "true": ({"policy": {"name": "epic", "first": True}}, "policy.first: expected a whole number"),
    "huge": ({"policy": {"name": "epic", "first": 2**40}}, "policy.first: expected a whole number"),
    "no number": ({"policy": {"name": "prophet", "share": math.nan}}, "share: expected a number"),
    "word": ({"policy": {"name": "infoflow", "score": "max"}}, "expected norm or sum or value"),
    "layers": (
        {"policy": {"name": "infoflow", "layers": [1.5]}},
        "layers: expected a whole number",
    ),
    "layer": ({"policy": {"name": "infoflow", "layers": 3}}, "expected a list of whole numbers or"),
    "range": ({"policy": {"name": "sparsex", "top_k": 1.5}}, "policy: expected settings in range"),
    "list policy": ({"policy": ["naive"]}, "kvweave.policy: expected one of"),
    "discover": ({"discover": 1}, "kvweave.discover: expected true or false, got 1"),
}


@pytest.mark.parametrize(("given_", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_field(given_: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(given_)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
FIELD = st.sampled_from(["segments", "namespace", "policy", "discover"])


@given(st.dictionaries(FIELD, JSON) | JSON)
def test_anything_else_is_refused_by_type(value: Any) -> None:
    """Hostile input never raises what the server would take for its own fault."""
    refused = "kvweave"
    try:
        markers = parse(value)
    except InvalidArgument as error:
        refused = str(error)
    else:
        assert all(0 <= span.start < span.end for span in markers.segments)
    assert refused.startswith("kvweave")


def test_settings_of_the_policy() -> None:
    given = {"policy": {"name": "sparsex", "boundary": 0, "top_k": 0.05}}
    assert parse(given).recovery() == SparseX(boundary=0, top_k=0.05)
    assert parse({"policy": {"name": "foresight"}}) == parse({})
    assert parse({}).recovery() == Foresight()
    assert parse({"policy": "naive"}).recovery() == Naive()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_something_to_act_on(name: str) -> None:
    for alone in ({"policy": name}, {"policy": {"name": name}, "segments": [], "namespace": "a"}):
        with pytest.raises(InvalidArgument, match=rf"segments or discover .*got {name} alone"):
            parse(alone).check_acts()
    for more in ({"segments": [[3, 9]]}, {"discover": True}):
        parse({"policy": name, **more}).check_acts()
    # Whose prompt it is may be said of any.
    for plain in ({}, {"namespace": "acme"}, {"segments": []}, {"discover": False}):
        parse(plain).check_acts()
    assert parse({"policy": DEFAULT_POLICY}) == parse({})


def test_which_policies_name_layers() -> None:
    for policy in ({"name": "sparsex", "boundary": 0}, {"name": "infoflow", "layers": [3]}):
        assert parse({"policy": policy}).names_layers
    for policy in ("sparsex", {"name": "sparsex", "boundary": None}, {"name": "epic", "first": 3}):
        assert not parse({"policy": policy}).names_layers


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_may_be_asked_for(name: str) -> None:
    for policy in (name, {"name": name}):
        assert parse({"policy": policy}).recovery() == policy_of(name)
    marked = parse({"policy": name, "segments": [[3, 9]]})
    assert marked.approximates == (name not in ("full", "prefix"))


@pytest.mark.parametrize(
    "policy",
    [
        Foresight(share=0.2, draft=0),
        Foresight(mass=0.5),
        InfoFlow(layers=(1, 2), score="value"),
        Naive(delta_rope=False),
        RedKnot(repair=3, restore_edge=1),
        Weave(Foresight(count=9), RedKnot(ffn_share=0.25)),
    ],
)
def test_settings_are_those_of_any_policy(policy: Any) -> None:
    """As JSON has them, with a part's settings as an object or behind a dot."""
    name = policy.name.removesuffix("-no-rope")
    given = {"name": name, **asdict(policy)}
    dotted = {"name": name, **dict(flat(asdict(policy)))}
    for one in (given, json.loads(json.dumps(given)), dotted):
        marked = parse({"policy": one})
        assert marked.recovery() == policy
        assert hash(marked) == hash(parse({"policy": given}))


def flat(settings: dict[str, Any]) -> Any:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", found) for inner, found in value.items())
        else:
            yield key, value


def test_spans_beyond_the_prompt_are_refused() -> None:
    PARSED.check_within(20)
    with pytest.raises(InvalidArgument, match=r"segment 'handbook': expected an end <= 19.*got 20"):
        PARSED.check_within(19)
    with pytest.raises(InvalidArgument, match=r"segments\[0\]: expected an end <= 8"):
        PARSED.check_within(8)


def test_how_many_tokens_are_exact_for_certain() -> None:
    assert parse({"segments": [[3, 9]]}).exact_tokens(50) == 3
    assert parse({"segments": [[3, 9]], "policy": "full"}).exact_tokens(50) == 50
    assert parse({"segments": [[3, 9]], "discover": True}).exact_tokens(50) == 0
    assert parse({}).exact_tokens(50) == 50


def request_of(**changes: Any) -> Any:
    """What the scheduler knows of a request with one marked segment."""
    params = SimpleNamespace(extra_args={"kvweave": {"segments": [[0, 4]]}}, prompt_logprobs=None)
    known = {"sampling_params": params, "prompt_token_ids": [1] * 8, "num_prompt_tokens": 8}
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    return SimpleNamespace(**{**known, **plain, **changes})


IDLE = SimpleNamespace(extra_args={"kvweave": {"policy": "naive"}}, prompt_logprobs=None)
LOGPROBS = SimpleNamespace(extra_args={"kvweave": {"discover": True}}, prompt_logprobs=1)
MALFORMED = SimpleNamespace(extra_args={"kvweave": {"segments": [[4, 0]]}}, prompt_logprobs=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"resumable": True}, "kvweave: expected a prompt of tokens alone, got inputs that go on"),
        ({"lora_request": "an adapter"}, "got an adapter$"),
        ({"prompt_embeds": "embeddings"}, "got embeddings$"),
        ({"mm_features": ["an image"]}, "got images or the like$"),
        ({"prompt_token_ids": None}, "got embeddings$"),
        ({"num_prompt_tokens": 3}, r"segments\[0\]: expected an end <= 3, the prompt's tokens"),
        ({"sampling_params": LOGPROBS}, "prompt_logprobs: expected none beside segments .* got 1$"),
        ({"sampling_params": IDLE}, "policy: expected segments or discover beside it, got naive"),
        ({"sampling_params": MALFORMED}, "expected 0 <= start < end, got 4, 0"),
    ],
)
def test_requests_whose_rows_are_all_computed(changes: dict[str, Any], says: str) -> None:
    assert eligible_markers(request_of()) == checked_markers(request_of()) is not None
    assert eligible_markers(request_of(**changes)) is None
    with pytest.raises(InvalidArgument, match=says):
        checked_markers(request_of(**changes))


def test_requests_without_markers_say_nothing_of_them() -> None:
    plain = SimpleNamespace(extra_args=None, prompt_logprobs=1)
    for params in (None, plain):
        assert checked_markers(request_of(sampling_params=params, lora_request="one")) is None
