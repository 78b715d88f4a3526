"""The gates: each is named by its promise and returns the problems it found."""

from __future__ import annotations

from collections.abc import Callable

from tools.gates.modules import (
    every_module_imports_alone,
    no_undefined_names,
    runtime_needs_no_build_tools,
)
from tools.gates.prefix import chapters_stand_alone
from tools.gates.rebuild import outputs_are_fresh, package_equals_book
from tools.gates.words import site_has_no_warnings, spelling_is_right
from tools.layout import Book

Gate = Callable[[Book], list[str]]

GATES: dict[str, Gate] = {
    "package equals book": package_equals_book,
    "no undefined names": no_undefined_names,
    "runtime needs no build tools": runtime_needs_no_build_tools,
    "every module imports alone": every_module_imports_alone,
    "outputs are fresh": outputs_are_fresh,
    "chapters 1..k stand alone": chapters_stand_alone,
    "site has no warnings": site_has_no_warnings,
    "spelling": spelling_is_right,
}
