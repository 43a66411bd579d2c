# SPDX-License-Identifier: Apache-2.0
"""Writes what pytest makes of the tests' assertions: python tools/rewrite_tests.py.

Each process that tests would do so by itself, for half of the time that it takes to collect:
all of them begin at once. Pytest checks what it finds and makes anew what is of other sources.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

# No part of pytest's interface: where a later pytest has other names its processes do it again.
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc_fp,
    get_cache_dir,
)
from _pytest.config import Config, get_config

TESTS = Path(__file__).resolve().parents[1] / "tests"


def rewritten(file: Path) -> Path:
    """Write the bytecode of a test's file where pytest looks for it, and return its path."""
    folder = get_cache_dir(file)
    found = folder / f"{file.stem}{PYC_TAIL}"
    if _read_pyc(file, found) is None:
        stat, code = _rewrite_test(file, _config())
        folder.mkdir(exist_ok=True)
        own = found.with_suffix(f".{os.getpid()}")
        with own.open("wb") as into:
            _write_pyc_fp(into, stat, code)
        own.replace(found)
    return found


@cache
def _config() -> Config:
    return get_config()


def files_of_tests() -> list[Path]:
    """Return the files whose assertions pytest rewrites."""
    return sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")])


def main() -> None:
    """Do so for all files, in as many processes as there are cores."""
    with ProcessPoolExecutor() as processes:
        for _ in processes.map(rewritten, files_of_tests(), chunksize=8):
            pass


if __name__ == "__main__":
    main()
