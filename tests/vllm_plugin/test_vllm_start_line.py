"""What an engine says at its start, of doubles of vLLM's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvweave import CorruptHeadMap, HeadClassMap, InvalidArgument, KvShape, __version__
from kvweave.adapters.vllm.heads.same_model import UNNAMED
from kvweave.adapters.vllm.options import TEXTS, VARIABLES
from kvweave.adapters.vllm.start_line import (
    active_line,
    ending_lines,
    idle_lines,
    map_lines,
    misplaced_lines,
    unknown_lines,
    unread_lines,
)

LAYERS, KV_HEADS = 2, 4
OURS = "KvweaveLlamaForCausalLM"
CHECK = ["kvweave.adapters.vllm.segments.check:MarkerCheck"]
EXTENSION = "kvweave.adapters.vllm.segments.extension.KnowledgeBaseWorker"


def config(architecture: str = OURS, section: Any = None, **others: Any) -> Any:
    shape = SimpleNamespace(num_hidden_layers=LAYERS)
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=others.get("load_format", "auto")),
        additional_config={} if section is None else {"kvweave": section},
        kv_transfer_config=others.get("transfer"),
        parallel_config=SimpleNamespace(worker_extension_cls=others.get("extension", "")),
        attention_config=SimpleNamespace(backend=others.get("backend")),
        model_config=SimpleNamespace(
            architectures=[architecture],
            hf_text_config=shape,
            get_total_num_kv_heads=lambda: KV_HEADS,
            logits_processors=others.get("processors"),
        ),
    )


@pytest.fixture
def map_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A map, and the same in the current folder as `a.json`; `full.json` splits nothing."""
    monkeypatch.chdir(tmp_path)
    whole = json.loads(HeadClassMap.full(KvShape(LAYERS, KV_HEADS, 8, 16), "a model").to_json())
    Path("full.json").write_text(json.dumps(whole))
    for entry in whole["heads"]:
        if entry["head"]:
            entry["class"] = {"kind": "window", "sink": 4, "recent": 64}
    path = tmp_path / "map.json"
    for one in (path, Path("a.json")):
        one.write_text(json.dumps(whole))
    return path


def test_the_line_names_what_is_active(map_file: Path) -> None:
    line = active_line(config(section={"heads": str(map_file)}), "0.33.0", {})
    assert line.startswith(f"kvweave {__version__} (CUDA ")
    assert "in vLLM 0.33.0; its backend; model KvweaveLlamaForCausalLM" in line
    assert line.endswith(f"heads of {map_file}: 2 full, 6 window 64 with sink 4")
    transfer = SimpleNamespace(kv_connector="KvweaveSegments")
    section = {"segment_bytes": 3 << 29, "frozen_share": 0.25}
    line = active_line(config(section=section, transfer=transfer), "0.33.0", {})
    assert "segments in 1.50 GiB of each worker, up to 25 % for knowledge bases" in line
    assert "policy foresight" in line
    assert line.endswith("connector KvweaveSegments")
    kept = {**section, "store": "/documents"}
    assert "; documents of workers kept in /documents" in active_line(
        config(section=kept), "0.33.0", {}
    )
    bound = active_line(config(section={**kept, "store_bytes": 1 << 29}), "0.33.0", {})
    assert bound.endswith("documents of workers kept in /documents, 0.50 GiB each")
    line = active_line(config(), "0.33.0", {"KVWEAVE_VIRTUAL_PAGES": "1"})
    assert line.endswith("virtual pages")
    assert "\n" not in line


def test_a_map_that_splits_nothing_leaves_the_backend_that_was_asked_for(map_file: Path) -> None:
    """With segments or virtual pages the backend is the plugin's, whatever was asked for."""
    section = {"heads": "full.json"}
    for backend, is_ours in ((None, False), (FLASH, False), (CUSTOM, True)):
        line = active_line(config(section=section, backend=backend), "0.33.0", {})
        assert ("its backend" in line) is is_ours
        assert line.endswith("heads of full.json: 8 full")
    for more in (SEGMENTS, {"virtual_pages": True}):
        line = active_line(config(section={**section, **more}, backend=FLASH), "0.33.0", {})
        assert "; its backend; " in line
    assert "; its backend; " in active_line(config(section={"heads": str(map_file)}), "0.33.0", {})


def test_a_stock_model_on_the_backend_has_no_features() -> None:
    line = active_line(config("LlamaForCausalLM", {"segment_bytes": 1}), "0.26.0", {})
    assert line.endswith("in vLLM 0.26.0; its backend")


def test_whether_a_map_is_of_the_model_is_said_where_it_is_not_known(map_file: Path) -> None:
    section = {"heads": str(map_file)}
    assert map_lines(config(section=section), {}) == [UNNAMED]
    plain = json.loads(map_file.read_text())
    plain["weights"] = {"norm.weight": {"dtype": "f32", "shape": [8], "values": [1.0]}}
    map_file.write_text(json.dumps(plain))
    assert map_lines(config(section=section), {}) == []
    (line,) = map_lines(config(section=section, load_format="dummy"), {})
    assert line.startswith("load_format: expected weights by their names")
    assert line.endswith("got dummy; they are not compared")
    assert map_lines(config(section=SEGMENTS), {}) == []
    assert map_lines(config("LlamaForCausalLM", section), {}) == []


