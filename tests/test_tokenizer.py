"""Tokeniser, detokeniser and stop strings, on small tokenisers built in memory and a real one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from octavo.config import ModelLoadError, OctavoError
from octavo.detokenizer import REPLACEMENT, Detokenizer, StopChecker, num_unfinished
from octavo.request import RequestError
from octavo.tokenizer import Tokenizer

# ---------------------------------------------------------------- tokenisers built in memory


def finish(backend: Backend, bos: str | None = None, **options: object) -> Tokenizer:
    """Add special tokens (and a BOS in front, if asked) and wrap the whole."""
    specials = ["<s>", "</s>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    backend.add_tokens([AddedToken("<tool → call>", special=False)])
    if bos:
        pair = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=pair
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options
    )
    return Tokenizer(hf)


def byte_level(bos: str | None = None, **options: object) -> Tokenizer:
    """Byte-level BPE as in Llama 3, Qwen3 and SmolLM2: 256 bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # F0 9F (the front half of most emoji), E2 82, " t", "he", " the", "::", ":\n"
    merges = [("ð", "Ł"), ("â", "Ĥ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    merges += [(":", ":"), (":", "Ċ"), ("<", "0"), ("x", "4"), ("<0", "x4")]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    vocab["<0x41>"] = len(vocab)  # ordinary text here, though it looks like a byte token
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    return finish(backend, bos, **options)


def sentencepiece_vocab() -> dict[str, int]:
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["▁", "▁▁", "▁▁▁▁", "a", "b", "▁a", "ab", "▁ab", "é", "語", ":", "\n", "User"]
    return {token: i for i, token in enumerate(tokens)}


def sentencepiece(decoder: str, bos: str | None = None) -> Tokenizer:
    """SentencePiece-style with byte fallback, decoded as in Llama 2 or by Metaspace."""
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("a", "b"), ("▁a", "b")]
    model = models.BPE(
        sentencepiece_vocab(), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Backend(model)
    if decoder == "strip":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
        turn_back = decoders.Replace("▁", " ")
        last = decoders.Strip(" ", 1, 0)
        chain = [turn_back, decoders.ByteFallback(), decoders.Fuse(), last]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
        chain = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    backend.decoder = decoders.Sequence(chain)
    return finish(backend, bos)


def word_level() -> Tokenizer:
    """No decoder at all: the tokens are joined with blanks."""
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "bc": 2, "d": 3}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return finish(backend)


KINDS = ("byte", "strip", "metaspace", "word")


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte":
        return byte_level()
    return word_level() if kind == "word" else sentencepiece(kind)


class Counting:
    """Passes decode on and keeps count of what it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.longest = self.total = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(token_ids))
        self.total += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> Iterator[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    yield from map(stream.push, ids)
    yield stream.flush()


# ------------------------------------------------------------------------------ Detokenizer

some_ids = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 300), st.sampled_from([-1, 999, 2**33])),
    max_size=60,
)


def check_stream(kind: str, ids: Sequence[int], skip: bool) -> None:
    """After each id: all certain text is out, and only marks that may change are not."""
    tokenizer = tokenizer_of(kind)
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    for i, token_id in enumerate(ids):
        stream.push(token_id)
        whole = tokenizer.decode(ids[: i + 1], skip_special_tokens=skip)
        held = whole[len(stream.text) :]
        assert whole.startswith(stream.text)
        assert len(held) <= 3 and not held.strip(REPLACEMENT)
    last = stream.flush()
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream.flush() == "" and stream.text.endswith(last)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(ids=some_ids, skip=st.booleans())
def test_B69_stream_equals_decode_for_any_ids(
    kind: str, ids: list[int], skip: bool
) -> None:
    check_stream(kind, ids, skip)


@pytest.mark.parametrize("kind", KINDS[:3])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
@example("👩🏽‍🚀🦉🦉 漢字かな交じり文 🇪🇺")
@example("   four    blanks\n\n  and\ttabs ")
@example("\ufffd\ufffd a genuine \ufffd")
def test_B69_stream_equals_decode_for_any_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    if kind == "byte" and not any(i in tokenizer._special_ids for i in ids):
        assert tokenizer.decode(ids) == text
    check_stream(kind, ids, skip=True)


# Only what broke or ran into the ends of the bounded window: runs of bytes, mostly invalid.
@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=200, deadline=None)
@given(
    runs=st.lists(
        st.sampled_from(
            [b"\x80", b"\xe2", b"\xe2\x82", b"\xf0\x9f\xa6", b"\xff", "🦉€é".encode()]
        ),
        max_size=20,
    ),
    repeat=st.integers(1, 5),
)
def test_B74_invalid_utf8_never_breaks_the_stream(
    kind: str, runs: list[bytes], repeat: int
) -> None:
    tokenizer = tokenizer_of(kind)
    check_stream(kind, [byte_id(tokenizer, b) for b in b"".join(runs) * repeat], skip=True)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id of one byte in either kind of vocabulary."""
    return ids_of_bytes(tokenizer)[byte]


@cache
def ids_of_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    by_byte = {byte: i for i, byte in tokenizer._byte_of.items()}
    return by_byte or dict(byte_level_ids(tokenizer))


def byte_level_ids(tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """(byte, id) for the byte alphabet: printable bytes stand for themselves, the rest follow."""
    own = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
    others = [b for b in range(256) if b not in own]
    letters = {b: chr(b) for b in own} | {b: chr(256 + n) for n, b in enumerate(others)}
    vocab = tokenizer._backend.get_vocab()
    yield from ((b, vocab[letter]) for b, letter in letters.items())


def test_B69_several_emoji_in_a_row_come_one_by_one() -> None:
    for kind in ("byte", "strip", "metaspace"):
        pieces = list(pieces_of(tokenizer_of(kind), tokenizer_of(kind).encode("🦉🦊€")))
        assert [piece for piece in pieces if piece.strip()] == ["🦉", "🦊", "€"], kind


def test_B74_bad_bytes_do_not_take_back_good_characters() -> None:
    tokenizer = tokenizer_of("strip")
    ids = [byte_id(tokenizer, b) for b in "€".encode() + b"\xff\x80"]
    assert tokenizer.decode(ids) == "€" + 2 * REPLACEMENT
    assert "".join(pieces_of(tokenizer, ids)) == "€" + 2 * REPLACEMENT
    # the decoder below loses the euro: the reason why the run is sorted first
    assert tokenizer._hf.decode(ids) == 5 * REPLACEMENT


def test_B74_a_byte_run_that_spells_a_byte_token_stays_text() -> None:
    tokenizer = tokenizer_of("strip")
    ids = [byte_id(tokenizer, b) for b in b"<0x41>\xff"]
    assert tokenizer.decode(ids) == "<0x41>" + REPLACEMENT
    byte = tokenizer_of("byte")
    assert byte.decode([byte._backend.token_to_id("<0x41>")]) == "<0x41>"


def test_B73_blanks_are_neither_lost_nor_added() -> None:
    vocab = sentencepiece_vocab()
    ids = [vocab[t] for t in ["▁", "▁", "▁▁", "▁ab", "▁", "▁▁▁▁", "▁", "a", "▁a", "▁"]]
    for kind in ("strip", "metaspace"):
        tokenizer = tokenizer_of(kind)
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
        assert "ab      a a" in tokenizer.decode(ids)


def test_B73_pieces_may_be_collected_and_sent_later() -> None:
    tokenizer = tokenizer_of("strip")
    ids = tokenizer.encode("ab a   ab語 é ab 🦉 a" * 5)
    pieces = list(pieces_of(tokenizer, ids))
    every_eight = ["".join(pieces[i : i + 8]) for i in range(0, len(pieces), 8)]
    assert "".join(every_eight) == tokenizer.decode(ids) == "ab a   ab語 é ab 🦉 a" * 5


def test_B73_a_leading_space_survives_skipped_special_tokens() -> None:
    tokenizer, vocab = tokenizer_of("strip"), sentencepiece_vocab()
    eos = tokenizer.eos_token_id
    assert eos is not None
    ids = [vocab["a"], *[eos] * 20, vocab["▁a"], *[eos] * 20, vocab["▁"], vocab["▁a"]]
    assert tokenizer.decode(ids) == "a a  a"
    assert "".join(pieces_of(tokenizer, ids)) == "a a  a"


def worst_cases(kind: str) -> dict[str, list[int]]:
    tokenizer = tokenizer_of(kind)
    eos = tokenizer.eos_token_id
    assert eos is not None

    def ids(data: bytes) -> list[int]:
        return [byte_id(tokenizer, b) for b in data]

    cases = {"text": tokenizer.encode("ab a 🦉 語 " * 100), "unknown": [10**6] * 1000}
    cases |= {"special": [eos] * 1000, "text, then special": ids(b"a") + [eos] * 1000}
    cases |= {"half, then special": ids(b"\xe2\x82") + [eos] * 1000 + ids(b"\xac")}
    for data in (b"\x80", b"\xe2", b"\xe2\x82", b"\xf0\x9f\xa6", b"\xff", "🦉".encode()):
        cases[repr(data)] = ids(data) * 400
    cases["with specials"] = [i for b in ids(b"\xf0\x9f\xa6") * 300 for i in (b, eos, eos)]
    if kind == "strip":
        cases["blanks"] = [sentencepiece_vocab()["▁"]] * 1000
    return cases


@pytest.mark.parametrize("kind", ["byte", "strip"])
def test_each_push_decodes_a_bounded_number_of_ids(kind: str) -> None:
    for name, ids in worst_cases(kind).items():
        counting = Counting(tokenizer_of(kind))
        text = "".join(pieces_of(counting, ids))  # type: ignore[arg-type]
        assert text == tokenizer_of(kind).decode(ids), name
        assert counting.longest <= 32, (name, counting.longest)
        assert counting.total <= 64 * len(ids), name


def test_nonsense_bytes_are_not_held_back_for_ever() -> None:
    tokenizer = tokenizer_of("byte")
    stream = Detokenizer(tokenizer)
    for i in range(500):
        stream.push(byte_id(tokenizer, 0x80))
        assert len(stream.text) >= i + 1 - 3


def test_special_tokens_are_skipped_or_shown() -> None:
    for kind in ("byte", "strip"):
        tokenizer = tokenizer_of(kind)
        ids = [*tokenizer.encode("ab"), tokenizer._backend.token_to_id("<|im_end|>")]
        assert "".join(pieces_of(tokenizer, ids, skip=True)) == "ab"
        assert "".join(pieces_of(tokenizer, ids, skip=False)) == "ab<|im_end|>"
        tool = tokenizer._backend.token_to_id("<tool → call>")  # added, but not special
        assert "".join(pieces_of(tokenizer, [tool])) == "<tool → call>"


def test_num_unfinished_counts_marks_at_the_end_only() -> None:
    marks = [0, 1, 2, 3, 4, 9]
    assert [num_unfinished("a" + n * REPLACEMENT) for n in marks] == [0, 1, 2, 3, 3, 3]
    assert num_unfinished("") == num_unfinished(REPLACEMENT + "a") == 0


# ------------------------------------------------------------------------------ StopChecker


def cut_at_first_stop(
    text: str, stops: Sequence[str], include: bool = False
) -> tuple[str, str | None]:
    """The definition: read character by character, stop where any stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run_checker(checker: StopChecker, pieces: Sequence[str]) -> str:
    return "".join([*map(checker.push, pieces), checker.flush()])


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that some stop string begins with, by trying all."""
    starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in starts), default=0)


