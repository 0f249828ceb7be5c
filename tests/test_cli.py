"""The command line: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import kvweave
from kvweave.cache import KvCache, KvShape
from kvweave.cli import app
from kvweave.cli.capacity_plan import capacity_of, parse_bytes, presets, shape_of
from kvweave.cli.prompt_file import split_prompt
from kvweave.errors import CorruptHeadMap, InvalidArgument

SPEECH = "We are met to consider the state of the Union. The harvest was good this year. " * 12
LETTER = "The committee agreed to repair the harbour wall before the winter storms come. " * 12


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one error line of a command that must leave with exit code 2."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "speech.txt").write_text(SPEECH)
    (tmp_path / "letter.txt").write_text(LETTER)
    (tmp_path / "prompt.txt").write_text("Read these.\n{{letter}}\n\n{{ speech }}\nWhat is agreed?")
    return tmp_path


# ---- capacity --------------------------------------------------------------------------------


def test_capacity_of_a_well_known_shape(tmp_path: Path) -> None:
    result = call(
        "capacity",
        "Llama-3.1-8B",
        "--length",
        131072,
        "--memory",
        "80GiB",
        "--json",
        tmp_path / "c.json",
    )
    assert result.exit_code == 0, result.output
    assert "128.00 KiB" in result.output
    found = json.loads((tmp_path / "c.json").read_text())
    # 2 (K and V) × 32 layers × 8 heads × 128 dims × 2 bytes.
    assert found["token_bytes"] == 131072
    assert found["request_bytes"] == 131072 * 131072
    assert found["request_blocks"] == 8192
    # Four whole requests would need 64 GiB and the null block; five do not fit 80 GiB with it.
    assert found["requests"] == 4


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_are_shapes(name: str) -> None:
    shape = shape_of(name)
    assert shape.head_dim % 8 == 0
    assert 1 <= shape.kv_heads <= 64
    assert shape.context is not None


@pytest.mark.parametrize(("tokens", "page_tokens"), [(1, 16), (64, 16), (100, 8), (129, 64)])
def test_capacity_agrees_with_a_real_cache(tokens: int, page_tokens: int) -> None:
    shape = shape_of("smollm2-135m")
    memory = 40 << 20
    found = capacity_of(shape, tokens, page_tokens, memory)
    kv = KvShape(shape.layers, shape.kv_heads, shape.head_dim, page_tokens, shape.dtype)
    cache = KvCache(kv, arena_bytes=memory)
    assert cache.block_bytes == found.groups[0].block_bytes
    requests = []
    for number in range(found.requests):
        prompt = np.full(tokens, number % 1000, np.int32)
        requests.append(cache.admit(prompt, reuse="none"))
    held = {r.block_counts()[0] for r in requests}
    assert held == {found.request_blocks}
    with pytest.raises(Exception, match="(?i)block|pool|free"):
        cache.admit(np.full(tokens, 1, np.int32), reuse="none")


def test_capacity_reads_a_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "float32",
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    shape = shape_of(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (4, 2, 64, "f32")
    result = call("capacity", tmp_path / "config.json", "--length", 100, "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert "longer than the model's context" in result.output


def head_map(layers: int, heads: int, local: int) -> dict[str, object]:
    """The first `local` heads of each layer keep a window, the others everything."""
    window = {"kind": "window", "sink": 16, "recent": 256}
    return {
        "schema_version": 1,
        "model_fingerprint": "x",
        "layers": layers,
        "kv_heads": heads,
        "heads": [
            {
                "layer": layer,
                "head": head,
                "class": window if head < local else {"kind": "full"},
                "reach": "local" if head < local else "global",
                "stability": "stable",
            }
            for layer in range(layers)
            for head in range(heads)
        ],
    }


def test_a_head_map_saves_what_windows_drop(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(head_map(32, 8, local=6)))
    result = call(
        "capacity",
        "llama-3.1-8b",
        "--length",
        32768,
        "--heads",
        path,
        "--json",
        tmp_path / "c.json",
    )
    assert result.exit_code == 0, result.output
    assert "window" in result.output
    found = json.loads((tmp_path / "c.json").read_text())
    page = 2 * 16 * 128 * 2
    # 64 pairs keep 2048 blocks; 192 keep one sink block, 16 recent ones and one at the border.
    assert found["request_bytes"] == 64 * page * 2048 + 192 * page * 18
    assert found["dense_request_bytes"] == 256 * page * 2048


def test_capacity_refuses_corrupt_head_maps(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    for text in ("not json", "{}", '{"heads": [{"layer": 0}]}', json.dumps(head_map(2, 8, 1))):
        path.write_text(text)
        assert "expected" in refused("capacity", "llama-3.1-8b", "--heads", path)
    for broken, says in (
        ({"kind": "psychic"}, "psychic"),
        ({"kind": "window"}, "missing field `sink`"),
        ({"kind": "window", "sink": -5, "recent": 4}, "-5"),
        ({"kind": "window", "sink": [1], "recent": 4}, "expected u32"),
        ("window", "expected internally tagged"),
    ):
        corrupt = head_map(32, 8, 1)
        corrupt["heads"][0]["class"] = broken  # type: ignore[index]
        path.write_text(json.dumps(corrupt))
        assert says in refused("capacity", "llama-3.1-8b", "--heads", path)
    assert issubclass(CorruptHeadMap, ValueError)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("80GB", 80 * 10**9), ("1.5 mib", 3 << 19), ("4096", 4096), ("2k", 2000)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "3XB", "GiB"])
def test_other_sizes_are_not(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected a size"):
        parse_bytes(text)


def test_capacity_says_what_it_knows() -> None:
    assert "llama-3.1-8b" in refused("capacity", "gpt-17")
    assert "f32, bf16, f16" in refused("capacity", "qwen3-32b", "--dtype", "int4")


# ---- prompts with segments -------------------------------------------------------------------


def test_prompts_are_split_at_their_places() -> None:
    assert split_prompt("a {{x}} b {{ y }}", ["x", "y"]) == [
        ("a ", False),
        ("x", True),
        (" b ", False),
        ("y", True),
    ]
    assert split_prompt("ask", ["x"]) == [("x", True), ("ask", False)]
    assert split_prompt("{{x}}{{x}}", ["x"]) == [("x", True), ("x", True)]
    with pytest.raises(InvalidArgument, match="got 'z'"):
        split_prompt("{{z}}", ["x"])
    with pytest.raises(InvalidArgument, match="got nothing"):
        split_prompt("", [])


# ---- plan ------------------------------------------------------------------------------------


def test_plan_of_interleaved_segments(folder: Path) -> None:
    result = call(
        "plan",
        folder / "prompt.txt",
        "--segment",
        f"speech={folder}/speech.txt",
        "--segment",
        folder / "letter.txt",
        "--out",
        folder / "plan.svg",
        "--json",
        folder / "plan.json",
    )
    assert result.exit_code == 0, result.output
    plan = json.loads((folder / "plan.json").read_text())
    spans = plan["spans"]
    assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
    assert spans[-1]["end"] == plan["tokens"]
    reused = [s for s in spans if s["kind"] == "segment"]
    assert {s["source"] for s in reused} >= {"speech", "letter"}
    assert all(s["delta"] == s["start"] or s["delta"] > 0 for s in reused)
    assert sum(s["end"] - s["start"] for s in reused) > 0.8 * plan["tokens"]
    assert (folder / "plan.svg").stat().st_size > 2000
    assert "reused by segment" in result.output


def test_plan_names_why_a_cold_segment_is_recomputed(folder: Path) -> None:
    both = ["--segment", folder / "speech.txt", "--segment", folder / "letter.txt"]
    result = call(
        "plan", folder / "prompt.txt", *both, "--cold", "speech", "--json", folder / "plan.json"
    )
    assert result.exit_code == 0, result.output
    spans = json.loads((folder / "plan.json").read_text())["spans"]
    assert {s["source"] for s in spans if s["kind"] == "segment"} == {"letter"}
    assert "not-cached" in {s["reason"] for s in spans}


def test_plan_finds_an_earlier_prompt_as_its_prefix(folder: Path) -> None:
    (folder / "one.txt").write_text(SPEECH + "First question?")
    (folder / "two.txt").write_text(SPEECH + "Second question?")
    result = call(
        "plan", folder / "two.txt", "--earlier", folder / "one.txt", "--json", folder / "p.json"
    )
    assert result.exit_code == 0, result.output
    spans = json.loads((folder / "p.json").read_text())["spans"]
    assert spans[0]["kind"] == "prefix"
    assert spans[0]["end"] > 100


def test_plan_refuses_what_it_cannot_draw(folder: Path) -> None:
    assert "no such file" in refused("plan", folder / "absent.txt")
    assert ".png, .svg, .pdf" in refused("plan", folder / "prompt.txt", "--out", "x.gif")
    assert "got 'letter'" in refused("plan", folder / "prompt.txt")
    letter = ["--segment", folder / "letter.txt"]
    assert "expected each name once" in refused("plan", folder / "prompt.txt", *letter, *letter)
    speech = ["--segment", folder / "speech.txt"]
    assert "cold: expected one of" in refused(
        "plan", folder / "prompt.txt", *letter, *speech, "--cold", "other"
    )
    (folder / "empty.txt").write_text("")
    assert "expected text" in refused(
        "plan", folder / "empty.txt", "--segment", folder / "empty.txt"
    )
    assert "expected text or a segment" in refused("plan", folder / "empty.txt")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert "error" in refused("plan", folder / "bytes.txt")


def test_plan_draws_the_rows_of_a_policy(folder: Path) -> None:
    result = call(
        "plan",
        folder / "prompt.txt",
        "--segment",
        folder / "speech.txt",
        "--segment",
        folder / "letter.txt",
        "--policy",
        "sparsex",
        "--out",
        folder / "p.png",
        "--json",
        folder / "p.json",
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "p.json").read_text())["rows_per_layer"]
    assert len(rows) == 30
    assert rows[0] > rows[-1] > 0
    assert "rows computed by layer" in result.output


# ---- the other commands ----------------------------------------------------------------------


def test_generate_streams_an_answer(folder: Path) -> None:
    result = call(
        "generate",
        f"@{folder}/prompt.txt",
        "--segment",
        folder / "speech.txt",
        "--segment",
        folder / "letter.txt",
        "--max-new-tokens",
        6,
        "--policy",
        "full",
    )
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip()) > 3


def test_commands_refuse_bad_input(folder: Path) -> None:
    assert "expected one of full, prefix" in refused("generate", "hi", "--policy", "magic")
    assert "top_p" in refused("generate", "hi", "--top-p", 2)
    assert "smollm2" in refused("generate", "hi", "--model", "gpt-17")
    assert "expected one of lm" in refused("eval", "--task", "sums")
    assert "expected one of full, prefix" in refused("eval", "--policies", "naive,magic")
    assert ".png" in refused("eval", "--plot", "x.tiff")
    assert "expected one of sotu, kjv" in refused("eval", "--corpus", folder / "nowhere")
    assert "expected no corpus" in refused("eval", "--task", "lookup", "--corpus", "kjv")
    assert "smollm2" in refused("demo", "--model", "gpt-17")


def test_the_version_is_said_with_the_state_of_cuda() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"kvweave {kvweave.__version__}, CUDA {kvweave.cuda_status()}\n"


def test_help_imports_no_framework() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvweave.cli import app; "
        "result = CliRunner().invoke(app, ['--help']); assert 'capacity' in result.output; "
        "sys.exit(', '.join({'torch', 'transformers', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_needs_torch_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import kvweave\n"
        "for name in ('Runner', 'SparseX', 'ops'):\n"
        "    try: getattr(kvweave, name)\n"
        "    except ModuleNotFoundError as error: print(error, error.name)\n"
        "print(hasattr(kvweave, 'Cache'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *told, other = done.stdout.splitlines()
    assert len(told) == 3
    assert all(line.endswith("pip install 'kvweave[transformers]' torch") for line in told)
    assert other == "False"
