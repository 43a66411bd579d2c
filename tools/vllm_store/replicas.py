# SPDX-License-Identifier: Apache-2.0
"""Two servers of vLLM with a store each behind a router: who is asked, what moves, one killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from hillinfer.store.maintenance import Parts
from hillinfer.store.store import Store
from hillinfer_bench.hosts.routing import NAMES, RoutingRow, measure_policy, routed, routing_text
from hillinfer_bench.serving.servers import RunningServer
from hillinfer_bench.serving.streams import Texts
from hillinfer_hosts.agent import FETCH, fetch_body
from hillinfer_hosts.transfer import Wanted
from hillinfer_model.kernel_spec import GROUP_TOKENS
from vllm_store.engines import SERVED, Installed, kill, vllm_servers

_CHAT = "/v1/chat/completions"
_POLICIES = ("prefix", "round-robin")
_SECONDS, _WAIT_SECONDS = 300.0, 60.0
# Characters of an answer that a client has when its host is killed.
_BEFORE_KILL = 8
_Got = TypeVar("_Got")


@dataclass(frozen=True)
class ReplicasCase:
    """What two servers are asked.

    Parameters
    ----------
    documents, document_tokens, questions
        Of each policy: how many, how long, and how often each is asked about.
    together
        Requests under way at once.
    answer_tokens
        Of an answer whose host is killed.
    """

    documents: int = 4
    document_tokens: int = 1000
    questions: int = 3
    together: int = 2
    answer_tokens: int = 64

    @property
    def most_share(self) -> float:
        """Share of prompts that stores can have at most: each document is read once."""
        return 1 - 1 / self.questions


def replicas_report(installed: Installed, folder: Path, case: ReplicasCase) -> dict[str, Any]:
    """Run two servers, an agent beside each and a router, and return what they did.

    Parameters
    ----------
    installed
        Of vLLM.
    folder
        Where stores and logs are.
    case
        What is asked.
    """
    from transformers import AutoTokenizer

    texts = Texts(AutoTokenizer.from_pretrained(installed.model))
    places = [folder / name for name in NAMES]
    print("two servers of vLLM with a store each", flush=True)
    with vllm_servers(installed, places, 1, 2 * case.document_tokens, "1GB") as servers:
        rows = []
        for policy in _POLICIES:
            print(f"{policy}: {case.documents * case.questions} requests", flush=True)
            documents = [texts.take(case.document_tokens) for _ in range(case.documents)]
            rows.append(
                measure_policy(folder, policy, servers, documents, case.questions, case.together)
            )
            # Whatever comes behind it.
            print(routing_text(rows[-1:]), flush=True)
        with (
            routed(folder, "prefix", servers) as router,
            httpx.Client(timeout=_SECONDS, trust_env=False) as client,
        ):
            asking = _Asking(client, router, dict(zip(NAMES, servers, strict=True)))
            print("rows go from one store to the other", flush=True)
            moved = _transferred(asking, texts.take(case.document_tokens))
            print("one is killed over an answer", flush=True)
            killed = _killed(asking, texts.take(case.document_tokens), case.answer_tokens)
    with closing(Store(folder / killed["host"] / "store")) as store:
        killed["wrong_chunks"] = store.verify(Parts.ALL).wrong
    return {
        "label": "measured: two servers of vLLM on this machine, one thread each",
        **asdict(case),
        "most_share": case.most_share,
        "policies": [asdict(row) | {"hit_share": row.hit_share} for row in rows],
        "moved": moved,
        "killed": killed,
        "errors": _errors(rows, moved, killed),
    }


# --- inside ---


@dataclass(frozen=True)
class _Asking:
    """Asks a router, or a server behind it."""

    client: httpx.Client
    router: RunningServer
    servers: Mapping[str, RunningServer]

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return what the router knows of its hosts, by name."""
        told = self.client.get(f"{self.router.url}/hosts").json()["hosts"]
        return {one["name"]: one for one in told}

    def ask(self, name: str, text: str, tokens: int) -> tuple[str, int, float]:
        """Return a server's answer, how much of the prompt its store had, and the seconds."""
        began = time.perf_counter()
        told = self.client.post(self.servers[name].url + _CHAT, json=_body(text, tokens)).json()
        details = told["usage"].get("prompt_tokens_details") or {}
        said = told["choices"][0]["message"]["content"]
        return said, int(details.get("cached_tokens") or 0), time.perf_counter() - began

    def ids(self, name: str, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        url = f"{self.servers[name].url}/tokenize"
        told = self.client.post(url, json=_body(text, 1)).json()["tokens"]
        return [int(one) for one in told]


def _body(text: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    told = {"model": SERVED, "messages": messages, "max_tokens": tokens}
    return told | {"temperature": 0, "ignore_eos": True}


def _transferred(asking: _Asking, text: str) -> dict[str, Any]:
    """Have one server read a text, bring its rows to the other's store, and ask that one."""
    computed, _, read_seconds = asking.ask("a", text, 8)
    # What is stored is published a moment later.
    again, cached = _until(lambda: asking.ask("a", text, 8)[:2], lambda got: got[1] > 0)
    ids = asking.ids("a", text)
    hosts = asking.hosts()
    wanted = tuple(ids[: len(ids) // GROUP_TOKENS * GROUP_TOKENS])
    digest = bytes.fromhex(hosts["a"]["namespaces"][0])
    body = fetch_body(hosts["a"]["agent"], Wanted(digest, wanted, b""), _WAIT_SECONDS)
    brought = asking.client.post(hosts["b"]["agent"] + FETCH, json=body).json()
    said, found, seconds = asking.ask("b", text, 8)
    return {
        "prompt_tokens": len(ids),
        "brought_tokens": brought.get("new_tokens", 0),
        "brought_bytes": brought.get("bytes", 0),
        "brought_seconds": brought.get("seconds"),
        "failure": brought.get("failure", str(brought)),
        "found_at_holder": cached,
        "found": found,
        "answer_equal": said == again,
        "computed_equal": said == computed,
        "read_seconds": read_seconds,
        "answer_seconds": seconds,
    }


def _killed(asking: _Asking, text: str, tokens: int) -> dict[str, Any]:
    """Kill the server that answers a stream, in the middle of its answer."""
    wholes = {}
    for name in asking.servers:
        asking.ask(name, text, 1)
        wholes[name] = _until(
            lambda own=name: asking.ask(own, text, tokens)[:2], lambda got: got[1] > 0
        )[0]
    said, names, error, is_done, host, at = "", set(), "", False, "", 0
    began = time.perf_counter()
    gap, last = 0.0, began
    body = _body(text, tokens) | {"stream": True}
    with asking.client.stream("POST", asking.router.url + _CHAT, json=body) as answer:
        host = answer.headers["X-HillInfer-Host"]
        for line in answer.iter_lines():
            is_done |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            gap, last = max(gap, time.perf_counter() - last), time.perf_counter()
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = str(event["error"])
                break
            names.add(event["id"])
            said += event["choices"][0]["delta"].get("content") or ""
            if len(said) > _BEFORE_KILL and not at:
                at = len(said)
                kill(asking.servers[host])
    left = next(name for name in asking.servers if name != host)
    known = _until(lambda: sorted(asking.hosts()), lambda names: names == [left])
    later = asking.client.post(asking.router.url + _CHAT, json=_body(text, 4))
    return {
        "host": host,
        "characters_before": at,
        "characters": len(said),
        "done": is_done,
        "error": error,
        "answers": len(names),
        "answer_equal": said == wholes[left],
        "answers_of_both_equal": len(set(wholes.values())) == 1,
        "seconds": time.perf_counter() - began,
        "longest_pause_seconds": gap,
        "hosts_left": known,
        "later_host": later.headers.get("X-HillInfer-Host", ""),
        "later_status": later.status_code,
    }


def _until(act: Callable[[], _Got], is_right: Callable[[_Got], bool]) -> _Got:
    """Return what an act gives once it is right, or after a while whatever it is."""
    until = time.monotonic() + _WAIT_SECONDS
    while not is_right(got := act()) and time.monotonic() < until:
        time.sleep(0.5)
    return got


def _errors(
    rows: Sequence[RoutingRow], moved: Mapping[str, Any], killed: Mapping[str, Any]
) -> list[str]:
    prefix, others = rows[0], rows[1:]
    texts = (
        (
            any(prefix.hit_share <= one.hit_share for one in others),
            "the prefix policy found no more than round robin",
        ),
        (moved["failure"], f"rows did not move: {moved['failure']}"),
        (not moved["found"], "rows that were brought were not found"),
        (not moved["answer_equal"], "another answer from rows that were brought"),
        (killed["error"] or not killed["done"], f"an answer was lost: {killed['error']}"),
        (not killed["answer_equal"], "another answer behind a host that was killed"),
        (killed["later_host"] == killed["host"], "a dead host was asked"),
        (killed["later_status"] != 200, "no answer behind a host that was killed"),
        (killed["wrong_chunks"], "the store of a killed host has wrong chunks"),
    )
    return [text for is_wrong, text in texts if is_wrong]
