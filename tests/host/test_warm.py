# SPDX-License-Identifier: Apache-2.0
"""A program that is forked is to its caller what a started one is: each case runs both ways."""

import os
import resource
import signal
import subprocess
import sys

import pytest

TEXT = "import os, sys, signal, resource\n"


@pytest.fixture(params=["started", "forked"])
def python(request):
    return (
        (sys.executable,) if request.param == "started" else request.getfixturevalue("warm_python")
    )


def ran(python, text, *arguments, **options):
    done = subprocess.run(
        [*python, "-c", TEXT + text, *arguments],
        capture_output=True, text=True, check=False, timeout=60, **options,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_what_it_is_told_and_what_it_says(python, tmp_path):
    told = {"cwd": tmp_path, "env": os.environ | {"SAID": "so"}, "input": "in\n"}
    text = (
        "print(sys.argv, os.getcwd(), os.environ['SAID'], sys.stdin.read().strip(), __name__)\n"
        "print('err', file=sys.stderr)"
    )
    expected = f"['-c', 'a', 'b'] {tmp_path} so in __main__\n"
    assert ran(python, text, "a", "b", **told) == (0, expected, "err\n")


def test_a_script_knows_its_place(python, tmp_path):
    (tmp_path / "beside.py").write_text("FOUND = 7")
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom beside import FOUND\nprint(FOUND, sys.argv[1:], __file__)")
    done = subprocess.run([*python, script, "x"], capture_output=True, text=True, check=True)
    assert done.stdout == f"7 ['x'] {script}\n"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os._exit(9)", 9, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_how_it_ends(python, text, status, said):
    found, _, err = ran(python, text)
    assert found == status, err
    assert said in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_it(python, number):
    # A signal that comes between looking for one and `pause` would be waited for again.
    text = (
        f"signal.signal({number}, lambda *_: sys.exit(5))\nprint('now', flush=True)\n"
        "while True: signal.sigtimedwait([], 0.02)"
    )
    with subprocess.Popen([*python, "-c", TEXT + text], stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"now\n"
        running.send_signal(number)
        assert running.wait(60) == 5


def test_a_kill_ends_it_too(python):
    text = "print('now', flush=True)\nsignal.pause()"
    with subprocess.Popen([*python, "-c", TEXT + text], stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"now\n"
        running.kill()
        # Its end of the pipe closes with it.
        assert running.stdout.read() == b""
        assert running.wait(60) == -signal.SIGKILL


def test_limits_streams_and_mask_are_the_callers(python):
    def prepare():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 8192))
        os.umask(0o027)
        os.close(2)

    text = (
        "before = os.umask(0)\n"
        "print(resource.getrlimit(resource.RLIMIT_FSIZE), oct(before), sys.stderr)"
    )
    assert ran(python, text, preexec_fn=prepare)[1] == "(4096, 8192) 0o27 None\n"


def test_only_the_forked_one_finds_torch_imported(warm_python):
    text = "print('torch' in sys.modules)"
    assert ran((sys.executable,), text)[1] == "False\n"
    assert ran(warm_python, text)[1] == "True\n"
