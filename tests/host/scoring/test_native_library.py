# SPDX-License-Identifier: Apache-2.0
"""A missing, foreign or unusable native library, and what takes its place."""

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest

import build_native
from hillinfer.native.library import HOW_TO_BUILD, NativeError, NativeLibrary
from hillinfer.native.structures import Addresses


def test_a_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(NativeError, match="is not built") as caught:
        NativeLibrary(tmp_path / "gone.so")
    assert HOW_TO_BUILD in str(caught.value)


def test_a_file_that_is_no_library_says_so(tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    with pytest.raises(NativeError, match="cannot be used"):
        NativeLibrary(path)


def test_without_a_compiler_the_build_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build_native.BuildError, match="apt install"):
        build_native.build(tmp_path / "library.so")


COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "$HILLINFER_VERSION"; exit; fi
echo "$@" >> {calls}
for last; do :; done
echo made > "$last"
"""


def test_objects_of_the_same_text_and_compiler_are_linked_again(monkeypatch, tmp_path):
    calls, compiler, objects = tmp_path / "calls", tmp_path / "compiler", tmp_path / "objects"
    compiler.write_text(COMPILER.format(calls=calls))
    compiler.chmod(0o700)

    sources = tmp_path / "sources"
    shutil.copytree(build_native.SOURCES, sources)

    def compiled(version="1"):
        monkeypatch.setenv("HILLINFER_VERSION", version)
        build_native.build(tmp_path / "library.so", str(compiler), objects, sources)
        *made, linked = calls.read_text().splitlines()
        calls.unlink()
        assert "-shared" in linked
        return sorted(Path(line.split("-c ")[1].split()[0]).stem for line in made)

    def change(name):
        (sources / name).write_text((sources / name).read_text() + "// Another text.\n")

    every = compiled()
    assert len(every) > len(build_native.COMMON) / 2
    assert compiled() == []
    next(objects.glob("crc32c-*.o")).unlink()
    assert compiled() == ["crc32c"]
    assert compiled("2") == every
    # Text of a source, of a header that it has, and of a header of such a header.
    change("crc32c.cpp")
    assert compiled() == ["crc32c"]
    change("crc32c.h")
    assert compiled() == ["block_rows", "crc32c", "sheets", "state_rows"]
    (sources / "beneath.h").write_text("#pragma once\n")
    (sources / "crc32c.h").write_text('#include "beneath.h"\n')
    assert len(compiled()) == 4
    change("beneath.h")
    assert compiled() == ["block_rows", "crc32c", "sheets", "state_rows"]
    assert compiled() == []


def test_an_address_is_forgotten_with_its_array():
    addresses = Addresses()
    array = np.zeros(9)
    assert addresses.of(array) == addresses.of(array) == array.ctypes.data
    del array
    gc.collect()
    assert len(addresses) == 0
    with pytest.raises(ValueError, match="contiguous"):
        addresses.of(np.zeros((4, 4))[:, ::2])
