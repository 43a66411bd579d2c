# SPDX-License-Identifier: Apache-2.0
"""Traces made of random numbers: conversations that go on, and prompts that begin alike."""

import json
import random

from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, RequestTrace


def random_trace(requests=300, seed=0, name="random"):
    """Return a trace in which half of the requests go on with an earlier one, or part from it."""
    choice = random.Random(seed)
    chains, made, blocks = [], [], 1
    for number in range(requests):
        begun = [0]
        if chains and choice.random() < 0.5:
            chain = choice.choice(chains[-20:])
            begun = chain[: choice.randint(1, len(chain))] if choice.random() < 0.2 else chain
        new = choice.randint(1, 6)
        chain = (*begun, *range(blocks, blocks + new))
        blocks += new
        chains.append(chain)
        tokens = len(chain) * BLOCK_TOKENS - choice.randint(0, BLOCK_TOKENS - 1)
        made.append(Request(float(number), tokens, chain))
    return RequestTrace(name, tuple(made), blocks)


def write_trace(file, trace):
    """Write a trace in Mooncake's format."""
    lines = [
        json.dumps(
            {
                "timestamp": int(1000 * request.time),
                "input_length": request.tokens,
                "output_length": 1,
                "hash_ids": request.blocks,
            }
        )
        for request in trace.requests
    ]
    file.write_text("\n".join(lines) + "\n")
    return file
