# SPDX-License-Identifier: Apache-2.0
"""Forms that drop nothing: what comes back, what it takes, and how near codes are."""

import itertools

import pytest
import torch
from stored_document import TOKENS, logits, stored_document
from tiny_models import FAMILIES
from transformers import DynamicCache

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.forms.form import DocumentStates, FormRates, OpenedForm
from hillinfer.forms.quantised import Codes
from hillinfer.forms.table import make_form, usual_forms
from hillinfer.forms.whole import stored_states
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.model_shape import ModelShape
from hillinfer.store.store import Store

QUESTION = [5, 9, 2, 31, 7, 7, 40]


def shape_of(model):
    return ModelShape.from_config(model.config, model.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_come_back_with_the_bits_that_were_stored(tmp_path, family):
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        document = stored_document(store, family, torch.bfloat16)
        opened = make_form("held").make(document.model, document.states).open()
    assert opened.unread == ()
    for own, other in zip(opened.cache.layers, document.full.layers, strict=True):
        assert torch.equal(own.keys, other.keys)
        assert torch.equal(own.values, other.values)
    expected = logits(document.model, OpenedForm(document.full), QUESTION)
    found = logits(document.model, opened, QUESTION)
    assert torch.equal(found, expected)
    # The twin: one number of one key makes a difference.
    changed = make_form("held").make(document.model, document.states).open()
    changed.cache.layers[0].keys[0, 0, 17, 3] += 1
    assert not torch.equal(logits(document.model, changed, QUESTION), expected)


def test_what_is_opened_is_a_copy_and_the_form_opens_again(document):
    made = make_form("held").make(document.model, document.states)
    first = made.open()
    expected = logits(document.model, made.open(), QUESTION)
    first.cache.layers[0].keys.zero_()
    assert torch.equal(logits(document.model, made.open(), QUESTION), expected)
    assert document.states.layers[0][0].abs().sum() > 0


def test_text_is_read_again(document):
    made = make_form("text").make(document.model, document.states)
    opened = made.open()
    assert opened.unread == document.states.ids
    generation = Generation(document.model, opened.cache, 64)
    generation.read([*opened.unread, *QUESTION])
    held = make_form("held").make(document.model, document.states).open()
    other = Generation(document.model, held.cache, 64)
    other.read(QUESTION)
    answers = [list(one.decode(Sampling(), 8, frozenset())) for one in (generation, other)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("form", usual_forms(), ids=lambda form: form.name)
def test_a_form_takes_the_bytes_that_it_says(document, form):
    made = form.make(document.model, document.states)
    assert made.byte_count == form.byte_count(shape_of(document.model), TOKENS) > 0
    assert made.tokens == TOKENS
    assert made.open().cache.get_seq_length() == (0 if form.name == "text" else TOKENS)
    assert make_form(form.name).name == form.name


def test_shares_of_the_bytes_of_all_rows():
    # Llama-3.1-8B's shape: as measured in the design, .53, .28 and .16.
    shape = ModelShape(32, 8, 32, 128, "float16", 1 << 17)
    held = make_form("held").byte_count(shape, 1024)
    shares = [make_form(f"int{bits}").byte_count(shape, 1024) / held for bits in (8, 4, 2)]
    assert shares == [0.53125, 0.28125, 0.15625]
    shares = [make_form(name).byte_count(shape, 1024) / held for name in ("k6v4", "int6", "mixed4")]
    # Half a bit of 16 for half of the numbers more than INT4, and each channel's own number.
    assert shares == [0.34375, 0.40625, 0.28125 + 0.5 / 32 + 1 / 2048]
    assert make_form("knorm-0.5").byte_count(shape, 1024) == held // 2


def test_codes_by_hand():
    numbers = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0]])
    codes = Codes.of(numbers, 2, 4)
    assert codes.packed.tolist() == [[[0b11100100], [0]]]
    assert codes.low.tolist() == [[0.0, -1.0]]
    assert codes.step.tolist() == [[1.0, 0.0]]
    assert torch.equal(codes.numbers(), numbers)
    # The twin: another code is another number.
    codes.packed[0, 0, 0] ^= 0b100
    assert codes.numbers().tolist() == [[0.0, 0.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0]]


