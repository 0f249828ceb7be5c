"""Real weights under `model.generate` and a pipeline, and the documents' examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvweave
from cache_names import by_name, needs_both_names
from generated import computed_rows, said

DOCS = Path(__file__).resolve().parents[2] / "docs/transformers.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
MANUAL = "The filter of the pump P-7 is changed every spring, by two people. " * 8
QUESTIONS = ["When is the filter changed?", "How many people change it?", "Say why."]


@pytest.fixture
def sdpa(smollm2: Any) -> Any:
    model, tokenizer = smollm2
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    yield model, tokenizer
    model.set_attn_implementation(before)


@pytest.mark.long
def test_it_says_what_sdpa_says(sdpa: Any) -> None:
    model, tokenizer = sdpa
    prompts = [tokenizer(MANUAL + question, return_tensors="pt") for question in QUESTIONS]
    theirs = [said(model, dict(prompt), max_new_tokens=32) for prompt in prompts]
    with kvweave.PagedCache(model, max_tokens=2048) as cache, computed_rows(model) as counts:
        ours = [said(model, dict(prompt), cache=cache, max_new_tokens=32) for prompt in prompts]
    assert ours == theirs
    firsts = counts[::32]
    assert firsts[0] == prompts[0].input_ids.shape[1]
    assert max(firsts[1:]) < 12


def test_a_padded_batch_says_what_sdpa_says(sdpa: Any) -> None:
    model, tokenizer = sdpa
    given = dict(tokenizer(QUESTIONS, return_tensors="pt", padding=True, padding_side="left"))
    theirs = said(model, given, max_new_tokens=24)
    with kvweave.PagedCache(model, max_tokens=1024) as cache:
        assert said(model, given, cache=cache, max_new_tokens=24) == theirs


def test_a_pipeline_reuses_the_turns_before(sdpa: Any) -> None:
    model, tokenizer = sdpa
    answer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 16, "do_sample": False}
    talk = [{"role": "user", "content": MANUAL + QUESTIONS[0]}]
    theirs = answer(talk, **options)[0]["generated_text"]
    with kvweave.PagedCache(model, max_tokens=2048) as cache:
        ours = answer(talk, **by_name(model, cache), **options)[0]["generated_text"]
        turn = [*ours, {"role": "user", "content": QUESTIONS[1]}]
        again = answer(turn, **by_name(model, cache), **options)[0]["generated_text"]
        assert cache.plans[0].reused_prefix > 150
    assert ours == theirs
    turn = [*theirs, {"role": "user", "content": QUESTIONS[1]}]
    assert again == answer(turn, **options)[0]["generated_text"]


def test_stop_strings_and_streams(sdpa: Any) -> None:
    model, tokenizer = sdpa
    given = dict(tokenizer("One, two, three, four,", return_tensors="pt"))
    options = {"stop_strings": ["six"], "tokenizer": tokenizer, "max_new_tokens": 24}

    class Heard(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    theirs = said(model, given, **options)
    with kvweave.PagedCache(model, max_tokens=1024) as cache:
        heard = Heard()
        assert said(model, given, cache=cache, streamer=heard, **options) == theirs
    assert heard.tokens == [*theirs[0], -1]


@pytest.mark.long
def test_packed_pages_say_what_exact_ones_say(sdpa: Any) -> None:
    """INT8 in under half the bytes; the second question goes on behind the first one's pages."""
    model, tokenizer = sdpa
    prompts = [tokenizer(6 * MANUAL + question, return_tensors="pt") for question in QUESTIONS]
    made = []
    for kv_dtype in (None, "int8"):
        with kvweave.PagedCache(model, max_tokens=2048, kv_dtype=kv_dtype) as cache:
            made.append([said(model, dict(prompt), cache=cache) for prompt in prompts])
            if kv_dtype is not None:
                assert cache.plans[0].reused_prefix > 600
                assert cache.bytes < 0.55 * cache.dense_bytes
    assert made[0] == made[1]


@pytest.mark.long
@needs_both_names  # The page has the name of now.
def test_the_documents_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The first has under ten lines; all go on in one session."""
    assert len(EXAMPLES) == 5
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) < 10
    names: dict[str, Any] = {}
    for example in EXAMPLES[:3]:
        exec(compile(example, "docs/transformers.md", "exec"), names)
        if "talk" not in names:
            assert names["cache"].plans[0].reused_prefix > 100
    plan = names["cache"].plans[0]
    assert plan.reused_segment > plan.tokens / 2
    assert "by segment" in capsys.readouterr().out
    for example in EXAMPLES[3:]:
        exec(compile(example, "docs/transformers.md", "exec"), names)
    assert names["said"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert not names["model"].model._forward_pre_hooks
