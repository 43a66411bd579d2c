# SPDX-License-Identifier: Apache-2.0
"""Files that HillInfer reads from others and leaves for its user."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hillinfer.errors import HillInferError, SettingsError

# --- Reading files of others ---


def read_plain(file: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises OSError where it is none, is larger than `most_bytes`, or cannot be read; the reason is
    its `strerror`.
    """
    # A pipe does not wait for its other end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        size = checked_size(file, descriptor, most_bytes)
        # One byte more shows a file that grew since.
        return opened.read(size + 1)


def checked_size(file: Path, descriptor: int, most_bytes: int) -> int:
    """Return the size of an open regular file; errors as those of `read_plain`."""
    facts = os.fstat(descriptor)
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    if facts.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"its {facts.st_size} bytes are more than {most_bytes}", file)
    return facts.st_size


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal; OSError where it cannot be read."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# --- Writing files of a run ---

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_SCRATCH_PREFIX = ".report-"
_PAGE = bytes(4096)
# Links there stand for what a process has open, or for a part of the system; memory that looks like
# a drive is a place like any other.
_SYSTEM_LINKS = ("/dev", "/proc")
_SHARED_MEMORY = "/dev/shm"
# As the kernel follows.
_MOST_LINKS = 40
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ReportError(HillInferError):
    """A report, or another file about a run, cannot be written where it should go."""


def prepare_report(file: Path, option: str, what: str = "the report") -> None:
    """Refuse at once a place where a file cannot be written later, and make its folder.

    A page is written beside it and removed, which shows a folder that takes no files and a file
    system without room. What is there already stays as it is.

    A symbolic link in the file's place will be replaced, not followed. The `option` that named it
    and `what` it is are for the message. Raises ReportError where it cannot be written: no regular
    file is there, it is write-protected, this process has it as a standard stream, or the folder
    cannot be made or takes no file.
    """
    try:
        make_folders(file.parent)
        _check_replaceable(file, option, what)
        scratch = _scratch(file.parent, _PAGE)
        scratch.unlink()
    except OSError as error:
        raise cannot_write(file, error, option, what) from error


def cannot_write(file: Path, error: OSError, option: str, what: str = "the report") -> ReportError:
    """Return the error that says why a file cannot be written and what to do."""
    return ReportError(f"cannot write {what} to {file}: {error.strerror}; choose another {option}")


def check_apart(outputs: Iterable[tuple[str, Path | None]]) -> None:
    """Refuse two options that name the same file.

    `outputs` are options and the files that they name, None for none; a file that is read may be
    among them. Raises SettingsError where one would overwrite another.
    """
    seen: dict[str, str] = {}
    for option, file in outputs:
        if file is None:
            continue
        # realpath takes whatever a user types, loops of links and names that are too long too.
        place = os.path.realpath(file)
        if place in seen:
            raise SettingsError(
                f"{seen[place]} and {option} both name {file}: give each a file of its own"
            )
        seen[place] = option


def check_outside(
    outputs: Iterable[tuple[str, Path | None]], kept: Iterable[tuple[str, Path | None]]
) -> None:
    """Refuse what would be written into a folder whose content belongs together.

    A session with a file more is none any more, and a model with another file is another one.

    `outputs` are options and what they write; `kept` options and the folders or files that they
    name; either may be None. No option is compared with itself. Raises SettingsError where an
    output lies in one of them, or is a link that leads into it.
    """
    places = [(option, place) for option, place in kept if place is not None]
    for option, file in outputs:
        if file is None:
            continue
        # A link is replaced by some and followed by others.
        written = {Path(os.path.realpath(file)), Path(os.path.realpath(file.parent), file.name)}
        for other, place in places:
            whole = os.path.realpath(place)
            if other != option and any(one.is_relative_to(whole) for one in written):
                raise SettingsError(
                    f"{option} {file} would change {place}, which {other} names: choose another "
                    f"{option}"
                )