def test_codes_that_no_byte_has_whole_lie_in_parts():
    # 0 to 31, whose codes of 5 bits are themselves: the high 4 bits of all, then the lowest ones.
    numbers = torch.arange(32.0).flip(0)
    codes = Codes.of(numbers, 5, 32)
    assert codes.packed[0, :2].tolist() == [0xFF, 0xEE]
    assert codes.packed[0, 16:].tolist() == [0b01010101] * 4
    assert torch.equal(codes.numbers(), numbers)
    codes.packed[0, 16] ^= 1
    assert codes.numbers()[:2].tolist() == [30.0, 30.0]


@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
def test_codes_are_within_half_a_step(bits):
    numbers = torch.randn((3, 5, 128), generator=torch.Generator().manual_seed(bits))
    codes = Codes.of(numbers, bits, 64)
    error = (codes.numbers() - numbers).abs().unflatten(-1, (-1, 64)).amax(-1)
    # The step and the least number are rounded to FP16, too.
    assert bool((error <= 0.5 * codes.step.float() * 1.02 + 4e-3).all())
    assert bool((error > 0).any())
    assert codes.byte_count == numbers.numel() * bits // 8 + 3 * 5 * 2 * 4


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6])
def test_codes_of_small_numbers_are_as_near_as_fp16_has_steps(bits, size):
    numbers = size * torch.randn((7, 64), generator=torch.Generator().manual_seed(bits))
    # As rows are stored.
    numbers = numbers.to(torch.float16).to(torch.float32)
    codes, half = Codes.of(numbers, bits, 64), (numbers.amax(-1) - numbers.amin(-1)) / 2
    bound = 1.07 * half / (2**bits - 1) + 2.0**-24
    assert bool(((codes.numbers() - numbers).abs().amax(-1) <= bound).all())
    # The twin: another code is too far away.
    codes.packed[3, 0, 0] ^= 0x80
    far = (codes.numbers() - numbers).abs().amax(-1) > bound
    assert far.tolist() == [row == 3 for row in range(7)]


def test_numbers_beyond_fp16_are_bounded():
    codes = Codes.of(torch.tensor([[3e38, -3e38, 0.0, 1.0]]), 8, 4)
    assert bool(codes.numbers().isfinite().all())


def test_fewer_bits_are_further_from_all_rows(document):
    expected = logits(document.model, OpenedForm(copied(document)), QUESTION)
    errors = []
    for name in ("int8", "int4", "int2"):
        opened = make_form(name).make(document.model, document.states).open()
        found = logits(document.model, opened, QUESTION)
        errors.append(float((found - expected).abs().mean()))
    assert all(one < other for one, other in itertools.pairwise(errors))
    assert 0 < errors[0] < 0.1 < errors[-1]


def copied(document):
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(document.states.layers):
        cache.update(keys[None].clone(), values[None].clone(), layer)
    return cache


def test_a_key_is_coded_by_channel_and_a_value_by_token(document):
    """A channel of large keys spoils no other channel, a large value no other token."""
    layers = [(keys.clone(), values.clone()) for keys, values in document.states.layers]
    layers[0][0][:, :, 3] += 100
    layers[0][1][:, 7] += 100
    states = DocumentStates(document.states.ids, tuple(layers))
    opened = make_form("int8").make(document.model, states).open()
    keys, values = (
        (own[0] - given).abs().float()
        for own, given in zip(
            (opened.cache.layers[0].keys, opened.cache.layers[0].values), layers[0], strict=True
        )
    )
    others = [channel for channel in range(keys.shape[-1]) if channel != 3]
    assert float(keys[..., others].max()) < 0.1
    others = [token for token in range(TOKENS) if token != 7]
    assert float(values[:, others].max()) < 0.1


