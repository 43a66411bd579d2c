# SPDX-License-Identifier: Apache-2.0
"""The command `hillinfer-hosts`: a router in front of replicas, and an agent beside each."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Annotated

import httpx
import typer

from hillinfer.cli.console import error_console
from hillinfer.cli.parsing import Program
from hillinfer.store.store import Store
from hillinfer_hosts.agent import Agent
from hillinfer_hosts.announcing import Announcer, RouterDirectory, host_client
from hillinfer_hosts.choice import POLICIES, make_policy
from hillinfer_hosts.directory import (
    Directory,
    EmbeddedDirectory,
    Host,
    HostsError,
    checked_url,
)
from hillinfer_hosts.fleet import Fleet
from hillinfer_hosts.held import HeldPrefixes
from hillinfer_hosts.prompts import SaltRule
from hillinfer_hosts.redis_directory import RedisDirectory
from hillinfer_hosts.router import Router, RouterRules
from hillinfer_hosts.running import Listening, read_key
from hillinfer_hosts.transports import Transporting, opened_transport

_RULES = RouterRules()
# Addresses of all interfaces.
_EVERYWHERE = ("0.0.0.0", "::", "[::]")
# May have a password, which whoever lists processes would see in an option.
_DIRECTORY = "HILLINFER_HOSTS_DIRECTORY"
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File whose first line is the key that hosts share; needed between machines."
    ),
]


def _in_redis(directory: str) -> bool:
    return directory.startswith(("redis://", "rediss://", "unix://"))


def router(
    *,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8100,
    replica: Annotated[
        list[str] | None,
        typer.Option(help="URL of a replica without an agent; give it again for more."),
    ] = None,
    directory: Annotated[
        str,
        typer.Option(
            envvar=_DIRECTORY,
            help="Where is kept who holds what: memory, a file, or redis://HOST for several.",
        ),
    ] = "memory",
    policy: Annotated[str, typer.Option(help=", ".join(POLICIES) + ".")] = "prefix",
    salts: Annotated[
        SaltRule, typer.Option(help="body: cache_salt, as vLLM. key: API keys, as hillinfer serve.")
    ] = SaltRule.BODY,
    salt: Annotated[str, typer.Option(help="Salt that the replicas run with.")] = "",
    transfer: Annotated[
        int,
        typer.Option(
            help="Bring a prefix from another host where that has so many tokens more; 0: never."
        ),
    ] = _RULES.transfer_tokens,
    transfer_seconds: Annotated[
        float, typer.Option(help="After which a request goes on without.")
    ] = _RULES.transfer_seconds,
    key_file: KeyFile = None,
) -> None:
    """Send requests of OpenAI's clients to replicas, each to who has read most of its prompt."""
    key = read_key(key_file, host)
    kept: Directory
    if _in_redis(directory):
        kept = RedisDirectory(directory, key=key, say=error_console().print)
    else:
        kept = EmbeddedDirectory(None if directory == "memory" else directory)
    rules = RouterRules(
        key=key,
        host=host,
        salts=salts,
        salt=salt.encode(),
        transfer_tokens=transfer,
        transfer_seconds=transfer_seconds,
    )
    fleet = Fleet(
        kept, make_policy(policy), tuple(checked_url(one, "--replica") for one in replica or ())
    )
    try:
        listening = Listening(lambda url: Router(kept, fleet, rules).application(), host, port)
        print(f"listening at {listening.url}", flush=True)
        listening.run()
    finally:
        kept.close()


def agent(
    *,
    store: Annotated[Path, typer.Option(help="The replica's store.")],
    replica: Annotated[str, typer.Option(help="URL of the replica, as other hosts reach it.")],
    directory: Annotated[
        str,
        typer.Option(
            envvar=_DIRECTORY, help="URL of the router, or redis://HOST where several share it."
        ),
    ],
    url: Annotated[
        str | None, typer.Option(help="URL of this agent, as other hosts reach it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What it is called; by default its own name.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8200,
    transport: Annotated[
        Transporting, typer.Option(help="Brings rows from hosts that have it too.")
    ] = Transporting.HTTP,
    key_file: KeyFile = None,
) -> None:
    """Say what a replica's store holds, serve its extents to others, and bring some of theirs."""
    key = read_key(key_file, host)
    replica = checked_url(replica, "--replica")
    if url is not None:
        url = checked_url(url, "--url")
    elif host in _EVERYWHERE:
        raise HostsError(
            f"--host {host} is no address that other hosts reach this agent at: name one with --url"
        )
    console = error_console()
    with Store(store) as opened:
        held = HeldPrefixes(opened)
        reached = (
            RedisDirectory(directory, key=key)
            if _in_redis(directory)
            else RouterDirectory(directory, key)
        )
        application = Agent(
            opened, key, host=host, transport=opened_transport(transport)
        ).application()
        listening = Listening(lambda url: application, host, port)
        own = Host(
            name or f"{socket.gethostname()}:{listening.url.rpartition(':')[2]}",
            replica,
            url or listening.url,
            secrets.token_hex(8),
        )
        asking = host_client(own.replica, "", 2.0)
        announcer = Announcer(
            own, held, reached, is_there=lambda: answers(asking), say=console.print
        )
        try:
            print(f"listening at {listening.url}", flush=True)
            listening.run()
        finally:
            announcer.close()
            asking.close()
            reached.close()


def answers(replica: httpx.Client) -> bool:
    """Return whether a replica says that it is well."""
    try:
        told = replica.get("/health")
    except httpx.HTTPError:
        return False
    return told.status_code == httpx.codes.OK


main = Program(
    "hillinfer-hosts",
    "Many hosts with a store each: requests go to who has read their prompts.",
    (router, agent),
)
