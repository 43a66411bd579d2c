# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own server, compiled from the sources of the Python binding over its libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers.peer import LLAMA_CPP
from peers.peer_environment import PeerSkippedError

_PACKAGE = "llama-cpp-python"
_LIBRARIES = ("llama-common", "mtmd", "llama", "ggml", "ggml-base", "ggml-cpu")
_INCLUDED = (
    *("common", "include", "ggml/include", "src", "tools/mtmd", "tools/server", "vendor", "."),
)
_FLAGS = ("-std=c++17", "-O2", "-DNDEBUG", "-DLLAMA_SUBPROCESS", "-DLLAMA_SHARED", "-DGGML_SHARED")


def llama_server(build: Path, seconds: float) -> Path:
    """Return the server's program, made first where it is not there.

    The libraries that compute are those of the peer llama.cpp; what is compiled is the part above
    them, without a page, in some minutes.

    Parameters
    ----------
    build
        Where the peers' environments are.
    seconds
        Longest time that each step may take.

    Raises
    ------
    PeerSkippedError
        Where it cannot be made.
    """
    program = (build / "llama_server/llama-server").absolute()
    wanted, mark = LLAMA_CPP.requirements.read_text(), program.with_name("made-of.txt")
    LLAMA_CPP.python(build, seconds)
    if program.exists() and mark.exists() and mark.read_text() == wanted:
        return program
    libraries = next((build / LLAMA_CPP.name).absolute().glob("lib/python*/site-packages/lib"))
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise PeerSkippedError(f"llama.cpp's server is compiled here: {LLAMA_CPP.hint}")
    program.parent.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        place = Path(folder)
        sources = _sources(place, seconds)
        made = _page(sources / "tools/ui", place)
        files = [made, *sorted((sources / "tools/server").glob("*.cpp"))]
        flags = [*_FLAGS, f"-I{place}", *(f"-I{sources / one}" for one in _INCLUDED)]

        def compiled(file: Path) -> str:
            target = str(place / f"{file.stem}.o")
            _do([compiler, *flags, "-c", str(file), "-o", target], seconds)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, files))
        linked = [f"-L{libraries}", *(f"-l{one}" for one in _LIBRARIES)]
        _do(
            [
                *(compiler, "-o", str(program), *objects, *linked),
                *(f"-Wl,-rpath,{libraries}", "-pthread"),
            ],
            seconds,
        )
    mark.write_text(wanted)
    return program


def _sources(place: Path, seconds: float) -> Path:
    """Fetch the binding's sources, by their digest, and return llama.cpp's."""
    entry = next(
        part
        for part in LLAMA_CPP.requirements.read_text().replace("\\\n", " ").splitlines()
        if part.startswith(_PACKAGE)
    )
    pinned = place / "requirements.txt"
    pinned.write_text(entry)
    pip = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", _PACKAGE, "-r", str(pinned), "-d", str(place)]
    _do(pip, seconds)
    with tarfile.open(next(place.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    return next(place.glob("llama_cpp_python-*/vendor/llama.cpp"))


def _page(folder: Path, place: Path) -> Path:
    """Write what the server's page would be, with nothing in it, and return its source."""
    named = {
        "#cmakedefine LLAMA_UI_HAS_ASSETS 1": "",
        "@N_ASSETS@": "0",
        "@ASSET_ARRAYS@": "",
        "@ASSET_TABLE@": "",
        "@USE_GZIP@": "false",
    }
    for file in ("ui.h", "ui.cpp"):
        text = (folder / f"{file}.in").read_text()
        for name, value in named.items():
            text = text.replace(name, value)
        (place / file).write_text(text)
    return place / "ui.cpp"


def _do(command: list[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerSkippedError(f"{command[0]} took more than {seconds:.0f} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise PeerSkippedError(f"llama.cpp's server cannot be made: {reason}")
