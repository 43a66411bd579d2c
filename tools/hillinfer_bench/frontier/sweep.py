# SPDX-License-Identifier: Apache-2.0
"""The sweep: KL of every setting on every text, kept row by row so that a restart goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from hillinfer.model_shape import ModelShape
from hillinfer.system.files import cannot_write, write_whole
from hillinfer_bench.decode.run import OBSERVED_QUERIES
from hillinfer_bench.frontier.curve import Curve, Point
from hillinfer_bench.frontier.swept import Swept
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads, forced_logits, selecting
from hillinfer_bench.quality.table import Measures, measure
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.systems.kv_source import LastQueries, PromptQueries


@dataclass(frozen=True)
class Setting:
    """One setting of one system.

    Parameters
    ----------
    system
        The system.
    value
        Of its knob.
    """

    system: Swept
    value: float

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others: the system's name, and the setting in words."""
        return self.system.name, self.system.label(self.value)


@dataclass
class SweepRows:
    """Measures by text and setting, in a file that grows line by line.

    Rows of another model, of other texts or of another length stay in the file, and are not gone on
    with.

    Parameters
    ----------
    file
        A line before rows says what these were measured on; None keeps nothing.
    facts
        What was measured on.
    """

    file: Path | None
    facts: Mapping[str, Any]
    _found: dict[tuple[str, str, str], Measures] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        """Take what is there.

        Raises
        ------
        ReportError
            Where the file cannot be written.
        """
        if self.file is None:
            return
        facts, own = json.loads(json.dumps(dict(self.facts))), False
        known: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for record in _records(self.file):
            if "text" not in record:
                own = record == facts
            if record != facts:
                (known if own else others).append(record)
        whole = []
        for record in known:
            try:
                key, measures = _measured(record)
            except (KeyError, TypeError):
                # Somebody else's line.
                continue
            self._found[key] = measures
            whole.append(record)
        # Anew, so that nothing is added behind half a line, and own rows behind the others.
        data = "".join(json.dumps(one) + "\n" for one in (*others, facts, *whole))
        try:
            write_whole(self.file, data.encode())
        except OSError as error:
            raise cannot_write(self.file, error, "--out") from error

    def of(self, text: str, setting: Setting) -> Measures | None:
        """Return what is known of a setting on a text."""
        return self._found.get((text, *setting.key))

    def add(self, text: str, setting: Setting, measures: Measures) -> None:
        """Keep what was measured; any thread may."""
        system, words = setting.key
        record = {"text": text, "system": system, "setting": words, "measures": asdict(measures)}
        with self._lock:
            self._found[text, system, words] = measures
            if self.file is None:
                return
            try:
                with self.file.open("a", encoding="utf-8") as rows:
                    rows.write(json.dumps(record) + "\n")
            except OSError as error:
                raise cannot_write(self.file, error, "--out") from error


def _measured(record: dict[str, Any]) -> tuple[tuple[str, str, str], Measures]:
    key = record["text"], record["system"], record["setting"]
    return key, Measures(**record["measures"])


def _records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file that are whole lines; none where there is none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, ValueError):
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            # Half a line, of a run that was killed.
            continue
    return [one for one in records if isinstance(one, dict)]


def sweep_text(
    model: Any,
    sample: TextSample,
    last: int,
    settings: Sequence[Setting],
    rows: SweepRows,
    threads: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Measure what is not known yet of some settings on one text.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode.
    sample, last
        The text, and how many of its tokens are read with each setting.
    settings
        What is measured.
    rows
        Takes what was measured, and says what is known.
    threads
        For reading the prefix, and settings measured at once, each on one thread.
    on_progress
        Called with the number of settings that are known.
    """
    left = [one for one in settings if rows.of(sample.name, one) is None]
    done = len(settings) - len(left)
    if done:
        on_progress(done)
    if not left:
        return
    context = len(sample.token_ids) - 1
    next_ids = sample.token_ids[context - last + 1 :]
    forced_ids = sample.token_ids[context - last : context]
    with compute_threads(threads), PromptQueries(model, OBSERVED_QUERIES) as queries:
        prefix = Prefix.read(model, sample.token_ids[: context - last])
    prompt = None
    if queries.layers:
        scalings = [queries.scaling(layer) for layer in range(len(queries.layers))]
        prompt = LastQueries(queries.layers, scalings)
    with compute_threads(1), selecting(model), ThreadPoolExecutor(threads) as workers:
        full = forced_logits(model, prefix, forced_ids, None)

        def one(setting: Setting) -> None:
            policy = setting.system.policy(setting.value, prefix.shape, prompt)
            logits = forced_logits(model, prefix, forced_ids, policy)
            rows.add(sample.name, setting, measure(logits, full, next_ids))

        for number, _ in enumerate(workers.map(one, left), start=done + 1):
            on_progress(number)


@dataclass(frozen=True)
class SweptRow:
    """One setting over all texts.

    Parameters
    ----------
    setting
        What was measured.
    measures
        One for each text.
    share, ranked_share
        As `Swept.row_share` and `Swept.ranked_share` have them.
    """

    setting: Setting
    measures: tuple[Measures, ...]
    share: float
    ranked_share: float

    @property
    def kl(self) -> float:
        """Mean over texts, in nats."""
        return fmean(one.kl_divergence for one in self.measures)

    @property
    def point(self) -> Point:
        """Where it lies on the system's curve."""
        return Point(self.setting.value, self.kl, self.share)

    def as_record(self) -> dict[str, object]:
        """Return what the report says of it."""
        system, words = self.setting.key
        return {
            "system": system,
            "setting": words,
            "value": self.setting.value,
            "kl_divergence": self.kl,
            "kl_of_texts": [one.kl_divergence for one in self.measures],
            "agreement": fmean(one.agreement for one in self.measures),
            "row_byte_share": self.share,
            "ranked_byte_share": self.ranked_share,
        }


def swept_rows(
    rows: SweepRows,
    samples: Sequence[TextSample],
    settings: Iterable[Setting],
    length: int,
    shape: ModelShape,
) -> list[SweptRow]:
    """Return every setting that was measured on all texts, with its bytes at a length."""
    made = []
    for setting in settings:
        measures = [rows.of(sample.name, setting) for sample in samples]
        known = tuple(one for one in measures if one is not None)
        if len(known) == len(measures):
            share = setting.system.row_share(setting.value, length, shape)
            made.append(SweptRow(setting, known, share, setting.system.ranked_share(shape)))
    return made


def curves(rows: Iterable[SweptRow]) -> dict[str, Curve]:
    """Return the curve of each system, by its name."""
    grouped: dict[str, list[SweptRow]] = {}
    for row in rows:
        grouped.setdefault(row.setting.system.name, []).append(row)
    return {
        name: own[0].setting.system.curve([row.point for row in own])
        for name, own in grouped.items()
    }
