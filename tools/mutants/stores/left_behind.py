# SPDX-License-Identifier: Apache-2.0
"""Faults in what is left behind: memory, stores, rows that were read ahead, a conversation."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host"
_BLOCKS = f"{_TESTS}/pruning/test_blocks.py"
_CROPPED = "test_an_answer_that_is_cropped_leaves_none_of_its_rows_without_pruning_either"
_SAVED = "test_rows_that_entered_are_saved_once_they_lie_in_the_order_of_tokens"

LEFT_BEHIND = (
    Mutant(
        "region-held-for-ever",
        "A session whose loading Ctrl-C broke off is closed, and found by who loads it again.",
        "host/hillinfer/kv/opened_sequences.py",
        "            self._groups.let_all_go()\n",
        "",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::"
            "test_a_session_whose_loading_ctrl_c_broke_off_is_loaded_again",
        ),
    ),
    Mutant(
        "group-owned-by-nobody",
        "A group that Ctrl-C kept from being a sequence's stays owned.",
        "host/hillinfer/kv/opened_sequences.py",
        "                if sequence.group_count == count:\n",
        "                if sequence is None:\n",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::"
            "test_a_session_whose_loading_ctrl_c_broke_off_is_loaded_again",
        ),
    ),
    Mutant(
        "files-handed-to-nobody",
        "Files of a session whose loading Ctrl-C broke off stay open.",
        "host/hillinfer/sessions/opening.py",
        "        for file in (*files, shadow):\n            file.share(open_files)\n",
        "        self._taken = {*names, shadow.name}\n"
        "        for file in (*files, shadow):\n            file.share(open_files)\n",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::"
            "test_a_session_whose_loading_ctrl_c_broke_off_is_loaded_again",
        ),
    ),
    Mutant(
        "engine-of-a-spoilt-count",
        "An engine whose count of caches Ctrl-C spoiled keeps its threads and files.",
        "host/hillinfer/hf/attach.py",
        "        weakref.finalize(engine, _end_uncounted, runtime, os.getpid()).atexit = False\n",
        "",
        (
            f"{_TESTS}/hf/test_engine.py::"
            "test_an_engine_whose_caches_ctrl_c_kept_from_being_counted_ends_with_the_last",
        ),
    ),
    Mutant(
        "refused-for-what-is-refused",
        "What is refused memory itself has others refused while it looks for room.",
        "host/hillinfer/memory_budget.py",
        "needed_bytes = self._total() - sum(self._sought.values()) + byte_count",
        "needed_bytes = self._total()",
        (
            f"{_TESTS}/kv/test_accountant.py::"
            "test_what_another_one_looks_for_room_for_is_no_reason_to_refuse",
        ),
    ),
    Mutant(
        "peak-of-what-was-refused",
        "The peak has bytes that were looked for and refused.",
        "host/hillinfer/memory_budget.py",
        "{part: held - self._sought[part] for part, held in self._held.items()}",
        "dict(self._held)",
        (
            f"{_TESTS}/kv/test_accountant.py::"
            "test_what_another_one_looks_for_room_for_is_no_reason_to_refuse",
        ),
    ),
    Mutant(
        "saved-groups-not-sealed",
        "Ctrl-C between two steps of saving leaves groups of the session's files to be written to.",
        "host/hillinfer/kv/saved_sequences.py",
        "            groups.seal(len(sequence.groups))\n"
        "            store.freeze(len(sequence.groups), fresh)\n",
        "            store.freeze(len(sequence.groups), fresh)\n"
        "            groups.seal(len(sequence.groups))\n",
        (
            f"{_TESTS}/sessions/test_saving.py::"
            "test_what_saving_leaves_where_ctrl_c_breaks_it_off_is_a_pool_for_all",
        ),
    ),
    Mutant(
        "files-closed-that-the-pool-goes-on-with",
        "Saving that breaks off closes files that the pool writes to already.",
        "host/hillinfer/kv/saved_sequences.py",
        "        if id(file) not in used:\n            file.close()\n",
        "        file.close()\n",
        (
            f"{_TESTS}/sessions/test_saving.py::"
            "test_what_saving_leaves_where_ctrl_c_breaks_it_off_is_a_pool_for_all",
        ),
    ),
    Mutant(
        "base-half-there",
        "A base that Ctrl-C kept from being placed counts as one.",
        "host/hillinfer/drive/regions.py",
        "            self.leave(groups)\n            self._files.pop(number, None)\n"
        "            raise\n",
        "            raise\n",
        (
            f"{_TESTS}/drive/test_placed_groups.py::"
            "test_of_a_base_that_ctrl_c_kept_from_coming_nothing_is_there",
        ),
    ),
    Mutant(
        "region-free-before-it-is-left",
        "Numbers of a session's groups are free before its files are forgotten.",
        "host/hillinfer/drive/regions.py",
        "            leave(region.first)\n            self._regions.remove(region)\n",
        "            self._regions.remove(region)\n            leave(region.first)\n",
        (
            f"{_TESTS}/drive/test_group_table.py::"
            "test_a_region_whose_files_are_not_closed_yet_is_closed_by_the_next",
        ),
    ),
    Mutant(
        "broken-fork-stays",
        "A fork that Ctrl-C breaks off is counted for good.",
        "host/hillinfer/kv/rows.py",
        "            self._give_groups(shared)\n            self.release(copy)\n"
        "            raise\n",
        "            raise\n",
        (
            f"{_TESTS}/hf/test_used_caches.py::"
            "test_groups_of_a_fork_that_broke_off_are_its_siblings_alone",
        ),
    ),
    Mutant(
        "broken-fork-gives-all",
        "A fork that Ctrl-C breaks off gives groups back that it did not share yet.",
        "host/hillinfer/kv/rows.py",
        "            copy.truncate(0)\n            self._give_groups(shared)\n",
        "",
        (
            f"{_TESTS}/hf/test_used_caches.py::"
            "test_groups_of_a_fork_that_broke_off_are_its_siblings_alone",
        ),
    ),
    Mutant(
        "groups-going-forgotten",
        "Groups that Ctrl-C kept from being given back stay.",
        "host/hillinfer/kv/rows.py",
        "        self._going.extend(groups)\n",
        "        self._going = list(groups)\n",
        (
            f"{_TESTS}/hf/test_used_caches.py::"
            "test_groups_that_an_interrupt_keeps_from_being_given_back_are_given_by_the_next",
        ),
    ),
    Mutant(
        "rows-of-a-batch-forgotten",
        "Rows of a batch that Ctrl-C kept from being freed are counted for good.",
        "host/hillinfer/hf/batch.py",
        "        self._sequences, self._pads, self._made, self._gone = kept, pads, made, gone\n",
        "        self._sequences, self._pads, self._made, before = kept, pads, made, self._gone\n"
        "        for one in gone:\n            self._runtime.release(one)\n"
        "        self._gone = before\n",
        (
            f"{_TESTS}/hf/test_used_caches.py::"
            "test_rows_of_a_batch_that_an_interrupt_kept_from_being_freed_are_freed",
        ),
    ),
    Mutant(
        "small-file-without-its-name",
        "A power failure may take the name of a small file that was put in its place.",
        "host/hillinfer/drive/directories.py",
        "    calls.rename(beside, path)\n    keep_names(path.parent, calls)\n",
        "    calls.rename(beside, path)\n",
        (
            f"{_TESTS}/drive/test_kept_names.py::"
            "test_a_small_file_is_synced_before_it_has_its_name_and_its_name_behind",
        ),
    ),
    Mutant(
        "key-without-its-name",
        "A power failure may take a key file's name, and what is sealed with it stays.",
        "host/hillinfer/secrecy/key_sources.py",
        "            keep_names(self.path.absolute().parent, calls)\n",
        "",
        (
            f"{_TESTS}/drive/test_kept_names.py::"
            "test_a_key_is_there_after_a_power_failure_as_what_it_seals_is",
        ),
    ),
    Mutant(
        "kept-file-without-its-name",
        "A file that a client was told to have put may be gone after a power failure.",
        "host/hillinfer/serve/documents.py",
        "            self._calls.rename(part, file)\n"
        "            keep_names(self._directory, self._calls)\n",
        "            self._calls.rename(part, file)\n",
        (
            f"{_TESTS}/serve/test_files.py::"
            "test_what_clients_are_told_of_kept_files_outlasts_a_power_failure",
        ),
    ),
    Mutant(
        "shadow-beside-its-memory",
        "A shadow in the middle of other memory is read and written at that one's beginning.",
        "host/hillinfer/shadow/store.py",
        "start = address_of(shadow) - address_of(memory)",
        "start = 0",
        (f"{_TESTS}/shadow/test_shadow_stream.py::test_a_shadow_is_read_wherever_its_memory_lies",),
    ),
    Mutant(
        "row-ahead-given-up-for-another",
        "A batch's row gives up what was read ahead for the rows before it.",
        "host/hillinfer/attention/row_attention.py",
        "        windows = self._windows\n",
        "        windows = self._windows\n"
        "        if layer == 0:\n            self._landing.clear()\n",
        (
            f"{_TESTS}/attention/test_look_ahead.py::"
            "test_no_row_of_a_batch_gives_up_what_was_read_ahead_for_another",
        ),
    ),
    Mutant(
        "sequence-without-memory-counted",
        "The open groups of a sequence that there was no memory for are counted for good.",
        "host/hillinfer/kv/rows.py",
        "                sequence = make()\n        except BaseException:\n"
        "            self._pools.give_tail()\n            raise\n",
        "                sequence = make()\n        except BaseException:\n            raise\n",
        (
            f"{_TESTS}/system/test_growing_tables.py::"
            "test_a_sequence_that_the_system_has_no_memory_for_is_not_counted",
        ),
    ),
    Mutant(
        "lacking-for-ever",
        "Segments that came without codes lack some when nobody has them any more.",
        "host/hillinfer/shadow/kept_codes.py",
        "            self.lacking[own.number] = own\n",
        "            self.lacking[own.number] = own\n"
        '            self.__dict__.setdefault("held", []).append(own)\n',
        (f"{_TESTS}/shadow/test_kept_codes.py::test_nothing_lacks_codes_that_nobody_has_any_more",),
    ),
    Mutant(
        "store-open-at-the-end",
        "A program that ends with a cache open leaves its store open.",
        "host/hillinfer/hf/attach.py",
        "    else:\n        prompts.close()\n",
        "",
        (
            f"{_TESTS}/hf/test_dropped_caches.py::"
            "test_a_program_that_ends_with_a_cache_open_lets_its_store_go",
        ),
    ),
    Mutant(
        "states-of-other-tokens",
        "States of tokens behind those that have none are taken for states of the first tokens.",
        "host/hillinfer/pruning/reading.py",
        "if now.cache.is_alike and document.boundary.tokens == now.before:",
        "if now.cache.is_alike:",
        (
            f"{_TESTS}/pruning/test_reading.py::"
            "test_states_behind_those_that_are_missing_are_not_taken_for_them",
        ),
    ),
    Mutant(
        "tokens-of-a-broken-pass",
        "A conversation takes the tokens of a pass that broke off for what its cache has.",
        "host/hillinfer/cli/serving/conversation.py",
        "own = rows[0][: generation.cache.get_seq_length()] if rows else []",
        "own = rows[0] if rows else []",
        (
            f"{_TESTS}/serve/test_chat.py::"
            "test_what_follows_a_pass_that_broke_off_is_answered_as_in_a_new_conversation",
        ),
    ),
    Mutant(
        "answer-of-an-interrupted-call",
        "A process that renders chats goes on with an answer that nobody has read.",
        "host/hillinfer/generate/prompt.py",
        "                if len(told) != size:\n                    # What it tells",
        "                if not self:\n                    # What it tells",
        (
            f"{_TESTS}/generate/test_chat_template.py::"
            "test_what_an_interrupted_call_asked_for_is_told_to_nobody_else",
        ),
    ),
    Mutant(
        "one-set-unexplained",
        "A chunk's query that is not finite is told without its layer and what to do.",
        "host/hillinfer/hf/cache_pass.py",
        "                with Explained(layer):\n"
        "                    among = runtime.parts.one_set.chosen(",
        "                if Explained:\n                    among = runtime.parts.one_set.chosen(",
        (f"{_TESTS}/hf/test_one_set.py::test_a_query_that_is_not_finite_is_told_with_its_layer",),
    ),
    Mutant(
        "vllm-keeps-what-leavers-computed",
        "What a request computed behind missing rows stays in vLLM's cache once its client left.",
        "plugins/hillinfer_vllm/hillinfer_vllm/scheduling.py",
        "        for turn in self._step:\n            own = turn.blocks\n",
        "        for own in [known.blocks for known in self._known.values()]:\n",
        (
            f"{_TESTS}/store/test_vllm_steps.py::"
            "test_what_another_request_computed_behind_missing_rows_is_not_stored",
        ),
    ),
    Mutant(
        "blocks-of-others-become-own",
        "What vLLM's own cache has of another engine's rows is stored as vLLM's.",
        "plugins/hillinfer_vllm/hillinfer_vllm/scheduling.py",
        "if not self._blocks.isdisjoint(one.shared)}",
        "if one.request in self._requests}",
        (
            f"{_TESTS}/store/test_vllm_others.py::"
            "test_nothing_is_stored_behind_blocks_of_others_that_vllm_kept",
        ),
    ),
    Mutant(
        "blocks-of-others-for-ever",
        "A block that once had another engine's rows keeps all that comes to lie in it unstored.",
        "plugins/hillinfer_vllm/hillinfer_vllm/scheduling.py",
        "self._blocks.difference_update(one.filled)",
        "self._blocks.difference_update(())",
        (
            f"{_TESTS}/store/test_vllm_others.py::"
            "test_blocks_that_are_given_out_anew_are_of_others_no_more",
        ),
    ),
    Mutant(
        "headers-without-end",
        "A host that sends a header now and then holds a transfer as long as it likes.",
        "plugins/hillinfer_hosts/hillinfer_hosts/transfer.py",
        "threading.Timer(left, self._client.close)",
        "threading.Timer(left, self._client.cookies.clear)",
        (f"{_TESTS}/hosts/test_transfer.py::test_a_host_that_never_ends_is_given_up_in_time",),
    ),
    Mutant(
        "unknown-home-ends-a-talk",
        "A file in a home that nobody has ends a conversation.",
        "host/hillinfer/cli/serving/chat.py",
        "    except RuntimeError as error:\n",
        "    except LookupError as error:\n",
        (f"{_TESTS}/serve/test_chat.py::test_a_name_that_means_no_file_ends_no_conversation",),
    ),
    Mutant(
        "cropped-by-count",
        "A band whose rows lie out of order is cropped as if they lay in the order of tokens.",
        "host/hillinfer/kv/rows.py",
        "cuts = [(one, one.rows_until(length)) for one in sequence.deeper]",
        "cuts = [(one, one.rows_before(length)) for one in sequence.deeper]",
        (f"{_BLOCKS}::{_CROPPED}",),
    ),
    Mutant(
        "cropped-rows-not-lacking",
        "Rows that went with those before them are not missed.",
        "host/hillinfer/kv/rows.py",
        "one.keep(one.kept[one.kept < length], min(length, one.kept_until))",
        "one.keep(one.kept[: one.tokens], min(length, one.kept_until))",
        (f"{_BLOCKS}::{_CROPPED}",),
    ),
    Mutant(
        "entered-rows-in-order",
        "What entered a band is said to lie in the order of tokens.",
        "host/hillinfer/pruning/decoding.py",
        "now.cache.keep([positions], now.before)",
        "now.cache.keep([positions.sort().values], now.before)",
        (f"{_BLOCKS}::{_CROPPED}", f"{_BLOCKS}::{_SAVED}"),
    ),
    Mutant(
        "saved-out-of-order",
        "A session is saved whose deeper layers have their rows in another order.",
        "host/hillinfer/hf/cache.py",
        "if not is_whole or not all(own.is_ordered for own in bands):",
        "if not is_whole:",
        (f"{_BLOCKS}::{_SAVED}",),
    ),
    Mutant(
        "wrong-rows-told-of-another-store",
        "What one store has wrong is quarantined in another one that lies likewise.",
        "host/hillinfer/extents/shared_chunks.py",
        "if shared.store.files[shared.span.drive] is file\n",
        "if shared.span.drive == 0\n",
        (
            f"{_TESTS}/reuse/test_opened_in_place.py::"
            "test_what_one_store_has_wrong_is_not_told_of_another",
        ),
    ),
    Mutant(
        "leases-of-what-no-memory-was-for",
        "A prefix that there is no memory for stays leased until its process ends.",
        "host/hillinfer/reuse/stored_prompts.py",
        "            found = self._prompts.find_leased(ids, leased)\n            tokens",
        "            found = self._prompts.find(ids)\n            tokens",
        (
            f"{_TESTS}/reuse/test_stored_prompts.py::"
            "test_nothing_stays_leased_where_there_is_no_memory_to_load_into",
        ),
    ),
    Mutant(
        "forms-that-do-not-come-are-errors",
        "A document whose form its drive does not give back does not open.",
        "host/hillinfer/catalogue/form_cache.py",
        "            except ColdPoolError:\n                # Its",
        "            except CacheUseError:\n                # Its",
        (
            f"{_TESTS}/catalogue/test_form_cache.py::"
            "test_a_document_opens_from_its_rest_where_its_drive_does_not_give_its_form",
        ),
    ),
)
