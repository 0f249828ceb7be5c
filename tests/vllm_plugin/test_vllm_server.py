"""Marks of a chat, where marked texts stand, and the middleware before a double of a server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.segments.markers import MarkedSegment, Markers, markers_of
from kvweave.adapters.vllm.server import (
    SegmentMiddleware,
    chat_apis,
    knowledge,
    marks,
    text_ranges,
)
from kvweave.adapters.vllm.server.outcomes import Told
from kvweave.adapters.vllm.server.replies import BadRequest

EPHEMERAL = {"type": "ephemeral"}


def part(text: str = "a text", **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def chat(*parts: Any, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **others}


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


class Server:
    """What stands behind the middleware: keeps what it is asked, and has an engine that replies."""

    def __init__(self, key: str | None = None) -> None:
        self.asked: list[bytes] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.reply: dict[str, Any] = {"value": {"done": True}}
        self.openapi_url = "/openapi.json"
        self.schema: dict[str, Any] = {"paths": {"/v1/models": {}}}
        self.headers: dict[bytes, bytes] = {}
        tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens: list(text.encode()), max_chars_per_token=2
        )
        layers = SimpleNamespace(num_hidden_layers=30)
        model = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 256, hf_text_config=layers)
        parallel = SimpleNamespace(worker_extension_cls="KnowledgeBaseWorker")
        renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        args = SimpleNamespace(api_key=None if key is None else [key])
        self.state = SimpleNamespace(
            args=args,
            engine_client=self,
            online_renderer=SimpleNamespace(renderer=renderer),
            vllm_config=SimpleNamespace(model_config=model, parallel_config=parallel),
        )

    def openapi(self) -> dict[str, Any]:
        return self.schema

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        return [self.reply]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message: dict[str, Any] = {"more_body": True}
        data = b""
        while message.get("more_body"):
            message = await receive()
            data += message["body"]
        assert int(dict(scope["headers"])[b"content-length"]) == len(data)
        self.asked.append(data)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(
        self, method: str, path: str, value: Any = None, token: str = ""
    ) -> tuple[int, dict[str, Any]]:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "app": self,
            "headers": [
                (b"content-length", b"%d" % len(data)),
                (b"authorization", b"Bearer " + token.encode()),
            ],
        }
        sent: list[dict[str, Any]] = []
        halves = iter(
            [
                {"type": "http.request", "body": data[:3], "more_body": True},
                {"type": "http.request", "body": data[3:]},
            ]
        )

        async def receive() -> dict[str, Any]:
            return next(halves)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(SegmentMiddleware(self)(scope, receive, send))
        self.headers = dict(sent[0]["headers"])
        return sent[0]["status"], json.loads(sent[1]["body"])


def test_other_requests_pass() -> None:
    server = Server()
    body = chat(part("cache_control is a word"), kvweave_like=1)
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert server.ask("POST", "/v1/completions", {"kvweave": 1})[0] == 200
    deep = b"[" * 100_000 + b'"kvweave"'
    assert server.ask("POST", "/v1/chat/completions", deep)[0] == 200
    assert server.asked == [json.dumps(body).encode(), b'{"kvweave": 1}', deep]


def test_what_holds_for_a_request_needs_no_marks() -> None:
    server = Server()
    server.ask("POST", "/v1/chat/completions", chat(part(), kvweave={"discover": True}))
    (asked,) = server.asked
    sent = json.loads(asked)["vllm_xargs"]["kvweave"]
    assert json.loads(sent) == {"discover": True, "segments": []}
    assert b"kvweave-warning" not in server.headers


def test_a_policy_without_marks_is_warned_of() -> None:
    server = Server()
    body = chat(part(), kvweave={"policy": "naive"})
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert b"no effect" in server.headers[b"kvweave-warning"]


def test_layers_that_the_model_has_not_are_refused() -> None:
    server = Server()
    for policy in (
        {"name": "sparsex", "boundary": 99},
        {"name": "sparsex", "boundary": 31},
        {"name": "infoflow", "layers": [3, 30]},
    ):
        body = chat(part(), kvweave={"policy": policy})
        status, said = server.ask("POST", "/v1/chat/completions", body)
        assert (status, "expected layers of 30" in said["error"]["message"]) == (400, True)
        counted = {"prompt": "p", "vllm_xargs": {"kvweave": json.dumps({"policy": policy})}}
        assert server.ask("POST", "/v1/completions", counted)[0] == 400
    assert server.asked == []
    for policy in ({"name": "sparsex", "boundary": 30}, {"name": "infoflow", "layers": [29]}):
        body = chat(part(), kvweave={"policy": policy, "discover": True})
        assert server.ask("POST", "/v1/chat/completions", body)[0] == 200


def test_arguments_that_are_none_are_refused_before_the_engine() -> None:
    server = Server()
    for text in ("{", "[]", '{"segments": [[4, 9], [8, 12]]}', '{"policy": "hope"}', 7):
        body = {"prompt": [1, 2], "vllm_xargs": {"kvweave": text}}
        for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
            assert server.ask("POST", path, body)[0] == 400
    assert server.asked == []


def message(*parts: Any, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **others}


def test_marks_of_anthropics_messages() -> None:
    system = [part("be brief"), part("the handbook", cache_control=EPHEMERAL)]
    result = {"type": "tool_result", "content": "42", "cache_control": EPHEMERAL}
    header = part("x-anthropic-billing-header: 1", cache_control=EPHEMERAL)
    given = message(header, part("a", kvweave={"name": "n"}), result, system=system)
    marked = marks.read(given, chat_apis.MESSAGES)
    assert [(m.where, m.text, m.name) for m in marked.marks] == [
        ("system[1]", "the handbook", None),
        ("messages[0].content[1]", "a", "n"),
    ]
    assert "cache_control" not in json.dumps(marked.body)
    assert "kvweave" not in json.dumps(marked.body)
    changed = marked.with_texts(["x", "y"])
    assert [block["text"] for block in changed["system"]] == ["be brief", "x"]
    assert changed["messages"][0]["content"][1]["text"] == "y"
    assert given["system"][1]["text"] == "the handbook"
    carried = marked.arguments([[1, 2]], "kv_transfer_params")["kv_transfer_params"]
    assert markers_of({"kv_transfer_params": carried}) == Markers((MarkedSegment(1, 2),))
    with pytest.raises(BadRequest) as caught:
        marks.read(message({**result, "kvweave": {"name": "n"}}), chat_apis.MESSAGES)
    assert caught.value.where == "messages[0].content[0].type"


def test_marks_of_responses() -> None:
    content = [{"type": "input_text", "text": "a", "cache_control": EPHEMERAL}]
    given = {"model": "m", "input": [{"role": "user", "content": content}, {"type": "other"}]}
    marked = marks.read(given, chat_apis.RESPONSES)
    assert [(m.where, m.text) for m in marked.marks] == [("input[0].content[0]", "a")]
    assert marked.body["input"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert not marks.read({"model": "m", "input": "a"}, chat_apis.RESPONSES).asks
    with pytest.raises(BadRequest, match='"input_text"'):
        marks.read(
            {"input": [{"role": "user", "content": [part(cache_control=EPHEMERAL)]}]},
            chat_apis.RESPONSES,
        )


steps = st.lists(st.sampled_from(["a", "b", 0, 1]), max_size=3).map(tuple)


@given(steps)
def test_one_place_is_replaced_and_nothing_else(way: tuple[str | int, ...]) -> None:
    def grown(depth: int, marker: Any) -> Any:
        if depth == 0:
            return marker
        inner = grown(depth - 1, marker)
        step = way[len(way) - depth]
        return [inner, inner] if isinstance(step, int) else {"a": inner, "b": inner}

    value = grown(len(way), "old")
    changed = chat_apis.replaced(value, way, "new")
    assert chat_apis.at(changed, way) == "new"
    assert value == grown(len(way), "old")
    assert json.dumps(changed).count("new") == 1
    assert json.dumps(changed).count("old") == json.dumps(value).count("old") - 1


def test_the_schema_has_the_routes() -> None:
    server = Server()
    assert server.ask("GET", "/openapi.json", {})[0] == 200
    paths = server.schema["paths"]
    assert paths.keys() == {"/v1/models", "/kvweave/knowledge", "/kvweave/knowledge/{name}"}
    statuses = set(paths["/kvweave/knowledge"]["post"]["responses"])
    assert statuses == {"200", "400", "401", "413", "501", "507"}
    fields = paths["/kvweave/knowledge"]["post"]["requestBody"]["content"]["application/json"]
    assert set(fields["schema"]["properties"]) == set(knowledge.FIELDS)


def test_a_listing_is_of_one_namespace() -> None:
    server = Server()
    server.reply = {"value": []}
    server.ask("GET", "/kvweave/knowledge")
    assert server.calls == [("kvweave_list", ("",))]


def test_metrics_hear_of_documents() -> None:
    server, heard = Server(), []
    metrics = SimpleNamespace(observe=lambda report, engine: heard.append((report, engine)))
    loggers = [SimpleNamespace(kv_connector_prom=metrics), SimpleNamespace()]
    vars(server)["logger_manager"] = SimpleNamespace(stat_loggers=loggers)
    server.ask("POST", "/kvweave/knowledge", {"name": "a", "text": "hi"})
    server.ask("DELETE", "/kvweave/knowledge/a")
    assert heard == [({"done": True}, 0)] * 2
    methods = [method for method, _ in server.calls]
    assert methods == ["kvweave_insert", "kvweave_report", "kvweave_delete", "kvweave_report"]


ANTHROPIC = {"input_tokens": 74, "cache_read_input_tokens": 16, "output_tokens": 3}


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (
            {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 16}},
            {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 56}},
        ),
        (ANTHROPIC, {**ANTHROPIC, "input_tokens": 34, "cache_read_input_tokens": 56}),
        (
            {"input_tokens": 90, "output_tokens": 3},
            {"input_tokens": 34, "cache_read_input_tokens": 56, "output_tokens": 3},
        ),
    ],
)
def test_other_routes_count_cached_tokens_too(usage: Any, counted: Any) -> None:
    data = json.dumps({"usage": usage, "kv_transfer_params": {"kvweave": SAID}}).encode()
    assert json.loads(told(b"application/json", data)[1])["usage"] == counted


def test_a_named_event_with_a_whole_response_says_it() -> None:
    usage = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 0}}
    response = {"usage": usage, "kv_transfer_params": {"kvweave": SAID}}
    done = {"type": "response.completed", "response": response}
    event = f"event: response.completed\ndata: {json.dumps(done)}\n\n"
    _, body = told(b"text/event-stream", event.encode())
    name, _, data = body.decode().strip().partition("\n")
    assert name == "event: response.completed"
    said = json.loads(data.removeprefix("data: "))["response"]
    assert (said["kvweave"], said["kv_transfer_params"]) == (SAID, None)
    assert said["usage"]["input_tokens_details"] == {"cached_tokens": 56}


SAID = {"tokens": 90, "cached": 16, "found": {"request": 64}, "reused": 48, "recomputed": 8}
USAGE = {"prompt_tokens": 90, "prompt_tokens_details": {"audio_tokens": 1}}


def told(kind: bytes, *parts: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body of a response that is sent in parts."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def respond() -> None:
        through = Told(send)
        length = b"%d" % sum(map(len, parts))
        headers = [(b"content-type", kind), (b"content-length", length)]
        await through({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await through({"type": "http.response.body", "body": part, "more_body": True})
        await through({"type": "http.response.body", "body": parts[-1]})

    asyncio.run(respond())
    start, *bodies = sent
    assert start["type"] == "http.response.start"
    assert not bodies[-1].get("more_body", False)
    return dict(start["headers"]), b"".join(message["body"] for message in bodies)


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
