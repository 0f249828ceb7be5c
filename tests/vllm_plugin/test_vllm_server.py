"""Marks of a chat, where marked texts stand, and the middleware before a double of a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.server import (
    marks,
    text_ranges,
)
from kvweave.adapters.vllm.server.replies import BadRequest
from vllm_app import EPHEMERAL, SAID, Server, chat, part, told


def test_marks_are_taken_out() -> None:
    marked = marks.read(
        chat(
            part("one", cache_control=EPHEMERAL),
            part("two"),
            part("three", kvweave={"name": "c", "namespace": "acme"}),
            {"type": "image_url", "image_url": {"url": "u"}},
            part("four", cache_control=None),
            kvweave={"policy": "naive"},
        )
    )
    content = marked.body["messages"][0]["content"]
    assert content[:3] == [part("one"), part("two"), part("three")]
    assert content[4] == part("four")
    assert [(m.where, m.text, m.name) for m in marked.marks] == [
        ("messages[0].content[0]", "one", None),
        ("messages[0].content[2]", "three", "c"),
    ]
    assert marked.whole == {"policy": "naive", "namespace": "acme"}
    sent = marked.arguments([[3, 9], [12, 20, "c"]])
    assert "kvweave" not in sent
    assert json.loads(sent["vllm_xargs"]["kvweave"]) == {
        "policy": "naive",
        "namespace": "acme",
        "segments": [[3, 9], [12, 20, "c"]],
    }
    changed = marked.with_texts(["x", "y"])["messages"][0]["content"]
    assert [p.get("text") for p in changed[:3]] == ["x", "two", "y"]
    assert content[0]["text"] == "one"


@pytest.mark.parametrize(
    "body",
    [
        chat(part()),
        {"model": "m", "messages": [{"role": "user", "content": "plain"}]},
        {"messages": "none"},
        {},
    ],
)
def test_who_marks_nothing_sends_what_he_sent(body: dict[str, Any]) -> None:
    marked = marks.read(body)
    assert marked.body == body
    assert not marked.asks


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "arguments are no object": (
        chat(part(), kvweave={"namespace": "a"}, vllm_xargs=[1]),
        "vllm_xargs",
        "an object",
    ),
    "control is no object": (
        chat(part(cache_control="yes")),
        "messages[0].content[0].cache_control",
        "an object",
    ),
    "another type": (
        chat(part(cache_control={"type": "forever"})),
        "messages[0].content[0].cache_control.type",
        "'forever'",
    ),
    "another ttl": (
        chat(part(cache_control={**EPHEMERAL, "ttl": 5})),
        "messages[0].content[0].cache_control.ttl",
        "5m, 1h",
    ),
    "unknown in control": (
        chat(part(cache_control={**EPHEMERAL, "x": 1})),
        "messages[0].content[0].cache_control.x",
        "the fields type and ttl",
    ),
    "no text": (
        chat(part("ok"), part(" \n", cache_control=EPHEMERAL)),
        "messages[0].content[1].text",
        "some text",
    ),
    "an image": (
        chat({"type": "image_url", "cache_control": EPHEMERAL}),
        "messages[0].content[0].type",
        '"text"',
    ),
    "section is no object": (
        chat(part(kvweave=[1])),
        "messages[0].content[0].kvweave",
        "an object",
    ),
    "unknown in section": (
        chat(part(kvweave={"segments": []})),
        "messages[0].content[0].kvweave.segments",
        "the fields name, namespace",
    ),
    "a name that is a number": (
        chat(part(kvweave={"name": 3})),
        "messages[0].content[0].kvweave.name",
        "a string",
    ),
    "two namespaces": (
        chat(part(kvweave={"namespace": "a"}), part(kvweave={"namespace": "b"})),
        "messages[0].content[1].kvweave.namespace",
        "'a', as elsewhere",
    ),
    "a policy that is none": (
        chat(part(), kvweave={"policy": "hope"}),
        "kvweave.policy",
        "one of",
    ),
    "a discover that is a word": (
        chat(part(kvweave={"discover": "no"})),
        "messages[0].content[0].kvweave.discover",
        "true or false",
    ),
    "said twice": (
        chat(part(cache_control=EPHEMERAL), vllm_xargs={"kvweave": "{}"}),
        "vllm_xargs.kvweave",
        "no marks beside it",
    ),
}


@pytest.mark.parametrize(("body", "where", "says"), REFUSED.values(), ids=REFUSED)
def test_malformed_marks_are_refused(body: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        marks.read(body)
    assert caught.value.where == where
    assert str(caught.value).startswith(f"{where}: expected ")
    assert says in str(caught.value)


texts = st.text(alphabet="ab \n<é", min_size=1, max_size=6).filter(str.strip)
pieces = st.text(alphabet="ab \n<|>", max_size=6)


@given(st.lists(st.tuples(texts, pieces), max_size=5), pieces, st.booleans())
def test_texts_are_found_between_what_the_template_adds(parts, start: str, trims: bool) -> None:
    stand_ins = list(marks.sentinels(len(parts), "0" * 8))
    shown = [text.strip() if trims else text for text, _ in parts]
    prompt = start + "".join(t + p for t, (_, p) in zip(shown, parts, strict=True))
    template = start + "".join(s + p for s, (_, p) in zip(stand_ins, parts, strict=True))
    given_texts = [text for text, _ in parts]
    found = text_ranges.character_ranges(prompt, template, stand_ins, given_texts)
    assert len(found) == len(parts)
    at = 0
    for (begin, end), text in zip(found, given_texts, strict=True):
        assert at <= begin
        assert prompt[begin:end].strip() == text.strip()
        at = end


def test_a_text_that_the_template_changes_is_named() -> None:
    stand_ins = list(marks.sentinels(2, "0" * 8))
    template = f"<{stand_ins[0]}|{stand_ins[1]}>"
    with pytest.raises(ValueError, match="1"):
        text_ranges.character_ranges("<one|TWO>", template, stand_ins, ["one", "two"])
    with pytest.raises(ValueError, match="0"):
        text_ranges.character_ranges("<one|two>", f"<{stand_ins[1]}>", stand_ins, ["one", "two"])


def test_tokens_wholly_inside() -> None:
    # A beginning without text; "The", " cat" whose blank is left out, a letter of two bytes, "!".
    offsets = [(0, 0), (0, 3), (4, 7), (7, 8), (7, 8), (8, 9)]
    assert text_ranges.token_range(offsets, (0, 9)) == (1, 6)
    assert text_ranges.token_range(offsets, (0, 7)) == (1, 3)
    # " cat" starts with a blank that is outside.
    assert text_ranges.token_range(offsets, (4, 9)) == (3, 6)
    assert text_ranges.token_range(offsets, (3, 8)) == (2, 5)
    assert text_ranges.token_range(offsets, (8, 9)) == (5, 6)
    assert text_ranges.token_range(offsets, (1, 3)) is None
    assert text_ranges.token_range([], (0, 3)) is None


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 30), st.integers(0, 12))
def test_tokens_are_those_whose_characters_are_inside(sizes, start: int, length: int) -> None:
    offsets, at = [], 0
    for size in sizes:
        offsets.append((at, at + size))
        at += size
    inside = [
        number
        for number, (a, b) in enumerate(offsets)
        if a < b and start <= a and b <= start + length
    ]
    found = text_ranges.token_range(offsets, (start, start + length))
    assert found == ((inside[0], inside[-1] + 1) if inside else None)


def test_other_requests_pass() -> None:
    server = Server()
    body = chat(part("cache_control is a word"), kvweave_like=1)
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200
    deep = b"[" * 100_000 + b'"kvweave"'
    assert server.ask("POST", "/v1/chat/completions", deep)[0] == 200
    assert server.asked == [json.dumps(body).encode(), deep]


def test_what_holds_for_a_request_needs_no_marks() -> None:
    server = Server()
    server.ask("POST", "/v1/chat/completions", chat(part(), kvweave={"discover": True}))
    (asked,) = server.asked
    sent = json.loads(asked)["vllm_xargs"]["kvweave"]
    assert json.loads(sent) == {"discover": True, "segments": []}
    assert b"kvweave-warning" not in server.headers


USAGE = {"prompt_tokens": 90, "prompt_tokens_details": {"audio_tokens": 1}}


@pytest.mark.parametrize("cut", [0, 1, 30, 100])
@pytest.mark.parametrize("others", [{}, {"remote": 1}])
def test_a_response_says_what_became_of_its_prompt(cut: int, others: dict[str, Any]) -> None:
    given = {"usage": USAGE, "kv_transfer_params": {"kvweave": SAID, **others}}
    data = json.dumps(given).encode()
    headers, body = told(b"application/json; charset=utf-8", data[:cut], data[cut:], b"")
    assert json.loads(body) == {
        "kvweave": SAID,
        "kv_transfer_params": others or None,
        "usage": {**USAGE, "prompt_tokens_details": {"audio_tokens": 1, "cached_tokens": 56}},
    }
    assert int(headers[b"content-length"]) == len(body)


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_stream_says_it_where_it_ends(size: int) -> None:
    events = [
        {"choices": [{"delta": {"content": "a\n\n b"}}], "usage": None},
        {"choices": [{"finish_reason": "stop"}], "kv_transfer_params": {"kvweave": SAID}},
        {"choices": [], "usage": {"prompt_tokens": 90}},
    ]
    lines = [f"data: {json.dumps(event)}" for event in events] + [": a comment", "data: [DONE]"]
    data = "".join(f"{line}\n\n" for line in lines).encode()
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    _, body = told(b"text/event-stream", *parts)
    first, last, usage, comment, done, rest = body.decode().split("\n\n")
    assert (first, comment, done, rest) == (lines[0], *lines[3:], "")
    assert json.loads(last.removeprefix("data: "))["kvweave"] == SAID
    details = json.loads(usage.removeprefix("data: "))["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 56}


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"nothing", b'{"kv_transfer_params": 3}'])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream", b"text/plain"])
def test_responses_that_say_nothing_pass(kind: bytes, data: bytes) -> None:
    headers, body = told(kind, data)
    assert body == data
    assert int(headers[b"content-length"]) == len(data)


def test_refusals_have_openais_shape() -> None:
    server = Server()
    status, body = server.ask("POST", "/v1/chat/completions", chat(part(cache_control=7)))
    where = "messages[0].content[0].cache_control"
    assert (status, server.asked) == (400, [])
    assert body["error"]["param"] == where
    assert body["error"]["code"] == 400
    assert body["error"]["message"].startswith(f"{where}: expected an object")


def test_the_knowledge_base() -> None:
    server = Server()
    document = {"name": "a/b", "text": "hi", "namespace": "acme"}
    assert server.ask("POST", "/kvweave/knowledge", document) == (200, {"done": True})
    server.reply = {"value": []}
    assert server.ask("GET", "/kvweave/knowledge?namespace=acme")[1]["data"] == []
    assert server.ask("DELETE", "/kvweave/knowledge/a%2Fb?namespace=acme")[1]["deleted"] is True
    assert server.calls == [
        ("kvweave_insert", ("a/b", [104, 105], "acme")),
        ("kvweave_list", ("acme",)),
        ("kvweave_delete", ("a/b", "acme")),
    ]
    for error, status in (
        ("UnknownSegment", 404),
        ("PoolFull", 507),
        ("OutOfMemory", 507),
        ("Unsupported", 501),
        ("DeviceUnavailable", 503),
        ("StoreUnavailable", 503),
    ):
        server.reply = {"error": error, "text": "why"}
        got, body = server.ask("DELETE", "/kvweave/knowledge/x")
        assert (got, body["error"]["message"], body["error"]["code"]) == (status, "why", status)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (b"{", "body"),
        (b"[" * 100_000, "body"),
        ([], "body"),
        ({"text": "t"}, "name"),
        ({"name": "", "text": "t"}, "name"),
        ({"name": "n"}, "text"),
        ({"name": "n", "text": "t", "tokens": [1]}, "text"),
        ({"name": "n", "text": 4}, "text"),
        ({"name": "n", "tokens": [True]}, "tokens"),
        ({"name": "n", "tokens": "1"}, "tokens"),
        ({"name": "n", "tokens": []}, "tokens"),
        ({"name": "n", "tokens": [1] * 9}, "tokens"),
        ({"name": "n", "tokens": [-1]}, "tokens"),
        ({"name": "n", "tokens": [256]}, "tokens"),
        ({"name": "n", "tokens": [2**64]}, "tokens"),
        ({"name": "n", "text": "123456789"}, "tokens"),
        ({"name": "n", "text": "1" * 17}, "text"),
        ({"name": "n", "text": "\ud800"}, "text"),
        ({"name": "\ud800", "tokens": [1]}, "name"),
        ({"name": "n" * 257, "tokens": [1]}, "name"),
        ({"name": "n", "tokens": [1], "namespace": "\udfff"}, "namespace"),
        ({"name": "n", "tokens": [1], "namespace": 4}, "namespace"),
        ({"name": "n", "tokens": [1], "more": 4}, "more"),
    ],
)
def test_documents_that_are_none_are_refused(document: Any, field: str) -> None:
    server = Server()
    status, body = server.ask("POST", "/kvweave/knowledge", document)
    assert (status, body["error"]["param"], server.calls) == (400, field, [])


def test_an_engine_that_sleeps_is_asked_nothing() -> None:
    """Its memory is gone; nor one that is paused, whose weights may be others in a moment."""
    server = Server()
    server.sleeps = True
    for method, path, value in (
        ("GET", "", None),
        ("POST", "", {"name": "n", "tokens": [1]}),
        ("DELETE", "/n", None),
    ):
        status, body = server.ask(method, f"/kvweave/knowledge{path}", value)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        assert "expected an engine that is awake" in body["error"]["message"]
    assert server.calls == []


def test_an_engine_without_the_routes_says_so() -> None:
    server = Server()
    server.state.vllm_config.parallel_config.worker_extension_cls = ""
    status, body = server.ask("GET", "/kvweave/knowledge")
    assert (status, server.calls) == (501, [])
    assert "--worker-extension-cls" in body["error"]["message"]


def test_keys_of_the_server_hold_here_too() -> None:
    server = Server(key="secret")
    assert server.ask("GET", "/kvweave/knowledge", token="guess")[0] == 401
    assert server.calls == []
    # vLLM refuses a chat itself: without the key nothing is read into it.
    malformed = b'{"kvweave": 1}'
    assert server.ask("POST", "/v1/chat/completions", malformed)[0] == 200
    assert server.ask("POST", "/v1/chat/completions", malformed, token="secret")[0] == 400
    assert server.asked == [malformed]
    assert server.ask("GET", "/kvweave/knowledge", token="secret")[0] == 200


def test_other_methods_are_refused() -> None:
    for method, path in (("PUT", ""), ("POST", "/x"), ("DELETE", ""), ("GET", "/x")):
        assert Server().ask(method, f"/kvweave/knowledge{path}", {})[0] == 405
    assert Server().ask("GET", "/kvweave/knowledge?name=x")[1]["error"]["param"] == "name"
