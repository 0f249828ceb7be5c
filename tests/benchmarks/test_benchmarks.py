"""The harness that measures: order, percentiles, records; and that a wrong answer is no result."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.cases import (
    attention,
    block_manager,
    copy_rerotate,
    decode_host,
    engine_load,
    head_memory,
    host_load,
    packed_load,
    rotate_rows,
    speculation,
    tiers,
    top_k_step,
    ttft_cuda,
)
from benchmarks.device import counters as device_counters
from benchmarks.device.models import random_model
from benchmarks.device.profile import class_of
from benchmarks.report import demo_table, headlines, record, results
from benchmarks.run import CASES, main
from kvweave.errors import InvalidArgument
from kvweave.lab.bench.rows import Row, WrongAnswer, expect
from kvweave.lab.bench.shapes import CASES as OPS
from kvweave.lab.bench.timing import compare, summarise
from kvweave.plan import LayerPlan, Probe, PromptView
from kvweave.policies import Epic


def test_contenders_take_turns_at_being_first() -> None:
    calls: list[str] = []
    names = ("a", "b", "c")
    timed = compare({n: (lambda n=n: calls.append(n)) for n in names}, rounds=3, warm_up=0)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert {n: t.rounds for n, t in timed.items()} == dict.fromkeys(names, 3)


def test_short_calls_are_repeated_inside_a_sample() -> None:
    calls: list[int] = []
    # Even where a busy machine lets the call that is timed first wait for 10 ms.
    compare({"a": lambda: calls.append(1)}, rounds=2, at_least_s=0.1)
    assert len(calls) > 10


def test_median_and_95th_percentile() -> None:
    timing = summarise([float(x) for x in range(1, 102)])
    assert (timing.median_s, timing.p95_s, timing.rounds) == (51.0, 96.0, 101)


def test_a_wrong_answer_is_refused() -> None:
    with pytest.raises(WrongAnswer, match="expected 3, got 4"):
        expect(3 == 4, "expected 3, got 4")


def test_records_of_one_day_are_appended(tmp_path: Path) -> None:
    row = Row("a", 1.5, "ms", None, {"ratio": 2.0})
    first = record.append("case", [row], tmp_path)
    second = record.append("case", [row], tmp_path)
    runs = json.loads(second.read_text())
    assert first == second
    assert len(runs) == 2
    assert runs[0]["rows"] == [
        {"name": "a", "value": 1.5, "unit": "ms", "p95": None, "of": {"ratio": 2.0}}
    ]
    assert runs[0]["machine"]["cores"] >= 1


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "got nonsense" in capsys.readouterr().err
    timed = {"block_manager", "copy_rerotate", "rotate_rows", "attention", "ttft", "ttft_cuda"}
    host = {"zeroing", "head_memory", "decode_host", "engine_load", "host_load"}
    host |= {
        "choices",
        "hand_off",
        "isolation",
        "packed_capacity",
        "packed_kinds",
        "packed_load",
        "packed_prefill",
        "packed_prefill_final",
        "packed_rows",
        "packed_step",
        "packed_worker",
        "packed_worker_final",
        "packed_worker_whole",
        "scheduler",
        "speculation_text",
        "store",
        "tiers",
        "ttft_packed",
        "ttft_packed_parts",
        "workflow",
    }
    on_gpu = {"packed_decode", "page_choice", "page_moves", "speculation", "ttft_heads"}
    on_gpu |= {"block_moves", "packed_copies", "top_k_step", "top_k_step_half", "top_k_cadence"}
    assert set(CASES) == timed | host | on_gpu


def test_prompts_are_looked_up_beside_others_and_by_many_at_once() -> None:
    one, *many = block_manager.lookups_beside(20_000, quick=True)
    assert "beside 0.0164 M blocks" in one.name
    assert len(many) == len(block_manager.THREADS)
    assert all(row.value > 0 for row in (one, *many))


@pytest.mark.parametrize("hash_name", list(block_manager.LIMIT_MS))
def test_lookup_case_runs(hash_name: str) -> None:
    row = block_manager.lookup(hash_name, quick=True)
    assert row.value > 0.0


def test_copy_case_checks_and_measures() -> None:
    rows = copy_rerotate.run(quick=True)
    assert len(rows) == 4
    assert all(row.of["MiB"] >= 16 for row in rows)


def test_rotation_case_checks_and_measures() -> None:
    rows = rotate_rows.run(quick=True)
    assert len(rows) == 8
    assert all(row.value > 0 and row.of["torch ÷ ours"] > 0 for row in rows)


def test_decode_host_case_measures_steps_that_say_a_token_each() -> None:
    rows = decode_host.run(quick=True)
    assert [row.unit for row in rows] == ["µs"] * 9
    assert all(0 < row.value <= row.p95 for row in rows)


def test_speculation_case_measures_rounds_beside_dense_steps() -> None:
    """Of a tiny model on the host; by all pages all drafts are accepted."""
    model, loads = random_model("tiny Llama", "cpu", torch.float32), [top_k_step.Load(2, 200, 2)]
    dense, few, more = speculation.rows_of(model, loads, 1000, [1, 3], rounds=3)
    assert [row.unit for row in (dense, few, more)] == ["ms"] * 3
    assert (few.of["accepted"], more.of["accepted"]) == (1.0, 3.0)
    for row, drafts in ((few, 1), (more, 3)):
        assert row.of["dense ÷ this"] == row.of["if all are accepted"]
        assert row.of["dense ÷ this"] == (1 + drafts) * dense.value / row.value
        assert row.of["worth it from"] == row.value / dense.value - 1


@pytest.mark.long
def test_top_k_step_case_measures_steps_of_whole_batches() -> None:
    """Of a tiny model on the host: who joins at once and who joins in turns."""
    loads = [top_k_step.Load(3, 200, 2, in_turns=turns) for turns in (False, True)]
    model = random_model("tiny Llama", "cpu", torch.float32)
    rows = top_k_step.rows_of(model, loads, [4, 1000], periods=2)
    assert [row.unit for row in rows] == ["ms"] * 10
    assert all(row.value > 0 for row in rows)
    at_once, all_of_it, estimated, over_host = (row.of for row in rows[1:5])
    assert at_once["all ÷ this"] == rows[0].value / rows[1].value
    assert at_once["nobody ranked ms"] <= rows[1].value <= at_once["all ranked ms"]
    assert at_once["bounds GB"] > all_of_it["bounds GB"] > 0
    # On the host bounds are three vectors of f32, and means two.
    assert estimated["bounds GB"] == pytest.approx(5 / 3 * at_once["bounds GB"])
    assert over_host["KV GB"] < 0.5 * at_once["KV GB"]
    assert "all ranked ms" not in rows[6].of
    dense, often = top_k_step.cadence_rows(model, [(loads[0], (4,))], periods=2)
    assert often.name == "3 × 200, 2 layers: 4 pages, a quarter at every step"
    assert often.of["all ÷ this"] == dense.value / often.value
    assert often.of["bounds GB"] == at_once["bounds GB"]


def test_engine_load_case_measures_what_is_said_and_given_back() -> None:
    rows = engine_load.run(quick=True)
    assert [row.unit for row in rows] == ["tokens/s", "s", "ms"] * 2 + ["ms", "ms", "s"]
    assert all(row.value > 0 for row in rows)
    assert all(row.value <= row.p95 <= row.of["p99"] <= row.of["worst"] for row in rows[1:3])
    everything = rows[0]
    assert everything.value > everything.of["out/s"] > everything.of["requests/s"]


def test_host_load_case_sets_the_host_beside_the_device() -> None:
    task = replace(host_load.QUICK, copies=("spill", "mirror"))
    rows = host_load.rows_of(task, pages=4)
    assert [row.unit for row in rows] == ["tokens/s", "s", "ms"] * 6
    whole, over, mirrored = rows[0], rows[6], rows[12]
    assert rows[15].of["× all"] == rows[15].value / rows[3].value
    assert mirrored.of["copied GB"] > over.of["copied GB"] > whole.of["copied GB"] == 0
    assert over.of["× all"] == over.value / whole.value
    assert rows[8].of["× all"] == rows[2].value / rows[8].value
    assert whole.of["KV held"] > 0.99 > over.of["KV held"]
    assert over.of["decoding at once"] >= 1


def test_packed_load_case_sets_packed_pages_beside_exact_ones() -> None:
    rows = packed_load.rows_of(replace(packed_load.QUICK, packed=("int4", "half-int4")))
    assert [row.unit for row in rows] == ["tokens/s", "s", "ms"] * 3
    exact, *packed = rows[::3]
    assert exact.of["× exact"] == 1.0
    for row in packed:
        assert row.of["decoding at once"] > exact.of["decoding at once"] >= 1
        assert row.of["× exact"] == row.value / exact.value


def test_a_load_at_a_rate_alone_has_to_be_told_it() -> None:
    task = replace(host_load.QUICK, ways=("Poisson",))
    with pytest.raises(ValueError, match="rate: expected one"):
        host_load.rows_of(task, pages=4)


def test_tiers_case_brings_documents_from_where_it_says(tmp_path: Path) -> None:
    model = random_model("tiny Llama", "cpu", torch.float32)
    bench = tiers.Bench(model, 512, tmp_path / "store")
    rows = tiers.rows_of("tiny", bench, 512, rounds=1)
    assert [row.name.rpartition(", ")[2] for row in rows[:4]] == list(tiers.SOURCES)
    assert [row.of["load s"] > 0 for row in rows[:4]] == [False, False, True, True]
    assert rows[0].of["÷ computed"] == 1
    assert [row.name.endswith(tiers.BEFORE) for row in rows] == [False] * 4 + [True] * 2 + [False]
    assert set(rows[-1].of["source"].split(", ")) <= {"computed", "host", "disk"}


def test_head_memory_case_counts_what_is_admitted() -> None:
    rows = head_memory.run(quick=True)
    assert [row.unit for row in rows] == ["sessions", "sessions", "MB"]
    arena, beside, sent = rows
    assert arena.of["times"] == arena.value / arena.of["dense"] > 7
    assert beside.value < arena.value
    # 64 full pairs of 2048 tokens and 448 of 272, in bf16: 512 bytes a token and pair.
    assert sent.value * 1e6 == pytest.approx(512 * (64 * 2048 + 448 * 272), rel=1e-3)


@pytest.mark.parametrize("name", ["SmolLM2 1024 float32, decode", "Llama-8B 1024 bfloat16, decode"])
def test_attention_case_agrees_with_torch(name: str) -> None:
    attention.check(name, attention.problems(quick=True)[name])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void attend_prefill_sm90<__nv_bfloat16, 128>(AttendParams)", "attention"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("void copy_rerotate<__nv_bfloat16>(CopyRerotateParams)", "copies"),
        ("score_tokens_rows", "scores"),
        ("write_pages", "writes"),
        ("rotate_rows_bf16_half_wide", "rotations"),
        ("Memcpy HtoD (Pinned -> Device)", "transfers"),
        ("void vectorized_layer_norm_kernel<c10::BFloat16, float, true>", "norms"),
        ("void at::native::elementwise_kernel<128, 4, MulFunctor>", "elementwise"),
    ],
)
def test_kernels_have_a_class(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind


def test_flops_are_counted_once() -> None:
    """A model of one head, by hand; the last layer's rest is of one row."""
    config = SimpleNamespace(
        hidden_size=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
        vocab_size=10,
        num_hidden_layers=3,
    )
    rows, few = np.arange(6, dtype=np.int32), np.asarray([2, 5], np.int32)
    plans = [
        LayerPlan(0, few),
        LayerPlan(0, rows),
        LayerPlan(1, rows, Probe.DEVIATION),
        LayerPlan(1, few),
        LayerPlan(2, few),
    ]
    projections, rest, head = 2 * 4 * 4 * 3, 2 * (4 * 4 + 3 * 4 * 8), 2 * 4 * 10
    attention = 4 * 4 * (sum(range(1, 7)) + (3 + 6) + 6)
    wanted = head + projections * (6 + 6 + 2) + rest * (6 + 2 + 1) + attention
    assert ttft_cuda.flops(SimpleNamespace(config=config), plans, 0) == wanted


