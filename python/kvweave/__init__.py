"""A structured KV cache for long-context language models.

`import kvweave` loads the cache and its native module only. What needs torch (ops, runner,
policies, models) is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvweave.cache import (
    Arena,
    FrozenSegment,
    HeadClassMap,
    HeadGroup,
    KvCache,
    KvRequest,
    KvShape,
    PlanSpan,
    ReusePlan,
    __version__,
    cuda_status,
)
from kvweave.errors import (
    AlreadyStepping,
    Cancelled,
    CorruptHeadMap,
    CorruptPayload,
    CorruptProfile,
    CorruptShard,
    DeviceUnavailable,
    ForeignShard,
    ForeignStore,
    InvalidArgument,
    KvweaveError,
    NamespaceConflict,
    OutOfMemory,
    PolicySwitchedOff,
    PoolFull,
    QuotaExceeded,
    StoreDegraded,
    StoreFull,
    StoreUnavailable,
    TransferFailed,
    UncertifiedPolicy,
    UnknownSegment,
    UnknownShard,
    Unsupported,
)
from kvweave.remote import RemoteStore
from kvweave.store import Provenance, Shard, Store, StoredShard

if TYPE_CHECKING:
    from kvweave import lab, models, ops, payload, policies, runner
    from kvweave.adapters.transformers import PagedCache
    from kvweave.policies import (
        CacheBlend,
        Epic,
        Foresight,
        Full,
        InfoFlow,
        Naive,
        Policy,
        Prefix,
        Prophet,
        RandomRows,
        RedKnot,
        SparseX,
        Weave,
    )
    from kvweave.policies.policy_profile import PolicyProfile
    from kvweave.runner import (
        AsyncRunner,
        Beam,
        Canary,
        Conversation,
        Engine,
        EngineRequest,
        Generation,
        Healing,
        Packing,
        Prefill,
        Report,
        Runner,
        Sampling,
        Segment,
        ServedRequest,
        Server,
        Strategy,
        Tenant,
        Workflow,
    )

_MODULES = ("lab", "models", "ops", "payload", "policies", "runner")
_LATER = {
    **dict.fromkeys(
        (
            "AsyncRunner",
            "Beam",
            "Canary",
            "Conversation",
            "Engine",
            "EngineRequest",
            "Generation",
            "Healing",
            "Packing",
            "Prefill",
            "Report",
            "Runner",
            "Sampling",
            "Segment",
            "ServedRequest",
            "Server",
            "Strategy",
            "Tenant",
            "Workflow",
        ),
        "kvweave.runner",
    ),
    **dict.fromkeys(
        (
            "CacheBlend",
            "Epic",
            "Foresight",
            "Full",
            "InfoFlow",
            "Naive",
            "Policy",
            "Prefix",
            "Prophet",
            "RandomRows",
            "RedKnot",
            "SparseX",
            "Weave",
        ),
        "kvweave.policies",
    ),
    "PagedCache": "kvweave.adapters.transformers",
    "PolicyProfile": "kvweave.policies.policy_profile",
}

__all__ = [
    "AlreadyStepping",
    "Arena",
    "AsyncRunner",
    "Beam",
    "CacheBlend",
    "Canary",
    "Cancelled",
    "Conversation",
    "CorruptHeadMap",
    "CorruptPayload",
    "CorruptProfile",
    "CorruptShard",
    "DeviceUnavailable",
    "Engine",
    "EngineRequest",
    "Epic",
    "ForeignShard",
    "ForeignStore",
    "Foresight",
    "FrozenSegment",
    "Full",
    "Generation",
    "HeadClassMap",
    "HeadGroup",
    "Healing",
    "InfoFlow",
    "InvalidArgument",
    "KvCache",
    "KvRequest",
    "KvShape",
    "KvweaveError",
    "Naive",
    "NamespaceConflict",
    "OutOfMemory",
    "Packing",
    "PagedCache",
    "PlanSpan",
    "Policy",
    "PolicyProfile",
    "PolicySwitchedOff",
    "PoolFull",
    "Prefill",
    "Prefix",
    "Prophet",
    "Provenance",
    "QuotaExceeded",
    "RandomRows",
    "RedKnot",
    "RemoteStore",
    "Report",
    "ReusePlan",
    "Runner",
    "Sampling",
    "Segment",
    "ServedRequest",
    "Server",
    "Shard",
    "SparseX",
    "Store",
    "StoreDegraded",
    "StoreFull",
    "StoreUnavailable",
    "StoredShard",
    "Strategy",
    "Tenant",
    "TransferFailed",
    "UncertifiedPolicy",
    "UnknownSegment",
    "UnknownShard",
    "Unsupported",
    "Weave",
    "Workflow",
    "__version__",
    "cuda_status",
    "lab",
    "models",
    "ops",
    "payload",
    "policies",
    "runner",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _LATER:
        raise AttributeError(f"module 'kvweave' has no attribute {name!r}")
    try:
        module = import_module(_LATER.get(name, f"kvweave.{name}"))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvweave"):
            raise
        raise ModuleNotFoundError(
            f"kvweave.{name}: expected the package {error.name} to be installed; "
            "run: pip install 'kvweave[transformers]'",
            name=error.name,
        ) from error
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
