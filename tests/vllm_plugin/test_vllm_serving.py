"""The options that vLLM is given for a part of the plugin, and the command that writes them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvweave import HeadClassMap, InvalidArgument, KvShape, Unsupported
from kvweave.adapters.vllm.served_models import check_model
from kvweave.adapters.vllm.serving import engine_options, server_config
from kvweave.cli import app

LLAMA = "LlamaForCausalLM"
LAYERS, KV_HEADS = 3, 4
WINDOW: dict[str, int | str] = {"kind": "window", "sink": 4, "recent": 64}
WIDER = {**WINDOW, "recent": 128}
TOP_K: dict[str, int | str] = {
    "kind": "top_k",
    "pages": 8,
    "rerank_every": 1,
    "score": "min-max",
    "estimate": False,
}


def test_without_options_the_model_is_stock_on_our_backend() -> None:
    assert engine_options("AnyForCausalLM") == {"attention_config": {"backend": "CUSTOM"}}


@pytest.mark.parametrize(
    ("architecture", "got"),
    [
        ("GptOssForCausalLM", "GptOssForCausalLM, which has learned sinks"),
        ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM, which has pages with a latent vector"),
        ("Llama4ForConditionalGeneration", "Llama4For.*, which has rows that see their own chunk"),
        ("JambaForCausalLM", "JambaForCausalLM, which has layers of states beside attention"),
        ("OtherForCausalLM", "OtherForCausalLM$"),
    ],
)
def test_models_without_a_class_are_refused_by_what_they_have(architecture: str, got: str) -> None:
    with pytest.raises(Unsupported, match=f"^architecture: expected one of .*, got {got}"):
        engine_options(architecture, segment_bytes=1 << 20)


def config_of(model_type: str | None) -> Any:
    text = SimpleNamespace() if model_type is None else SimpleNamespace(model_type=model_type)
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))


def test_a_class_of_ours_is_for_one_model() -> None:
    """Whatever an architecture is overridden with, the model's type says what it is."""
    for known in ("llama", "transformer", "kimi_k2", None):
        check_model("KvweaveLlamaForCausalLM", config_of(known))
    check_model("KvweaveQwen3MoeForCausalLM", config_of("qwen3_moe"))
    expected = "expected LlamaForCausalLM for KvweaveLlamaForCausalLM, got {}"
    for other, name in (("qwen3", "Qwen3ForCausalLM$"), ("gpt_oss", "GptOssForCausalLM, which")):
        with pytest.raises(Unsupported, match=expected.format(name)):
            check_model("KvweaveLlamaForCausalLM", config_of(other))


def test_each_part_has_its_options() -> None:
    heads = engine_options(LLAMA, heads="m.json")
    assert heads["hf_overrides"] == {"architectures": ["KvweaveLlamaForCausalLM"]}
    assert heads["additional_config"] == {"kvweave": {"heads": "m.json"}}
    assert "kv_transfer_config" not in heads
    virtual = engine_options("KvweaveQwen3ForCausalLM", virtual_pages=True, heads="m.json")
    assert virtual["hf_overrides"] == {"architectures": ["KvweaveQwen3ForCausalLM"]}
    assert virtual["kv_transfer_config"]["kv_connector"] == "KvweavePages"
    store = engine_options(LLAMA, segment_bytes=1 << 30, frozen_share=0.25)
    assert store["kv_transfer_config"]["kv_connector"] == "KvweaveSegments"
    assert {"logits_processors", "worker_extension_cls"} <= store.keys()
    assert "middleware" not in store
    both = engine_options(LLAMA, segment_bytes=1 << 30, heads="m.json")
    assert both["block_size"] == heads["block_size"]
    assert both["additional_config"] == {"kvweave": {"segment_bytes": 1 << 30, "heads": "m.json"}}
    assert both["kv_transfer_config"] == store["kv_transfer_config"]


