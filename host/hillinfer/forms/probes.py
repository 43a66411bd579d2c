# SPDX-License-Identifier: Apache-2.0
"""What a form loses of one document, measured by probes that the document itself gives.

A probe is some tokens that are read behind the document and an answer to them. The answer is read
with a form and with all rows, and the most probable tokens are compared: no judge is needed, and
no other model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

import numpy as np
import torch

from hillinfer.errors import SettingsError
from hillinfer.forms.form import DocumentStates, Form, OpenedForm
from hillinfer.forms.intervals import lower_end, upper_end
from hillinfer.forms.quantised import GROUP_NUMBERS
from hillinfer.forms.whole import HeldForm

# --- Probes ---


class ProbeKind(StrEnum):
    """What a probe asks for."""

    RECALL = "recall"
    """A part of the document, of which the beginning is given."""
    CONTINUE = "continue"
    """The document's own last tokens, which the form is made without."""
    QUESTION = "question"
    """What a user asked, with the answer that all rows gave."""


@dataclass(frozen=True)
class Probe:
    """One thing that is asked of a document.

    Parameters
    ----------
    kind
        What it asks for.
    given
        Token numbers that are read first, one at least.
    answer
        Token numbers that follow; what is most probable is compared at each of them.
    """

    kind: ProbeKind
    given: tuple[int, ...]
    answer: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.given or not self.answer:
            raise SettingsError(
                f"a probe of {len(self.given)} tokens and an answer of {len(self.answer)}: give "
                "one of each at least"
            )


@dataclass(frozen=True)
class ProbeSizes:
    """How long probes are, in tokens.

    Parameters
    ----------
    given
        Of a part that is to be recalled, how many tokens are named.
    answer
        How many are asked for.
    """

    given: int = 16
    answer: int = 32

    @property
    def part(self) -> int:
        """Tokens of the part that a probe looks at."""
        return self.given + self.answer


def recall_probes(
    ids: Sequence[int],
    counts: Sequence[int],
    seed: int,
    instruction: Sequence[int] = (),
    sizes: ProbeSizes | None = None,
) -> list[list[Probe]]:
    """Return sets of probes of random parts of a document, no token of which is in two of them.

    So what is chosen by one set can be judged by another.

    Parameters
    ----------
    ids
        Token numbers of the document.
    counts
        How many probes each set has, like one to choose by and one to judge by.
    seed
        Of the places.
    instruction
        Token numbers that come before the beginning of the part, like those of "Repeat the part
        that begins with".
    sizes
        How long probes are.

    Raises
    ------
    SettingsError
        Where the document has not as many parts.
    """
    sizes = sizes or ProbeSizes()
    wanted, parts = sum(counts), len(ids) // sizes.part
    if wanted > parts:
        raise SettingsError(
            f"{wanted} probes of {sizes.part} tokens: a document of {len(ids)} tokens has "
            f"{parts} such parts; ask for fewer"
        )
    draw = np.random.default_rng(seed)
    # Parts that do not overlap: room that is left is dealt out before, between and behind them.
    gaps = np.sort(draw.integers(0, len(ids) - wanted * sizes.part + 1, wanted))
    starts = draw.permutation(gaps + sizes.part * np.arange(wanted))
    probes = []
    for start in starts.tolist():
        part = ids[start : start + sizes.part]
        given = (*instruction, *part[: sizes.given])
        probes.append(Probe(ProbeKind.RECALL, given, tuple(part[sizes.given :])))
    ends = np.cumsum(counts).tolist()
    return [probes[end - count : end] for end, count in zip(ends, counts, strict=True)]


def held_out(states: DocumentStates) -> tuple[DocumentStates, Probe]:
    """Return a document without its last 64 tokens, and the probe that asks for them.

    Raises
    ------
    SettingsError
        Where it has no more than those.
    """
    kept = states.tokens - GROUP_NUMBERS
    if kept <= 0:
        raise SettingsError(f"a document of {states.tokens} tokens has none to hold out")
    layers = tuple((keys[:, :kept], values[:, :kept]) for keys, values in states.layers)
    last = states.ids[kept:]
    probe = Probe(ProbeKind.CONTINUE, last[:1], last[1:])
    return DocumentStates(states.ids[:kept], layers), probe


