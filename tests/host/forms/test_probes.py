# SPDX-License-Identifier: Apache-2.0
"""Probes look at parts of their own, and a form's quality is what it changes in answers."""

import itertools
import math

import pytest
import torch
from stored_document import TOKENS, stored_document

from hillinfer.errors import SettingsError
from hillinfer.forms.intervals import expected_end, lower_end
from hillinfer.forms.probes import (
    FormQuality,
    Probe,
    ProbeKind,
    ProbeSizes,
    held_out,
    measure_forms,
    recall_probes,
)
from hillinfer.forms.table import make_form, usual_forms
from hillinfer.store.store import Store

SIZES = ProbeSizes(given=4, answer=12)


@pytest.fixture(scope="module")
def precise(tmp_path_factory):
    place = tmp_path_factory.mktemp("probed") / "store"
    Store.create(place, 64 << 20)
    with Store(place) as store:
        yield stored_document(store, "llama", torch.float32)


def parts(probes):
    return [(*probe.given, *probe.answer) for probe in probes]


@pytest.mark.parametrize("seed", range(5))
def test_no_token_is_in_two_probes_and_sets_are_apart(seed):
    ids = list(range(1000, 1256))
    chosen, judged = recall_probes(ids, (6, 4), seed, sizes=SIZES)
    assert (len(chosen), len(judged)) == (6, 4)
    spans = parts(chosen) + parts(judged)
    # A part is a run of the document.
    assert all(span == tuple(range(span[0], span[0] + 16)) for span in spans)
    assert len({*itertools.chain(*spans)}) == 160
    assert parts(recall_probes(ids, (6, 4), seed, sizes=SIZES)[0]) == parts(chosen)
    assert parts(recall_probes(ids, (6, 4), seed + 9, sizes=SIZES)[0]) != parts(chosen)


def test_as_many_probes_as_the_document_has_parts():
    (all_parts,) = recall_probes(range(160), (10,), 0, sizes=SIZES)
    assert {*itertools.chain(*parts(all_parts))} == {*range(160)}
    with pytest.raises(
        SettingsError, match=r"11 probes of 16 tokens.*160 tokens has 10 such parts"
    ):
        recall_probes(range(160), (10, 1), 0, sizes=SIZES)


def test_an_instruction_comes_before_the_part():
    ((probe,),) = recall_probes(range(100, 200), (1,), 3, (7, 8), SIZES)
    assert probe.given[:2] == (7, 8)
    assert len(probe.given) == 6
    assert probe.answer[0] == probe.given[-1] + 1


def test_all_rows_agree_in_full_and_fewer_bits_less(precise):
    (probes,) = recall_probes(precise.ids, (6,), 0, sizes=SIZES)
    found = measure_forms(precise.model, precise.states, usual_forms(), probes)
    assert found["held"].agreements == found["text"].agreements == (1.0,) * 6
    assert found["held"].divergence == 0.0
    assert found["held"].tokens == 72
    divergences = [found[name].divergence for name in ("int8", "int4", "int2")]
    assert 0 < divergences[0] < divergences[1] < divergences[2]
    # The twin: a form that has lost most of the document is told from one that has not.
    assert found["knorm-0.2"].divergence > 2 * found["int8"].divergence
    assert found["knorm-0.2"].mean < 1.0
    assert found["int8"].mean > found["int2"].mean


def test_a_probe_changes_nothing_for_the_next_one(precise):
    (probes,) = recall_probes(precise.ids, (4,), 1, sizes=SIZES)
    form = make_form("keydiff-0.5")
    together = measure_forms(precise.model, precise.states, [form], probes)[form.name]
    alone = [
        measure_forms(precise.model, precise.states, [form], [probe])[form.name] for probe in probes
    ]
    assert together.agreements == tuple(one.agreements[0] for one in alone)
    mean = sum(one.divergence for one in alone) / len(alone)
    assert together.divergence == pytest.approx(mean, rel=1e-4)


def test_answers_are_compared_at_their_own_tokens(precise):
    """An answer of one token is compared once, after all that is given."""
    probe = Probe(ProbeKind.QUESTION, (5, 9, 2), (31,))
    form = make_form("int2")
    found = measure_forms(precise.model, precise.states, [form], [probe])[form.name]
    assert found.tokens == 1
    logits = []
    for name in ("held", "int2"):
        opened = make_form(name).make(precise.model, precise.states).open()
        with torch.no_grad():
            output = precise.model(torch.tensor([[5, 9, 2]]), past_key_values=opened.cache)
        logits.append(output.logits[0, -1].float().log_softmax(-1))
    expected = float((logits[0].exp() * (logits[0] - logits[1])).sum())
    assert found.divergence == pytest.approx(expected, rel=1e-3)


def test_what_is_held_out_is_not_in_the_form(precise):
    states, probe = held_out(precise.states)
    assert states.tokens == TOKENS - 64
    assert (*states.ids, *probe.given, *probe.answer) == precise.states.ids
    assert all(keys.shape[1] == values.shape[1] == 192 for keys, values in states.layers)
    found = measure_forms(precise.model, states, [make_form("int8")], [probe])["int8"]
    assert found.tokens == 63
    with pytest.raises(SettingsError, match="a document of 64 tokens has none to hold out"):
        held_out(held_out(held_out(states)[0])[0])


def test_one_more_is_expected_to_keep_less_than_the_mean():
    means = (0.9, 0.95, 1.0)
    # Student's quantile of two degrees, and the spread of one more.
    assert expected_end(means, 10**9) == pytest.approx(0.95 - 2.92 * 0.05 * (4 / 3) ** 0.5)
    # Few tokens say less than means that agree.
    assert expected_end((1.0,) * 3, 96) == pytest.approx(96 / (96 + 1.645**2))
    assert expected_end((0.0, 1.0), 96) == 0.0


def test_the_lower_end_is_the_lower_of_two_intervals():
    # By hand: four probes with mean .75 and deviation .1; Student's 2.353 · .1 / 2.
    quality = FormQuality((0.65, 0.75, 0.75, 0.85), 0.1, 10_000)
    deviation = math.sqrt(0.02 / 3)
    assert quality.lower == pytest.approx(0.75 - 2.353 * deviation / 2)
    assert (quality.mean, quality.worst) == (pytest.approx(0.75), 0.65)
    # All agree: Wilson's says how sure n tokens make it, n / (n + z²).
    assert lower_end((1.0, 1.0, 1.0), 96) == pytest.approx(96 / (96 + 1.645**2))
    assert lower_end((1.0,), 32) == pytest.approx(32 / (32 + 1.645**2))
    assert lower_end((0.0, 0.0), 64) == 0.0
    # More probes make it surer.
    assert lower_end((0.9, 1.0) * 8, 512) > lower_end((0.9, 1.0) * 2, 128)
    # Quantiles of Student's distribution, as tables have them.
    assert lower_end((0.5, 0.7) * 10, 10**9) == pytest.approx(
        0.6 - 1.729 * 0.1 * math.sqrt(20 / 19) / math.sqrt(20), abs=1e-3
    )


def test_nothing_to_ask_is_refused(precise):
    with pytest.raises(SettingsError, match="no probes: give one at least"):
        measure_forms(precise.model, precise.states, [make_form("held")], [])
    with pytest.raises(SettingsError, match="a probe of 0 tokens and an answer of 1"):
        Probe(ProbeKind.QUESTION, (), (1,))
