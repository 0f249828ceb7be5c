"""Chats with marked documents through every route of a real server, and what it tells others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import msgspec
import openai
import pytest
import vllm
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from families import tiny
from kvweave.adapters.vllm.segments.known_documents import document_hash
from kvweave.adapters.vllm.versions import is_known
from vllm_segments import SIZES, settings
from vllm_server import (
    KEY,
    NAME,
    fetched,
    free_port,
    scraped,
    segment_options,
    served,
    tokenizer,
)

TOPIC = "kv"
TOKENS = tokenizer()
WORDS = ("the", "cat", "and", "hen", "fox", "went", "on")
CHOICES = ["the cat", "the hen"]
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["cat", "hen"]}},
    "required": ["who"],
    "additionalProperties": False,
}
# A model of random weights would go on with blanks for ever.
GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}


class Server:
    """Where a server is, where its events are, and what it wrote."""

    def __init__(self, address: str, events: str, log: Path) -> None:
        self.address, self.events, self.log = address, events, log
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)

    def ask(self, *messages: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """A chat's response."""
        body = {"ignore_eos": True, **extra.pop("extra_body", {})}
        given: dict[str, Any] = {"model": NAME, "max_tokens": 6, "temperature": 0, **extra}
        said = self.client.chat.completions.create(messages=messages, extra_body=body, **given)
        return dict(said.model_dump())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    tiny("llama", **SIZES).save_pretrained(folder)
    TOKENS.save_pretrained(folder)
    port = free_port()
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC}
    choice = settings(frozen_share=0.25)
    choice["additional_config"]["kvweaves"] = {"heads": "map.json"}
    options = [
        *segment_options(choice),
        *("--kv-events-config", json.dumps({**published, "endpoint": f"tcp://*:{port}"})),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config", json.dumps(GRAMMAR)),
    ]
    # 0.26 has the routes that render alone, and that compute tokens, without being asked.
    if not is_known(vllm.__version__, ("0.26",)):
        options.append("--enable-scale-out")
    log = folder / "log.txt"
    variables = {"KVWEAVE_SEGMENT_BYTES": "5", "KVWEAVE_TYPO": "1"}
    with served(folder, log, options, VLLM_LOGGING_LEVEL="INFO", **variables) as at:
        yield Server(at, f"tcp://127.0.0.1:{port}", log)


def document(seed: str) -> str:
    """Some hundred tokens in an order that no other test has."""
    words = Random(seed).choices(WORDS, k=60)
    return f"{seed}: {' '.join(words)}."


def marked(text: str, kind: str = "text", **section: Any) -> dict[str, Any]:
    more = {"kvweave": section} if section else {}
    return {"type": kind, "text": text, "cache_control": {"type": "ephemeral"}, **more}


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    return {"role": "user", "content": content}


def text_of(response: dict[str, Any], choice: int = 0) -> str:
    return str(response["choices"][choice]["message"]["content"])


def test_the_start_is_told_in_one_line(server: Server) -> None:
    lines = server.log.read_text().splitlines()
    (line,) = [line for line in lines if "; model Kvweave" in line]
    assert "segments in 0.02 GiB of each worker, up to 25 % for knowledge bases" in line
    assert "connector KvweaveSegments" in line
    warned = [line for line in lines if "has no effect" in line]
    # Each process that loads the plugin says so of a name that nobody knows.
    unknown = [line for line in warned if "KVWEAVE_TYPO: expected one of KVWEAVE_" in line]
    assert unknown
    misspelt, other = [line for line in warned if line not in unknown]
    assert "additional_config: expected kvweave, got 'kvweaves'; " in misspelt
    assert "KVWEAVE_SEGMENT_BYTES: expected one place" in other