# --- Quality ---


@dataclass(frozen=True)
class FormQuality:
    """What probes said of one form.

    Parameters
    ----------
    agreements
        Of each probe, the share of the answer's tokens where the most probable one is the same as
        with all rows.
    divergence
        Mean KL divergence from all rows, in nats.
    tokens
        Compared in all.
    """

    agreements: tuple[float, ...]
    divergence: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean agreement of the probes."""
        return fmean(self.agreements)

    @property
    def worst(self) -> float:
        """Agreement of the worst probe."""
        return min(self.agreements)

    @property
    def lower(self) -> float:
        """The lower end of a 90 % interval, which utility counts; see `lower_end`."""
        return lower_end(self.agreements, self.tokens)

    @property
    def upper(self) -> float:
        """The upper end of that interval."""
        return upper_end(self.agreements, self.tokens)

    def joined(self, others: FormQuality) -> FormQuality:
        """Return what these probes and others said of the same form."""
        tokens = self.tokens + others.tokens
        both = self.divergence * self.tokens + others.divergence * others.tokens
        return FormQuality((*self.agreements, *others.agreements), both / tokens, tokens)


def measure_forms(
    model: Any, states: DocumentStates, forms: Sequence[Form], probes: Sequence[Probe]
) -> Mapping[str, FormQuality]:
    """Return what probes say of forms, by their names.

    Every token of a probe is read once for each form, and once with all rows: in one pass, or token
    by token where a form selects. A form opens once for all probes; what a probe has left is cut
    off behind the document. A model that is to be attached for a form is attached once `Probing`
    has read the answers of all rows.

    Parameters
    ----------
    model
        That the states are of.
    states
        Of the document.
    forms
        What is measured. `text` and `held` are all rows: they agree by themselves.
    probes
        Of recall or of questions; for held-out ones see `held_out`, whose document is another.

    Raises
    ------
    SettingsError
        Where there are no probes.
    """
    probing = Probing(model, states, probes)
    return {form.name: probing.quality(form, form.make(model, states).open()) for form in forms}


class Probing:
    """Probes of one document with the answers of all rows, which are read once.

    Parameters
    ----------
    model, states, probes
        As in `measure_forms`.
    held
        All rows, opened, where somebody has them already.

    Raises
    ------
    SettingsError
        Where there are no probes.
    """

    def __init__(
        self,
        model: Any,
        states: DocumentStates,
        probes: Sequence[Probe],
        held: OpenedForm | None = None,
    ) -> None:
        if not probes:
            raise SettingsError("no probes: give one at least")
        self._model, self._probes = model, probes
        held = held or HeldForm().make(model, states).open()
        self._expected = _answers(model, held, probes)

    def compared(self, answers: Sequence[torch.Tensor]) -> FormQuality:
        """Return what answers are worth that somebody else has read.

        Parameters
        ----------
        answers
            Of each probe the logits at the tokens of its answer, (answer tokens, vocabulary).
        """
        return _compared(answers, self._expected)

    def quality(self, form: Form, opened: OpenedForm, part: slice = slice(None)) -> FormQuality:
        """Return what probes say of an opened form, whose cache is as it was afterwards.

        Of a form that selects, answers are read token by token, as they are decoded.

        Parameters
        ----------
        form, opened
            The form. All rows, and text, agree by themselves: nothing is read.
        part
            Which of the probes.
        """
        expected = self._expected[part]
        if opened.unread or isinstance(form, HeldForm):
            return _compared(expected, expected)
        answers = _answers_singly if form.selects else _answers
        return _compared(answers(self._model, opened, self._probes[part]), expected)


@dataclass(frozen=True)
class ProbePass:
    """Probes that are read in one forward pass, as if each was read alone behind the document.

    Parameters
    ----------
    ids
        Token numbers: first those that all probes begin with, then what each has beside.
    positions
        Of each token, counted behind the document.
    sees
        Which of these tokens each attends to, bool (tokens, tokens).
    compared
        Tokens whose logits are compared, probe by probe.
    sizes
        How many of these each probe has.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    sees: torch.Tensor
    compared: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> ProbePass:
        """Lay probes side by side."""
        shared = _shared_tokens([probe.given for probe in probes])
        ids, positions = [*probes[0].given[:shared]], [*range(shared)]
        spans, compared = [(0, shared)], []
        for probe in probes:
            begin, rest = len(ids), len(probe.given) - shared
            ids += [*probe.given[shared:], *probe.answer[:-1]]
            positions += range(shared, shared + len(ids) - begin)
            spans.append((begin, len(ids)))
            # What is behind the last token that is given is the answer's first.
            last = begin + rest - 1 if rest else shared - 1
            compared += [last, *range(begin + rest, len(ids))]
        sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        for begin, end in spans:
            sees[begin:end, :shared] = True
            sees[begin:end, begin:end] = True
        sizes = tuple(len(probe.answer) for probe in probes)
        return cls(tuple(ids), tuple(positions), sees.tril(), tuple(compared), sizes)

    def read(self, model: Any, opened: OpenedForm) -> list[torch.Tensor]:
        """Return logits at the tokens of each answer, (answer tokens, vocabulary) in float32."""
        device, given = model.device, {}
        if len(self.sizes) > 1:
            held = opened.cache.layers[0].keys.shape[-2]
            hidden = torch.zeros(len(self.ids), held + len(self.ids), dtype=model.dtype)
            hidden[:, held:].masked_fill_(~self.sees, torch.finfo(model.dtype).min)
            behind = torch.tensor([self.positions]) + opened.cache.get_seq_length()
            given = {
                "attention_mask": hidden[None, None].to(device),
                "position_ids": behind.to(device),
            }
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([self.ids], device=device),
                past_key_values=opened.cache,
                use_cache=True,
                logits_to_keep=torch.tensor(self.compared, device=device),
                **given,
            )
        opened.cache.crop(-len(self.ids))
        return list(output.logits[0].float().split(self.sizes))


