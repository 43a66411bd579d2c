# SPDX-License-Identifier: Apache-2.0
"""The tables of mutants fit the sources, and trying one tells killed from lived.

`make mutants` tries them all.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import try_mutants
from mutants.copied_project import CopiedProject, CopyError
from mutants.mutant import Mutant
from mutants.steps.passes import EQUIVALENT
from mutants.table import MUTANTS
from mutants.trial import Outcome, Unharmed, run_tests, try_mutant

ROOT = Path(__file__).parents[1]
TESTS = """
import time
import pytest
from package import answer

def test_answer():
    assert answer(1) == 42

def test_anything():
    assert answer(1)

@pytest.mark.skip(reason="not here")
def test_elsewhere():
    assert answer(1) == 42

def test_broken():
    assert answer(1) == 43

@pytest.mark.parametrize("times", [1, 2])
def test_several(times):
    assert answer(times) == 42 * times
"""
WRONG = Mutant(
    name="wrong-answer",
    fault="The answer is one more.",
    file="sw_model/package.py",
    original="return 42 * times",
    changed="return 42 * times + 1",
    killers=("tests/test_package.py::test_answer",),
)


def killed_by(*tests, **changes):
    killers = tuple(f"tests/test_package.py::{test}" for test in tests)
    return replace(WRONG, killers=killers, **changes)


CASES = {
    "killed": (killed_by("test_answer"), Outcome.KILLED),
    "killed by one parameter": (killed_by("test_several[2]"), Outcome.KILLED),
    "killed by a file": (replace(WRONG, killers=("tests/test_other.py",)), Outcome.KILLED),
    "lived": (killed_by("test_anything"), Outcome.LIVED),
    "skipped": (killed_by("test_elsewhere"), Outcome.SKIPPED),
    "fails anyway": (killed_by("test_broken"), Outcome.UNCLEAR),
    "no such test": (killed_by("test_nothing"), Outcome.UNCLEAR),
    "text not there": (killed_by("test_answer", original="return 41"), Outcome.UNCLEAR),
    "no Python any more": (killed_by("test_answer", changed="return ("), Outcome.UNCLEAR),
    "dead": (killed_by("test_answer", changed="__import__('os').abort()"), Outcome.KILLED),
}


@cache
def text_of(file):
    """Return a file of the project; mutants share files, and so do their killers."""
    return (ROOT / file).read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_sources(mutant):
    text, changed = text_of(mutant.file), mutant.applied_to(text_of(mutant.file))
    assert changed != text
    if mutant.file.endswith(".py"):
        # What is no Python any more fails whatever is tested, which says nothing.
        compile(changed, mutant.file, "exec")
    assert mutant.fault.endswith(".")
    assert mutant.killers
    for killer in mutant.killers:
        file, _, test = killer.partition("::")
        assert (ROOT / file).is_file(), killer
        assert f"def {test.split('[')[0]}" in text_of(file), killer


def test_every_killer_is_there(request, collected_tests):
    """With its parameters, as far as this run collects their files."""
    there = {
        (
            str(item.path.relative_to(ROOT)),
            f"{item.cls.__name__}::{item.name}" if item.cls else item.name,
        )
        for item in collected_tests
    }
    functions = {(file, name.partition("[")[0]) for file, name in there}
    killers = {killer.partition("::")[::2] for mutant in MUTANTS for killer in mutant.killers}
    named = {(file, test) for file, test in killers if "[" in test}
    collected = {
        (file, test) for file, test in named if (file, test.partition("[")[0]) in functions
    }
    if not collected or any("[" in argument for argument in request.config.args):
        pytest.skip("this run collects no file of a killer with parameters: run all tests")
    assert collected - there == set()


def test_names_are_there_once():
    names = Counter(one.name for one in (*MUTANTS, *EQUIVALENT))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_text_that_is_there_twice_or_not_is_refused():
    for text in ("", f"{WRONG.original}\n{WRONG.original}"):
        with pytest.raises(ValueError, match=r"wrong-answer: its original text occurs \d times"):
            WRONG.applied_to(text)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy of a small project and how its tests do without a fault."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "sw_model").mkdir()
    (folder / "sw_model/package.py").write_text("def answer(times):\n    return 42 * times\n")
    # As in this project's: plugins of other packages take seconds to import.
    options = '[tool.pytest.ini_options]\naddopts = "--disable-plugin-autoload"\n'
    (folder / "pyproject.toml").write_text(options)
    (folder / "tests").mkdir()
    (folder / "tests/test_package.py").write_text(TESTS)
    (folder / "tests/test_other.py").write_text(TESTS.replace("== 43", "in (42, 43)"))
    copied = CopiedProject(folder)
    _, cases = run_tests(copied, ["tests"], None)
    return copied, cases


@pytest.mark.parametrize("case", CASES)
def test_what_becomes_of_a_mutant(case, small):
    copied, cases = small
    mutant, outcome = CASES[case]
    result = try_mutant(copied, mutant, Unharmed(cases))
    assert result.outcome is outcome, result
    assert (copied.folder / mutant.file).read_text().endswith(f"{WRONG.original}\n")


@pytest.mark.parametrize(
    ("file", "variant"),
    [
        ("host/native/coded_rows_avx512.h", "avx512vnni"),
        ("host/native/neon_dot.cpp", "neon"),
        ("host/native/coded_block.h", None),
    ],
)
def test_a_fault_of_a_variant_that_the_processor_lacks_is_skipped(file, variant, small):
    _, cases = small
    mutant = replace(killed_by("test_answer"), file=file)
    assert mutant.variant == variant
    assert Unharmed(cases, ["portable", variant]).verdict(mutant) is None
    found = Unharmed(cases, ["portable"]).verdict(mutant)
    if variant is None:
        assert found is None
    else:
        told = (Outcome.SKIPPED, f"this processor has no {variant}")
        assert (found.outcome, found.reason) == told


def test_a_test_that_is_not_there_stops_no_other(small):
    copied, _ = small
    missing = ["tests/test_package.py::test_nothing", "tests/test_none.py"]
    for tests in ([*missing, "tests/test_package.py::test_answer"], missing):
        status, cases = run_tests(copied, tests, None)
        ran = [case.name for case in cases]
        assert (status, ran) == ((0, ["test_answer"]) if len(tests) > 2 else (4, []))


class Hasty(Unharmed):
    """Takes every test for one that hangs after three seconds."""

    def limit(self, mutant):
        return 3.0


def test_a_mutant_that_hangs_is_ended_and_counts_as_killed(small):
    copied, cases = small
    unharmed = Hasty(cases)
    hanging = killed_by("test_answer", changed="__import__('time').sleep(600)")
    result = try_mutant(copied, hanging, unharmed)
    assert result.outcome is Outcome.TIMED_OUT
    told = try_mutants.report([result])
    assert (told["killed"], told["lived"], told["timed_out"]) == (1, [], ["wrong-answer"])
    json.dumps(told)


def test_packages_of_elsewhere_are_refused(small):
    copied, _ = small
    with pytest.raises(CopyError, match="which is not in the copy"):
        copied.check_packages()


def test_an_unknown_name_is_told():
    command = [sys.executable, str(ROOT / "tools/try_mutants.py"), "--only", "no such mutant"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no mutant's name contains no such mutant" in done.stderr
