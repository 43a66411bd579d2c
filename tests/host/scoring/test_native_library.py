# SPDX-License-Identifier: Apache-2.0
"""A missing, foreign or unusable native library, and what takes its place."""

import gc

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

    def compiled(version):
        monkeypatch.setenv("HILLINFER_VERSION", version)
        build_native.build(tmp_path / "library.so", str(compiler), objects)
        *made, linked = calls.read_text().splitlines()
        calls.unlink()
        assert "-shared" in linked
        return sorted(line.split("-c ")[1].split()[0] for line in made)

    every = compiled("1")
    assert len(every) > len(build_native.COMMON) / 2
    assert compiled("1") == []
    next(objects.glob("crc32c-*.o")).unlink()
    assert compiled("1") == [one for one in every if one.endswith("/crc32c.cpp")]
    assert compiled("2") == every


def test_an_address_is_forgotten_with_its_array():
    addresses = Addresses()
    array = np.zeros(9)
    assert addresses.of(array) == addresses.of(array) == array.ctypes.data
    del array
    gc.collect()
    assert len(addresses) == 0
    with pytest.raises(ValueError, match="contiguous"):
        addresses.of(np.zeros((4, 4))[:, ::2])
