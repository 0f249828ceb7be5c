"""What `kvweave vllm-config` must know of a model, by its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvweave.cli.capacity_plan import shape_of
from kvweave.errors import InvalidArgument
from kvweave.models import PACKAGED, ModelUnavailable


@dataclass(frozen=True)
class ServedModel:
    """The architecture that a config names first, its L layers and G KV heads.

    `folder`: where the config is, and the weights where they are on this machine.
    """

    folder: Path
    architecture: str
    layers: int
    kv_heads: int


def served_model(model: str) -> ServedModel:
    """The model of a folder, or of a name on the hub. Neither transformers nor torch is imported.

    Errors: `ModelUnavailable` for a folder without a config and a name that has none, and
    `InvalidArgument` for a config without an architecture or the sizes of a decoder.
    """
    path = _config_file(model)
    shape = shape_of(str(path))
    # `shape_of` has read the file: it is an object of JSON.
    named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        expected = "architectures: the name of a class of vLLM's"
        raise InvalidArgument(f"{path}: expected {expected}, got {named!r}", expected=expected)
    return ServedModel(path.parent, named[0], shape.layers, shape.kv_heads)


def _config_file(model: str) -> Path:
    folder = Path(model)
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise ModelUnavailable(f"model {model}: expected a folder with config.json, got none")
        return path
    if model in PACKAGED:
        raise ModelUnavailable(
            f"model {model}: expected a model that vLLM can load, a folder with config.json or "
            "the name of one on the hub, got one of kvweave's packaged models"
        )
    return _of_hub(model)


def _of_hub(model: str) -> Path:
    """The config of a name, asked for once: without a network what is kept of it, or an error."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            # A download alone would ask a network that is not there for half a minute.
            get_hf_file_metadata(hf_hub_url(model, "config.json"))
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # Each version of the hub's client has its own errors of a network.
        said = str(error).strip().split("\n", 1)[0][:300]
        raise ModelUnavailable(
            f"model {model}: expected a folder with config.json, or the name of a model on the "
            f"hub, got: {said}; fetch it where there is a network, or name a folder that has it"
        ) from error
