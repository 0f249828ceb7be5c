"""Documents in packed pages on a GPU: prompts that hold them say what the CPU says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave.policies import Foresight
from kvweave.runner import Runner
from packed_decoding import nothing_is_held, packed_runner, steps_of
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 200
NEAR = {torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference of a logit, as a share of the largest."""

DOCUMENTS = documents([300, 40, 129])


def there(dtype: torch.dtype, head_dim: int, device: str) -> Runner:
    sizes = {"head_dim": head_dim, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    model = tiny("llama", **sizes).to(device, dtype)
    runner = packed_runner(model, max_tokens=16384, chunk_tokens=200)
    insert_all(runner, DOCUMENTS)
    return runner


def forget(runner: Runner) -> None:
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


def logits_of(
    runner: Runner, prompt: Any, policy: Any, said: list[int] | None
) -> tuple[list[int], torch.Tensor]:
    """What is said behind a prompt, or `said`, and the logits of each step."""
    asked = {"reserve_tokens": STEPS, "remember": False, "watched": False}
    with runner.prefill(prompt, policy, **asked) as done:
        first = done.logits[-1].float().clone()
        sequence = decoding(runner, done, STEPS + 1)
        if said is not None:
            sequence.tokens[-1] = said[0]
        seen = steps_of(runner, sequence, STEPS, None if said is None else said[1:])
        return list(sequence.tokens), torch.stack([first, *seen]).cpu()


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_says_what_the_cpu_says(dtype: torch.dtype, head_dim: int) -> None:
    """Prompts with documents, as they are and with rows computed anew that nothing measured."""
    host, device = there(dtype, head_dim, "cpu"), there(dtype, head_dim, "cuda")
    prompt = [fresh(70, 1), *DOCUMENTS, DOCUMENTS[0], fresh(50, 2)]
    for policy in ("naive", "epic"):
        said, wanted = logits_of(host, prompt, policy, None)
        _, got = logits_of(device, prompt, policy, said)
        apart = (got - wanted).abs().max() / wanted.abs().max()
        assert float(apart) < NEAR[dtype]
    forget(device)


def test_foresight_drafts_and_measures_there() -> None:
    runner = there(torch.bfloat16, 128, "cuda")
    prompt = [fresh(70, 1), *DOCUMENTS, fresh(50, 2)]
    with runner.prefill(prompt, Foresight(share=0.2, draft=8), watched=False) as done:
        assert done.report.recomputed == 120
        assert [one.kind for one in done.report.passes] == ["layers", "draft", "layers"]
        assert done.logits.isfinite().all()
    forget(runner)


def test_prompts_with_documents_share_captured_steps_with_others() -> None:
    """They join and leave, and what is said is what is said launched one kernel at a time."""
    prompts: list[Any] = [
        [fresh(70, 1), *DOCUMENTS, fresh(50, 2)],
        random_tokens(150, 3),
        [DOCUMENTS[0], fresh(9, 4)],
        random_tokens(400, 5),
    ]
    answers = []
    for captured in (True, False):
        runner = there(torch.bfloat16, 128, "cuda")
        if not captured:
            runner._decoder.graphs = None
        engine = runner.engine()
        known = {"max_new_tokens": 150, "stop": (), "remember": False}
        said = [engine.submit(prompt, "naive", **known) for prompt in prompts[:2]]
        for _ in range(40):
            engine.step()
        said += [engine.submit(prompt, "naive", **known) for prompt in prompts[2:]]
        engine.run()
        answers.append([one.result().tokens for one in said])
        engine.close()
        forget(runner)
    for one, other in zip(*answers, strict=True):
        assert len(one) == len(other) == 150
        # Near-ties turn where a batch has other rows beside it; the first tokens do not.
        assert one[:5] == other[:5]