few_letters = st.text("ab:\n", max_size=5)
stop_lists = st.lists(few_letters.filter(bool), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists, include=st.booleans())
@example(pieces=["x", "abcd"], stops=["abcd", "bc"], include=False)
@example(pieces=["aab"], stops=["aab", "ab", "b"], include=False)
@example(pieces=["a", "a", "b"], stops=["aab", "aac"], include=True)
def test_B66_stream_equals_the_text_cut_at_the_first_stop(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    checker = StopChecker(stops, include)
    text = run_checker(checker, pieces)
    assert (text, checker.matched) == cut_at_first_stop("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists)
def test_B65_only_the_beginning_of_a_stop_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    checker, seen, released = StopChecker(stops), "", ""
    for piece in pieces:
        released += checker.push(piece)
        seen += piece
        if checker.matched is not None:
            break
        assert len(seen) - len(released) == longest_beginning(seen, stops)


@settings(max_examples=150, deadline=None)
@given(ids=some_ids, data=st.data(), include=st.booleans())
def test_B68_stop_strings_are_found_from_token_ids_alone(
    ids: list[int], data: st.DataObject, include: bool
) -> None:
    tokenizer = tokenizer_of("byte")
    whole = tokenizer.decode(ids)
    if len(whole) < 2:
        return
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : begin + data.draw(st.integers(1, 4))]
    checker = StopChecker([stop, "zz"], include)
    text = run_checker(checker, list(pieces_of(tokenizer, ids)))
    assert (text, checker.matched) == cut_at_first_stop(whole, [stop, "zz"], include)
    assert checker.matched is not None


def test_B65_a_stop_string_across_token_borders() -> None:
    checker = StopChecker("\nUser:")
    assert [checker.push(piece) for piece in ["Yes.", "\nUser", ":", " Hi"]] == [
        "Yes.",
        "",
        "",
        "",
    ]
    assert checker.matched == "\nUser:" and checker.flush() == ""
    beta = StopChecker(["beta gamma"])
    assert (
        run_checker(beta, ["alpha ", "be", "ta", " beta", " gam", "ma delta"])
        == "alpha beta "
    )
    assert beta.matched == "beta gamma"


def test_B65_a_stop_string_inside_one_token() -> None:
    checker = StopChecker(["##"])
    assert checker.push("end.## Next") == "end." and checker.matched == "##"
    including = StopChecker(["##"], include_stop_str_in_output=True)
    assert including.push("end.## Next") == "end.##" and including.push("more") == ""


def test_B66_text_that_only_resembles_a_stop_is_released_at_the_end() -> None:
    question = StopChecker("\n")
    assert run_checker(question, ["Why", "?", "\n"]) == "Why?" and question.matched == "\n"
    resembles = StopChecker(["STOP", "?!"])
    assert [resembles.push("ST"), resembles.push("O?")] == ["", "STO"]
    assert (
        resembles.flush() == "?" and resembles.matched is None and resembles.flush() == ""
    )


def test_the_first_complete_match_wins_and_the_longest_of_equal_ends() -> None:
    assert cut_at_first_stop("xabcdx", ["abcd", "bc", "c"]) == ("xa", "bc")
    newline = StopChecker(["\n\n", "\n"])
    assert run_checker(newline, ["a", "\n", "\n"]) == "a" and newline.matched == "\n"


def test_stop_checker_refuses_what_is_no_text_and_allows_none() -> None:
    for bad in ("", ["a", ""], [5]):
        with pytest.raises(RequestError, match="stop="):
            StopChecker(bad)  # type: ignore[arg-type]
    nothing = StopChecker([])
    assert nothing.push("abc") == "abc" and nothing.flush() == ""


# ------------------------------------------------------------------------- Tokenizer: chats

LLAMA3_STYLE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}{{ m.role + ': ' + m.content }}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def test_B85_one_begin_of_text_in_chat_and_completion() -> None:
    tokenizer = byte_level(bos="<s>", chat_template=LLAMA3_STYLE)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("hello").count(bos) == 1
    assert tokenizer.encode("").count(bos) == 1
    assert tokenizer.encode_chat(HELLO).count(bos) == 1
    # a chat rendered by hand and sent as a plain prompt
    rendered = tokenizer.render_chat(HELLO)
    assert rendered.startswith("<s>")
    assert tokenizer.encode(rendered) == tokenizer.encode_chat(HELLO)


