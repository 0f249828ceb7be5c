"""The worker's half: prompts that are being prefilled, and what each step does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import get_forward_context

from kvweave.adapters.vllm.connector import IdleConnector
from kvweave.adapters.vllm.model_identity import model_identity, weight_files
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.segments.attention import named_under
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers, layers_with_store
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk import ChunkWalk
from kvweave.adapters.vllm.segments.chunk_work import ChunkWork
from kvweave.adapters.vllm.segments.document_encoding import encode_document
from kvweave.adapters.vllm.segments.document_weighing import DocumentWeighing
from kvweave.adapters.vllm.segments.draft_steps import DraftSteps
from kvweave.adapters.vllm.segments.events import are_published
from kvweave.adapters.vllm.segments.kept_documents import KeptDocuments
from kvweave.adapters.vllm.segments.kept_weights import KeptWeights
from kvweave.adapters.vllm.segments.known_documents import KnownDocuments
from kvweave.adapters.vllm.segments.message import Chunk, Prompt, SegmentMessage
from kvweave.adapters.vllm.segments.ranks import all_of
from kvweave.adapters.vllm.segments.stats import SegmentConnectorStats, SegmentStats
from kvweave.adapters.vllm.segments.step import Step
from kvweave.adapters.vllm.segments.store import AdmittedPrompt, SegmentStore, outcome_of
from kvweave.errors import InvalidArgument, OutOfMemory, PoolFull, UnknownSegment, Unsupported
from kvweave.flops import TextSizes
from kvweave.runner.clock import Clock

_Taken = TypeVar("_Taken")


class SegmentWorker:
    """Segments on one rank, in the attention layers of each layer of its model.

    `longest`: tokens of a sequence that the model is run for, at most. `kept`: the knowledge base's
    documents that survive the worker, if a folder keeps them. `documents`: those of the store that
    routers are told of, where somebody publishes them.
    """

    documents: KnownDocuments | None = None

    def __init__(
        self,
        layers: list[list[Any]],
        store: SegmentStore,
        longest: int,
        kept: KeptDocuments | None = None,
    ) -> None:
        self.attention = layers
        self.store = store
        self.kept = kept
        self.drafts = DraftSteps(longest)
        self.stats = SegmentStats()
        self._admitted: dict[str, AdmittedPrompt] = {}
        self._prompts: dict[str, Prompt] = {}
        self._chunks: list[Chunk] = []
        self._batch: Batch | None = None
        # vLLM may have put a layer's memory elsewhere from one step to the next.
        self._step_layers: AttentionLayers | None = None
        self._reported: Counter[str] = Counter()
        self._changed = True

    @classmethod
    def of(cls, config: VllmConfig) -> SegmentWorker:
        """The worker of a model whose layers have a store.

        Errors: `Unsupported` for a model of another class.
        """
        layers = layers_with_store(config)
        if not layers:
            expected = "a model of kvweave with additional_config kvweave.segment_bytes"
            got = str(config.model_config.architecture)
            text = f"segments: expected {expected}, got {got}"
            raise Unsupported(text, expected=expected, got=got)
        store, longest = layers[0][0].store, int(config.model_config.max_model_len)
        return cls(layers, store, longest, _kept_of(config, store))

    def begin(self, message: SegmentMessage) -> None:
        """Before a forward: what ended is let go of, new prompts are looked up."""
        self._changed |= bool(message.ended or message.chunks)
        for name in message.ended:
            self._let_go(name)
        if message.reset:
            self._reset()
        self._chunks, self._batch, self._step_layers = [], None, None
        for chunk in message.chunks:
            if chunk.prompt is not None:
                self._let_go(chunk.request_id)
                self._look_up(chunk.request_id, chunk.prompt, chunk.start)
                self._prompts[chunk.request_id] = chunk.prompt
            if chunk.request_id in self._admitted:
                self.stats.prompt_tokens += chunk.end - chunk.start
                self._chunks.append(chunk)
        if self.kept is not None:
            self.kept.weighing.begin(message.work, self.stats.rows_spared)

    def look_after_sleep(self) -> None:
        """Has the store be empty where its memory was given back while the engine slept."""
        if not self.store.is_intact():
            self.lose_all()

    def lose_all(self) -> None:
        """Has the store be empty: its memory is gone, or of other weights. Prompts are computed."""
        self._let_all_go()
        self.store.begin_anew()
        if self.kept is not None:
            self.kept.all_went()

    def watched(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Weights that replace the model's own, as they come."""
        return weights if self.kept is None else self.kept.weights.watched(weights)

    def weights_were_replaced(self) -> None:
        """Nothing that was computed before is of use, and a folder alone where all are the same."""
        self.lose_all()
        if self.kept is not None and not all_of(self.kept.weights.are_same):
            self.kept.leave()
            self.kept = None

    def step(self) -> Step | None:
        """What the forward of this step has to do; None where nothing is reused.

        Called in the forward's own context, where the batch is described.
        """
        if not self._chunks:
            return None
        batch = self._batch_of_step()
        works: list[ChunkWork] = []
        refused: list[Chunk] = []
        if not any(
            self._admitted[c.request_id].reused[c.start : c.end].any() for c in self._chunks
        ):
            return None
        sizes = len(self.attention), self.store.geometry.kv_heads
        try:
            for chunk in self._chunks:
                admitted, request = self._admitted[chunk.request_id], batch.find(chunk.first_slot)
                if request is None or not admitted.reused[chunk.start : chunk.end].any():
                    continue
                if batch.may_choose(request):
                    continue
                try:
                    walk = ChunkWalk(admitted, chunk.start, chunk.end, *sizes)
                except InvalidArgument:
                    refused.append(chunk)
                    continue
                works.append(ChunkWork(walk, request, chunk.request_id))
        except BaseException:
            for work in works:
                work.chunk.close()
            raise
        for chunk in refused:
            # As a layer to ask that this model does not have: the prompt is computed whole.
            self.stats.misses["refused"] += chunk.end - chunk.start
            self.stats.outcome(chunk.request_id).missed["refused"] += chunk.end - chunk.start
            self._chunks.remove(chunk)
            self._let_go(chunk.request_id)
        if not works:
            return None
        return Step(self.store, self._layers(), self.stats, works, batch, self.drafts)

    def abandon(self) -> None:
        """A forward has failed: its prompts are let go of, and nothing of them is kept."""
        for chunk in self._chunks:
            self._let_go(chunk.request_id)
        self._chunks, self._batch = [], None

    def finish(self) -> None:
        """After a forward: what the chunks computed is kept, and found from now on.

        A replayed graph runs no code of the model's: what it computed is not known to lie where,
        so the requests are let go of, and the rest of their prompts is computed.
        """
        if self.kept is not None:
            self.kept.weighing.end(self.stats.rows_spared)
        chunks, batch = self._chunks, self._batch
        self._chunks, self._batch = [], None
        for chunk in chunks:
            admitted = self._admitted[chunk.request_id]
            request = None if batch is None else batch.find(chunk.first_slot)
            if batch is None or request is None:
                self._let_go(chunk.request_id)
                continue
            if admitted.keeps:
                blocks = [tables.blocks(request) for tables in batch.classes]
                self.store.keep(admitted, chunk.end, self._layers(), blocks)
                self._expect_segments(chunk)
            if chunk.end == admitted.tokens:
                self._let_go(chunk.request_id)

    def insert(
        self, model: Any, name: str, tokens: list[int], namespace: str, config: VllmConfig
    ) -> str | None:
        """Encodes a document alone and freezes it in the store; reads it where a folder has it.

        Why the folder does not keep it, or None.

        Errors: `PoolFull` without room, or beyond the share that may be frozen; `OutOfMemory` where
        a device has none for what is encoded. Every rank raises where one of them does.
        """
        self._changed = True
        if self.kept is not None and self.kept.take(name, tokens, namespace):
            return None
        going = self.yielding()
        admitted = _on_all_ranks(lambda: self.store.admit_document(name, tokens, namespace, going))
        try:
            with ExitStack() as held:
                encoding = self.store.encoding(admitted)
                room = _on_all_ranks(lambda: held.enter_context(encoding))
                encode_document(model, self.attention, room, tokens, config)
            if self.kept is None:
                admitted.request.freeze(name, 0, len(tokens))
                return None
            self.kept.freeze(admitted.request, name)
            return self.kept.keep(admitted.request, room, name)
        finally:
            admitted.release()

    def yielding(self) -> list[tuple[str, str]]:
        """Documents, each a namespace and a name, that give way to one that is inserted.

        Where a folder keeps documents, those used least do, as many as it takes.
        """
        return [] if self.kept is None else self.kept.yielding()

    def delete(self, name: str, namespace: str) -> None:
        """Takes an entry out of the store's knowledge base, and out of the folder that keeps it.

        Errors: `UnknownSegment` when there is none.
        """
        self._changed, missing = True, None
        try:
            # Whatever becomes of a rank's folder: what ranks find on their devices stays alike.
            self.store.cache.delete(name, namespace)
        except UnknownSegment as error:
            missing = error
        was_kept = self.kept is not None and self.kept.delete(namespace, name)
        if missing is not None and not was_kept:
            raise missing

    def _batch_of_step(self) -> Batch:
        if self._batch is None:
            metadata: Any = get_forward_context().attn_metadata
            self._batch = Batch(self._layers(), metadata)
        return self._batch

    def taken_stats(self) -> SegmentConnectorStats | None:
        """The counts so far, which start anew; None where there are none, or on other ranks."""
        if not self._changed:
            return None
        self._changed, taken, self.stats = False, self.stats, SegmentStats()
        taken.add(self.taken_bytes())
        taken.documents = [] if self.documents is None else self.documents.taken()
        if taken == SegmentStats() or get_tensor_model_parallel_rank() != 0:
            return None
        return SegmentConnectorStats(taken.to_dict())

    def expect_document(self, tokens: list[int], namespace: str) -> None:
        """A document that will be in the store when the next report is made."""
        if self.documents is not None:
            self.documents.expect(tokens, namespace)

    def _expect_segments(self, chunk: Chunk) -> None:
        """Segments that end in a chunk are in the store behind it."""
        prompt = self._prompts[chunk.request_id]
        for span in prompt.markers.segments:
            if chunk.start < span.end <= chunk.end:
                tokens = prompt.tokens[span.start : span.end]
                self.expect_document(tokens, prompt.markers.namespace)

    def taken_bytes(self) -> SegmentStats:
        """How the store's bytes changed since this was last asked."""
        now = self.store.bytes_by_state()
        changes = {state: count - self._reported[state] for state, count in now.items()}
        self._reported = now
        changed = {state: change for state, change in changes.items() if change}
        return SegmentStats(store_bytes=Counter(changed))

    def _look_up(self, name: str, prompt: Prompt, start: int) -> None:
        """Looks up a prompt of which vLLM has cached the tokens before `start`."""
        markers = prompt.markers
        spans = [(span.start, span.end) for span in markers.segments]
        asked = prompt.tokens, spans, markers.namespace, markers.recovery(), markers.discover
        try:
            # Ranks that planned one prompt in two ways would wait for each other for ever.
            admitted = _on_all_ranks(lambda: self.store.admit(*asked))
            if self.kept is not None and admitted.policy.reuse == "segments":
                admitted = self._with_documents(self.kept, admitted, asked)
        except (PoolFull, InvalidArgument, OutOfMemory):
            self.stats.misses["refused"] += len(prompt.tokens)
            self.stats.outcome(name).missed["refused"] += len(prompt.tokens)
            return
        found = outcome_of(admitted)
        self.stats.requests += 1
        self.stats.hits.update(found.found)
        self.stats.misses.update(found.missed)
        self.stats.outcome(name).add(found)
        # Of what vLLM had cached, windows keep the end alone: such a prompt is not stored.
        windows = any(part.impl.span.window is not None for part in self.attention[0])
        admitted.keeps = not (windows and (admitted.fresh < start).any())
        admitted.computed_from = start
        self._admitted[name] = admitted

    def _with_documents(
        self, kept: KeptDocuments, admitted: AdmittedPrompt, asked: tuple[Any, ...]
    ) -> AdmittedPrompt:
        """The same prompt with the documents that only the folder had of it."""
        try:
            brought = kept.bring(asked[0], admitted, asked[1])
        except BaseException:
            admitted.release()
            raise
        if not brought:
            return admitted
        admitted.release()
        return _on_all_ranks(lambda: self.store.admit(*asked))

    def _reset(self) -> None:
        """What requests left goes; documents stay where their memory is what it was."""
        self.look_after_sleep()
        self._let_all_go()
        self.store.forget(documents=False)

    def _let_all_go(self) -> None:
        """What is left of prompts that are being computed is computed, and not kept."""
        self._changed, self._chunks, self._batch = True, [], None
        for name in list(self._admitted):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        self._prompts.pop(name, None)
        admitted = self._admitted.pop(name, None)
        if admitted is not None:
            admitted.release()

    def _layers(self) -> AttentionLayers:
        if self._step_layers is None:
            self._step_layers = AttentionLayers.of(self.attention)
        return self._step_layers


