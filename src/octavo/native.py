"""Chapter 07, The forward pass.

Generated from chapters/07_forward_pass.md; edit there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.config import OctavoError

__all__ = [
    "logger",
    "NativeError",
    "cache_root",
    "PRELUDE",
    "find_compiler",
    "build",
    "can_compile",
    "function",
]


logger = logging.getLogger("octavo")


class NativeError(OctavoError, RuntimeError):
    """C code can't be compiled or used on this machine; the message says why."""


def cache_root() -> Path:
    """$OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if given := os.environ.get("OCTAVO_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


PRELUDE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));

#ifdef BFLOAT16
typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
static inline vec load(const element *p) {
  return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16);
}
static inline float widened(element e) {
  uint32_t b = (uint32_t)e << 16;
  float f;
  memcpy(&f, &b, sizeof f);
  return f;
}
static inline element narrow(float f) {  /* to the nearest, ties to even */
  uint32_t b;
  memcpy(&b, &f, sizeof b);
  return f != f ? 0x7fc0 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}
static inline void store(element *p, vec v) {  /* the same for a vector */
  bits b = (bits)v, nan = (bits)(v != v);
  bits rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  *(halves *)p = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), halves);
}
#else
typedef float element;
static inline vec load(const element *p) { return *(const vec *)p; }
static inline void store(element *p, vec v) { *(vec *)p = v; }
static inline float widened(element e) { return e; }
static inline element narrow(float f) { return f; }
#endif

static inline vec load_float(const float *p) { return *(const vec *)p; }
static inline vec spread(float f) { return f - (vec){0}; }
static inline vec rounded(vec v) {  /* what is left of v once it has been an element */
  element e[LANES];
  store(e, v);
  return load(e);
}

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));
static inline float sum(vec v) {  /* halves onto halves */
#if LANES == 16
  union { vec whole; eight part[2]; } a = {v};
  union { eight whole; four part[2]; } b = {a.part[0] + a.part[1]};
  four f = b.part[0] + b.part[1];
#elif LANES == 8
  union { vec whole; four part[2]; } b = {v};
  four f = b.part[0] + b.part[1];
#else
  vec f = v;
#endif
  return (f[0] + f[1]) + (f[2] + f[3]);
}
static inline long least(long a, long b) { return a < b ? a : b; }

static inline vec exponential(vec x) {  /* relative error below 3e-7; at least exp(-87) */
  bits low = (bits)(x < -87.0f), high = (bits)(x > 88.0f);
  x = (vec)(((bits)x & ~(low | high)) | (low & (bits)spread(-87.0f)) | (high & (bits)spread(88.0f)));
  vec shifted = x * 1.44269504f + 12582912.0f;  /* the sum's last bits are the whole part */
  vec whole = shifted - 12582912.0f;
  vec f = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 0.5f;
  vec power = (vec)(((bits)shifted << 23) + 0x3f800000);  /* 2 to the whole part */
  return (p * f * f + f + 1.0f) * power;
}
"""


_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC")


def find_compiler() -> str | None:
    """Path of $CC, cc, gcc or clang, the first that there is."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _processor() -> str:
    """What the compiler's `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine()


def _openmp() -> str:
    """Path of the OpenMP library that PyTorch has loaded into this process."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    except OSError:
        loaded = []
    if (path := next((word for word in loaded if "libgomp" in word), None)) is None:
        raise NativeError(
            "this PyTorch runs without libgomp, whose threads the C code uses"
        )
    return path


@functools.cache
def build(source: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The C `source` (after `PRELUDE`) compiled for tensors of `dtype`, float32 or bfloat16.

    The first call compiles, and the result is kept in `cache_root()`. Raises `NativeError` if
    there is no compiler or it fails.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise NativeError(f"the C code handles float32 and bfloat16, not {dtype}")
    if (compiler := find_compiler()) is None:
        raise NativeError("no C compiler found; install gcc or clang, or set CC")
    text = "#define BFLOAT16\n" * (dtype is torch.bfloat16) + PRELUDE + source
    openmp = _openmp()
    key = "\0".join((text, compiler, openmp, *_FLAGS, _processor()))
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    library = cache_root() / "native" / f"{name}.so"
    try:
        if not library.exists():
            _compile(compiler, text, openmp, library)
        return ctypes.CDLL(str(library))
    except OSError as cause:
        raise NativeError(f"{library} can't be made or loaded ({cause})") from cause


@functools.cache
def _announce(compiler: str) -> None:
    """Log once in a process that kernels are being compiled."""
    logger.info("compiling the C kernels with %s (once)", compiler)


def _compile(compiler: str, text: str, openmp: str, library: Path) -> None:
    """Compile beside its final place, then rename, so that nobody loads half a file."""
    _announce(compiler)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, objects, made = (Path(folder) / f"kernels.{end}" for end in ("c", "o", "so"))
        code.write_text(text, encoding="utf-8")
        _run([compiler, *_FLAGS, "-c", str(code), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), openmp, "-o", str(made)])
        made.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NativeError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-2000:]}")


_PROBE = """
void probe(float *x, long n) {
#pragma omp parallel for
  for (long i = 0; i < n; i++) x[i] = 0;
}
"""


@functools.cache
def can_compile() -> bool:
    """Can C kernels be made here? Tried once, with a loop that OpenMP shares out."""
    try:
        build(_PROBE, torch.float32)
    except NativeError as reason:
        logger.info("no C kernels: %s", str(reason))
        return False
    return True


_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_long, "f": ctypes.c_float}


def function(library: ctypes.CDLL, name: str, kinds: str) -> Callable[..., None]:
    """A C function that returns nothing; kinds: p an address, n a long, f a float each."""
    found = getattr(library, name)
    found.argtypes, found.restype = [_KINDS[kind] for kind in kinds], None
    return found