def write_whole(file: Path, data: bytes) -> None:
    """Write a file at one moment, whole or not at all, readable by its owner only.

    A file or a symbolic link that has the name is replaced.

    Missing folders are made, owner-only. Raises OSError where that fails; nothing is left then, and
    what was there stays.
    """
    make_folders(file.parent)
    scratch = _scratch(file.parent, data)
    try:
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=_FOLDER_MODE)
    # The umask may have taken rights from the owner, too; some file systems know no modes.
    with suppress(OSError):
        folder.chmod(_FOLDER_MODE)


def make_folders(folder: Path, make: Callable[[Path], None] = _make_folder) -> None:
    """Make a folder and what is missing above it, each for its owner only, whatever the umask.

    `make` makes one of them. Raises OSError where one cannot be made, or is there and no folder.
    """
    for one in reversed((folder, *folder.parents)):
        if not one.exists():
            # Another process may be as quick.
            with suppress(FileExistsError):
                make(one)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _check_replaceable(file: Path, option: str, what: str) -> None:
    said = _stands_for(file)
    if said is not None:
        raise ReportError(f"cannot write {what} to {file}: it {said}; choose another {option}")


def _stands_for(file: Path) -> str | None:
    """Say what is in a file's place that must not be replaced, None for nothing of that kind."""
    # To replace one of these would lose what a whole machine has for its standard output.
    open_file = "stands for an open file"
    try:
        found = file.stat()
    except FileNotFoundError:
        return open_file if _is_of_the_system(file) else None
    kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), None)
    if kind is not None:
        return f"is {kind}"
    if _is_standard_stream(found) or _is_of_the_system(file):
        return open_file
    return None if os.access(file, os.W_OK) else "is write-protected"


def _is_standard_stream(found: os.stat_result) -> bool:
    for number in range(3):
        # OSError: it is closed.
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(number)):
                return True
    return False


def _is_of_the_system(file: Path) -> bool:
    """Whether a name is a link of the system's, like /dev/stdout, or leads to one."""
    place = file
    for _ in range(_MOST_LINKS):
        # Links among the folders on the way lead to a folder, where a file is a file.
        place = Path(os.path.realpath(place.parent), place.name)
        if not place.is_symlink():
            return False
        if not place.is_relative_to(_SHARED_MEMORY) and any(
            place.is_relative_to(own) for own in _SYSTEM_LINKS
        ):
            return True
        place = place.parent / place.readlink()
    return False


def _scratch(folder: Path, data: bytes) -> Path:
    """Return a new file in a folder, with its content on the drive."""
    # mkstemp makes it owner-only from the start, whatever the umask is.
    descriptor, name = tempfile.mkstemp(prefix=_SCRATCH_PREFIX, dir=folder)
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            os.fchmod(out.fileno(), _FILE_MODE)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return path


# --- The user's cache directory ---


def user_cache_dir(*parts: str) -> Path:
    """Return a folder below the user's cache directory, which only the user can enter.

    `$XDG_CACHE_HOME/hillinfer`, or `~/.cache/hillinfer` where the variable is unset or relative
    (the XDG base directory specification ignores relative values). Every folder that is missing is
    made for its owner alone, whatever the umask; HillInfer's own folders are made so again where
    others may enter them. What lies above them is left as it is: who may write there can put
    another folder in the place of HillInfer's, but not one that belongs to this user.

    Raises SettingsError where a folder cannot be made, or one of HillInfer's belongs to another
    user.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = configured if configured.is_absolute() else Path("~/.cache").expanduser()
    folder = home
    try:
        make_folders(home)
        for name in ("hillinfer", *parts):
            folder = folder / name
            make_folders(folder)
            _keep_for_owner(folder)
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder {folder}: {error.strerror}; set XDG_CACHE_HOME to one of yours"
        ) from error
    return folder


def _keep_for_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise SettingsError(
            f"the folder {folder} belongs to user {found.st_uid}, who could change what is in it: "
            "remove it, or set XDG_CACHE_HOME to a folder of yours"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(_FOLDER_MODE)
