# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench study`: its parts, its report, and going on with an earlier one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hillinfer.doctor.finding import python_version, run_packages
from hillinfer.errors import SettingsError, reason_of
from hillinfer.generate.run_report import json_bytes
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.system.files import cannot_write, prepare_report, read_plain, write_whole
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads
from hillinfer_bench.quality.forced_reading import compute_threads
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.study.accuracy import (
    Answers,
    accuracy_table,
    answer_questions,
    by_depth,
)
from hillinfer_bench.study.beside_full import beside_full, beside_full_table
from hillinfer_bench.study.figures import modelled_record, modelled_table
from hillinfer_bench.study.measured import DECODE_FILE, measured_record, measured_table
from hillinfer_bench.study.pictures import write_pictures
from hillinfer_bench.study.tasks import TaskPlan
from hillinfer_bench.study.ways import study_ways


class Part(StrEnum):
    """What a run makes."""

    MODELLED = "modelled"
    """Figures 12 to 16 for the paper's machine, from rates."""
    MEASURED = "measured"
    """Figures 12 to 16 as `hillinfer-bench decode --plan paper` measured them here."""
    ACCURACY = "accuracy"
    """Figure 11 with a model that is here."""


def parse_parts(text: str) -> tuple[Part, ...]:
    """Return the parts that a text names, with commas between.

    Raises
    ------
    SettingsError
        Where it names something else, or one twice.
    """
    names = text.split(",")
    if not set(names) <= set(Part) or len({*names}) < len(names):
        raise SettingsError(f"--parts {text}: write some of {','.join(Part)}, each once")
    return tuple(map(Part, names))


@dataclass(frozen=True)
class StudyRequest:
    """Options of one run.

    Parameters
    ----------
    parts
        What is made; what an earlier run made of other parts stays in the report.
    model
        The model whose answers are scored.
    plan
        What it is asked.
    minutes
        After so much time no further question is asked.
    threads
        Compute threads; None for one.
    out
        Where the JSON goes, and what is known is taken from.
    only, ways
        Beginnings of the names of questions that are asked, and of the titles of ways that answer
        beside the full cache; all where empty.
    """

    parts: tuple[Part, ...]
    model: str
    plan: TaskPlan
    minutes: float
    threads: int | None
    out: Path
    only: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded."""
        check_threads(self.threads)
        if not self.minutes > 0:
            raise SettingsError(f"--minutes {self.minutes:g} must be above 0")


Progress = Callable[[str], None]


def run(request: StudyRequest, say: Progress) -> str:
    """Make every part that is asked for and return its tables.

    Raises
    ------
    HillInferError
        Whatever a user can act on.
    """
    prepare_report(request.out, "--out")
    record = known_record(request.out)
    tables = []
    for part in request.parts:
        tables.append(_PARTS[part](request, record, say))
        _keep(request.out, record)
    if find_spec("matplotlib") is not None:
        tables += [str(file) for file in write_pictures(record, request.out)]
    return "\n\n".join(tables)


_MOST_BYTES = 1 << 26


def known_record(file: Path) -> dict[str, Any]:
    """Return the report of an earlier run, empty where there is none.

    Raises
    ------
    SettingsError
        Where something else has its name.
    """
    if not file.exists():
        return {}
    try:
        found = json.loads(read_plain(file, _MOST_BYTES).decode("utf-8"))
        if not isinstance(found, dict) or not set(found) <= set(Part):
            raise ValueError("it has no parts of a study")
    except OSError as error:
        raise SettingsError(f"cannot read --out {file}: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"--out {file} is no report of `hillinfer-bench study` ({str(error)[:80]}): "
            "name another file, or remove it"
        ) from error
    return found


def _keep(file: Path, record: Mapping[str, Any]) -> None:
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def _accuracy(request: StudyRequest, record: dict[str, Any], say: Progress) -> str:
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.FLOAT32)
    ways = study_ways(outline.shape.head_dim)
    asked = [one for one in ways if one is ways[0] or one.title.startswith(request.ways or "")]
    if len(asked) < 2:
        raise SettingsError(f"--ways {' '.join(request.ways)}: no way's title begins so")
    questions = [
        one
        for one in request.plan.questions(outline.tokenizer)
        if not request.only or one.name.startswith(request.only)
    ]
    if not questions:
        raise SettingsError(f"--only {' '.join(request.only)}: no question's name begins so")
    loaded = outline.load()
    loaded.model.set_attn_implementation("sdpa")
    facts = {
        "label": "measured",
        "model": loaded.name,
        "ways": [{"way": one.title, "rows": one.rows, "ranking": one.ranking} for one in ways],
        "plan": {name: _plain(value) for name, value in vars(request.plan).items()},
        **MachineKind.here(loaded.model.dtype).as_record(),
        "versions": {
            "python": python_version(),
            **{one.name: one.version for one in run_packages() if one.version is not None},
        },
    }

    def keep(answers: Answers) -> None:
        record[Part.ACCURACY] = {
            **facts,
            "beside_full": [one.as_record() for one in beside_full(answers, ways)],
            "answers": answers,
        }
        _keep(request.out, record)

    with compute_threads(request.threads or 1):
        answers = answer_questions(
            loaded.model,
            outline.tokenizer,
            questions,
            asked,
            known_answers(record.get(Part.ACCURACY), facts),
            request.minutes,
            keep,
            say,
        )
    keep(answers)
    tables = [accuracy_table(answers, ways), accuracy_table(answers, ways, by_depth)]
    return "\n\n".join([*tables, beside_full_table(beside_full(answers, ways))])


def known_answers(known: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> Answers:
    """Return answers of an earlier run that stand for this one's, too; none of another model's.

    Those of ways that are no more, or read other bytes now, are left out.
    """
    same = ("model", "plan", "versions")
    if known is None or any(known.get(one) != facts[one] for one in same):
        return {}
    stay = {one["way"] for one in known["ways"] if one in facts["ways"]}
    answers: Answers = {}
    for name, told in known["answers"].items():
        scores = {title: one for title, one in told["scores"].items() if title in stay}
        if scores:
            answers[name] = told | {"scores": scores}
    return answers


def _plain(value: object) -> object:
    """Return a value as JSON gives it back."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _modelled(request: StudyRequest, record: dict[str, Any], say: Progress) -> str:
    record[Part.MODELLED] = modelled_record()
    return modelled_table(record[Part.MODELLED])


def _measured(request: StudyRequest, record: dict[str, Any], say: Progress) -> str:
    record[Part.MEASURED] = measured_record(request.out.with_name(DECODE_FILE))
    return measured_table(record[Part.MEASURED])


_PARTS: Mapping[Part, Callable[[StudyRequest, dict[str, Any], Progress], str]] = {
    Part.MODELLED: _modelled,
    Part.MEASURED: _measured,
    Part.ACCURACY: _accuracy,
}
