# SPDX-License-Identifier: Apache-2.0
"""`--io`: how the drive is read, which no answer depends on."""

import pytest
from engine_cases import SKIP, kernel_permits_rings

from hillinfer.cli.preflight import Surroundings
from hillinfer.doctor.diagnosis import diagnose
from hillinfer.drive.calls import DriveCalls
from hillinfer.settings import IOChoice

LEAST = ("--question", "which cat?", "--dram-budget", "auto", "--shadow", "int4")


class Forbidden(DriveCalls):
    """A system that lets nobody have a ring."""

    def ring_open(self, depth):
        raise PermissionError(1, "Operation not permitted")


def drive_reads(directory, calls=None):
    return next(one for one in diagnose(directory, None, calls) if one.name == "drive reads")


def test_every_choice_gives_the_same_tokens_and_is_reported(ask_tiny):
    found, engines = [], []
    choices = [one for one in IOChoice if one is not IOChoice.URING or kernel_permits_rings()]
    for choice in choices:
        outcome, report = ask_tiny(*LEAST, "--io", choice.value)
        assert report["settings"]["io"] == choice.value
        assert f"I/O by {report['io_engine']}," in outcome.err
        assert report["cold_reads"] > 0
        engines.append(report["io_engine"])
        found.append(report["answers"][0]["token_ids"])
    assert all(tokens == found[0] for tokens in found)
    assert engines == (["uring"] * 2 if kernel_permits_rings() else ["threads"]) + ["threads"]


def test_where_io_uring_is_forbidden_threads_read(ask_tiny, cold_dir):
    expected, _ = ask_tiny(*LEAST)
    outcome, report = ask_tiny(*LEAST, around=Surroundings(calls=Forbidden()))
    assert (outcome.out, report["io_engine"]) == (expected.out, "threads")
    finding = drive_reads(cold_dir, Forbidden())
    assert finding.verdict == "ok"
    assert "threads" in finding.found
    assert "no io_uring: it is forbidden here" in finding.found


@pytest.fixture
def ask_wrongly(command, tiny_folder, cold_dir, document):
    """Generate from the tiny model and return the outcome, which is an error."""

    def ask(*arguments, around=None):
        given = ("--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir)
        outcome = command("generate", *given, *LEAST, *arguments, around=around)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        return outcome.err

    return ask


def test_io_uring_by_name_is_refused_where_it_is_forbidden(ask_wrongly):
    said = ask_wrongly("--io", "uring", around=Surroundings(calls=Forbidden()))
    assert "io=uring: no io_uring, it is forbidden here" in said
    assert "choose --io auto or --io threads" in said


def test_an_unknown_choice_names_those_there_are(ask_wrongly):
    assert "choose one of auto, uring, threads" in ask_wrongly("--io", "fast")


def test_doctor_says_how_the_drive_is_read(cold_dir):
    if not kernel_permits_rings():
        pytest.skip(SKIP)
    assert drive_reads(cold_dir).found.startswith("io_uring, up to 64 reads in flight")


def test_a_sealed_cold_pool_gives_the_same_tokens_and_is_reported(ask_tiny):
    found = {}
    for choice in ("no", "yes", "auto"):
        _, report = ask_tiny(*LEAST, "--encrypt-cold-pool", choice)
        assert report["settings"]["encrypt_cold_pool"] == choice
        assert report["cold_reads"] > 0
        found[choice] = report["answers"][0]["token_ids"]
    assert found["yes"] == found["no"] == found["auto"]


def test_an_unknown_way_to_keep_the_cold_pool_names_those_there_are(ask_wrongly):
    assert "choose one of auto, yes, no" in ask_wrongly("--encrypt-cold-pool", "aes")