def test_B85_a_tokeniser_that_adds_no_begin_of_text_keeps_what_the_text_says() -> None:
    tokenizer = byte_level()
    assert tokenizer.bos_token_id not in tokenizer.encode("hello")
    assert tokenizer.encode("<s><s>hello").count(tokenizer.bos_token_id) == 2


def test_chat_is_rendered_with_and_without_the_generation_prompt() -> None:
    tokenizer = byte_level(chat_template=LLAMA3_STYLE)
    assert tokenizer.render_chat(HELLO) == "<s>[user]hello</s>[assistant]"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<s>[user]hello</s>"
    switch = "{{ 'think' if thinking else 'no' }}"
    assert tokenizer.render_chat(HELLO, chat_template=switch, thinking=True) == "think"
    ids = tokenizer.encode_chat(HELLO, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[user]hello</s>"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "messages is a str"),
        ({"role": "user", "content": "a"}, "messages is a dict"),
        (None, "messages is a NoneType"),
        ([], "messages is empty"),
        ([*HELLO, "hello"], r"messages\[1\] is 'hello'"),
        ([*HELLO, {"content": "a"}], r"messages\[1\] has no 'role'"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has no 'content'"),
        ([{"role": "user", "content": 5}], r"messages\[0\] .* content of type int"),
        (
            [*HELLO, {"role": "robot", "content": "a"}, *HELLO],
            r"messages\[1\] .*unknown role",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [1]}],
            r"refused messages\[0\]",
        ),
    ],
)
def test_a_bad_chat_names_the_message(messages: object, complaint: str) -> None:
    tokenizer = byte_level(chat_template=STRICT)
    with pytest.raises(RequestError, match=complaint) as caught:
        tokenizer.encode_chat(messages)  # type: ignore[arg-type]
    assert isinstance(caught.value, OctavoError) and isinstance(caught.value, ValueError)