def test_metrics_of_a_map_have_a_connector() -> None:
    transfer = engine_options(LLAMA, metrics=True, heads="m.json")["kv_transfer_config"]
    assert transfer["kv_connector"] == "KvweaveHeads"
    assert transfer["kv_connector_module_path"] == "kvweave.adapters.vllm.heads.connector"
    for options in ({"virtual_pages": True, "heads": "m.json"}, {"segment_bytes": 1}):
        assert engine_options(LLAMA, metrics=True, **options) == engine_options(LLAMA, **options)
    with pytest.raises(Unsupported, match="metrics: expected them of a part that has some"):
        engine_options(LLAMA, metrics=True)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(Unsupported, match="one of LlamaForCausalLM, .*, got GPT2LMHeadModel"):
        engine_options("GPT2LMHeadModel", heads="m.json")
    with pytest.raises(InvalidArgument, match="segment_bytes: expected bytes, at least 1, got 0"):
        engine_options(LLAMA, segment_bytes=0)
    with pytest.raises(InvalidArgument, match="expected the options heads"):
        engine_options(LLAMA, head="m.json")
    with pytest.raises(Unsupported, match="virtual pages: expected none beside segments, since"):
        engine_options(LLAMA, segment_bytes=1, virtual_pages=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "architectures": [LLAMA],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def map_file(path: Path, *heads: dict[str, int | str], layers: int = LAYERS) -> Path:
    """A map whose layers all have these classes, then full heads."""
    shape = KvShape(layers=layers, kv_heads=KV_HEADS, head_dim=8)
    whole = json.loads(HeadClassMap.full(shape, "a model").to_json())
    for entry in whole["heads"]:
        if entry["head"] < len(heads):
            entry["class"] = heads[entry["head"]]
    path.write_text(json.dumps(whole))
    return path


def ran(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["vllm-config", *map(str, words)])
    # What is told beside a configuration is no part of it.
    return done.exit_code, done.output if done.exit_code else done.stdout


def test_the_command_writes_what_yaml_reads(model: Path) -> None:
    path = map_file(model / "a map: #1.json", WINDOW)
    code, text = ran(model, "--heads", path)
    assert code == 0
    assert yaml.safe_load(text) == yaml.safe_load(server_config(LLAMA, heads=str(path)))
    assert yaml.safe_load(text)["additional-config"]["kvweave"]["heads"] == str(path)
    code, text = ran(model, "--heads", path, "--metrics")
    assert yaml.safe_load(text)["kv-transfer-config"]["kv_connector"] == "KvweaveHeads"
    code, said = ran(model, "--segments-gib", 1.5, "--out", model / "kvweave.yaml")
    assert code == 0
    assert "--config" in said
    given = yaml.safe_load((model / "kvweave.yaml").read_text())
    assert given["additional-config"] == {"kvweave": {"segment_bytes": 3 << 29}}
    assert given["middleware"] == ["kvweave.adapters.vllm.server.SegmentMiddleware"]


def test_a_store_beside_segments_or_behind_offloading(model: Path) -> None:
    """The same words for the folder of documents, and for that of what vLLM offloads."""
    store = model / "kv store"
    sizes = ("--store", store, "--store-gib", 2, "--store-quota-gib", 0.5)
    code, text = ran(model, "--segments-gib", 1, *sizes)
    assert code == 0
    kept = {"store": str(store), "store_bytes": 2 << 30, "store_quota_bytes": 1 << 29}
    given = yaml.safe_load(text)["additional-config"]["kvweave"]
    assert given == {"segment_bytes": 1 << 30, **kept}
    packed = ("--segment-dtype", "planes-2.5", "--exact-first", 0, "--store-reads", "always")
    code, text = ran(model, "--segments-gib", 1, *packed, *sizes)
    assert code == 0
    given = yaml.safe_load(text)["additional-config"]["kvweave"]
    chosen = {"segment_dtype": "planes-2.5", "exact_first": 0, "store_reads": "always"}
    assert given == {"segment_bytes": 1 << 30, **kept, **chosen}
    code, text = ran(model, "--offload-gib", 4, *sizes)
    assert code == 0
    transfer = yaml.safe_load(text)["kv-transfer-config"]
    assert transfer["kv_connector"] == "KvweaveOffloading"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 4 << 30)
    (tier,) = extra["secondary_tiers"]
    assert tier == {
        "type": "StoreTier",
        "module_path": "kvweave.adapters.vllm.store_tier.tier",
        "folder": str(store),
        "capacity_bytes": 2 << 30,
        "quota_bytes": 1 << 29,
    }


def test_the_printed_command_is_one_for_a_shell(model: Path) -> None:
    path = model / ("a long name; $(of a file) " * 9 + ".yml")
    code, said = ran(model, "--out", path)
    assert code == 0
    assert shlex.split(said) == ["vllm", "serve", str(model), "--config", str(path)]
    assert len(said.splitlines()) == 1
    assert yaml.safe_load(path.read_text()) == {"attention-config": {"backend": "CUSTOM"}}


def test_the_command_refuses_in_one_line(model: Path) -> None:
    for words, expected in (
        (("--segments-gib", "inf"), "expected a finite number, got inf"),
        (("--segments-gib", "nan"), "segments-gib"),
        (("--out", model / "x.conf"), "expected a file that ends in .yaml or .yml, got x.conf"),
        (("--out", model / "yaml"), "got yaml"),
        (("--heads", model / "none.json"), "none.json"),
        (("--frozen-share", 0.5), "expected it beside segments-gib"),
        (("--segments-gib", 1, "--virtual-pages"), "virtual pages: expected none beside segments"),
        (("--store", model), "expected it beside segment_bytes"),
        (("--segment-dtype", "int4"), "expected it beside segment_bytes"),
        (("--segments-gib", 1, "--segment-dtype", "int3"), "expected one of int4, int8, half-int4"),
        (("--segments-gib", 1, "--exact-first", 1), "expected it beside segment_dtype"),
        (
            ("--segments-gib", 1, "--segment-dtype", "int4", "--exact-first", 65),
            "exact_first: expected 0 to 64 tokens, got 65",
        ),
        (("--offload-gib", 1, "--store", model, "--exact-first", 1), "got it beside exact_first"),
        (("--segments-gib", 1, "--store-reads", "always"), "expected it beside store"),
        (("--segments-gib", 1, "--store-gib", 1), "expected it beside store"),
        (("--offload-gib", 1), "expected it beside store alone, got it beside none"),
        (("--offload-gib", 1, "--store", model, "--metrics"), "got it beside metrics"),
        (("--offload-gib", "inf", "--store", model), "offload-gib: expected a finite number"),
    ):
        code, said = ran(model, *words)
        assert code == 2
        assert expected in " ".join(said.split())
        assert "Traceback" not in said
    assert not (model / "x.conf").exists()


