# SPDX-License-Identifier: Apache-2.0
"""Compiles the native library into the package: python tools/build_native.py.

Each instruction set's file has flags of its own; the library asks the processor which of them it
may run. So one library serves every machine of an architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "host" / "native"
LIBRARY = ROOT / "host" / "hillinfer" / "native" / "libhillinfer_native.so"

_AVX512 = [
    *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    # Newer processors would be given half the width.
    "-mprefer-vector-width=512",
    # gcc 12 warns of its own header.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
# Attention meets NaN and infinities.
_ANY_FLOAT = ["-fno-finite-math-only", "-fsigned-zeros"]
COMMON: dict[str, list[str]] = {
    **{name: [] for name in ("api", "choice", "offsets", "portable", "selection", "sequence")},
    "aligned_tokens": [],
    "block_rows": [],
    "thread_pool": [],
    "crc32c": [],
    "launch_thread": [],
    "few_rows": [],
    "few_rows_portable": _ANY_FLOAT,
    "file_reads": [],
    "idle_rows": [],
    "lander": [],
    "landing": [],
    "page_cipher": [],
    "prefix_keys": [],
    "prompt_attention": [],
    "promotion": [],
    "read_plan": [],
    "ring": [],
    "attending": [],
    "attention": _ANY_FLOAT,
    "attention_api": [],
    "attention_portable": _ANY_FLOAT,
    "coded_api": [],
    "coded_portable": _ANY_FLOAT,
    "coded_powers": [],
    "coded_slots": [],
    "coded_split": [],
    "coded_step": [],
    "decode_step": [],
    "row_places": [],
    "row_products": _ANY_FLOAT,
    "row_sums": [],
    "state_rows": _ANY_FLOAT,
    "selected_sets": [],
    "sheets": [],
    "step_rows": [],
    "tables": [],
}
_X86 = {
    "avx2": ["-mavx2"],
    "attention_avx2": ["-mavx2", "-mfma", "-mf16c", *_ANY_FLOAT],
    "avx512vnni": _AVX512,
    "attention_avx512": [*_AVX512, *_ANY_FLOAT],
    "few_rows_avx2": ["-mavx2", "-mfma", *_ANY_FLOAT],
    "few_rows_avx512": [*_AVX512, *_ANY_FLOAT],
    "coded_avx2": ["-mavx2", "-mfma", "-mf16c", *_ANY_FLOAT],
    "coded_avx512": [*_AVX512, *_ANY_FLOAT],
}
_ARM = {
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "attention_neon": _ANY_FLOAT,
    "coded_neon": _ANY_FLOAT,
}
OWN_FLAGS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
# Floating point stands for integers here: nothing may be fused or traded.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    "-fno-tree-loop-distribute-patterns",  # A call of memset for 256 bytes costs more.
    # No NaN and no negative zero ever comes up, so a limit is one instruction.
    *("-ffinite-math-only", "-fno-signed-zeros"),
]


class BuildError(Exception):
    """The library was not built; the message says why."""


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, or the first one on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler on PATH: apt install g++, or set CXX")


def build(
    target: Path = LIBRARY,
    compiler: str | None = None,
    objects: Path | None = None,
    sources: Path = SOURCES,
) -> Path:
    """Compile and link the library and return its path; raise BuildError with what failed.

    Parameters
    ----------
    target
        The library's path.
    compiler
        By default that of `find_compiler`.
    objects
        A folder in which object files stay. One that was made of the same text by the same compiler
        and flags is linked again. By default everything is compiled.
    sources
        The folder of sources and headers.
    """
    compiler = compiler or find_compiler()
    files = COMMON | OWN_FLAGS.get(platform.machine().lower(), {})
    with tempfile.TemporaryDirectory() as folder:
        kept = objects or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        version = _run([compiler, "--version"])

        def compiled(name: str) -> str:
            source, flags = sources / f"{name}.cpp", [*FLAGS, *files[name]]
            made_of = [version, *flags, *_texts(source, {}).values()]
            whole = kept / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()}.o"
            if not whole.exists():
                beside = whole.with_suffix(f".{os.getpid()}")
                _run([compiler, *flags, "-c", str(source), "-o", str(beside)])
                beside.replace(whole)
            return str(whole)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            linked = list(pool.map(compiled, files))
        made = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", *linked, "-ldl", "-o", str(made)])
        # In one step: whoever has the old one loaded keeps it.
        beside = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(target)
    return target


def is_current() -> bool:
    """Whether the library is there and newer than all that it is made of."""
    sources = [Path(__file__), *SOURCES.iterdir()]
    return LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(
        one.stat().st_mtime for one in sources
    )


def _texts(source: Path, found: dict[str, str]) -> dict[str, str]:
    """Return the text of a source and of all its headers that are this project's, by name."""
    if source.name not in found:
        found[source.name] = source.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include "(.+)"', found[source.name], re.MULTILINE):
            _texts(source.parent / name, found)
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, and say where the library is or why there is none."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--require", action="store_true", help="end with 1 where it is not built")
    parser.add_argument("--objects", type=Path, help="folder in which object files stay")
    given = parser.parse_args(arguments)
    try:
        print(f"native library: {build(objects=given.objects).relative_to(ROOT)}")
    except (BuildError, OSError) as error:
        print(f"native library: not built, and nothing generates without it: {error}")
        if given.require:
            raise SystemExit(1) from error


if __name__ == "__main__":
    main()
