"""The plain engine on a CUDA card: the first three rungs of the ladder (chapter 01).

Qwen3-0.6B's shape with random weights, nothing switched on. Prompts of 36 tokens and
answers of 128, so that the context is 100 tokens on average. Writes the records as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from octavo.assembly import Parts, build_engine
from octavo.attention import TorchAttention
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.example import CountingTokenizer
from octavo.models import build_model
from octavo.plotting import quantile
from octavo.presets import HARDWARE, MODELS
from octavo.provenance import commit_name
from octavo.request import SamplingParams
from octavo.roofline import decode_ceiling
from octavo.weights import init_random_weights

PROMPT, OUTPUT, CONTEXT = 36, 128, 100


def make_engine() -> Engine:
    """The engine on the card, its pool sized by what the card has left."""
    model_config = MODELS["qwen3-0.6b"]
    model = build_model(model_config, torch.bfloat16, "cuda")
    init_random_weights(model, seed=0)
    device, attention = torch.device("cuda"), TorchAttention()
    parts = Parts(model, model_config, device, torch.bfloat16, attention, block_size=16)
    config = EngineConfig(seed=0, max_model_len=4096, max_num_batched_tokens=16384)
    return build_engine(config, parts, CountingTokenizer(), ())


def tokens_per_second(engine: Engine, requests: int) -> float:
    """Output tokens per second of a batch that starts together."""
    prompts = [[7 + row] * PROMPT for row in range(requests)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=OUTPUT)
    torch.cuda.synchronize()
    start = time.perf_counter()
    count = sum(len(delta.token_ids) for delta in engine.stream(prompts, params))
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def provenance(commit: str | None) -> dict[str, Any]:
    """What the figures were made on."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": commit or commit_name(),
    }


def measure(
    engine: Engine, requests: int, repetitions: int, commit: str | None
) -> dict[str, Any]:
    """One record, after a warm-up."""
    tokens_per_second(engine, requests)
    rates = sorted(tokens_per_second(engine, requests) for _ in range(repetitions))
    record = {
        "name": f"first-look/{requests} requests" if requests > 1 else "first-look/alone",
        "metric": "output_tokens_per_s",
        "median": statistics.median(rates),
        "p10": quantile(tuple(rates), 0.1),
        "p90": quantile(tuple(rates), 0.9),
        "repetitions": repetitions,
        "limit": decode_ceiling(MODELS["qwen3-0.6b"], HARDWARE["h200"], requests, CONTEXT),
        "config": {
            "model": "qwen3-0.6b-shape",
            "attention": "torch",
            "prompt": PROMPT,
            "output": OUTPUT,
            "temperature": 0.6,
        },
        "provenance": provenance(commit),
    }
    print(record["name"], f"{record['median']:.1f} tokens/s", rates, flush=True)
    return record


def main() -> None:
    """Measure the three rungs and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--commit", help="what is measured, where there is no git")
    default = Path(__file__).parent / "results" / "nvidia-h200" / "first_look.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    engine = make_engine()
    records = [measure(engine, n, args.repetitions, args.commit) for n in (1, 32, 256)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
