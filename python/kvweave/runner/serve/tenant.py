"""`Tenant`: what one tenant may ask of a runner that others use too, and what he is told.

A `Runner` and its `Server` are for whoever serves tenants: they take any namespace that is named,
and count for all. Here the namespace is the tenant's whatever a request says, and what comes back
is his own: his answers, his documents, his counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvweave.arguments import real, shown, whole, word
from kvweave.errors import InvalidArgument, NamespaceConflict, PoolFull, QuotaExceeded
from kvweave.policies import Policy
from kvweave.runner.answers.stop import Stops
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.prompt import Part, Prompt, Segment
from kvweave.runner.report import Generation
from kvweave.runner.serve.held_back import HeldBack, TenantAnswer
from kvweave.runner.serve.server import Server

if TYPE_CHECKING:
    from kvweave.runner.runner import Runner


@dataclass(frozen=True)
class TenantDocument:
    """A document of the tenant's own: its name and its tokens."""

    name: str
    tokens: int


class Tenant:
    """One namespace of a runner that a server serves. From any thread.

    `quantum_s`: tokens are handed out that much later that the first one comes at a multiple of so
    many seconds behind its request, so that a hit and a miss between the same two look the same;
    None hands them out as they come. A quantum that is longer than computing takes hides which
    texts of his own namespace others have asked for; between namespaces there is nothing to hide.

    # Errors
    `InvalidArgument` for a quantum that is no time.
    """

    def __init__(
        self, runner: Runner, server: Server, namespace: str, *, quantum_s: float | None = None
    ) -> None:
        self.namespace = word("namespace", namespace)
        self._quantum = None if quantum_s is None else real("quantum_s", quantum_s)
        if self._quantum is not None and not 0 < self._quantum < float("inf"):
            raise InvalidArgument(f"quantum_s: expected more than 0 seconds, got {quantum_s}")
        self._runner = runner
        self._server = server
        self._lock = threading.Lock()
        self._counts = {"requests": 0, "prompt_tokens": 0, "reused_tokens": 0, "answer_tokens": 0}
        self._missed: Counter[str] = Counter()
        self._shared: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Tenant({self.namespace!r}, requests={self.stats()['requests']})"

    # ---- answers --------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
    ) -> HeldBack:
        """A request that waits from now on: iterate over its tokens, or wait for its `result`.

        Segments are of this namespace, whether they name it or none, or of one that is shared.

        # Errors
        `NamespaceConflict` for a segment that names another; as `Server.submit` for the rest.
        """
        own = self._own(prompt)
        with _without_numbers():
            request = self._server.submit(
                own,
                policy,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop=stop,
                namespace=self.namespace,
                publish=False,
            )
        return HeldBack(request, self._quantum, self._count)

    def generate(
        self, prompt: Prompt, policy: str | Policy | None = None, **how: Any
    ) -> TenantAnswer:
        """The answer of `submit`, once it has ended.

        # Errors
        As `submit` and `HeldBack.result`.
        """
        return self.submit(prompt, policy, **how).result()

    # ---- documents ------------------------------------------------------------------------

    def insert(self, content: str | Sequence[int], name: str) -> TenantDocument:
        """Computes a text alone and keeps it under a name of this namespace.

        # Errors
        `PoolFull` where there is no room, without saying how much others hold; `QuotaExceeded`.
        """
        with _without_numbers():
            made = self._server.call(lambda: self._runner.insert(content, name, self.namespace))
        return TenantDocument(made.name, made.tokens)

    def delete(self, name: str) -> None:
        """Gives a document up.

        # Errors
        `UnknownSegment` for one that this namespace has not.
        """
        self._runner.delete(name, self.namespace)

    def forget(self) -> None:
        """Evicts all of this namespace that no document or live request holds: `Runner.forget`."""
        self._runner.forget(self.namespace)

    def documents(self) -> list[TenantDocument]:
        """The documents of this namespace. What has become of their blocks tells of others."""
        found = self._runner.segments(self.namespace)
        return [TenantDocument(one.name, one.tokens) for one in found]

    def stats(self) -> dict[str, int]:
        """Of the requests that were made here and whose answer was taken."""
        with self._lock:
            return dict(self._counts)

    def missed(self) -> dict[str, int]:
        """Of the same requests, the tokens that were not reused, by the reason: `Report.missed`."""
        with self._lock:
            return dict(self._missed.most_common())

    # ---- for whoever serves ---------------------------------------------------------------

    def share(self, namespace: str) -> None:
        """Lets this tenant's segments name another namespace too, a library's for instance.

        It is for namespaces in which nobody prompts: what is cached of prompts there is found as
        documents are, and that it is found tells of them. Its documents are read where they lie,
        and stay whose they are: the tenant inserts, deletes and lists none of them, and what is
        computed of a text that it lacks is left in his own namespace. Holds for requests that come
        from now on, until `unshare`.

        # Errors
        `InvalidArgument` for what is no name, his own namespace, or the one without a name, which
        segments name that say nothing.
        """
        if word("namespace", namespace) in ("", self.namespace):
            expected = f"a namespace with a name, other than {self.namespace!r}"
            raise InvalidArgument(f"namespace: expected {expected}, got {shown(namespace)}")
        with self._lock:
            self._shared |= {namespace}

    def unshare(self, namespace: str) -> None:
        """Takes that back, for requests that come from now on.

        # Errors
        `InvalidArgument` for what is no name, or a namespace that is not shared with him.
        """
        with self._lock:
            if word("namespace", namespace) not in self._shared:
                known = ", ".join(map(repr, sorted(self._shared))) or "none"
                got = shown(namespace)
                raise InvalidArgument(f"namespace: expected one that is shared: {known}, got {got}")
            self._shared -= {namespace}

    # ---- inside ---------------------------------------------------------------------------

    def _own(self, prompt: Prompt) -> Prompt:
        """The prompt with all of its segments in this namespace."""
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            return prompt
        parts: list[Any] = list(prompt)
        return [self._own_part(part) if isinstance(part, Segment) else part for part in parts]

    def _own_part(self, part: Segment) -> Part:
        if part.namespace in self._shared:
            return part
        if part.namespace not in ("", self.namespace):
            raise NamespaceConflict(
                f"segment namespace: expected {self.namespace!r} or none, "
                f"got {shown(part.namespace)}"
            )
        return Segment(text=part.text, tokens=part.tokens, namespace=self.namespace)

    def _count(self, done: Generation) -> None:
        report = done.report
        with self._lock:
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += whole("tokens", report.tokens)
            self._counts["reused_tokens"] += report.reused_prefix + report.reused_segment
            self._counts["answer_tokens"] += len(done.tokens)
            self._missed.update(report.missed)


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Tells that there is no room, and not how much of it others have."""
    try:
        yield
    except QuotaExceeded:
        raise
    except PoolFull:
        text = "pool: expected room for this, got none now"
        # Without the cause: its text has the numbers.
        raise PoolFull(text) from None
