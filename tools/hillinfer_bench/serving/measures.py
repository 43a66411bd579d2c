# SPDX-License-Identifier: Apache-2.0
"""What is measured of a server, one function and one row for each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from hillinfer_bench.serving.servers import RunningServer
from hillinfer_bench.serving.streams import Burst, Client, HealthPoll, connected

COUNTS = (1, 4, 8)
_ASKS_A_ROUND = 5
_COST_TOKENS = 4

Say = Callable[[str], None]
Start = Callable[[], AbstractContextManager[RunningServer]]


# --- Streams ---


@dataclass
class StreamsRow:
    """Tokens per second of so many streams at once, by their number.

    Parameters
    ----------
    rates
        Of each round, from asking to the last token.
    decode_rates
        The same, from when every stream had its first token on.
    first_seconds
        To the first token of every stream of every round.
    prompt_tokens, cached_tokens, answer_tokens
        Of every stream of the last burst.
    peak_bytes
        Most memory that the server had until then.
    """

    rates: dict[int, list[float]] = field(default_factory=dict)
    decode_rates: dict[int, list[float]] = field(default_factory=dict)
    first_seconds: dict[int, list[float]] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, burst: Burst) -> None:
        """Take what one burst says."""
        count = len(burst.answers)
        self.rates.setdefault(count, []).append(burst.rate)
        self.decode_rates.setdefault(count, []).append(burst.decode_rate)
        self.first_seconds.setdefault(count, []).extend(one.first_seconds for one in burst.answers)
        self.prompt_tokens = [one.prompt_tokens for one in burst.answers]
        self.cached_tokens = [one.cached_tokens for one in burst.answers]
        self.answer_tokens = [one.tokens for one in burst.answers]

    def speedups(self, count: int) -> list[float]:
        """Return what so many streams bring beside one, of each round."""
        return _ratios(self.rates[count], self.rates[1])

    def decode_speedups(self, count: int) -> list[float]:
        """Return the same of decoding alone."""
        return _ratios(self.decode_rates[count], self.decode_rates[1])

    def lines(self, name: str) -> list[str]:
        """Return it for reading."""
        return [
            f"{name}, {count} streams: {median(rates):.1f} tokens/s "
            f"({min(rates):.1f} to {max(rates):.1f}), decoding "
            f"{median(self.decode_rates[count]):.1f}, first token "
            f"{1e3 * median(self.first_seconds[count]):.0f} ms"
            for count, rates in self.rates.items()
        ]


def measure_streams(
    server: RunningServer,
    client: Client,
    prompts: Sequence[str],
    new_tokens: int,
    rounds: int,
    say: Say,
) -> StreamsRow:
    """Ask for one, four and eight answers at once, in turns.

    Parameters
    ----------
    server, client
        Who is asked.
    prompts
        Eight; each stream has its own.
    new_tokens
        Of each answer.
    rounds
        How often.
    say
        Takes a line of progress.
    """
    row = StreamsRow()
    # What is first of its kind is slow.
    client.ask_together(prompts[:2], 4)
    for turn in range(rounds):
        for count in COUNTS:
            # Another one is alone each time.
            chosen = [prompts[(turn + number) % len(prompts)] for number in range(count)]
            burst = client.ask_together(chosen, new_tokens)
            row.add(burst)
            say(f"round {turn + 1}, {count} streams: {burst.rate:.1f} tokens/s")
    row.peak_bytes = server.peak_bytes
    return row


# --- The server's own cost ---


@dataclass(frozen=True)
class CostRow:
    """First tokens of stored prompts, one request at a time.

    Parameters
    ----------
    http_seconds
        From asking to the first text, at the client.
    server_seconds
        From the request's arrival at the scheduler to its first token, as the server tells of the
        same requests.
    """

    http_seconds: list[float]
    server_seconds: list[float]

    @property
    def own_ms(self) -> list[float]:
        """What HTTP, making tokens, the stream and the client took of each, in milliseconds."""
        pairs = zip(self.http_seconds, self.server_seconds, strict=True)
        return [1e3 * (one - other) for one, other in pairs]


def measure_cost(client: Client, prompts: Sequence[str], rounds: int) -> CostRow:
    """Ask for answers of a few tokens, one after the other, and compare both clocks.

    Parameters
    ----------
    client
        Of the server.
    prompts
        Stored ones, taken in turn.
    rounds
        Five requests each.
    """
    client.ask(prompts[0], _COST_TOKENS)
    asked = [prompts[number % len(prompts)] for number in range(rounds * _ASKS_A_ROUND)]
    answers = [client.ask(one, _COST_TOKENS) for one in asked]
    return CostRow(
        [one.first_seconds for one in answers],
        [one.server_first_seconds for one in answers if one.server_first_seconds is not None],
    )


# --- Health under load ---


@dataclass(frozen=True)
class HealthRow:
    """Times of `/health`, while eight streams ran.

    Parameters
    ----------
    seconds
        Of each answer, its connection included.
    bad
        Answers that were not 200.
    """

    seconds: list[float]
    bad: int

    @property
    def p99_ms(self) -> float:
        """Which 99 of 100 stay below, in milliseconds."""
        return percentile_ms(self.seconds, 99)


def measure_health(
    server: RunningServer, client: Client, prompts: Sequence[str], new_tokens: int, rounds: int
) -> HealthRow:
    """Ask for the state while answers to all prompts are made.

    Parameters
    ----------
    server, client
        Who is asked.
    prompts, new_tokens, rounds
        As of `measure_streams`.
    """
    with HealthPoll(server) as poll:
        for _ in range(rounds):
            client.ask_together(prompts, new_tokens)
    return HealthRow(poll.seconds, poll.bad)


# --- A restart ---


@dataclass
class RestartRow:
    """First tokens for a document, each round on a server that has just started.

    Parameters
    ----------
    stored_seconds, stored_server_seconds
        The first request: a new question about the stored document, by the client's and by the
        server's clock.
    new_seconds
        The second one: the same text behind another first line, so that all of it is read, and
        stored.
    prompt_tokens, cached_tokens, new_cached_tokens
        Of these requests.
    """

    stored_seconds: list[float] = field(default_factory=list)
    stored_server_seconds: list[float] = field(default_factory=list)
    new_seconds: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    new_cached_tokens: list[int] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Of the time of reading, of each round."""
        return _ratios(self.stored_seconds, self.new_seconds)


