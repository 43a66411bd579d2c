# SPDX-License-Identifier: Apache-2.0
"""The workload: which document is asked for when, by Mooncake's trace, with real texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from hillinfer.errors import SettingsError
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.traces.request_trace import RequestTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS

# The first block is the same in all requests; the second one tells contexts apart.
_IDENTITY = 1
_LEAST_USES = 3


@dataclass(frozen=True)
class AskedDocument:
    """A document of a workload: its name, and token numbers in whole groups of 64."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """One request: when, in seconds, and the number of the document."""

    time: float
    document: int


@dataclass(frozen=True)
class Workload:
    """Documents, and requests for them in order of time."""

    documents: tuple[AskedDocument, ...]
    requests: tuple[Asked, ...]


@dataclass(frozen=True)
class WorkloadSize:
    """How large a workload is.

    Parameters
    ----------
    documents, requests
        How many.
    shortest, longest
        Tokens of a document, whole groups of 64.
    seed
        Of which identities are drawn.
    """

    documents: int = 12
    requests: int = 60
    shortest: int = 512
    longest: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        if self.documents < 1 or self.requests < 1:
            raise SettingsError(
                f"documents={self.documents}, requests={self.requests}: give 1 or more of each"
            )
        if not GROUP_TOKENS <= self.shortest <= self.longest:
            raise SettingsError(
                f"shortest={self.shortest}, longest={self.longest}: give {GROUP_TOKENS} or more, "
                "ascending"
            )


def mooncake_workload(tokenizer: Any, size: WorkloadSize) -> Workload:
    """Return identities that are asked for three times or more, in the order of the trace.

    Lengths are those of the trace, brought into the range that was asked for by one factor. Texts
    are parts of the Python reference.

    Raises
    ------
    SettingsError
        Where the trace has not as many such identities.
    """
    trace = RequestTrace.carried("conversation")
    seen = [one for one in trace.requests if len(one.blocks) > _IDENTITY]
    counts = Counter(one.blocks[_IDENTITY] for one in seen)
    often = sorted(block for block, count in counts.items() if count >= _LEAST_USES)
    if size.documents > len(often):
        raise SettingsError(
            f"documents={size.documents}: the trace has {len(often)} contexts that are used "
            f"{_LEAST_USES} times or more"
        )
    draw = np.random.default_rng(size.seed)
    chosen = [often[at] for at in draw.choice(len(often), size.documents, replace=False)]
    numbers = {block: number for number, block in enumerate(chosen)}
    lengths: dict[int, int] = {}
    requests = []
    for one in seen:
        number = numbers.get(one.blocks[_IDENTITY])
        if number is not None:
            lengths.setdefault(number, one.tokens)
            requests.append(Asked(one.time, number))
    factor = size.longest / max(lengths.values())
    texts = standard_library_samples(tokenizer, size.longest, size.documents)
    documents = []
    for number, text in enumerate(texts):
        tokens = int(lengths[number] * factor) // GROUP_TOKENS * GROUP_TOKENS
        tokens = min(max(tokens, size.shortest), size.longest) // GROUP_TOKENS * GROUP_TOKENS
        documents.append(AskedDocument(text.name, text.token_ids[:tokens]))
    return Workload(tuple(documents), tuple(requests[: size.requests]))
