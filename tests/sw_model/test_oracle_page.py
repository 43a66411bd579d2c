# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/scoring-contract.md, computed by the oracle."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import oracle
import oracle_keys
import oracle_layout
import oracle_numbers
import oracle_queries
import oracle_scores
import oracle_values
import pytest

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_launch import scope_number

PAGE = Path(__file__).parents[2] / "docs" / "scoring-contract.md"
TABLE = re.compile(r"<!-- check: (\w+) -->\n((?:\|.*\n)+)")


def number(text):
    """Read an integer, fraction, decimal, 0x code, 2^k or 2^k-1."""
    text = text.strip().replace("−", "-")
    if text.startswith("0x"):
        return int(text, 16)
    match = re.fullmatch(r"2\^(-?\d+)(-1)?", text)
    if match:
        return Fraction(2) ** int(match[1]) - (1 if match[2] else 0)
    return Fraction(text)


def numbers(text):
    return [] if text.strip() == "—" else [number(part) for part in text.split(",")]


def ranges(text):
    found = []
    for part in text.split(","):
        first, _, last = part.strip().partition("..")
        if first != "—":
            found += range(int(first), int(last or first) + 1)
    return found


def tables():
    return {
        name: [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in body.strip().split("\n")[2:]
        ]
        for name, body in TABLE.findall(PAGE.read_text(encoding="utf-8"))
    }


def fp16_code(value):
    """Return the FP16 code of a value that has one."""
    code = int(np.float16(float(value)).view(np.uint16))
    assert oracle_numbers.fp16_value(code) == value
    return code


def check_fp16(code, m, e, value):
    code = number(code)
    found = oracle_numbers.fp16_value(code)
    if found is None:
        return value == "NaN" and number(m) == 0 and e == "—"
    sign = -1 if code & 0x8000 else 1
    m, e = number(m), number(e)
    return found == number(value) and found == sign * m * Fraction(2) ** int(e - 25)


def check_statistics(values, c, mean):
    channel = []
    for part in values.split(","):
        count, value = part.split("×")
        channel += [number(value)] * int(count)
    return oracle_keys.channel(channel) == (number(c), number(mean))


def check_keys(mode, x, c, mean, d, t, codes):
    x = [oracle_numbers.fp16_value(fp16_code(v)) for v in numbers(x)]
    triples = zip(x, [int(v) for v in numbers(c)], numbers(mean), strict=True)
    differences = [oracle_keys.centred(*triple) for triple in triples]
    return differences == numbers(d) and oracle_keys.token_codes(
        [int(v) for v in differences], mode
    ) == (number(t), numbers(codes))


def check_queries(q, c, means, s, codes, o):
    found = oracle_queries.query_codes(numbers(q), [int(v) for v in numbers(c)])
    return found == (number(s), numbers(codes)) and oracle_queries.correction(
        *found, [int(v) for v in numbers(means)]
    ) == number(o)


def check_aligned(product, s, t, o, result):
    # One query code of 1 and one key code of P make the product P.
    s, t, o = (int(number(v)) for v in (s, t, o))
    found = oracle_queries.aligned_product(s, [1], o, t, [int(number(product))], "int8")
    return found == number(result)


def check_reference(n, recent, probes):
    return oracle_scores.reference_positions(int(n)) == (ranges(recent), ranges(probes))


def check_weight_offset(recent, probes, top, total, b):
    recent, probes = (([int(v) for v in numbers(text)]) for text in (recent, probes))
    if top != "—":
        assert max(recent + probes) == number(top)
        terms = [oracle_scores.weight(v - int(number(top))) for v in recent]
        terms += 16 * [oracle_scores.weight(v - int(number(top))) for v in probes]
        assert sum(terms) == number(total)
    return oracle_scores.weight_offset(recent, probes) == number(b)


def check_raw_offset(sums, a):
    return oracle_scores.raw_offset([int(v) for v in numbers(sums)]) == number(a)


def check_weight(z, w):
    return oracle_scores.weight(int(number(z))) == number(w)


def check_mag(v, mag):
    return oracle_scores.mag(int(number(v))) == number(mag)


def check_score_code(rule, value, code):
    code_of = {
        "weight_sum": lambda s: oracle_scores.weight_code([s]),
        "raw_sum": oracle_scores.raw_code,
    }
    return code_of[rule](int(number(value))) == number(code)


def check_selected_count(n, alpha, kept, max_selected, k):
    return oracle_scores.selected_count(
        int(n), float(alpha), int(kept), int(max_selected)
    ) == number(k)


