"""`@patch` methods end up in their class, written as they were."""

from __future__ import annotations

import pytest

from tools.fold import Piece, fold_patches
from tools.layout import BookError

CLASS = 'class Box:\n    """A box."""\n\n    size: int = 1\n'


def fold(*sources: str) -> str:
    """The folded code of some cells."""
    pieces = [Piece(source.strip("\n"), "chapters/01_boxes.md", 10) for source in sources]
    return "\n".join(piece.source for piece in fold_patches(pieces))


def run(code: str) -> dict[str, object]:
    """Execute module code and return its names."""
    names: dict[str, object] = {}
    exec(code, names)
    return names


def test_method_moves_into_its_class_with_comments_and_blank_lines() -> None:
    method = "# Why.\n@patch\ndef twice(self: Box) -> int:\n    # keep\n\n    return 2 * self.size\n"
    code = fold(CLASS, method)
    wanted = "    # Why.\n    def twice(self) -> int:\n        # keep\n\n        return 2 * self.size"
    assert code.endswith(wanted)
    assert run(code)["Box"]().twice() == 2


@pytest.mark.parametrize(
    ("flag", "decorator"),
    [
        ("as_prop", "@property"),
        ("cls_method", "@classmethod"),
        ("static_method", "@staticmethod"),
    ],
)
def test_patch_keywords_become_python_decorators(flag: str, decorator: str) -> None:
    first = "cls" if flag == "cls_method" else "self"
    code = fold(CLASS, f"@patch({flag}=True)\ndef f({first}: Box): return 3")
    assert f"    {decorator}\n    def f({first}): return 3" in code


def test_property_setter() -> None:
    getter = "@patch(as_prop=True)\ndef cm(self: Box): return self.size"
    setter = "@patch(set_prop=True)\ndef cm(self: Box, value): self.size = value"
    box = run(fold(CLASS, getter, setter))["Box"]()
    box.cm = 7
    assert box.size == box.cm == 7


def test_strings_over_several_lines_keep_their_content() -> None:
    method = '@patch\ndef text(self: Box):\n    """Doc\n    more."""\n    return f"""a\nb{1}\n  c"""\n'
    box = run(fold(CLASS, method))["Box"]
    assert box().text() == "a\nb1\n  c"
    assert "        more." in fold(CLASS, method)


def test_annotations_with_accents_before_them_are_cut_at_the_right_byte() -> None:
    method = '@patch\ndef é(self: "Box", ß: str = "ö") -> str: return ß'
    assert "def é(self, ß: str" in fold(CLASS, method)


def test_other_decorators_stay_and_async_works() -> None:
    method = "@patch\n@staticmethod_like\nasync def go(self: Box): return 1"
    assert "    @staticmethod_like\n    async def go(self): return 1" in fold(CLASS, method)


def test_methods_keep_their_order_and_closing_comments() -> None:
    one, two = "@patch\ndef a(self: Box): return 1", "@patch\ndef b(self: Box): return 2"
    code = fold(CLASS + "    # the end\nAFTER = 1", one, two)
    order = [code.index(mark) for mark in ("# the end", "def a", "def b", "AFTER")]
    assert order == sorted(order)
    assert run(code)["AFTER"] == 1


@pytest.mark.parametrize("body", ["...", "pass"])
def test_a_class_without_a_body_gets_one(body: str) -> None:
    code = fold(f"class Box: {body}", "@patch\ndef a(self: Box): return 1")
    run(code)
    assert code.split() == ["class", "Box:", "def", "a(self):", "return", "1"]


def test_two_classes_in_one_cell() -> None:
    code = fold(
        "class A:\n    x = 1\n\n\nclass B:\n    y = 2",
        "@patch\ndef f(self: A): return 1\n\n@patch\ndef g(self: B): return 2",
    )
    names = run(code)
    assert (names["A"]().f(), names["B"]().g()) == (1, 2)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("@patch\ndef f(self): return 1", "needs its class"),
        ("@patch\ndef f(self: Crate): return 1", "no class `Crate` earlier in this module"),
        ("@patch(nm='g')\ndef f(self: Box): return 1", "can't be folded"),
        ("def f(:\n", "not Python"),
    ],
)
def test_errors_name_the_chapter_and_line(source: str, problem: str) -> None:
    with pytest.raises(BookError, match=r"chapters/01_boxes.md:1[01]: ") as caught:
        fold(CLASS, source)
    assert problem in str(caught.value)
