# SPDX-License-Identifier: Apache-2.0
"""The target for a card's image and the variables beside it."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.mutations import dump, mutate_bytes, mutate_json, mutate_object, odd_value
from fuzzing.verdict import WrongAnswerError

_IMAGE, _VARIABLES = "kernels.xclbin", "environment.json"
# What lets a file of the folder's owner decide what runs in this user's processes.
FORBIDDEN = (
    *("LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "PYTHONHOME", "PATH", "BASH_ENV", "HOME"),
    *("PYTHONINSPECT", "PYTHONBREAKPOINT", "GCONV_PATH", "NODE_OPTIONS", "PERL5OPT"),
)


class XclbinTarget:
    """An xclbin, read as `doctor --xclbin` and a run read it, and its environment.json."""

    name = "xclbin"

    def seeds(self) -> list[Files]:
        """Return an emulated card's image with variables, and a card's own."""
        from made_xclbin import make

        from hillinfer.devices.xrt.xclbin import HARDWARE

        variables = {"XCL_EMULATION_MODE": "hw_emu", "XILINX_XRT": "/opt/xrt"}
        return [
            {_IMAGE: make().pack(), _VARIABLES: json.dumps(variables).encode()},
            {_IMAGE: make(mode=HARDWARE).pack()},
        ]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change bytes, a section with its checksum, or the variables."""
        changed = dict(files)
        kind = rng.randrange(10)
        if kind < 5:
            changed[_IMAGE] = mutate_bytes(rng, files[_IMAGE], rng.choice((460, 700, None)))
        elif kind < 8 or _VARIABLES not in files:
            changed[_IMAGE] = _changed_section(rng, files[_IMAGE])
        elif kind == 8:
            variables = json.loads(files[_VARIABLES])
            variables[rng.choice(FORBIDDEN)] = "/tmp/planted"
            changed[_VARIABLES] = json.dumps(variables).encode()
        else:
            changed[_VARIABLES] = mutate_json(rng, files[_VARIABLES])
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Read everything that is read before a card is asked."""
        check_image(given / _IMAGE)


def check_image(image: Path) -> None:
    """Read an xclbin, its lists and its variables.

    Raises
    ------
    WrongAnswerError
        Where what is taken is not what was built.
    HillInferError
        Where it is refused.
    """
    from made_xclbin import PLATFORM, SPEC

    from hillinfer.devices.xrt.process import environment_of
    from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, check_xclbin, recorded_spec
    from hillinfer_hw.xclbin_sections import unpack_banks, unpack_connections, unpack_instances

    name = str(image)
    xclbin = Xclbin.read(image)
    spec = recorded_spec(xclbin, name)
    # First as doctor does, which knows no model, then as a run.
    check_xclbin(xclbin, spec, xclbin.platform, name)
    check_xclbin(xclbin, SPEC, PLATFORM, name)
    if spec.digest() != SPEC.digest():
        raise WrongAnswerError(f"kernels of {spec} were taken for those of {SPEC}")
    record = json.loads(xclbin.sections[SectionKind.USER_METADATA])
    for kind, expected in record["sections"].items():
        if hashlib.sha256(xclbin.sections[int(kind)]).hexdigest() != expected:
            raise WrongAnswerError(f"section {kind} is not what was built")
    for kind, unpack in (
        (SectionKind.MEM_TOPOLOGY, unpack_banks),
        (SectionKind.IP_LAYOUT, unpack_instances),
        (SectionKind.CONNECTIVITY, unpack_connections),
    ):
        if kind in xclbin.sections:
            unpack(xclbin.sections[kind], name)
    variables = environment_of(image)
    if set(variables) & set(FORBIDDEN):
        raise WrongAnswerError(f"environment.json may set {min(set(variables) & set(FORBIDDEN))}")
    for key, value in variables.items():
        if not key or "=" in key or "\0" in key + value:
            raise WrongAnswerError(f"environment.json may set {key!a} to {value[:40]!a}")


def _changed_section(rng: random.Random, data: bytes) -> bytes:
    from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin

    xclbin = Xclbin.unpack(data, "seed")
    sections: dict[int, bytes] = dict(xclbin.sections)
    record: Any = json.loads(sections[SectionKind.USER_METADATA])
    kind = rng.choice(list(sections))
    if kind == SectionKind.USER_METADATA:
        if rng.random() < 0.5:
            record["spec"][rng.choice(list(record["spec"]))] = odd_value(rng)
        else:
            record = mutate_object(rng, record)
    else:
        sections[kind] = mutate_bytes(rng, sections[kind])
        if rng.random() < 0.7:
            record["sections"][str(int(kind))] = hashlib.sha256(sections[kind]).hexdigest()
    sections[SectionKind.USER_METADATA] = dump(rng, record)
    return replace(xclbin, sections=sections).pack()
