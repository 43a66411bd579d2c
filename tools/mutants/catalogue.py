# SPDX-License-Identifier: Apache-2.0
"""Faults in what is known of documents, in keepers of forms, and in one set for a question."""

from __future__ import annotations

from mutants.mutant import Mutant

_ROOM = "host/hillinfer/catalogue"
_TESTS = "tests/host/catalogue"
_ONE_SET = "tests/host/hf/test_one_set.py"

CATALOGUE = (
    Mutant(
        "names-that-are-no-characters",
        "A document whose file's name is no UTF-8 cannot be put.",
        f"{_ROOM}/catalogue.py",
        'title = _kept(document.title) if self._keeps_titles else ""',
        'title = document.title if self._keeps_titles else ""',
        (f"{_TESTS}/test_catalogue.py",),
    ),
    Mutant(
        "plans-move-what-is-pinned",
        "A plan changes the form of a document that a user pinned.",
        f"{_ROOM}/catalogue.py",
        "UPDATE document SET form = ?2 WHERE key = ?1 AND is_pinned = 0",
        "UPDATE document SET form = ?2 WHERE key = ?1",
        (f"{_TESTS}/test_catalogue.py",),
    ),
    Mutant(
        "titles-in-the-clear",
        "The catalogue of an encrypted store keeps titles.",
        f"{_ROOM}/catalogue.py",
        'title = _kept(document.title) if self._keeps_titles else ""',
        "title = _kept(document.title)",
        (f"{_TESTS}/test_catalogue.py",),
    ),
    Mutant(
        "catalogue-for-all",
        "Others may read a catalogue.",
        f"{_ROOM}/catalogue.py",
        "scratch.chmod(0o600)",
        "scratch.chmod(0o644)",
        (f"{_TESTS}/test_catalogue.py",),
    ),
    Mutant(
        "plans-without-floors",
        "A quality floor leaves no form out.",
        f"{_ROOM}/planning.py",
        "above_floor(every, rules.floor)",
        "above_floor(every, 0.0)",
        (f"{_TESTS}/test_planning.py",),
    ),
    Mutant(
        "uses-that-never-fade",
        "A hit of yesterday counts as one of now.",
        f"{_ROOM}/uses.py",
        "faded = hits * 0.5 ** (max(0.0, now - last) / HITS_HALF_LIFE)",
        "faded = hits",
        (f"{_TESTS}/test_uses.py",),
    ),
    Mutant(
        "forms-that-nobody-counts",
        "A form is made whether the budget has room or not.",
        f"{_ROOM}/keeper.py",
        "if not self._accountant.take_spare(Part.OTHER, size):",
        "if not self._accountant.take_spare(Part.OTHER, 0):",
        (f"{_TESTS}/test_keeper.py",),
    ),
    Mutant(
        "forms-of-some-of-a-document",
        "A form is made of what is left of a document's rows, as if that were all.",
        f"{_ROOM}/keeper.py",
        "return form.make(self._model, states) if states.tokens == len(ids) else None",
        "return form.make(self._model, states)",
        (f"{_TESTS}/test_keeper.py::test_no_form_is_made_of_some_of_a_document",),
    ),
    Mutant(
        "forms-that-stay",
        "A keeper gives no form up when the engine is short.",
        f"{_ROOM}/keeper.py",
        "accountant.on_shortage(self._make_room)",
        "pass",
        (f"{_TESTS}/test_keeper.py",),
    ),
    Mutant(
        "openings-that-are-no-uses",
        "A document that opens from its form is not counted as used.",
        f"{_ROOM}/keeper.py",
        "            self._prompts.stored_key(ids)\n",
        "",
        (f"{_TESTS}/test_keeper.py",),
    ),
    Mutant(
        "any-model-will-do",
        "Rows of another model are taken for a document's.",
        f"{_ROOM}/measuring.py",
        "if document.namespace != namespace.digest:",
        "if False:",
        (f"{_TESTS}/test_keeper.py",),
    ),
    Mutant(
        "one-set-of-all",
        "A question's one set is all rows.",
        "host/hillinfer/hf/cache_pass.py",
        "if self.takes_one_set and not self.lengths.is_staged(layer):",
        "if False:",
        (_ONE_SET,),
    ),
    Mutant(
        "one-set-is-dense",
        "Rows that were read by one set count as dense and are stored.",
        "host/hillinfer/hf/cache_pass.py",
        "is_dense = not self.takes_one_set and not is_autocast()",
        "is_dense = not is_autocast()",
        (_ONE_SET,),
    ),
    Mutant(
        "weights-without-their-leading-bit",
        "Scores of a question are added up without their leading ones.",
        "host/hillinfer/attention/one_set.py",
        "wide = np.ldexp((1 << _FRACTION_BITS) + fraction",
        "wide = np.ldexp(fraction",
        (_ONE_SET,),
    ),
)