def test_no_chat_template_and_a_broken_one_are_request_errors() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_level().render_chat(HELLO)
    with pytest.raises(RequestError, match="chat template"):
        byte_level(chat_template="{% for %}").render_chat(HELLO)


BROKEN_TEMPLATE = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_template_that_is_no_jinja_is_blamed_itself_not_a_message(
    tmp_path: Path, file: str, count: int
) -> None:
    byte_level()._hf.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    if file == settings_file.name:
        settings_of = json.loads(settings_file.read_text())
        settings_of["chat_template"] = BROKEN_TEMPLATE
        settings_file.write_text(json.dumps(settings_of))
    else:
        (tmp_path / file).write_text(BROKEN_TEMPLATE)
    with pytest.raises(RequestError) as caught:
        Tokenizer.from_pretrained(tmp_path).render_chat(HELLO * count)
    assert f"the chat template in {tmp_path / file} is broken at line 2" in str(
        caught.value
    )
    assert "unexpected '}'" in str(caught.value) and "messages[" not in str(caught.value)


def test_a_broken_template_that_was_passed_is_named_as_such() -> None:
    tokenizer = byte_level(chat_template=LLAMA3_STYLE)
    for broken in (BROKEN_TEMPLATE, "\n{{ 1 | nofilter }}"):
        with pytest.raises(
            RequestError, match="the chat_template that was passed is broken"
        ):
            tokenizer.render_chat(HELLO, chat_template=broken)
    with pytest.raises(RequestError, match="the chat template is broken at line 1"):
        byte_level(chat_template="{% for %}").render_chat(HELLO)


