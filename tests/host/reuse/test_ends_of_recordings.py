# SPDX-License-Identifier: Apache-2.0
"""What an engine gives its store back when it closes, whatever fails of it."""

import pytest

from hillinfer.drive.regions import GroupTable, OtherFiles
from hillinfer.extents.group_seals import GroupSeals
from hillinfer.extents.shared_chunks import SharedChunks
from hillinfer.memory_budget import Accountant
from hillinfer.store.pool_files import StoreFailedError


def failing():
    raise StoreFailedError("the index is gone")


@pytest.mark.parametrize("who", ["first", "second", "third", "nobody"])
def test_each_prompt_is_ended_whatever_becomes_of_another(who):
    """With a strict store the end of one is an error, where it cannot be stored."""
    chunks = SharedChunks(OtherFiles(1, 64), GroupTable(), GroupSeals(Accountant(1 << 20), 64))
    ended = []
    for one in ("first", "second", "third"):
        chunks.call_at_close(one, failing if one == who else lambda one=one: ended.append(one))
    if who == "nobody":
        chunks.close()
    else:
        with pytest.raises(StoreFailedError, match="the index is gone"):
            chunks.close()
    assert ended == [one for one in ("first", "second", "third") if one != who]
