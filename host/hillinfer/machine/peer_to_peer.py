# SPDX-License-Identifier: Apache-2.0
"""What XRT's driver says about peer-to-peer transfers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class P2PState(StrEnum):
    """Whether a drive can reach a card's memory."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    REBOOT = "enabled after a warm reboot"
    WRONG = "remapped wrongly"
    UNSUPPORTED = "not supported by the shell"
    UNKNOWN = "unknown without XRT's driver"


@dataclass(frozen=True)
class PeerToPeer:
    """Whether a drive can reach a card's memory, and what that takes.

    Parameters
    ----------
    state
        As `xbutil examine --report platform` has it under `P2P Status`.
    needed_bytes
        Size of the window on the bus that shows the card's memory; None where nobody says it.
    """

    state: P2PState
    needed_bytes: int | None = None

    @classmethod
    def of_config(cls, config: str) -> PeerToPeer:
        """Read what the driver's `config` node says, in XRT's own order.

        Lines are `name:bytes`: `bar`, the window as it is; `exp_bar`, as it must be; `rbar`, as the
        card asks for it at the next boot; `remap`, what of it leads to memory. A shell without P2P
        has no `bar`.

        Parameters
        ----------
        config
            The node's text; nothing where there is none.
        """
        sizes = {}
        for line in config.splitlines():
            name, _, value = line.partition(":")
            # Lines of memory banks have a third part.
            if value.strip().isdecimal():
                sizes[name.strip()] = int(value)
        window, needed = sizes.get("bar"), sizes.get("exp_bar")
        if window is None:
            return cls(P2PState.UNSUPPORTED)
        if sizes.get("rbar", 0) > window:
            return cls(P2PState.REBOOT, needed)
        if sizes.get("remap", 0) not in (0, window):
            return cls(P2PState.WRONG, needed)
        return cls(P2PState.ENABLED if needed == window else P2PState.DISABLED, needed)
