"""The command line: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import kvweave
from commands import call, refused
from kvweave.cli.prompt_file import read_prompt, split_prompt
from kvweave.errors import InvalidArgument

SPEECH = "We are met to consider the state of the Union. The harvest was good this year. " * 12
LETTER = "The committee agreed to repair the harbour wall before the winter storms come. " * 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "speech.txt").write_text(SPEECH)
    (tmp_path / "letter.txt").write_text(LETTER)
    (tmp_path / "prompt.txt").write_text("Read these.\n{{letter}}\n\n{{ speech }}\nWhat is agreed?")
    return tmp_path


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


def at(path: Path) -> str:
    """A prompt option that names a file."""
    return f"@{path}"


def test_plan_of_interleaved_segments(folder: Path) -> None:
    result = call(
        "plan",
        at(folder / "prompt.txt"),
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
        "plan", at(folder / "prompt.txt"), *both, "--cold", "speech", "--json", folder / "plan.json"
    )
    assert result.exit_code == 0, result.output
    spans = json.loads((folder / "plan.json").read_text())["spans"]
    assert {s["source"] for s in spans if s["kind"] == "segment"} == {"letter"}
    assert "not-cached" in {s["reason"] for s in spans}


def test_plan_finds_an_earlier_prompt_as_its_prefix(folder: Path) -> None:
    (folder / "one.txt").write_text(SPEECH + "First question?")
    (folder / "two.txt").write_text(SPEECH + "Second question?")
    result = call(
        "plan",
        at(folder / "two.txt"),
        "--earlier",
        at(folder / "one.txt"),
        "--json",
        folder / "p.json",
    )
    assert result.exit_code == 0, result.output
    spans = json.loads((folder / "p.json").read_text())["spans"]
    assert spans[0]["kind"] == "prefix"
    assert spans[0]["end"] > 100


def test_plan_takes_a_prompt_as_generate_does(folder: Path) -> None:
    made = []
    for number, prompt in enumerate(["Who agreed? {{letter}}", at(folder / "short.txt")]):
        (folder / "short.txt").write_text("Who agreed? {{letter}}")
        file = folder / f"{number}.json"
        result = call("plan", prompt, "--segment", folder / "letter.txt", "--json", file)
        assert result.exit_code == 0, result.output
        made.append(json.loads(file.read_text()))
    assert made[0] == made[1]


def test_plan_refuses_what_it_cannot_draw(folder: Path) -> None:
    assert "no such file" in refused("plan", at(folder / "absent.txt"))
    assert ".png, .svg, .pdf" in refused("plan", at(folder / "prompt.txt"), "--out", "x.gif")
    assert "got 'letter'" in refused("plan", at(folder / "prompt.txt"))
    letter = ["--segment", folder / "letter.txt"]
    assert "expected each name once" in refused("plan", at(folder / "prompt.txt"), *letter, *letter)
    speech = ["--segment", folder / "speech.txt"]
    assert "cold: expected one of" in refused(
        "plan", at(folder / "prompt.txt"), *letter, *speech, "--cold", "other"
    )
    (folder / "empty.txt").write_text("")
    assert "expected text" in refused(
        "plan", at(folder / "empty.txt"), "--segment", folder / "empty.txt"
    )
    assert "expected text or a segment" in refused("plan", at(folder / "empty.txt"))
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert "error" in refused("plan", at(folder / "bytes.txt"))


def test_the_bare_name_of_a_file_is_no_prompt(folder: Path) -> None:
    name = folder / "prompt.txt"
    for words in (("plan", name), ("generate", name), ("plan", "hi", "--earlier", name)):
        said = "".join(refused(*words).split())
        assert f"@{name}" in said
        assert ("earlier:" if "--earlier" in words else "prompt:") in said
    assert read_prompt("word " * 9000) == "word " * 9000  # Longer than any path.
    assert read_prompt("a\0b") == "a\0b"
    assert read_prompt(str(folder)) == str(folder)


def test_plan_draws_the_rows_of_a_policy(folder: Path) -> None:
    result = call(
        "plan",
        at(folder / "prompt.txt"),
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
    commands: list[tuple[str, ...]] = [("generate", "hi"), ("eval",), ("eval", "--suite", "smoke")]
    for command in (*commands, ("demo",), ("plan", "hi", "--policy", "full")):
        told = refused(*command, "--dtype", "f64")
        assert "dtype: expected one of f32, bf16, f16, got 'f64'" in told
    assert "dtype: expected a policy" in refused("plan", "hi", "--dtype", "bf16")
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


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "kvweave", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"kvweave {kvweave.__version__}")


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


def test_a_warning_is_one_line(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    shown = warnings.showwarning
    asked = ["generate", at(folder / "prompt.txt"), "--max-new-tokens", 1]
    for name in ("speech", "letter"):
        asked += ["--segment", folder / f"{name}.txt"]
    result = call(*asked)
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: policy foresight is used without a profile of it")
    assert warnings.showwarning is shown
    assert not recwarn


@pytest.mark.parametrize(
    "words",
    [
        ["profile-heads", "smollm2", "--figure", "map.svg"],
        ["eval", "--plot", "kl.png"],
        ["plan", "ask", "--out", "plan.pdf"],
    ],
)
def test_what_draws_is_missed_before_anything_is_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("kvweave.models.load", lambda *_, **__: pytest.fail("it loads a model"))
    assert refused(*words).endswith("matplotlib to be installed; run: pip install 'kvweave[demo]'")
