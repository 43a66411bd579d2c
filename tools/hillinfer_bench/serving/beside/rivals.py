# SPDX-License-Identifier: Apache-2.0
"""The same streams and the same document for every server of the table, ours among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hillinfer_bench.serving.beside.rival_servers import ServerKind, Setting
from hillinfer_bench.serving.measures import (
    StreamsRow,
    measure_streams,
    percentile_ms,
    question,
)
from hillinfer_bench.serving.servers import RunningServer, ServerError
from hillinfer_bench.serving.streams import Client, connected

_TOKENS = 4
# A prompt that it sees for the first time is no prompt that it keeps, with some.
_WARM_UP = 2

Say = Callable[[str], None]


@dataclass
class FirstTokens:
    """Times to first tokens of one kind of request, in seconds.

    Parameters
    ----------
    seconds
        Of each.
    prompt_tokens, cached_tokens
        As the server tells of each; none of the latter where it does not tell.
    """

    seconds: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)

    def take(self, client: Client, content: str) -> None:
        """Ask once and note what it took."""
        answer = client.ask(content, _TOKENS)
        self.seconds.append(answer.first_seconds)
        self.prompt_tokens.append(answer.prompt_tokens)
        self.cached_tokens.append(answer.cached_tokens)

    def told(self) -> str:
        """Return it for reading."""
        if not self.seconds:
            return "not asked"
        return (
            f"{percentile_ms(self.seconds, 50):.0f} ms (p95 "
            f"{percentile_ms(self.seconds, 95):.0f}), {min(self.cached_tokens)} of "
            f"{min(self.prompt_tokens)} tokens found"
        )


@dataclass
class ServerRow:
    """What one server did.

    Parameters
    ----------
    name
        Of it.
    missing
        Why it was not asked, or not to the end, and what to do about that; else None.
    streams
        Of one, four and eight streams, whose prompts it has seen.
    read, again, restarted
        First questions about a document, further ones on the same server, and one on a server that
        was started anew.
    by_hand
        One on such a server after somebody has brought rows back by hand, that included.
    peak_bytes
        Most memory of its processes until the restart.
    start_seconds
        From starting it to its being ready, the first time and the second.
    seconds
        Of all.
    """

    name: str
    missing: str | None = None
    streams: StreamsRow | None = None
    read: FirstTokens = field(default_factory=FirstTokens)
    again: FirstTokens = field(default_factory=FirstTokens)
    restarted: FirstTokens = field(default_factory=FirstTokens)
    by_hand: FirstTokens = field(default_factory=FirstTokens)
    peak_bytes: int = 0
    start_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Return it for reading."""
        if self.missing is not None:
            yield f"{self.name}: {self.missing}"
        if self.streams is not None:
            yield from self.streams.lines(self.name)
        for told, taken in (
            ("read", self.read),
            ("asked again", self.again),
            ("after a restart", self.restarted),
            ("brought back by hand", self.by_hand),
        ):
            if taken.seconds:
                yield f"{self.name}, document {told}: {taken.told()}"
        if self.peak_bytes:
            yield f"{self.name}, most memory: {self.peak_bytes / 2**20:.0f} MiB"

    def beside(self, rival: ServerRow) -> dict[str, float]:
        """Return how many times better this one is than a rival, by figure; above 1 it is ahead."""
        ratios: dict[str, float] = {}
        if self.streams is not None and rival.streams is not None:
            for count in self.streams.rates:
                own, other = self.streams, rival.streams
                for name, ours, theirs in (
                    ("tokens_per_second", own.rates, other.rates),
                    ("decode_tokens_per_second", own.decode_rates, other.decode_rates),
                ):
                    ratio = median(ours[count]) / median(theirs[count])
                    ratios[f"{name}_{count}_streams"] = ratio
                for part in (50, 95):
                    ratios[f"first_token_{count}_streams_p{part}"] = _of_parts(
                        other.first_seconds[count], own.first_seconds[count], part
                    )
        for name, taken, taken_there in (
            ("first_token_new_document", self.read, rival.read),
            ("first_token_same_document", self.again, rival.again),
            ("first_token_after_restart", self.restarted, rival.restarted),
        ):
            if taken.seconds and taken_there.seconds:
                for part in (50, 95):
                    ratio = _of_parts(taken_there.seconds, taken.seconds, part)
                    ratios[f"{name}_p{part}"] = ratio
        if self.peak_bytes and rival.peak_bytes:
            ratios["peak_memory"] = rival.peak_bytes / self.peak_bytes
        return ratios


