# SPDX-License-Identifier: Apache-2.0
"""A drive without direct I/O is told loudly, once, with what it costs."""

import sys
import warnings
from pathlib import Path

import pytest
from faulty_calls import WithoutDirectIO
from tiny_models import TinyModel

from hillinfer.cli.console import shown_warnings
from hillinfer.cli.preflight import Surroundings
from hillinfer.drive.files import IOMode, probe_io_mode
from hillinfer.errors import HillInferWarning, SetupWarning
from hillinfer.hf.attach import Attachment
from hillinfer.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))


def new_cache_warnings(cold_dir, calls=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = TinyModel().build()
        settings = Settings().changed(dram_budget="8MiB", cold_dir=cold_dir)
        with Attachment(model, settings, calls) as attachment:
            cache = attachment.new_cache()
            mode = cache.statistics().io_mode
            cache.close()
    return mode, [one for one in caught if issubclass(one.category, HillInferWarning)]


def test_it_warns_with_the_directory_and_the_price(cold_dir):
    mode, (warning,) = new_cache_warnings(cold_dir, WithoutDirectIO())
    assert mode == "buffered"
    assert warning.category is SetupWarning
    said = str(warning.message)
    assert said.startswith(f"{cold_dir} does not allow direct I/O: ")
    assert "the DRAM budget does not count" in said
    assert "cold_dir" in said


def test_with_direct_io_it_does_not(cold_dir):
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {cold_dir} has no direct I/O: set --basetemp to a drive")
    assert new_cache_warnings(cold_dir) == ("direct", [])


def test_the_command_says_it_once(monkeypatch, capfd, tiny_folder, cold_dir):
    from command import Command

    outcome = Command(monkeypatch, capfd)(
        *("generate", "--model", tiny_folder, "--prompt", "a cat sat on a mat. " * 9),
        *("--cold-dir", cold_dir, "--max-new-tokens", 3, "--dram-budget", "32MiB"),
        around=Surroundings(calls=WithoutDirectIO()),
    )
    assert outcome.code == 0, outcome.err
    told = [line for line in outcome.err.splitlines() if "direct I/O" in line]
    assert len(told) == 1, outcome.err
    assert told[0].startswith("hillinfer: warning: ")
    assert str(cold_dir) in told[0]
    assert "buffered I/O by" in outcome.err


def test_other_warnings_of_ours_show_as_a_line_and_once(capfd):
    with shown_warnings():
        for _ in range(3):
            warnings.warn("the price is high", HillInferWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="not ours"):
            warnings.warn("not ours", UserWarning, stacklevel=1)
    assert capfd.readouterr().err == "hillinfer: warning: the price is high\n"
