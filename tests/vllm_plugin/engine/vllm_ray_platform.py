"""vLLM's CPU platform with a resource by which Ray places workers."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpusOfRay(CpuPlatform):
    """A worker takes one of what Ray calls GPU, of which a node may be told to have any number."""

    ray_device_key = "GPU"
