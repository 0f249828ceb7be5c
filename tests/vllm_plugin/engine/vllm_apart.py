"""An engine that prefills for another one, or decodes what another one prefilled: a program.

Its argument is a JSON object, `model`, `choice` and `changes` as `vllm_engines.engine` takes them.
Its first line says that it is ready; then it answers each line that asks for tokens with a line,
until there are no more.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import vllm_cpu_ops

if __name__ == "__main__" and os.environ["VLLM_TARGET_DEVICE"] == "cpu":
    vllm_cpu_ops.define()


def say(**found: Any) -> None:
    """One line of results."""
    print(json.dumps(found), flush=True)


def answered(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Tokens of a prompt, and where an engine that is told so finds its blocks.

    `read`: tokens of all prompts so far that came from another engine.
    """
    from vllm_engines import answer, metric, sampling

    params = sampling(asked["count"])
    params.extra_args = {"kv_transfer_params": asked["transfer"]}
    (output,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], params, use_tqdm=False)
    said = answer(output)
    return {
        "tokens": said.tokens,
        "logprobs": said.logprobs,
        "ended": output.outputs[0].finish_reason,
        "read": metric(llm, "external_prefix_cache_hits"),
        "transfer": output.kv_transfer_params,
    }


def main(given: dict[str, Any]) -> None:
    """Starts the engine and answers."""
    from vllm_engines import engine

    with engine(Path(given["model"]), given["choice"], **given["changes"]) as llm:
        say(ready=True)
        for line in sys.stdin:
            say(**answered(llm, json.loads(line)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
