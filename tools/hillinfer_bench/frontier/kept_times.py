# SPDX-License-Identifier: Apache-2.0
"""Times of models that earlier runs took, so that a report can be made in several sittings."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.system.files import cannot_write
from hillinfer_bench.frontier.modelled import Machine
from hillinfer_bench.frontier.report import TimedModel
from hillinfer_bench.frontier.times import TimedRow
from hillinfer_bench.report.rows import BenchRow

_ROW_FIELDS = tuple(one.name for one in fields(BenchRow) if one.name != "step_ms")


class KeptTimes:
    """A file with a line for each timed model, to which each run adds its own.

    Parameters
    ----------
    file
        Where it lies; it need not be there.
    taken_on
        What times depend on beside the model: lines of anything else are left alone.
    at_kl
        As in `TimedModel`.
    """

    def __init__(self, file: Path, taken_on: Mapping[str, Any], at_kl: float | None = None) -> None:
        self._file = file
        self._at_kl = at_kl
        if at_kl is not None:
            taken_on = {**taken_on, "at_kl": at_kl}
        # As it comes back from the file.
        self._taken_on = json.loads(json.dumps(taken_on))

    def add(self, model: TimedModel) -> None:
        """Keep the times of a model.

        Raises
        ------
        SettingsError
            Where the file cannot be written.
        """
        line = {"taken_on": self._taken_on, "when": _now(), **_record(model)}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise cannot_write(self._file, error, "--out") from error

    def others(self, names: Collection[str]) -> list[tuple[TimedModel, str]]:
        """Return the newest times of every model but some, and when they were taken."""
        found: dict[str, tuple[TimedModel, str]] = {}
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        for text in lines:
            try:
                line = json.loads(text)
                if line["taken_on"] == self._taken_on and line["name"] not in names:
                    found[line["name"]] = _model(line, self._at_kl), str(line["when"])
            except (ValueError, KeyError, TypeError):
                # Half a line, of a run that was killed, or one of another version.
                continue
        return list(found.values())


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _record(model: TimedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "real": model.real,
        "rows": [row.as_record() for row in model.rows],
        "machine": None if model.machine is None else asdict(model.machine),
    }


def _model(line: Mapping[str, Any], at_kl: float | None) -> TimedModel:
    rows = [
        TimedRow(BenchRow(**{name: row[name] for name in _ROW_FIELDS}), row["stands_for"])
        for row in line["rows"]
    ]
    machine = line["machine"]
    if machine is not None:
        shape = machine["shape"]
        stored_type = StoredType(shape["stored_type"])
        machine = Machine(**machine | {"shape": ModelShape(**shape | {"stored_type": stored_type})})
    return TimedModel(line["name"], line["real"], rows, machine, at_kl)
