# SPDX-License-Identifier: Apache-2.0
"""Faults of what is encrypted, each as one line that the tests must see."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_HOST = "host/hillinfer"
_TESTS = "tests/host"
_PAGES = f"{_TESTS}/secrecy/test_pages.py"
_KEYS = f"{_TESTS}/secrecy/test_key_table.py"
_STORE = f"{_TESTS}/store/test_sealed_store.py"
_COLD = f"{_TESTS}/secrecy/test_cold_pages.py"
_LANDING = f"{_TESTS}/drive/test_sealed_landing.py"
_POOL = f"{_TESTS}/hf/test_sealed_pool.py"
_IN_PLACE = f"{_TESTS}/reuse/test_opened_in_place.py"

SECRECY: tuple[Mutant, ...] = (
    Mutant(
        "tags-counted-for-each-layer",
        "A group's use of its extent's tags is counted for each layer, and given back once.",
        "host/hillinfer/extents/group_seals.py",
        "            users[pages] = users.get(pages, 0) + len(new)\n",
        "            users[pages] = users.get(pages, 0) + len(groups)\n",
        (
            "tests/host/reuse/test_opened_in_place.py::"
            "test_tags_are_counted_as_long_as_a_cache_has_their_rows",
        ),
    ),
    Mutant(
        "new-file-of-nobody",
        "Of two processes that open a new store at once one takes its file for another store's.",
        f"{_HOST}/store/pool_files.py",
        "if self.byte_count == UNIT_BYTES and not page.any():",
        "if False:",
        (
            f"{_TESTS}/store/test_store.py"
            "::test_a_file_that_another_process_is_about_to_mark_is_marked_by_both",
        ),
    ),
    Mutant(
        "epoch-not-drawn",
        "Every writer of an extent seals with the same key and the same nonces.",
        f"{_HOST}/secrecy/pages.py",
        "other._own = secrets.token_bytes(EPOCH_BYTES)",
        'other._own = b"1" * EPOCH_BYTES',
        (
            f"{_PAGES}::test_an_older_writers_page_and_tag_are_not_those_of_a_newer_one",
            f"{_STORE}::test_an_older_writers_pages_are_not_believed",
        ),
    ),
    Mutant(
        "page-sealed-twice",
        "A page may be sealed a second time with the same nonce.",
        f"{_HOST}/secrecy/pages.py",
        "if self._sealed[first : first + count].any():",
        "if False:",
        (f"{_PAGES}::test_no_page_is_sealed_twice_in_an_epoch",),
    ),
    Mutant(
        "place-not-in-the-key",
        "A page opens wherever it is put.",
        f"{_HOST}/secrecy/pages.py",
        'b"hillinfer pages 1" + self._place.packed',
        'b"hillinfer pages 1"',
        (f"{_PAGES}::test_another_key_or_place_opens_nothing",),
    ),
    Mutant(
        "one-nonce-for-all",
        "All pages of an extent are sealed with the same nonce.",
        f"{_HOST}/secrecy/library.py",
        'return index.to_bytes(NONCE_BYTES, "big")',
        "return bytes(NONCE_BYTES)",
        (f"{_PAGES}::test_pages_are_sealed_as_the_library_seals_them",),
    ),
    Mutant(
        "native-nonce-of-the-first-page",
        "All pages of a run are sealed with the nonce of the first.",
        "host/native/page_cipher.cpp",
        "pass_page(context, uint64_t(run.first + done), ",
        "pass_page(context, uint64_t(run.first), ",
        (f"{_PAGES}::test_pages_are_sealed_as_the_library_seals_them",),
        Built.NATIVE,
    ),
    Mutant(
        "native-tag-not-compared",
        "The tags of pages that are opened are not compared.",
        "host/native/page_cipher.cpp",
        "library.finish(context, page + kPageBytes, &size) == 1 &&",
        "(!seals || library.finish(context, page, &size) == 1) &&",
        (
            f"{_PAGES}::test_a_flipped_bit_of_a_page_is_found",
            f"{_PAGES}::test_a_flipped_bit_of_a_tag_is_found",
        ),
        Built.NATIVE,
    ),
    Mutant(
        "second-sheet-not-opened",
        "The second sheet of an extent is opened as if it were the first.",
        f"{_HOST}/secrecy/store_keys.py",
        "about = envelope.packed(place.pool) + place.packed + bytes([slot])",
        "about = envelope.packed(place.pool) + place.packed + bytes(1)",
        (f"{_STORE}::test_a_conversation_goes_on_in_its_chunk_and_a_branch_elsewhere",),
    ),
    Mutant(
        "hashes-without-a-key",
        "The index of an encrypted store confirms guesses of a text.",
        f"{_HOST}/store/keys.py",
        'return hmac.digest(hash_key, data, "sha256") if hash_key else',
        "return",
        (f"{_STORE}::test_neither_rows_nor_tokens_nor_their_hashes_lie_on_the_drive",),
    ),
    Mutant(
        "tags-not-written",
        "The tags of pages stay in memory.",
        f"{_HOST}/store/writer.py",
        "            self._write_aligned(own.record.span, self._shape.tags_at, own.pages.tags)",
        "            pass",
        (f"{_STORE}::test_a_prompt_is_found_to_its_last_full_group",),
    ),
    Mutant(
        "encrypted-store-of-version-1",
        "A HillInfer that knows no encryption takes an encrypted store for a damaged one.",
        f"{_HOST}/store/pool_files.py",
        "SEALED_VERSION = 2",
        "SEALED_VERSION = 1",
        (f"{_STORE}::test_an_older_version_refuses_an_encrypted_store",),
    ),
    Mutant(
        "key-for-a-plain-store",
        "A store that is not encrypted is used although a key was given.",
        f"{_HOST}/secrecy/store_keys.py",
        "    if key is None or isinstance(key, WithoutKey):",
        "    if key is None or isinstance(key, WithoutKey) or not cipher:",
        (f"{_STORE}::test_a_plain_store_opens_as_ever_and_refuses_a_key",),
    ),
    Mutant(
        "key-file-of-everybody",
        "A key file that others may read is used.",
        f"{_HOST}/secrecy/key_sources.py",
        "    if mode & 0o077:",
        "    if False:",
        (f"{_KEYS}::test_a_key_that_others_may_read_is_refused",),
    ),
    Mutant(
        "forgotten-under-others",
        "A salt's key is forgotten while another process has it.",
        f"{_HOST}/store/store.py",
        "        self.room.check_alone()",
        "        pass",
        (f"{_STORE}::test_a_key_that_others_may_have_is_not_forgotten",),
    ),
    Mutant(
        "key-made-over-a-damaged-one",
        "A data key that cannot be unwrapped counts as none.",
        f"{_HOST}/secrecy/key_table.py",
        "        return None if entry is None else self._key(entry)\n\n    def numbered",
        "        return self._keys.get(entry.number) if entry else None\n\n    def numbered",
        (f"{_KEYS}::test_keys_of_salts_come_back",),
    ),
    Mutant(
        "entries-not-bound-to-salts",
        "A data key opens under another salt's entry.",
        f"{_HOST}/secrecy/key_table.py",
        '    return b"hillinfer key 1" + pool + about',
        '    return b"hillinfer key 1" + pool',
        (f"{_KEYS}::test_entries_that_changed_places_open_nothing",),
    ),
    Mutant(
        "writes-not-in-the-nonce",
        "A page of the cold pool that is written again has the nonce that it had.",
        "host/native/page_cipher.cpp",
        "= uint8_t(writes >> 8 * i);",
        "= uint8_t(0 * writes);",
        (
            f"{_COLD}::test_no_two_pages_are_sealed_alike",
            f"{_COLD}::test_a_page_of_an_older_write_another_place_or_file_does_not_open",
        ),
        Built.NATIVE,
    ),
    Mutant(
        "writes-not-counted",
        "Nobody counts how often a page of the cold pool was sealed.",
        f"{_HOST}/secrecy/cold_pages.py",
        "            writes += 1\n",
        "",
        (
            f"{_COLD}::test_no_two_pages_are_sealed_alike",
            f"{_POOL}::test_what_is_written_again_is_sealed_anew",
        ),
    ),
    Mutant(
        "files-of-one-number",
        "Two files of a cold pool have the same nonces.",
        f"{_HOST}/secrecy/cold_pages.py",
        "self._first = number << _FILE_SHIFT",
        "self._first = 0",
        (f"{_COLD}::test_no_two_pages_are_sealed_alike",),
    ),
    Mutant(
        "tags-lost-as-tables-grow",
        "Pages that were sealed before a table of tags grew open no more.",
        f"{_HOST}/secrecy/cold_pages.py",
        "            larger.tags[:old] = self._tables.tags\n",
        "",
        (f"{_COLD}::test_tags_stay_while_tables_grow_and_are_counted",),
    ),
    Mutant(
        "tags-not-counted",
        "Nobody counts the tags of the cold pool.",
        f"{_HOST}/secrecy/cold_pages.py",
        "self._accountant.take(Part.OTHER, pages * TABLE_BYTES)",
        "self._accountant.take(Part.OTHER, old * TABLE_BYTES)",
        (f"{_COLD}::test_tags_stay_while_tables_grow_and_are_counted",),
    ),
    Mutant(
        "pool-key-not-erased",
        "The key of a cold pool stays in memory when it has ended.",
        f"{_HOST}/secrecy/cold_pages.py",
        "        ctypes.memset(self.address, 0, KEY_BYTES)",
        "        pass",
        (f"{_COLD}::test_an_erased_key_opens_nothing",),
    ),
    Mutant(
        "pool-key-dumped",
        "The key of a cold pool is in core dumps.",
        f"{_HOST}/secrecy/cold_pages.py",
        "for advice in (mmap.MADV_DONTDUMP, _MADV_WIPEONFORK):",
        "for advice in (_MADV_WIPEONFORK,):",
        (f"{_TESTS}/secrecy/test_locked_key.py",),
    ),
    Mutant(
        "rows-written-plainly",
        "Rows of a sealed cold pool lie on the drive as they are.",
        f"{_HOST}/secrecy/cold_pages.py",
        "            yield offset + begin, sealed.data",
        "            yield offset + begin, piece",
        (f"{_POOL}::test_no_row_and_no_shadow_is_found_on_the_drive",),
    ),
    Mutant(
        "shadows-written-plainly",
        "Key shadows of a sealed cold pool lie on the drive as they are.",
        f"{_HOST}/shadow/store.py",
        "        return self._sealed.data\n",
        "        return memory\n",
        (f"{_POOL}::test_no_row_and_no_shadow_is_found_on_the_drive",),
    ),
    Mutant(
        "closed-page-is-right",
        "Rows of a page that does not open are taken for right.",
        "host/native/landing.cpp",
        "            if (closed > first) {",
        "            if (false) {",
        (f"{_LANDING}::test_a_flipped_bit_is_told_of_the_first_row_of_its_page",),
        Built.NATIVE,
    ),
    Mutant(
        "rows-behind-a-closed-page-are-wrong",
        "A page that does not open makes rows wrong that lie behind it.",
        "host/native/landing.cpp",
        "            if (closed > first) {",
        "            if (closed > 0) {",
        (f"{_LANDING}::test_a_flipped_bit_is_told_of_the_first_row_of_its_page",),
        Built.NATIVE,
    ),
    Mutant(
        "opened-twice",
        "Reads that had come are opened once more when others were made again.",
        "host/native/landing.cpp",
        "if (plan_.addresses[read] == landing_.missing_addresses[next]) {",
        "if (true) {",
        (f"{_LANDING}::test_what_is_read_again_is_opened_once",),
        Built.NATIVE,
    ),
    Mutant(
        "sealed-files-named",
        "A session is given the files of a sealed cold pool, which nobody can read.",
        f"{_HOST}/kv/saved_sequences.py",
        "    if store.pages.are_sealed:",
        "    if False:",
        (f"{_POOL}::test_a_session_saved_from_it_is_that_of_a_plain_one",),
    ),
    Mutant(
        "plain-pool-beside-an-encrypted-store",
        "Rows behind a prefix of an encrypted store lie plainly in the cold pool.",
        f"{_HOST}/hf/attach.py",
        "            self.settings = with_store(self.settings, prompts.cipher)",
        "            pass",
        (f"{_POOL}::test_a_pool_is_sealed_beside_an_encrypted_store",),
    ),
    Mutant(
        "key-of-another-group",
        "All groups of a sealed extent are opened with the key of the first.",
        f"{_HOST}/extents/group_seals.py",
        "part = pages.part(at)",
        "part = pages.part(0)",
        (f"{_IN_PLACE}::test_a_tail_is_filled_by_one",),
    ),
)
