# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the worker about one step: prompts to load, and rows to store."""

from __future__ import annotations

from dataclasses import dataclass, field

from hillinfer.store.keys import Namespace


@dataclass(frozen=True)
class Prompt:
    """A prompt that the store may know.

    Parameters
    ----------
    ids
        Token numbers.
    salt
        Keeps tenants apart: what another salt has stored is not found.
    adapter
        Digest of the adapter that its rows are made with; empty where there is none.
    """

    ids: tuple[int, ...]
    salt: bytes = b""
    adapter: str = ""


@dataclass(frozen=True)
class PlannedLoad:
    """Rows that this step's forward pass needs.

    Parameters
    ----------
    request
        Its id.
    prompt
        Whose rows.
    first, stop
        Token positions that are loaded; whole blocks.
    blocks
        Blocks of the request from its first token on.
    namespace
        Of another engine's rows; None for those of this one.
    """

    request: str
    prompt: Prompt
    first: int
    stop: int
    blocks: tuple[int, ...]
    namespace: Namespace | None = None


@dataclass(frozen=True)
class PlannedSave:
    """Prompt rows that are in their blocks once this step is through.

    Parameters
    ----------
    request
        Its id.
    prompt
        Whose rows.
    stored
        Tokens that the store had of it when the request began.
    stop
        Position behind the last token computed by this step, within the prompt.
    blocks
        Blocks of the request from its first token on.
    """

    request: str
    prompt: Prompt
    stored: int
    stop: int
    blocks: tuple[int, ...]


@dataclass
class StepPlan:
    """All of one step.

    Parameters
    ----------
    loads, saves
        In no order.
    publishes
        Requests, and positions below which all ranks have written their rows in earlier steps;
        none where there is one rank.
    """

    loads: list[PlannedLoad] = field(default_factory=list)
    saves: list[PlannedSave] = field(default_factory=list)
    publishes: list[tuple[str, int]] = field(default_factory=list)
