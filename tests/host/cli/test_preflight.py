# SPDX-License-Identifier: Apache-2.0
"""What is checked before a run is what the run does."""

import pytest

from hillinfer.cli.preflight import Surroundings
from hillinfer.devices.opening import DEVICES, GoldenScorer
from hillinfer.errors import SettingsError
from hillinfer_model.choices import KeyMode

INT4_NEEDED = ("--device", "golden", "--max-new-tokens", 2)


class OnlyInt4:
    """A device that knows one format; lists those that it is opened with."""

    def __init__(self):
        self.opened = []
        self.around = Surroundings(devices=DEVICES | {"golden": self.open})

    def open(self, spec, scope, *_):
        self.opened.append(spec.key_mode)
        if spec.key_mode is not KeyMode.INT4:
            raise SettingsError(f"an image for int4, not {spec.key_mode.value}")
        return GoldenScorer(spec, scope)


def test_a_device_is_checked_with_the_format_that_auto_takes(ask_tiny):
    device = OnlyInt4()
    _, report = ask_tiny(*INT4_NEEDED, "--dram-budget", "64MiB", around=device.around)
    assert report["settings"]["shadow"] == "int4"
    assert len(device.opened) > 1
    assert set(device.opened) == {KeyMode.INT4}


@pytest.mark.parametrize(("given", "found"), [("int4", None), ("int8", "int8")])
def test_a_device_is_checked_with_the_format_of_a_session(
    ask_tiny, command, tiny_folder, cold_dir, tmp_path, given, found
):
    device = OnlyInt4()
    session = tmp_path / "session"
    ask_tiny("--save-session", session, "--shadow", given, "--max-new-tokens", 1)
    outcome = command(
        *("generate", "--model", tiny_folder, "--cold-dir", cold_dir, "--session", session),
        *("--question", "which cat?", *INT4_NEEDED),
        around=device.around,
    )
    assert device.opened[0].value == given
    if found is None:
        assert outcome.code == 0, outcome.err
    else:
        assert "an image for int4, not int8" in outcome.error_line()


def test_a_fork_is_counted_with_the_widest_format_that_auto_takes(ask_tiny, tmp_path):
    text = tmp_path / "text"
    text.write_text("cat")

    def fork_bytes(*arguments):
        """Return what the least budget grows by where the document is forked once more."""
        # Chunks of one token: the open segment is coded, and copied by a fork.
        asked = ("--prompt-file", text, "--prefill-chunk", 1, "--max-new-tokens", 1, *arguments)
        one, other = ("--question", "who?"), ("--question", "why?")
        alone, both = (
            ask_tiny(*asked, *questions)[1]["dram_budget_bytes"]
            for questions in (one, (*one, *other))
        )
        return both - alone

    unnamed = fork_bytes()
    assert unnamed == fork_bytes("--shadow", "int4")
    assert 0 < unnamed < fork_bytes("--shadow", "int8")
