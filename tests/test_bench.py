"""`octavo bench`: its workload, its arithmetic, its records, and the command on a tiny model."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import ENGINES, check_all_returned, counting_engine, tiny_engine
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

from octavo import LLM, bench_ceilings, bench_kernels, bench_runs, bench_setup
from octavo.attention import TorchAttention
from octavo.bench_cases import Bench, attention_case
from octavo.bench_ceilings import Ceilings, buffer_bytes, measure_ceilings
from octavo.bench_engine import SteadyBatch, serve, watch
from octavo.bench_kernels import Sizes, measure_kernels
from octavo.bench_record import Record, Report, figure, slug, summarise
from octavo.bench_trace import kernels_by_step, step_gaps, trace_steps
from octavo.bench_workload import (
    Span,
    Workload,
    decode_steps,
    draw_workload,
    least_cost,
    prefill_seconds,
)
from octavo.cli import main
from octavo.config import ConfigError, OctavoError, tiny_config
from octavo.engine import Engine
from octavo.presets import MODELS

QWEN3 = MODELS["qwen3-0.6b"]
H200 = Ceilings(copy=4.24e12, read=4.64e12, flops=771e12, dtype="bfloat16")
CPU = torch.device("cpu")


def nano_vllm() -> Workload:
    return draw_workload(256, Span(100, 1024), Span(100, 1024), 0, QWEN3.vocab_size)


class TestWorkload:
    def test_totals_are_nano_vllms(self) -> None:
        drawn = nano_vllm()
        assert len(drawn.prompts) == 256
        assert drawn.num_prompt_tokens == 142_827
        assert drawn.num_output_tokens == 133_966
        ids = [token for prompt in drawn.prompts for token in prompt]
        assert min(ids) == 0 and max(ids) == 10_000

    def test_answers_have_their_lengths_whatever_the_model_says(self) -> None:
        drawn = nano_vllm()
        params = drawn.params(0.6)
        assert [p.max_tokens for p in params] == list(drawn.output_lens)
        assert all(p.ignore_eos and p.temperature == 0.6 for p in params)

    def test_a_small_vocabulary_has_fewer_ids(self) -> None:
        drawn = draw_workload(50, Span(9, 9), Span(1, 1), 0, vocab_size=13)
        assert {token for prompt in drawn.prompts for token in prompt} == set(range(13))

    def test_seeds_differ_and_repeat(self) -> None:
        drawn = [draw_workload(4, Span(3, 9), Span(1, 9), s, 99).prompts for s in (0, 1, 0)]
        assert drawn[0] == drawn[2] != drawn[1]

    @pytest.mark.parametrize(("text", "span"), [("100:1024", (100, 1024)), ("7", (7, 7))])
    def test_spans_are_read(self, text: str, span: tuple[int, int]) -> None:
        assert Span.parse(text, "--input-len") == span

    @pytest.mark.parametrize("text", ["", "a:b", "9:3", "0:5", "1:2:3", "-1", ":", "1.5:2"])
    def test_what_is_no_span_says_so(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^--input-len .*: give MIN:MAX"):
            Span.parse(text, "--input-len")


class TestLimit:
    """The arithmetic of the table in which the peers stand."""

    def test_nano_vllms_workload_on_an_h200(self) -> None:
        cost = least_cost(nano_vllm(), QWEN3, H200.hardware(), seats=256)
        assert cost.steps == 1023
        assert cost.kv_bytes == pytest.approx(13.85e12, rel=0.003)
        assert cost.prefill == pytest.approx(0.18, abs=0.005)
        assert 133_966 / cost.seconds == pytest.approx(35_900, rel=0.005)

    def test_its_prompts_alone(self) -> None:
        seconds = prefill_seconds(nano_vllm(), QWEN3, H200.hardware())
        assert 142_827 / seconds == pytest.approx(790_000, rel=0.03)

    def test_nothing_is_decoded_for_answers_of_one_token(self) -> None:
        cost = least_cost(nano_vllm().with_one_token(), QWEN3, H200.hardware(), 256)
        assert (cost.steps, cost.decode, cost.kv_bytes) == (0, 0, 0)

    @given(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8),
        st.integers(1, 9),
    )
    def test_every_token_but_the_first_is_decoded_once_at_its_place(
        self, lengths: list[tuple[int, int]], seats: int
    ) -> None:
        workload = Workload([[0] * p for p, _ in lengths], [o for _, o in lengths])
        steps = list(decode_steps(workload, seats))
        assert all(0 < len(step) <= seats for step in steps)
        starts = sorted(chunk.start for step in steps for chunk in step)
        assert starts == sorted(s for p, o in lengths for s in range(p, p + o - 1))
        if seats >= len(lengths):
            assert len(steps) == max((o for _, o in lengths), default=1) - 1

    def test_fewer_seats_take_longer(self) -> None:
        costs = [least_cost(nano_vllm(), QWEN3, H200.hardware(), n) for n in (256, 64)]
        assert costs[0].kv_bytes == costs[1].kv_bytes
        assert costs[1].steps > costs[0].steps and costs[1].seconds > costs[0].seconds


class TestRecord:
    def test_median_and_band(self) -> None:
        record = summarise("a", "ms", [5, 1, 2, 3, 4], limit=1.5)
        assert (record.median, record.repetitions, record.share) == (3, 5, 0.5)
        assert (record.p10, record.p90) == (pytest.approx(1.4), pytest.approx(4.6))

    @pytest.mark.parametrize(
        ("metric", "share"), [("ms_per_step", 0.25), ("output_tokens_per_s", 4.0)]
    )
    def test_share_knows_which_way_is_better(self, metric: str, share: float) -> None:
        assert summarise("a", metric, [8.0], limit=2.0).share == share

    def test_a_single_measurement_has_no_band(self) -> None:
        record = summarise("startup/ready", "s", [2.0])
        assert (record.p10, record.p90, record.limit, record.share) == (None,) * 4
        assert "(" not in record.line() and "limit" not in record.line()

    def test_a_limit_of_nothing_has_no_share(self) -> None:
        record = summarise("gap", "ms", [0.0, 0.1, 0.1], limit=0.0)
        assert record.share is None and "limit 0" in record.line()

    def test_a_report_prints_keeps_and_saves(self, tmp_path: Path) -> None:
        out = io.StringIO()
        report = Report(out, {"model": "m"}, {"device": "NVIDIA H200"})
        report.say("hello")
        report.add("a", "s", [1.0, 2.0, 3.0], limit=1.0, batch=2)
        folder = report.save_in(tmp_path / "new", "latency_m")
        assert folder == tmp_path / "new" / "nvidia-h200"
        assert (folder / "latency_m.log").read_text() == out.getvalue()
        [record] = json.loads((folder / "latency_m.json").read_text())
        assert set(record) == {f.name for f in fields(Record)}
        assert record["config"] == {"model": "m", "batch": 2}

    def test_the_readme_quotes_the_records(self) -> None:
        root = Path(__file__).parents[1]
        quoted = re.findall(
            r"^\|[^|]+\| `(\S+)` `(\S+)` \| (\S+) \| (\S+) \|$",
            (root / "README.md").read_text(),
            re.MULTILINE,
        )
        assert len(quoted) >= 5
        for stem, name, median, limit in quoted:
            file = root / "benchmarks" / "results" / "nvidia-h200" / f"{stem}.json"
            [record] = [r for r in json.loads(file.read_text()) if r["name"] == name]
            assert (figure(record["median"]), figure(record["limit"])) == (median, limit)

    def test_the_readme_quotes_other_engines(self) -> None:
        """Each row of the table: ours, then as `peers.json` has them."""
        root = Path(__file__).parents[1]
        results = root / "benchmarks" / "results" / "nvidia-h200"
        ours = {}
        for stem in ("throughput", "latency"):
            text = (results / f"{stem}_qwen3-0.6b-shape.json").read_text()
            ours |= {r["name"]: r for r in json.loads(text)}
        rows: dict[str, list[str]] = {}
        for record in json.loads((results / "peers.json").read_text()):
            name, engine = record["name"].removeprefix("peer/").split(", ")
            ends = dict.fromkeys(figure(record[end]) for end in ("p10", "p90"))
            rows.setdefault(name, [figure(ours[name]["median"])]).append(" to ".join(ends))
            assert engine in ("nano-vLLM", "mini-sglang", "vLLM")
        readme = (root / "README.md").read_text()
        for name, (own, nano, mini, vllm) in rows.items():
            assert f"| {own} | {mini} | {nano} | {vllm} |\n" in readme, name

    def test_names_for_files(self) -> None:
        assert slug("NVIDIA H200") == "nvidia-h200" and slug("a/B c.gguf") == "a-b-c.gguf"


class TestCeilings:
    def test_rates_are_rates(self) -> None:
        ceilings = measure_ceilings(CPU, torch.float32, size=2**20, side=64)
        assert min(ceilings.copy, ceilings.read, ceilings.flops) > 0
        hardware = ceilings.hardware()
        assert (hardware.bandwidth, hardware.flops) == (ceilings.copy, ceilings.flops)
        assert hardware.link_bandwidth == math.inf and ceilings.dtype == "float32"

    @pytest.mark.parametrize(
        ("dtype", "tried"),
        [
            (torch.bfloat16, {torch.bfloat16, torch.float32}),
            (torch.float64, {torch.float64}),
        ],
    )
    def test_a_cpu_may_compute_16_bits_in_32(
        self, dtype: torch.dtype, tried: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rates = {torch.bfloat16: 1.0, torch.float32: 3.0, torch.float64: 2.0}
        asked: set[torch.dtype] = set()

        def rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
            asked.add(dtype)
            return rates[dtype]

        monkeypatch.setattr(bench_ceilings, "_product_rate", rate)
        found = measure_ceilings(CPU, dtype, size=2**12, side=8)
        assert asked == tried and found.flops == max(rates[each] for each in tried)

    def test_buffers_are_larger_than_a_cache(self) -> None:
        assert buffer_bytes(CPU) >= 2**28


@pytest.mark.parametrize("kind", list(ENGINES))
class TestEngine:
    """On a model that counts, in the plain loop and in the overlapped one."""

    def test_a_workload_is_served_and_counted(self, kind: str) -> None:
        engine = counting_engine(kind)
        workload = draw_workload(6, Span(3, 20), Span(1, 9), 0, 100)
        run = serve(engine, workload, 0.0, "a")
        assert 0 < run.first_token <= run.seconds and run.num_preemptions == 0
        assert engine.stats.num_output_tokens == workload.num_output_tokens
        check_all_returned(engine)

    def test_a_refused_prompt_is_an_error(self, kind: str) -> None:
        engine = counting_engine(kind, length=16)
        with pytest.raises(OctavoError, match="failed: "):
            serve(engine, Workload([[1] * 30], [4]), 0.0, "a")

    def test_a_steady_batch_is_watched_around_its_context(self, kind: str) -> None:
        engine = counting_engine(kind, num_blocks=256)
        seen: list[int] = []
        execute = type(engine.runner).execute

        def spy(self: Any, plan: Any) -> Any:
            seen.extend(e.start for e in plan.entries if e.count == 1)
            return execute(self, plan)

        engine.runner.execute = spy.__get__(engine.runner)  # type: ignore[method-assign]
        with SteadyBatch(engine, 5, context=60, steps=12, temperature=0) as steady:
            watched = watch(steady, repetitions=3, steps=4)
        assert [len(times) for times in watched.intervals] == [4, 4, 4]
        assert len(watched.ms_per_step) == 3 and len(watched.all_ms) == 12
        assert watched.mean_context == pytest.approx(60, abs=3)
        assert min(seen) < watched.mean_context < max(seen)
        check_all_returned(engine)

    @pytest.mark.parametrize(
        ("batch", "context", "what"),
        [(9, 20, "max_num_seqs=9"), (2, 200, "max_model_len="), (8, 100, "num_kv_blocks=")],
    )
    def test_a_batch_without_room_says_what_is_missing(
        self, kind: str, batch: int, context: int, what: str
    ) -> None:
        engine = counting_engine(kind)
        with pytest.raises(OctavoError, match=what):
            SteadyBatch(engine, batch, context, steps=4)
        assert not engine.has_unfinished


class TestPrefixes:
    def test_a_salt_of_its_own_finds_nothing(self) -> None:
        engine = tiny_engine(block_size=4)
        workload = draw_workload(4, Span(20, 30), Span(2, 4), 0, 100)
        found = [serve(engine, workload, 0.0, s).num_cached_tokens for s in "abb"]
        assert found[:2] == [0, 0] and found[2] > 0

    def test_steady_batches_share_nothing(self) -> None:
        engine = tiny_engine(block_size=4)
        for _ in range(2):
            with SteadyBatch(engine, 3, context=40, steps=3, temperature=0):
                pass
        assert engine.stats.num_cached_tokens == 0


def annotation(ts: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": "octavo bench: step", "ts": ts, "dur": 9}


def kernel(number: int, launch: float, start: float, dur: float) -> list[dict[str, Any]]:
    link = {"args": {"correlation": number}}
    host = {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": launch, "dur": 1}
    return [host | link, {"cat": "kernel", "name": "k", "ts": start, "dur": dur} | link]


class TestTrace:
    def test_kernels_belong_to_the_step_that_launched_them(self) -> None:
        events = [annotation(100), annotation(200), annotation(300)]
        for each in (
            (1, 50, 60, 5),
            (2, 110, 250, 10),
            (3, 210, 261, 10),
            (4, 390, 400, 3),
        ):
            events += kernel(*each)
        steps = kernels_by_step(events)
        assert steps == [[(250, 260)], [(261, 271)], [(400, 403)]]  # the first was before
        assert step_gaps(events) == pytest.approx([0.001, 0.129])

    def test_steps_that_touch_or_overlap_have_no_gap(self) -> None:
        events = [annotation(0), annotation(10), annotation(20)]
        for each in ((1, 1, 50, 10), (2, 11, 60, 10), (3, 21, 65, 10)):
            events += kernel(*each)
        assert step_gaps(events) == [0, 0]

    def test_graphs_launch_many_kernels_at_once_and_copies_are_none(self) -> None:
        events = [annotation(0), annotation(10)]
        events += kernel(1, 1, 50, 10)
        events.append({**events[-1], "ts": 70})  # one launch of a graph, two kernels
        events += [{"cat": "gpu_memcpy", "ts": 85, "dur": 2, "args": {"correlation": 1}}]
        events += kernel(2, 11, 90, 10)
        assert step_gaps(events) == [pytest.approx(0.010)]

    def test_steps_without_kernels_are_no_steps(self) -> None:
        assert step_gaps([annotation(0), annotation(5)]) == []

    def test_the_profiler_marks_every_step(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        events = trace_steps(lambda: torch.ones(3).sum(), 4, file)
        assert len(kernels_by_step(events)) == 4 and file.exists()


class TestKernels:
    BENCH = Bench(
        tiny_config(), torch.float64, CPU, footprint=2**15
    )  # no Triton in float64
    SIZES = Sizes(((2, 20),), ((2, 8),), (16,), (3,), (2,), 2**15)

    def test_what_runs_here_is_measured_and_the_rest_has_a_reason(self) -> None:
        report = Report(io.StringIO())
        measure_kernels(self.BENCH, self.SIZES, H200, 3, report)
        assert report.failures == 0
        plain = {r.name for r in report.records if r.config["backend"] == "torch"}
        assert plain == {
            *(f"kernel/gemv/{p}" for p in ("qkv", "o", "gate_up", "down", "head")),
            "kernel/decode_attention/2x20", "kernel/prefill_attention/2x8",
            "kernel/store/16", "kernel/norm/3", "kernel/swiglu/3",
            "kernel/sampler/2", "kernel/sampler/2/top-p",
        }  # fmt: skip
        for record in report.records:
            assert record.repetitions == 3 and record.config["us"] > 0
        for what in ("attention by triton", "attention by flash", "fused kernels"):
            [line] = [line for line in report.lines if line.startswith(f"no {what}: ")]
            assert "float64" in line

    @pytest.mark.slow
    def test_every_kernel_is_called_as_it_wants_to_be(self) -> None:
        """In Triton's interpreter, which has to be chosen before anything is imported."""
        code = (
            "import torch\n"
            "from octavo.bench_cases import Bench\n"
            "from octavo.bench_kernels import Sizes, attention_makers, piece_makers\n"
            "from octavo.config import tiny_config\n"
            "bench = Bench(tiny_config(vocab_size=64), torch.float32, torch.device('cpu'), 1)\n"
            "sizes = Sizes(((2, 9),), ((2, 5),), (5,), (3,), (2,), 1)\n"
            "for makers in (attention_makers, piece_makers):\n"
            "    for make in makers(bench, sizes, lambda what, why: None):\n"
            "        case = make()\n"
            "        case.calls[0]()\n"
            "        print(case.name, case.backend)\n"
        )
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        seen = set(done.stdout.splitlines())
        assert {"decode_attention/2x9 triton", "prefill_attention/2x5 triton"} <= seen
        fused = {line.split()[0] for line in seen if line.endswith(" fused")}
        plain = {line.split()[0] for line in seen if line.endswith(" torch")}
        assert fused == {name for name in plain if "attention" not in name}

    def test_a_case_that_fails_costs_no_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any) -> Any:
            raise ValueError("no such norm")

        monkeypatch.setattr(bench_kernels, "norm_case", broken)
        report = Report(io.StringIO())
        measure_kernels(self.BENCH, self.SIZES, H200, 3, report)
        assert report.failures == len(
            [line for line in report.lines if "no such norm" in line]
        )
        assert report.failures >= 1 and "kernel/swiglu/3" in {
            r.name for r in report.records
        }

    def test_attention_over_scattered_blocks_reads_the_right_ones(self) -> None:
        """What is timed is also right: one query over a cache that holds a single value."""
        case = attention_case(self.BENCH, "torch", TorchAttention(), (3, 1, 21), 4)
        step, _, q, k, v = case.calls[0].func, *case.calls[0].args  # type: ignore[attr-defined]
        for keys, values in step.cache.layers:
            keys.fill_(0), values.fill_(2)
        assert torch.allclose(step(0, q, k * 0, v * 0 + 2), torch.full_like(q, 2))

    def test_a_case_touches_more_than_its_footprint(self) -> None:
        case = attention_case(self.BENCH, "torch", TorchAttention(), (1, 1, 8), 4)
        assert len(case.calls) * case.amount >= self.BENCH.footprint * 0.9