@dataclass
class RivalsRow:
    """All servers, by their keys; ours is the first.

    Parameters
    ----------
    servers
        What each did.
    questions
        That were asked about the document on the same server.
    """

    servers: dict[str, ServerRow] = field(default_factory=dict)
    questions: int = 0

    @property
    def own(self) -> ServerRow:
        """Ours."""
        return next(iter(self.servers.values()))

    def figures(self) -> dict[str, Any]:
        """Return ratios beside each rival, and our place in first tokens after a restart."""
        own, *_ = self.servers
        made: dict[str, Any] = {}
        for key, row in self.servers.items():
            if key != own and (ratios := self.own.beside(row)):
                made[f"vs_{key}"] = ratios
        ours = self.own.restarted.seconds
        others = [row for key, row in self.servers.items() if key != own and row.restarted.seconds]
        if ours and others:
            made["first_token_after_restart_rank"] = 1 + sum(
                median(row.restarted.seconds) < median(ours) for row in others
            )
            made["first_token_after_restart_servers"] = 1 + len(others)
            made["first_token_after_restart_rank_by_hand"] = 1 + sum(
                median(row.by_hand.seconds or row.restarted.seconds) < median(ours)
                for row in others
            )
        missing = {key: row.missing for key, row in self.servers.items() if row.missing}
        if missing:
            made["missing_servers"] = missing
        return made

    def lines(self) -> Iterator[str]:
        """Return it for reading."""
        for row in self.servers.values():
            yield from row.lines()


def measure_rivals(
    kinds: Sequence[ServerKind],
    setting: Setting,
    prompts: Sequence[str],
    document: str,
    new_tokens: int,
    rounds: int,
    questions: int,
    say: Say,
) -> RivalsRow:
    """Ask each server in turn, each alone on the machine.

    Parameters
    ----------
    kinds
        Ours first.
    setting
        What all have the same.
    prompts, new_tokens, rounds
        As of `measure_streams`.
    document
        The text that is asked about.
    questions
        About it, on the server that has read it.
    say
        Takes a line of progress.
    """
    row = RivalsRow(questions=questions)
    for kind in kinds:
        say(f"{kind.name}: its turn")
        began, one = time.monotonic(), ServerRow(kind.name, kind.missing(setting))
        row.servers[kind.key] = one
        if one.missing is not None:
            say(f"{kind.name}: {one.missing}")
            continue
        try:
            _before(kind, setting, prompts, document, new_tokens, rounds, questions, one, say)
            _behind(kind, setting, document, questions, one, say)
        except Exception as error:
            # The others are asked all the same, and the report says what became of this one.
            one.missing = f"{type(error).__name__}: {error}"
            say(f"{kind.name}: {one.missing}")
        one.seconds = time.monotonic() - began
    return row


def _before(
    kind: ServerKind,
    setting: Setting,
    prompts: Sequence[str],
    document: str,
    new_tokens: int,
    rounds: int,
    questions: int,
    row: ServerRow,
    say: Say,
) -> None:
    """Ask a server that has just been started for the first time."""
    began = time.monotonic()
    with kind.start(setting) as server, connected(server) as client:
        row.start_seconds.append(time.monotonic() - began)
        if kind.finds_again:
            for _ in range(_WARM_UP):
                for one in prompts:
                    client.ask(one, _TOKENS)
        row.streams = measure_streams(server, client, prompts, new_tokens, rounds, say)
        row.read.take(client, question(document, 0))
        for number in range(questions):
            row.again.take(client, question(document, 1 + number))
        say(f"{kind.name}: read {row.read.told()}; again {row.again.told()}")
        row.peak_bytes = server.peak_bytes
        if kind.keep is not None:
            kind.keep(server)


def _behind(
    kind: ServerKind, setting: Setting, document: str, questions: int, row: ServerRow, say: Say
) -> None:
    """Ask a server that was started anew, and once more where rows are brought back by hand."""
    began = time.monotonic()
    with kind.start(setting) as server, connected(server) as client:
        row.start_seconds.append(time.monotonic() - began)
        # What is first of all on a server is slow; it is about another text.
        client.ask("What is a text?", _TOKENS)
        if kind.bring_back is not None:
            row.by_hand = _by_hand(kind, server, client, question(document, 2 + questions))
        else:
            row.restarted.take(client, question(document, 1 + questions))
    if kind.bring_back is not None:
        with kind.start(setting) as server, connected(server) as client:
            client.ask("What is a text?", _TOKENS)
            row.restarted.take(client, question(document, 1 + questions))
    say(f"{kind.name}: after a restart {row.restarted.told()}")


def _by_hand(kind: ServerKind, server: RunningServer, client: Client, content: str) -> FirstTokens:
    taken = FirstTokens()
    assert kind.bring_back is not None
    began = time.perf_counter()
    try:
        kind.bring_back(server)
    except OSError as error:
        raise ServerError(f"rows cannot be brought back: {error}") from error
    brought = time.perf_counter() - began
    taken.take(client, content)
    taken.seconds[-1] += brought
    return taken


def _of_parts(others: Sequence[float], ours: Sequence[float], part: float) -> float:
    return percentile_ms(others, part) / percentile_ms(ours, part)