def test_a_map_is_held_to_the_model_before_an_engine_is_started(model: Path) -> None:
    for name, heads, layers, words, expected in (
        ("other", (WINDOW,), 5, (), "a map of 3 layers of 4 KV heads, got 5 of 4"),
        (
            "none",
            (WINDOW,) * 4,
            LAYERS,
            (),
            "expected at least one for each of 1, got 0 of 12 global",
        ),
        ("mixed", (WINDOW, TOP_K), LAYERS, (), "full and top_k, or full and window"),
        ("few", ({**TOP_K, "pages": 2},), LAYERS, (), "at least 3, which are always read"),
        ("ranks", (WINDOW,), LAYERS, ("--ranks", 3), "3 ranks"),
        ("chosen", ({**TOP_K, "pages": 2}, WINDOW), LAYERS, ("--virtual-pages",), "at least 3"),
    ):
        path = map_file(model / f"{name}.json", *heads, layers=layers)
        code, said = ran(model, "--heads", path, *words)
        assert (code, "Traceback" in said) == (2, False)
        assert expected in " ".join(said.split())
    (model / "torn.json").write_text('{"heads": [')
    code, said = ran(model, "--heads", model / "torn.json")
    assert (code, "head map" in said) == (2, True)
    served = {
        "window": ((WINDOW,), ()),
        "several": ((WINDOW, WIDER), ()),
        "in pages": ((WINDOW, WIDER, TOP_K), ("--virtual-pages", "--host-gib", 1)),
        "chosen": ((TOP_K, TOP_K), ("--ranks", 2)),
        "halves": ((WINDOW, WINDOW), ("--ranks", 2)),
    }
    for name, (heads, words) in served.items():
        assert ran(model, "--heads", map_file(model / f"{name}.json", *heads), *words)[0] == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "expected a transformers config"),
        ("[]", "expected a transformers config"),
        ({"architectures": [LLAMA]}, "expected a transformers config"),
        ({"architectures": []}, "expected architectures"),
        ({"architectures": [3]}, "expected architectures"),
        (None, "expected a folder with config.json"),
    ],
)
def test_a_model_that_is_none_is_refused(model: Path, config: Any, expected: str) -> None:
    path = model / "config.json"
    given = json.loads(path.read_text())
    path.unlink()
    if isinstance(config, str):
        path.write_text(config)
    elif config is not None:
        whole = {**given, **config} if config["architectures"] != [LLAMA] else config
        path.write_text(json.dumps(whole))
    code, said = ran(model, "--segments-gib", 1)
    assert (code, "Traceback" in said) == (2, False)
    assert expected in " ".join(said.split())


def test_the_command_imports_no_framework(model: Path) -> None:
    """A map of each kind is looked at too; a fresh process says what was imported on the way."""
    for heads in ((WINDOW,), (TOP_K,)):
        path = map_file(model / "map.json", *heads)
        asked = ["vllm-config", str(model), "--heads", str(path)]
        program = (
            "import sys\nfrom kvweave.cli import app\n"
            f"try:\n    app({asked!r})\nexcept SystemExit as ended:\n    assert not ended.code\n"
            "print(sorted({'torch', 'transformers', 'vllm', 'huggingface_hub'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"


def test_a_name_that_no_hub_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-model", "/no/folder"):
        code, said = ran(name)
        assert (code, "Traceback" in said) == (2, False)
        assert "or the name of a model on the hub" in " ".join(said.split())


def test_a_network_that_is_not_there_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hub's client raises then is an error of its own, whichever version it is."""
    asked = []

    def away(url: str) -> None:
        asked.append(url)
        raise RuntimeError("name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", away)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("asked again"))
    code, said = ran("nobody/no-such-model")
    assert (code, "Traceback" in said, len(asked)) == (2, False, 1)
    assert "got: name or service not known; fetch it where there is a network" in said


def test_a_config_that_the_hub_gave_before_needs_no_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--someone--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("f" * 40)
    (kept / "snapshots" / ("f" * 40)).mkdir(parents=True)
    shutil.copy(model / "config.json", kept / "snapshots" / ("f" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, said = ran("someone/model", "--segments-gib", 1)
    assert code == 0, said
    assert said == ran(str(model), "--segments-gib", 1)[1]


def test_a_packaged_model_is_none_of_vllms() -> None:
    code, said = ran("smollm2")
    assert (code, "Traceback" in said) == (2, False)
    assert "got one of kvweave's packaged models" in said
