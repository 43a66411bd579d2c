# SPDX-License-Identifier: Apache-2.0
"""Processor flags, and versions against their windows."""

import pytest

from hillinfer.doctor.finding import PackageFacts, run_packages
from hillinfer.system.machine import ProcessorFacts


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("model name\t: X\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("model name\t: X\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("model name\t: X\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_fast_bfloat16(tmp_path, text, fast):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert ProcessorFacts.read(file).fast_bfloat16 is fast


def test_this_processor():
    assert ProcessorFacts.read().cores >= 1


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("5.23.0", True),
        ("5.23", True),
        ("5.23.7", True),
        ("5.23.0+cpu", True),
        ("5.24.0", False),
        ("5.22.9", False),
        ("5.3.0", False),
        ("6.0", False),
        (None, False),
    ],
)
def test_window(version, inside):
    package = PackageFacts("transformers", version, ">=5.23,<5.24")
    assert package.supported is inside
    assert package.fix == (None if inside else "pip install 'transformers>=5.23,<5.24'")


def test_packages_come_from_the_project_metadata():
    packages = {package.name: package for package in run_packages()}
    assert packages.keys() >= {"numpy", "typer", "rich", "torch", "transformers", "safetensors"}
    assert not packages.keys() & {"pytest", "ruff", "mypy"}
    assert packages["transformers"].supported
    assert packages["torch"].window