class Outcome(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        lines = [line for line in self.out.splitlines() if line.startswith("{")]
        return {r["name"]: r for r in map(json.loads, lines)}


Command = Callable[..., Outcome]
SMALL = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention",
    "torch",
    "--layer-ops",
    "torch",
)
FEW = ("--requests", 3, "--input-len", "4:9", "--output-len", "2:5")
SHORT = ("--batches", "2", "--context", 40, "--tokens", 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bench(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Runs `octavo bench KIND ...` on a tiny model, with ceilings that cost no time."""
    monkeypatch.setattr(bench_setup, "measure_ceilings", lambda *args: H200)
    small = TestKernels.SIZES._replace(footprint=2**12)
    monkeypatch.setattr(bench_kernels, "ON_CPU", small)

    def run(kind: str, *args: Any, model: Any = checkpoint) -> Outcome:
        capsys.readouterr()
        own = SMALL if kind != "kernels" else ("--device", "cpu", "--dtype", "float64")
        status = main(["bench", kind, "--model", str(model), *own, *map(str, args)])
        return Outcome(status, *capsys.readouterr())

    return run


class TestCommand:
    def test_throughput(self, bench: Command) -> None:
        done = bench("throughput", *FEW)
        assert done.status == 0
        drawn = draw_workload(3, Span(4, 9), Span(2, 5), 0, VOCAB_SIZE)
        assert set(done.records) >= {
            "startup/ready",
            "throughput/3 requests 4:9 2:5",
            "prefill/3",
        }
        record = done.records["throughput/3 requests 4:9 2:5"]
        assert record["metric"] == "output_tokens_per_s" and record["repetitions"] == 3
        assert record["p10"] <= record["median"] <= record["p90"]
        config = record["config"]
        assert (config["requests"], config["input_len"], config["output_len"]) == (
            3,
            [4, 9],
            [2, 5],
        )
        assert (config["seed"], config["temperature"], config["preemptions"]) == (0, 0.6, 0)
        words = f"3 requests, {drawn.num_prompt_tokens} prompt and {drawn.num_output_tokens} output"
        assert words in done.out

    def test_a_number_comes_with_what_it_takes_to_repeat_it(self, bench: Command) -> None:
        """B100: backend, graphs, KV blocks and versions, on the screen and in each record."""
        pool = ("--num-kv-blocks", 77, "--block-size", 8, "--max-model-len", 64)
        done = bench("throughput", *FEW, *pool)
        assert done.status == 0
        for record in done.records.values():
            engine = record["config"]["engine"]
            assert engine["kv_blocks"] == 77 and engine["block_size"] == 8
            assert engine["attention"] == "TorchAttention" and engine["graph_sizes"] == []
            assert {"torch", "triton", "octavo", "flash-attn", "date", "commit"} <= set(
                record["provenance"]
            )
        head = done.out.split("startup/ready")[0]
        for words in (
            "77 blocks of 8 tokens",
            "TorchAttention",
            torch.__version__,
            "graphs",
        ):
            assert words in head

    def test_latency(self, bench: Command) -> None:
        done = bench("latency", *SHORT)
        assert done.status == 0
        names = {
            "latency/alone",
            "latency/first_token",
            "decode/2x40",
            "decode/2x40/inter_token",
        }
        assert names <= set(done.records)
        assert done.records["latency/alone"]["metric"] == "ms_per_token"
        step = done.records["decode/2x40"]
        assert step["metric"] == "ms_per_step" and step["config"]["batch"] == 2
        assert abs(step["config"]["mean_context"] - 40) < 4
        every = done.records["decode/2x40/inter_token"]
        assert every["repetitions"] == 3 * step["config"]["steps"]
        assert every["config"]["p99"] >= every["median"]

    def test_kernels(self, bench: Command) -> None:
        done = bench("kernels")
        assert done.status == 0 and "shapes of" in done.out
        assert done.records["kernel/norm/3"]["limit"] == H200.copy
        assert done.records["kernel/gemv/head"]["limit"] == H200.read

    def test_a_batch_that_does_not_fit_is_said_and_skipped(self, bench: Command) -> None:
        pool = ("--num-kv-blocks", 16, "--max-model-len", 128)
        done = bench("latency", "--batches", "2,4", "--context", 60, "--tokens", 2, *pool)
        assert "no decode/4x60: 4 requests of " in done.out
        assert done.status == 0 and "decode/2x60" in done.records

    def test_limits_come_from_the_measured_rates(
        self, bench: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = bench("throughput", *FEW).records["prefill/3"]["limit"]
        slow = Ceilings(H200.copy / 2, H200.read / 2, H200.flops / 2, "bfloat16")
        monkeypatch.setattr(bench_setup, "measure_ceilings", lambda *args: slow)
        assert bench("throughput", *FEW).records["prefill/3"]["limit"] == whole / 2

    def test_results_are_written_where_they_are_wanted(
        self, bench: Command, checkpoint: Path, tmp_path: Path
    ) -> None:
        file, folder = tmp_path / "r.json", tmp_path / "new" / "results"
        done = bench("latency", *SHORT, "--json", file, "--out", folder)
        assert done.records == {}  # not on the screen as well
        records = json.loads(file.read_text())
        stem = f"latency_{slug(checkpoint.name)}"
        assert json.loads((folder / "cpu" / f"{stem}.json").read_text()) == records
        assert "decode/2x40" in (folder / "cpu" / f"{stem}.log").read_text()

    @pytest.mark.parametrize(
        ("kind", "args", "expected"),
        [
            ("throughput", ("--seed", 5), {"seed": 5}),
            ("throughput", ("--temperature", 0), {"temperature": 0.0}),
            ("throughput", ("--repetitions", 4), {"repetitions": 4}),
        ],
    )
    def test_options_are_kept_in_the_record(
        self, bench: Command, kind: str, args: tuple[Any, ...], expected: dict[str, Any]
    ) -> None:
        record = bench(kind, *FEW, *args).records["prefill/3"]
        assert {
            **record["config"],
            "repetitions": record["repetitions"],
        }.items() >= expected.items()

    def test_the_temperature_reaches_the_sampler(
        self, bench: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: set[float] = set()
        plain = Engine.stream

        def spy(self: Any, prompts: Any, params: Any, **more: Any) -> Any:
            seen.update(p.temperature for p in params)
            return plain(self, prompts, params, **more)

        monkeypatch.setattr(Engine, "stream", spy)
        bench("throughput", *FEW, "--temperature", 0.25)
        assert seen == {0.25}

    @pytest.mark.parametrize("kind", ["throughput", "latency"])
    def test_engine_options_reach_the_engine(
        self, bench: Command, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Seen(Exception):
            pass

        def stop(self: LLM, model: str, **options: Any) -> None:
            raise Seen(options)

        monkeypatch.setattr(LLM, "__init__", stop)
        wanted = {"overlap": False, "cuda_graphs": False, "sampler": "torch"}
        with pytest.raises(Seen) as caught:
            bench(kind, "--no-overlap", "--no-cuda-graphs", "--sampler", "torch",
                  "--seed", 3, "--max-model-len", 200)  # fmt: skip
        wanted |= {"seed": 3, "max_model_len": 200, "device": "cpu", "attention": "torch"}
        assert caught.value.args[0].items() >= wanted.items()

    def test_only_nano_vllms_workload_has_its_name(self) -> None:
        args = type("Args", (), {"seed": 0, "temperature": 0.6})()
        lens = Span(100, 1024)
        assert bench_runs.workload_name(args, 256, lens, lens, 151_936) == "nano-vllm"
        for count, vocab, seed in ((255, 151_936, 0), (256, 258, 0), (256, 151_936, 1)):
            args.seed = seed
            assert "nano" not in bench_runs.workload_name(args, count, lens, lens, vocab)


class TestBadInput:
    @pytest.mark.parametrize(
        ("kind", "args", "words"),
        [
            (
                "throughput",
                ("--repetitions", 2),
                "--repetitions 2: a median and a band need",
            ),
            ("throughput", ("--requests", 0), "--requests 0: give a whole number from 1"),
            ("throughput", ("--input-len", "9:3"), "--input-len 9:3: give MIN:MAX"),
            ("throughput", ("--output-len", "x"), "--output-len x: give MIN:MAX"),
            ("throughput", ("--temperature", -1), "temperature=-1.0"),
            ("throughput", ("--seed", -1), "seed=-1"),
            (
                "throughput",
                ("--input-len", 2000, "--output-len", 100),
                "--max-model-len 2100",
            ),
            ("throughput", ("--max-model-len", 40), "--max-model-len 64; it is 40"),
            ("latency", ("--batches", "8,x"), "--batches 8,x: give whole numbers"),
            ("latency", ("--batches", "0"), "--batches 0: give whole numbers from 1"),
            ("latency", ("--context", 0), "--context 0: give a whole number from 1"),
            ("latency", ("--tokens", 0), "--tokens 0: give a whole number from 1"),
            ("latency", ("--tokens", 9000), "--max-model-len 9008; it is"),
            ("latency", ("--block-size", 0), "block_size=0"),
            ("kernels", ("--dtype", "int3"), "dtype='int3': give "),
            ("kernels", ("--device", "tpu"), "device='tpu': give "),
        ],
    )
    def test_nonsense_is_one_line(
        self, bench: Command, kind: str, args: tuple[Any, ...], words: str
    ) -> None:
        done = bench(kind, *args)
        errors = [line for line in done.err.splitlines() if "error" in line]
        assert done.status == 1 and len(errors) == 1 and words in errors[0]
        assert errors[0].startswith("octavo: error: ")

    @pytest.mark.parametrize("kind", ["throughput", "kernels"])
    def test_an_unknown_model_is_named_with_what_there_is(
        self, bench: Command, kind: str
    ) -> None:
        done = bench(kind, model="qwen9-shape")
        assert done.status == 1 and "qwen9" in done.err and "qwen3-0.6b" in done.err

    @pytest.mark.parametrize("place", ["nowhere/r.json", "."])
    def test_a_file_that_cannot_be_written_is_noticed_first(
        self, bench: Command, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LLM, "__init__", lambda *args, **more: pytest.fail("loaded"))
        done = bench("throughput", "--json", tmp_path / place)
        assert done.status == 1 and "no file can be written there" in done.err

    def test_a_folder_that_cannot_be_made_is_noticed_first(
        self, bench: Command, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        done = bench("throughput", "--out", tmp_path / "file" / "below")
        assert done.status == 1 and "can't be made" in done.err

    @pytest.mark.parametrize(
        "args", [("throughput", "--tokens", "3"), ("kernels", "--seed", "1")]
    )
    def test_options_of_another_kind_get_the_usage(
        self, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["bench", *args])
        assert caught.value.code == 2 and "usage: octavo" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
class TestOnACard:
    def test_latency_has_the_gap_between_steps(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        options = ("--dtype", "bfloat16", "--batches", "2", "--context", "64", "--tokens", "8",
                   "--max-model-len", "256", "--traces", tmp_path)  # fmt: skip
        args = ["bench", "latency", "--model", str(checkpoint), *map(str, options)]
        assert main(args) == 0
        done = Outcome(0, *capsys.readouterr())
        gap = done.records["decode/2x64/gap"]
        assert gap["repetitions"] >= 20 and 0 <= gap["median"] < 50
        assert (tmp_path / "decode-2x64.json").exists()
        assert gap["provenance"]["driver"] and gap["provenance"]["device"] != "CPU"

    def test_throughput(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["bench", "throughput", "--model", str(checkpoint), *map(str, FEW)]
        assert main(args) == 0
        assert "prefill/3" in Outcome(0, *capsys.readouterr()).records

    def test_every_kernel_that_can_run_is_measured(self) -> None:
        report = Report(io.StringIO())
        bench = Bench(QWEN3, torch.bfloat16, torch.device("cuda"), footprint=2**26)
        sizes = Sizes(((8, 256), (1, 256)), ((2, 128),), (128,), (1, 64), (1, 8), 2**26)
        ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
        measure_kernels(bench, sizes, ceilings, 5, report)
        assert report.failures == 0, "\n".join(report.lines)
        backends = {record.config["backend"] for record in report.records}
        assert {"torch", "triton", "fused"} <= backends
        assert ceilings.read > 1e11 and ceilings.flops > 1e13
