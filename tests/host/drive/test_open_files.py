# SPDX-License-Identifier: Apache-2.0
"""Files that share descriptors are opened again when they are read, and closed when they rest."""

import errno
import os
import resource
import threading

import pytest

from hillinfer.drive.shared_files import OpenFiles, ReopenedFile


class RefusedError(Exception):
    pass


class Opened:
    """Files of these names; counts what is open."""

    def __init__(self, folder, names, most=2):
        self.open = []
        self.error = None
        self.shared = OpenFiles(most)
        self.files = {}
        for name in names:
            (folder / name).write_text(name)
            opening = self._opening(folder / name)
            self.files[name] = ReopenedFile(opening(), opening, RefusedError, self.close)

    def _opening(self, path):
        def opened():
            if self.error is not None:
                raise self.error
            self.open.append(os.open(path, os.O_RDONLY))
            return self.open[-1]

        return opened

    def close(self, descriptor):
        self.open.remove(descriptor)
        os.close(descriptor)

    def share(self):
        for file in self.files.values():
            file.share(self.shared)

    def read(self, name):
        return self.files[name].lend(lambda descriptor: os.pread(descriptor, 9, 0)).decode()


@pytest.fixture
def opened(tmp_path):
    made = Opened(tmp_path, "abcdef")
    yield made
    for file in made.files.values():
        file.close()
    assert made.open == []


def test_files_stay_open_until_they_share_descriptors(opened):
    assert len(opened.open) == 6
    opened.share()
    assert len(opened.open) == 2
    for name in "abcfeddcbaafab":
        assert opened.read(name) == name
        assert len(opened.open) == 2


def test_the_longest_unused_is_closed(opened):
    opened.share()
    for name in "abab":
        opened.read(name)
    before = list(opened.open)
    opened.read("b")
    opened.read("a")
    assert opened.open == before
    opened.read("c")
    opened.read("a")
    assert len({*opened.open} & {*before}) == 1


def test_what_is_read_now_is_not_closed(opened):
    opened.share()

    def nested(names, held):
        if not names:
            assert len(opened.open) == 6
            for name, descriptor in held.items():
                assert os.pread(descriptor, 9, 0).decode() == name
            return
        opened.files[names[0]].lend(
            lambda descriptor: nested(names[1:], held | {names[0]: descriptor})
        )

    nested("abcdef", {})
    assert len(opened.open) == 2


def test_a_file_that_is_closed_while_it_is_read_goes_afterwards(opened):
    opened.share()

    def read(descriptor):
        opened.files["a"].close()
        opened.files["a"].close()
        return os.pread(descriptor, 9, 0)

    assert opened.files["a"].lend(read) == b"a"
    assert len(opened.open) == 1
    for _ in range(2):
        with pytest.raises(RefusedError, match="Bad file descriptor"):
            opened.read("a")


def test_a_descriptor_that_was_asked_for_stays(opened):
    opened.share()
    descriptor = opened.files["a"].pin()
    for name in "bcdefbcdef":
        assert opened.read(name) == name
        assert len(opened.open) == 3
    assert os.pread(descriptor, 9, 0) == b"a"
    assert opened.files["a"].pin() == descriptor


def test_one_that_cannot_be_opened_again_says_why_and_others_can(opened):
    opened.share()
    opened.read("f")
    opened.error = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    with pytest.raises(RefusedError, match="No such file"):
        opened.read("a")
    assert opened.read("f") == "f"
    opened.error = None
    assert opened.read("a") == "a"


def test_where_descriptors_are_short_those_that_rest_make_room(opened):
    opened.share()
    opened.read("f")
    opened.error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with pytest.raises(RefusedError, match="Too many open files"):
        opened.read("a")
    assert opened.open == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_of_whoever_reads_is_its_own(opened, error):
    opened.share()

    def broken(descriptor):
        raise error

    with pytest.raises(error):
        opened.files["a"].lend(broken)
    for name in "bcd":
        opened.read(name)
    assert len(opened.open) == 2


def test_threads_that_read_at_once(opened):
    opened.share()
    wrong = []

    def read(start):
        for at in range(300):
            name = "abcdef"[(at * start + start) % 6]
            if opened.read(name) != name:
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(start,)) for start in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(opened.open) == 2


def test_a_process_gives_a_quarter_of_its_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert OpenFiles.of_process().most == min(soft, 512) // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
