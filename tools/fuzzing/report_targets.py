# SPDX-License-Identifier: Apache-2.0
"""Targets for what commands read back: timelines, traces, kept rates."""

from __future__ import annotations

import contextlib
import io
import json
import random
import warnings
from pathlib import Path

from fuzzing.fuzz_input import Files
from fuzzing.mutations import NUMBERS, STRINGS, dump, mutate_bytes, mutate_object, odd_value
from fuzzing.verdict import WrongAnswerError

_TIMELINE, _TRACE, _RATES = "pools.csv", "trace.json", "rates.json"


class CommandError(Exception):
    """The command ended otherwise than its page says."""


def run_command(*arguments: str) -> str:
    """Run the command in this process and return its standard output.

    Raises
    ------
    HillInferError
        Where it refused, with its line.
    CommandError
        Where it ended in another way.
    """
    from hillinfer.errors import HillInferError
    from hillinfer_bench.cli.programs import main_of

    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main_of(arguments)(list(arguments))
        except SystemExit as ended:
            code = ended.code
    if not code:
        return out.getvalue()
    lines = err.getvalue().splitlines()
    said = [line for line in lines if line.startswith("hillinfer: error: ")]
    obeyed = not all(line.isprintable() for line in lines)
    if code not in (1, 2) or len(said) != 1 or "Traceback" in err.getvalue() or obeyed:
        raise CommandError(f"exit {code}: {err.getvalue()[-200:]!a}")
    raise HillInferError(said[0].removeprefix("hillinfer: error: "))


class TimelineTarget:
    """The CSV of `--pool-timeline`, drawn by `pool-picture`."""

    name = "timeline"

    def seeds(self) -> list[Files]:
        """Return a timeline of two layers and some steps."""
        from hillinfer.trace.trace_file import COLUMNS

        lines = [",".join(COLUMNS)]
        for step in range(6):
            for layer in range(2):
                cells = [
                    "0.000100" if name.endswith("_seconds") else str(7 * number + step)
                    for number, name in enumerate(COLUMNS)
                ]
                lines.append(",".join([str(step), str(layer), *cells[2:]]))
        return [{_TIMELINE: ("\n".join(lines) + "\n").encode()}]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change a cell, a line, or bytes."""
        data = files[_TIMELINE]
        if rng.random() < 0.4:
            return {_TIMELINE: mutate_bytes(rng, data)}
        lines = [line.split(",") for line in data.decode().splitlines()]
        line = rng.choice(lines)
        kind = rng.randrange(4)
        if kind < 2:
            line[rng.randrange(len(line))] = str(rng.choice((*NUMBERS, *STRINGS)))
        elif kind == 2:
            line.append("1")
        else:
            lines.insert(rng.randrange(len(lines)), line)
        text = "\n".join(",".join(cells) for cells in lines) + "\n"
        return {_TIMELINE: text.encode("utf-8", "surrogatepass")}

    def try_one(self, given: Path, other: Path) -> None:
        """Draw it."""
        picture = other / "picture.png"
        said = run_command("pool-picture", str(given / _TIMELINE), "--out", str(picture))
        if said.strip() != str(picture) or not picture.read_bytes().startswith(b"\x89PNG"):
            raise WrongAnswerError("no picture was drawn")
        picture.unlink()


class TraceTarget:
    """The events of `--trace`, told by `trace-picture`."""

    name = "trace"

    def seeds(self) -> list[Files]:
        """Return a trace of three steps."""
        from hillinfer.trace.recorder import Lane
        from hillinfer.trace.trace_file import PROCESS_NAME

        shared = {"pid": 1, "tid": 1}
        events = [{"name": "process_name", "ph": "M", "ts": 0, "args": {"name": PROCESS_NAME}}]
        for step in range(3):
            start = step * 1000.0
            for lane, name, after, length in (
                (Lane.COMPUTE, "model", 100.0, 300.0),
                (Lane.READS, "read", 200.0, 400.0),
                (Lane.STEPS, "step", 0.0, 900.0),
            ):
                details = {"step": step, "tokens": 1} if name == "step" else {"step": step}
                own = {"ts": start + after, "dur": length, "args": details}
                events.append({"name": name, "cat": lane.value, "ph": "X", **own})
        lines = ",\n".join(json.dumps(event | shared) for event in events)
        return [{_TRACE: f"[\n{lines}\n]\n".encode()}]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change an event, a line, or bytes."""
        data = files[_TRACE]
        if rng.random() < 0.3:
            return {_TRACE: mutate_bytes(rng, data)}
        lines = data.decode().splitlines()
        place = rng.randrange(1, len(lines) - 1)
        event = json.loads(lines[place].removesuffix(","))
        changed = dump(rng, mutate_object(rng, event)) + (b"," if place < len(lines) - 2 else b"")
        whole = [line.encode() for line in lines]
        whole[place] = changed
        return {_TRACE: b"\n".join(whole) + b"\n"}

    def try_one(self, given: Path, other: Path) -> None:
        """Tell a step, and draw it where the input's size is odd: that takes longer."""
        file = given / _TRACE
        drawn = file.stat().st_size % 5 == 0
        picture = other / "picture.svg"
        said = run_command("trace-picture", str(file), *(("--out", str(picture)) if drawn else ()))
        if not said.startswith("step "):
            raise WrongAnswerError("no step was told")
        picture.unlink(missing_ok=not drawn)


class RatesTarget:
    """rates.json in the user's cache, which must never stop a run."""

    name = "rates"

    def seeds(self) -> list[Files]:
        """Return rates of one machine."""
        from hillinfer.rates.kept_rates import VERSION, Rates, RatesKey

        values = {"str": "a", "int": 4, "float": 1.0, "bool": True}
        key = {name: values.get(kind) for name, kind in RatesKey.__annotations__.items()}
        rates = dict.fromkeys(Rates.__annotations__, 1000.0)
        content = {"version": VERSION, "rates": [{"key": key, "rates": rates}]}
        return [{_RATES: json.dumps(content).encode()}]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change the JSON or its bytes."""
        data = files[_RATES]
        if rng.random() < 0.2:
            return {_RATES: mutate_bytes(rng, data)}
        content = json.loads(data)
        if rng.random() < 0.5:
            own = content["rates"][0][rng.choice(("key", "rates"))]
            own[rng.choice(list(own))] = odd_value(rng)
        else:
            content = mutate_object(rng, content)
        return {_RATES: dump(rng, content)}

    def try_one(self, given: Path, other: Path) -> None:
        """Read them: damaged ones are measured again, which a warning says."""
        from hillinfer.errors import HillInferError, HillInferWarning
        from hillinfer.rates.kept_rates import KeptRates, Rates

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = KeptRates(given / _RATES).all()
        own = [one for one in told if issubclass(one.category, HillInferWarning)]
        if own:
            raise HillInferError(str(own[0].message))
        for _, rates in found:
            for name in Rates.__annotations__:
                value = getattr(rates, name)
                if value is not None and not value >= 0:
                    raise WrongAnswerError(f"{name}={value} was taken for a rate")
