"""Marks on every route, arguments that are refused, and what else the middleware says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.adapters.vllm.segments.known_documents import document_hash
from kvweave.adapters.vllm.segments.markers import MarkedSegment, Markers, markers_of
from kvweave.adapters.vllm.server import chat_apis, documents, knowledge, marks, prompts
from kvweave.adapters.vllm.server.replies import BadRequest
from vllm_app import EPHEMERAL, SAID, Server, chat, part, told

steps = st.lists(st.sampled_from(["a", "b", 0, 1]), max_size=3).map(tuple)

ANTHROPIC = {"input_tokens": 74, "cache_read_input_tokens": 16, "output_tokens": 3}


def test_a_policy_without_marks_is_warned_of() -> None:
    server = Server()
    body = chat(part(), kvweave={"policy": "naive"})
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert b"no effect" in server.headers[b"kvweave-warning"]
    sent = json.loads(server.asked[0])["vllm_xargs"]["kvweave"]
    assert json.loads(sent) == {"segments": []}
    # By arguments too, whatever the route; of those that mark something nothing is said.
    for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
        for said, idle in (({"policy": "naive"}, True), ({"discover": True}, False)):
            server = Server()
            xargs = {"kvweave": json.dumps({**said, "namespace": "a"}), "other": 1}
            body = {"prompt": "p", "input": "p", "vllm_xargs": xargs}
            assert server.ask("POST", path, body)[0] == 200
            assert (b"kvweave-warning" in server.headers) is idle
            # The engine refuses a policy that has nothing to act on, and need not hear of it.
            sent = json.loads(server.asked[0])["vllm_xargs"]
            assert (json.loads(sent["kvweave"]), sent["other"]) == (
                {"namespace": "a"} if idle else {**said, "namespace": "a"},
                1,
            )


PLAIN = {"prompt_tokens": 90, "prompt_tokens_details": None}


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/completions", {"prompt": "p"}, True),
        ("/v1/completions", {"prompt": [5, 6]}, True),
        ("/v1/completions", {"prompt": [[5, 6]]}, True),
        # What is said is of the first of them alone, and the usage of all.
        ("/v1/completions", {"prompt": ["p", "q"]}, False),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, False),
        ("/v1/chat/completions", chat({"type": "text", "text": "p"}), True),
    ],
)
def test_reuse_of_counted_segments_is_counted_too(path: str, body: Any, *, counts: bool) -> None:
    """A client that gives spans of its own is told what others are."""
    server = Server()
    server.response = {"usage": PLAIN, "kv_transfer_params": {"kvweave": SAID}}
    xargs = {"kvweave": json.dumps({"discover": True})}
    status, said = server.ask("POST", path, {**body, "vllm_xargs": xargs})
    assert status == 200
    details = said["usage"]["prompt_tokens_details"]
    assert details == ({"cached_tokens": 56} if counts else None)
    assert ("kvweave" in said) is counts
    # Whoever says nothing is told what vLLM says.
    assert server.ask("POST", path, body)[1] == server.response


IDLE = {"kvweave": {"policy": "naive", "namespace": "a"}}


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions/render"])
def test_chats_are_read_where_they_are_rendered_and_where_sagemaker_has_them(path: str) -> None:
    server = Server()
    assert server.ask("POST", path, chat(part(), **IDLE))[0] == 200
    sent = json.loads(server.asked[0])
    assert "kvweave" not in sent
    assert json.loads(sent["vllm_xargs"]["kvweave"]) == {"segments": [], "namespace": "a"}
    assert b"no effect" in server.headers[b"kvweave-warning"]
    status, said = server.ask("POST", path, chat(part(kvweave={"name": 5})))
    assert (status, said["error"]["param"]) == (400, "messages[0].content[0].kvweave.name")


def test_what_is_only_rendered_says_nothing_of_reuse() -> None:
    xargs = {"kvweave": json.dumps({"discover": True})}
    for path, says in (("/invocations", True), ("/v1/completions/render", False)):
        server = Server()
        server.response = {"usage": PLAIN, "kv_transfer_params": {"kvweave": SAID}}
        said = server.ask("POST", path, {"prompt": "p", "vllm_xargs": xargs})[1]
        assert ("kvweave" in said) is says


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions/render"])
def test_completions_have_no_messages_to_mark_anywhere(path: str) -> None:
    status, said = Server().ask("POST", path, {"prompt": "p", "kvweave": {}})
    assert status == 400
    assert "kvweave: expected vllm_xargs.kvweave for prompts" in said["error"]["message"]


def test_a_route_without_keys_is_read_without_one() -> None:
    """vLLM wants none for `/invocations`: what is said there is heard, or refused."""
    marked = chat(part(kvweave={"name": 5}))
    server = Server(key="secret")
    assert server.ask("POST", "/invocations", marked)[0] == 400
    # Where it wants one it refuses the request itself.
    assert server.ask("POST", "/v1/chat/completions", marked)[0] == 200
    assert json.loads(server.asked[0]) == marked


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/cohere/v2/chat/render"])
def test_a_chat_whose_prompt_is_made_of_more_cannot_be_marked(path: str) -> None:
    for body, where in (
        (chat(part(cache_control=EPHEMERAL)), "messages[0].content[0]"),
        (chat(part(), **IDLE), "kvweave"),
    ):
        status, said = Server().ask("POST", path, body)
        assert (status, said["error"]["param"]) == (400, where)
        assert "/v1/chat/completions for a marked chat" in said["error"]["message"]
    server = Server()
    xargs = {"kvweave": json.dumps({"segments": [[0, 4]]})}
    assert server.ask("POST", path, chat(part(), vllm_xargs=xargs))[0] == 200
    assert json.loads(server.asked[0])["vllm_xargs"] == xargs


def test_completions_have_no_messages_to_mark() -> None:
    server = Server()
    status, said = server.ask("POST", "/v1/completions", {"prompt": "p", "kvweave": {}})
    assert status == 400
    assert "kvweave: expected vllm_xargs.kvweave for prompts" in said["error"]["message"]
    assert server.asked == []


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


BATCH = "/v1/chat/completions/batch"


def batch(*parts: Any, **others: Any) -> dict[str, Any]:
    """Two chats in one request, the second with these parts."""
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": list(parts)}]]
    return {"model": "m", "messages": chats, **others}


@pytest.mark.parametrize(
    ("body", "where", "says"),
    [
        (batch(part(cache_control={"type": "bogus"})), "cache_control.type", '"ephemeral"'),
        (batch(part(cache_control=EPHEMERAL)), "", "a request to /v1/chat/completions for each"),
        (batch(part(kvweave={"name": "n"})), "", "a request to /v1/chat/completions for each"),
        (batch(part(), kvweave={"policy": "nonsense"}), "kvweave.policy", "one of full"),
        (batch(part(), kvweave={"discover": True}), "kvweave", "a request to /v1/chat/comple"),
    ],
)
def test_chats_in_one_request_are_not_marked(body: Any, where: str, says: str) -> None:
    """Spans are of one prompt each, and all chats would have the same."""
    server = Server()
    status, said = server.ask("POST", BATCH, body)
    place = f"messages[1][0].content[0].{where}".rstrip(".")
    wanted = where if where.startswith("kvweave") else place
    assert (status, said["error"]["param"]) == (400, wanted)
    assert says in said["error"]["message"]
    assert server.asked == []


def test_arguments_of_several_chats_are_held_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prompt(state: Any, api: Any, body: dict[str, Any]) -> Any:
        assert api is chat_apis.CHAT
        (message,) = body["messages"]
        return {"prompt_token_ids": list(range(len(message["content"])))}

    monkeypatch.setattr(prompts, "engine_prompt", prompt)
    server = Server()
    for end, status in ((1, 200), (2, 400)):
        xargs = {"kvweave": json.dumps({"segments": [[0, end]]})}
        assert server.ask("POST", BATCH, batch(part(), part(), vllm_xargs=xargs))[0] == status
    wrong = {"kvweave": json.dumps({"policy": {"name": "sparsex", "boundary": 99}})}
    assert server.ask("POST", BATCH, batch(part(), vllm_xargs=wrong))[0] == 400
    # What is no list of chats is for vLLM to refuse, and what has no marks goes on as it is.
    for body in ({"messages": 3, "vllm_xargs": xargs}, {"messages": [3]}, batch(part("kvweave"))):
        before = len(server.asked)
        assert server.ask("POST", BATCH, body)[0] == 200
        assert json.loads(server.asked[before]) == body


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
    own = {"/v1/models", "/kvweave/knowledge", "/kvweave/knowledge/{name}"}
    assert paths.keys() == own | {f"/kvweave/documents{route}" for route in documents.ROUTES}
    statuses = set(paths["/kvweave/knowledge"]["post"]["responses"])
    assert statuses == {"200", "400", "401", "413", "501", "503", "507"}
    fields = paths["/kvweave/knowledge"]["post"]["requestBody"]["content"]["application/json"]
    assert set(fields["schema"]["properties"]) == set(knowledge.FIELDS)


def test_documents_of_a_request_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its tokens and its namespace, in the order of the prompt; nothing is computed."""

    async def prompt(state: Any, api: Any, body: dict[str, Any]) -> Any:
        assert "kvweave" not in body
        text = "".join(part["text"] for part in body["messages"][0]["content"])
        letters = list(text.encode())
        places = [(n, n + 1) for n in range(len(letters))]
        return {"prompt": text, "prompt_token_ids": letters, "prompt_token_offsets": places}

    monkeypatch.setattr(prompts, "engine_prompt", prompt)
    server, path = Server(), "/kvweave/documents/v1/chat/completions"
    parts = [part("of "), part("one", cache_control=EPHEMERAL), part("b", kvweave={"name": "n"})]
    for namespace in ("", "acme"):
        status, said = server.ask("POST", path, chat(*parts, kvweave={"namespace": namespace}))
        names = [document_hash(list(text), namespace).hex() for text in (b"one", b"b")]
        assert (status, said["object"]) == (200, "list")
        assert [(one["hash"], one["tokens"]) for one in said["data"]] == [
            (names[0], 3),
            (names[1], 1),
        ]
    # What a client has counted itself has names too.
    counted = {"kvweave": json.dumps({"segments": [[3, 6]], "namespace": "acme"})}
    body = chat(part("of one"), vllm_xargs=counted)
    assert server.ask("POST", path, body)[1]["data"] == said["data"][:1]
    # Nothing is marked here, and what may be discovered has no name.
    for body in (chat(part("of one")), chat(part("of one"), kvweave={"discover": True})):
        assert server.ask("POST", path, body) == (200, {"object": "list", "data": []})
    assert server.asked == []


def test_what_has_no_documents_to_name_is_refused() -> None:
    server, path = Server(), "/kvweave/documents/v1/chat/completions"
    assert server.ask("POST", path, b"[1")[0] == 400
    assert server.ask("POST", path, b"[]")[0] == 400
    status, said = server.ask("POST", path, chat(part(cache_control="yes")))
    assert (status, said["error"]["param"]) == (400, "messages[0].content[0].cache_control")
    for method, where in (("GET", path), ("POST", "/kvweave/documents"), ("POST", f"{path}/x")):
        assert server.ask(method, where, {})[0] == 405
    assert Server("secret").ask("POST", path, {}, token="guess")[0] == 401
    assert Server("secret").ask("POST", path, {}, token="secret")[0] == 200
    assert server.asked == []


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
