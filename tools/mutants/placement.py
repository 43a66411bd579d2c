# SPDX-License-Identifier: Apache-2.0
"""Faults in forms of documents, and in where they are placed."""

from __future__ import annotations

from mutants.mutant import Mutant

_ROOM = "host/hillinfer/placement"
_TESTS = "tests/host/placement"
_FORMS = "host/hillinfer/forms"
_FORM_TESTS = "tests/host/forms"

PLACEMENT = (
    Mutant(
        "hull-of-all-points",
        "A hull keeps points below the line between others.",
        f"{_ROOM}/steps.py",
        "while hull and _slope(_before(hull, base), hull[-1]) <= _slope(hull[-1], point):",
        "while False:",
        (f"{_TESTS}/test_steps.py",),
    ),
    Mutant(
        "steps-without-weights",
        "Steps are merged by gain per byte whoever is asked for.",
        f"{_ROOM}/steps.py",
        "self.weight * (upper.value - lower.value)",
        "(upper.value - lower.value)",
        (f"{_TESTS}/test_steps.py",),
    ),
    Mutant(
        "no-hysteresis",
        "Two documents of about equal use take turns.",
        f"{_ROOM}/steps.py",
        "loss *= 1 + self.hysteresis if level < member.settled else 1",
        "loss *= 1",
        (f"{_TESTS}/test_steps.py", f"{_TESTS}/test_placing.py"),
    ),
    Mutant(
        "filler-not-counted",
        "An option beside the hull takes no bytes of the budget.",
        f"{_ROOM}/steps.py",
        "                self.used += point.byte_count - at.byte_count\n",
        "",
        (f"{_TESTS}/test_steps.py",),
    ),
    Mutant(
        "changes-that-do-not-fit",
        "A change is made before others have left its room.",
        f"{_ROOM}/stock.py",
        "return new.byte_count <= own or new.byte_count - own <= self.free(new.tier)",
        "return True",
        (f"{_TESTS}/test_stock.py",),
    ),
    Mutant(
        "plans-are-not-checked",
        "A plan that passes a budget is begun.",
        f"{_ROOM}/stock.py",
        "        self._check(plan)\n",
        "",
        (f"{_TESTS}/test_stock.py",),
    ),
    Mutant(
        "papers-drop-per-byte",
        "The paper's greedy chooses by the drop per byte.",
        f"{_ROOM}/policies.py",
        "        return drop\n",
        "        return drop / saved\n",
        (f"{_TESTS}/test_placement_policies.py",),
    ),
    Mutant(
        "pins-are-not-counted",
        "Pinned documents take nothing of what others share.",
        f"{_ROOM}/stock.py",
        "self._pinned[option.tier] += sign * option.byte_count",
        "self._pinned[option.tier] += 0",
        (f"{_TESTS}/test_placing.py",),
    ),
    Mutant(
        "weights-never-begin-anew",
        "Weights of faded uses grow without end.",
        f"{_ROOM}/placing.py",
        "if since > self._uses.longest:",
        "if False:",
        (f"{_TESTS}/test_placement_policies.py",),
    ),
    Mutant(
        "positions-of-what-is-held",
        "A cache with dropped tokens says how many it holds.",
        f"{_FORMS}/form.py",
        "        return held + self._missing\n",
        "        return held\n",
        (f"{_FORM_TESTS}/test_dropped_forms.py",),
    ),
    Mutant(
        "mask-from-the-first-position",
        "What is held counts as the document's first tokens.",
        f"{_FORMS}/form.py",
        "return held + query_length, self._missing",
        "return held + query_length + self._missing, 0",
        (f"{_FORM_TESTS}/test_dropped_forms.py",),
    ),
    Mutant(
        "knorm-as-the-paper-words-it",
        "Short keys are dropped.",
        f"{_FORMS}/dropped.py",
        "        return -norms\n",
        "        return norms\n",
        (f"{_FORM_TESTS}/test_dropped_forms.py",),
    ),
    Mutant(
        "snapkv-without-its-window",
        "The last tokens are kept only where others attend to them.",
        f"{_FORMS}/dropped.py",
        "return functional.pad(scores, (0, window), value=float(scores.max()) + 1)",
        "return functional.pad(scores, (0, window), value=0.0)",
        (f"{_FORM_TESTS}/test_dropped_forms.py",),
    ),
    Mutant(
        "expected-without-the-spread",
        "Expected attention looks at the mean query alone.",
        f"{_FORMS}/dropped.py",
        "ours, spread, ours) / head_dim / 2",
        "ours, spread, ours) * 0.0",
        (f"{_FORM_TESTS}/test_dropped_forms.py",),
    ),
    Mutant(
        "keys-coded-by-token",
        "Channels of a key share a step.",
        f"{_FORMS}/whole.py",
        "Codes.of(keys.cpu().transpose(1, 2), self._bits, GROUP_NUMBERS)",
        "Codes.of(keys.cpu(), self._bits, value_group(keys.shape[-1]))",
        (f"{_FORM_TESTS}/test_whole_forms.py",),
    ),
    Mutant(
        "opened-without-a-copy",
        "A cache writes to the form that it was opened from.",
        f"{_FORMS}/whole.py",
        "(keys.to(self._dtype, copy=True), values.to(self._dtype, copy=True))",
        "(keys.to(self._dtype), values.to(self._dtype))",
        (f"{_FORM_TESTS}/test_whole_forms.py",),
    ),
    Mutant(
        "probes-behind-each-other",
        "A probe is read behind the one before.",
        f"{_FORMS}/probes.py",
        "sees[begin:end, begin:end] = True",
        "sees[begin:end, :end] = True",
        (f"{_FORM_TESTS}/test_probes.py",),
    ),
    Mutant(
        "probes-that-share-tokens",
        "Parts of a document that probes ask for overlap.",
        f"{_FORMS}/probes.py",
        "gaps + sizes.part * np.arange(wanted)",
        "gaps + np.arange(wanted)",
        (f"{_FORM_TESTS}/test_probes.py",),
    ),
    Mutant(
        "interval-of-probes-alone",
        "A few probes that agree say that all do.",
        f"{_FORMS}/probes.py",
        "return min(wilson[0], mean - student), max(wilson[1], mean + student)",
        "return mean - student, mean + student",
        (f"{_FORM_TESTS}/test_probes.py",),
    ),
    Mutant(
        "half-a-document-is-enough",
        "A form is made of what the store has left of a document.",
        f"{_FORMS}/shadowed.py",
        "if found < states.tokens:",
        "if found < 1:",
        (f"{_FORM_TESTS}/test_shadowed_form.py",),
    ),
)
