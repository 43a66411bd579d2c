# SPDX-License-Identifier: Apache-2.0
"""Faults in what a cache is when something ended in the middle of what was done with it."""

from __future__ import annotations

from mutants.mutant import Mutant

_HF = "host/hillinfer/hf"
_TESTS = "tests/host"
_CUT = f"{_TESTS}/faults/test_cut_batches.py"

CACHES: tuple[Mutant, ...] = (
    Mutant(
        "cropped-twice-where-rows-come-back",
        "A crop that is made again behind lost rows counts from what it has cut already.",
        f"{_HF}/cache.py",
        "if length is None:",
        "if True:",
        (f"{_CUT}::test_rows_that_are_computed_between_are_cut_once",),
    ),
    Mutant(
        "half-cut-batch",
        "A batch that a crop broke off within goes on with rows of different lengths.",
        f"{_HF}/cache.py",
        "if self._batch.is_even:",
        "if True:",
        (f"{_CUT}::test_what_comes_next_cuts_what_a_drive_that_failed_left",),
    ),
    Mutant(
        "refused-fork-keeps-rows",
        "Rows of a batch's fork that the budget refused in the middle are never freed.",
        f"{_HF}/batch.py",
        """        except BaseException:
            copy.clear()
            raise
""",
        """        except BaseException:
            raise
""",
        (
            f"{_TESTS}/hf/test_cache_operations.py::"
            "test_a_fork_of_a_batch_that_the_budget_refuses_keeps_none_of_its_rows",
        ),
    ),
)
