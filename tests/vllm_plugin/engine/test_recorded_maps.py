"""The recorded head maps of two real models, served by an engine on those models' weights.

Weights are taken from what `kvweave.models` has kept of them on this machine (`make demo` loads one
of the two): nothing is fetched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from kvweave import HeadClassMap, models
from kvweave.cli import app
from kvweave.runner import Runner, TokenizedPrompt
from test_head_split import is_split
from vllm_engines import STOCK, Answer, answers, clean, engine, same

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.environ["VLLM_TARGET_DEVICE"] != "cpu", reason="compares f32 on the CPU"),
]
ROOT = Path(__file__).parents[3]
NUMBER = "The registration number of the licence is"
HIDDEN = f"\n\n{NUMBER} 48213.\n\n"
ASKED = f"\n\nWhat is the registration number of the licence? {NUMBER}"
COUNT = 8
"""Tokens of an answer."""
WINDOW = 16 + 256
"""Tokens that local heads of both maps keep."""


@dataclass(frozen=True)
class Real:
    """A model and its recorded map. `prompts`: two far longer than windows, and one within them."""

    model: Any
    path: Path
    prompts: list[list[int]]


@pytest.fixture(params=["smollm2", "qwen-coder"])
def real(request: Any) -> Real:
    # The plugin's environment is without what finds this folder on other systems.
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvweave" / "models"
    try:
        model, tokenizer = models.load(request.param, torch.float32, cache_dir=kept)
    except (models.ModelUnavailable, ImportError) as error:
        pytest.skip(f"its weights are not kept here: {error}")
    text = (ROOT / "LICENSE").read_text("utf-8")
    long = text[:300] + HIDDEN + text[300:] + text[:4000] + ASKED
    prompts = [tokenizer(part).input_ids for part in (long, text[2000:5000], text[:800])]
    assert len(prompts[0]) > 2500
    assert len(prompts[1]) > 2 * WINDOW > 2 * (len(prompts[2]) + COUNT)
    return Real(model, ROOT / f"benchmarks/records/heads/{request.param}.json", prompts)


def runners_answer(runner: Runner, tokens: list[int]) -> Answer:
    """Greedy tokens, and the log-probability of each, of the Runner."""
    whole = TokenizedPrompt(np.asarray(tokens, np.int32), ())
    runner.tokenize = lambda _: whole  # type: ignore[method-assign]
    said: list[int] = []
    logprobs = []
    with runner.prefill("", "full", remember=False, reserve_tokens=COUNT) as done:
        logits = done.logits[-1]
        while True:
            said.append(int(logits.argmax()))
            logprobs.append(float(logits.float().log_softmax(-1)[said[-1]]))
            if len(said) == COUNT:
                return Answer(said, logprobs, 0)
            logits = runner.extend(done, said[-1:])[-1]


def configured(folder: Path, path: Path) -> dict[str, Any]:
    """What `kvweave vllm-config` writes for a model and a map, as arguments of an engine."""
    written = folder / "kvweave.yaml"
    words = ["vllm-config", str(folder), "--heads", str(path), "--out", str(written)]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "are the map's" in done.stderr) == (0, True), done.output
    return {name.replace("-", "_"): value for name, value in yaml.safe_load(written.open()).items()}


def test_a_recorded_map_is_served_on_its_models_weights(real: Real, tmp_path: Path) -> None:
    """Answers are the Runner's under the map, and stock's only as far as windows reach."""
    heads = HeadClassMap.from_json(real.path.read_text("utf-8"))
    runner = Runner(real.model, heads=heads, max_tokens=4096, progress=False, check=False)
    wanted = [runners_answer(runner, tokens) for tokens in real.prompts]
    real.model.save_pretrained(tmp_path)
    given = [{"prompt_token_ids": tokens} for tokens in real.prompts]
    big = {"max_model_len": 4096, "max_num_batched_tokens": 512}
    found, room = [], []
    for choice in (configured(tmp_path, real.path), STOCK):
        with engine(tmp_path, choice, **big) as llm:
            assert is_split(llm) is (choice is not STOCK)
            cache = llm.llm_engine.vllm_config.cache_config
            room.append(cache.kv_cache_max_concurrency)
            found.append(answers(llm, given, COUNT))
        clean()
    # pytest would keep gigabytes of it.
    (tmp_path / "model.safetensors").unlink()
    mapped, stock = found
    same(mapped, wanted, 1e-4)
    for under, without in zip(mapped[:2], stock[:2], strict=True):
        assert np.abs(np.subtract(under.logprobs, without.logprobs)).max() > 5e-2
    same(mapped[2:], stock[2:], 1e-4)
    # In the same memory, with one head in six or seven whole.
    assert room[0] > 3.5 * room[1]