def test_a_watched_policy_plans_as_it_would() -> None:
    fresh, heads = np.asarray([0, 39], np.int32), np.zeros((4, 2, 2), np.int32)
    view = PromptView(40, 4, 16, 0, fresh, ((1, 39),), heads)
    watched = ttft_cuda.Watched(Epic())
    assert watched.name == "epic"
    plans = list(watched.plan(view))
    assert [p.layer for p in watched.plans] == [p.layer for p in plans] == [0, 1, 2, 3]


def test_both_pages_show_the_newest_records() -> None:
    runs = results.newest()
    readme = results.README.read_text(encoding="utf-8")
    assert results.filled(readme, headlines.markdown(runs), "headlines") == readme
    page = results.RESULTS.read_text(encoding="utf-8")
    assert results.filled(page, results.choice(runs), "choice") == page
    assert results.filled(page, results.markdown(runs)) == page


def test_headlines_are_ratios_of_what_was_measured() -> None:
    """By hand, of the first row; and a run without it is refused by name."""
    runs = results.newest()
    rows = {row["name"]: row["value"] for row in runs["vllm_segments"]["rows"]}
    first = headlines.HEADLINES[0].told(runs["vllm_segments"])
    reused = "TTFT, 32768 tokens, 97 % in documents seen before"
    stock = rows[f"{reused}: stock"]
    ours = rows[f"{reused}: segments, foresight, 10 %, a draft of 8"]
    assert first.times == [stock / ours]
    assert f"vLLM 0.33: {stock:.0f} ms" in headlines.markdown(runs)
    assert [h.told(runs[h.case]).times[0] > 1 for h in headlines.HEADLINES] == [True] * 4
    with pytest.raises(InvalidArgument, match="newest run of vllm_segments: expected the row"):
        headlines.markdown({**runs, "vllm_segments": {**runs["vllm_segments"], "rows": []}})


