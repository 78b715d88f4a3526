"""Hypothesis draws the same examples every time in CI, and new ones on a person's machine."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("octavo-ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo-ci" if os.environ.get("CI") else "octavo")
