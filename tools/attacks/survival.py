# SPDX-License-Identifier: Apache-2.0
"""Parts that kill commands, or take away their outputs, drives, descriptors or memory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from attacks.commands import Ended
from attacks.part import Ground, Part

KILLS = 30
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_GONE = ("/dev/full", "closed", "dead", "leaves")


def kills(ground: Ground, part: Part, rng: random.Random) -> None:
    """Kill generate and generate --save-session at random moments, and start again."""
    session = ground.folder / "session"
    for save in (False, True):
        more = ("--save-session", session) if save else ()
        arguments = ground.generate(*more)
        taken = ground.commands.run(arguments, ground.setting()).seconds
        _remove(session)
        for number in range(KILLS):
            by, after = rng.choice(_SIGNALS), rng.uniform(0, taken)
            running = ground.commands.start(arguments, ground.setting())
            time.sleep(after)
            running.send(by)
            ended = running.wait()
            again = f"{by.name} after {after:.2f} s to hillinfer {' '.join(map(str, arguments))}"
            part.ended(ended, again, more=_after_kill(ground, ended, session), sent=by)
            _remove(session)
            if number % 5 == 4:
                more_wrong = _starts_again(ground, arguments, session)
                part.count(more_wrong, f"start again after {again}")
                _remove(session)


def _after_kill(ground: Ground, ended: Ended, session: Path) -> str:
    if not ground.text.startswith(ended.out.rstrip("\n")):
        return f"wrong tokens: {ended.out!a} is no beginning of {ground.text!a}"
    if not session.exists():
        return ""
    # What has its name is whole.
    asked = ground.commands.run(
        [
            *("generate", "--model", ground.model, "--session", session, "--threads", 1),
            *("--cold-dir", ground.cold_dir, "--max-new-tokens", 6, "--question", "who sat"),
            *("--dram-budget", "24MiB"),
        ],
        ground.setting(),
    )
    if asked.out != ground.text:
        return f"a session that a killed command left is not whole: {asked}"
    return ""


def _starts_again(ground: Ground, arguments: list[object], session: Path) -> str:
    ended = ground.commands.run(arguments, ground.setting())
    if ended.out != ground.text or ended.code != 0:
        return f"wrong tokens after starting again: {ended}"
    beside = [file.name for file in ground.folder.iterdir() if file.name.startswith(".")]
    if beside:
        return f"leftover: {', '.join(beside)}"
    return ground.leftovers()


def outputs(ground: Ground, part: Part, rng: random.Random) -> None:
    """Take standard output and standard error away; the text must be in the report then."""
    timeline, trace = ground.folder / "pools.csv", ground.folder / "trace.json"
    made = ground.generate("--pool-timeline", timeline, "--trace", trace)
    ground.commands.run(made, ground.setting())
    commands: list[list[object]] = [
        ["doctor"],
        ["doctor", "--json"],
        ["models"],
        ["specs"],
        ["--help"],
        ["generate", "--help"],
        ["trace-picture", trace],
        ["pool-picture", timeline, "--out", ground.folder / "pools.png"],
    ]
    for arguments in commands:
        for stdout in _GONE:
            ended = ground.commands.run(arguments, ground.setting(stdout=stdout))
            more = ""
            if stdout == "/dev/full" and ended.code == 0:
                more = "lost text: exit 0 though standard output took nothing"
            part.ended(ended, f"hillinfer {' '.join(map(str, arguments))} >{stdout}", more=more)
    for asked in ([], ["--question", "and who else"], ["--save-session", ground.folder / "saved"]):
        for stdout, stderr in (*((one, "kept") for one in _GONE), *(("kept", one) for one in _GONE),
                               *((one, one) for one in _GONE)):  # fmt: skip
            report = ground.folder / "run.json"
            report.unlink(missing_ok=True)
            _remove(ground.folder / "saved")
            arguments = ground.generate(*asked, "--report", report)
            ended = ground.commands.run(arguments, ground.setting(stdout=stdout, stderr=stderr))
            more = _lost_text(ground, ended, report, stdout) or ground.leftovers()
            shown = f"hillinfer {' '.join(map(str, arguments))} >{stdout} 2>{stderr}"
            again = shown
            # Without standard error nobody can be told why.
            wrong = ended.wrong() if stderr == "kept" else _silent_wrong(ended)
            part.count(wrong or more, again, refused=ended.refused)
    _remove(ground.folder / "saved")


def _silent_wrong(ended: Ended) -> str:
    if ended.code in (0, 1, 2, 141):
        return ""
    return f"exit {ended.code} after {ended.seconds:.0f} s"


def _lost_text(ground: Ground, ended: Ended, report: Path, stdout: str) -> str:
    if stdout == "kept":
        return "" if ended.out.startswith(ground.text.rstrip("\n")) else "lost text: on the output"
    told = ground.answer_of(report)
    if told is None and ended.code in (2, 141) and "prefill" not in ended.err:
        # Refused before anything was read: there is no text to lose.
        return ""
    if told is None:
        return "lost text: no report"
    if not told or not ground.text.startswith(told):
        return f"lost text: the report's answer is {told!a}"
    if ended.code == 0 and stdout == "/dev/full":
        return "exit 0 though standard output took nothing"
    return ""


def drives(ground: Ground, part: Part, rng: random.Random) -> None:
    """Let drives be full: of the cold pool, of sessions, of reports."""
    mounted = ground.place("small")
    if os.geteuid() != 0 or not _mount(mounted):
        part.skipped.append("full drives: a small file system can only be mounted by root")
    else:
        try:
            for kib in (4, 64, 160, 256, 400):
                subprocess.run(["mount", "-o", f"remount,size={kib}k", str(mounted)], check=True)
                _full(ground, part, mounted, f"{kib} KiB")
        finally:
            subprocess.run(["umount", "-l", str(mounted)], check=False)
    for limit in (4096, 20_000, 60_000, 200_000):
        setting = ground.setting(limits={"RLIMIT_FSIZE": limit})
        arguments = ground.generate("--report", ground.folder / "run.json")
        # What it writes to is a file, too.
        ended = ground.commands.run(arguments, setting)
        part.ended(ended, f"ulimit -f: {limit} bytes", more=_prefix_wrong(ground, ended))


def _full(ground: Ground, part: Part, mounted: Path, size: str) -> None:
    for option, place in (
        ("--cold-dir", mounted),
        ("--save-session", mounted / "session"),
        ("--report", mounted / "run.json"),
        ("--trace", mounted / "trace.json"),
        ("--pool-timeline", mounted / "pools.csv"),
    ):
        ended = ground.commands.run(ground.generate(option, place), ground.setting())
        for file in ("run.json", "trace.json", "pools.csv"):
            (mounted / file).unlink(missing_ok=True)
        if ended.code != 0 or option != "--save-session":
            left = sorted(str(file.relative_to(mounted)) for file in mounted.rglob("*"))
        else:
            left = []
        more = f"leftover: {', '.join(left)}" if left else _prefix_wrong(ground, ended)
        part.ended(ended, f"{option} on a drive of {size}", more=more)
        for file in mounted.iterdir():
            _remove(file)


def scarce(ground: Ground, part: Part, rng: random.Random) -> None:
    """Give few descriptors, little address space, little stack."""
    session = ground.folder / "saved"
    ground.commands.run(ground.generate("--save-session", session), ground.setting())
    resumed: list[object] = [
        *("generate", "--model", ground.model, "--session", session, "--threads", 1),
        *("--cold-dir", ground.cold_dir, "--max-new-tokens", 6, "--question", "who sat"),
        *("--dram-budget", "24MiB"),
    ]
    for arguments in (ground.generate(), resumed):
        named = "resumed" if arguments is resumed else "generate"
        # Below, no Python process could have started.
        for limit in (*range(5, 40, 2), 48, 64):
            setting = ground.setting(limits={"RLIMIT_NOFILE": limit})
            ended = ground.commands.run(arguments, setting)
            more = _prefix_wrong(ground, ended)
            # Its advice must not be to throw a good document away.
            if named == "resumed" and "read the document again" in ended.err:
                more = more or f"blames the session: {ended.err.splitlines()[-1][:200]}"
            part.ended(ended, f"{named} with RLIMIT_NOFILE {limit}", more=more)
        for mib in (0, 1, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 400, 600):
            setting = ground.setting(limits={"RLIMIT_AS": mib << 20})
            ended = ground.commands.run(arguments, setting)
            part.ended(
                ended, f"{named} with {mib} MiB of address space", more=_prefix_wrong(ground, ended)
            )
    _remove(session)


def _prefix_wrong(ground: Ground, ended: Ended) -> str:
    """Say where text came that is no beginning of the right one, or the wrong one was called it."""
    text = ended.out.rstrip("\n")
    if ended.code == 0 and ended.out != ground.text:
        return f"wrong tokens: {ended.out!a}"
    if not ground.text.startswith(text):
        return f"wrong tokens: {text!a} is no beginning of {ground.text!a}"
    return ground.leftovers()


def _mount(place: Path) -> bool:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