def test_the_choice_names_rows_that_exist() -> None:
    runs = results.newest()
    for what, case, cells, _ in results.CHOICE:
        rows = {row["name"]: row for row in runs[case]["rows"]}
        for name, column in cells:
            assert name in rows, (what, name)
            assert column is None or column in rows[name]["of"]


def test_a_row_that_was_not_measured_is_refused_by_name() -> None:
    (chosen,) = (c for c in results.CHOICE if c.case == "vllm_load")
    run = results.newest()["vllm_load"]
    (line,) = results.choice({"vllm_load": run}).splitlines()[2:]
    figures = line.split(" | ")[1].split("; ")
    assert len([float(figure) for figure in figures]) == len(chosen.cells) == 2
    (name, column), _ = chosen.cells
    without = [row for row in run["rows"] if row["name"] != name]
    with pytest.raises(InvalidArgument, match=f"newest run of vllm_load: .* '{name}', got none"):
        results.choice({"vllm_load": {**run, "rows": without}})
    bare = [{**row, "of": {}} for row in run["rows"]]
    with pytest.raises(InvalidArgument, match=f"expected '{column}' in the row '{name}'"):
        results.choice({"vllm_load": {**run, "rows": bare}})


def test_counters_are_of_cases_that_miss_a_target() -> None:
    rows = [
        {"name": "decode, B=1, 8K", "of": {"met": "yes"}},
        {"name": "decode, B=1, 8K, graph replay", "of": {"met": "no"}},
        {"name": "prefill, all of 8K", "of": {"met": "no"}},
        {"name": "prefill, all of 32K", "of": {}},
        {"name": "decode, B=1, 128K", "of": {"met": "no"}},
        {"name": "decode, B=1, 128K, graph replay", "of": {"met": "no"}},
    ]
    wanted = ["decode, B=1, 8K", "prefill, all of 8K", "decode, B=1, 128K"]
    assert device_counters.missed({"cuda_ops": {"rows": rows}}) == wanted
    known = {case.name for case in OPS}
    assert set(device_counters.missed(results.newest())) <= known
    with pytest.raises(ValueError, match="expected a run of cuda_ops, got none"):
        device_counters.missed({})
    rows.append({"name": "no such case", "of": {"met": "no"}})
    with pytest.raises(ValueError, match="expected known cases, got no such case"):
        device_counters.missed({"cuda_ops": {"rows": rows}})


