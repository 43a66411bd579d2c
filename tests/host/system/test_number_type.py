# SPDX-License-Identifier: Apache-2.0
"""`--dtype auto`: the model's own type, unless a CPU is slow at it."""

import pytest
import torch

from hillinfer.system.machine import NumberType, ProcessorFacts

PLAIN = ProcessorFacts("plain", 2, frozenset({"avx2"}))
FAST = ProcessorFacts("fast", 2, frozenset({"avx2", "avx512_bf16"}))


@pytest.mark.parametrize(
    ("own", "device", "processor", "chosen"),
    [
        (torch.float32, "cpu", PLAIN, torch.float32),
        (torch.bfloat16, "cpu", PLAIN, torch.float32),
        (torch.bfloat16, "cpu", FAST, torch.bfloat16),
        (torch.float16, "cpu", FAST, torch.float32),
        (torch.float16, "cuda", PLAIN, torch.float16),
        (torch.bfloat16, "cuda", PLAIN, torch.bfloat16),
    ],
)
def test_auto(own, device, processor, chosen):
    assert NumberType.AUTO.resolve(own, device, processor) is chosen


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_type_is_taken_as_it_is(name):
    assert NumberType(name).resolve(torch.float32, "cpu", PLAIN) is getattr(torch, name)
