"""The check of marks beside a model of so many layers, by its name; vLLM is not needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvweave.adapters.vllm.segments.check_layers import PATH, CheckedLayers, layers_in
from kvweave.adapters.vllm.serving import engine_options

OF_30 = f"{PATH}Of30Layers"


class MarkerCheck:
    """A class of ours as a user may give it, whose name is that of the real one."""


MarkerCheck.__module__ = PATH.partition(":")[0]


def checked(given: Any, layers: int = 30) -> Any:
    """A double of vLLM's configuration of a model, which has been asked about."""
    text = SimpleNamespace(num_hidden_layers=layers)
    config = SimpleNamespace(logits_processors=given, hf_text_config=text)
    CheckedLayers.verify_and_update_model_config(config)
    return config.logits_processors


def test_the_check_is_looked_up_by_its_layers() -> None:
    assert checked([PATH]) == checked([MarkerCheck]) == [OF_30]
    # A configuration that is made of another one, of a draft model perhaps.
    assert checked(checked([PATH])) == [OF_30]
    assert checked(checked([PATH]), 4) == [f"{PATH}Of4Layers"]


def test_what_the_plugins_options_ask_for_is_known() -> None:
    asked = engine_options("LlamaForCausalLM", segment_bytes=1 << 20)["logits_processors"]
    assert checked(asked) == [OF_30]


def test_other_processors_stay() -> None:
    others = ["a.module:MarkerCheck", "a.module:MarkerCheckOf3Layers", f"{PATH}s", dict]
    assert checked([*others, PATH]) == [*others, OF_30]
    for none in (None, []):
        assert checked(none) is none
    CheckedLayers.verify_and_update_config(SimpleNamespace())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("MarkerCheckOf30Layers", 30),
        ("MarkerCheckOf1Layers", 1),
        ("MarkerCheck", None),
        ("MarkerCheckOfLayers", None),
        ("MarkerCheckOf-1Layers", None),
        ("__path__", None),
    ],
)
def test_names_say_how_many(name: str, layers: int | None) -> None:
    assert layers_in(name) == layers
