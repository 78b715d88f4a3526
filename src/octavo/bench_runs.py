"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import argparse

from octavo.backends import choose_device, choose_dtype
from octavo.bench_engine import Served, SteadyBatch, Watched, alone_ms, serve, watch
from octavo.bench_record import Report, figure
from octavo.bench_setup import (
    Loaded,
    check_lengths,
    defaults_for,
    find_ceilings,
    load,
    model_shape,
    say_heading,
    say_machine,
)
from octavo.bench_trace import step_gaps, trace_steps, usable_trace
from octavo.bench_workload import CARD, Cost, Span, Workload, draw_workload
from octavo.config import EngineConfig, OctavoError
from octavo.options import given
from octavo.plotting import quantile
from octavo.roofline import decode_work

__all__ = [
    "throughput",
    "workload_name",
    "run_throughput",
    "say_workload",
    "repeat",
    "ALONE_PROMPT",
    "latency",
    "run_alone",
    "run_decode",
    "kernels",
]


def throughput(args: argparse.Namespace, report: Report) -> None:
    """`octavo bench throughput`: a whole workload, then its prompts alone."""
    device = choose_device(args.device or "auto")
    defaults = defaults_for(device)
    inputs, outputs = args.input_len or defaults.lens, args.output_len or defaults.lens
    count = args.requests or defaults.requests
    say_machine(report, device)
    check_lengths(args, defaults, inputs.high, outputs.high)
    with load(args, report, defaults) as llm:
        vocab = llm.engine.vocab_size
        workload = draw_workload(count, inputs, outputs, args.seed, vocab)
        name = workload_name(args, count, inputs, outputs, vocab)
        report.config |= {"requests": count, "input_len": inputs, "output_len": outputs}
        run_throughput(args, report, Loaded.of(llm, report), workload, name)


def workload_name(
    args: argparse.Namespace, count: int, inputs: Span, outputs: Span, vocab: int
) -> str:
    """`nano-vllm` for exactly its workload, and for any other what was drawn."""
    drawn = (count, inputs, outputs, args.seed, args.temperature)
    if drawn == (CARD.requests, CARD.lens, CARD.lens, 0, 0.6) and vocab > 10_000:
        return "nano-vllm"
    return f"{count} requests {inputs.low}:{inputs.high} {outputs.low}:{outputs.high}"


def run_throughput(
    args: argparse.Namespace, report: Report, loaded: Loaded, workload: Workload, name: str
) -> None:
    """The workload and its prompts, each beside its limit."""
    limit = say_workload(report, workload, loaded.cost(workload), args.temperature)
    runs = repeat(args, report, loaded, workload, "workload")
    kept = {"preemptions": max(run.num_preemptions for run in runs)}
    rates = [workload.num_output_tokens / run.seconds for run in runs]
    report.add(f"throughput/{name}", "output_tokens_per_s", rates, limit, **kept)

    prompts, count = workload.with_one_token(), workload.num_prompt_tokens
    runs = repeat(args, report, loaded, prompts, "prompts")
    rates, limit = (
        [count / run.seconds for run in runs],
        count / loaded.cost(prompts).prefill,
    )
    report.add(f"prefill/{len(prompts.prompts)}", "prompt_tokens_per_s", rates, limit)
    if (stats := getattr(loaded.llm.engine.runner, "stats", None)) is not None:
        steps = f"{stats.num_graph_steps:,} by graph, {stats.num_eager_steps:,} eager, "
        steps += f"{stats.num_padded_rows:,} padded rows; warm-ups included"
        say_heading(report, [("steps", steps)])


def say_workload(report: Report, workload: Workload, cost: Cost, heat: float) -> float:
    """Print what is served and where its limit comes from; returns that, in output tokens/s."""
    count, tokens = len(workload.prompts), workload.num_output_tokens
    limit = tokens / cost.seconds
    what = f"{count} requests, {workload.num_prompt_tokens:,} prompt and {tokens:,} output "
    why = f"{limit:,.0f} output tokens/s: {cost.prefill:.3g} s of prompts, {cost.steps:,} "
    why += f"decode steps of {cost.decode:.3g} s together, in which "
    why += f"{figure(cost.kv_bytes / 1e9)} GB of keys and values pass"
    say_heading(report, [("workload", f"{what}tokens, temperature {heat}"), ("limit", why)])
    return limit


def repeat(
    args: argparse.Namespace, report: Report, loaded: Loaded, workload: Workload, what: str
) -> list[Served]:
    """A run that doesn't count, then those that do."""
    engine, heat = loaded.llm.engine, args.temperature
    warm = serve(engine, workload, heat, f"{what}, warm-up")
    say_heading(report, [("warm-up", f"{warm.seconds:.3g} s, not counted ({what})")])
    return [serve(engine, workload, heat, f"{what} {i}") for i in range(args.repetitions)]


