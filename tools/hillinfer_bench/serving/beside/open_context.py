# SPDX-License-Identifier: Apache-2.0
"""More open context than memory holds: many documents in a budget of two."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hillinfer_bench.serving.beside.rival_servers import ServerKind, Setting
from hillinfer_bench.serving.measures import percentile_ms, question
from hillinfer_bench.serving.server_log import Holdings, metrics
from hillinfer_bench.serving.servers import RunningServer, ServerError
from hillinfer_bench.serving.streams import Answer, connected

if TYPE_CHECKING:
    import openai

_LOOK_SECONDS, _ASK_SECONDS = 0.05, 0.2
_READING_SECONDS = 3600.0
_TOKENS = 4
# Documents more than a rival's cache holds, which are asked about in turn.
_BEYOND = 1

Say = Callable[[str], None]
Start = Callable[[], AbstractContextManager[RunningServer]]


@dataclass
class HeldRow:
    """What a rival's cache of the same budget holds.

    Parameters
    ----------
    name
        Of it.
    held_documents
        Computed: whole documents that the budget has room for, by the server's own option for its
        cache; 0 where it keeps no prompt.
    how
        That option, in words.
    asked_documents
        How many were asked about in turn, twice; 0 where nobody asked.
    found
        Tokens of each prompt of the second turn that it found, as it tells.
    prompt_tokens
        Of each of these.
    missing
        Why nobody asked, or what failed; else None.
    """

    name: str
    held_documents: int
    how: str
    asked_documents: int = 0
    found: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    missing: str | None = None

    def told(self) -> str:
        """Return it for reading."""
        text = f"{self.name}: {self.how}: {self.held_documents} documents (computed)"
        if self.found:
            again = sum(
                2 * found > tokens
                for found, tokens in zip(self.found, self.prompt_tokens, strict=True)
            )
            text += (
                f"; of {self.asked_documents} that are asked about in turn it finds {again} again"
            )
        elif self.missing is not None:
            text += f"; {self.missing}"
        return text


@dataclass
class OpenContextRow:
    """What our server did with documents of many times its budget.

    Parameters
    ----------
    documents, document_tokens
        How many and how long; the latter as the server tells.
    budget_bytes
        M0, as the server tells.
    row_bytes
        Of all documents' rows together, in the number type that the store has.
    most_dram_bytes
        The most that the parts of M0 took by their peaks, of all looks.
    looks
        How often somebody looked.
    resident_bytes
        The process' own memory: before the first document, and the most of all looks.
    most_open
        Most requests that the server worked on at once.
    reading_seconds
        Of each document.
    alone, together
        Answers to a question about each: one after the other, and all at once.
    refused
        Why there was no answer, of each that had none.
    rivals
        What others hold in such a budget.
    """

    documents: int
    document_tokens: list[int] = field(default_factory=list)
    budget_bytes: float = 0.0
    row_bytes: int = 0
    most_dram_bytes: float = 0.0
    looks: int = 0
    resident_bytes: list[int] = field(default_factory=list)
    most_open: int = 0
    reading_seconds: list[float] = field(default_factory=list)
    alone: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rivals: list[HeldRow] = field(default_factory=list)

    @property
    def budgets(self) -> float:
        """How many times the budget all rows are."""
        return self.row_bytes / self.budget_bytes

    @property
    def unanswered(self) -> int:
        """Questions that had no answer."""
        return 2 * self.documents - len(self.alone) - len(self.together)

    @property
    def above_bytes(self) -> float:
        """By how much M0 was exceeded."""
        return max(0.0, self.most_dram_bytes - self.budget_bytes)

    @property
    def most_rival(self) -> int:
        """Most documents that a rival holds."""
        return max((one.held_documents for one in self.rivals), default=0)

    def lines(self) -> Iterator[str]:
        """Return it for reading."""
        mib = 1 << 20
        yield (
            f"{self.documents} documents of {min(self.document_tokens, default=0)} tokens in "
            f"{self.budget_bytes / mib:.0f} MiB: rows are {self.budgets:.1f} times the budget, M0 "
            f"had {self.most_dram_bytes / mib:.0f} MiB at most, {self.unanswered} unanswered"
        )
        for told, answers in (("one by one", self.alone), ("all at once", self.together)):
            if answers:
                firsts = [one.first_seconds for one in answers]
                found = min(one.cached_tokens / one.prompt_tokens for one in answers)
                seconds = max(one.last for one in answers) - min(one.began for one in answers)
                rate = sum(one.tokens for one in answers) / seconds
                yield (
                    f"asked {told}: first token {percentile_ms(firsts, 50):.0f} ms (p95 "
                    f"{percentile_ms(firsts, 95):.0f}), {rate:.1f} tokens/s, at least {found:.0%} "
                    "of each prompt found"
                )
        yield f"at most {self.most_open} were open at once"
        yield from (one.told() for one in self.rivals)


class Census:
    """Looks at a server's memory again and again, in a thread, from entering to leaving."""

    def __init__(self, server: RunningServer, row: OpenContextRow) -> None:
        self._server, self._row = server, row
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="census")

    def __enter__(self) -> Census:
        self._row.resident_bytes = [Holdings.of(self._server).resident_bytes] * 2
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            self._look()

    def _look(self) -> None:
        row = self._row
        with suppress(OSError, ValueError, KeyError):
            told = metrics(self._server)
            row.budget_bytes = told["hillinfer_dram_budget_bytes"]
            row.most_dram_bytes = max(row.most_dram_bytes, told["hillinfer_dram_bytes"])
            row.most_open = max(row.most_open, int(told["hillinfer_requests_running"]))
            resident = Holdings.of(self._server).resident_bytes
            row.resident_bytes[1] = max(row.resident_bytes[1], resident)
            row.looks += 1


