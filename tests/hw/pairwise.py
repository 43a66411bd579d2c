# SPDX-License-Identifier: Apache-2.0
"""Chooses few rows of a large table so that every pair of values occurs in one of them."""

from itertools import combinations, product


def pairwise(factors):
    """Return rows, one value per factor, in which every two values of two factors meet.

    Greedy and deterministic: each row starts from a pair that is still missing and takes, factor
    by factor, the value that adds the most missing pairs.

    Parameters
    ----------
    factors
        A list of lists of values; where one is empty there are no rows.
    """
    if not all(factors):
        return []
    sizes = range(len(factors))
    missing = {
        (a, i, b, j)
        for a, b in combinations(sizes, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    used = [[0] * len(values) for values in factors]
    rows = []
    while missing:
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for factor in sorted(set(sizes) - {a, b}, key=lambda f: -len(factors[f])):
            row[factor] = max(
                range(len(factors[factor])),
                # Of values that add equally many pairs, the least used: rows then vary most.
                key=lambda value: (gain(missing, row, factor, value), -used[factor][value]),
            )
        for factor, value in row.items():
            used[factor][value] += 1
        missing -= {(a, row[a], b, row[b]) for a, b in combinations(sizes, 2)}
        rows.append(tuple(factors[factor][row[factor]] for factor in sizes))
    return rows


def gain(missing, row, factor, value):
    """Count the missing pairs that a value of a factor makes with the values chosen so far."""
    pairs = [
        (other, chosen, factor, value) if other < factor else (factor, value, other, chosen)
        for other, chosen in row.items()
    ]
    return sum(pair in missing for pair in pairs)
