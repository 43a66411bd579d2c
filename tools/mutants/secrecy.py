# SPDX-License-Identifier: Apache-2.0
"""Faults of what is encrypted, each as one line that the tests must see."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_HOST = "host/hillinfer"
_TESTS = "tests/host"
_PAGES = f"{_TESTS}/secrecy/test_pages.py"
_KEYS = f"{_TESTS}/secrecy/test_key_table.py"
_STORE = f"{_TESTS}/store/test_sealed_store.py"

SECRECY: tuple[Mutant, ...] = (
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
        f"{_HOST}/secrecy/page_engines.py",
        'return index.to_bytes(NONCE_BYTES, "big")',
        "return bytes(NONCE_BYTES)",
        (f"{_PAGES}::test_pages_are_sealed_as_the_library_seals_them",),
    ),
    Mutant(
        "native-nonce-of-the-first-page",
        "All pages of a run are sealed with the nonce of the first.",
        "host/native/page_cipher.cpp",
        "if (!context.page(uint64_t(run.first + i), ",
        "if (!context.page(uint64_t(run.first), ",
        (f"{_PAGES}::test_pages_are_sealed_as_the_library_seals_them",),
        Built.NATIVE,
    ),
    Mutant(
        "native-tag-not-compared",
        "The tags of pages that are opened are not compared.",
        "host/native/page_cipher.cpp",
        "size == kPageBytes && library_.finish(context_, page + kPageBytes, &size) == 1 &&",
        "size == kPageBytes && (!seals_ || library_.finish(context_, page, &size) == 1) &&",
        (
            f"{_PAGES}::test_a_flipped_bit_of_a_page_is_found",
            f"{_PAGES}::test_a_flipped_bit_of_a_tag_is_found",
        ),
        Built.NATIVE,
    ),
    Mutant(
        "second-sheet-not-opened",
        "The second sheet of an extent is opened as if it were the first.",
        f"{_HOST}/secrecy/sheets.py",
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
)
