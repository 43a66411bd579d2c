# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench precision`: exact and coded tokens, forms of values, the command."""

import json

import numpy as np
import pytest
import torch
from tiny_models import TinyModel, prompts

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.settings import Settings
from hillinfer_bench.cli.main import main
from hillinfer_bench.precision.key_readings import AlignedShadow, DecodedShadow
from hillinfer_bench.precision.mixed import MixedPrecision
from hillinfer_bench.precision.table import Mix, study_mixes
from hillinfer_bench.precision.value_forms import (
    ByteScale,
    ChannelBytes,
    ChannelPowers,
    ContractCodes,
    Groups,
    HalfScale,
    PowerScale,
    Split,
)
from hillinfer_bench.quality.forced_reading import Prefix, forced_logits, selecting
from hillinfer_bench.quality.policies import ContractSelection, LayerQueries
from hillinfer_model.choices import Scope
from hillinfer_model.coded_attention import CodedTokens, ExactRows, attend
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.query_codes import scale_query
from hillinfer_model.selection import (
    exact_count,
    kept_positions,
    select_positions,
    selected_count,
)
from hillinfer_model.value_codes import encode_values, value_statistics

IDS = prompts([260])[0][0].tolist()
LAST = 6
ALL_FORMS = [
    *(kind(bits) for kind in (PowerScale, ByteScale, HalfScale, ChannelPowers) for bits in (4, 3)),
    *(ChannelBytes(4), ContractCodes(), Groups(4), Groups(3)),
]


@pytest.fixture(scope="module")
def tiny():
    """Return a function that reads the last tokens with a policy made for the tiny model."""
    model = TinyModel().build()
    prefix = Prefix.read(model, IDS[:-LAST])
    settings = Settings().changed(alpha=0.5, shadow="int4")
    scorers = {
        scope: make_scorer("nvme", kernel_spec(prefix.shape, settings), scope) for scope in Scope
    }

    def read(split, keys, exact_scope=Scope.LAYER):
        layer = scorers[Scope.LAYER]
        policy = ContractSelection(layer, settings)
        if split is not None:
            ranker = scorers[exact_scope]
            policy = MixedPrecision(layer, ranker, settings, split, ContractCodes(), keys)
        with selecting(model):
            return forced_logits(model, prefix, IDS[-LAST:], policy)

    return read


@pytest.mark.parametrize("keys", [AlignedShadow(), DecodedShadow()], ids=lambda one: one.name)
def test_all_exact_is_the_selection_alone(tiny, keys):
    plain = tiny(None, keys)
    assert (tiny(Split(1.0), keys) - plain).abs().max() < 1e-4
    # The twin: with codes it is near and not the same.
    coded = (tiny(Split(0.0), keys) - plain).abs().max()
    assert coded > 1e-3


def test_more_exact_tokens_are_nearer(tiny):
    plain = tiny(None, AlignedShadow())
    far, near = (
        (tiny(Split(0.0, floor), AlignedShadow()) - plain).square().mean() for floor in (36, 100)
    )
    assert near < far


def test_ways_to_read_keys_agree_and_scopes_differ(tiny):
    split = Split(0.2)
    aligned, decoded = (tiny(split, keys) for keys in (AlignedShadow(), DecodedShadow()))
    plain = tiny(None, AlignedShadow())
    assert (aligned - decoded).abs().max() < (aligned - plain).abs().max()
    assert not torch.equal(aligned, tiny(split, AlignedShadow(), Scope.KV_HEAD))