ALONE_PROMPT = 8


def latency(args: argparse.Namespace, report: Report) -> None:
    """`octavo bench latency`: a request alone, then steady batches."""
    device = choose_device(args.device or "auto")
    defaults = defaults_for(device)
    batches, tokens = args.batches or defaults.batches, args.tokens or defaults.tokens
    say_machine(report, device)
    check_lengths(args, defaults, ALONE_PROMPT, tokens)
    most = max(batches)  # the engine has seats for the default batches, not for any
    seats = {"max_num_seqs": most} if most > defaults.requests else {}
    with load(args, report, defaults, **seats) as llm:
        loaded = Loaded.of(llm, report)
        run_alone(args, report, loaded, tokens)
        for batch in batches:
            context = args.context or defaults.context
            run_decode(args, report, loaded, batch, context, defaults.steps)


def run_alone(
    args: argparse.Namespace, report: Report, loaded: Loaded, tokens: int
) -> None:
    """One request with a short prompt: time to its first token, and a token's share."""
    length = min(ALONE_PROMPT, loaded.llm.engine.vocab_size - 1)
    workload = Workload([list(range(1, length + 1))], [tokens])
    runs = repeat(args, report, loaded, workload, "one request")
    cost = loaded.cost(workload)
    kept = {"prompt": length, "tokens": tokens}
    least = cost.seconds / tokens * 1e3
    report.add("latency/alone", "ms_per_token", alone_ms(runs, tokens), least, **kept)
    firsts = [run.first_token * 1e3 for run in runs]
    report.add("latency/first_token", "ms", firsts, cost.prefill * 1e3, **kept)


def run_decode(
    args: argparse.Namespace,
    report: Report,
    loaded: Loaded,
    batch: int,
    context: int,
    steps: int,
) -> None:
    """A steady batch: its steps, its intervals, and the gaps between steps on the card."""
    name, engine, traced = f"decode/{batch}x{context}", loaded.llm.engine, 24
    device = loaded.llm.parts.device
    total, spare = args.repetitions * steps, traced if usable_trace(device) else 0
    try:
        steady = SteadyBatch(engine, batch, context, total, args.temperature, spare)
    except OctavoError as reason:
        return report.say(f"no {name}: {reason}")
    with steady:
        watched = watch(steady, args.repetitions, steps)
        _add_decode(report, loaded, name, batch, steps, watched)
        if usable_trace(device):
            file = args.traces and args.traces / f"decode-{batch}x{context}.json"
            gaps = step_gaps(trace_steps(steady.step, traced, file))
            if not gaps:
                return report.say(f"no {name}/gap: the trace has no kernels")
            report.add(f"{name}/gap", "ms", gaps, 0.0, batch=batch, traced_steps=traced)


def _add_decode(
    report: Report, loaded: Loaded, name: str, batch: int, steps: int, watched: Watched
) -> None:
    mean = round(watched.mean_context)
    limit = decode_work(loaded.model, batch, mean).seconds(loaded.hardware) * 1e3
    kept = {"batch": batch, "mean_context": watched.mean_context, "steps": steps}
    report.add(name, "ms_per_step", watched.ms_per_step, limit, **kept)
    worst = quantile(tuple(watched.all_ms), 0.99)
    report.add(f"{name}/inter_token", "ms", watched.all_ms, limit, **kept, p99=worst)


def kernels(args: argparse.Namespace, report: Report) -> None:
    """`octavo bench kernels`: a table of single operations against the ceilings."""
    from octavo.bench_cases import Bench  # loads Triton
    from octavo.bench_kernels import ON_CARD, ON_CPU, measure_kernels

    EngineConfig(**given(args, ("device", "dtype")))  # says what is wrong
    device = choose_device(args.device or "auto")
    name = args.model or defaults_for(device).model
    model = model_shape(name)
    dtype = choose_dtype(args.dtype or "auto", model.dtype, device)
    say_machine(report, device)
    say_heading(report, [("shapes of", f"{name}, {dtype}".replace("torch.", ""))])
    report.config |= {"model": name, "dtype": str(dtype).removeprefix("torch.")}
    ceilings = find_ceilings(report, device, dtype)
    sizes = ON_CARD if device.type == "cuda" else ON_CPU
    bench = Bench(model, dtype, device, sizes.footprint)
    measure_kernels(bench, sizes, ceilings, args.repetitions, report)
