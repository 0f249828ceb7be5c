"""Every table of the command line in terminals of several widths: all of it, and no wider."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from bench_results import decode_result
from commands import call, in_terminal
from eval_samples import contents
from families import random_tokens, tiny
from kvweave import KvShape, Provenance, Runner, Store
from kvweave.cli.certify import table_of as certificate_table
from kvweave.cli.demo import table_of as demo_table
from kvweave.cli.doctor import table_of as doctor_table
from kvweave.cli.environment import environment, findings
from kvweave.demo import Row, means
from kvweave.lab.bench import table as bench
from kvweave.lab.bench.shapes import Target
from kvweave.lab.eval import MeasurementLog, evaluations_of
from local_heads import local_heads
from policy_profiles import profile
from recorded_heads import recorded_map

WIDTHS = (80, 100, 140)
WIDE = 400
"""Characters in which every table has room for all of it, unfolded."""
NUMBER = re.compile(r"\(?[-−+]?[.\d][\d.,]*(e[-+]\d+)?(–[-−]?[.\d][\d.,]*)?%?\)?")
KLS = {"naive": 0.8, "epic": 0.6, "foresight(share=0.1)": 0.2, "foresight(draft=16)": 0.123}
Printed = Callable[[int], str]
"""What is printed in a terminal so many characters wide."""


def rendered(made: RenderableType, width: int) -> str:
    console = Console(width=width, file=StringIO(), color_system=None, force_terminal=True)
    console.print(made, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- what is printed -------------------------------------------------------------------------


def plans(folder: Path) -> Printed:
    (folder / "speech.txt").write_text("The harvest was good this year. " * 30)
    (folder / "harbour_letter.txt").write_text("The committee agreed to repair the wall. " * 30)
    segments = ["--segment", folder / "speech.txt", "--segment", folder / "harbour_letter.txt"]
    prompt = "Read {{harbour_letter}} and then {{speech}} too. What is agreed?"
    return lambda width: in_terminal(min(width, 140), "plan", prompt, *segments)


def capacities(folder: Path) -> Printed:
    path = folder / "heads.json"
    path.write_text(local_heads(KvShape(32, 8, 128), 7).to_json())
    words = ("llama-3.1-8b", "--length", 8192, "--length", 131072, "--heads", path)
    return lambda width: in_terminal(width, "capacity", *words)


def reports(folder: Path) -> Printed:
    whole, path = contents(KLS), folder / "log.jsonl"
    log = MeasurementLog(path, whole.subject)
    log.define(whole.jobs, whole.policies)
    for (job, sample), made in whole.samples.items():
        log.append(job, sample, list(made.values()))
    # It is as wide as a text at most, so that it can be copied.
    return lambda width: in_terminal(width, "report", path, "--against", "naive")


def stores(folder: Path) -> Printed:
    store = Store(folder / "kv")
    for number, name in enumerate(("a manual", "a letter of the committee that repairs walls")):
        of = Provenance("m", dtype="bf16", layout="x", layers=1, kv_heads=1, head_dim=8)
        key = store.put(of, np.arange(number, number + 300), {"kv": bytes(123456)})[0]
        store.name("", name, key)
    return lambda width: in_terminal(width, "store", "ls", folder / "kv")


def head_maps(folder: Path) -> Printed:
    path = folder / "scores.json"
    path.write_text(recorded_map(80, 8).to_json())
    return lambda width: in_terminal(width, "profile-heads", "--scores", path, "--share", 0.3)


def doctors(_folder: Path) -> Printed:
    # Found once: free memory is another number the next time.
    return partial(rendered, doctor_table(findings(environment())))


def evaluations(_folder: Path) -> Printed:
    found = evaluations_of([contents(KLS)])[0]
    return partial(rendered, found.table())


def certificates(_folder: Path) -> Printed:
    heads = local_heads(KvShape(32, 8, 128), 7, model="f" * 64)
    made = profile("foresight:share=0.35:draft=16", heads=heads)
    (last,) = made.evidence
    tried = [
        replace(last, stage="search", policy=name, heads=under, flops_share=0.05, samples=240)
        for under in (None, last.heads)
        for name in ("naive", "foresight:share=0.1", "foresight:share=0.35:draft=16")
    ]
    jobs = [
        replace(last, job="needles, 4096, permuted"),
        replace(last, job="chain, 4096", value=None, low=None, high=None, lost=3),
    ]
    made = replace(made, evidence=(*tried, *jobs, last))
    return partial(rendered, certificate_table(made, "/models/Llama-3.1-8B-Instruct"))


def demos(_folder: Path) -> Printed:
    numbers = {"tokens": 1234, "reused_prefix": 123, "reused_segment": 1042, "recomputed": 69}
    sizes = {"kv_bytes": 123 << 20, "shared_kv_bytes": 456 << 20, "ttft_s": 1.2345}
    words = {"question": "What is repaired?", "answer": "The wall. " * 9, "mode": "share"}
    values = {"mode_reason": "", "kl": 0.1234, "ttft_ratio": 0.12, "row_share": 0.06}
    given: dict[str, Any] = {**numbers, **sizes, **words, **values}
    rows = [
        Row(**{f.name: {**given, "prompt": prompt, "policy": policy}.get(f.name, 1.0)
               for f in fields(Row)})
        for prompt in (1, 2)
        for policy in ("full", "cacheblend", "foresight")
    ]  # fmt: skip
    return lambda width: rendered(demo_table(rows, means(rows), width >= 110), width)


def benches(_folder: Path) -> Printed:
    peers = {"FA3": 143.0, "FA3_NHD": 160.0, "SDPA": 1131.0, "FlashInfer": 150.0}
    good = decode_result(Target("FA3 NHD", 1.05), kvweave=130.0, **peers)
    none = decode_result(None, FA3=143.0)
    long = replace(none, case=replace(none.case, name="decode of 8 requests of 120K tokens, heads"))
    return partial(rendered, bench.table_of([good, replace(good, graph=True), long]))


TABLES: dict[str, tuple[Callable[[Path], Printed], str]] = {
    "plan": (plans, "tokens count outcome Δ source or reason text"),
    "capacity": (capacities, "tokens sessions KV with the map times"),
    "report": (reports, "policy n recall KL gap worst same FLOPs TTFT pays"),
    "store": (stores, "shard namespace documents tokens size used"),
    "profile-heads": (head_maps, "layer 0 10 20 30 40 50 60 70"),
    "doctor": (doctors, "works"),
    "eval": (evaluations, "policy recall KL worst gap 1st top-1 FLOPs TTFT ms"),
    "certify": (certificates, "stage policy job whole n FLOPs KV KL"),
    "demo": (demos, "policy reused recomputed rows TTFT × full KV 1st KL"),
    "bench": (benches, "what µs p95 counted rate ceiling peer ÷ ours target: met"),
}
"""Of each command: what prints its table, and the words of the headings."""


# ---- what is expected of it ------------------------------------------------------------------


def numbers_of(text: str) -> Counter[str]:
    return Counter(word for word in text.split() if NUMBER.fullmatch(word))


@pytest.fixture(scope="module", params=TABLES)
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make, heads = TABLES[request.param]
    return make(tmp_path_factory.mktemp("tables")), heads


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_fit_and_lose_nothing(printed: tuple[Printed, str], width: int) -> None:
    show, heads = printed
    text = show(width)
    table = [line.rstrip() for line in text.splitlines() if not line.startswith("for ")]
    assert max(map(cell_len, table)) <= width
    words = Counter(text.split())
    assert not Counter(heads.split()) - words, "a heading is cut or lost"
    cut = numbers_of(show(WIDE)) - numbers_of(text)
    assert not cut, "numbers that a wider terminal shows whole"


def test_numbers_are_told_from_words() -> None:
    text = "0.1234 0.0911–0.1876 .05 95% 1,024 12 −130 (30%) a1 1.5x share=0.1"
    assert list(numbers_of(text)) == text.split()[:8]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        runner = Runner(tiny("llama"), max_tokens=1024, check=False, progress=False)
        server = stack.enter_context(runner.serve())
        server.submit(random_tokens(60, 1), max_new_tokens=2, stop=()).result()
        yield stack.enter_context(server.expose()).url


def test_stats_fit(served: str) -> None:
    """Counts go on while they are looked at, so they are not compared."""
    for width in WIDTHS:
        lines = in_terminal(width, "stats", served).splitlines()
        assert max(cell_len(line.rstrip()) for line in lines) <= width
        assert {"what", "of", "count"} <= set(lines[1].split())
        assert all(NUMBER.fullmatch(line.split()[-1]) for line in lines[3:] if line.strip())


def test_pipes_get_no_colours_and_all_columns(tmp_path: Path) -> None:
    result = call("store", "ls", store_of(tmp_path))
    assert "\x1b" not in result.stdout
    assert set(TABLES["store"][1].split()) <= set(result.stdout.split())


def store_of(folder: Path) -> Path:
    stores(folder)
    return folder / "kv"


def test_what_is_written_has_the_same_numbers(tmp_path: Path) -> None:
    head_maps(tmp_path)
    path = tmp_path / "made.json"
    words = ("--scores", tmp_path / "scores.json", "--share", 0.3, "--out", path)
    text = in_terminal(80, "profile-heads", *words)
    whole = [head for head in json.loads(path.read_text())["heads"] if head["reach"] == "global"]
    assert f"{len(whole)} of 640 KV heads" in text
