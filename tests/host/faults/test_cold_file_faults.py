# SPDX-License-Identifier: Apache-2.0
"""One file on a drive that fails: every kind of fault, at every transfer."""

import os

import numpy as np
import pytest
from faulty_calls import Fault, FaultyCalls, Injection

from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.errors import ColdPoolError

PAGES = 5
MOVED = ("pwrite", "preadv")


@pytest.fixture(params=IOMode)
def mode(request, tmp_path):
    if request.param is IOMode.DIRECT and probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O: set --basetemp to a drive")
    return request.param


def content(seed=1):
    data = aligned_buffer(PAGES * PAGE_BYTES)
    data[:] = np.random.default_rng(seed).integers(1, 256, len(data), np.uint8)
    return data


def moved_through(directory, mode, calls):
    """Write and read a file and return what was written and what came back."""
    file = ColdFile(directory, mode, "rows of layer 7", calls)
    into = aligned_buffer(PAGES * PAGE_BYTES)
    try:
        file.write(content().data, 2 * PAGE_BYTES)
        file.read(into.data, 2 * PAGE_BYTES)
    finally:
        file.close()
    return content(), into


@pytest.mark.parametrize("index", [0, None])
@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.DELAY])
@pytest.mark.parametrize("kind", MOVED)
def test_what_a_drive_may_do_changes_no_bit(tmp_path, mode, kind, fault, index):
    calls = FaultyCalls(Injection(kind, index, fault), delay_seconds=0.001)
    written, read = moved_through(tmp_path, mode, calls)
    assert calls.hits >= 1
    np.testing.assert_array_equal(written, read)


@pytest.mark.parametrize("kind", MOVED)
def test_after_an_odd_count_the_next_transfer_is_aligned(tmp_path, kind):
    if probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O: set --basetemp to a drive")
    seen = []

    class Noting(FaultyCalls):
        def _noted(self, name, descriptor, data, offset):
            seen.append((name, len(data), offset))
            return getattr(super(), name)(descriptor, data, offset)

        def pwrite(self, *args):
            return self._noted("pwrite", *args)

        def preadv(self, *args):
            return self._noted("preadv", *args)

    written, read = moved_through(
        tmp_path, IOMode.DIRECT, Noting(Injection(kind, 0, Fault.ODD), delay_seconds=0)
    )
    np.testing.assert_array_equal(written, read)
    (_, first, _), again = [one for one in seen if one[0] == kind]
    # Half less one byte of five pages ends inside the third page, which comes again as a whole.
    assert first == 5 * PAGE_BYTES
    assert again == (kind, 3 * PAGE_BYTES, (2 + 2) * PAGE_BYTES)


@pytest.mark.parametrize(
    ("fault", "reason", "fix"),
    [
        (Fault.EIO, "Input/output error", "check the drive"),
        (Fault.NOTHING, "no progress", "check the drive"),
        (Fault.ENOSPC, "No space left on device", "free space on the drive"),
        (Fault.EDQUOT, "Disk quota exceeded", "free space on the drive"),
    ],
)
@pytest.mark.parametrize("kind", MOVED)
def test_an_error_names_file_place_and_bytes(tmp_path, mode, kind, fault, reason, fix):
    verb = {"pwrite": "write", "preadv": "read"}[kind]
    with pytest.raises(
        ColdPoolError,
        match=rf"^could not {verb} 20480 bytes at 8192 of rows of layer 7 of the cold pool in "
        rf"{tmp_path} \(0 bytes done\): {reason}; {fix}.* --cold-dir \(in Python: cold_dir\)$",
    ):
        moved_through(tmp_path, mode, FaultyCalls(Injection(kind, 0, fault)))


@pytest.mark.parametrize("kind", MOVED)
def test_an_error_says_how_far_it_came(tmp_path, kind):
    class FailsLater(FaultyCalls):
        pass

    def second_fails(self, *args):
        if self.counts[kind] == 1:
            self.injection = Injection(kind, 1, Fault.EIO)
        return getattr(FaultyCalls, kind)(self, *args)

    setattr(FailsLater, kind, second_fails)
    with pytest.raises(ColdPoolError, match=r"\(10240 bytes done\): Input/output error"):
        moved_through(tmp_path, IOMode.BUFFERED, FailsLater(Injection(kind, 0, Fault.SHORT)))


def test_bytes_that_did_not_reach_the_drive_are_an_error(tmp_path):
    """Buffered writes fail after they were taken; the page would later read as zeros."""
    with pytest.raises(ColdPoolError, match=r"could not write .*rows of layer 7.*Input/output"):
        moved_through(tmp_path, IOMode.BUFFERED, FaultyCalls(Injection("fdatasync", 0, Fault.EIO)))


def test_a_failed_close_loses_nothing(tmp_path, mode):
    calls = FaultyCalls(Injection("close", None, Fault.EIO))
    written, read = moved_through(tmp_path, mode, calls)
    assert calls.hits >= 1
    np.testing.assert_array_equal(written, read)


class TestShrunkFile:
    @pytest.fixture
    def file(self, tmp_path, mode):
        file = ColdFile(tmp_path, mode, "rows of layer 2")
        file.write(content().data, 0)
        yield file
        file.close()

    def test_reading_says_how_long_it_is_and_should_be(self, file):
        os.truncate(f"/proc/self/fd/{file.descriptor}", 3 * PAGE_BYTES)
        into = aligned_buffer(4 * PAGE_BYTES)
        file.read(into[: 3 * PAGE_BYTES].data, 0)
        with pytest.raises(
            ColdPoolError,
            match=r"could not read 16384 bytes at 0 of rows of layer 2 .*\(12288 bytes done\): the "
            r"file is 12288 bytes long and should be 20480; check the drive",
        ):
            file.read(into.data, 0)

    def test_a_file_cut_inside_a_page_ends_too(self, file):
        os.truncate(f"/proc/self/fd/{file.descriptor}", 3 * PAGE_BYTES + 100)
        with pytest.raises(ColdPoolError, match=r"12388 bytes long and should be 20480"):
            file.read(aligned_buffer(PAGES * PAGE_BYTES).data, 0)

    def test_writing_on_would_hide_it_and_is_refused(self, file):
        os.truncate(f"/proc/self/fd/{file.descriptor}", PAGE_BYTES)
        with pytest.raises(
            ColdPoolError, match=r"could not write .* the file is 4096 bytes long and should be"
        ):
            file.write(content(2).data, PAGES * PAGE_BYTES)