def test_windows_alone_over_virtual_pages_have_an_end(map_file: Path) -> None:
    section = {"heads": str(map_file), "virtual_pages": True}
    (line,) = ending_lines(config(section=section), {})
    assert line.startswith("kvweave.virtual_pages: a map with windows and without top-k heads")
    assert "in vLLM 0.33 for the last time" in line
    assert line.endswith("head classes, without virtual_pages, go on")
    assert ending_lines(config(section={"heads": str(map_file)}), {"KVWEAVE_VIRTUAL_PAGES": "1"})
    # What goes on, or is not served at all.
    assert ending_lines(config(section={"heads": str(map_file)}), {}) == []
    assert ending_lines(config(section={"virtual_pages": True}), {}) == []
    assert ending_lines(config("LlamaForCausalLM", section), {}) == []
    whole = json.loads(map_file.read_text())
    top_k = {"kind": "top_k", "pages": 4, "rerank_every": 16}
    whole["heads"][0]["class"] = top_k
    map_file.write_text(json.dumps(whole))
    assert ending_lines(config(section=section), {}) == []


def test_a_map_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text("{}")
    with pytest.raises(CorruptHeadMap):
        active_line(config(section={"heads": str(path)}), "0.33.0", {})


SEGMENTS = {"segment_bytes": 1 << 20}
STORED = {**SEGMENTS, "store": "/documents"}
FLASH, CUSTOM = SimpleNamespace(name="FLASH_ATTN"), SimpleNamespace(name="CUSTOM")


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        (config(section=SEGMENTS, processors=CHECK, extension=EXTENSION), {}, []),
        (config(section={"virtual_pages": True}), {"KVWEAVE_CUDA": "require"}, []),
        (
            config(section={"heads": "a.json"}),
            {"KVWEAVE_HEADS": "b.json"},
            ["KVWEAVE_HEADS: expected one place, got additional_config kvweave.heads too"],
        ),
        (
            config("LlamaForCausalLM", {"heads": "a.json"}),
            {"KVWEAVE_VIRTUAL_PAGES": "1"},
            [
                "kvweave.heads: expected an architecture of KvweaveLlama",
                "KVWEAVE_VIRTUAL_PAGES: expected an architecture of KvweaveLlama",
            ],
        ),
        (
            config(section={"heads": "a.json", "frozen_share": 0.2}),
            {},
            ["kvweave.frozen_share: expected segment_bytes beside it"],
        ),
        (config(section=SEGMENTS), {}, ["logits_processors: expected MarkerCheck, which refuses"]),
        (
            config(section={**SEGMENTS, "frozen_share": 0.2}, processors=CHECK),
            {},
            ["kvweave.frozen_share: expected KnowledgeBaseWorker or store beside it"],
        ),
        (config(section={**STORED, "frozen_share": 0.2}, processors=CHECK), {}, []),
        (
            config(section={**SEGMENTS, "frozen_share": 0}, processors=CHECK, extension=EXTENSION),
            {},
            [],
        ),
        (
            config(section={**STORED, "store_bytes": 9, "store_quota_bytes": 9}, processors=CHECK),
            {},
            ["kvweave.store_quota_bytes: expected less than the 9 of store_bytes, got 9"],
        ),
        (
            config(section={**STORED, "store_quota_bytes": 9}, processors=CHECK),
            {"KVWEAVE_STORE_BYTES": "10"},
            [],
        ),
        (
            config(section={"heads": "full.json"}),
            {},
            ["kvweave.heads: expected a head that does not keep and read all, got full.json"],
        ),
        (config(section={"heads": "full.json"}, backend=FLASH), {}, ["kvweave.heads: expected a"]),
        (
            config(section={"heads": "a.json"}, backend=FLASH),
            {},
            ["attention_config.backend: expected CUSTOM or none beside a model of ours"],
        ),
        (
            config(section=SEGMENTS, processors=CHECK, backend=FLASH),
            {},
            ["attention_config.backend: expected CUSTOM or none beside a model of ours"],
        ),
        (config(section={"heads": "a.json"}, backend=CUSTOM), {}, []),
        (
            config("LlamaForCausalLM", processors=CHECK, extension=EXTENSION, backend=FLASH),
            {},
            [
                "logits_processors: expected MarkerCheck beside segment_bytes",
                "worker_extension_cls: expected KnowledgeBaseWorker beside segment_bytes",
            ],
        ),
        (
            config(section={"heads": "a.json"}, processors=CHECK, extension=EXTENSION),
            {},
            [
                "logits_processors: expected MarkerCheck beside segment_bytes",
                "worker_extension_cls: expected KnowledgeBaseWorker beside segment_bytes",
            ],
        ),
    ],
)
@pytest.mark.usefixtures("map_file")
def test_what_has_no_effect_is_named(given: Any, environment: Any, says: list[str]) -> None:
    lines = idle_lines(given, environment)
    assert len(lines) == len(says)
    for line, start in zip(lines, says, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("architecture", [OURS, "LlamaForCausalLM"])
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("heads", "heads inside kvweave, got 'heads' beside it"),
        ("Segment-Bytes", "segment_bytes inside kvweave, got 'Segment-Bytes' beside it"),
        ("kvweaves", "kvweave, got 'kvweaves'"),
        ("Kvweave", "kvweave, got 'Kvweave'"),
        ("kv-weave", "kvweave, got 'kv-weave'"),
        ("kweave", "kvweave, got 'kweave'"),
        ("kvwaeve", "kvweave, got 'kvwaeve'"),
    ],
)
def test_keys_beside_the_section_are_named(architecture: str, key: str, expected: str) -> None:
    given = config(architecture, {"virtual_pages": True})
    given.additional_config |= {key: "map.json", "ascend_scheduler_config": {"heads": 1}}
    line = f"additional_config: expected {expected}; it has no effect"
    assert misplaced_lines(given) == [line]
    assert idle_lines(given, {})[0] == line


