# SPDX-License-Identifier: Apache-2.0
"""Parts that change what is read: model folders, sessions, images."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

from attacks.hostile_folders import Fate, hostile_folders
from attacks.part import Ground, Part
from fuzzing.fuzz_input import FuzzInput
from fuzzing.sandbox import Limits, Sandbox
from fuzzing.session_target import MANIFEST, check_session, hostile_manifests, made_session
from fuzzing.verdict import Kind
from fuzzing.xclbin_target import check_image

SESSION_FLIPS = 500
IMAGE_FLIPS = 5_000
# Of a file's flips, so many go the whole way of a user who answers from it.
_WHOLE_WAY = 12
_MOST_MEMORY = 3 << 30


def folders(ground: Ground, part: Part, rng: random.Random) -> None:
    """Give `generate` every hostile folder."""
    for number, hostile in enumerate(hostile_folders()):
        model = ground.folder / "hostile"
        model.mkdir()
        FuzzInput("config", 0, number, hostile.files).write(model)
        hostile.spoil(model)
        setting = ground.setting(limits={"RLIMIT_AS": _MOST_MEMORY, "RLIMIT_CPU": 30})
        ended = ground.commands.run(ground.generate(model=model), setting)
        more = ""
        if ended.code == 0:
            if hostile.fate is Fate.REFUSED:
                more = f"taken, with the answer {ended.out!a}"
            elif hostile.fate is Fate.SAME and ended.out != ground.text:
                more = f"another answer: {ended.out!a}"
        planted = [file.name for file in ground.folder.iterdir() if "planted" in file.name]
        if planted:
            more = f"code ran: {planted}"
            for name in planted:
                (ground.folder / name).unlink()
        again = hostile.name
        if ended.wrong() or more:
            again += "; " + ground.keep_input("config", number, hostile.files, hostile.name)
        part.ended(ended, again, more=more or ground.leftovers())
        shutil.rmtree(model)


def manifests(ground: Ground, part: Part, rng: random.Random) -> None:
    """Answer from sessions whose sealed manifests say odd things."""
    files, _ = made_session()
    sandbox = Sandbox(ground.place("sandbox"), Limits())
    hostile = hostile_manifests()
    inputs = [
        FuzzInput("session", 0, number, {**files, MANIFEST: data})
        for number, (_, data) in enumerate(hostile)
    ]
    verdicts = sandbox.run([(one.write, check_session) for one in inputs])
    for one, (name, _), verdict in zip(inputs, hostile, verdicts, strict=True):
        wrong = "" if verdict.fine else f"{verdict.kind}: {verdict.what} {verdict.where}"
        again = f"manifest {name}"
        if wrong:
            again += "; " + ground.keep_input("session", one.number, one.files, name)
        part.count(wrong, again, refused=verdict.kind is Kind.REFUSED)


def flips(ground: Ground, part: Part, rng: random.Random) -> None:
    """Flip bits in every file of a session; each must be seen."""
    files, _ = made_session()
    sandbox = Sandbox(ground.place("sandbox"), Limits(cpu_seconds=240, wall_seconds=550))
    whole = FuzzInput("session", 0, 0, files)
    for name, content in files.items():
        if not content:
            part.skipped.append(f"flips in {name}: it is empty")
            continue
        places = [(rng.randrange(len(content)), rng.randrange(8)) for _ in range(SESSION_FLIPS)]
        attempt = partial(_flipped, name, places)
        (verdict,) = sandbox.run([(whole.write, attempt)])
        part.tried += len(places)
        if verdict.kind is Kind.WORKED:
            part.refused += len(places)
        else:
            part.wrong.append(
                {"what": f"{verdict.kind}: {verdict.what} {verdict.where}", "again": f"in {name}"}
            )


def _flipped(name: str, places: list[tuple[int, int]], given: Path, other: Path) -> None:
    """Refuse every flip, first as opening a session does, some as a user who answers from it."""
    from hillinfer.errors import HillInferError
    from hillinfer.sessions.opening import SavedSession

    file = given / name
    own = file.read_bytes()
    for number, (place, bit) in enumerate(places):
        changed = bytearray(own)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        try:
            if number < _WHOLE_WAY:
                check_session(given, other)
            else:
                with SavedSession(given) as saved:
                    saved.verify()
        except HillInferError:
            continue
        raise AssertionError(f"bit {bit} of byte {place} may be flipped")


def images(ground: Ground, part: Part, rng: random.Random) -> None:
    """Flip bits in an xclbin; what is taken must be what was built."""
    from made_xclbin import make

    content = make().pack()
    sandbox = Sandbox(ground.place("sandbox"), Limits(cpu_seconds=60, wall_seconds=300))
    tries = []
    for _ in range(IMAGE_FLIPS):
        # Half of them where the headers lie.
        most = len(content) if rng.random() < 0.5 else 700
        changed = bytearray(content)
        changed[rng.randrange(most)] ^= 1 << rng.randrange(8)
        tries.append(FuzzInput("xclbin", 0, len(tries), {"kernels.xclbin": bytes(changed)}))
    attempt = _read_image
    for one, verdict in zip(
        tries, sandbox.run([(one.write, attempt) for one in tries]), strict=True
    ):
        wrong = "" if verdict.fine else f"{verdict.kind}: {verdict.what} {verdict.where}"
        again = ""
        if wrong:
            again = ground.keep_input("xclbin", one.number, one.files, wrong)
        part.count(wrong, again, refused=verdict.kind is Kind.REFUSED)


def _read_image(given: Path, other: Path) -> None:
    check_image(given / "kernels.xclbin")
