"""`model.generate` over a `PagedCache` whose pages are packed, on questions about hidden numbers.

`python -m benchmarks.quality.packed_generate --out FILE`: the contexts, questions and string match
of `kvpress_evaluation`, each prompt in the model's chat template. Of each form of pages it says how
many answers had their number, how many tokens of the greedy answers of exact pages are the
likeliest behind the ones before, how many tokens of prompts were found, and what the allocators
held behind the last answer. What is in FILE is not measured again.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import kvweave
from benchmarks.quality.kvpress_evaluation import ASKED, rows_of
from benchmarks.report.record import machine
from kvweave import models
from kvweave.adapters.transformers.cache_argument import cache_argument

FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"kv_dtype": "int8"},
    "int4": {"kv_dtype": "int4"},
    "half-int4": {"kv_dtype": "half-int4"},
    "planes-3": {"kv_dtype": "planes-3"},
    "int4, 4 pages read": {"kv_dtype": "int4", "top_k_pages": 4},
}
"""By name the settings of a cache."""


def prompt_of(tokenizer: Any, row: dict[str, Any]) -> torch.Tensor:
    """The ids i64 [1, T] of a question about its context."""
    talk = [{"role": "user", "content": row["context"] + row["question"]}]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    ids: torch.Tensor = tokenizer(
        text + row["answer_prefix"], add_special_tokens=False, return_tensors="pt"
    ).input_ids
    return ids


@torch.inference_mode()
def agreeing(model: Any, cache: Any, ids: torch.Tensor, answer: torch.Tensor) -> int:
    """How many tokens [n] of an answer are the likeliest behind a prompt [1, T] and those before.

    Each is a decode step.
    """
    known, at, same = {cache_argument(model.forward): cache}, ids.shape[1], 0
    places = torch.arange(at)[None]
    for token in answer.tolist():
        logits = model(ids, position_ids=places, logits_to_keep=1, **known).logits[0, -1]
        same += int(logits.argmax()) == token
        ids, places, at = torch.tensor([[token]]), torch.tensor([[at]]), at + 1
    return same


def measured(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], form: str, answers: list[torch.Tensor]
) -> dict[str, Any]:
    """One form of pages over all questions; `answers` of exact pages are made where none are."""
    matches = same = found = 0
    with kvweave.PagedCache(model, max_tokens=4096, max_rows=1, **FORMS[form]) as cache:
        for number, row in enumerate(rows):
            ids = prompt_of(tokenizer, row)
            said = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_argument(model.forward): cache},
                max_new_tokens=row["max_new_tokens"],
                do_sample=False,
            )[0, ids.shape[1] :]
            matches += row["answer"][0] in tokenizer.decode(said)
            found += cache.plans[0].reused_prefix
            if len(answers) < len(rows):
                answers.append(said)
            same += agreeing(model, cache, ids, answers[number])
        return {
            "string_match": round(100 * matches / len(rows), 2),
            "agreeing": round(same / sum(map(len, answers)), 4),
            "found": found,
            "bytes": cache.bytes,
            "arena_bytes": cache.arena_bytes,
            "dense_bytes": cache.dense_bytes,
        }


def main() -> None:
    """Measures each form that FILE has not yet, and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    known: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    figures: dict[str, Any] = known.get("forms", {})
    model, tokenizer = models.load("smollm2", torch.float32)
    rows = rows_of(tokenizer, given.contexts, given.tokens, given.seed)
    answers: list[torch.Tensor] = []
    for form in FORMS:
        if form in figures and answers:
            continue
        figures[form] = measured(model, tokenizer, rows, form, answers)
        settings = {key: getattr(given, key) for key in ("contexts", "tokens", "seed")}
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        record = {"date": now, **settings, "asked": ASKED, "machine": machine()}
        given.out.write_text(json.dumps({**record, "forms": figures}, indent=1) + "\n")
        print(form, figures[form], flush=True)


if __name__ == "__main__":
    main()
