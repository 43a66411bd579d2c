# SPDX-License-Identifier: Apache-2.0
"""Builds the rendered HLS C++ with g++ into shared libraries, cached by content."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from hillinfer_hw.build_cache import cached
from hillinfer_hw.csim_pipelines import with_stages
from hillinfer_hw.key_reader import KEY_READER, KeyReader
from hillinfer_hw.render import HARDWARE, render
from hillinfer_hw.toolchain import NO_GARBAGE_COLLECTION, find_ap_types, find_compiler
from hillinfer_model.kernel_spec import KernelSpec

HLS = HARDWARE / "hls"
# Stand-ins for vendor headers that the open ones lack or that tests need otherwise.
TESTBENCH = HARDWARE / "testbench"
BURSTS = TESTBENCH / "bursts"
SEQUENTIAL = TESTBENCH / "sequential"
THREADS = TESTBENCH / "threads"
_FLAGS = (
    # Launches are short: what -O2 saves in them costs more in the compiler.
    *("-std=c++14", "-O1", "-fPIC", "-fno-gnu-unique", *NO_GARBAGE_COLLECTION),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-label"),
    # ap_private.h draws over a thousand false ones.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_LINK = ("-shared", "-Wl,-Bsymbolic")
_VENDOR_HEADER = "vendor.h"
_STREAM_PRAGMA = re.compile(r"#pragma HLS STREAM variable=(\w+) depth=(\d+)")


class Scheduling(StrEnum):
    """How the processes of a DATAFLOW region run in the simulation."""

    SEQUENTIAL = "sequential"
    THREADS = "threads"


class CsimBuildError(RuntimeError):
    """The compiler refused the rendered C++; the message is the compiler's."""


def rendered_sources(
    kernel: str, spec: KernelSpec, reader: KeyReader = KEY_READER
) -> dict[str, str]:
    """Return the rendered files of a kernel, by name.

    Parameters
    ----------
    kernel
        `score_tokens` or `make_shadow`.
    spec
        Checked before anything is rendered.
    reader
        Which process reads the keys.
    """
    names = ("spec.h", f"{kernel}.cpp")
    return {name: render(HLS / f"{name}.j2", spec, reader=reader) for name in names}


def stream_depths(source: str) -> dict[str, int]:
    """Return the depth that the STREAM pragmas of a rendered kernel give to each stream."""
    return {name: int(depth) for name, depth in _STREAM_PRAGMA.findall(source)}


def build_kernel(kernel: str, spec: KernelSpec, scheduling: Scheduling) -> Path:
    """Compile a kernel, or find it compiled before.

    Parameters
    ----------
    kernel
        `score_tokens` or `make_shadow`.
    spec
        The kernel's.
    scheduling
        Whether processes run one after another over unbounded streams, or as threads over
        bounded ones.

    Returns
    -------
    Path of the shared library.

    Raises
    ------
    HardwareSpecError
        Where no kernel is built for the spec.
    MissingToolError
        Where g++ or the ap_int headers are missing.
    CsimBuildError
        Where the compiler refuses the source.
    """
    sources = rendered_sources(kernel, spec)
    if scheduling is Scheduling.SEQUENTIAL:
        return compile_sources(f"{kernel}.cpp", sources, [])
    return compile_threads(kernel, sources)


def compile_threads(kernel: str, sources: Mapping[str, str]) -> Path:
    """Compile a kernel whose processes are threads, over bounded streams with stages.

    Parameters
    ----------
    kernel
        `score_tokens` or `make_shadow`.
    sources
        The rendered files, and headers that are to take the place of those of `hw/hls`, by name.

    Raises
    ------
    CsimBuildError
        Where the compiler refuses the source.
    """
    headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(HLS.glob("*.h"))}
    staged = {name: with_stages(text) for name, text in {**headers, **sources}.items()}
    depths = _depth_table(stream_depths(sources[f"{kernel}.cpp"]))
    staged["stream_depths.h"] = depths
    return compile_sources(f"{kernel}.cpp", staged, [f"-I{THREADS}", "-pthread"])


def compile_sources(main: str, sources: Mapping[str, str], include: list[str]) -> Path:
    """Compile one rendered file among others into a shared library; parameters as they sound.

    Without other flags processes run one after another.

    Raises
    ------
    CsimBuildError
        Where the compiler refuses the source.
    """
    compiler, ap_types = find_compiler(), find_ap_types()
    name = f"{Path(main).stem}.so"
    streams = THREADS if f"-I{THREADS}" in include else SEQUENTIAL
    vendor = [f"-I{BURSTS}", f"-I{streams}", "-isystem", str(ap_types)]

    def make(folder: Path) -> None:
        for file, text in sources.items():
            (folder / file).write_text(text, encoding="utf-8")
        command = [compiler, *_FLAGS, *_LINK]
        if streams is SEQUENTIAL:
            # In front of all else, or the compiler would read the headers.
            command += ["-include", str(_compiled_headers(compiler, vendor))]
        command += [*include, f"-I{folder}", f"-I{HLS}", *vendor]
        command += [str(folder / main), "-o", str(folder / name)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise CsimBuildError(outcome.stderr)

    headers = [*HLS.glob("*.h"), *BURSTS.glob("*.h"), *streams.glob("*.h")]
    parts = [part.encode() for item in sorted(sources.items()) for part in item]
    parts += [flag.encode() for flag in (*_FLAGS, *_LINK, *include)]
    parts += [header.read_bytes() for header in sorted(headers)]
    return cached("csim", parts, make) / name


def _compiled_headers(compiler: str, vendor: list[str]) -> Path:
    """Return a header of the vendor's headers that lies beside its compiled form.

    The compiler takes two seconds to read them, a fifth of what it takes for a kernel. Where it
    cannot use the compiled form it reads them.
    """
    text = "#include <ap_int.h>\n#include <hls_stream.h>\n#include <hls_burst_maxi.h>\n"

    def make(folder: Path) -> None:
        header = folder / _VENDOR_HEADER
        header.write_text(text, encoding="utf-8")
        command = [compiler, *_FLAGS, *vendor, "-x", "c++-header", str(header)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise CsimBuildError(outcome.stderr)

    # The compiler does not look whether what it compiled is still what the headers say.
    folders = (BURSTS, SEQUENTIAL, find_ap_types())
    headers = [header for folder in folders for header in sorted(folder.rglob("*.h"))]
    contents = [text.encode(), *(flag.encode() for flag in (*_FLAGS, *vendor))]
    contents += [header.read_bytes() for header in headers]
    return cached("csim-headers", contents, make) / _VENDOR_HEADER


def _depth_table(depths: Mapping[str, int]) -> str:
    entries = "\n".join(f'    {{"{name}", {depth}}},' for name, depth in depths.items())
    return (
        "#pragma once\n"
        "struct StreamDepth {\n    const char *name;\n    int depth;\n};\n"
        f"static const StreamDepth STREAM_DEPTHS[] = {{\n{entries}\n}};\n"
    )
