"""What stock vLLM answers where no plugin is loaded: a program that prints JSON lines.

Its argument is a JSON object, by model `[folder, options]`; a line is what an engine of it said, or
by what it failed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import vllm_cpu_ops

if __name__ == "__main__":
    os.environ["VLLM_PLUGINS"] = ""
    if os.environ["VLLM_TARGET_DEVICE"] == "cpu":
        vllm_cpu_ops.define()


def main(given: dict[str, tuple[str, dict[str, object]]]) -> None:
    """Starts one engine after the other."""
    from vllm import ModelRegistry

    from test_other_models import said_by

    for name, (folder, options) in given.items():
        print(json.dumps({"model": name, **said_by(Path(folder), options)}), flush=True)
    assert not any(known.startswith("Kvweave") for known in ModelRegistry.models)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
