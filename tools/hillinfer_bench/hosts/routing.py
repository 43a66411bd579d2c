# SPDX-License-Identifier: Apache-2.0
"""Two replicas with a store each behind a router: first token and hit share of each policy."""

from __future__ import annotations

import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from hillinfer_bench.serving.servers import (
    RunningServer,
    ServerError,
    command_server,
    hillinfer_server,
)
from hillinfer_bench.serving.streams import Answer, Client, connected
from hillinfer_bench.traces.table import aligned

POLICIES = ("prefix", "least-loaded", "round-robin")
NAMES = ("a", "b")
_PROGRAM = "from hillinfer_hosts.cli import main; main()"
_WAIT_SECONDS = 120.0
_ANSWER_TOKENS = 4
# Behind what an agent says a moment later.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True)
class RoutingRow:
    """What one policy did.

    Parameters
    ----------
    policy
        Its name.
    requests, prompt_tokens, cached_tokens
        That were answered, their prompts' tokens, and how many of these came from a store.
    first_p50, first_p95
        Seconds to the first token.
    looking_seconds
        Mean of what the router took to make tokens and keys and to ask its directory.
    """

    policy: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    first_p50: float
    first_p95: float
    looking_seconds: float

    @property
    def hit_share(self) -> float:
        """Tokens of prompts that came from a store."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@contextmanager
def two_replicas(
    place: Path, model: str, python: Sequence[str] = (sys.executable,)
) -> Iterator[list[RunningServer]]:
    """Run two replicas of a model, each with a store, and a thread for its computing.

    Parameters
    ----------
    place, model
        Where they keep what is theirs, and which model they serve.
    python
        The interpreter, with options of its own.
    """
    with ExitStack() as opened:
        options = ("--threads", "1", "--parallel", "2", "--dram-budget", "1GiB")
        yield [
            opened.enter_context(hillinfer_server(place / name, model, 2, options, python=python))
            for name in NAMES
        ]


def measure_policy(
    place: Path,
    policy: str,
    replicas: Sequence[RunningServer],
    documents: Sequence[str],
    questions: int,
    together: int,
    connect: Callable[[RunningServer], AbstractContextManager[Client]] = connected,
    python: Sequence[str] = (sys.executable,),
) -> RoutingRow:
    """Ask about documents that no store knows, through a router with one policy.

    Parameters
    ----------
    place
        Directory of the replicas and of logs.
    policy
        Of the router.
    replicas
        As `two_replicas` gives them.
    documents
        Whose questions come in a drawn order, the same for every policy.
    questions
        About each.
    together
        Requests under way at once.
    connect
        Makes the client that asks the router.
    python
        The interpreter of router and agents, with options of its own.
    """
    with routed(place, policy, replicas, python) as router, connect(router) as client:
        order = [number for number in range(len(documents)) for _ in range(questions)]
        random.Random(3).shuffle(order)
        prompts = [f"{documents[one]}\n\nQuestion {at}?" for at, one in enumerate(order)]
        answers = _asked(client, prompts, together)
        looking = _mean(router, "hillinfer_router_looking_seconds")
    first = [one.first_seconds for one in answers]
    cuts = quantiles(first, n=20, method="inclusive")
    return RoutingRow(
        policy,
        len(answers),
        sum(one.prompt_tokens for one in answers),
        sum(one.cached_tokens for one in answers),
        cuts[9],
        cuts[18],
        looking,
    )


@contextmanager
def routed(
    place: Path,
    policy: str,
    replicas: Sequence[RunningServer],
    python: Sequence[str] = (sys.executable,),
) -> Iterator[RunningServer]:
    """Run a router with a policy before replicas, and an agent beside each.

    Parameters
    ----------
    place
        Directory of the replicas and of logs.
    policy
        Of the router.
    replicas
        As `two_replicas` gives them; the router is asked in the way of the first.
    python
        As of `measure_policy`.
    """
    with ExitStack() as opened:
        own = ("router", "--port", "0", "--policy", policy)
        router = opened.enter_context(
            command_server(place, f"router-{policy}", _PROGRAM, own, replicas[0].model, python)
        )
        for name, replica in zip(NAMES, replicas, strict=True):
            options = ["agent", "--port", "0", "--store", str(place / name / "store")]
            options += ["--replica", replica.url, "--directory", router.url, "--name", name]
            opened.enter_context(
                command_server(place, f"agent-{policy}-{name}", _PROGRAM, options, "none", python)
            )
        _await_hosts(router, len(replicas))
        yield router


def routing_text(rows: Sequence[RoutingRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = [("policy", "requests", "hit share", "first token p50", "p95", "the router's own")]
    lines += [
        (
            row.policy,
            f"{row.requests}",
            f"{row.hit_share:.3f}",
            f"{row.first_p50:.2f} s",
            f"{row.first_p95:.2f} s",
            f"{1000 * row.looking_seconds:.1f} ms",
        )
        for row in rows
    ]
    return aligned(lines)


# --- inside ---


def _asked(client: Client, prompts: Sequence[str], together: int) -> list[Answer]:
    def one(prompt: str) -> Answer:
        return client.ask(prompt, _ANSWER_TOKENS)

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(one, prompts))


def _await_hosts(router: RunningServer, count: int) -> None:
    def announced() -> int:
        told = json.loads(_got(f"{router.url}/hosts"))["hosts"]
        return sum(bool(one["agent"]) for one in told)

    _await(lambda: announced() >= count)
    time.sleep(_SETTLED_SECONDS)


def _await(what: Callable[[], bool]) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while not what():
        if time.monotonic() > until:
            raise ServerError("the agents did not announce their stores")
        time.sleep(0.1)


def _mean(router: RunningServer, name: str) -> float:
    text = _got(f"{router.url}/metrics")
    numbers = [
        float(found[1]) if (found := re.search(rf"^{name}_{end} (\S+)", text, re.MULTILINE)) else 0
        for end in ("sum", "count")
    ]
    return numbers[0] / max(1.0, numbers[1])


def _got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