def test_counters_are_told_apart_by_the_kernel_between_two_cases() -> None:
    kernels = [("attend", 3), ("merge", 1), ("at::cuda::spin_kernel(long)", 9), ("pack", 2)]
    lines = ['"ID","Kernel Name","time"', '"","","ns"']
    lines += [f'"{at}","{name}","{time}"' for at, (name, time) in enumerate(kernels)]
    lines.append('"4","at::cuda::spin_kernel(long)","9"')
    said = "\n".join(["==PROF== Connected", *lines, "==PROF== Disconnected"])
    cases = device_counters.by_case(said)
    names = [[kernel["Kernel Name"] for kernel in case] for case in cases]
    assert names == [["attend", "merge"], ["pack"]]
    assert cases[1][0]["time"] == "2"
    assert device_counters.by_case("==ERROR== no counters here") == []


@pytest.mark.parametrize(("text", "got"), [("[]", "a list"), ("3", "int"), ("null", "NoneType")])
def test_a_file_that_is_no_run_is_refused(
    text: str, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit):
        record.main([str(tmp_path / "x.json")])
    assert f"expected one run, an object, got {got}" in capsys.readouterr().err


def test_results_are_the_last_run_of_the_last_machine(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        record.append("ttft", [Row("full, 9 tokens", value, "s", 3.0, {"tokens": 9})], tmp_path)
    tables = results.markdown(results.newest(tmp_path))
    page = "# T\n<!-- results -->\nold\n<!-- end of results -->\n"
    shown = results.filled(page, tables)
    assert "| full, 9 tokens | 2 s | 3 |" in shown
    assert "old" not in shown


def test_the_demo_is_recorded_and_fills_its_table(tmp_path: Path, monkeypatch) -> None:
    mean = {"policy": "naive", "tokens": 200.0, "reused_prefix": 20.0, "reused_segment": 166.0}
    mean |= {"row_share": 0.05, "ttft_s": 0.33, "ttft_ratio": 0.093, "first_token": 1.0}
    about = {"model": "smollm2", "device": "cpu", "mode": "share", "threads": 2}
    document = {**about, "rows": [{"prompt": 3}], "means": [{**mean, "kl": 0.2516}]}
    (tmp_path / "demo.json").write_text(json.dumps(document))
    monkeypatch.setattr(record, "keep", lambda run: record.ROOT / str(kept.append(run)))
    kept: list[dict] = []
    assert record.main([str(tmp_path / "demo.json"), "--commit", "abc"]) == 0
    (run,) = kept
    assert run["commit"] == "abc"
    shown = results.filled(
        "a\n<!-- demo -->\nold\n<!-- end of demo -->\n", demo_table.markdown(run), "demo"
    )
    assert "| naive | 5 % | 330 ms | 0.09 | 100 % | 0.252 |" in shown
    assert "3 prompts of 200 tokens, 93 % of them cached" in shown
    assert "old" not in shown
    with pytest.raises(ValueError, match="expected a demo of several prompts"):
        demo_table.run_of({**document, "means": []}, {})
