"""`vllm bench serve`, `vllm bench throughput` and the server, of any build of vLLM.

`python -m benchmarks.vllm.vllm_command serve|throughput|server WORDS…`: the command `vllm` itself
asks for the version of a distribution named `vllm`, which builds for CPUs are not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from runpy import run_module

from benchmarks.vllm import device

# The command, and the processes that it starts.
if __name__ in ("__main__", "__mp_main__"):
    device.prepare()
SERVER = "vllm.entrypoints.openai.api_server"
BENCHMARKS = ("serve", "throughput")


def main(words: list[str]) -> None:
    """Runs one of vLLM's commands with the words behind its name."""
    command, *rest = words
    if command == "server":
        sys.argv = [SERVER, *rest]
        run_module(SERVER, run_name="__main__")
        return
    if command not in BENCHMARKS:
        raise SystemExit(f"expected server or one of {', '.join(BENCHMARKS)}, got {command}")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    benchmark = import_module(f"vllm.benchmarks.{command}")
    parser = FlexibleArgumentParser(prog=f"vllm bench {command}")
    benchmark.add_cli_args(parser)
    benchmark.main(parser.parse_args(rest))


if __name__ == "__main__":
    main(sys.argv[1:])
