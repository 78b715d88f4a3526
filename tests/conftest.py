"""Triton's interpreter where there is no card; Hypothesis draws the same examples every time in
CI, and new ones on a person's machine."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before any test imports octavo, and with it Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("octavo-ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo-ci" if os.environ.get("CI") else "octavo")
