"""Workers that Ray starts, on CPUs: a cluster of two nodes on this machine.

vLLM's CPU platform names no resource by which Ray could place workers, so that vLLM refuses Ray
there ("current platform cpu does not support ray"). vLLM lets packages bring platforms of their
own: the one here is vLLM's with a name for that, and a node of the cluster says that it has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import vllm_cpu_ops

NODES = 2
ENTRY_POINTS = f"[vllm.platform_plugins]\ncpus_of_ray = {__name__}:platform\n"
OBJECT_STORE_BYTES = 80 << 20


def installed(folder: Path) -> Path:
    """A folder in which packages are found that bring the platform: one for PYTHONPATH."""
    made = folder / "kvweave_ray_cpus-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: kvweave-ray-cpus\nVersion: 0\n")
    (made / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def platform() -> str:
    """What vLLM calls in each of its processes: the name of a class."""
    from vllm_ray_platform import CpusOfRay

    vllm_cpu_ops.define()
    return f"{CpusOfRay.__module__}.{CpusOfRay.__name__}"


@contextmanager
def nodes() -> Iterator[None]:
    """A cluster whose nodes have room for one worker each; vLLM finds it by RAY_ADDRESS."""
    room = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    # What Ray writes beside its nodes, by a short path: sockets are in it.
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as beside:
        os.environ["RAY_TMPDIR"] = beside
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for _ in range(NODES):
                cluster.add_node(include_dashboard=False, **room)
            cluster.wait_for_nodes()
            os.environ["RAY_ADDRESS"] = cluster.address
            yield
        finally:
            cluster.shutdown()


def node(_: object) -> str:
    """In a worker: the node that it is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