def _shared_tokens(given: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens are the same in all."""
    count = 0
    for tokens in zip(*given, strict=False):
        if len({*tokens}) > 1:
            break
        count += 1
    return count


def _answers(model: Any, opened: OpenedForm, probes: Sequence[Probe]) -> list[torch.Tensor]:
    """Return logits at the tokens of each answer, (answer tokens, vocabulary) in float32."""
    # A window slides over what a mask of our own would have to know.
    together = getattr(model.config, "sliding_window", None) is None
    passes = [probes] if together else [[one] for one in probes]
    return [answer for own in passes for answer in ProbePass.of(own).read(model, opened)]


def _answers_singly(model: Any, opened: OpenedForm, probes: Sequence[Probe]) -> list[torch.Tensor]:
    """Return the same, what is given being read in one pass and each token of an answer in one."""
    answers = []
    for probe in probes:
        logits = []
        for read in (probe.given, *((one,) for one in probe.answer[:-1])):
            with torch.no_grad():
                output = model(
                    input_ids=torch.tensor([read], device=model.device),
                    past_key_values=opened.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            logits.append(output.logits[0, -1].float())
        opened.cache.crop(-len(probe.given) - len(probe.answer) + 1)
        answers.append(torch.stack(logits))
    return answers


def _compared(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> FormQuality:
    agreements, divergences = [], []
    for own, other in zip(found, expected, strict=True):
        agreements.append(float((own.argmax(-1) == other.argmax(-1)).float().mean()))
        ours, theirs = own.log_softmax(-1), other.log_softmax(-1)
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
    tokens = sum(len(one) for one in expected)
    return FormQuality(tuple(agreements), float(torch.cat(divergences).mean()), tokens)
