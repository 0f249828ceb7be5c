"""The OpenAI server with marked chats, asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import vllm

from answer_schema import answered, undescribed
from benchmarks.vllm.server import samples
from families import tiny
from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.server import text_ranges
from vllm_dashboard import missing
from vllm_segments import SIZES, settings
from vllm_server import KEY, NAME, fetched, scraped, segment_options, served, tokenizer

TEXT = " the hen went and the fox went; 12 cats — née Katz — and on and on and the cat went on\n"
DOCUMENT = TEXT * 2
OTHER = "and the hen and the hen and a fox on the hen. " * 3
TOKENS = tokenizer()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    tiny("llama", **SIZES).save_pretrained(folder)
    TOKENS.save_pretrained(folder)
    options = segment_options(settings())
    with served(folder, folder / "log.txt", options) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def part(text: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def marked(text: str, **section: Any) -> dict[str, Any]:
    """A part as clients of Anthropic mark it, with more of ours if there is any."""
    more = {"kvweave": section} if section else {}
    return part(text, cache_control={"type": "ephemeral"}, **more)


def chat(client: openai.OpenAI, *parts: dict[str, Any], **extra: Any) -> str:
    """The answer to one message of these parts."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    given = {"model": NAME, "messages": messages, "max_tokens": 6, "temperature": 0}
    said = client.chat.completions.create(**given, extra_body={"ignore_eos": True, **extra})
    return str(said.choices[0].message.content)


def streamed(client: openai.OpenAI, *parts: dict[str, Any], **extra: Any) -> str:
    messages: Any = [{"role": "user", "content": list(parts)}]
    given = {"model": NAME, "messages": messages, "max_tokens": 6, "temperature": 0}
    chunks = client.chat.completions.create(
        **given, stream=True, extra_body={"ignore_eos": True, **extra}
    )
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


class Watched:
    """What the server's metrics went up by since the last look."""

    def __init__(self, address: str) -> None:
        self.address, self.before = address, scraped(address)

    def new(self) -> dict[str, float]:
        now = scraped(self.address)
        risen = {name: value - self.before.get(name, 0) for name, value in now.items()}
        self.before = now
        return {name: value for name, value in risen.items() if value and "_created" not in name}


def span_of(prompt: str, text: str) -> list[int]:
    """Tokens of a text in a rendered prompt, found another way: each is decoded."""
    encoded = TOKENS(prompt, add_special_tokens=False, return_offsets_mapping=True)
    start = prompt.index(text)
    inside = [
        number
        for number, (a, b) in enumerate(encoded["offset_mapping"])
        if start <= a and b <= start + len(text)
    ]
    return [inside[0], inside[-1] + 1]


def test_marked_text_is_reused_where_it_stands_next(address: str, client: openai.OpenAI) -> None:
    watched = Watched(address)
    first = chat(client, part("one:"), marked(DOCUMENT), part("say"))
    seen = watched.new()
    assert seen["requests_total"] == 1
    assert "reused_tokens_total" not in seen
    again = chat(client, part("something else stands before:"), marked(DOCUMENT), part("say more"))
    seen = watched.new()
    prompt = f"<s><|user|>something else stands before:\n{DOCUMENT}\nsay more<|end|><|assistant|>"
    start, end = span_of(prompt, DOCUMENT)
    found = seen['hit_tokens_total{kind="request"}']
    assert end - start - 16 < found <= end - start
    assert found <= seen["reused_tokens_total"]
    assert seen["moved_keys_total"] > 0
    assert seen["spared_rows_total"] > 0
    assert first
    assert again


