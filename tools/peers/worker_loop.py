# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the protocol: a JSON object per line in, one per line out.

`{"op": "open", ...}` is answered with facts about what was opened, `{"op": "run", "prompt": ids,
"follow": ids, ...}` with times and tokens, `{"op": "restore", ...}` with a time; anything that
fails with `{"error": text}`. Standard library only: this runs in environments that know nothing of
HillInfer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

# Variables with these beginnings say how a runtime's threads wait and where they run.
_OF_THREADS = ("GOMP_", "KMP_", "LD_PRELOAD", "MKL_", "OMP_", "VLLM_")


class Worker(ABC):
    """One runtime with a model in it."""

    @abstractmethod
    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load `model` with `threads`; return versions, types and settings that were used."""

    @abstractmethod
    def tokens(self, prompt: Sequence[int], follow: Sequence[int]) -> Iterator[int]:
        """Yield the most probable token after the prompt, and after each of `follow` but the last.

        Each is yielded as it is known; what is decoded next is not that token but the text's own,
        in `follow`. So every runtime chooses after the same tokens, and one other choice does not
        make all later ones other.
        """

    def restore(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds to the first token where the first `held` tokens come from `file`.

        They are read once before and saved there.
        """
        raise NotImplementedError("this runtime saves no cache")

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens, seconds to the first and seconds from each to the next."""
        times, found = [time.perf_counter()], []
        for token in self.tokens(request["prompt"], request["follow"]):
            times.append(time.perf_counter())
            found.append(token)
        return {
            "ttft_seconds": times[1] - times[0],
            "step_seconds": [after - before for before, after in pairwise(times[1:])],
            "tokens": found,
        }


def serve(worker: Worker) -> None:
    """Answer requests until standard input ends.

    What is told of an opened runtime has the variables of its threads among its `settings`, as they
    were once it was loaded: runtimes set some themselves.
    """
    # Libraries print; only answers may go where the parent listens.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    operations = {"open": worker.open, "run": worker.run, "restore": worker.restore}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = operations[request["op"]](request)
            if request["op"] == "open":
                answer["settings"] = answer["settings"] | {"variables": _variables()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _variables() -> dict[str, str]:
    """Return the environment's variables that bear on threads."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_OF_THREADS)}