def check_select(codes, k, kept, selected):
    return oracle_scores.select(numbers(codes), int(k), ranges(kept)) == ranges(selected)


def check_address(mode, kv, d, token, g, j, exponent, code):
    kv, d, token, g, j = (int(v) for v in (kv, d, token, g, j))
    return list(oracle_layout.exponent_address(token, g, kv, d, mode)) == numbers(exponent) and (
        list(oracle_layout.code_address(token, g, j, kv, d, mode)) == numbers(code)
    )


def check_tuple(code, position, word):
    return oracle_layout.score_tuple(int(code), int(position)) == number(word)


def check_digest(head_dim, kv, group, digest):
    spec = KernelSpec(int(head_dim), int(kv), int(group))
    return int.from_bytes(spec.digest()[:8], "big") == number(digest)


def check_value(code, t, c, mean, value):
    code, t, c, mean = (int(number(v)) for v in (code, t, c, mean))
    return oracle_values.decoded(code, t, c, mean) == number(value)


def check_value_address(kv, d, token, g, j, exponent, code):
    kv, d, token, g, j = (int(v) for v in (kv, d, token, g, j))
    return list(oracle_values.exponent_address(token, g, kv, d)) == numbers(exponent) and (
        list(oracle_values.code_address(token, g, j, kv, d)) == numbers(code)
    )


def check_exact_count(n, share, least, kept, k, e):
    return oracle_values.exact_count(int(n), float(share), int(least), int(kept), int(k)) == number(
        e
    )


def check_power(f, mantissa):
    return oracle_values.mantissa(int(f)) == number(mantissa)


def check_scope_argument(scope, queries, argument):
    return scope_number(Scope(scope), int(queries)) == number(argument)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
ROWS = [(name, row) for name, rows in tables().items() if name != "chain" for row in rows]


def test_every_table_is_checked_and_none_is_empty():
    found = tables()
    assert set(found) == set(CHECKS) | {"chain"}
    assert all(rows for rows in found.values())
    assert PAGE.read_text(encoding="utf-8").count("<!-- check:") == len(found)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda v: v if isinstance(v, str) else None)
def test_example(name, row):
    assert CHECKS[name](*row)


def spoiled(name, row):
    """Return the row with another last value, one that the example must not also accept."""
    row = list(row)
    if row[-1] in ("NaN", "—"):
        return [*row[:-1], "77"]
    if name in ("reference", "select"):
        return [*row[:-1], row[-1] + ", 77"]
    last = numbers(row[-1])
    return [*row[:-1], ", ".join(str(v) for v in [*last[:-1], last[-1] + 1])]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda v: v if isinstance(v, str) else None)
def test_spoiled_example_is_noticed(name, row):
    assert not CHECKS[name](*spoiled(name, row))


def test_canonical_json_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert KernelSpec(64, 3, 3).canonical_json() in text
    assert KernelSpec(64, 3, 4).canonical_json() not in text


def chain():
    """Return the chain of section 13 as the rows of its table."""
    keys = [[[fp16_code(Fraction(v)) for v in token]] for token in ((1, "-1/2"), (0, 2))]
    scaling = 0.6931471805599453
    results = {
        rule: oracle.run(
            keys,
            [[2.0, 0.0]],
            scaling,
            KernelSpec(2, 1, 1, key_mode=KeyMode.INT8, rule=rule),
            Scope.LAYER,
        )
        for rule in Rule
    }
    weighed, raw = results[Rule.WEIGHT_SUM], results[Rule.RAW_SUM]
    assert weighed.queries == raw.queries == [[(-1, [64, 0], 0)]]
    assert weighed.keys == [([4], [[64, -32]]), ([5], [[0, 64]])]
    aligned, z = weighed.aligned[0], [v - weighed.offsets[0] for v in weighed.aligned[0]]
    codes = [64 * token[1][0][0] for token in weighed.keys]
    return [
        codes,
        aligned,
        [oracle_scores.weight(v - 512) for v in aligned],
        z,
        [oracle_scores.weight(v) for v in z],
        weighed.codes[0],
        [v - raw.offsets[0] for v in raw.aligned[0]],
        raw.codes[0],
    ]


def test_chain_by_hand():
    written = [[number(cell) for cell in row[1:]] for row in tables()["chain"]]
    assert written == chain()
    written[-1][0] += 1
    assert written != chain()


@pytest.mark.parametrize(
    ("text", "value"), [("2^−3", Fraction(1, 8)), ("2^4−1", 15), ("−1/2", Fraction(-1, 2))]
)
def test_the_page_reader_reads_numbers(text, value):
    assert number(text) == value
