"""A name for the model that an engine serves: KV that outlives the engine is kept under it.

Neither vLLM's scheduler nor its workers know a fingerprint of the weights, and the scheduler's
process has none of them. What both have is where the weights came from: of each tensor there a few
runs of bytes are hashed, so the cost does not grow with the model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvweave.adapters.vllm.checkpoint import StoredTensors
from kvweave.adapters.vllm.require import require

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
RUNS, RUNS_ALONE, RUN_BYTES = 4, 4096, 256
"""Runs of bytes that are read of each tensor, evenly apart, or of a file of an unknown kind."""
# What transformers notes about itself when it saves or loads; architectures are ours or vLLM's for
# the same weights, and dtype is compared by itself.
_NOTED = {"architectures", "dtype", "torch_dtype", "transformers_version"}


def model_identity(config: Any) -> str:
    """SHA-256 of a model's configuration and weights, of a `VllmConfig` whose model is loaded.

    The configuration is the one that is served, with what the user overrides of it (RoPE, say).
    Weights of `load_format="dummy"` are named by their seed.

    Errors: `Unsupported` where the weights are no files on this machine, or LoRA changes them, and
    as `StoredTensors.of`.
    """
    require("lora_config", config.lora_config is None, "none beside a store", "one")
    model, load = config.model_config, config.load_config
    settings = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if not name.startswith("_") and name not in _NOTED
    }
    kind = str(getattr(load.load_format, "value", load.load_format))
    named = [settings, str(model.quantization), str(model.model_impl), kind]
    digest = hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode())
    if kind == "dummy":
        digest.update(str(model.seed).encode())
        return digest.hexdigest()
    for path in weight_files(config):
        digest.update(_sampled(path))
    return digest.hexdigest()


def weight_files(config: Any) -> list[Path]:
    """The files that the weights of a `VllmConfig`'s model came from.

    Errors: `Unsupported` where they are no files on this machine.
    """
    model, load = config.model_config, config.load_config
    folder = Path(model.model_weights or model.model)
    if not folder.exists():
        folder = _snapshot(str(folder), model.revision, load.download_dir)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    found = [path for path in files if path.is_file() and path.suffix in WEIGHTS]
    require("model", bool(found), "files of weights on this machine", f"none in {folder}")
    return found


def _snapshot(name: str, revision: str | None, cache: str | None) -> Path:
    """Where the hub's client has put what vLLM loaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        require("model", False, "files of weights on this machine", name)
        raise
    return Path(found)


def _sampled(path: Path) -> bytes:
    """A digest of a file's size and of runs of its bytes."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        spans = _spans(path) if path.suffix == ".safetensors" else [(0, size)] * (size > 0)
        for begin, end in spans:
            last = max(end - begin - RUN_BYTES, 0)
            count = RUNS if len(spans) > 1 else RUNS_ALONE
            for place in range(count):
                file.seek(begin + last * place // (count - 1))
                digest.update(file.read(RUN_BYTES))
    return digest.digest()


def _spans(path: Path) -> list[tuple[int, int]]:
    """Where the header of a safetensors file is, and each of its tensors."""
    tensors = StoredTensors.of(path)
    return [(0, tensors.base), *sorted((one.begin, one.end) for one in tensors.by_name.values())]