def test_the_second_turn_of_a_chat(server: Server) -> None:
    """What was marked is marked again by clients that send the whole chat each time."""
    first = user("of the first:", marked(document("a")), "who?")
    answered = text_of(server.ask(first))
    turn = [first, {"role": "assistant", "content": answered}, user("and then?")]
    second = server.ask(*turn)
    assert second["kvweave"]["found"]["prefix"] > 48
    unmarked = [user("of the first:", document("a"), "who?"), *turn[1:]]
    assert text_of(second) == text_of(server.ask(*unmarked))
    # A document that stands elsewhere by now.
    moved = server.ask(user("well:"), *turn[1:2], user(marked(document("a")), "once more?"))
    assert moved["kvweave"]["found"]["request"] > 32


def test_several_answers_to_one_prompt(server: Server) -> None:
    message = user("several:", marked(document("b")), "say")
    once = text_of(server.ask(message))
    # vLLM has no greedy answers of several: the likeliest token of each step is the only one.
    several = server.ask(message, n=3, temperature=1, extra_body={"top_k": 1})
    assert [text_of(several, number) for number in range(3)] == [once] * 3
    apart = server.ask(message, n=2, temperature=1.5, seed=3)
    assert len(apart["choices"]) == 2


def test_a_stop_string_ends_an_answer(server: Server) -> None:
    message = user("stop:", marked(document("c")), "say")
    whole = text_of(server.ask(message, max_tokens=12))
    cut = whole[len(whole) // 2 :][:2]
    stopped = server.ask(message, max_tokens=12, stop=[cut])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert text_of(stopped) == whole[: whole.index(cut)]


def test_logprobs_are_those_of_a_prompt_without_marks(server: Server) -> None:
    """Where a document stands at the same place, what the store has of it is exact."""
    text = document("d")
    wanted = server.ask(user("log:", text, "say"), logprobs=True, top_logprobs=2)
    server.ask(user("log:", marked(text), "other"))
    got = server.ask(user("log:", marked(text), "say"), logprobs=True, top_logprobs=2)
    assert got["kvweave"]["found"]["prefix"] > 48
    for a, b in zip(*(r["choices"][0]["logprobs"]["content"] for r in (got, wanted)), strict=True):
        assert a["token"] == b["token"]
        assert a["logprob"] == pytest.approx(b["logprob"], abs=2e-3)
        assert len(a["top_logprobs"]) == 2


def test_structured_output(server: Server) -> None:
    message = user("choose:", marked(document("e")), "who?")
    for _ in range(2):
        asked = {"structured_outputs": {"choice": CHOICES}, "ignore_eos": False}
        said = server.ask(message, max_tokens=20, extra_body=asked)
        assert text_of(said) in CHOICES
    shape = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
    given = {"response_format": shape, "max_tokens": 60, "extra_body": {"ignore_eos": False}}
    said = server.ask(user("as JSON:", marked(document("e")), "who?"), **given)
    assert json.loads(text_of(said))["who"] in ("cat", "hen")
    assert said["kvweave"]["found"]["request"] > 32


def test_a_tool_call(server: Server) -> None:
    asked: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        # A token of this tokenizer is about a letter.
        "max_tokens": 200,
        "extra_body": {"ignore_eos": False},
    }
    for before in ("call:", "call once more:"):
        said = server.ask(user(before, marked(document("f")), "who?"), **asked)
    assert said["choices"][0]["message"]["tool_calls"], said
    (call,) = said["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["who"] in ("cat", "hen")
    assert said["kvweave"]["found"]["request"] > 32
    # The chat goes on with what the tool said.
    message = user("call:", marked(document("f")), "who?")
    call = {"id": "1", "type": "function", "function": {**call["function"]}}
    turn = [{"role": "assistant", "tool_calls": [call], "content": ""}]
    result = {"role": "tool", "tool_call_id": "1", "content": "a hen"}
    assert server.ask(message, *turn, result, tools=[TOOL])["kvweave"]["found"]["prefix"] > 48


def test_marks_in_anthropics_messages(server: Server) -> None:
    text, route = document("g"), f"{server.address}/v1/messages"
    for before in ("one.", "a longer system prompt stands before."):
        given = {
            "model": NAME,
            "max_tokens": 4,
            "temperature": 0,
            "system": [{"type": "text", "text": before}, marked(text)],
            "messages": [user("who?")],
        }
        status, said = fetched(route, "POST", given)
        assert status == 200, said
    assert said["kvweave"]["found"]["request"] > 32
    told, usage = said["kvweave"], said["usage"]
    spared = told["cached"] + told["reused"] - told["recomputed"]
    assert usage["cache_read_input_tokens"] == spared
    assert usage["input_tokens"] + spared == told["tokens"]
    given["system"][1]["cache_control"] = {"type": "long"}
    status, said = fetched(route, "POST", given)
    assert (status, said["error"]["param"]) == (400, "system[1].cache_control.type")


def test_marks_in_responses(server: Server) -> None:
    text, client = document("h"), server.client
    given: dict[str, Any] = {"model": NAME, "max_output_tokens": 6, "temperature": 0}
    for before in ("one:", "a longer one:"):
        content = [{"type": "input_text", "text": before}, marked(text, "input_text")]
        asked: Any = [{"role": "user", "content": content}]
        said = client.responses.create(input=asked, **given)
    told = said.model_dump()["kvweave"]
    assert told["found"]["request"] > 32
    assert said.usage is not None
    spared = told["cached"] + told["reused"] - told["recomputed"]
    assert said.usage.input_tokens_details.cached_tokens == spared
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            input=[{"role": "user", "content": [marked(text, "input_text", policy="hope")]}],
            **given,
        )
    assert caught.value.param == "input[0].content[0].kvweave.policy"


