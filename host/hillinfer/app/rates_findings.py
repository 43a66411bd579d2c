# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about rates."""

from __future__ import annotations

from collections.abc import Iterator

from hillinfer.app.kept_rates import KeptRates
from hillinfer.machine.finding import Finding, Verdict


def rates_findings(kept: KeptRates) -> Iterator[Finding]:
    """Yield a line per kept rates; measure nothing."""
    for key, rates in kept.all():
        found = (
            f"fc {_text(rates.f_c)}, fs {_text(rates.f_s)}, Bc {_text(rates.b_c)}, "
            f"Bs {_text(rates.b_s)}, sharing {1e6 * rates.sharing:.0f} us a step "
            f"(measured, one layer; {key.threads} threads, {key.filesystem}, "
            f"kernel {key.spec_hash[:8]}, scope {key.scope})"
        )
        yield Finding(f"rates of {key.device}", Verdict.OK, found)


def _text(rate: float) -> str:
    return f"{rate / 1e6:.2f} M tokens/s" if rate else "none"
