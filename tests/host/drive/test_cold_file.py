# SPDX-License-Identifier: Apache-2.0
"""Files of the cold pool: nameless, owner-only, honest about what goes wrong; and their memory."""

import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from drive_fixtures import in_the_place_of
from faulty_calls import PlainFileSystem
from resident_memory import PAGES, asked_huge, taken

from hillinfer.drive.files import (
    PAGE_BYTES,
    ColdFile,
    IOMode,
    aligned_buffer,
    private_memory,
    probe_io_mode,
)
from hillinfer.errors import ColdPoolError
from hillinfer.system.kept_memory import HUGE_BYTES


@pytest.fixture
def buffered(tmp_path):
    file = ColdFile(tmp_path, IOMode.BUFFERED)
    yield file
    file.close()


def page(fill):
    buffer = aligned_buffer(PAGE_BYTES)
    buffer[:] = fill
    return buffer


@pytest.mark.parametrize("mode", IOMode)
def test_what_was_written_is_read(tmp_path, mode):
    if mode is IOMode.DIRECT and probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O: set --basetemp to a drive")
    file = ColdFile(tmp_path, mode)
    file.write(page(7).data, 3 * PAGE_BYTES)
    file.write(page(9).data, 0)
    into = aligned_buffer(4 * PAGE_BYTES)
    into[:] = 1
    file.read(into.data, 0)
    pages = into.reshape(4, PAGE_BYTES)
    assert [set(one.tolist()) for one in pages] == [{9}, {0}, {0}, {7}]
    file.close()
    file.close()


def test_it_has_no_name_and_one_owner(tmp_path, buffered):
    buffered.write(page(1).data, 0)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(buffered.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0


def test_where_nameless_files_are_unknown_the_name_goes_at_once(tmp_path):
    """Some network and stacked file systems know no nameless files."""
    file = ColdFile(tmp_path, IOMode.BUFFERED, calls=PlainFileSystem())
    file.write(page(5).data, 0)
    into = page(0)
    file.read(into.data, 0)
    assert set(into.tolist()) == {5}
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    file.close()


def test_nothing_is_left_after_a_killed_process(tmp_path):
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from hillinfer.drive.files import aligned_buffer
        from hillinfer.drive.files import ColdFile, IOMode
        file = ColdFile(Path(sys.argv[1]), IOMode.BUFFERED)
        file.write(aligned_buffer(1 << 20).data, 0)
        print("written", flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_named_with_the_way_out(tmp_path, buffered):
    with (
        in_the_place_of(buffered, "/dev/full", os.O_RDWR),
        pytest.raises(
            ColdPoolError,
            match=rf"could not write 4096 bytes at 8192 of rows of the cold pool in {tmp_path} "
            r"\(0 bytes done\): No space left on device; free space on the drive or choose another "
            r"--cold-dir",
        ),
    ):
        buffered.write(page(1).data, 8192)


def test_a_limit_on_file_sizes_is_named(tmp_path):
    """The kernel refuses the write itself; a limit cannot be raised again, hence a process."""
    program = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        from hillinfer.errors import ColdPoolError
        from hillinfer.drive.files import aligned_buffer
        from hillinfer.drive.files import ColdFile, IOMode
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        file = ColdFile(Path(sys.argv[1]), IOMode.BUFFERED)
        try:
            file.write(aligned_buffer(1 << 17).data, 0)
        except ColdPoolError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "could not write 131072 bytes" in done.stdout
    assert "choose another --cold-dir" in done.stdout


def test_reading_what_was_never_written_is_an_error(buffered):
    buffered.write(page(1).data, 0)
    with pytest.raises(
        ColdPoolError,
        match=r"read 8192 bytes at 0 .*is 4096 bytes .* should be 8192",
    ):
        buffered.read(aligned_buffer(2 * PAGE_BYTES).data, 0)


def test_a_closed_file_is_an_error(tmp_path):
    file = ColdFile(tmp_path, IOMode.BUFFERED)
    file.close()
    with pytest.raises(ColdPoolError, match="could not read"):
        file.read(page(0).data, 0)


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_a_directory_that_is_none(tmp_path, where):
    path = tmp_path / "here"
    if where == "a file":
        path.write_text("")
    for use in (probe_io_mode, lambda directory: ColdFile(directory, IOMode.BUFFERED)):
        with pytest.raises(
            ColdPoolError, match=rf"cannot keep the cold pool in {path}.*--cold-dir"
        ):
            use(path)


def test_probing_leaves_nothing_behind(tmp_path):
    assert probe_io_mode(tmp_path) in IOMode
    assert list(tmp_path.iterdir()) == []


# --- memory that drives read into ---


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not PAGES.exists(), reason="this system has no huge pages"
)
@pytest.mark.parametrize(
    ("byte_count", "huge"),
    [
        (0, 0),
        (HUGE_BYTES - 1, 2),
        (HUGE_BYTES - PAGE_BYTES, 0),
        (HUGE_BYTES, 2),
        (2 * HUGE_BYTES + 5 * PAGE_BYTES - 7, 4),
    ],
)
def test_a_buffer_asks_for_the_huge_pages_that_lie_within_it(byte_count, huge):
    buffer = aligned_buffer(byte_count)
    start = buffer.ctypes.data
    size = -(-max(byte_count, 1) // PAGE_BYTES) * PAGE_BYTES
    assert len(buffer) == size
    assert start % (HUGE_BYTES if huge else PAGE_BYTES) == 0
    asked = huge << 20
    assert asked_huge(start, start + asked) == asked
    # What lies beside them, and behind the last whole one, is none of them.
    assert asked_huge(start + asked, start + size) == 0
    assert taken(start, start + size) == 0
    buffer[:] = 7
    assert taken(start, start + size) == size


@pytest.mark.skipif(not PAGES.exists(), reason="this system has no page map")
def test_plain_memory_asks_for_no_huge_page():
    memory = np.frombuffer(private_memory(2 * HUGE_BYTES), np.uint8)
    assert asked_huge(memory.ctypes.data, memory.ctypes.data + len(memory)) == 0