def test_what_the_engine_would_pass_over_is_refused(server: Server) -> None:
    """Else the prompt would be computed as if it had no marks."""
    beyond = {"kvweave": json.dumps({"segments": [[0, 400]]})}
    with pytest.raises(openai.BadRequestError, match="an end <= "):
        server.ask(user("short"), extra_body={"vllm_xargs": beyond})
    prompt = {"model": NAME, "prompt": [[5, 6, 7], [5] * 9], "max_tokens": 2}
    xargs = {"kvweave": json.dumps({"segments": [[0, 8]]})}
    route = f"{server.address}/v1/completions"
    status, said = fetched(route, "POST", {**prompt, "vllm_xargs": xargs})
    assert (status, "an end <= 3" in said["error"]["message"]) == (400, True)
    status, said = fetched(route, "POST", {**prompt, "prompt": [5] * 9, "vllm_xargs": xargs})
    assert status == 200, said
    apart = {"kvweave": json.dumps({"segments": [[0, 5], [4, 8]]})}
    assert fetched(route, "POST", {**prompt, "vllm_xargs": apart})[0] == 400
    for policy in ({"name": "sparsex", "boundary": 99}, {"name": "infoflow", "layers": [99]}):
        with pytest.raises(openai.BadRequestError, match="expected layers of"):
            server.ask(user(marked(document("i"))), extra_body={"kvweave": {"policy": policy}})
    for route, asked in (
        ("completions", {**prompt, "prompt": [5] * 9, "vllm_xargs": xargs}),
        ("chat/completions", {"model": NAME, "messages": [user(marked(document("i")))]}),
    ):
        at = f"{server.address}/v1/{route}"
        status, said = fetched(at, "POST", {**asked, "prompt_logprobs": 1})
        wanted = "prompt_logprobs: expected none beside segments"
        assert (status, wanted in said["error"]["message"]) == (400, True), said
        assert said["error"]["type"] == "BadRequestError"
    with pytest.raises(openai.BadRequestError, match="512"):
        server.ask(user(marked(document("i") * 20)))