def test_marks_are_the_argument_that_a_client_could_have_counted(
    address: str, client: openai.OpenAI
) -> None:
    """The same prompt, with spans in tokens that were counted here, does the same."""
    prompt = f"<s><|user|>before\n{OTHER}\nafter<|end|><|assistant|>"
    section = {"policy": "naive", "namespace": "counted"}
    counted = {"kvweave": json.dumps({**section, "segments": [span_of(prompt, OTHER)]})}
    chat(client, marked(OTHER, namespace="counted"), part("first"))
    chat(client, marked(OTHER, namespace="marked"), part("first"))
    watched = Watched(address)
    wanted = chat(client, part("before"), part(OTHER), part("after"), vllm_xargs=counted)
    expected = watched.new()
    marks = marked(OTHER, policy="naive", namespace="marked")
    got = chat(client, part("before"), marks, part("after"))
    assert watched.new() == expected
    assert expected['hit_tokens_total{kind="request"}'] > 0
    assert got == wanted


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    parts = part("stream"), marked(DOCUMENT), part("and")
    assert streamed(client, *parts) == chat(client, *parts)


def test_a_response_says_what_became_of_its_prompt(client: openai.OpenAI) -> None:
    """Of each request its own, as the metrics count them together."""
    text = "and the fox and the hen; " * 12
    messages: Any = [{"role": "user", "content": [part("told:"), marked(text), part("say")]}]
    given: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 3, "temperature": 0}
    first = client.chat.completions.create(**given).model_dump()
    tokens = first["usage"]["prompt_tokens"]
    assert first["kvweave"]["tokens"] == tokens
    found, missed = first["kvweave"]["found"], first["kvweave"]["missed"]
    # What opens any chat was seen before.
    assert set(found) <= {"prefix"}
    assert sum(found.values()) + sum(missed.values()) == tokens
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    messages[0]["content"][0] = part("this stands before it now:")
    again = client.chat.completions.create(**given).model_dump()
    said, usage = again["kvweave"], again["usage"]
    assert said["found"]["request"] > 48
    assert sum(said["found"].values()) + sum(said["missed"].values()) == usage["prompt_tokens"]
    spared = said["cached"] + said["reused"] - said["recomputed"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == spared > 0
    assert again["kv_transfer_params"] is None
    # vLLM ends an answer of one token before it hands on what workers say.
    short = client.chat.completions.create(**{**given, "max_tokens": 1}).model_dump()
    assert "kvweave" not in short
    plain = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": text}], max_tokens=3, temperature=0
    )
    assert "kvweave" not in plain.model_dump()


