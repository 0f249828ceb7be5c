"""Engines that are refused while they start, by vLLM's own options as an operator gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from kvweave import CorruptHeadMap, InvalidArgument, Unsupported
from kvweave.adapters.vllm import models
from kvweave.adapters.vllm.serving import engine_options
from kvweave.runner.model.sampled_weights import sampled_weights
from kvweave.weight_sample import WeightComparison, samples_json
from test_head_split import checkpoint_of, written
from vllm_engines import OURS, answers, engine, ours, prompt


@pytest.mark.parametrize("part", ["segments", "heads"])
def test_adapters_are_refused(checkpoint, tmp_path, part: str) -> None:
    given = {"heads": str(written(tmp_path, 16, 64))} if part == "heads" else {}
    choice = engine_options("LlamaForCausalLM", **(given or {"segment_bytes": 1 << 22}))
    started = engine(checkpoint_of(checkpoint, "llama"), choice, enable_lora=True)
    with pytest.raises(Exception, match="lora_config") as raised, started:
        pass
    error = ours(raised.value)
    assert isinstance(error, Unsupported), raised.value


@pytest.mark.parametrize("ours_too", [False, True])
def test_an_unknown_option_is_refused(checkpoint, *, ours_too: bool) -> None:
    """Beside our backend with vLLM's own class too, which would read no option."""
    choice = engine_options("LlamaForCausalLM", segment_bytes=1 << 22) if ours_too else OURS
    section = choice.get("additional_config", {}).get("kvweave", {})
    choice = {**choice, "additional_config": {"kvweave": {**section, "segment_byte": 1 << 22}}}
    expected = "additional_config: kvweave: expected the options heads, .*, got 'segment_byte'"
    started = engine(checkpoint_of(checkpoint, "llama"), choice)
    with pytest.raises(Exception, match=expected) as raised, started:
        pass
    assert isinstance(ours(raised.value), InvalidArgument), raised.value


def map_of(folder: Path, model: Path, *, change: float = 0.0) -> Path:
    """A map with values of a checkpoint's weights, one of which is another by so much."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    path = written(folder, 16, 64)
    plain = json.loads(path.read_text())
    plain["weights"] = samples_json(sampled_weights(loaded))
    plain["weights"]["layers.2.self_attn.k_proj.weight"]["values"][1] += change
    path.write_text(json.dumps(plain))
    return path


def test_a_map_of_another_model_is_refused(checkpoint, tmp_path) -> None:
    """Of the same class, shape and dtype: by a value of its weights, while they are loaded."""
    model = checkpoint_of(checkpoint, "llama")
    path = map_of(tmp_path, model, change=0.01)
    choice = engine_options("LlamaForCausalLM", heads=str(path))
    with pytest.raises(Exception, match="k_proj") as raised, engine(model, choice):
        pass
    error = ours(raised.value)
    assert isinstance(error, CorruptHeadMap), raised.value
    assert "whose layers.2.self_attn.k_proj.weight is with" in str(error.expected)
    assert "one of another model, with" in str(error.got)


def test_a_map_of_the_model_is_compared_and_served(checkpoint, tmp_path, monkeypatch) -> None:
    """Each of its values, in another dtype than it was measured in too."""
    seen: list[WeightComparison] = []
    monkeypatch.setattr(models, "log_compared", seen.append)
    model = checkpoint_of(checkpoint, "llama")
    path = map_of(tmp_path, model)
    choice = engine_options("LlamaForCausalLM", heads=str(path))
    with engine(model, choice, dtype="bfloat16") as llm:
        assert len(answers(llm, [prompt(40, 1)], 4)[0].tokens) == 4
    (compared,) = seen
    assert compared.seen == set(json.loads(path.read_text())["weights"])
