"""A head map beside a checkpoint's files and beside weights that are loaded; no engine."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from families import tiny
from head_maps import classes_of, head_map
from kvweave import CorruptHeadMap, InvalidArgument
from kvweave.adapters.vllm.checkpoint import FLOATS, StoredTensors
from kvweave.adapters.vllm.heads.same_model import UNNAMED, check_files, watched
from kvweave.cli import app
from kvweave.runner.model.model_spec import describe
from kvweave.runner.model.sampled_weights import sampled_weights
from kvweave.weight_sample import WeightComparison, samples_json, samples_of

K = "model.layers.1.self_attn.k_proj.weight"
WINDOWS = (None, (64, 4))


def map_of(folder: Path, model: Any, *, says: bool = True) -> Path:
    """The file of a map of a model, with values of its weights or without."""
    weights = samples_json(sampled_weights(model)) if says else {}
    path = folder / f"map-{says}.json"
    path.write_text(
        head_map(describe(model), classes_of(model, WINDOWS), weights=weights).to_json()
    )
    return path


def saved(folder: Path, model: Any, **given: Any) -> Path:
    model.save_pretrained(folder, **given)
    return folder


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def bumped(tensors: dict[str, torch.Tensor]) -> None:
    # One that the map has: of 2048 elements the second of four.
    tensors[K].view(-1)[3 * 2048 // 8] += 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_of_the_model_is_told_from_others(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever it was rounded to, in one file or in several."""
    model = tiny("llama")
    path, values = map_of(tmp_path, model), sum(len(s.values) for s in sampled_weights(model))
    one = saved(tmp_path / "one", tiny("llama").to(dtype))
    several = saved(tmp_path / "several", tiny("llama").to(dtype), max_shard_size="40KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    for folder in (one, several):
        told = f"heads: {values} values of {len(sampled_weights(model))} tensors are the map's"
        assert check_files(path, folder) == told
    changed(one / "model.safetensors", bumped)
    with pytest.raises(CorruptHeadMap, match=rf"whose {K[6:]} is with \S+ at element 768 of"):
        check_files(path, one)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    model = tiny("llama")
    folder = saved(tmp_path / "model", model)
    assert check_files(map_of(tmp_path, model, says=False), folder) == UNNAMED
    path = map_of(tmp_path, model)
    assert "no safetensors files here" in check_files(path, tmp_path)
    file = folder / "model.safetensors"
    changed(file, lambda tensors: tensors.update({K: tensors[K].to(torch.int8)}))
    assert "; 1 tensors are quantised and were not compared" in check_files(path, folder)
    changed(file, lambda tensors: tensors.pop(K))
    assert "; 1 tensors were not found by their names" in check_files(path, folder)
    changed(file, lambda tensors: tensors.update({K: torch.zeros(5, 5)}))
    with pytest.raises(CorruptHeadMap, match=r"of shape \[5, 5\]"):
        check_files(path, folder)


def test_weights_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    """What comes out is what went in; another model is refused at its first other tensor."""
    model = tiny("llama")
    samples = samples_of(head_map(describe(model), classes_of(model))) + sampled_weights(model)
    loaded = [(name, tensor) for name, tensor in model.state_dict().items()]
    compared = WeightComparison(samples)
    assert list(watched(iter(loaded), compared)) == loaded
    assert compared.seen == {sample.name for sample in samples}
    other = {name: tensor.clone() for name, tensor in loaded}
    bumped(other)
    stream = watched(iter(other.items()), WeightComparison(samples))
    names: list[str] = []
    with pytest.raises(CorruptHeadMap, match="k_proj"):
        names.extend(name for name, _ in stream)
    assert names == [name for name, _ in loaded][: [name for name, _ in loaded].index(K)]


def test_the_command_compares_a_map_with_the_checkpoint(tmp_path: Path) -> None:
    model = tiny("llama")
    folder, path = saved(tmp_path / "model", model), map_of(tmp_path, model)
    words = ["vllm-config", str(folder), "--heads", str(path)]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "are the map's" in done.stderr) == (0, True)
    assert str(path) in done.stdout
    changed(folder / "model.safetensors", bumped)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected a map of this model, whose" in " ".join(done.stderr.split())
    unnamed = map_of(tmp_path, model, says=False)
    done = CliRunner().invoke(app, [*words[:-1], str(unnamed)])
    assert done.exit_code == 0
    assert UNNAMED in done.stderr


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_elements_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    for name, width, _ in FLOATS.values():
        tensor = torch.randn(6, 10).to(kinds[name])
        save_file({"a": torch.ones(3), "b": tensor}, tmp_path / "file.safetensors")
        tensors = StoredTensors.of(tmp_path / "file.safetensors")
        found = tensors.by_name["b"]
        assert (found.shape, found.end - found.begin) == ((6, 10), 60 * width)
        at = [0, 1, 17, 59]
        assert tensors.floats(found, at) == tensor.flatten()[at].float().tolist()


def first_element(path: Path) -> float:
    tensors = StoredTensors.of(path)
    return tensors.floats(tensors.by_name["a"], [0])[0]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "a header of 2 to"),
        (b"{}{}", b"", "a header of JSON"),
        (b"[" * 5000, b"", "a header of JSON"),
        ([], b"", "a header by names"),
        ({"a": 1}, b"", "a dtype of a"),
        (one(dtype=3), bytes(8), "a dtype of a"),
        (one(shape=[-2]), bytes(8), "sizes of a"),
        (one(shape=[True]), bytes(8), "sizes of a"),
        (one(shape=None), bytes(8), "sizes of a"),
        (one(data_offsets=[0, 9]), bytes(8), "within the file"),
        (one(data_offsets=[8, 0]), bytes(8), "within the file"),
        (one(data_offsets=[0, 2**70]), bytes(8), "within the file"),
        (one(data_offsets=[0]), bytes(8), "within the file"),
        (one(shape=[2**40]), bytes(8), "bytes of"),
        (one(dtype="F16"), bytes(8), "4 bytes of"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = written(tmp_path / "file.safetensors", header, data)
    with pytest.raises(InvalidArgument, match=rf"weights file\.safetensors: expected .*{says}"):
        first_element(path)
    path.write_bytes(b"\xff" * 9)
    with pytest.raises(InvalidArgument, match="a header of 2 to 1 bytes"):
        StoredTensors.of(path)
    path.unlink()
    with pytest.raises(InvalidArgument, match="a readable file, got 'No such file"):
        StoredTensors.of(path)
