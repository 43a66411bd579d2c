# SPDX-License-Identifier: Apache-2.0
"""Which scorer the host's processor uses."""

from __future__ import annotations

from hillinfer.hie.native_scorer import NativeScorer
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer.native.library import native_is_here
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec


def host_scorer(spec: KernelSpec, scope: Scope) -> NativeScorer | TorchScorer:
    """Return the native scorer where its library can be used, else the torch one: the same bits.

    Parameters
    ----------
    spec, scope
        As for both of them.
    """
    return NativeScorer(spec, scope) if native_is_here() else TorchScorer(spec, scope)