@pytest.mark.skipif(
    versions.is_known(vllm.__version__, ("0.26",)), reason="streams of vLLM 0.26 do not carry it"
)
def test_a_stream_says_what_became_of_its_prompt(client: openai.OpenAI) -> None:
    text = "a cat and the hen and the cat; " * 10
    for before in ("one:", "another and a longer one:"):
        messages: Any = [{"role": "user", "content": [part(before), marked(text)]}]
        chunks = client.chat.completions.create(
            model=NAME,
            messages=messages,
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces = [chunk.model_dump() for chunk in chunks]
    (said,) = [piece["kvweave"] for piece in pieces if "kvweave" in piece]
    assert said["found"]["request"] > 48
    details = pieces[-1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == said["cached"] + said["reused"] - said["recomputed"]


def test_the_dashboard_shows_metrics_that_a_server_has(address: str, client: openai.OpenAI) -> None:
    for before in ("for the board:", "for it, at another place:"):
        chat(client, part(before), marked(OTHER))
    port = int(address.rpartition(":")[2])
    assert missing(samples(port), "segments") == {}


def test_without_reuse_marks_change_nothing(client: openai.OpenAI) -> None:
    wanted = chat(client, part(DOCUMENT), part("and so"))
    assert chat(client, marked(DOCUMENT), part("and so"), kvweave={"policy": "full"}) == wanted


def test_trimmed_texts_are_found(address: str, client: openai.OpenAI) -> None:
    """The template takes blanks away at both ends of a message."""
    fox = " \n" + "a fox and a fox and a fox and no hen. " * 3
    watched = Watched(address)
    chat(client, marked(fox))
    assert watched.new()["prompt_tokens_total"] > 0
    chat(client, part("then"), marked(fox))
    assert watched.new()["reused_tokens_total"] > 0


def test_malformed_marks_are_bad_requests(client: openai.OpenAI) -> None:
    where = "messages[0].content[1].cache_control.type"
    with pytest.raises(
        openai.BadRequestError, match="expected \"ephemeral\", got 'long'"
    ) as caught:
        chat(client, part("a"), part("b", cache_control={"type": "long"}))
    assert caught.value.param == where
    assert caught.value.status_code == 400
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, marked("a text", policy="hope"))
    assert caught.value.param == "messages[0].content[0].kvweave.policy"
    with pytest.raises(openai.BadRequestError, match=r"kvweave\.segments"):
        chat(client, part("a"), vllm_xargs={"kvweave": '{"segments": [[0, -1]]}'})


def test_what_vllm_refuses_it_refuses_itself(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        chat(client, marked(DOCUMENT * 20))
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="another", messages=[{"role": "user", "content": [marked(TEXT)]}]
        )


def test_keys_are_asked_for(address: str, client: openai.OpenAI) -> None:
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        chat(stranger, marked("a text", policy="hope"))
    assert fetched(f"{address}/kvweave/knowledge", "GET", key="guess")[0] == 401


def test_a_knowledge_base(address: str, client: openai.OpenAI) -> None:
    route = f"{address}/kvweave/knowledge"
    book = "of hens and foxes, and of cats that went on. " * 4
    given = {"name": "a/book", "text": book, "namespace": "acme"}
    status, entry = fetched(route, "POST", given)
    assert (status, entry["name"]) == (200, "a/book")
    paths = fetched(f"{address}/openapi.json", "GET")[1]["paths"]
    assert undescribed(entry, answered(paths, "post", "/kvweave/knowledge")) == []
    whole = fetched(f"{route}?namespace=acme", "GET")[1]
    assert undescribed(whole, answered(paths, "get", "/kvweave/knowledge")) == []
    listed = whole["data"]
    count = len(TOKENS.encode(book, add_special_tokens=False))
    assert [(entry["name"], entry["tokens"]) for entry in listed] == [("a/book", count)]
    assert fetched(f"{route}?namespace=other", "GET")[1]["data"] == []
    watched = Watched(address)
    chat(client, part("tell me of"), marked(book, namespace="acme"), part("now"))
    seen = watched.new()
    assert count - 16 < seen.get('hit_tokens_total{kind="frozen"}', 0) <= count, seen
    chat(client, part("tell me of"), marked(book, namespace="other"), part("now"))
    assert "reused_tokens_total" not in watched.new()
    gone = f"{route}/a%2Fbook?namespace=acme"
    deleted = fetched(gone, "DELETE")[1]
    assert deleted["deleted"] is True
    assert undescribed(deleted, answered(paths, "delete", "/kvweave/knowledge/{name}")) == []
    status, answer = fetched(gone, "DELETE")
    assert (status, answer["error"]["code"]) == (404, 404)
    assert fetched(route, "POST", {"name": "x", "tokens": [-1]})[0] == 400


def test_other_routes_are_vllms(address: str, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    said = client.completions.create(model=NAME, prompt="the cat", max_tokens=3, temperature=0)
    assert said.usage is not None
    assert said.usage.completion_tokens == 3


def test_offsets_of_a_real_tokenizer() -> None:
    encoded = TOKENS(DOCUMENT, add_special_tokens=False, return_offsets_mapping=True)
    for start in range(0, 40, 3):
        found = text_ranges.token_range(encoded["offset_mapping"], (start, start + 45))
        assert found is not None
        text = TOKENS.decode(encoded["input_ids"][found[0] : found[1]])
        assert text in DOCUMENT[start : start + 45]
        assert len(text) > 30
