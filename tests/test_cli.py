"""The `octavo` command, run inside this process on a tiny checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console, ConsoleDimensions
from tiny_checkpoint import write_tiny_checkpoint

from octavo import LLM, SamplingParams, cli
from octavo.cli import demo_jobs, main
from octavo.config import EngineConfig
from octavo.jobs import Job, make_job, read_jobs
from octavo.llm import RequestOutput
from octavo.options import ENGINE_OPTIONS
from octavo.outputs import CompletionOutput, RequestDelta, RequestMetrics, refusal
from octavo.request import FinishReason, RequestError
from octavo.screens import PanelScreen

QUICK = ("--temperature", "0", "--max-tokens", "8", "--dtype", "float64")


class Outcome(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class FakeTerminal(io.StringIO):
    """Standard input with a person at the other end."""

    def isatty(self) -> bool:
        return True


class Window(io.StringIO):
    """What a terminal keeps of an output: rows that can be drawn over only while in view."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.height, self.rows, self.row = height, [""], 0
        self.missed = 0
        """How often something meant a row that had scrolled out."""
        self.console = Console(file=self, force_terminal=True, width=width, height=height)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in re.split(r"(\n|\r|\x1b\[[?\d;]*[A-Za-z])", text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row == len(self.rows))
            elif part == "\x1b[1A" and self.row <= len(self.rows) - self.height:
                self.missed += 1
            elif part == "\x1b[1A":
                self.row -= 1
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part != "\r" and not part.startswith("\x1b["):
                self.rows[self.row] += part
        return super().write(text)

    def resize(self, width: int, height: int) -> None:
        self.height, self.console.size = height, ConsoleDimensions(width, height)

    def panels(self) -> list[tuple[str, str]]:
        """Titles and texts, from the top."""
        found: list[list[str]] = []
        for row in self.rows:
            if row.startswith("╭─ ["):
                found.append([row.strip("╭─╮ ")])
            elif row.startswith("│"):
                found[-1].append(row.strip("│ "))
        return [(title, " ".join(texts)) for title, *texts in found]


def watch(window: Window, jobs: list[Job], deltas: Iterable[RequestDelta]) -> None:
    """All of it through a screen that is drawn anew after each piece."""
    screen = PanelScreen(window.console)
    screen.start(jobs)
    for delta in deltas:
        screen.show(delta)
        screen.live.refresh()
    screen.stop()


def written(job: str, count: int, index: int = 0) -> Iterator[RequestDelta]:
    """An answer of `count` tokens, and of as many words, as it comes."""
    pieces = [f"{job}w{number} " for number in range(count)]
    times = RequestMetrics(1, 0, 0, 0.0, 0.0, 0.0)
    text, ids = "".join(pieces), [0] * count
    last = CompletionOutput(index, text, ids, FinishReason.STOP, metrics=times)
    for number, piece in enumerate(pieces):
        yield RequestDelta(job, index, piece, [0], last if number == count - 1 else None)


def in_turn(*answers: Iterable[RequestDelta]) -> Iterator[RequestDelta]:
    """A piece of each, as long as it has any."""
    for step in itertools.zip_longest(*answers):
        yield from (delta for delta in step if delta is not None)


def positions(window: Window) -> list[str]:
    """Where the bar stood, each place once."""
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", window.getvalue())
    found = re.findall(r"(\d+/[\d?]+) +tokens", plain)
    return [place for place, _ in itertools.groupby(found)]


Octavo = Callable[..., Outcome]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, dtype="float64", show_progress=False)


