# SPDX-License-Identifier: Apache-2.0
"""A short run of `make fuzz`, what it found once, and proof that it sees what must not happen."""

import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FUZZ = ROOT / "tools" / "fuzz.py"
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))


@pytest.fixture
def fuzz(tmp_path, warm_python):
    """Run the fuzzer in a process of its own, because only one without other threads may fork."""

    def run(*arguments):
        report = tmp_path / "fuzz.json"
        done = subprocess.run(
            [
                *(*warm_python, FUZZ, "--out", report, "--keep", tmp_path / "kept"),
                *map(str, arguments),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text()), done

    return run


@pytest.fixture
def program(warm_python):
    """Run a program that knows the fuzzer, and return what it prints as JSON."""

    def run(text, *arguments):
        paths = f"import sys; sys.path[:0] = [{str(ROOT / 'tools')!r}]\n"
        done = subprocess.run(
            [*warm_python, "-c", paths + textwrap.dedent(text), *map(str, arguments)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=300,
        )
        return json.loads(done.stdout)

    return run


def test_a_short_run_finds_nothing(fuzz):
    report, done = fuzz("--inputs", 7)
    assert report["found"] == [], done.stdout
    assert done.returncode == 0
    assert report["worked"] + report["refused"] == report["inputs"]
    for name, counts in report["targets"].items():
        # Nothing is shown by inputs of which all work, or none.
        assert counts["worked"], name
        assert counts["refused"], name


def test_what_was_found_once_is_mended(fuzz):
    assert CORPUS
    report, done = fuzz("--replay", *CORPUS)
    assert report["found"] == [], done.stdout
    assert report["inputs"] == len(CORPUS)


PLANTED = """
import ctypes, json, os, subprocess, threading, time
from pathlib import Path
from fuzzing.fuzzer import Fuzzer
from fuzzing.sandbox import Limits
from fuzzing.verdict import WrongAnswerError
from hillinfer.errors import HillInferError

kept = []

def work(given, other): pass
def refuse(given, other): raise HillInferError("no: give another")
def fail(given, other): raise KeyError("a defect")
def spin(given, other):
    while True: pass
def sleep(given, other): time.sleep(1000)
def swallow(given, other):
    try: bytearray(1 << 40)
    except MemoryError as error: raise HillInferError("no memory") from error
def grow(given, other): kept.append(b"1" * (300 << 20))
def file(given, other): (other / "left").write_bytes(b"1")
def beside(given, other): (given / "left").write_bytes(b"1")
def descriptor(given, other): kept.append(os.open("/dev/null", os.O_RDONLY))
def thread(given, other): threading.Thread(target=time.sleep, args=[3], daemon=True).start()
def process(given, other): kept.append(subprocess.Popen(["sleep", "3"]))
def clear(given, other): raise HillInferError("no\\x1b[2J\\n\\u202e: give another")
def crash(given, other): ctypes.string_at(0)
def leave(given, other): os._exit(0)
def wrong(given, other): raise WrongAnswerError("other tokens")
def long(given, other): raise HillInferError("a" * 5000)
def empty(given, other): raise HillInferError("")

ALL = (work, refuse, fail, spin, sleep, swallow, grow, file, beside, descriptor, thread, process,
       crash, leave, wrong, long, empty, work, refuse, clear)

class Target:
    name = "planted"
    def seeds(self): return [{"number": str(n).encode()} for n in range(len(ALL))]
    def mutate(self, rng, files): raise AssertionError
    def try_one(self, given, other): ALL[int((given / "number").read_bytes())](given, other)

scratch, keep = Path(sys.argv[1]), Path(sys.argv[2])
limits = Limits(cpu_seconds=1, wall_seconds=3, peak_bytes=128 << 20)
fuzzer = Fuzzer([Target()], scratch, keep, 1, limits)
verdicts = fuzzer.verdicts([fuzzer.make("planted", n) for n in range(len(ALL))])
again = Fuzzer([Target()], scratch, keep, 1, limits).replay(sorted(keep.iterdir())[:1])
print(json.dumps({
    "kinds": [[one.__name__, found.kind] for one, found in zip(ALL, verdicts)],
    "what": {one.__name__: found.what for one, found in zip(ALL, verdicts)},
    "report": fuzzer.tally.as_json(),
    "again": [str(again[0][0].name), again[0][1].kind],
    "left": [one.name for one in scratch.iterdir()],
}))
"""


def test_planted_defects_of_every_kind_are_found(tmp_path, program):
    (tmp_path / "scratch").mkdir()
    told = program(PLANTED, tmp_path / "scratch", tmp_path / "kept")
    assert told["kinds"] == [
        *(["work", "worked"], ["refuse", "refused"], ["fail", "traceback"], ["spin", "hang"]),
        *(["sleep", "hang"], ["swallow", "memory"], ["grow", "memory"], ["file", "leak"]),
        *(["beside", "leak"], ["descriptor", "leak"], ["thread", "leak"], ["process", "leak"]),
        *(["crash", "crash"], ["leave", "crash"], ["wrong", "wrong"], ["long", "message"]),
        *(["empty", "message"], ["work", "worked"], ["refuse", "refused"], ["clear", "refused"]),
    ]
    what = told["what"]
    # As the command says it, moving no cursor.
    assert what["clear"] == r"no\x1b[2J \u202e: give another"
    assert re.match(r'SIGSEGV: File "[^/"]+/[^/"]+", line \d+ in ', what["crash"])
    assert "a defect" in what["fail"]
    assert "SIGSEGV" in what["crash"]
    assert what["descriptor"] == "left: 1 descriptors"
    assert what["thread"] == "left: 1 threads"
    assert "1 processes" in what["process"]
    report = told["report"]
    assert (report["inputs"], report["worked"], report["refused"]) == (20, 2, 3)
    assert report["findings"] == {
        "traceback": 1,
        "message": 2,
        "wrong": 1,
        "hang": 2,
        "memory": 2,
        "leak": 5,
        "crash": 2,
    }
    # Every one of them can be tried again, and gives the same.
    name, kind = told["again"]
    number = int(name.removesuffix(".json").rpartition("-")[2])
    assert kind == told["kinds"][number][1]
    assert told["left"] == []


SPOILED = """
import json, tempfile
from pathlib import Path
from fuzzing.preloaded import preload
preload()
from fuzzing.fuzzer import Fuzzer
from fuzzing.targets import TARGETS
from hillinfer.models import loader
from hillinfer.sessions.opening import SavedSession

def kinds(name, numbers):
    with tempfile.TemporaryDirectory() as scratch:
        fuzzer = Fuzzer(TARGETS, Path(scratch), Path(scratch, "kept"), 17)
        return [found.kind for found in fuzzer.verdicts(fuzzer.make(name, n) for n in numbers)]

SOME = (0, 1, 24, 31, 33)
before = kinds("session", SOME), kinds("safetensors", range(2))
SavedSession.verify = lambda self: None
load = loader.ModelOutline.load

def spoiled(self):
    loaded = load(self)
    next(iter(loaded.model.parameters())).data.view(-1)[0] += 1
    return loaded

loader.ModelOutline.load = spoiled
print(json.dumps([*before, kinds("session", SOME), kinds("safetensors", range(2))]))
"""


def test_defects_planted_in_the_product_are_found(program):
    sessions, models, unchecked, spoiled = program(SPOILED)
    assert set(sessions) == {"worked", "refused"}
    # Rows that nobody verified have no checksums, so most of them are no wrong token but a defect.
    assert not set(unchecked) <= {"worked", "refused"}
    assert (models, spoiled) == (["worked"] * 2, ["wrong"] * 2)


INPUTS = """
import hashlib, json
from pathlib import Path
from fuzzing.fuzzer import Fuzzer
from fuzzing.mutations import mutate_json

class Target:
    name = "json"
    def seeds(self): return [{"a": b'{"a": 1, "b": [1.5, "x"], "c": {"d": null}}'}]
    def mutate(self, rng, files): return {"a": mutate_json(rng, files["a"])}

def all_of(seed):
    fuzzer = Fuzzer([Target()], Path("/"), Path("/"), seed)
    return [fuzzer.make("json", n).files["a"] for n in range(400)]

told = [hashlib.sha256(b"".join(all_of(seed))).hexdigest() for seed in (1, 1, 2)]
print(json.dumps([*told, len(set(all_of(1)))]))
"""


def test_a_seed_makes_the_same_inputs_in_every_process(program):
    first, again, other, different = program(INPUTS)
    assert first == again == program(INPUTS)[0]
    assert other != first
    assert different > 250


UNPRINTABLE = """
import json
from fuzzing.verdict import of_message
from hillinfer.cli import ending

before = of_message("no\\x1b[2J").kind
ending.printable = str
print(json.dumps([before, of_message("no\\x1b[2J").kind, of_message("no").kind]))
"""


def test_a_line_that_the_command_would_not_make_printable_is_found(program):
    assert program(UNPRINTABLE) == ["refused", "message", "refused"]


DIED = """
import json
from pathlib import Path
from fuzzing.sandbox import _of_death

file = Path(sys.argv[1], "stacks.txt")
file.write_text('Traceback:\\n  File "/a/b/package/module.py", line 3, in run\\nOSError')
print(json.dumps(_of_death(3, file).what))
"""


def test_where_a_process_died_is_told_without_the_machines_paths(tmp_path, program):
    what = program(DIED, tmp_path)
    assert what == 'exit 3: Traceback:\n  File "package/module.py", line 3, in run\nOSError'


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_the_corpus_is_small_and_of_no_machine(file):
    assert file.stat().st_size < 20_000
    assert not re.search(r'"/\w', json.loads(file.read_text())["found"])