def _on_all_ranks(take: Callable[[], _Taken]) -> _Taken:
    """What each rank takes before all of them compute together; an error on all, or on none."""
    taken, why = [], None
    try:
        taken.append(take())
    except (PoolFull, OutOfMemory) as error:
        why = error
    if all_of(why is None):
        return taken[0]
    expected, got = "room on all ranks", "too little on another one"
    text = f"knowledge base: expected {expected}, got {got}"
    raise why or OutOfMemory(text, expected=expected, got=got)


def _kept_of(config: VllmConfig, store: SegmentStore) -> KeptDocuments | None:
    options = options_of(config.additional_config)
    if options.store is None:
        return None
    sizes = options.store_bytes, options.store_quota_bytes
    model = model_identity(config)
    named, owner = named_under(model, options), None if options.store_shared else model
    weighing, files = _weighing_of(config, store), _files_of(config)
    weights = KeptWeights(files)
    return KeptDocuments(store, options.store, named, weighing, weights, owner, *sizes)


def _files_of(config: VllmConfig) -> list[Path]:
    """The files of the weights; none of weights that are made of a seed."""
    kind = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    return [] if kind == "dummy" else weight_files(config)


def _weighing_of(config: VllmConfig, store: SegmentStore) -> DocumentWeighing:
    shape, model = store.cache.shape, config.model_config
    sizes = TextSizes.of_config(model.hf_text_config, shape.kv_heads, shape.head_dim)
    always = options_of(config.additional_config).store_reads == "always"
    return DocumentWeighing(sizes, shape.layers, Clock(store.geometry.device), always=always)


