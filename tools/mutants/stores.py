# SPDX-License-Identifier: Apache-2.0
"""Faults of what a store takes in, writes and gives out."""

from __future__ import annotations

from mutants.mutant import Mutant

_INTAKE = "tests/host/store/test_intake.py"
_EXCHANGE = "tests/host/reuse/test_session_exchange.py"
_PROMPTS = "tests/host/reuse/test_stored_prompts.py"

STORES: tuple[Mutant, ...] = (
    Mutant(
        "writer-evicts-its-own",
        "What a prompt has just stored gives way to what it stores next.",
        "host/hillinfer/store/writer.py",
        "        self._room.keep([own.record.number for own in full])\n",
        "",
        (f"{_INTAKE}::test_a_writer_does_not_evict_what_it_just_stored",),
    ),
    Mutant(
        "writes-of-this-process-alone",
        "The cap on writes knows nothing of what was written before the store was opened.",
        "host/hillinfer/store/room.py",
        """                self._budget.resume(said)
                return said
""",
        """                return said
""",
        (f"{_INTAKE}::test_the_cap_holds_for_a_day_and_across_restarts",),
    ),
    Mutant(
        "what-was-seen-is-forgotten",
        "What an admission learned ends with the process.",
        "host/hillinfer/store/room.py",
        """            if said["name"] == self._name:
                made.resume(said["state"])
""",
        "            assert said\n",
        (f"{_INTAKE}::test_a_prompt_is_stored_when_it_is_seen_again",),
    ),
    Mutant(
        "rows-of-answers-imported",
        "A session's segment counts as read densely whatever its statistics are.",
        "host/hillinfer/reuse/session_exchange.py",
        """            or not np.array_equal(own.exponents, kept.exponents)
            or not np.array_equal(own.means, kept.means)
""",
        "",
        (f"{_EXCHANGE}::test_rows_of_answers_are_not_imported",),
    ),
    Mutant(
        "first-decoded-token-imported",
        "The last group before decoding shows is imported, too.",
        "host/hillinfer/reuse/session_exchange.py",
        "    return max(0, whole * size - GROUP_TOKENS)",
        "    return max(0, whole * size)",
        (f"{_EXCHANGE}::test_rows_of_answers_are_not_imported",),
    ),
    Mutant(
        "failed-read-not-counted",
        "A drive that fails while rows are read is neither counted nor told.",
        "host/hillinfer/store/prefix.py",
        """        except OSError as error:
            self._wrong(error)
            raise
""",
        """        except OSError:
            raise
""",
        (f"{_PROMPTS}::test_a_drive_that_fails_is_a_miss_or_an_error_where_that_is_wanted",),
    ),
)
