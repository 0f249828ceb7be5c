"""How `MarkerCheck` learns how many layers a model has: by the name that vLLM looks it up by.

vLLM gives a logits processor that looks at a request the request's parameters and nothing else, in
processes that may have several engines. What it does ask, in each process that makes a
configuration, is the entry that its table of models has for the architecture: that of ours is here.
"""

from __future__ import annotations

import re
from typing import Any

PATH = "kvweave.adapters.vllm.segments.check:MarkerCheck"
"""What a user asks for."""
_NAMED = re.compile(r"MarkerCheckOf(\d+)Layers")


class CheckedLayers:
    """An entry of vLLM's `MODELS_CONFIG_MAP`."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Nothing is changed of what is not the model's."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Has vLLM look up the check of a model of so many layers, where one was asked for."""
        given = model_config.logits_processors
        if given:
            layers = model_config.hf_text_config.num_hidden_layers
            model_config.logits_processors = [_named(one, layers) for one in given]


def layers_in(name: str) -> int | None:
    """The layers in the name of a check; None where it is no such name."""
    found = _NAMED.fullmatch(name)
    return None if found is None else int(found[1])


def _named(given: Any, layers: int) -> Any:
    """A logits processor, by its name or the class itself; that of ours by the layers' name."""
    path = f"{given.__module__}:{given.__qualname__}" if isinstance(given, type) else str(given)
    module, _, name = PATH.partition(":")
    # A configuration may be made of another one, which has been here.
    asked = path.removeprefix(f"{module}:")
    is_ours = path == PATH or (path != asked and layers_in(asked) is not None)
    return f"{module}:{name}Of{layers}Layers" if is_ours else given