class SegmentWorkerConnector(IdleConnector):
    """Tells `worker` when a step begins and ends; it is there once vLLM has allocated its tensors.

    Layers copy what they need themselves, and what is new is kept after the last one.
    """

    worker: SegmentWorker | None = None
    asleep = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Tensors of vLLM are there: segments may come."""
        self.worker = SegmentWorker.of(self._vllm_config)
        if are_published(self._vllm_config):
            store = self.worker.store
            self.worker.documents = KnownDocuments(store.cache, regime=store.regime)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Looks up the prompts of a step: every vLLM says this before the forward.

        `start_load_kv`, too, comes before it in 0.26, and in 0.33 after it.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None and isinstance(connector_metadata, SegmentMessage):
            self.worker.begin(connector_metadata)

    def unregister_kv_caches(self) -> None:
        """The engine goes to sleep: until it wakes there is no memory of the store (0.33)."""
        self.asleep = True

    def restore_kv_caches(self) -> None:
        """It has woken. What its memory is worth is looked at before anything is read there."""
        self.asleep = False

    def wait_for_save(self) -> None:
        """Keeps what the step computed."""
        if self.worker is not None:
            self.worker.finish()

    def get_kv_connector_stats(self) -> SegmentConnectorStats | None:
        """Counts since the last step, from the first worker alone: all count the same."""
        return None if self.worker is None else self.worker.taken_stats()
