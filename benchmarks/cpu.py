"""`make bench-cpu`: Octavo beside `transformers` on the CPU, same weights, same prompts.

Prints the limit first (the linear layers alone, timed on the spot), then each engine's output
tokens per second as median and range, and writes the records as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.bench_record import Record, cpu_name
from octavo.hub import resolve_model
from octavo.plotting import quantile
from octavo.provenance import commit_name

OUTPUT = 64
RESULTS = Path(__file__).parent / "results"


def draw_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 32 to 128 random token ids of SmolLM2's vocabulary."""
    rng = random.Random(seed)
    return [
        [rng.randrange(1000, 40000) for _ in range(rng.randint(32, 128))]
        for _ in range(count)
    ]


def seconds(run: Callable[[], object], repetitions: int) -> list[float]:
    """Wall-clock seconds of each repetition."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


# The limit -------------------------------------------------------------------------------


def linear_weights(model: torch.nn.Module) -> list[Tensor]:
    """The matrices that every token of a layer passes through."""
    return [
        m.weight
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "lm_head" not in name
    ]


@torch.inference_mode()
def limit_seconds(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds the linear layers alone need for the whole workload."""
    weights, head = linear_weights(model), model.get_output_embeddings().weight
    prompt_tokens, batch = sum(map(len, prompts)), len(prompts)

    def layers(tokens: int) -> Callable[[], None]:
        inputs = {
            w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype) for w in weights
        }
        return lambda: [F.linear(inputs[w.shape[1]], w) for w in weights] and None

    last = torch.randn(batch, head.shape[1], dtype=head.dtype)
    prefill = statistics.median(seconds(layers(prompt_tokens), 2))
    step = statistics.median(seconds(layers(batch), 7))
    logits = statistics.median(seconds(lambda: F.linear(last, head), 7))
    return prefill + (OUTPUT - 1) * step + OUTPUT * logits


# The contestants --------------------------------------------------------------------------


def with_octavo(llm: LLM, prompts: list[list[int]]) -> int:
    """Tokens generated."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    return sum(len(o.token_ids) for o in llm.generate(prompts, params, show_progress=False))


@torch.inference_mode()
def with_generate(model: Any, prompts: list[list[int]]) -> int:
    """`generate` on one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=OUTPUT,
        max_new_tokens=OUTPUT,
        pad_token_id=0,
    )
    return out[:, width:].numel()


def with_generate_batch(model: Any, prompts: list[list[int]]) -> int:
    """`generate_batch`, the continuous batching of `transformers`."""
    config = transformers.GenerationConfig(
        max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    return sum(len(answer.generated_tokens) for answer in out.values())


# Putting it together ------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """What the figures were made on."""
    return {
        "device": cpu_name(),
        "threads": torch.get_num_threads(),
        "amx": bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()),
        "avx512_bf16": bool(
            getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        ),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": date.today().isoformat(),
        "commit": commit_name(),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of `transformers` about options that we set on purpose."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def bench_dtype(dtype: str, prompts: list[list[int]], repetitions: int) -> Iterator[Record]:
    """All contestants in one number format."""
    directory = resolve_model("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    ).eval()
    llm = LLM(
        "smollm2-135m", dtype=dtype, show_progress=False, max_num_seqs=max(32, len(prompts))
    )
    print(
        f"\n{dtype}: {len(prompts)} requests, {sum(map(len, prompts))} prompt tokens, {OUTPUT} out"
    )
    limit = len(prompts) * OUTPUT / limit_seconds(model, prompts)
    print(f"  {'limit: PyTorch linear layers alone':38}{limit:8.1f} tokens/s")
    runs: list[tuple[str, Callable[[list[list[int]]], int], list[list[int]]]] = [
        ("octavo", lambda p: with_octavo(llm, p), prompts),
        ("transformers generate", lambda p: with_generate(model, p), prompts),
        ("transformers generate_batch", lambda p: with_generate_batch(model, p), prompts),
        ("octavo, one request", lambda p: with_octavo(llm, p), prompts[:1]),
        (
            "transformers generate, one request",
            lambda p: with_generate(model, p),
            prompts[:1],
        ),
    ]
    for name, run, given in runs:
        yield bench_one(
            name, lambda run=run, given=given: run(given), dtype, given, limit, repetitions
        )
    llm.close()


def bench_one(
    name: str,
    run: Callable[[], int],
    dtype: str,
    prompts: list[list[int]],
    limit: float,
    repetitions: int,
) -> Record:
    """Warm up, time, print."""
    count = run()
    if count != len(prompts) * OUTPUT:
        raise RuntimeError(f"{name} produced {count} tokens, not {len(prompts) * OUTPUT}")
    rates = sorted(count / s for s in seconds(run, repetitions))
    median = statistics.median(rates)
    print(
        f"  {name:38}{median:8.1f} tokens/s   ({rates[0]:.1f} to {rates[-1]:.1f})",
        flush=True,
    )
    config = {
        "model": "smollm2-135m",
        "dtype": dtype,
        "requests": len(prompts),
        "output": OUTPUT,
    }
    whole = limit if len(prompts) > 1 else None
    return Record(
        f"cpu/{dtype}/{name}",
        "output_tokens_per_s",
        median,
        quantile(tuple(rates), 0.1),
        quantile(tuple(rates), 0.9),
        repetitions,
        whole,
        config,
        provenance(),
    )


def main() -> None:
    """Run all and write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "bench_cpu.json")
    args = parser.parse_args()
    prompts = draw_prompts(args.requests)
    print(json.dumps(provenance()))
    with quiet():
        records = [
            record
            for dtype in args.dtype
            for record in bench_dtype(dtype, prompts, args.repetitions)
        ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