def measure_restart(start: Start, document: str, rounds: int, say: Say) -> RestartRow:
    """Store a document, and ask about it behind each restart.

    Parameters
    ----------
    start
        Starts a server on the same store each time.
    document
        The text.
    rounds
        Restarts.
    say
        Takes a line of progress.
    """
    row = RestartRow()
    with start() as server, connected(server) as client:
        client.store(question(document, 0))
    for turn in range(rounds):
        with start() as server, connected(server) as client:
            stored = client.ask(question(document, turn + 1), _COST_TOKENS)
            new = client.ask(question(f"Copy {turn + 1}.\n\n{document}", 0), _COST_TOKENS)
        row.stored_seconds.append(stored.first_seconds)
        row.stored_server_seconds.append(stored.server_first_seconds or 0.0)
        row.new_seconds.append(new.first_seconds)
        row.prompt_tokens.append(stored.prompt_tokens)
        row.cached_tokens.append(stored.cached_tokens)
        row.new_cached_tokens.append(new.cached_tokens)
        say(
            f"restart {turn + 1}: {stored.first_seconds:.2f} s stored "
            f"({stored.cached_tokens} of {stored.prompt_tokens} tokens), "
            f"{new.first_seconds:.2f} s read"
        )
    return row


def question(document: str, number: int) -> str:
    """Return a message about a document; those of two numbers differ behind it alone."""
    return f"{document}\n\nQuestion {number}: what is this text about?"


# --- inside ---


def percentile_ms(seconds: Sequence[float], part: float) -> float:
    """Return a percentile in milliseconds."""
    return 1e3 * float(np.percentile(seconds, part))


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, others, strict=True)]