@pytest.mark.parametrize("given", [{"kvweave": {}}, {"kvweave_digest": "1"}, None, object()])
def test_keys_of_others_are_passed_over(given: Any) -> None:
    """Those of other plugins, what the plugin notes there itself, and what has no keys."""
    stock = config("LlamaForCausalLM")
    stock.additional_config = given
    assert misplaced_lines(stock) == []
    others = ("weave", "kvcache", "kv_cache_dtype", "heads_per_rank", "storage", "lmcache", 7)
    stock.additional_config = dict.fromkeys(others, 1)
    assert misplaced_lines(stock) == []


def test_variables_that_nobody_knows_are_named() -> None:
    given = {"KVWEAVE_TYPO": "1", "KVWEAVE_SEGMENT": "1", "KVWEAVE_HEADS": "a.json", "HOME": "/"}
    lines = unknown_lines({**given, "KVWEAVE_OTHER": "", "KVWEAVE_CUDA": "off"})
    assert [line.partition(":")[0] for line in lines] == ["KVWEAVE_SEGMENT", "KVWEAVE_TYPO"]
    for line in lines:
        assert ": expected one of KVWEAVE_EXACT_FIRST, KVWEAVE_FROZEN_SHARE, " in line
        assert line.endswith("KVWEAVE_VIRTUAL_PAGES, which are read; it has no effect")
    assert unknown_lines({}) == []


@pytest.mark.parametrize("option", TEXTS)
def test_no_option_is_passed_over_beside_a_stock_model(option: str) -> None:
    stock = config("LlamaForCausalLM", {option: True})
    (line,) = unread_lines(stock, {})
    assert line.startswith(f"kvweave.{option}: expected an architecture of ")
    (line,) = unread_lines(config("LlamaForCausalLM"), {VARIABLES[option]: "1"})
    assert line.startswith(f"{VARIABLES[option]}: expected an architecture of ")


def test_what_a_stock_model_does_not_read_is_named() -> None:
    """Of an engine that has nothing of ours, whatever is set: it is not refused."""
    given = {"KVWEAVE_HEADS": "/nonexistent.json", "KVWEAVE_HOST_BYTES": "1G", "KVWEAVE_STORE": ""}
    lines = unread_lines(config("LlamaForCausalLM", {"head": 1, "host_bytes": 5}), given)
    names = ["kvweave.head", "kvweave.host_bytes", "KVWEAVE_HEADS"]
    assert [line.partition(":")[0] for line in lines] == names
    for line in lines:
        assert ": expected an architecture of KvweaveLlamaForCausalLM, " in line
        assert line.endswith(" in --hf-overrides, got LlamaForCausalLM; it has no effect")
    assert unread_lines(config("LlamaForCausalLM"), {}) == []
    assert unread_lines(config("LlamaForCausalLM", "heads"), {}) == []
    assert unread_lines(config(OURS, {"heads": "a.json"}), given) == []


@pytest.mark.parametrize("architecture", [OURS, "LlamaForCausalLM"])
@pytest.mark.parametrize(
    ("section", "environment", "says"),
    [
        ({"head": "a.json"}, {}, "kvweave: expected the options heads, .*, got 'head'"),
        ("heads", {}, "kvweave: expected a dictionary, got 'heads'"),
        ({}, {"KVWEAVE_HOST_BYTES": "1G"}, "KVWEAVE_HOST_BYTES: expected bytes, got '1G'"),
    ],
)
def test_what_can_never_be_right_is_refused(
    architecture: str, section: Any, environment: Any, says: str
) -> None:
    """Whether or not the model's class would read it."""
    given = config(architecture, section)
    for read in (idle_lines, lambda *of: active_line(of[0], "0.33.0", of[1])):
        with pytest.raises(InvalidArgument, match=says):
            read(given, environment)