def golden_outputs(spec, layer, values, alpha, share):
    """Attend with the golden model, which is defined to the bit, for each query of a layer."""
    golden = GoldenModel(spec, Scope.LAYER)
    keys, bits = (one.half().numpy().view(np.uint16) for one in (layer.keys, values))
    statistics = golden.statistics(keys[: layer.first_length], 0, None)
    segment = CodedSegment(0, golden.encode(keys, statistics), statistics)
    of_values = value_statistics(bits[: layer.first_length], 0, 1024, None)
    codes = encode_values(bits, of_values)
    outputs = []
    for query, length in zip(layer.queries.numpy(), layer.lengths, strict=True):
        own = KeyCodes(segment.codes.codes[:length], segment.codes.exponents[:length])
        seen = [CodedSegment(0, own, statistics)]
        scores = golden.score(query, layer.scaling, seen)[0]
        kept = kept_positions(length, 4, 32)
        count = selected_count(length, alpha, 36, None)
        exact = select_positions(scores, exact_count(length, share, 0, 36, count), kept)
        coded = np.setdiff1d(select_positions(scores, count, kept), exact)
        aligned, invalid = golden.aligned(query, layer.scaling, seen)
        tokens = CodedTokens(
            aligned[:, coded],
            invalid[coded],
            KeyCodes(codes.codes[coded], codes.exponents[coded]),
            of_values,
        )
        rows = ExactRows(layer.keys.numpy()[exact], values.numpy()[exact])
        outputs.append(attend(scale_query(query, layer.scaling, spec), rows, [tokens]))
    return torch.from_numpy(np.stack(outputs, axis=1))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_study_attends_as_the_contract_does(share):
    generator = torch.Generator().manual_seed(5)
    spec = KernelSpec(64, 2, 2)
    layer = LayerQueries(
        torch.randn(3, 4, 64, generator=generator),
        (torch.randn(300, 2, 64, generator=generator) * 2).half().float(),
        0.125,
    )
    values = torch.randn(300, 2, 64, generator=generator).half().float()
    settings = Settings().changed(alpha=0.5)
    scorer = make_scorer("nvme", spec, Scope.LAYER)
    split = Split(share, 0 if share else 36)
    study = MixedPrecision(scorer, scorer, settings, split, ContractCodes(), AlignedShadow())
    found = study.attend(layer, values)
    expected = golden_outputs(spec, layer, values, 0.5, share)
    assert (found - expected).abs().max() < 5e-4
    assert (found - golden_outputs(spec, layer, values, 0.5, 0.2)).abs().max() > 1e-2


# Forms


def some_values():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(300, 2, 64, generator=generator) * 0.4
    values += torch.randn(1, 2, 64, generator=generator)
    return values.half().float()


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
def test_a_form_keeps_values_within_a_step(form):
    values = some_values()
    statistics = value_statistics(values.half().numpy().view(np.uint16), 0, 1024, None)
    error = form.decoded(values, statistics) - values
    # Of values that spread by .4 around their means; a step of three bits is twice as wide.
    root = float(error.square().mean().sqrt()) / 0.4
    assert 0.02 < root < (0.2 if form.bits == 4 else 0.42)


def test_fewer_bits_lose_more():
    values = some_values()
    statistics = value_statistics(values.half().numpy().view(np.uint16), 0, 1024, None)
    for kind in (ByteScale, Groups):
        losses = [
            float((kind(bits).decoded(values, statistics) - values).square().mean())
            for bits in (4, 3, 2)
        ]
        assert losses == sorted(losses)


# Bytes


@pytest.mark.parametrize(
    ("mix", "share"),
    [
        # 82 rows of 256 bytes and 737 codes of 33, of 4,096 rows.
        (Mix(0.2, Split(0.02), ContractCodes()), (82 * 256 + 737 * 33) / (4096 * 256)),
        (Mix(0.2, Split(0.02), HalfScale(4)), (82 * 256 + 737 * 34) / (4096 * 256)),
        (Mix(0.2, Split(0.02), Groups(3)), (82 * 256 + 737 * 32) / (4096 * 256)),
        (Mix(0.1, Split(1.0), ContractCodes()), 410 / 4096),
        (Mix(1.0, Split(0.0), ContractCodes()), 33 / 256),
        (Mix(1.0, Split(0.0, 36), ContractCodes()), (36 * 256 + 4060 * 33) / (4096 * 256)),
    ],
)
def test_bytes_of_a_step_by_hand(mix, share):
    assert mix.byte_share(4096, 64) == pytest.approx(share)


def test_every_row_of_the_study_has_a_name_of_its_own():
    names = [mix.configuration().name for mix in study_mixes()]
    assert len(set(names)) == len(names)


# The command


@pytest.fixture
def precision(capfd, tiny_folder, tmp_path):
    """Run the command on the tiny model and return exit code, standard output and error."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(40)))

    def run(*arguments):
        given = ["precision", "--model", tiny_folder, "--texts", text, "--context", 300]
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in [*given, "--last", 4, "--threads", 1, *arguments]])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_a_table_and_a_report(precision, tmp_path):
    file = tmp_path / "precision.json"
    code, out, err = precision("--row", 1, "--row", 4, "--out", file)
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert [row[:3] for row in rows[2:]] == [
        ["0.2", "all", "none"],
        ["0.2", "0.02", "keys L', values as INT4 keys"],
    ]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["label"] == "measured"
    assert [row["coded"] for row in report["rows"]] == [row[2] for row in rows[2:]]
    assert report["rows"][0]["byte_share"] > report["rows"][1]["byte_share"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--row", 99), "row=99 is none of the study's 0 to"),
        (("--last", 300), "last=300 must be at least 1 and below context=300"),
        (("--out", "/dev/null/precision.json"), "choose another --out"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, precision):
    code, out, err = precision(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("hillinfer: error: ")