def test_prompts_that_are_no_proper_text_are_request_errors() -> None:
    tokenizer = byte_level()
    with pytest.raises(RequestError, match="character 2 .*surrogate"):
        tokenizer.encode("hi\ud83e")
    with pytest.raises(RequestError, match="the prompt is a list"):
        tokenizer.encode(["hi"])  # type: ignore[arg-type]


# ------------------------------------------------------------------------- Tokenizer: decode


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=30), skip=st.booleans())
def test_decode_agrees_with_transformers(ids: list[int], skip: bool) -> None:
    for kind in ("byte", "word"):
        tokenizer = tokenizer_of(kind)
        assert tokenizer.decode(ids, skip) == tokenizer._hf.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_decode_agrees_with_transformers_on_byte_fallback_text(text: str) -> None:
    for kind in ("strip", "metaspace"):
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._hf.decode(ids, skip_special_tokens=True)


def test_ids_without_a_token_have_no_text() -> None:
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        known = tokenizer._backend.token_to_id("a")
        padding = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 10**6, 2**32, 2**70, -1]
        assert tokenizer._backend.id_to_token(tokenizer.vocab_size - 1) is not None
        assert tokenizer.decode(padding) == tokenizer.decode([]) == ""
        assert tokenizer.decode([*padding, known, *padding]) == tokenizer.decode((known,))
        assert list(pieces_of(tokenizer, [*padding, known])) == [*[""] * 6, "a", ""]


