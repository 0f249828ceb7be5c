"""What the plugin registers, and what it refuses, in the vLLM of this environment."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import ModelRegistry, platforms
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvweave import Unsupported
from kvweave.adapters.vllm import lazy_classes, plugin
from kvweave.adapters.vllm.backend.attention import PagedAttention, pages_of
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.backend.cache_specs import attention_span_of
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.connector import IdleConnector
from kvweave.adapters.vllm.heads.scheduler import HeadSchedulerConnector
from kvweave.adapters.vllm.heads.sink_manager import SinkWindowManager
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
from kvweave.adapters.vllm.model_names import MODELS
from kvweave.adapters.vllm.segments.scheduler import SegmentSchedulerConnector
from kvweave.adapters.vllm.segments.worker import SegmentWorkerConnector
from kvweave.adapters.vllm.serving import server_config
from kvweave.adapters.vllm.virtual_pages.scheduler import PageSchedulerConnector
from kvweave.adapters.vllm.virtual_pages.worker import PageWorkerConnector

CONNECTORS = {
    "segments": "KvweaveSegments",
    "heads": "KvweaveHeads",
    "virtual_pages": "KvweavePages",
}
KNOWN_BACKENDS = AttentionBackendEnum.__members__
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()
    plugin.register()


def test_vllm_finds_the_plugin() -> None:
    found = entry_points(group="vllm.general_plugins", name="kvweave")
    assert [point.load() for point in found] == [plugin.register]


def test_who_does_not_ask_gets_stock_vllm() -> None:
    with set_current_vllm_config(VllmConfig()):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert ModelRegistry.models[name].load_model_cls().__module__.startswith("vllm.")
    for spec in (FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=8)):
        manager = KVCacheSpecRegistry.get_manager_class(spec)
        assert manager.__module__.startswith("vllm.")


def test_who_asks_gets_ours() -> None:
    assert AttentionBackendEnum.CUSTOM.get_class() is PagedBackend
    with set_current_vllm_config(VllmConfig(attention_config={"backend": "CUSTOM"})):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is PagedBackend
    spec = SinkWindowSpec(**SHAPE, sliding_window=8, sink=4)
    assert KVCacheSpecRegistry.get_manager_class(spec) is SinkWindowManager


def model_of(architecture: str, *, use_mla: bool = False) -> Any:
    """A configuration of a model as far as what is said at start asks of it."""
    return SimpleNamespace(use_mla=use_mla, architectures=[architecture], logits_processors=None)


def test_latent_vectors_are_refused_where_ours_is_asked_for() -> None:
    """Whatever model has them; whoever asks for nothing has vLLM's own class."""
    backends = [AttentionBackendEnum.CUSTOM]
    backends += [AttentionBackendEnum[n] for n in lazy_classes.ON_CPU if n in KNOWN_BACKENDS]
    config = VllmConfig(attention_config={"backend": "CUSTOM"})
    config.model_config = model_of("KimiK25", use_mla=True)
    for backend in backends:
        with (
            set_current_vllm_config(config),
            pytest.raises(Unsupported, match="attention: expected keys .*, got MLA of KimiK25"),
        ):
            backend.get_class()
    config.attention_config.backend = None
    for backend in backends[1:]:
        with set_current_vllm_config(config):
            module, _, name = backend.value.rpartition(".")
            assert backend.get_class() is getattr(import_module(module), name)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin warns of, once a process each line."""
    said: list[str] = []
    log = logging.getLogger("vllm.kvweave")
    monkeypatch.setattr(log, "warning", lambda text, *given, **_: said.append(text % given))
    return said


def test_variables_that_nobody_knows_are_told_once(warned: list[str], monkeypatch) -> None:
    """Each process of vLLM registers, whatever its engine is asked for."""
    monkeypatch.setenv("KVWEAVE_TYPO", "1")
    monkeypatch.setenv("KVWEAVE_HEADS", "/nonexistent.json")
    plugin.register()
    plugin.register()
    (line,) = warned
    assert line.startswith("KVWEAVE_TYPO: expected one of KVWEAVE_EXACT_FIRST, ")
    # Beside a vLLM that it does not know the plugin says nothing.
    monkeypatch.setenv("KVWEAVE_ANOTHER_TYPO", "1")
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    plugin.register()
    assert len(warned) == 1


def test_variables_that_an_engine_does_not_read_are_told(warned: list[str], monkeypatch) -> None:
    """Once vLLM looks for attention of its own, and not where a model of ours is made."""
    config = VllmConfig()
    config.model_config = model_of(MODELS[0])
    monkeypatch.setenv("KVWEAVE_HEADS", "/nonexistent.json")
    for stock in (False, True):
        config.model_config.architectures = ["Qwen9ForCausalLM" if stock else MODELS[0]]
        with set_current_vllm_config(config):
            for _ in range(2):
                assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
        assert len(warned) == stock
    assert warned[0].startswith("KVWEAVE_HEADS: expected an architecture of KvweaveLlama")
    assert warned[0].endswith("got Qwen9ForCausalLM; it has no effect")


def test_a_misspelt_section_is_told_beside_a_model_of_vllms_own(warned: list[str]) -> None:
    config = VllmConfig(additional_config={"Kvweave": {"segment_bytes": 5}, "heads": "map.json"})
    config.model_config = model_of("Qwen12ForCausalLM")
    with set_current_vllm_config(config):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    assert warned == [
        "additional_config: expected kvweave, got 'Kvweave'; it has no effect",
        "additional_config: expected heads inside kvweave, got 'heads' beside it; it has no effect",
    ]


def test_backends_are_looked_up_where_nobody_else_knows_what_was_set() -> None:
    """A vLLM that the plugin does not know keeps its own table on a GPU."""
    on_gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    elsewhere = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    assert plugin.backends_looked_up(on_gpu, known=False) == []
    assert plugin.backends_looked_up(elsewhere, known=True) == []
    names = plugin.backends_looked_up(on_gpu, known=True)
    assert {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"} <= set(names)
    assert not {"CUSTOM", "TORCH_SDPA"} & set(names)


@pytest.mark.parametrize("variable", [False, True])
def test_a_backend_that_is_looked_up_is_vllms_own(
    warned: list[str], monkeypatch, *, variable: bool
) -> None:
    """As on a GPU, of those that can be imported here; another plugin's is left alone.

    What was set for ours and nobody reads is told, wherever it was set.
    """
    section = {} if variable else {"kvweave": {"segment_bytes": 5}}
    if variable:
        monkeypatch.setenv("KVWEAVE_SEGMENT_BYTES", "5")
    on_gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    backend, others = AttentionBackendEnum.FLEX_ATTENTION, AttentionBackendEnum.TRITON_ATTN
    module, _, name = backend.value.rpartition(".")
    stock, config = getattr(import_module(module), name), VllmConfig(additional_config=section)
    # A name of its own: what was said once is not said again.
    config.model_config = model_of(f"Qwen{10 + variable}ForCausalLM")
    overridden = {one for one in AttentionBackendEnum if one.is_overridden()}
    register_backend(others, "another.plugin.Backend")
    try:
        with monkeypatch.context() as here:
            here.setattr(platforms, "current_platform", on_gpu)
            plugin.register()
        assert backend.get_path() == f"{lazy_classes.__name__}.FLEX_ATTENTION"
        assert others.get_path() == "another.plugin.Backend"
        with set_current_vllm_config(config):
            assert backend.get_class() is stock
        (line,) = warned
        option = "KVWEAVE_SEGMENT_BYTES" if variable else "kvweave.segment_bytes"
        assert line.startswith(f"{option}: expected an architecture of Kvweave")
    finally:
        for one in set(AttentionBackendEnum) - overridden:
            one.clear_override()


@pytest.mark.parametrize("name", ["PagedBackend", *MODELS])
def test_an_unknown_version_is_refused_when_it_is_asked_for(monkeypatch, name: str) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    plugin.register()
    with pytest.raises(Unsupported, match=r"vllm: expected version .*, got 0\.99\.0"):
        getattr(lazy_classes, name)


def test_what_is_not_there_is_an_attribute_error() -> None:
    for name in ("Other", "OTHER", "TORCH_SDPA"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(lazy_classes, name)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": ({"attn_type": AttentionType.ENCODER_ONLY}, "expected a decoder's, got"),
    "alibi": ({"alibi_slopes": [0.5] * 4}, "alibi_slopes: expected none"),
    "fp8": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected auto, got fp8"),
    "others": ({"chunks": 4}, "expected none besides, got chunks"),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED)
def test_attention_that_ops_do_not_know_is_refused(changes: dict[str, Any], says: str) -> None:
    assert PagedAttention(4, 32, 0.2, 2).num_kv_heads == 2
    with pytest.raises(Unsupported, match=says):
        PagedAttention(4, 32, 0.2, 2, **changes)


def test_tensors_that_are_not_pages_are_refused() -> None:
    cache = torch.arange(3 * 2 * 16 * 64).view(3, 2, 16, 64)
    pages = pages_of(cache)
    assert pages.shape == (6, 2, 16, 32)
    assert pages.data_ptr() == cache.data_ptr()
    torch.testing.assert_close(pages[3].flatten(), cache[1, 1].flatten())
    for other in (cache.transpose(1, 2), cache[:, :1], cache[0]):
        with pytest.raises(Unsupported, match="kv_cache: expected a contiguous tensor"):
            pages_of(other)


@pytest.mark.parametrize(
    ("feature", "halves"),
    [
        ("segments", (SegmentSchedulerConnector, SegmentWorkerConnector)),
        ("heads", (HeadSchedulerConnector, IdleConnector)),
        ("virtual_pages", (PageSchedulerConnector, PageWorkerConnector)),
    ],
)
def test_a_connector_is_made_for_one_role(feature: str, halves: tuple[type, type]) -> None:
    """What vLLM's factory finds may be asked what it supports; what it makes has one role."""
    named = CONNECTORS[feature]
    module = f"kvweave.adapters.vllm.{feature}.connector"
    transfer = KVTransferConfig(
        kv_connector=named, kv_role="kv_both", kv_connector_module_path=module
    )
    config = VllmConfig(kv_transfer_config=transfer)
    config.model_config = SimpleNamespace(
        architectures=["KvweaveLlamaForCausalLM"],
        hf_text_config=SimpleNamespace(num_hidden_layers=1),
    )
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(**SHAPE))
    cache = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=[group])
    assert KVConnectorFactory.supports_hma_config(transfer)
    for role, half in zip((KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER), halves, strict=True):
        made = KVConnectorFactory.create_connector(config, role, cache)
        assert type(made) is half
        assert made.role is role
    config.model_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    with pytest.raises(Unsupported, match=f"beside {named}, got LlamaForCausalLM"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    known = KVConnectorFactory.get_connector_class(transfer)
    report = known.build_kv_connector_stats()
    assert report.is_empty()
    assert type(known.build_kv_connector_stats(dict(report.data))) is type(report)


def test_what_specs_keep() -> None:
    assert attention_span_of(FullAttentionSpec(**SHAPE)) == AttentionSpan()
    assert attention_span_of(FullAttentionSpec(**SHAPE, sliding_window=8)) == AttentionSpan()
    assert attention_span_of(SlidingWindowSpec(**SHAPE, sliding_window=8)) == AttentionSpan(8)
    spec = SinkWindowSpec(**SHAPE, sliding_window=40, sink=20)
    assert attention_span_of(spec) == AttentionSpan(40, 20)
    assert spec.sink_blocks == 2
    stock = SlidingWindowSpec(**SHAPE, sliding_window=40)
    most = stock.max_admission_blocks_per_request(64, 512)
    assert spec.max_admission_blocks_per_request(64, 512) == most + 2
    assert spec.is_uniform_with_collection({"a": spec, "b": spec})
    other = SinkWindowSpec(**SHAPE, sliding_window=40, sink=16)
    assert not spec.is_uniform_with_collection({"a": spec, "b": other})
    assert not spec.is_uniform_with_collection({"a": spec, "b": stock})


def test_the_server_reads_the_configuration_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "kvweave.yaml"
    path.write_text(server_config("LlamaForCausalLM", segment_bytes=1 << 30))
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    given = parser.parse_args(["serve", "model", "--config", str(path)])
    assert given.additional_config == {"kvweave": {"segment_bytes": 1 << 30}}
    assert given.hf_overrides == {"architectures": ["KvweaveLlamaForCausalLM"]}
    assert given.kv_transfer_config.kv_connector == "KvweaveSegments"
    names = [*given.middleware, *given.logits_processors, given.worker_extension_cls]
    for name in (entry.replace(":", ".") for entry in names):
        module, _, member = name.rpartition(".")
        assert hasattr(import_module(module), member)
