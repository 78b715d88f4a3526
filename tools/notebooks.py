"""`nbdev_test` over all notebooks, with flags such as `gpu` or `soak` for cells left out else."""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> None:
    """Test every notebook; arguments are flags of cells to run that are left out otherwise."""
    from nbdev.test import nbdev_test

    flags = " ".join(sys.argv[1:] if argv is None else argv)
    if "gpu" not in flags.split():
        # All notebooks share this process, and an earlier one may load Triton before chapter 07
        # asks for its interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    nbdev_test.__wrapped__("nbs", flags=flags, n_workers=1, do_print=True)


if __name__ == "__main__":
    main()
