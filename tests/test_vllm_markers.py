"""Markers of segments as requests carry them. Needs no vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.segments.accepted import accepted
from kvweave.adapters.vllm.segments.markers import (
    MOST_SEGMENTS,
    POLICIES,
    Markers,
    Span,
    markers_of,
    parse,
)
from kvweave.errors import InvalidArgument
from kvweave.policies import POLICIES as KNOWN
from kvweave.policies import Naive, SparseX

WHOLE: dict[str, Any] = {
    "segments": [[3, 9], [9, 20, "handbook"]],
    "namespace": "acme",
    "policy": "naive",
    "discover": True,
}
PARSED = Markers((Span(3, 9), Span(9, 20, "handbook")), "acme", "naive", True)


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
    "policy": ({"policy": "cacheblend"}, "kvweave.policy: expected one of sparsex, naive, full"),
    "two passes": (
        {"policy": "foresight"},
        "one of sparsex, naive, full, got 'foresight', which goes through the layers up to 2 times",
    ),
    "set two passes": ({"policy": {"name": "weave", "x": 1}}, "got 'weave', which goes through"),
    "other probe": ({"policy": "redknot"}, "full, got 'redknot', whose plans are not carried out"),
    "deep": ("[" * 100_000, "kvweave: expected a JSON object"),
    "setting": ({"policy": {"name": "sparsex", "k": 1}}, "expected boundary, .* got k of sparsex"),
    "of naive": ({"policy": {"name": "naive", "tail": 1}}, "got tail of naive"),
    "no name": ({"policy": {"tail": 1}}, "kvweave.policy: expected one of sparsex, .*got None"),
    "kind": ({"policy": {"name": "sparsex", "tail": 1.5}}, "policy.tail: expected a number"),
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
    assert parse({"policy": {"name": "sparsex"}}) == parse({})
    assert parse({}).recovery() == SparseX()
    assert parse({"policy": "naive"}).recovery() == Naive()


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_engine_cannot_carry_out_is_refused(name: str) -> None:
    if name in POLICIES:
        assert parse({"policy": name}).recovery().passes == 1
        return
    for policy in (name, {"name": name}):
        with pytest.raises(InvalidArgument, match="expected one of sparsex, naive, full, got "):
            parse({"policy": policy})


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


@pytest.mark.parametrize(
    "changes",
    [
        {"resumable": True},
        {"lora_request": "an adapter"},
        {"prompt_embeds": "embeddings"},
        {"mm_features": ["an image"]},
        {"prompt_token_ids": None},
        {"sampling_params": None},
        {"num_prompt_tokens": 3},
    ],
)
def test_requests_that_tokens_do_not_say_all_of_are_computed(changes: dict[str, Any]) -> None:
    assert accepted(request_of()) is not None
    assert accepted(request_of(**changes)) is None
