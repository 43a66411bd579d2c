# SPDX-License-Identifier: Apache-2.0
"""Streams of OpenAI's client, one or many at once, and when their tokens came."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hillinfer.errors import SettingsError
from hillinfer_bench.serving.servers import RunningServer, ServerError, health_status

if TYPE_CHECKING:
    import openai

_TIMEOUT_SECONDS = 600.0
_PAUSE_SECONDS = 0.01
# More characters than any tokenizer for English puts into one token on average.
_CHARACTERS_PER_TOKEN = 8
_LEAST_CACHED = 0.5
_MOST_TRIES = 4


class Texts:
    """Gives disjoint parts of the Python reference, which every machine has.

    Parameters
    ----------
    tokenizer
        One of transformers that knows where its tokens lie.
    """

    def __init__(self, tokenizer: Any) -> None:
        from pydoc_data.topics import topics

        self._tokenizer = tokenizer
        self._text = "\n\n".join(topics[name] for name in sorted(topics))
        self._begin = 0

    def take(self, tokens: int) -> str:
        """Return the next part of so many tokens.

        Raises
        ------
        SettingsError
            Where the reference has no more.
        """
        span = self._text[self._begin : self._begin + tokens * _CHARACTERS_PER_TOKEN]
        places = self._tokenizer(
            span, return_offsets_mapping=True, add_special_tokens=False
        ).offset_mapping
        if len(places) < tokens:
            raise SettingsError(
                f"the Python reference has no further {tokens} tokens: ask for less"
            )
        end = places[tokens - 1][1]
        self._begin += end
        return span[:end]


@dataclass(frozen=True)
class Answer:
    """One answer and its times, in seconds by `time.perf_counter`.

    Parameters
    ----------
    began, first, last
        When it was asked for, when its first text came, and its last.
    texts
        How many pieces came.
    tokens, prompt_tokens, cached_tokens
        As the server's usage tells; without usage each piece counts as a token.
    server_first_seconds
        From the request's arrival at the scheduler to its first token, as the server tells; None
        where it does not.
    """

    began: float
    first: float
    last: float
    texts: tuple[float, ...]
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    server_first_seconds: float | None

    @property
    def first_seconds(self) -> float:
        """From asking to the first text."""
        return self.first - self.began


@dataclass(frozen=True)
class Burst:
    """Answers that were asked for at once."""

    answers: tuple[Answer, ...]

    @property
    def rate(self) -> float:
        """Tokens per second of all together, from asking to the last token."""
        seconds = max(one.last for one in self.answers) - min(one.began for one in self.answers)
        return sum(one.tokens for one in self.answers) / seconds

    @property
    def decode_rate(self) -> float:
        """The same, from when each had its first token to the last token."""
        begin = max(one.first for one in self.answers)
        end = max(one.last for one in self.answers)
        # A piece may have the text of several tokens.
        tokens = sum(
            one.tokens * sum(begin < at for at in one.texts) / len(one.texts)
            for one in self.answers
        )
        return tokens / (end - begin) if end > begin else 0.0


class Client:
    """OpenAI's client of a server, which many threads may use.

    Parameters
    ----------
    server
        It.

    Raises
    ------
    SettingsError
        Where the client is not installed.
    """

    def __init__(self, server: RunningServer) -> None:
        try:
            import openai
        except ImportError as error:
            raise SettingsError(
                "openai is not installed: pip install 'openai>=3.54,<4'; it is what asks the server"
            ) from error
        self._server = server
        self._client: openai.OpenAI = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=_TIMEOUT_SECONDS,
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    @property
    def plain(self) -> openai.OpenAI:
        """OpenAI's client itself."""
        return self._client

    def ask_about(self, file: str, question: str, tokens: int) -> Answer:
        """Return the answer to a question about a file that the server has; as of `ask`."""
        part = {"type": "file", "file": {"file_id": file}}
        return self._answer([part, {"type": "text", "text": question}], tokens)

    def ask(self, content: str, tokens: int) -> Answer:
        """Return the greedy answer to one message, taken as a stream.

        Parameters
        ----------
        content
            The message.
        tokens
            Most of the answer.

        Raises
        ------
        ServerError
            Where no text came.
        openai.OpenAIError
            As the client says.
        """
        return self._answer(content, tokens)

    def _answer(self, content: Any, tokens: int) -> Answer:
        began = time.perf_counter()
        stream = self._client.chat.completions.create(
            model=self._server.model,
            messages=[{"role": "user", "content": content}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dict(self._server.fields) or None,
        )
        texts: list[float] = []
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            if any(choice.delta.content for choice in chunk.choices):
                texts.append(time.perf_counter())
        if not texts:
            raise ServerError("an answer came without text")
        details = usage and usage.prompt_tokens_details
        own = ((usage.model_extra if usage else None) or {}).get("hillinfer", {})
        told = own.get("ttft_ms")
        return Answer(
            began,
            texts[0],
            texts[-1],
            tuple(texts),
            usage.completion_tokens if usage else len(texts),
            usage.prompt_tokens if usage else 0,
            (details.cached_tokens or 0) if details else 0,
            None if told is None else told / 1e3,
        )

    def ask_together(self, contents: Sequence[str], tokens: int) -> Burst:
        """Ask for answers to several messages at once; errors as of `ask`."""
        gate = threading.Barrier(len(contents))

        def one(content: str) -> Answer:
            gate.wait()
            return self.ask(content, tokens)

        with ThreadPoolExecutor(len(contents)) as pool:
            return Burst(tuple(pool.map(one, contents)))

    def store(self, content: str) -> Answer:
        """Ask until the server finds most of a message in its store, and return that answer.

        A store may leave a prompt out that it sees for the first time.

        Raises
        ------
        ServerError
            Where it finds none of it.
        """
        for _ in range(_MOST_TRIES):
            answer = self.ask(content, 4)
            if answer.cached_tokens >= _LEAST_CACHED * answer.prompt_tokens:
                return answer
        raise ServerError(
            f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were found in the "
            f"store after {_MOST_TRIES} requests"
        )


@contextmanager
def connected(server: RunningServer) -> Iterator[Client]:
    """Return a client, closed in the end."""
    client = Client(server)
    try:
        yield client
    finally:
        client.close()


class HealthPoll:
    """Asks `/health` again and again, in a thread, from entering to leaving.

    Each time over a new connection, as probes do.

    Parameters
    ----------
    server
        Whom it asks.

    Attributes
    ----------
    seconds
        That each answer took.
    bad
        Answers whose status was not 200, and those that did not come.
    """

    def __init__(self, server: RunningServer) -> None:
        self._address = server.address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health")
        self.seconds: list[float] = []
        self.bad = 0

    def __enter__(self) -> HealthPoll:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            began = time.perf_counter()
            try:
                self.bad += health_status(*self._address) != 200
            except (OSError, http.client.HTTPException):
                self.bad += 1
            self.seconds.append(time.perf_counter() - began)
