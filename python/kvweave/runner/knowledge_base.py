"""`KnowledgeBase`: the documents of a runner, each encoded once and kept under a name."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.arguments import several, shown, word
from kvweave.cache import FrozenSegment, KvCache
from kvweave.errors import InvalidArgument
from kvweave.runner.knowledge import Knowledge
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.progress import track
from kvweave.runner.prompt import PromptTokenizer, Segment, TokenizedPrompt
from kvweave.runner.report import Report
from kvweave.runner.tiers.tiers import Tiers
from kvweave.store import Store


class KnowledgeBase:
    """What a `Runner` does with documents, which stay until they are deleted."""

    cache: KvCache
    packed: PackedPool | None
    prompts: PromptTokenizer
    progress: bool
    tiers: Tiers | None
    _knowledge: Knowledge

    def insert(
        self,
        content: str | Sequence[int],
        name: str,
        namespace: str = "",
        *,
        store: Store | None = None,
    ) -> FrozenSegment:
        """Prefills a text alone and freezes its blocks under a name in a namespace.

        With a store the text is read from there if it was kept before, and kept there otherwise,
        under the same name: a runner that starts again reads it instead of computing it. One that
        is named here has kept it when this returns; the runner's own has when `flush` does.

        # Errors
        `PoolFull` when it does not fit the arena or the share of it that may be frozen;
        `QuotaExceeded`, `StoreFull`, `StoreUnavailable` when the store cannot keep it: then it is
        frozen here all the same.
        """
        self._knowledge.insert(self._document(content, name, namespace), name, namespace, store)
        return self._books.frozen_segment(name, namespace)

    def encode(self, content: str | Sequence[int], name: str, namespace: str = "") -> Report:
        """Like `insert`, but computes it in any case, and returns what that cost."""
        return self._knowledge.encode(self._document(content, name, namespace), name, namespace)

    @property
    def _books(self) -> KvCache:
        """Whose blocks documents are frozen in."""
        return self.cache if self.packed is None else self.packed.cache

    def _document(self, content: str | Sequence[int], name: str, namespace: str) -> TokenizedPrompt:
        """The text of a document; told before anything is computed for it."""
        if not word("name", name):
            raise InvalidArgument("name: expected at least one character, got ''")
        word("namespace", namespace)
        tokens = self.prompts.segment_tokens(Segment.of(content, namespace))
        return self.prompts.tokenize(tokens)

    def restore(
        self, store: Store | None = None, namespace: str = "", *, name: str | None = None
    ) -> list[FrozenSegment]:
        """Freezes documents that a store keeps, of a namespace or a single one; computes nothing.

        None is the runner's own store.

        # Errors
        `UnknownSegment` for a name that is not there. `CorruptShard`, `ForeignShard` for one that
        is spoiled, or of another model, dtype, head map or frequencies of RoPE; where all are
        asked for, such a one is left out with a warning, `StoreDegraded`. `PoolFull`,
        `QuotaExceeded` when one does not fit, those before it being frozen.
        """
        restored = self._knowledge.restore(store, word("namespace", namespace), name)
        return [self._books.frozen_segment(each, namespace) for each in restored]

    def insert_many(
        self,
        contents: Sequence[tuple[str, str | Sequence[int]]],
        namespace: str = "",
        *,
        store: Store | None = None,
    ) -> list[FrozenSegment]:
        """Inserts (name, content) pairs, with a progress bar."""
        for pair in several("contents", contents, "(name, content)"):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InvalidArgument(f"contents: expected (name, content), got {shown(pair)}")
        named = track(contents, "encoding segments", self.progress)
        return [self.insert(content, name, namespace, store=store) for name, content in named]

    def delete(self, name: str, namespace: str = "") -> None:
        """Unfreezes a segment; its blocks may then be evicted. The runner's store forgets its name.

        # Errors
        `UnknownSegment` when there is none of that name in that namespace.
        """
        self._books.delete(word("name", name), word("namespace", namespace))
        self._knowledge.deleted(name, namespace)
        if self.tiers is not None:
            self.tiers.forget(name, namespace)

    def flush(self) -> None:
        """Returns when the runner's store keeps every document that was inserted.

        And when each is packed finally that is to be, where pages are packed in a basis.

        # Errors
        What the store raised for the first since the last call that it does not keep: `StoreFull`,
        `QuotaExceeded`, `StoreUnavailable`. The document is frozen here all the same.
        """
        # What is packed finally is kept then.
        self._knowledge.flush()
        if self.tiers is not None:
            self.tiers.flush()

    def packing_stats(self) -> dict[str, int]:
        """What became of documents that were to be packed in a basis of their own.

        `final`: they are; `kept`: they stay as they were packed first; `failed`: so they do, for
        something went wrong. `copied_bytes`: of the host's memory, for those that wait.
        """
        return self._knowledge.packing_stats()

    def close(self) -> None:
        """Waits until the runner's store keeps what was inserted, and ends its threads.

        Nothing is raised: what is not kept was warned of (`StoreDegraded`), and documents that wait
        for a basis of their own stay as they are packed. Without this the same happens when the
        process ends. Safe to call twice; a runner with neither has no threads.
        """
        self._knowledge.close()
        if self.tiers is not None:
            self.tiers.close()

    def segments(self, namespace: str | None = None) -> list[FrozenSegment]:
        """The frozen segments of a namespace, or all of them."""
        return self._books.frozen(None if namespace is None else word("namespace", namespace))
