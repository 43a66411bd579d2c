# SPDX-License-Identifier: Apache-2.0
"""The oracle's whole chain: from FP16 keys and a query to score codes and selected positions."""

from dataclasses import dataclass

import oracle_keys
import oracle_queries
import oracle_scores


@dataclass
class Result:
    """Everything the chain makes on its way, as plain lists."""

    statistics: list
    keys: list
    queries: list
    aligned: list
    invalid: list
    offsets: list
    codes: list


def run(keys, queries, scaling, spec, scope):
    """Score a context whose segments all take their statistics now.

    keys is a nested list [N][kv][d] of FP16 codes, queries [H][d] of floats.
    """
    mode, rule = spec.key_mode.value, spec.rule.value
    statistics, coded_keys, coded_queries, columns = [], [], [], []
    preceding = None
    for first in range(0, len(keys), spec.segment_tokens):
        part = keys[first : first + spec.segment_tokens]
        preceding = oracle_keys.statistics(part, first, spec.segment_tokens, preceding)
        coded = oracle_queries.encode(queries, preceding, scaling, rule, spec.group_size)
        statistics.append(preceding)
        coded_queries.append(coded)
        per_kv = len(coded) // spec.kv_heads
        for token in part:
            exponents, codes = oracle_keys.encode(token, preceding, mode)
            coded_keys.append((exponents, codes))
            columns.append(
                [
                    oracle_queries.aligned_product(
                        *head, exponents[h // per_kv], codes[h // per_kv], mode
                    )
                    for h, head in enumerate(coded)
                ]
            )
    aligned = [list(row) for row in zip(*columns, strict=True)]
    invalid = [[t == oracle_keys.INVALID for t in exponents] for exponents, _ in coded_keys]
    offsets = oracle_scores.offsets(aligned, invalid, rule, scope.value, spec.group_size)
    codes = oracle_scores.score_codes(aligned, offsets, invalid, rule, scope.value, spec.group_size)
    return Result(statistics, coded_keys, coded_queries, aligned, invalid, offsets, codes)