def measure_open_context(
    start: Start, documents: Sequence[str], new_tokens: int, token_bytes: int, say: Say
) -> OpenContextRow:
    """Register documents as files, then ask about each: one after the other, and all at once.

    Parameters
    ----------
    start
        Starts our server, with a store and a budget.
    documents
        Texts.
    new_tokens
        Of each answer.
    token_bytes
        Of a token's rows in the store.
    say
        Takes a line of progress.
    """
    row = OpenContextRow(len(documents))
    with start() as server, connected(server) as client, Census(server, row):
        names = []
        for number, text in enumerate(documents):
            began = time.monotonic()
            names.append(_registered(client.plain, text, row))
            row.reading_seconds.append(time.monotonic() - began)
            say(f"document {number + 1}: read in {row.reading_seconds[-1]:.1f} s")
        row.row_bytes = token_bytes * sum(row.document_tokens)

        def ask(pair: tuple[str, str]) -> Answer | None:
            try:
                return client.ask_about(*pair, new_tokens)
            except Exception as error:
                row.refused.append(f"{type(error).__name__}: {error}"[:200])
                return None

        for turn, at_once in ((0, 1), (1, len(names))):
            pairs = [(name, f"Question {turn}: what is this text about?") for name in names]
            with ThreadPoolExecutor(at_once) as pool:
                answers = [one for one in pool.map(ask, pairs) if one is not None]
            (row.together if turn else row.alone).extend(answers)
            say(f"{len(answers)} of {len(names)} answers, {at_once} at once")
    return row


def held_by(
    kind: ServerKind, setting: Setting, documents: Sequence[str], tokens: int, say: Say
) -> HeldRow:
    """Return what a rival holds in a budget, and what it finds again where it is asked.

    Parameters
    ----------
    kind
        The rival.
    setting
        Its cache is as large as our budget.
    documents
        Texts; one more than it holds are asked about in turn, twice. None: nobody asks.
    tokens
        Of a document.
    say
        Takes a line of progress.
    """
    if not kind.finds_again:
        return HeldRow(kind.name, 0, "it keeps no prompt, and each question reads its document")
    held = kind.held_tokens(setting) // tokens
    row = HeldRow(kind.name, held, f"a cache of {kind.held_tokens(setting):,} tokens")
    if (missing := kind.missing(setting)) is not None:
        row.missing = f"not asked: {missing}"
    elif len(documents) > held:
        asked = documents[: held + _BEYOND]
        row.asked_documents = len(asked)
        try:
            with kind.start(setting) as server, connected(server) as client:
                for turn in range(2):
                    for text in asked:
                        answer = client.ask(question(text, turn), _TOKENS)
                        if turn:
                            row.found.append(answer.cached_tokens)
                            row.prompt_tokens.append(answer.prompt_tokens)
        except Exception as error:
            row.missing = f"{type(error).__name__}: {error}"
        say(row.told())
    return row


def _registered(client: openai.OpenAI, text: str, row: OpenContextRow) -> str:
    """Send a text as a file, wait until it is read, and return its name."""
    sent = client.files.create(
        file=("document.txt", io.BytesIO(text.encode())), purpose="user_data"
    )
    until = time.monotonic() + _READING_SECONDS
    while time.monotonic() < until:
        told = client.files.retrieve(sent.id)
        if told.status == "processed":
            row.document_tokens.append(int((told.model_extra or {})["hillinfer"]["tokens"]))
            return str(sent.id)
        if told.status == "error":
            raise ServerError(f"a document could not be read: {told.status_details}")
        time.sleep(_LOOK_SECONDS)
    raise ServerError("a document was not read within an hour")
