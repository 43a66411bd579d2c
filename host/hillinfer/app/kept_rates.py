# SPDX-License-Identifier: Apache-2.0
"""Keeps rates between runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hillinfer.app.rates import Rates
from hillinfer.app.rates_key import RatesKey
from hillinfer.errors import SettingsError, SetupWarning
from hillinfer.output_file import write_whole
from hillinfer.user_cache import user_cache_dir

VERSION = 2
# Models and devices that one user tries; the oldest go first.
_MOST = 64
_MOST_REASON = 200


class KeptRates:
    """Rates by what they depend on, in one small owner-only JSON file.

    Parameters
    ----------
    file
        Where; made when something is first kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def of_user(cls) -> KeptRates:
        """Return the rates in the user's cache directory."""
        return cls(user_cache_dir() / "rates.json")

    def get(self, key: RatesKey, profile: Callable[[], Rates]) -> Rates:
        """Return what is kept for a key, or profile and keep it.

        Parameters
        ----------
        key
            Rates of any other key are not used.
        profile
            Measures; called where nothing is kept.
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