def test_mixed_codes_are_finer_where_a_channel_varies_more(document):
    layers = [(keys.clone(), values.clone()) for keys, values in document.states.layers]
    # Channels of very different size, in no order of their own; a head's are not another's.
    count = layers[0][0].shape[-1]
    scales = 1.4 ** torch.randperm(count, generator=torch.Generator().manual_seed(3))[None].float()
    scales = torch.cat([scales, scales.flip(1)])[: layers[0][0].shape[0]]
    layers[0][0][:] = torch.randn(layers[0][0].shape, generator=torch.Generator().manual_seed(4))
    layers[0][0][:] *= (scales / scales.max() * 1000)[:, None].to(layers[0][0].dtype)
    states = DocumentStates(document.states.ids, tuple(layers))
    steps = {}
    for name in ("mixed4", "int4"):
        keys = make_form(name).make(document.model, states).open().cache.layers[0].keys[0]
        steps[name] = (keys.float() - layers[0][0].float()).abs().amax(1)
    finer = steps["mixed4"] / steps["int4"]
    large = scales.argsort(1, descending=True)
    quarters = finer.gather(1, large).unflatten(1, (4, -1)).mean((0, 2))
    # Two bits more, one more, as many, and one less.
    assert quarters.tolist() == pytest.approx([15 / 63, 15 / 31, 1, 15 / 7], rel=0.35)


def test_seconds_follow_from_rates():
    shape = ModelShape(2, 2, 4, 32, "float16", 4096)
    rates = FormRates(1e6, 2e6, 100.0, 0.01)
    held = make_form("held").seconds(rates, shape, 64)
    assert (held.opening, held.token) == (64 * 2 * 2 * 2 * 32 * 2 / 1e6, 0.01)
    assert make_form("text").seconds(rates, shape, 64).opening == 0.64
    coded = make_form("int8").seconds(rates, shape, 64).opening
    assert coded == make_form("int8").byte_count(shape, 64) / 1e6 + held.opening / 2
    with pytest.raises(SettingsError, match="tier_bytes=0 is no rate above 0"):
        FormRates(0, 1, 1, 1)


def test_what_is_not_stored_or_not_known_is_named(document):
    with pytest.raises(CacheUseError, match="no rows of this document of 70 tokens: put it there"):
        stored_states(document.prompts, [3] * 70)
    for name in (
        "int3",
        "k4v3",
        "k44",
        "mixed2",
        "zip",
        "knorm",
        "knorm-0",
        "knorm-1.5",
        "keydiff-x",
    ):
        with pytest.raises(SettingsError, match=r"choose one of|is not above 0 and up to 1"):
            make_form(name)
    short = DocumentStates(
        document.states.ids[:60], tuple((k[:, :60], v[:, :60]) for k, v in document.states.layers)
    )
    with pytest.raises(SettingsError, match="int4 of 60 tokens: give whole groups of 64"):
        make_form("int4").make(document.model, short)
    with pytest.raises(SettingsError, match=r"snapkv-0.5 of 60 tokens: it observes 64"):
        make_form("snapkv-0.5").make(document.model, short)


def of_heads(head_dim):
    """A document of 64 tokens whose heads have so many numbers."""
    states = torch.randn(2, 1, 64, head_dim, generator=torch.Generator().manual_seed(head_dim))
    return DocumentStates(tuple(range(64)), ((states[0], states[1]),))


@pytest.mark.parametrize(
    ("name", "head_dim", "why"),
    [
        # OpenLLaMA-3B has heads of 100 numbers, of which codes of 4 and 6 bits fill bytes.
        ("int5", 100, "codes of 5 bits of a token's value fill no whole bytes there; choose int8"),
        ("k8v5", 20, "codes of 5 bits of a token's value fill no whole bytes there; choose int8"),
        ("mixed5", 100, "codes of 5 bits of a token's value fill no whole bytes there"),
        ("mixed3", 100, "codes of 3 bits of a token's value fill no whole bytes there"),
        ("int6", 6, "codes of 6 bits of a token's value fill no whole bytes there"),
        ("mixed4", 6, "they have no quarters; choose int8"),
    ],
)
def test_heads_that_codes_do_not_suit_are_named(document, name, head_dim, why):
    with pytest.raises(SettingsError, match=f"{name} of heads of {head_dim} numbers: {why}"):
        make_form(name).make(document.model, of_heads(head_dim))
    # What is named instead suits them, and so do as many bits of other heads.
    for other, own in (("int8", head_dim), (name, 96)):
        made = make_form(other).make(document.model, of_heads(own))
        assert made.open().cache.layers[0].values.shape == (1, 1, 64, own)
