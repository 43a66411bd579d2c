# SPDX-License-Identifier: Apache-2.0
"""How fast this machine scores and transfers rows: rates, what they depend on, their file."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hillinfer.drive.directories import filesystem_of
from hillinfer.errors import SettingsError, SetupWarning
from hillinfer.native.library import LIBRARY
from hillinfer.system.files import sha256_of, user_cache_dir, write_whole
from hillinfer.system.machine import ProcessorFacts
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

# --- Rates ---


@dataclass(frozen=True)
class Rates:
    """The four constants of equation 2 (HillInfer section 4.3), of one layer, and one more.

    The paper counts bytes of KV. Here a token is scored by its shadow and transferred as a row,
    which differ in size, so all four count tokens, whose quotients are the same. What sharing costs
    a step, however few the tokens, is in none of them.

    Raises SettingsError where one is negative or no number.

    Parameters
    ----------
    f_c
        Tokens per second that the host scores.
    f_s
        Tokens per second that the device scores; 0 where there is none.
    b_c
        Tokens per second whose rows are copied out of the hot pool.
    b_s
        Tokens per second whose rows are read from the drive, scattered.
    sharing
        Seconds of a step in which a device scores, beyond scoring and beyond what the host alone
        takes: the launch, and merging both sides' scores.
    """

    f_c: float
    f_s: float
    b_c: float
    b_s: float
    sharing: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no rate; 0 (never) and infinity (at once) are."""
        for one in fields(self):
            value = getattr(self, one.name)
            # Not `< 0`, which would let NaN through.
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise SettingsError(f"{one.name}={value!r} is no rate: it must be 0 or more")


def seconds_of(tokens: float, rate: float) -> float:
    """Return how long tokens take at a rate; nothing takes no time, even at rate 0."""
    if not tokens:
        return 0.0
    return math.inf if rate == 0 else tokens / rate


# --- What rates depend on ---


@dataclass(frozen=True)
class RatesKey:
    """Machine, kernel and device that rates were measured with.

    Parameters
    ----------
    processor, cores, threads
        Its name, cores this process may use and compute threads.
    filesystem, drive
        Of the cold directory: the type of the file system and the number of its device.
    io
        Read engine: `uring` or `threads`.
    library
        SHA-256 of the native library.
    spec_hash, scope, row_bytes
        What is scored and what a row takes.
    device
        Name in the table of devices.
    xclbin
        SHA-256 of the image of the card's kernels; empty where there is none.
    """

    processor: str
    cores: int
    threads: int
    filesystem: str
    drive: str
    io: str
    library: str
    spec_hash: str
    scope: str
    row_bytes: int
    device: str
    xclbin: str

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        scope: Scope,
        row_bytes: int,
        cold_dir: Path,
        io: str,
        threads: int,
        device: str,
        xclbin: Path | None,
    ) -> RatesKey:
        """Look at this machine.

        `cold_dir` exists, `io` is the name of the read engine, and `device` and `xclbin` are as in
        the settings; the image must be readable.
        """
        processor = ProcessorFacts.read()
        return cls(
            processor=processor.name,
            cores=processor.cores,
            threads=threads,
            filesystem=filesystem_of(cold_dir),
            drive=str(cold_dir.stat().st_dev),
            io=io,
            library=sha256_of(LIBRARY),
            spec_hash=spec.digest().hex(),
            scope=scope.value,
            row_bytes=row_bytes,
            device=device,
            xclbin="" if xclbin is None else sha256_of(xclbin),
        )


# --- The file of rates ---

VERSION = 2
# Models and devices that one user tries; the oldest go first.
_MOST = 64
_MOST_REASON = 200


class KeptRates:
    """Rates by what they depend on, in one small owner-only JSON file.

    The file is made when something is first kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def of_user(cls) -> KeptRates:
        """Return the rates in the user's cache directory."""
        return cls(user_cache_dir() / "rates.json")

    def get(self, key: RatesKey, profile: Callable[[], Rates]) -> Rates:
        """Return what is kept for a key, or profile and keep it.

        Rates of any other key are not used.
        """
        kept = dict(self.all())
        if key in kept:
            return kept[key]
        made = profile()
        # Another process may have kept something while this one measured.
        try:
            self._write({**dict(self.all()), key: made})
        except OSError as error:
            warnings.warn(
                f"the rates just measured cannot be kept in {self.file} ({error.strerror}): every "
                "run measures them; make room there, or set XDG_CACHE_HOME to a folder of yours",
                SetupWarning,
                stacklevel=2,
            )
        return made

    def all(self) -> list[tuple[RatesKey, Rates]]:
        """Return all that is kept, oldest first; nothing, with a warning, from a damaged file."""
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            return self._damaged(str(error))
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                # Another version of HillInfer's: nothing is wrong with it.
                return []
            return [(_key(one["key"]), _rates(one["rates"])) for one in content["rates"]]
        except (ValueError, TypeError, KeyError, SettingsError, RecursionError) as error:
            return self._damaged(f"{type(error).__name__}: {error}")

    def _damaged(self, reason: str) -> list[tuple[RatesKey, Rates]]:
        # What comes from the file may be of any length, and may be what terminals obey.
        shown = "".join(one if one.isprintable() else "?" for one in reason[:_MOST_REASON])
        warnings.warn(
            f"the kept rates in {self.file} cannot be used ({shown}): they are measured again; "
            "delete the file if this comes back",
            SetupWarning,
            stacklevel=4,
        )
        return []

    def _write(self, rates: dict[RatesKey, Rates]) -> None:
        content = {
            "version": VERSION,
            "unit": "tokens/s of one layer; sharing: seconds of a step of one layer",
            "label": "measured on this machine",
            "rates": [
                {"key": asdict(key), "rates": asdict(one)}
                for key, one in list(rates.items())[-_MOST:]
            ],
        }
        write_whole(self.file, json.dumps(content, indent=1).encode())


def _key(content: dict[str, object]) -> RatesKey:
    key = RatesKey(**content)  # type: ignore[arg-type]
    for name, kind in RatesKey.__annotations__.items():
        if type(getattr(key, name)).__name__ != kind:
            raise ValueError(f"{name}={getattr(key, name)!r} is no {kind}")
    return key


def _rates(content: dict[str, float]) -> Rates:
    # What is missing was not measured, whatever stands for it elsewhere.
    if not isinstance(content, dict) or content.keys() != Rates.__annotations__.keys():
        raise ValueError(f"rates {content!r} are not {', '.join(Rates.__annotations__)}")
    return Rates(**content)
