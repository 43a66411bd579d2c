# SPDX-License-Identifier: Apache-2.0
"""What tests of sessions read, ask and change."""

from __future__ import annotations

import hashlib
import json

import torch
from generation_runs import bits, run
from tiny_models import TinyModel, prompts

TINY = TinyModel()
# Two segments and an open one, whose last group is open too.
IDS, _ = prompts([2200], seed=11)
QUESTION, _ = prompts([30], seed=12)
PROMPT = torch.cat([IDS, QUESTION], dim=1)


@torch.no_grad()
def feed(model, cache, ids, chunk=512):
    """Read ids in chunks."""
    for part in torch.split(ids, chunk, dim=1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)


def answer(model, cache, ids=PROMPT, **options):
    """Return the bits of all logits of an answer, in the chunks of an unbroken run."""
    return bits(run(model, cache, ids, **options))


def flip_bit(file, place):
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= 4
    file.chmod(0o600)
    file.write_bytes(data)


def content_of(directory):
    """Return the manifest as JSON, without its digest."""
    content = json.loads((directory / "session.json").read_text())
    del content["manifest_digest"]
    return content


def seal(directory, content):
    """Write a manifest with a digest that fits, as somebody who knows the format would."""
    from hillinfer.sessions.manifest import sealed

    (directory / "session.json").write_bytes(sealed(content))


def seal_checksums(directory):
    """Make all checksums fit what the files hold now."""
    content = content_of(directory)
    for name in content["digests"]:
        content["digests"][name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    seal(directory, content)
