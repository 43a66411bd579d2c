# SPDX-License-Identifier: Apache-2.0
"""Where all codes fit in DRAM only exact tokens touch the drive, by what caches report."""

import torch
from generation_runs import CODED, attached
from tiny_models import TinyModel, prompts

TINY = TinyModel(head_dim=32)
DOCUMENT, _ = prompts([1300], seed=3)
QUESTION, _ = prompts([8], seed=4)
ROW_BYTES = 2 * 2 * 32 * 2
# M0 with room for all codes and few rows, for some of the codes, and for all there is.
FITS, SOME, ENOUGH = "2200KiB", "2000KiB", "16MiB"


class Asked:
    """A question asked token by token on a fork of a cache, and what that read.

    The first token is not counted: a fork's open segment is made of rows with it.
    """

    @torch.no_grad()
    def __init__(self, hill, cache):
        fork, outputs = cache.fork(), []
        for at, one in enumerate(QUESTION.split(1, dim=1)):
            if at == 1:
                before = hill.statistics()
            outputs.append(hill.model(input_ids=one, past_key_values=fork).logits)
        self.bits = torch.cat(outputs).view(torch.int32)
        fork.close()
        self.counts = hill.statistics().minus(before)

    @property
    def other_rows(self):
        """How much was read beside exact rows, in rows."""
        return self.counts.cold_useful_bytes / ROW_BYTES - self.counts.cold_rows_read


def asked_again(folder, budget):
    """Ask a new document twice, and twice again once it is resumed."""
    folder.mkdir()
    found = []
    with attached(TINY.build(), folder, dram_budget=budget, **CODED) as hill:
        cache = hill.new_cache()
        with torch.no_grad():
            for part in DOCUMENT.split(512, dim=1):
                hill.model(input_ids=part, past_key_values=cache, logits_to_keep=1)
        found += [Asked(hill, cache) for _ in range(2)]
        cache.save_session(folder / "session")
        cache.close()
        cache = hill.load_session(folder / "session")
        found += [Asked(hill, cache) for _ in range(2)]
        cache.close()
    return found


def test_coded_tokens_do_not_touch_the_drive_where_all_codes_fit(tmp_path):
    fits = asked_again(tmp_path / "fits", FITS)
    for one in fits:
        assert one.counts.coded_tokens > one.counts.cold_rows_read > 0
    # Each pass leaves codes of all groups that it made full, and a session brings its codes.
    for one in fits:
        assert one.counts.coded_arrivals == one.other_rows == 0
    first = fits[0]
    # The twin has room for some of them.
    for one in asked_again(tmp_path / "some", SOME):
        assert min(one.counts.coded_arrivals, one.other_rows) > 0
        assert torch.equal(one.bits, first.bits)
    # And where all rows fit, too, nothing at all is read.
    enough = asked_again(tmp_path / "enough", ENOUGH)
    assert [enough[at].counts.cold_reads for at in (0, 1, 3)] == [0] * 3
    assert enough[2].counts.coded_arrivals == 0 < enough[2].counts.cold_reads
    assert all(torch.equal(one.bits, first.bits) for one in (*fits, *enough))
    enough[0].bits.view(-1)[-1] ^= 1
    assert not torch.equal(enough[0].bits, first.bits)
