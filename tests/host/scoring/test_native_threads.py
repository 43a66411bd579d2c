# SPDX-License-Identifier: Apache-2.0
"""Reading memory, and threads that the system refuses: fewer go on, with the same result."""

import json
import subprocess
import sys

import numpy as np
import pytest

from hillinfer.native.library import Variant, native_library
from hillinfer_bench.native_reads import read_sum

# A thread's stack is 8 MiB of addresses: with room for some, later ones are refused. Memory that is
# read is there before the limit.
CHILD = """
import json, resource, sys
import numpy as np
from hillinfer.native.library import Variant
from hillinfer_bench.native_reads import read_sum

room, threads = int(sys.argv[1]), int(sys.argv[2])
read_sum(Variant.PORTABLE, 0, 0, 1)
memory = np.arange(8 << 20, dtype=np.uint64)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))
if room >= 0:
    resource.setrlimit(resource.RLIMIT_AS, (held + room, held + room))
found = [
    read_sum(Variant.PORTABLE, memory.ctypes.data, memory.nbytes, threads)
    for _ in range(3)
]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([found, int(memory.sum()), int(status["Threads"])]))
"""

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc says how many threads run")


def child(room, threads):
    """Sums found, the sum, and the threads at the end, of a process with so many bytes of room."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(room), str(threads)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_linux
@pytest.mark.parametrize("room_mib", [1, 40])
def test_refused_threads_leave_the_work_to_the_others(room_mib):
    found, expected, threads = child(room_mib << 20, 60)
    assert found == [expected] * 3
    assert threads < 60


@needs_linux
def test_without_a_limit_they_all_start():
    found, expected, threads = child(-1, 60)
    assert found == [expected] * 3
    assert threads >= 60


@needs_linux
def test_no_call_starts_more_threads_than_items():
    found, expected, threads = child(-1, 2**31 - 1)
    assert found == [expected] * 3
    assert threads < 100


@pytest.mark.parametrize("variant", Variant)
def test_every_word_is_read_once(variant):
    """Of whole kilobytes, over more than one piece of a thread's work."""
    if variant not in native_library().variants:
        pytest.skip(f"this processor has no {variant.value}")
    memory = np.random.default_rng(1).integers(0, 2**40, 300_032, dtype=np.uint64)
    for threads in (1, 3):
        found = read_sum(variant, memory.ctypes.data, memory.nbytes, threads)
        assert found == int(memory.sum())
        memory[memory.size - threads] += 1
        assert found != int(memory.sum())
