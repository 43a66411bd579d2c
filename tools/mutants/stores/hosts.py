# SPDX-License-Identifier: Apache-2.0
"""Faults of many hosts: who is asked, what comes from elsewhere, and ranks of one engine."""

from __future__ import annotations

from mutants.mutant import Mutant

_HOSTS = "plugins/hillinfer_hosts/hillinfer_hosts"
_VLLM = "plugins/hillinfer_vllm/hillinfer_vllm"
_TESTS = "tests/host/hosts"
_STORE = "tests/host/store"

HOSTS: tuple[Mutant, ...] = (
    Mutant(
        "transferred-rows-unchecked",
        "Rows that come from another host are stored whatever they are.",
        f"{_HOSTS}/transfer.py",
        "if (sums != sheet.row_sums[layer + at, begin:stop]).any():",
        "if not len(sums):",
        (f"{_TESTS}/test_transfer.py::test_damaged_rows_do_not_arrive",),
    ),
    Mutant(
        "direct-memory-for-two",
        "A range longer than a piece of registered memory is written over the next piece.",
        f"{_HOSTS}/transports.py",
        "yield piece[:byte_count] if byte_count <= len(piece) else None",
        "yield piece[:byte_count]",
        (
            f"{_TESTS}/test_transports.py"
            "::test_memory_is_given_to_one_at_a_time_and_hosts_are_forgotten",
        ),
    ),
    Mutant(
        "direct-writing-is-believed",
        "Rows that another transport could not write are taken as written.",
        f"{_HOSTS}/agent.py",
        "                return True\n        return False",
        "                return True\n        return True",
        (f"{_TESTS}/test_transports.py::test_what_a_transport_does_not_bring_comes_by_http",),
    ),
    Mutant(
        "vllm-reads-made-again-are-not-placed",
        "Rows of a read that brought less at first are not in vLLM's blocks.",
        "host/hillinfer/store/pool_files.py",
        "native_library().rows_to_blocks(rows[number])",
        "pass",
        (
            f"{_STORE}/test_vllm_steps.py"
            "::test_a_read_that_brings_less_is_made_again_and_one_that_fails_is_told",
        ),
    ),
    Mutant(
        "vllm-sums-unread",
        "What threads that read found wrong is computed with.",
        f"{_VLLM}/loading.py",
        "sums = self._sums[own] if self._is_placed[own].all() else self._landed(one)",
        "sums = one._expected",
        (
            f"{_STORE}/test_vllm_steps.py"
            "::test_damaged_rows_are_told_and_what_lies_behind_them_is_not_stored",
        ),
    ),
    Mutant(
        "extents-for-everybody",
        "An agent gives rows out without the key of the hosts.",
        f"{_HOSTS}/gate.py",
        "return not self._told or hmac.compare_digest(given, self._told)",
        "return bool(given) or not self._told",
        (f"{_TESTS}/test_transfer.py::test_an_agent_gives_nothing_without_the_key",),
    ),
    Mutant(
        "pages-let-in",
        "A page of another place uses a router through a browser of its machine.",
        f"{_HOSTS}/gate.py",
        'if is_of_other_place(request.headers.get("origin"), host):',
        "if not host:",
        (f"{_TESTS}/test_gate.py::test_no_page_asks_a_replica_behind_a_router",),
    ),
    Mutant(
        "redis-hosts-unsigned",
        "Whoever may write to Redis leads requests to a place of his own.",
        f"{_HOSTS}/redis_directory.py",
        "if not hmac.compare_digest(signature, self._signature(host, said)):",
        "if not host.name:",
        (
            f"{_TESTS}/test_directory.py"
            "::test_who_may_write_to_redis_and_has_no_key_leads_nobody_anywhere",
        ),
    ),
    Mutant(
        "redis-hosts-repeated",
        "What a host once said in Redis is believed for ever.",
        f"{_HOSTS}/redis_directory.py",
        "if abs(self._clock() - float(said)) > _SIGNED_SECONDS:",
        "if float(said) < 0:",
        (f"{_TESTS}/test_directory.py::test_what_a_host_said_is_not_repeated_for_ever",),
    ),
    Mutant(
        "redis-hosts-vanish",
        "A host in Redis that is not believed vanishes without a word.",
        f"{_HOSTS}/redis_directory.py",
        "len(self._told) < _MOST_TOLD",
        "not name",
        (f"{_TESTS}/test_directory.py::test_a_host_that_is_not_believed_is_told_once",),
    ),
    Mutant(
        "hosts-key-of-everybody",
        "The hosts' key is taken from a file that others may read.",
        f"{_HOSTS}/running.py",
        "if status.st_mode & (0o077 if is_own else 0o037):",
        "if status.st_mode & (0o007 if is_own else 0o037):",
        (f"{_TESTS}/test_gate.py::test_a_key_that_others_may_read_is_refused",),
    ),
    Mutant(
        "slow-hosts-lost",
        "A host that takes too long is forgotten, and its request asked of the next one.",
        f"{_HOSTS}/router.py",
        "if isinstance(error, _LOSSES):",
        "if isinstance(error, httpx.TransportError):",
        (f"{_TESTS}/test_router.py::test_a_host_that_is_slow_is_not_lost",),
    ),
    Mutant(
        "ranks-brought-singly",
        "Of one engine's ranks the rows of one are brought.",
        f"{_HOSTS}/router.py",
        "for digest, groups in found.items():",
        "for digest, groups in list(found.items())[:1]:",
        (f"{_TESTS}/test_router.py::test_rows_of_every_rank_come_and_of_other_engines_none",),
    ),
    Mutant(
        "transfers-without-end",
        "Another host may send more than it was asked for, as long as it likes.",
        f"{_HOSTS}/transfer.py",
        "if len(content) > most_bytes:",
        "if not most_bytes:",
        (f"{_TESTS}/test_transfer.py::test_a_host_that_never_ends_is_given_up_in_time",),
    ),
    Mutant(
        "announcers-fall-silent",
        "A fault that nobody thought of ends what a host says, without a word.",
        f"{_HOSTS}/announcing.py",
        "except Exception as error:",
        "except ArithmeticError as error:",
        (f"{_TESTS}/test_held.py::test_an_announcer_outlives_whatever_a_directory_does",),
    ),
    Mutant(
        "thoughts-told-twice",
        "Behind a lost host thoughts are told again; only text is compared.",
        f"{_HOSTS}/streams.py",
        '_TEXTS = ("text", "reasoning", "reasoning_content", "refusal", "content")',
        '_TEXTS = ("text", "content")',
        (f"{_TESTS}/test_streams.py::test_thoughts_are_told_once",),
    ),
    Mutant(
        "traces-of-an-hour",
        "Every trace is taken for an hour.",
        "tools/hillinfer_bench/hosts/fleet_table.py",
        "row.requests * DAY_SECONDS / row.span",
        "row.requests * DAY_SECONDS / 3600",
        (f"{_TESTS}/test_fleet.py::test_a_day_has_as_many_requests_as_the_trace_has_in_its_time",),
    ),
    Mutant(
        "dead-hosts-remembered",
        "A host that does not answer stays in the directory.",
        f"{_HOSTS}/fleet.py",
        "            self._directory.forget(host.name)\n",
        "            self._directory.hosts()\n",
        (f"{_TESTS}/test_router.py::test_a_host_that_is_gone_costs_no_answer_and_is_forgotten",),
    ),
    Mutant(
        "differences-of-strangers",
        "A directory takes differences of a host that began anew.",
        f"{_HOSTS}/directory.py",
        "if not change.is_whole and (known is None or known[1] != host.session):",
        "if not change.is_whole and known is None:",
        (
            f"{_TESTS}/test_directory.py::"
            "test_differences_of_who_is_unknown_or_began_anew_are_not_taken",
        ),
    ),
    Mutant(
        "streams-told-twice",
        "A stream that another host goes on with begins anew for the client.",
        f"{_HOSTS}/streams.py",
        'self._skipped, self._waiting = dict(self.texts), b""',
        'self._skipped, self._waiting = {}, b""',
        (f"{_TESTS}/test_router.py::test_a_stream_goes_on_behind_a_host_that_died",),
    ),
    Mutant(
        "tokens-decide-who-answers",
        "Who makes the tokens of a prompt takes the turns of who answers.",
        f"{_HOSTS}/fleet.py",
        "return self._chosen(self._helpers, hosts, {})",
        "return self._chosen(self.policy, hosts, {})",
        (f"{_TESTS}/test_router.py::test_a_prompt_goes_to_who_has_read_it",),
    ),
    Mutant(
        "gone-prefixes-kept",
        "An agent never says that its store holds something no longer.",
        f"{_HOSTS}/held.py",
        "sorted(self._held - held))",
        "())",
        (f"{_TESTS}/test_held.py::test_what_went_is_said_but_not_what_others_have_too",),
    ),
    Mutant(
        "ranks-publish-alone",
        "Rows are published where only some ranks have written theirs.",
        f"{_VLLM}/scheduling.py",
        "if count == ranks]",
        "if count]",
        (f"{_STORE}/test_vllm_ranks.py::test_what_one_rank_has_not_is_found_by_none",),
    ),
    Mutant(
        "ranks-find-alone",
        "A prompt is found as far as the rank that has most of it.",
        f"{_VLLM}/ranks.py",
        "self.tokens = min(tokens)",
        "self.tokens = max(tokens)",
        (f"{_STORE}/test_vllm_ranks.py::test_a_rank_that_lost_rows_keeps_all_from_finding_them",),
    ),
    Mutant(
        "ranks-in-one-namespace",
        "All ranks store their heads under one namespace.",
        f"{_VLLM}/shared_store.py",
        '{**about, "rank": rank, "ranks": ranks}',
        '{**about, "ranks": ranks}',
        (f"{_STORE}/test_vllm_ranks.py::test_each_rank_has_a_namespace_of_its_own",),
    ),
    Mutant(
        "rows-land-beyond-what-is-wanted",
        "Rows behind the last that is loaded overwrite what a pass has computed.",
        f"{_VLLM}/kv_blocks.py",
        "min(position + len(rows), wanted.stop))",
        "position + len(rows))",
        (
            f"{_STORE}/test_vllm_blocks.py"
            "::test_groups_are_checked_as_they_land_and_only_what_is_wanted_does",
        ),
    ),
    Mutant(
        "rows-land-in-any-block",
        "A block's number that is none leads into memory of others.",
        f"{_VLLM}/kv_blocks.py",
        "not 0 <= used.min() <= used.max() < len(self._codes)",
        "used.min() > used.max()",
        (f"{_STORE}/test_vllm_blocks.py::test_rows_go_to_no_block_that_is_not_there",),
    ),
    Mutant(
        "windows-served",
        "A model whose layers attend to windows is served.",
        f"{_VLLM}/refusals.py",
        "or any(one is not None for one in windows)",
        "",
        (f"{_STORE}/test_vllm_refusals.py::test_an_engine_is_refused_with_its_reason",),
    ),
)
