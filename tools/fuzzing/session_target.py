# SPDX-License-Identifier: Apache-2.0
"""The target for saved sessions: manifest and binaries."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.model_folders import files_of
from fuzzing.mutations import mutate_bytes, mutate_object, odd_value
from fuzzing.verdict import WrongAnswerError

MANIFEST = "session.json"
# A closed segment and an open one, whose last group is open.
_TOKENS = 1_100
_QUESTION = [3, 17, 40, 8, 51]
_DIGEST = "manifest_digest"


class SessionTarget:
    """A session that is answered from: with its own tokens, or not at all."""

    name = "session"

    def seeds(self) -> list[Files]:
        """Return one session of a tiny model."""
        return [dict(made_session()[0])]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change a file, and now and then every checksum along with it."""
        changed = dict(files)
        kind = rng.randrange(10)
        if kind < 4:
            content = json.loads(files[MANIFEST])
            content.pop(_DIGEST)
            changed[MANIFEST] = seal(mutate_object(rng, content))
            return changed
        name = rng.choice(list(files))
        if kind == 4:
            del changed[name]
        elif kind == 5:
            changed[rng.choice(("note.txt", "rows-0009.bin", "sub/tokens.bin"))] = b"mine"
        else:
            changed[name] = mutate_bytes(rng, files[name])
            if kind > 7 and name != MANIFEST:
                changed = resealed(changed)
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Take the session over and answer from it."""
        check_session(given, other)


def check_session(session: Path, cold_dir: Path) -> None:
    """Answer from a session.

    Raises
    ------
    WrongAnswerError
        Where what was damaged is taken, or what is whole gives other tokens.
    HillInferError
        Where the session is refused.
    """
    own, expected = made_session()
    files = files_of(session)
    whole = _is_sealed(files)
    found = _answer(session, cold_dir)
    if not whole:
        raise WrongAnswerError("a session whose checksums do not fit was taken")
    data = {name: content for name, content in own.items() if name != MANIFEST}
    given = {name: content for name, content in files.items() if name != MANIFEST}
    if given == data and found != expected:
        raise WrongAnswerError(f"other tokens came: {found} instead of {expected}")


def seal(content: Any) -> bytes:
    """Return a manifest with a digest that fits, as somebody who knows the format would."""
    text = _json(content)
    if not isinstance(content, dict):
        return text.encode()
    sealed = {**content, _DIGEST: hashlib.sha256(text.encode()).hexdigest()}
    return _json(sealed).encode() + b"\n"


def resealed(files: Files) -> Files:
    """Return the files with a manifest whose checksums fit them."""
    content = json.loads(files[MANIFEST])
    content.pop(_DIGEST)
    for name in content["digests"]:
        content["digests"][name] = hashlib.sha256(files.get(name, b"")).hexdigest()
    return {**files, MANIFEST: seal(content)}


def hostile_manifests() -> list[tuple[str, bytes]]:
    """Return sealed manifests, each with one odd value at one place, with what was changed."""
    content = json.loads(made_session()[0][MANIFEST])
    content.pop(_DIGEST)
    rng = random.Random(17)
    odd = [None, True, -1, 0, 1 << 40, 1 << 70, 0.5, "", "../x", [], {}, float("nan"), "9" * 9_999]
    found = []
    for path in _paths(content):
        for value in (*odd, odd_value(rng)):
            changed = json.loads(json.dumps(content))
            own = changed
            for key in path[:-1]:
                own = own[key]
            own[path[-1]] = value
            found.append((f"{'.'.join(path)}={str(value)[:20]!a}", seal(changed)))
    return found


def _paths(content: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(content, dict):
        return [path]
    found = [path] if path else []
    for key, value in content.items():
        found += _paths(value, (*path, key))
    return found


def _json(content: Any) -> str:
    return json.dumps(content, sort_keys=True, indent=1)


def _is_sealed(files: Files) -> bool:
    """Say whether all checksums fit, counted here and not by the product."""
    try:
        content = json.loads(files[MANIFEST])
        listed = content["digests"]
        content.pop(_DIGEST)
        return (
            seal(content) == files[MANIFEST]
            and {*listed, MANIFEST} == files.keys()
            and all(hashlib.sha256(files[name]).hexdigest() == listed[name] for name in listed)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


@cache
def _model() -> Any:
    from tiny_models import TinyModel

    return TinyModel(layers=2).build()


def _attached(cold_dir: Path) -> Any:
    import hillinfer

    return hillinfer.attach(
        _model(), cold_dir=cold_dir, dram_budget="24MiB", alpha=0.2, kept_recent=6, io_threads=2
    )


def _answer(session: Path, cold_dir: Path) -> list[int]:
    from hillinfer.generate.answering import Generation
    from hillinfer.generate.tokens import Sampling

    with _attached(cold_dir) as attachment:
        cache = attachment.load_session(session, expected_tokens=_TOKENS + 10)
        generation = Generation(_model(), cache, 64)
        try:
            generation.read(_QUESTION)
            return list(generation.decode(Sampling(), 3, frozenset()))
        finally:
            generation.close()


@cache
def made_session() -> tuple[Files, list[int]]:
    """Return the files of a session and the tokens of an answer from it."""
    with tempfile.TemporaryDirectory() as folder:
        _in_a_child(lambda: _save(Path(folder)))
        files = files_of(Path(folder) / "session")
        return files, json.loads((Path(folder) / "answer.json").read_text())


def _save(folder: Path) -> None:
    from hillinfer.generate.answering import Generation

    with _attached(folder) as attachment:
        generation = Generation(_model(), attachment.new_cache(expected_tokens=_TOKENS + 10), 512)
        generation.read([5 + (i * i + i // 7) % 50 for i in range(_TOKENS)])
        generation.cache.save_session(folder / "session")
        generation.close()
    (folder / "answer.json").write_text(json.dumps(_answer(folder / "session", folder)))


def _in_a_child(work: Any) -> None:
    """Do something in a forked process: its threads are not this one's."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("a seed could not be made: see above")
