"""Appendix C, C Measuring honestly, and the command line.

Generated from chapters/c_measuring.md; edit there.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.bench import add_bench
from octavo.config import OctavoError
from octavo.jobs import Job, make_job, read_jobs
from octavo.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, add_options, given
from octavo.outputs import CompletionOutput, RequestDelta, refusal
from octavo.request import RequestError, SamplingParams
from octavo.screens import JsonScreen, LineScreen, PanelScreen, Screen, TypedScreen

if TYPE_CHECKING:
    from octavo.llm import LLM


__all__ = [
    "serve",
    "make_parser",
    "run_command",
    "chat_loop",
    "demo_jobs",
    "demo_command",
    "demo_table",
    "main",
]


def serve(
    llm: LLM, jobs: Sequence[Job], screen: Screen, errors: TextIO
) -> dict[str, list[CompletionOutput]]:
    """Answer all jobs together; returns the finished answers by name."""
    names = _unique([job.name for job in jobs])
    jobs = [
        dataclasses.replace(job, name=name) for job, name in zip(jobs, names, strict=True)
    ]
    answers: dict[str, list[CompletionOutput]] = {name: [] for name in names}
    screen.start(jobs)
    try:
        for delta in _deltas(llm, jobs):
            screen.show(delta)
            if delta.finished is not None:
                answers[delta.request_id].append(delta.finished)
    finally:
        screen.stop()
    for name, done in answers.items():
        for error in (answer.error for answer in done if answer.error is not None):
            errors.write(f"octavo: prompt {name}: {error}\n")
    return answers


def _deltas(llm: LLM, jobs: Iterable[Job]) -> Iterator[RequestDelta]:
    """The refusals first, then what the engine says of the others."""
    prompts, params, names = [], [], []
    for job in jobs:
        try:
            prompts.append(_encode(llm, job))
        except RequestError as error:
            yield RequestDelta(job.name, 0, "", (), refusal(error))
        else:
            params.append(job.params)
            names.append(job.name)
    yield from llm.stream(prompts, params, names)


def _encode(llm: LLM, job: Job) -> list[int]:
    """Token ids of a job; `RequestError` if it has none."""
    if job.error is not None:
        raise RequestError(job.error)
    if job.prompt is not None:
        return llm.tokenizer.encode(job.prompt)
    return llm.tokenizer.encode_chat(job.messages)


def _unique(names: Iterable[str]) -> list[str]:
    """Names with "-2", "-3" behind those that come again."""
    taken: dict[str, int] = {}  # how often each was asked for
    for name in names:
        fresh, count = name, taken.get(name, 0)
        while fresh in taken:
            count += 1
            fresh = f"{name}-{count}"
        taken[name] = max(count, 1)
        taken.setdefault(fresh, 1)
    return list(taken)


_RUN_HELP = """\
Answer one or more prompts with a model.

MODEL is one of
  smollm2-135m                a small chat model, fetched once (100 MB), no account needed
  path/to/directory           config.json, *.safetensors and tokenizer files
  path/to/file.gguf           a GGUF file (llama or qwen3)
  owner/name                  a model of the Hugging Face Hub
(NAME-shape, random weights that answer no text, is for octavo bench.)

