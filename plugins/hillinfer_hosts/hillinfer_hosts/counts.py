# SPDX-License-Identifier: Apache-2.0
"""What a router counts, as Prometheus asks for it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class RouterCounts:
    """Counters of one router, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        name = "hillinfer_router_"
        own = self._registry
        self.requests = Counter(
            f"{name}requests",
            "Requests by host and by what it was chosen for.",
            ["host", "way"],
            registry=own,
        )
        self.prompt_tokens = Counter(
            f"{name}prompt_tokens", "Of prompts that were looked up.", registry=own
        )
        self.held_tokens = Counter(
            f"{name}held_tokens", "Of these, what the chosen host was said to hold.", registry=own
        )
        self.lost = Counter(
            f"{name}lost_hosts", "Times that a host did not answer.", ["host"], registry=own
        )
        self.again = Counter(
            f"{name}requests_again", "Requests that another host answered after that.", registry=own
        )
        self.brought_tokens = Counter(
            f"{name}brought_tokens",
            "That hosts brought from others before a request.",
            registry=own,
        )
        self.brought_bytes = Counter(
            f"{name}brought_bytes", "Read between hosts for it.", registry=own
        )
        self.looking_seconds = Histogram(
            f"{name}looking_seconds",
            "Making tokens and keys, and asking the directory.",
            registry=own,
        )
        self.hosts = Gauge(f"{name}hosts", "Hosts that are there.", registry=own)

    def text(self) -> bytes:
        """Return all of it in Prometheus' format."""
        return generate_latest(self._registry)
