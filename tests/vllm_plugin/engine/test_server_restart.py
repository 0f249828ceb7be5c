"""The OpenAI server stopped and started again: its knowledge base is on disk, and answers."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from answer_schema import answered, undescribed
from families import tiny
from test_server import TOKENS, Watched, chat, marked, part
from vllm_segments import SIZES, settings
from vllm_server import KEY, fetched, served

BOOK = "of hens and foxes, and of cats that went on. " * 4


def asked(client: openai.OpenAI, namespace: str) -> str:
    given = marked(BOOK, namespace=namespace, policy="naive")
    return chat(client, part("tell me of"), given, part("now"))


@pytest.mark.long
def test_a_restarted_server_answers_from_its_documents(tmp_path: Path) -> None:
    """The first marked chat of their tenant; another tenant's is computed."""
    tiny("llama", **SIZES).save_pretrained(tmp_path / "model")
    TOKENS.save_pretrained(tmp_path / "model")
    choice = settings(store=str(tmp_path / "store"), store_reads="always")
    options = [
        *("--hf-overrides", json.dumps(choice["hf_overrides"])),
        *("--additional-config", json.dumps(choice["additional_config"])),
        *("--kv-transfer-config", json.dumps(choice["kv_transfer_config"])),
        *("--worker-extension-cls", choice["worker_extension_cls"]),
        *("--logits-processors", *choice["logits_processors"]),
        *("--middleware", "kvweave.adapters.vllm.server.SegmentMiddleware"),
    ]
    count = len(TOKENS.encode(BOOK, add_special_tokens=False))
    said = []
    for start in ("first", "again"):
        with served(tmp_path / "model", tmp_path / f"{start}.txt", options) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
            route = f"{address}/kvweave/knowledge"
            if start == "first":
                given = {"name": "a/book", "text": BOOK, "namespace": "acme"}
                status, entry = fetched(route, "POST", given)
                assert (status, entry["kept"]) == (200, True)
            else:
                assert fetched(f"{route}?namespace=other", "GET")[1]["data"] == []
                (entry,) = fetched(f"{route}?namespace=acme", "GET")[1]["data"]
                assert (entry["name"], entry["tokens"], entry["kept"]) == ("a/book", count, True)
                assert entry["resident_blocks"] == 0
            paths = fetched(f"{address}/openapi.json", "GET")[1]["paths"]
            method = "post" if start == "first" else "get"
            whole = entry if start == "first" else {"object": "list", "data": [entry]}
            assert undescribed(whole, answered(paths, method, "/kvweave/knowledge")) == []
            watched = Watched(address)
            said.append(asked(client, "acme"))
            found = watched.new().get('hit_tokens_total{kind="frozen"}', 0)
            assert count - 16 < found <= count
            asked(client, "other")
            assert "reused_tokens_total" not in watched.new()
    assert said[0] == said[1]
