"""A real server of vLLM on the CPU, with a tiny model and a tiny tokenizer made on the spot."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from runpy import run_module
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import vllm_cpu_ops
from benchmarks.vllm.server import free_port, running, samples
from families import VOCABULARY

# The server, and what it starts.
if __name__ in ("__main__", "__mp_main__"):
    vllm_cpu_ops.define()

NAME, KEY = "tiny", "a key"
# Trims what it is given, as templates of well-known models do.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content | trim }}<|end|>{% endfor %}<|assistant|>"
)
SPECIAL = ("<s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>")
START_S = 600
OF_VLLM = ("engine", "model_name")
"""Labels of metrics that vLLM has all of its own say, too."""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of as many tokens as the tiny models have, with a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat and the hen and the fox went on and on"] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|end|>", chat_template=TEMPLATE
    )


def segment_options(choice: dict[str, Any]) -> list[str]:
    """`vllm_segments.settings` as options of the command, and the middleware."""
    return [
        *("--hf-overrides", json.dumps(choice["hf_overrides"])),
        *("--additional-config", json.dumps(choice["additional_config"])),
        *("--kv-transfer-config", json.dumps(choice["kv_transfer_config"])),
        *("--worker-extension-cls", choice["worker_extension_cls"]),
        *("--logits-processors", *choice["logits_processors"]),
        *("--middleware", "kvweave.adapters.vllm.server.SegmentMiddleware"),
    ]


@contextmanager
def served(model: Path, log: Path, options: list[str], **variables: str) -> Iterator[str]:
    """The address of a server, once it is ready; its output goes to `log`."""
    port = free_port()
    fixed = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": NAME,
        "--api-key": KEY,
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-batched-tokens": "512",
        "--max-num-seqs": "4",
        "--block-size": "16",
        "--distributed-executor-backend": "uni",
    }
    for name, value in vllm_cpu_ops.options().items():
        fixed[f"--{name.replace('_', '-')}"] = json.dumps(value)
    words = [word for pair in fixed.items() for word in pair]
    command = [sys.executable, __file__, "--enforce-eager"]
    # Asynchronous engines are in a process of their own; what tests import, it imports.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    with running([*command, *words, *options], port, START_S, log, env) as address:
        yield address


def fetched(address: str, method: str, value: Any = None, key: str = KEY) -> tuple[int, Any]:
    """Status and JSON body of an answer."""
    data = None if value is None else json.dumps(value).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urlopen(Request(address, data, headers, method=method)) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def scraped(address: str) -> dict[str, float]:
    """Samples of `/metrics` whose names are ours, by name and labels of ours."""
    found = {}
    for sample in samples(int(address.rpartition(":")[2])):
        if sample.name.startswith("kvweave_"):
            own = {name: sample.labels[name] for name in sample.labels if name not in OF_VLLM}
            kept = ",".join(f'{name}="{value}"' for name, value in own.items())
            found[sample.name.removeprefix("kvweave_") + f"{{{kept}}}" * bool(kept)] = sample.value
    return found


if __name__ == "__main__":
    # What `vllm serve` runs; the command itself knows the build for CPUs by another name.
    run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