def test_what_comes_past_the_middleware_is_refused_by_the_engine(server: Server) -> None:
    """By a route that it does not read, whose arguments the engine hears all the same."""
    route = f"{server.address}/inference/v1/generate"

    def generated(section: dict[str, Any]) -> tuple[int, Any]:
        sampling = {"max_tokens": 2, "extra_args": {"kvweave": json.dumps(section)}}
        asked = {"model": NAME, "token_ids": [5] * 9, "sampling_params": sampling}
        return fetched(route, "POST", asked)

    deep = {"segments": [[0, 8]], "policy": {"name": "sparsex", "boundary": 99}}
    for section, says in (
        (deep, "kvweave.policy.boundary: expected layers of "),
        ({"policy": "naive"}, "kvweave.policy: expected segments or discover beside it"),
    ):
        status, said = generated(section)
        assert (status, says in said["error"]["message"]) == (400, True), said
    for section in ({"segments": [[0, 8]], "policy": "naive"}, {"namespace": "acme"}):
        assert generated(section)[0] == 200
    # Where the middleware warns the engine does not refuse.
    for extra in (
        {"kvweave": {"policy": "naive"}},
        {"vllm_xargs": {"kvweave": '{"policy": "naive"}'}},
    ):
        server.ask(user("a policy alone"), extra_body=extra)


