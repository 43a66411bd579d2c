# SPDX-License-Identifier: Apache-2.0
"""What fails for one process, or for a while, takes nothing of a store from all the others."""

import pytest
from few_descriptors import free_descriptors

from hillinfer.store.maintenance import chains, pin
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put

MIB = 1 << 20
SPACE = namespace()
IDS = prompt(1, 3000)


@pytest.fixture
def place(tmp_path):
    """A store with one pinned prompt of three chunks."""
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as store:
        assert put(store, SPACE, IDS) == 2944
        assert pin(store.database, chains(store.database)[0].name, 1) == 3
    return tmp_path / "store"


# --- An index that cannot be opened ---


def opened_with(place, descriptors):
    """Return why a store cannot be opened with so many more descriptors, None where it can."""
    with free_descriptors(descriptors):
        try:
            Store(place).close()
        except StoreError as error:
            return str(error)
    return None


def known(place):
    """Return what an index alone knows: whether a prompt is pinned, and how much was written."""
    with Store(place) as store:
        (chain,) = chains(store.database)
        return chain.is_pinned, store.statistics()["written_bytes"]


def test_an_index_that_cannot_be_opened_for_a_while_is_kept(place):
    before = known(place)
    assert before[0]
    said = []
    for descriptors in range(10):
        said.append(opened_with(place, descriptors))
        assert known(place) == before, said
    assert any("it stays as it is" in one for one in said if one)
    assert said[-1] is None
    assert not (place / "index.broken").exists()


def test_a_broken_index_stays_in_its_place_until_there_is_a_new_one(place):
    index = place / "index.sqlite"
    said = []
    for descriptors in range(14):
        index.write_bytes(b"no index")
        said.append(opened_with(place, descriptors))
        if said[-1]:
            assert index.read_bytes() == b"no index", said
        else:
            assert (place / "index.broken").read_bytes() == b"no index"
    assert any("cannot be made anew" in one for one in said if one)
    assert said[-1] is None
    with Store(place) as store:
        assert check(store, SPACE, IDS) == 2944
