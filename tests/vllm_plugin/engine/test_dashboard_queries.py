"""Each query of the dashboard for Grafana, asked of a Prometheus that scrapes real servers."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from benchmarks.vllm.server import free_port, running, words_of
from families import tiny
from kvweave.adapters.vllm.serving import engine_options
from test_head_split import SIZES as HEADS
from test_head_split import written
from test_server import DOCUMENT, OTHER
from vllm_dashboard import DASHBOARD, DOCS, OF_TIER
from vllm_segments import SIZES, settings, text
from vllm_server import NAME, fetched, segment_options, served, tokenizer

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed"),
]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCS / "vllm-compose.yaml").read_text())
# What Grafana puts in their place: all models, and four scrapes as its data source has them.
FILLED = {"$model": ".*", "$__rate_interval": "1m"}
LOADS, APART_S = 4, 2.0


@contextmanager
def prometheus(folder: Path, addresses: list[str]) -> Iterator[Callable[..., Any]]:
    """Prometheus with the configuration of the compose file, of these servers; asks its API."""
    config = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [one.removeprefix("http://") for one in addresses]}]
    config["global"]["scrape_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.txt"
    with running(command, port, 60, log, ready="/-/ready") as address:

        def asked(path: str, **given: str) -> Any:
            with urlopen(f"{address}/api/v1/{path}?{urlencode(given)}") as answer:
                return json.load(answer)["data"]

        yield asked


def chats(address: str) -> None:
    """A chat with a document that came before, at another place, and a text that did not."""
    for lead in ("A text. ", "Of another length: "):
        parts = [{"type": "text", "text": lead + str(time.time())}]
        for document in (DOCUMENT, OTHER):
            mark = {"cache_control": {"type": "ephemeral"}}
            parts.append({"type": "text", "text": document, **mark})
        message = {"role": "user", "content": parts}
        given = {"model": NAME, "messages": [message], "max_tokens": 6, "ignore_eos": True}
        status, answer = fetched(f"{address}/v1/chat/completions", "POST", given)
        assert status == 200, answer


def answers(address: str) -> None:
    """Requests at once that lack blocks: all that run cannot end beside each other."""

    def one(seed: int) -> int:
        given = {"model": NAME, "prompt": text(60, seed), "max_tokens": 60, "ignore_eos": True}
        return fetched(f"{address}/v1/completions", "POST", given)[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {200}


@contextmanager
def both(folder: Path) -> Iterator[list[str]]:
    """A server that reuses segments, and one whose heads are under a map in little memory."""
    for name, sizes in (("segments", SIZES), ("heads", HEADS)):
        tiny("llama", **sizes).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    path = str(written(folder, sink=20, recent=40))
    mapped = words_of(engine_options("LlamaForCausalLM", heads=path, metrics=True))
    mapped += ["--num-gpu-blocks-override", "40", "--max-num-seqs", "8"]
    mapped += ["--max-num-batched-tokens", "64", "--no-enable-prefix-caching"]
    reusing = segment_options(settings())
    with (
        served(folder / "segments", folder / "segments.txt", reusing) as one,
        served(folder / "heads", folder / "heads.txt", mapped) as other,
    ):
        yield [one, other]


def test_each_query_finds_data(tmp_path: Path) -> None:
    """A number each, of all that a query tells apart; and the models to choose from."""
    with both(tmp_path) as addresses, prometheus(tmp_path, addresses) as asked:
        for _ in range(LOADS):
            chats(addresses[0])
            answers(addresses[1])
            time.sleep(APART_S)
        (model,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "model")
        series = model["query"].removeprefix("label_values(").split(",")[0]
        assert asked("label/model_name/values", **{"match[]": series}) == [NAME]
        found = {}
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                if OF_TIER in query:
                    # Held to an engine with a tier in `test_store_tier.py`.
                    continue
                for name, value in FILLED.items():
                    query = query.replace(name, value)
                rows = asked("query", query=query)["result"]
                found[target["expr"]] = {
                    " ".join(row["metric"].values()): float(row["value"][1]) for row in rows
                }
    for query, values in found.items():
        assert values, query
        assert all(map(math.isfinite, values.values())), (query, values)
        # Nothing runs or waits any more, and head classes leave nothing to the host.
        idle = "vllm:num_requests" in query or "kvweave_spilled" in query
        assert any(values.values()) or idle, (query, values)