examples:
  octavo run smollm2-135m                              chat in the terminal
  octavo run smollm2-135m -p "Why is the sky blue?"
  octavo run smollm2-135m -p "One?" -p "Two?"          both at once
  octavo run smollm2-135m --file prompts.jsonl --json > answers.jsonl
  echo "Explain rain." | octavo run smollm2-135m
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the `octavo` command, with the subcommands of installed appendices."""
    parser = argparse.ArgumentParser(prog="octavo", description="An LLM inference engine.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_demo(commands)
    add_bench(commands)
    for point in entry_points(group="octavo.commands"):
        point.load()(commands)
    return parser


def _add_run(commands: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser(
        "run", help="answer prompts, or chat", description=_RUN_HELP, formatter_class=raw
    )
    run.set_defaults(run=run_command)
    run.add_argument("model", metavar="MODEL", help="see above")
    what = run.add_argument_group("what to answer")
    what.add_argument(
        "-p", "--prompt", action="append", default=[], help="a prompt; repeat for more"
    )
    what.add_argument(
        "--file", type=Path, help='JSON lines: "text", or {"prompt": "text", ...}'
    )
    what.add_argument("--system", help="a system prompt for every chat")
    what.add_argument(
        "--raw", action="store_true", help="continue the text; no chat template"
    )
    what.add_argument("--json", action="store_true", help="print answers as JSON lines")
    how = run.add_argument_group("how to sample")
    add_options(how, SAMPLING_OPTIONS)
    how.add_argument("--stop", action="append", default=[], help="text that ends an answer")
    how.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's own end"
    )
    add_options(run.add_argument_group("the engine"), ENGINE_OPTIONS)


def run_command(args: argparse.Namespace) -> int:
    """`octavo run`; returns the exit status: 1 if any prompt could not be answered."""
    from octavo.llm import LLM

    params = SamplingParams(
        **given(args, SAMPLING_OPTIONS), stop=args.stop, ignore_eos=args.ignore_eos
    )
    jobs = _collect_jobs(args, params)
    with LLM(args.model, **given(args, ENGINE_OPTIONS)) as llm:
        if not jobs:
            return chat_loop(llm, params, args.system)
        answers = serve(llm, jobs, _choose_screen(args, jobs), sys.stderr)
    return int(any(answer.error for done in answers.values() for answer in done))


def _collect_jobs(args: argparse.Namespace, params: SamplingParams) -> list[Job]:
    texts = list(args.prompt)
    if not texts and args.file is None and not sys.stdin.isatty():
        texts = [_read_stdin()]
    jobs = [
        make_job(str(i), t, params, args.system, args.raw) for i, t in enumerate(texts, 1)
    ]
    if args.file is not None:
        try:
            lines = args.file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise OctavoError(f"{args.file} can't be read: {error}") from error
        jobs += read_jobs(lines, params, args.system, args.raw)
        if not jobs:
            raise OctavoError(f"{args.file} has no prompts; give one JSON value a line")
    return jobs


def _read_stdin() -> str:
    """The whole standard input as one prompt, without the newline that `echo` adds."""
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OctavoError(f"the standard input is no UTF-8 text: {error}") from error
    if not text.strip():
        raise OctavoError("the standard input is empty; give a prompt with -p, or --file")
    return text


def _choose_screen(args: argparse.Namespace, jobs: Sequence[Job]) -> Screen:
    if args.json:
        return JsonScreen(sys.stdout)
    if len(jobs) == 1 and jobs[0].params.n == 1:
        return TypedScreen(sys.stdout)
    return PanelScreen(Console()) if sys.stdout.isatty() else LineScreen(sys.stdout)


def chat_loop(llm: LLM, params: SamplingParams, system: str | None) -> int:
    """A conversation at the terminal, until an empty line or the end of the input."""
    params = dataclasses.replace(params, n=1)  # a conversation goes on from one answer
    messages = [{"role": "system", "content": system}] if system is not None else []
    print("An empty line ends the conversation.", file=sys.stderr)
    while text := _ask():
        messages.append({"role": "user", "content": text})
        answers = serve(
            llm, [Job("1", messages, params=params)], TypedScreen(sys.stdout), sys.stderr
        )
        if answers["1"][0].error is None:
            messages.append({"role": "assistant", "content": answers["1"][0].text})
        else:
            messages.pop()
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


_DEMO_SYSTEM = "You are a helpful librarian. Answer in two or three short sentences."
_DEMO_TEXT = """\
A lending library has one long shelf and many readers. In the first year the librarian gave every reader a stretch of \
shelf as long as the longest reading list allowed. Most readers borrowed three books. The shelf was full of gaps, and new \
readers were turned away although half of it stood empty. In the second year the librarian cut the shelf into short boards, \
each for sixteen books, and gave readers one board at a time. A card for each reader listed the boards in order, so the \
books of one reader could stand anywhere. When a board was full, the reader got another one; when a reader left, all their \
boards were free at once, whatever their neighbours did. The only space lost was the unfilled end of each reader's last \
board. In the third year the librarian noticed that many readers began with the same twenty books. So the boards with those \
books were put up once, and the cards of all these readers named the same boards. A board came down only when the last \
card that named it was gone, and not even then, as long as nobody needed the room: the next reader with the same list would \
find it still standing."""