# ------------------------------------------------------------------------ Tokenizer: opening


def test_importing_the_module_loads_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, octavo.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"


def test_a_saved_tokeniser_opens_again(tmp_path) -> None:
    original = byte_level(bos="<s>", chat_template=LLAMA3_STYLE)
    original._hf.save_pretrained(tmp_path)
    opened = Tokenizer.from_pretrained(tmp_path)
    assert opened.encode_chat(HELLO) == original.encode_chat(HELLO)
    assert opened.encode("the 🦉") == original.encode("the 🦉")
    assert (opened.vocab_size, opened.eos_token_id) == (
        original.vocab_size,
        original.eos_token_id,
    )


def test_a_directory_without_a_tokeniser_says_what_to_do(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "config.json"):
        with pytest.raises(ModelLoadError, match="copy the tokeniser files"):
            Tokenizer.from_pretrained(path)


def test_a_half_downloaded_tokeniser_says_what_to_do(tmp_path) -> None:
    byte_level()._hf.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\x00\xff", b"{}"):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match="fetch them again"):
            Tokenizer.from_pretrained(tmp_path)


def test_a_class_that_this_transformers_does_not_know_is_no_hindrance(tmp_path) -> None:
    original = byte_level(chat_template=LLAMA3_STYLE)
    original._hf.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    known = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(known | {"tokenizer_class": "FromTheFuture"}))
    opened = Tokenizer.from_pretrained(tmp_path)
    assert opened.encode_chat(HELLO) == original.encode_chat(HELLO)
    assert opened.eos_token_id == original.eos_token_id


def test_a_tokeniser_that_is_only_python_code_is_refused(tmp_path, monkeypatch) -> None:
    class Slow:
        is_fast = False

    byte_level()._hf.save_pretrained(tmp_path)
    opener = "transformers.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(opener, lambda *_args, **_kwargs: Slow())
    with pytest.raises(ModelLoadError, match="fast tokeniser"):
        Tokenizer.from_pretrained(tmp_path)


# --------------------------------------------------------------------- the tokeniser of SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    for name in ("octavo.hub", "octavo.weights"):
        try:
            resolve = importlib.import_module(name).resolve_model
        except (ImportError, AttributeError):
            continue
        return Tokenizer.from_pretrained(resolve("smollm2-135m"))
    pytest.skip("this package has no resolve_model yet")


@pytest.mark.slow
def test_smollm2_streams_what_it_decodes(smollm2: Tokenizer) -> None:
    texts = [
        "Plain English, 3.14.",
        "👩🏽‍🚀🦉🦉🇪🇺",
        "漢字かな交じり文",
        "  def f(x):\n\n\n    return x\t",
        "é\u0301\ufffd",
    ]
    for text in texts:
        ids = smollm2.encode(text)
        assert "".join(pieces_of(smollm2, ids)) == smollm2.decode(ids) == text
    assert smollm2.vocab_size == 49152


@pytest.mark.slow
def test_smollm2_streams_any_ids(smollm2: Tokenizer) -> None:
    @settings(max_examples=100, deadline=None)
    @given(ids=st.lists(st.integers(0, 49200), max_size=40), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(pieces_of(smollm2, ids, skip)) == smollm2.decode(ids, skip)

    check()


@pytest.mark.slow
def test_B65_smollm2_stops_across_its_own_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Sure, here it is.\nUser: and")
    checker = StopChecker(["\nUser:"])
    assert run_checker(checker, list(pieces_of(smollm2, ids))) == "Sure, here it is."


@pytest.mark.slow
def test_B85_smollm2_chat_has_one_turn_mark_per_turn(smollm2: Tokenizer) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    ids = smollm2.encode_chat(chat)
    assert ids.count(smollm2.bos_token_id) == 3  # system, user and the answer's opening
    assert ids.count(smollm2.eos_token_id) == 2
    assert smollm2.decode(ids, skip_special_tokens=False) == smollm2.render_chat(chat)
