"""The loads and the tables of vLLM's own benchmarks, where no vLLM is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.vllm import own_tests, vllm_bench, vllm_command
from benchmarks.vllm.rag_text import RagLoad, prompts, write_custom, write_tokenizer
from kvweave import InvalidArgument

LOAD = RagLoad(
    requests=40,
    documents=8,
    document_tokens=(20, 40),
    together=(2, 4),
    question_tokens=5,
    answer_tokens=7,
    most_tokens=120,
)


def test_prompts_are_documents_that_come_again(tmp_path: Path) -> None:
    write_custom(tmp_path / "rag.jsonl", LOAD, 500)
    rows = [json.loads(line) for line in (tmp_path / "rag.jsonl").read_text().splitlines()]
    assert [row["output_tokens"] for row in rows] == [7] * 40
    texts = [row["prompt"].split() for row in rows]
    assert all(2 * 20 + 5 <= len(words) <= 120 for words in texts)
    starts = Counter(" ".join(words[:20]) for words in texts)
    # Whoever is first in the list comes most often, and not always at the start.
    assert 1 < len(starts) <= LOAD.documents
    assert prompts(LOAD, 500) == [row["prompt"] for row in rows]


def test_a_word_is_a_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 500)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = prompts(LOAD, 500)[0]
    ids = tokenizer(text)["input_ids"]
    assert ids == [int(word[1:]) for word in text.split()]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 500
    chat = [{"role": "user", "content": text}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).strip() == text


def test_engines_have_their_options() -> None:
    heads = Path("heads.json")
    assert vllm_bench.options_of("stock", "LlamaForCausalLM", heads, 1) == []
    words = vllm_bench.options_of("segments", "LlamaForCausalLM", heads, 1 << 30)
    at = words.index("--additional-config") + 1
    assert json.loads(words[at]) == {"kvweave": {"segment_bytes": 1 << 30}}
    assert "--logits-processors" in words
    words = vllm_bench.options_of("mapped", "LlamaForCausalLM", heads, 1 << 30)
    at = words.index("--additional-config") + 1
    assert json.loads(words[at])["kvweave"] == {"segment_bytes": 1 << 30, "heads": "heads.json"}
    words = vllm_bench.options_of("heads", "LlamaForCausalLM", heads, 1)
    assert words[words.index("--block-size") + 1] == "16"


def test_a_run_is_called_by_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_bench.case_of(["rag"], 1) == "vllm_bench"
    assert vllm_bench.case_of(["rag"], 2) == "vllm_bench_ranks"
    assert vllm_bench.case_of(["prefix_repetition", "throughput"], 1) == "vllm_bench_own"
    for jobs, ranks in ((["rag", "throughput"], 1), (["throughput"], 2)):
        with pytest.raises(InvalidArgument, match=f"got {', '.join(jobs)} of {ranks}"):
            vllm_bench.case_of(jobs, ranks)
    with pytest.raises(SystemExit):
        vllm_bench.main(["--json", "x.json"])
    assert "got prefix_repetition, rag, throughput of 1" in capsys.readouterr().err


def test_rows_stand_beside_stocks() -> None:
    found = {"mean_ttft_ms": 10.0, "request_throughput": 2.0, "failed": 0}
    rows = vllm_bench.figures("rag", "stock", found, Counter())
    counted = Counter({vllm_bench.PROMPTS: 40, vllm_bench.REUSED: 30})
    slow = {**found, "mean_ttft_ms": 2.5, "failed": 3}
    rows += vllm_bench.figures("rag", "segments", slow, counted)
    beside = {row.name: row.of for row in vllm_bench.beside_stock(rows)}
    wanted = {"÷ stock": 0.25, "failed": 3, "reused": 0.75}
    assert beside["rag, mean_ttft_ms: segments"] == wanted
    assert beside["rag, mean_ttft_ms: stock"] == {}


def test_the_command_is_one_of_vllms() -> None:
    with pytest.raises(SystemExit, match="expected server or one of serve, throughput, got other"):
        vllm_command.main(["other"])


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure message="no"/></testcase>
<testcase classname="a" name="three"><error/></testcase>
<testcase classname="b" name="one"><skipped/></testcase>
</testsuite></testsuites>"""


def test_what_became_of_another_is_listed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    before = own_tests.outcomes_of(report)
    assert before == {
        "a::one": "passed",
        "a::two": "failed",
        "a::three": "error",
        "b::one": "skipped",
    }
    assert own_tests.differences(before, before) == []
    now = {**before, "a::one": "failed", "c::one": "passed"}
    assert own_tests.differences(before, now) == [
        "a::one: passed without, failed with",
        "c::one: missing without, passed with",
    ]
    rows = own_tests.rows_of({"without": before, "with": now})
    assert [(row.name, row.value, row.of.get("without the plugin")) for row in rows] == [
        ("tests that end as error", 1, 1),
        ("tests that end as failed", 2, 1),
        ("tests that end as passed", 1, 1),
        ("tests that end as skipped", 1, 1),
        ("tests that end otherwise than without", 2, None),
    ]


def test_both_runs_are_of_the_same_tests(tmp_path: Path) -> None:
    """A source of two tests, one of which looks at what was loaded, and a double of vLLM."""
    double = tmp_path / "double" / "vllm"
    double.mkdir(parents=True)
    (double / "__init__.py").touch()
    (double / "plugins.py").write_text("def load_general_plugins(): pass\n")
    platform = "class current_platform:\n    is_cpu = staticmethod(lambda: True)\n"
    (double / "platforms.py").write_text(platform)
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    settings = '[tool.pytest.ini_options]\nmarkers = ["skip_global_cleanup"]\n'
    (source / "pyproject.toml").write_text(settings)
    code = "import os\ndef test_a(): pass\n"
    code += "def test_b(): assert 'kvweave' not in os.environ['VLLM_PLUGINS'].split(',')\n"
    code += "def test_c(request): assert request.node.get_closest_marker('skip_global_cleanup')\n"
    (source / "tests" / "test_it.py").write_text(code)
    apart = own_tests.isolated(tmp_path, source)
    found = [
        own_tests.ran(
            apart, ["tests/test_it.py"], plugins, tmp_path / f"{name}.xml", 120, double.parent
        )
        for name, plugins in own_tests.PLUGINS.items()
    ]
    (line,) = own_tests.differences(*found)
    assert line.endswith("test_b: passed without, failed with")
    assert {name[-6:]: end for name, end in found[0].items()}["test_c"] == "passed"