@pytest.fixture
def octavo(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Octavo:
    """Runs `octavo run MODEL ...`, or with `command` something else."""

    def run(
        *args: Any, stdin: io.TextIOBase | None = None, command: str = "run"
    ) -> Outcome:
        monkeypatch.setattr(sys, "stdin", stdin or FakeTerminal())
        capsys.readouterr()
        status = main([command, str(checkpoint), *map(str, args)])
        return Outcome(status, *capsys.readouterr())

    return run


def chat(llm: LLM, text: str, **params: Any) -> RequestOutput:
    """What the command should answer with QUICK."""
    params = {"temperature": 0, "max_tokens": 8, **params}
    return llm.chat([{"role": "user", "content": text}], SamplingParams(**params))[0]


def one_line(text: str) -> str:
    return " ".join(text.split())


class TestPrompts:
    def test_a_single_answer_is_typed_out(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("-p", "Hello", *QUICK)
        assert done == (0, chat(llm, "Hello").text + "\n", "")

    def test_several_prompts_are_answered_together(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("-p", "One", "-p", "Two", "--prompt", "Three", "--json", *QUICK)
        assert done.status == 0 and len(done.records) == 3
        texts = {record["id"]: record["text"] for record in done.records}
        names = {"1": "One", "2": "Two", "3": "Three"}
        assert texts == {name: chat(llm, text).text for name, text in names.items()}

    def test_lines_carry_the_name_of_their_request(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("-p", "One", "-p", "Two", *QUICK)
        for name, text in (("1", "One"), ("2", "Two")):
            lines = [f"[{name}] {line}" for line in chat(llm, text).text.split("\n")]
            assert [s for s in done.out.split("\n") if s.startswith(f"[{name}]")] == lines

    def test_raw_continues_the_text(self, octavo: Octavo, llm: LLM) -> None:
        [expected] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8))
        assert octavo("-p", "Hello", "--raw", *QUICK).out == expected.text + "\n"
        assert expected.text != chat(llm, "Hello").text

    def test_system_stands_before_every_chat(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("-p", "Hello", "-p", "Hi", "--system", "Be kind.", "--json", *QUICK)
        system = {"role": "system", "content": "Be kind."}
        chats = [[system, {"role": "user", "content": text}] for text in ("Hello", "Hi")]
        expected = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8))
        records = sorted(done.records, key=lambda record: record["id"])
        assert [record["text"] for record in records] == [
            output.text for output in expected
        ]
        assert expected[0].text != chat(llm, "Hello").text

    def test_a_json_record_says_all_about_an_answer(self, octavo: Octavo) -> None:
        done = octavo("-p", "Hello", "--n", 2, "--seed", 1, "--max-tokens", 5, "--json")
        assert [record["index"] for record in done.records] == [0, 1]
        first, second = done.records
        assert first["text"] != second["text"]
        assert {k: v for k, v in first.items() if k != "text"} == {
            "id": "1",
            "index": 0,
            "finish_reason": "length",
            "output_tokens": 5,
            "error": None,
        }

    def test_a_pipe_is_one_prompt(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo(*QUICK, stdin=io.StringIO("Two\nlines\n"))
        assert done.out == chat(llm, "Two\nlines").text + "\n"

    @pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
    def test_an_empty_pipe_is_an_error(self, octavo: Octavo, text: str) -> None:
        done = octavo(*QUICK, stdin=io.StringIO(text))
        assert done.status == 1 and done.out == ""
        assert "standard input is empty" in done.err and "-p" in done.err

    def test_a_pipe_of_other_bytes_is_an_error(self, octavo: Octavo) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
        done = octavo(*QUICK, stdin=stdin)
        assert done.status == 1 and "octavo: error: the standard input" in done.err

    def test_a_prompt_without_tokens_changes_the_status_alone(self, octavo: Octavo) -> None:
        done = octavo("-p", "", "-p", "Hello", "--raw", "--json", *QUICK)
        refused, answered = done.records
        assert (done.status, refused["id"], answered["error"]) == (1, "1", None)
        assert "no tokens" in refused["error"]
        assert done.err.startswith("octavo: prompt 1: the prompt [] has no tokens")


class TestFile:
    LINES = (
        '"Hello"',
        "",
        '{"id": "two", "prompt": "Hi", "max_tokens": 3}',
        "{nonsense",
        '{"prompt": "x", "temperatur": 1}',
        '{"prompt": "x", "top_p": 7}',
        '{"messages": [{"role": "user", "content": "Hey"}]}',
        '{"messages": [{"role": "villain", "content": "Ha"}]}',
        '{"messages": [1]}',
        '{"messages": "Hi"}',
        '{"prompt": 5}',
        '{"id": "two", "prompt": "Bye"}',
        "[" * 100_000,
        '{"prompt": "half \\ud83e"}',
        "7",
    )
    GOOD = ("1", "two", "7", "two-2")
    BAD = {
        "4": "line 4: ",
        "5": "line 5: unknown field 'temperatur'",
        "6": "line 6: top_p=7: expected",
        "8": "no villains",
        "9": "messages",
        "10": "messages",
        "11": '"prompt" must be text',
        "13": "line 13: ",
        "14": "half of a surrogate pair",
        "15": "line 15: expected a string, or an object",
    }

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(self.LINES))
        return path

    def test_bad_lines_cost_their_own_answer_and_no_other(
        self, octavo: Octavo, llm: LLM, file: Path
    ) -> None:
        done = octavo("--file", file, "--json", *QUICK)
        records = {record["id"]: record for record in done.records}
        assert done.status == 1 and len(records) == len(done.records)
        assert {name for name in records if records[name]["error"] is None} == set(
            self.GOOD
        )
        for name, words in self.BAD.items():
            assert words in records[name]["error"]
            assert f"octavo: prompt {name}: {records[name]['error']}" in done.err
        expected = [
            ("1", "Hello", 8),
            ("two", "Hi", 3),
            ("7", "Hey", 8),
            ("two-2", "Bye", 8),
        ]
        for name, text, count in expected:
            assert records[name]["text"] == chat(llm, text, max_tokens=count).text

    def test_good_lines_alone_give_status_0(self, octavo: Octavo, file: Path) -> None:
        file.write_text("\n".join(self.LINES[:3]))
        done = octavo("--file", file, *QUICK)
        assert (done.status, done.err) == (0, "")
        assert "[1] " in done.out and "[two] " in done.out

    def test_a_file_and_prompts_go_together(self, octavo: Octavo, file: Path) -> None:
        file.write_text('"Hello"\n')
        done = octavo("-p", "Hello", "--file", file, "--json", *QUICK)
        assert {record["id"] for record in done.records} == {"1", "1-2"}
        assert len({record["text"] for record in done.records}) == 1

    def test_only_line_feeds_end_lines(self, octavo: Octavo, llm: LLM, file: Path) -> None:
        """A byte-order mark and Unicode's other separators are part of no line's end."""
        file.write_text('\ufeff"a\u2028b"\r\n"c\x85d"\n', encoding="utf-8")
        done = octavo("--file", file, "--json", *QUICK)
        texts = [chat(llm, text).text for text in ("a\u2028b", "c\x85d")]
        assert [r["text"] for r in sorted(done.records, key=lambda r: r["id"])] == texts

    def test_a_name_that_cannot_be_printed_stops_nobody(
        self, octavo: Octavo, file: Path
    ) -> None:
        file.write_text('{"id": "\\ud800", "prompt": "x"}\n"Hello"\n')
        done = octavo("--file", file, "--json", *QUICK)
        assert (done.status, len(done.records)) == (0, 2)
        done.out.encode()

    @pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\n\n"])
    def test_a_file_without_prompts_is_one_line_of_error(
        self, octavo: Octavo, tmp_path: Path, content: bytes | None
    ) -> None:
        path = tmp_path / "other.jsonl"
        if content is not None:
            path.write_bytes(content)
        done = octavo("--file", path, *QUICK)
        assert done.status == 1 and done.out == "" and done.err.count("\n") == 1
        assert done.err.startswith(f"octavo: error: {path} ")

    def test_a_directory_is_no_file(self, octavo: Octavo, tmp_path: Path) -> None:
        done = octavo("--file", tmp_path, *QUICK)
        assert done.status == 1 and "can't be read" in done.err


class TestErrors:
    @pytest.mark.parametrize("model", ["./nowhere", "nowhere.gguf", "/dev/null"])
    def test_an_unknown_model_is_one_line_with_a_way_out(
        self, capsys: pytest.CaptureFixture[str], model: str
    ) -> None:
        assert main(["run", model, "-p", "Hi"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith(f"octavo: error: '{model}' ") and "smollm2-135m" in err

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--top-p", "7", "top_p=7.0: expected a number above 0"),
            ("--temperature", "-1", "temperature=-1.0"),
            ("--temperature", "nan", "temperature=nan"),
            ("--top-k", "-5", "top_k=-5"),
            ("--max-tokens", "0", "max_tokens=0"),
            ("--n", "0", "n=0"),
            ("--seed", "-1", "seed=-1"),
            ("--stop", "", "stop="),
            ("--dtype", "int3", "dtype='int3': give "),
            ("--device", "tpu", "device='tpu': give auto, cpu"),
            ("--device", "cuda:99", "CUDA devices"),
            ("--block-size", "0", "block_size=0"),
            ("--max-model-len", "9999", "positions up to 2048"),
            ("--num-kv-blocks", "0", "num_kv_blocks=0"),
            ("--max-num-seqs", "0", "max_num_seqs=0"),
            ("--max-num-batched-tokens", "-3", "max_num_batched_tokens=-3"),
            ("--gpu-memory-utilization", "1.5", "gpu_memory_utilization=1.5"),
            ("--sampler", "dice", "sampler='dice': give "),
        ],
    )
    def test_nonsense_values_are_one_line(
        self, octavo: Octavo, option: str, value: str, words: str
    ) -> None:
        done = octavo("-p", "Hi", f"{option}={value}")
        assert done.status == 1 and done.out == "" and done.err.count("\n") == 1
        assert done.err.startswith("octavo: error: ") and words in done.err

    @pytest.mark.parametrize("args", [("--max-tokens", "ten"), ("--hot",), ("-p",)])
    def test_what_is_no_option_gets_the_usage(
        self, octavo: Octavo, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            octavo(*args)
        err = capsys.readouterr().err
        assert caught.value.code == 2 and "usage: octavo" in err and args[0] in err

    def test_an_interrupt_ends_quietly(
        self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("octavo.engine.Engine.step", interrupt)
        done = octavo("-p", "Hi", "-p", "Ho", *QUICK)
        assert (done.status, done.err) == (130, "octavo: interrupted\n")

    def test_a_reader_who_leaves_ends_it_quietly(
        self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in `octavo run ... | head -1`."""
        read_end, write_end = os.pipe()
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            done = octavo("-p", "Hi", "-p", "Ho", *QUICK)
        assert (done.status, done.err) == (141, "")


class TestOptions:
    """Each option changes what it says it changes."""

    @pytest.mark.parametrize(
        ("args", "params"),
        [
            (("--max-tokens", 3), {"max_tokens": 3}),
            (("--seed", 4), {"seed": 4}),
            (("--seed", 4, "--temperature", 0.3), {"seed": 4, "temperature": 0.3}),
            (("--seed", 4, "--top-k", 3), {"seed": 4, "top_k": 3}),
            (("--seed", 4, "--top-p", 0.2), {"seed": 4, "top_p": 0.2}),
            (("--n", 2, "--seed", 4), {"n": 2, "seed": 4}),
            (("--ignore-eos",), {"ignore_eos": True}),
            (("--stop", "a", "--stop", "b"), {"stop": ("a", "b")}),
        ],
    )
    def test_sampling_options_reach_the_request(
        self,
        octavo: Octavo,
        monkeypatch: pytest.MonkeyPatch,
        args: tuple[Any, ...],
        params: dict[str, Any],
    ) -> None:
        seen: list[SamplingParams] = []
        stream = LLM.stream

        def spy(self: LLM, prompts: Any, given: Any, names: Any) -> Any:
            seen.extend(given)
            return stream(self, prompts, given, names)

        monkeypatch.setattr(LLM, "stream", spy)
        assert octavo("-p", "Hi", "--json", *args).status == 0
        assert seen == [SamplingParams(**params)]

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("device", "cpu"),
            ("dtype", "float64"),
            ("max_model_len", 64),
            ("max_num_seqs", 2),
            ("max_num_batched_tokens", 100),
            ("block_size", 4),
            ("num_kv_blocks", 50),
            ("prefix_cache", "radix"),
            ("max_chunk_tokens", 7),
            ("scheduling_policy", "priority"),
            ("batching", "prefill-first"),
            ("kv_cache_memory", 10**6),
            ("gpu_memory_utilization", 0.5),
            ("attention", "torch"),
            ("layer_ops", "torch"),
            ("sampler", "torch"),
            ("chunked_prefill", False),
            ("defer_shared_prefix", False),
            ("cuda_graphs", False),
            ("cuda_graphs", True),
            ("enforce_eager", True),
            ("overlap", True),
        ],
    )
    @pytest.mark.parametrize("command", ["run", "demo"])
    def test_engine_options_reach_the_engine(
        self,
        octavo: Octavo,
        monkeypatch: pytest.MonkeyPatch,
        command: str,
        option: str,
        value: Any,
    ) -> None:
        class Seen(Exception):
            pass

        def stop(self: LLM, model: str, **options: Any) -> None:
            own = {"defer_shared_prefix": True}  # the demo's choice
            raise Seen({k: v for k, v in options.items() if own.get(k) is not v})

        monkeypatch.setattr(LLM, "__init__", stop)
        more = ("-p", "Hi") if command == "run" else ()
        flag = ("no-" if value is False else "") + option.replace("_", "-")
        given = () if isinstance(value, bool) else (value,)
        with pytest.raises(Seen) as caught:
            octavo("--" + flag, *given, *more, command=command)
        seen = caught.value.args[0]
        assert {k: v for k, v in seen.items() if k != "show_progress"} == {option: value}

    def test_every_switch_of_the_engine_is_an_option(self) -> None:
        switches = {field.name for field in dataclasses.fields(EngineConfig)}
        assert set(ENGINE_OPTIONS) == switches - {"seed"}  # that of a request


class TestChatLoop:
    def test_a_conversation_remembers_what_was_said(
        self, octavo: Octavo, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = iter(["Hello", "  Again ", "", "never read"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(said))
        done = octavo("--system", "Be kind.", *QUICK)
        messages = [{"role": "system", "content": "Be kind."}]
        answers = []
        for text in ("Hello", "Again"):
            messages.append({"role": "user", "content": text})
            [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
            answers.append(output.text)
            messages.append({"role": "assistant", "content": output.text})
        assert done.out == "".join(f"{answer}\n" for answer in answers)
        assert done.status == 0 and "empty line ends" in done.err
        assert next(said) == "never read"

    def test_the_end_of_the_input_ends_it(self, octavo: Octavo) -> None:
        assert octavo(*QUICK).status == 0  # the terminal has nothing to say

    def test_what_could_not_be_answered_is_forgotten(
        self, octavo: Octavo, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = iter(["x" * 100, "Hello", ""])
        monkeypatch.setattr("builtins.input", lambda prompt: next(said))
        done = octavo("--max-model-len", 64, *QUICK)
        assert done.out == "\n" + chat(llm, "Hello").text + "\n"
        assert "shorten it to 63" in done.err


class TestTerminal:
    """Panels, drawn where a person watches."""

    @pytest.mark.parametrize("name", ["1", "red", "/b"])
    @pytest.mark.parametrize("text", ["Hello", "What does [/INST] mean?", "[bold]x"])
    def test_names_and_prompts_are_shown_as_they_are(self, name: str, text: str) -> None:
        out = io.StringIO()
        screen = PanelScreen(Console(file=out, force_terminal=True, width=60))
        screen.start([make_job(name, text, SamplingParams())])
        screen.show(RequestDelta(name, 0, "The [b]answer", ()))
        screen.stop()
        assert f"[{name}] {text}" in out.getvalue()
        assert "The [b]answer" in out.getvalue()

    @pytest.mark.parametrize(
        ("prompts", "width", "height"),
        [(8, 80, 24), (3, 80, 24), (1, 80, 24), (12, 80, 24), (8, 100, 50), (5, 24, 7),
         (3, 80, 4), (2, 80, 2)],
    )  # fmt: skip
    def test_each_answer_is_there_once_and_whole(
        self, prompts: int, width: int, height: int
    ) -> None:
        window = Window(width, height)
        window.write("before\n")
        names = [str(number) for number in range(prompts)]
        answers = [list(written(name, 40 + int(name))) for name in names]
        jobs = [make_job(name, f"p{name}", SamplingParams(max_tokens=99)) for name in names]
        watch(window, jobs, in_turn(*answers))
        whole = ["".join(delta.text for delta in answer).strip() for answer in answers]
        titles = [f"[{name}] p{name}" for name in names]
        assert window.panels() == list(zip(titles, whole, strict=True))
        assert window.rows[0] == "before" and window.missed == 0
        assert {row[:1] for row in window.rows[1:]} <= {"╭", "│", "╰", ""}

    def test_the_live_part_shows_the_last_lines_of_each(self) -> None:
        window = Window(80, 24)
        screen = PanelScreen(window.console)
        screen.start([make_job(name, name, SamplingParams()) for name in "abc"])
        for delta in in_turn(*(list(written(name, 200))[:150] for name in "abc")):
            screen.show(delta)
        screen.live.refresh()
        in_view = dict(window.panels())
        rows, (bar,) = len(window.rows), (row for row in window.rows if "tokens" in row)
        screen.stop()
        assert [text.split()[-1] for text in in_view.values()] == [
            "aw149",
            "bw149",
            "cw149",
        ]
        assert all(text.split()[0] != f"{text[0]}w0" for text in in_view.values())
        assert rows == 3 * 7 + 1 and "3 unfinished" in bar and "450/768" in bar
        assert window.panels()[0][1].startswith("aw0 aw1")  # interrupted: what there is

    def test_of_a_long_answer_only_the_end_is_laid_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        window, laid_out, draw = Window(80, 24), [], PanelScreen._panel

        def spy(self: PanelScreen, key: tuple[str, int], text: str) -> Any:
            laid_out.append(len(text))
            return draw(self, key, text)

        monkeypatch.setattr(PanelScreen, "_panel", spy)
        screen = PanelScreen(window.console)
        screen.start([make_job(name, name, SamplingParams()) for name in "ab"])
        for name in "ab":
            screen.show(RequestDelta(name, 0, "word " * 50_000 + "end", [0]))
        screen.live.refresh()
        assert [text.split()[-1] for _, text in window.panels()] == ["end", "end"]
        assert len(window.rows) == 2 * 11 + 1 and max(laid_out) < 2 * 80 * 24
        screen.stop()

    def test_answers_stand_in_the_order_of_the_prompts(self) -> None:
        window = Window(80, 24)
        screen = PanelScreen(window.console)
        screen.start([make_job(name, name, SamplingParams()) for name in "abc"])
        for delta in (*written("c", 3), *written("a", 3)):
            screen.show(delta)
        assert [title for title, _ in window.panels()[:1]] == ["[a] a"]  # for good
        for delta in written("b", 3):
            screen.show(delta)
        assert [title for title, _ in window.panels()] == ["[a] a", "[b] b", "[c] c"]
        screen.stop()
        assert len(window.panels()) == 3

    @pytest.mark.parametrize("size", [(120, 40), (50, 12), (80, 9)])
    def test_a_window_may_change_its_size(self, size: tuple[int, int]) -> None:
        window = Window(80, 24)
        screen = PanelScreen(window.console)
        screen.start([make_job(str(n), "p", SamplingParams()) for n in range(8)])
        deltas = list(in_turn(*(written(str(n), 50) for n in range(8))))
        for number, delta in enumerate(deltas):
            if number == 200:
                window.resize(*size)
            screen.show(delta)
            screen.live.refresh()
            if number == 200:  # what the first drawing can't reach any more
                window.missed = 0
        screen.stop()
        whole = [" ".join(f"{n}w{i}" for i in range(50)) for n in range(8)]
        assert window.missed == 0
        assert [text for _, text in window.panels()[-8:]] == whole
        assert len(window.panels()) == 8 or size[1] < 24

    def test_without_colours_the_panels_are_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs = [make_job(name, name, SamplingParams()) for name in "ab"]
        coloured = Window(80, 24)
        watch(coloured, jobs, in_turn(*(written(name, 90) for name in "ab")))
        monkeypatch.setenv("NO_COLOR", "1")
        plain = Window(80, 24)
        watch(plain, jobs, in_turn(*(written(name, 90) for name in "ab")))
        assert plain.panels() == coloured.panels() and plain.missed == 0
        assert re.search(r"\x1b\[[\d;]*3\d", coloured.getvalue())
        assert not re.search(r"\x1b\[[\d;]*3\d", plain.getvalue())

    def test_the_bar_counts_tokens(self) -> None:
        window, params = Window(80, 24), SamplingParams(max_tokens=10)
        jobs = [make_job(name, name, params) for name in "ab"]
        watch(window, jobs, in_turn(written("a", 10), written("b", 4)))
        before = [f"{done}/20" for done in range(8)]
        assert positions(window) == [*before, *(f"{done}/14" for done in range(8, 15))]

    def test_the_bar_without_a_limit(self) -> None:
        window = Window(80, 24)
        limits = {"a": SamplingParams(max_tokens=None), "b": SamplingParams(max_tokens=5)}
        jobs = [make_job(name, name, params) for name, params in limits.items()]
        watch(window, jobs, (*written("a", 3), *written("b", 2)))
        assert positions(window) == ["0/?", "1/?", "2/?", "3/8", "4/8", "5/5"]

    def test_a_refusal_is_one_word_for_all_n(self) -> None:
        window, params = Window(80, 24), SamplingParams(n=3, max_tokens=5)
        jobs = [make_job(name, name, params) for name in "ab"]
        refused = RequestDelta("a", 0, "", (), refusal(RequestError("no")))
        answers = (written("b", 5, index=index) for index in range(3))
        watch(window, jobs, (refused, *in_turn(*answers)))
        assert positions(window)[-1] == "15/15"
        assert [title for title, _ in window.panels()] == ["[a] a"] + 3 * ["[b] b"]

    @pytest.mark.parametrize("command", ["run", "demo"])
    def test_the_commands_draw_on_a_terminal(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        """With the drawing in a thread, as it is in life."""
        window = Window(80, 24)
        monkeypatch.setattr(sys, "stdout", window)
        for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
            monkeypatch.setenv(name, value)
        texts = [job.title for job in demo_jobs()]
        args = ["--dtype", "float64"]
        if command == "run":
            texts = [f"Prompt {number}" for number in range(8)]
            args += ["--max-tokens", "60", *(a for text in texts for a in ("-p", text))]
        assert main([command, str(checkpoint), *args]) == 0
        shown = [row for row in window.rows if row.startswith("╭─ [")]
        assert len(shown) == len(texts) and window.missed == 0
        for row, (number, text) in zip(shown, enumerate(texts, 1), strict=True):
            assert row.startswith(f"╭─ [{number}] {text[:60]}")
        assert "tokens" in window.getvalue() and "unfinished" not in "".join(window.rows)

    def test_any_readable_line_has_a_title(self) -> None:
        jobs = read_jobs(TestFile.LINES, SamplingParams(), None, False)
        screen = PanelScreen(Console(file=io.StringIO(), force_terminal=True))
        screen.start(jobs)
        screen.stop()
        assert [job.title for job in jobs[:2]] == ["Hello", "Hi"]

    def test_a_long_prompt_gets_a_short_title(self) -> None:
        title = make_job("1", "word \n" * 99, SamplingParams()).title
        assert title.startswith("word word") and title.endswith("…") and len(title) == 72


def shared_tokens(llm: LLM) -> int:
    """Tokens that the first two chats of the demo have in common at their beginning."""
    first, second = (llm.tokenizer.encode_chat(job.messages) for job in demo_jobs()[:2])
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class TestDemo:
    def test_three_answers_and_a_table(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("--dtype", "float64", "--block-size", 8, command="demo")
        assert done.status == 0
        lines = done.out.splitlines()
        assert {line[:4] for line in lines if line.startswith("[")} == {
            "[1] ",
            "[2] ",
            "[3] ",
        }
        rows = [
            [c.strip() for c in line.split("│")[1:-1]] for line in lines if line[0:1] == "│"
        ]
        for row, job in zip(rows, demo_jobs(), strict=True):
            prompt = len(llm.tokenizer.encode_chat(job.messages))
            cached = 8 * (shared_tokens(llm) // 8) if job.name == "2" else 0
            assert row[:4] == [job.name, str(prompt), str(cached), "96"]
            assert row[6] == "length" and row[4].endswith(" s") and float(row[5]) > 0
        summary = one_line(done.out.split("┘")[1])
        assert summary.startswith("97 steps, 288 tokens; at most ")  # the second waits one
        assert "KV blocks of 8 tokens in use; float64 on cpu" in summary
        header = next(line for line in lines if "prompt" in line and "cached" in line)
        for name in ("output", "first token", "tokens/s", "ended by"):
            assert name in header

    def test_blocks_in_use_are_counted(self, octavo: Octavo, llm: LLM) -> None:
        done = octavo("--block-size", 8, "--num-kv-blocks", 300, command="demo")
        ends = [len(llm.tokenizer.encode_chat(job.messages)) + 95 for job in demo_jobs()]
        used = sum(-(-end // 8) for end in ends) - shared_tokens(llm) // 8
        assert f"at most {used} of 300 KV blocks of 8 tokens" in one_line(done.out)

    def test_two_chats_share_a_system_prompt_and_one_is_long(self) -> None:
        short, other, long = demo_jobs()
        assert short.messages[0] == other.messages[0] and short.messages != other.messages
        assert len(str(long.messages)) > 5 * len(str(short.messages))


class TestHelp:
    @pytest.mark.parametrize(
        "argv",
        [
            ["--help"],
            ["run", "--help"],
            ["demo", "--help"],
            ["bench", "--help"],
            ["bench", "throughput", "--help"],
        ],
        ids=lambda argv: argv[-2] if len(argv) > 1 else "octavo",
    )
    def test_help_names_every_option_and_says_what_it_does(
        self, argv: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(argv)
        out = one_line(capsys.readouterr().out)
        words = {
            "--help": ("run", "answer prompts, or chat", "demo", "three chats"),
            "run": ("smollm2-135m", ".gguf", "owner/name", "examples:", "--file", "--stop",
                    "--top-p X choose among", "--num-kv-blocks X blocks", "--json", "--raw"),
            "demo": ("MODEL", "--device X where to run", "--block-size X tokens in one block"),
            "bench": ("throughput", "latency", "kernels", "examples:", "qwen3-0.6b-shape"),
            "throughput": ("--input-len X MIN:MAX", "--repetitions X repetitions that count",
                           "--out X write", "--overlap, --no-overlap plan a step"),
        }  # fmt: skip
        assert caught.value.code == 0
        assert [word for word in words[argv[-2:][0]] if word not in out] == []

    def test_every_option_has_a_help(self) -> None:
        def check(parser: argparse.ArgumentParser) -> None:
            for action in parser._actions:
                assert action.help or action.dest == "model" or action.choices, action
                if isinstance(action, argparse._SubParsersAction):
                    for command in action.choices.values():
                        check(command)

        check(cli.make_parser())

    def test_no_command_gets_the_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 2 and "COMMAND" in capsys.readouterr().err

    @pytest.mark.parametrize("argv", [["run"], ["bench", "latency"]])
    def test_help_loads_no_torch(self, argv: list[str]) -> None:
        code = (
            "import sys\nfrom octavo.cli import main\n"
            f"try: main([*{argv}, '--help'])\n"
            "finally: print('torch' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr == "False\n" and done.returncode == 0

    def test_installed_packages_add_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def add(commands: Any) -> None:
            commands.add_parser("greet").set_defaults(run=lambda args: 7)

        class Point:
            def load(self) -> Any:
                return add

        def find(group: str) -> list[Point]:
            return [Point()] if group == "octavo.commands" else []

        monkeypatch.setattr(cli, "entry_points", find)
        assert main(["greet"]) == 7