def demo_jobs() -> list[Job]:
    """Three chats: two share a system prompt, one is long."""
    params = SamplingParams(temperature=0, max_tokens=96)
    long = f"Summarise this text in one sentence.\n\n{_DEMO_TEXT}"
    return [
        make_job("1", "Why is the sky blue?", params, _DEMO_SYSTEM),
        make_job("2", "How do plants make food?", params, _DEMO_SYSTEM),
        make_job("3", long, params),
    ]


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="answer three chats together and show what happened"
    )
    demo.add_argument("model", nargs="?", default="smollm2-135m", metavar="MODEL")
    demo.set_defaults(run=demo_command)
    add_options(demo.add_argument_group("the engine"), ENGINE_OPTIONS)


def demo_command(args: argparse.Namespace) -> int:
    """`octavo demo`."""
    from octavo.llm import LLM

    jobs, console = demo_jobs(), Console()
    options = {"defer_shared_prefix": True} | given(args, ENGINE_OPTIONS)
    with LLM(args.model, show_progress=True, **options) as llm:
        screen = PanelScreen(console) if sys.stdout.isatty() else LineScreen(sys.stdout)
        answers = serve(llm, jobs, screen, sys.stderr)
        console.print(demo_table(answers))
        print(_demo_summary(llm))
    return int(any(answer.error for done in answers.values() for answer in done))


def demo_table(answers: Mapping[str, Sequence[CompletionOutput]]) -> Table:
    """Tokens and times by request."""
    table = Table("request", title="what the engine did (tokens)", title_justify="left")
    for name in ("prompt", "cached", "output", "first token", "tokens/s", "ended by"):
        table.add_column(name, justify="right")
    for name, done in answers.items():
        for answer in done:
            table.add_row(Text(name), *_demo_cells(answer))
    return table


def _demo_cells(answer: CompletionOutput) -> list[str]:
    metrics, count = answer.metrics, len(answer.token_ids)
    if metrics is None or metrics.first_token_time is None:
        return ["", "", str(count), "", "", answer.finish_reason]
    seconds = metrics.finished_time - metrics.first_token_time
    rate = f"{(count - 1) / seconds:.1f}" if count > 1 and seconds > 0 else "-"
    first = f"{metrics.time_to_first_token:.2f} s"
    prompt, cached = str(metrics.num_prompt_tokens), str(metrics.num_cached_tokens)
    return [prompt, cached, str(count), first, rate, answer.finish_reason]


def _demo_summary(llm: LLM) -> str:
    scheduler, stats = llm.scheduler, llm.engine.stats
    blocks = scheduler.allocator
    return (
        f"{stats.num_steps} steps, {stats.num_output_tokens} tokens; at most "
        f"{scheduler.max_used_blocks} of {blocks.num_blocks} KV blocks of {blocks.block_size} "
        f"tokens in use; {llm.parts.dtype} on {llm.parts.device}".replace("torch.", "")
    )


def _show_warning(message: Warning | str, *place: Any, **named: Any) -> None:
    """Stands in for `warnings.showwarning`; its place in the source is of no use here."""
    logging.getLogger("octavo").warning("%s", message)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `octavo` command; returns the exit status."""
    logging.basicConfig(format="octavo: %(message)s", stream=sys.stderr)
    logging.getLogger("octavo").setLevel(logging.INFO)
    args = make_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return args.run(args)
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough (`| head`); the flush at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
