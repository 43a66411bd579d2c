# SPDX-License-Identifier: Apache-2.0
"""Many tenants' requests at once, each with a secret: nobody gets another's rows or words."""

from __future__ import annotations

import json
import math
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hillinfer_bench.serving.servers import RunningServer
from hillinfer_bench.serving.sittings import Sitting

_AT_ONCE = 16
# Prompts of a tenant, each of which is asked for four times or more.
_MOST_PROMPTS, _TIMES, _TOKENS = 12, 4, 12
# Rows are found by groups of so many tokens, and the last token is always computed.
_GROUP = 64
# What is stored is found once it is written, which is a moment after the answer.
_WRITTEN_SECONDS = 2.0
_SEED = 0

Say = Callable[[str], None]


@dataclass
class PlantedRow:
    """Answers to requests with secrets.

    Parameters
    ----------
    asked, answered
        Requests, and those that had an answer.
    told
        Answers that have the secret of their own prompt: that the model repeats it at all shows
        that a foreign one would be seen.
    mixed
        Answers that have a secret of another prompt.
    leaks
        Requests whose `cached_tokens` are more than any earlier prompt of the same tenant has in
        common with theirs: rows of somebody else.
    repeats, missed
        Requests whose very prompt the tenant had answered before, and those of them whose
        `cached_tokens` were not all of its whole groups.
    statuses
        How many answers had which status of HTTP, where it was not 200.
    wanted
        Requests in the end, maybe of several runs.
    sittings
        Those runs: each began with an empty store.
    """

    asked: int = 0
    answered: int = 0
    told: int = 0
    mixed: int = 0
    leaks: int = 0
    repeats: int = 0
    missed: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    wanted: int = 0
    sittings: list[Sitting] = field(default_factory=list)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PlantedRow:
        """Return what a report has."""
        sittings = [Sitting(**one) for one in record["sittings"]]
        statuses = {int(status): count for status, count in record["statuses"].items()}
        return cls(**{**record, "sittings": sittings, "statuses": statuses})


@dataclass(eq=False)
class _Prompt:
    key: str
    text: str
    secret: str
    ids: list[int]
    asked: bool = False
    answered_at: float | None = None


def measure_planted(
    server: RunningServer,
    keys: Sequence[str],
    shared: str,
    count: int,
    say: Say,
    before: PlantedRow | None = None,
    seconds: float = math.inf,
) -> PlantedRow:
    """Ask in random order, sixteen at once.

    Parameters
    ----------
    server
        Who is asked.
    keys
        A tenant each.
    shared
        What all prompts begin with: the part that would be taken from another tenant.
    count
        Requests in the end.
    say
        Takes a line of progress.
    before
        What earlier runs came to, which goes on where they ended; None for a first one.
    seconds
        After so long no more is asked.
    """
    each = max(1, min(_MOST_PROMPTS, count // (_TIMES * len(keys))))
    prompts = [
        _planted(server, key, shared, number)
        for number, key in enumerate(key for key in keys for _ in range(each))
    ]
    common = {
        id(one): {
            id(other): _common(one.ids, other.ids) for other in prompts if other.key == one.key
        }
        for one in prompts
    }
    row, lock = before or PlantedRow(wanted=count), threading.Lock()
    first, until = row.asked, time.monotonic() + seconds
    order = random.Random(_SEED)
    chosen = iter([order.choice(prompts) for _ in range(count)][first:])

    def ask() -> None:
        while True:
            with lock:
                one = next(chosen, None) if time.monotonic() < until else None
                if one is None:
                    return
                one.asked = True
                asked_at, answered_at = time.monotonic(), one.answered_at
            status, answer = _post(server, "/v1/chat/completions", one.key, _body(server, one))
            with lock:
                # Whatever of this tenant was asked until now may have been found.
                most = max(common[id(one)][id(other)] for other in prompts if _may_help(one, other))
                _count(row, one, prompts, status, answer, most, asked_at, answered_at)
                one.answered_at = one.answered_at or time.monotonic()
                if row.asked % 500 == 0:
                    say(f"{row.asked} answers, {row.mixed} mixed, {row.leaks} leaks")

    threads = [threading.Thread(target=ask, name=f"planted-{one}") for one in range(_AT_ONCE)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    row.sittings.append(Sitting.now(first, row.asked - first, _SEED))
    return row


def _may_help(one: _Prompt, other: _Prompt) -> bool:
    return other.key == one.key and other.asked


def _count(
    row: PlantedRow,
    one: _Prompt,
    prompts: Sequence[_Prompt],
    status: int,
    answer: dict[str, Any],
    most: int,
    asked_at: float,
    answered_at: float | None,
) -> None:
    row.asked += 1
    if status != 200:
        row.statuses[status] = row.statuses.get(status, 0) + 1
        return
    row.answered += 1
    text = answer["choices"][0]["message"]["content"].lower()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    row.told += one.secret in text
    row.mixed += any(other.secret in text for other in prompts if other is not one)
    row.leaks += cached > most
    if answered_at is not None and asked_at - answered_at > _WRITTEN_SECONDS:
        row.repeats += 1
        row.missed += cached < (len(one.ids) - 1) // _GROUP * _GROUP


def _planted(server: RunningServer, key: str, shared: str, number: int) -> _Prompt:
    draw = random.Random(number)
    # Letters that every tokenizer has; two secrets have no part in common that could be chance.
    secret = "".join(draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(3)) + f"{number:05d}"
    text = (
        f"{shared}\n\nthe code word is {secret}. remember the code word {secret}.\n\n"
        "repeat the code word. the code word is"
    )
    status, told = _post(
        server,
        "/tokenize",
        key,
        {"model": server.model, "messages": [{"role": "user", "content": text}]},
    )
    if status != 200:
        raise RuntimeError(f"/tokenize answered with status {status}")
    return _Prompt(key, text, secret, told["tokens"])


def _body(server: RunningServer, one: _Prompt) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": one.text}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        **server.fields,
    }


def _post(
    server: RunningServer, path: str, key: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    asked = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return 200, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for own, its in zip(one, other, strict=False):
        if own != its:
            break
        count += 1
    return count
