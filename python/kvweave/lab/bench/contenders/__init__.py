"""Who computes a case: our op and its peers, each with the same data.

A module here has `missing()`, why it cannot take part ("" if it can), and `contenders(problem)`,
what it can do with a problem. A call returns an answer as the problem checks it.
"""

from kvweave.lab.bench.contenders import fa3, flashinfer, kvweave, sdpa, torch_ops
from kvweave.lab.bench.contenders.contender import Contender, Peer

PEERS: dict[str, Peer] = {
    "fa3": fa3,
    "flashinfer": flashinfer,
    "sdpa": sdpa,
    "torch": torch_ops,
}
OURS: Peer = kvweave

__all__ = ["OURS", "PEERS", "Contender"]