def test_a_chat_that_comes_as_sagemaker_has_it(server: Server) -> None:
    text = document("sage")
    asked = {"model": NAME, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    first = server.ask(user("here:", marked(text), "who?"))
    moved = {**asked, "messages": [user("elsewhere, at last:", marked(text), "who?")]}
    status, said = fetched(f"{server.address}/invocations", "POST", moved)
    assert (status, said["kvweave"]["found"]["request"] > 32) == (200, True)
    spared = said["kvweave"]["cached"] + said["kvweave"]["reused"] - said["kvweave"]["recomputed"]
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == spared
    assert first["kvweave"]["missed"]


def test_a_chat_that_one_server_renders_and_another_computes(server: Server) -> None:
    """What is rendered has the spans of its marks, and the engine finds them."""
    text = document("rendered")
    server.ask(user("here:", marked(text, name="rendered"), "who?"))
    asked = {"model": NAME, "max_tokens": 6, "temperature": 0}
    chat = {**asked, "messages": [user("somewhere else:", marked(text), "who?")]}
    status, made = fetched(f"{server.address}/v1/chat/completions/render", "POST", chat)
    assert status == 200, made
    section = json.loads(made["sampling_params"]["extra_args"]["kvweave"])
    ((begin, end),) = section["segments"]
    assert TOKENS.decode(made["token_ids"][begin:end]).strip() == text
    name = 'hit_tokens_total{kind="request"}'
    before = scraped(server.address)
    status, said = fetched(f"{server.address}/inference/v1/generate", "POST", made)
    assert (status, len(said["choices"][0]["token_ids"])) == (200, 6)
    assert scraped(server.address)[name] - before.get(name, 0) > 32


def test_several_chats_in_one_request(server: Server) -> None:
    """They share what is passed on: a mark is refused, what holds for any prompt is not."""
    route, text = f"{server.address}/v1/chat/completions/batch", document("batch")
    shared = {"model": NAME, "max_tokens": 2, "temperature": 0}
    for part, where in (
        (marked(text), ""),
        ({"type": "text", "text": text, "cache_control": {"type": "bogus"}}, ".cache_control.type"),
    ):
        chats = [[user("one")], [user("two", part)]]
        status, said = fetched(route, "POST", {**shared, "messages": chats})
        assert (status, said["error"]["param"]) == (400, f"messages[1][0].content[1]{where}"), said
    chats = [[user("one", text)], [user("the second", text)]]
    nonsense = {"kvweave": {"policy": "nonsense"}, "messages": chats}
    assert fetched(route, "POST", {**shared, **nonsense})[0] == 400
    server.ask(user("before", marked(text)))
    before = scraped(server.address)
    known = {"vllm_xargs": {"kvweave": json.dumps({"discover": True, "policy": "naive"})}}
    status, said = fetched(route, "POST", {**shared, **known, "messages": chats})
    assert (status, len(said["choices"])) == (200, 2)
    after = scraped(server.address)
    assert after["requests_total"] - before["requests_total"] == 2
    found = 'hit_tokens_total{kind="request"}'
    assert after[found] - before[found] > 64


def test_reuse_of_counted_segments_is_counted(server: Server) -> None:
    """Of clients that count tokens themselves, in completions and chats, as of marked ones."""
    route, xargs = f"{server.address}/v1/completions", {"segments": [[3, 103]], "policy": "naive"}
    tokens = [7 + number * number % 90 for number in range(100)]
    for before in ([5, 6, 7], [9, 9, 9]):
        prompt = {"model": NAME, "prompt": [*before, *tokens, 8, 9], "max_tokens": 2}
        prompt["vllm_xargs"] = {"kvweave": json.dumps(xargs)}
        status, said = fetched(route, "POST", prompt)
        assert status == 200, said
    told = said["kvweave"]
    spared = told["cached"] + told["reused"] - told["recomputed"]
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == spared
    assert spared >= 64
    text = document("counted")
    asked = {"vllm_xargs": {"kvweave": json.dumps({"discover": True, "policy": "naive"})}}
    server.ask(user(marked(text)))
    response = server.ask(user("before", text), extra_body=asked)
    told = response["kvweave"]
    spared = told["cached"] + told["reused"] - told["recomputed"]
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == spared
    assert spared >= 64


def test_the_knowledge_base_is_in_the_schema(server: Server) -> None:
    schema = fetched(f"{server.address}/openapi.json", "GET")[1]
    assert {"get", "post"} == schema["paths"]["/kvweave/knowledge"].keys()
    assert "/v1/chat/completions" in schema["paths"]
    with urlopen(f"{server.address}/docs") as page:
        assert page.status == 200


def test_the_knowledge_base_keeps_tenants_apart_and_its_metrics_true(server: Server) -> None:
    route = f"{server.address}/kvweave/knowledge"
    before = scraped(server.address)
    frozen = 'store_bytes{tier="device",state="frozen"}'
    names = {name for name in before if "frozen" in name and "store_bytes" in name}
    status, entry = fetched(route, "POST", {"name": "a", "text": document("j"), "namespace": "x"})
    assert status == 200
    now = scraped(server.address)
    (name,) = {name for name in now if "frozen" in name and "store_bytes" in name} | names
    assert name in (frozen, 'store_bytes{state="frozen",tier="device"}')
    held = now[name] - before.get(name, 0)
    assert held > 0
    assert held % entry["blocks"] == 0
    assert fetched(route, "GET")[1]["data"] == []
    assert len(fetched(f"{route}?namespace=x", "GET")[1]["data"]) == 1
    many = {"name": "b", "tokens": [7] * 512, "namespace": "x"}
    fetched(f"{route}/a?namespace=x", "DELETE")
    assert scraped(server.address)[name] == before.get(name, 0)
    status, said = 200, {}
    for number in range(40):
        many |= {"name": str(number), "tokens": [7 + number] * 512}
        status, said = fetched(route, "POST", many)
        if status != 200:
            break
    assert (status, said["error"]["type"]) == (507, "InsufficientStorageError")
    assert "frozen share of the pool: expected" in said["error"]["message"]
    for number in range(40):
        fetched(f"{route}/{number}?namespace=x", "DELETE")


def test_routers_hear_of_documents(server: Server) -> None:
    """Those that a chat marks and those of a knowledge base, by a hash that they can make."""
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
    listener.connect(server.events)
    time.sleep(1)
    text = document("k")
    route = f"{server.address}/kvweave/knowledge"
    fetched(route, "POST", {"name": "k", "text": f"kept {text}", "namespace": "acme"})
    server.ask(user("hear:", marked(text), "who?"))
    server.ask(user("hear more"))
    heard, decoder = [], msgspec.msgpack.Decoder(KVEventBatch)
    while listener.poll(5000):
        _, _, payload = listener.recv_multipart()
        heard += [e for e in decoder.decode(payload).events if e.medium == "KVWEAVE_SEGMENT"]
    listener.close(linger=0)
    stored = {hashed(e.block_hashes[0]): e for e in heard if isinstance(e, BlockStored)}
    kept = TOKENS.encode(f"kept {text}", add_special_tokens=False)
    assert hashed(document_hash(kept, "acme")) in stored
    assert hashed(document_hash(kept, "")) not in stored
    # The text of a chat begins behind a line's end, which its first token may have.
    prompt = f"<s><|user|>hear:\n{text}\nwho?<|end|><|assistant|>"
    places = TOKENS(prompt, add_special_tokens=False, return_offsets_mapping=True)
    start = prompt.index(text)
    inside = [
        token
        for token, (a, b) in zip(places["input_ids"], places["offset_mapping"], strict=True)
        if start <= a and b <= start + len(text.rstrip())
    ]
    named = {hashed(document_hash(inside[: len(inside) - cut])) for cut in range(3)}
    found = named & stored.keys()
    assert len(found) == 1
    asked = {"model": NAME, "messages": [user("hear, elsewhere:", marked(text))]}
    (said,) = fetched(f"{server.address}/kvweave/documents/v1/chat/completions", "POST", asked)[1][
        "data"
    ]
    assert hashed(bytes.fromhex(said["hash"])) in found
    assert 16 <= stored[found.pop()].block_size <= len(inside)
    assert all(event.token_ids == [] for event in stored.values())


def test_documents_have_the_names_of_their_tokens(server: Server) -> None:
    """Whatever route a request is for, marked or counted; whoever has no key is told none."""
    route = f"{server.address}/kvweave/documents/v1"
    tokens = [7 + number * number % 90 for number in range(100)]
    counted = {"segments": [[8, 40], [50, 99]], "namespace": "acme"}
    given = {"model": NAME, "prompt": tokens, "vllm_xargs": {"kvweave": json.dumps(counted)}}
    status, said = fetched(f"{route}/completions", "POST", given)
    assert status == 200
    names = [document_hash(tokens[a:b], "acme").hex() for a, b in counted["segments"]]
    data = [{"hash": name, "tokens": n} for name, n in zip(names, (32, 49), strict=True)]
    assert said == {"object": "list", "data": data}
    parts = [{"type": "text", "text": "of:"}, marked(document("l"))]
    chat = {"model": NAME, "messages": [user(*parts)], "max_tokens": 4}
    (one,) = fetched(f"{route}/chat/completions", "POST", chat)[1]["data"]
    assert one["tokens"] > 32
    assert fetched(f"{route}/messages", "POST", chat)[1]["data"] == [one]
    inputs = [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]
    asked = {"model": NAME, "input": inputs}
    assert fetched(f"{route}/responses", "POST", asked)[1]["data"] == [one]
    # Where it stands says nothing, and whose it is does.
    parts[0] = {"type": "text", "text": "of something else, at another place:"}
    moved = {**chat, "messages": [user(*parts)]}
    assert fetched(f"{route}/chat/completions", "POST", moved)[1]["data"] == [one]
    theirs = {**moved, "kvweave": {"namespace": "acme"}}
    (other,) = fetched(f"{route}/chat/completions", "POST", theirs)[1]["data"]
    assert (other["tokens"], other["hash"] != one["hash"]) == (one["tokens"], True)
    # What vLLM refuses has no documents: whoever answers it says why.
    refused = {**chat, "messages": [user(marked(document("l") * 20))]}
    assert fetched(f"{route}/chat/completions", "POST", refused) == (200, {**said, "data": []})
    assert fetched(f"{route}/chat/completions", "POST", chat, key="guess")[0] == 401


def hashed(name: bytes | int) -> int:
    """As vLLM publishes hashes: whole, or their last 64 bits as a number."""
    return name if isinstance(name, int) else int.from_bytes(name, "big") & ((1 << 64) - 1)
