# SPDX-License-Identifier: Apache-2.0
"""The checksum of stored bytes is CRC-32C, however long they are and wherever they begin."""

import numpy as np
import pytest

from hillinfer.arrived_rows import PrefixSums
from hillinfer.native.library import native_library
from hillinfer.store.keys import checksum, salts

# RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


def golden(data, before=0):
    state = before ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("data", KNOWN, ids=lambda data: data[:4].hex())
def test_known_values(data):
    assert checksum(data, len(data)) == golden(data) == KNOWN[data]


# One stream and three, with what is left over.
@pytest.mark.parametrize("size", [1, 7, 8, 63, 4096, 12287, 12288, 12289, 40000])
def test_lengths_and_salts(size):
    data = np.random.default_rng(size).integers(0, 256, (2, size), np.uint8)
    salts = np.array([0, 0x12345678], np.uint32)
    found = native_library().crc32c(data, salts)
    assert found.tolist() == [
        golden(row.tobytes(), int(salt)) for row, salt in zip(data, salts, strict=True)
    ]
    # The twin: one bit makes another checksum.
    data[1, size // 2] ^= 16
    assert native_library().crc32c(data, salts)[1] != found[1]


def test_pieces_that_do_not_fit_their_salts_are_refused():
    with pytest.raises(ValueError, match="2 salts for pieces"):
        native_library().crc32c(np.zeros((3, 8), np.uint8), np.zeros(2, np.uint32))


def test_salts_of_a_whole_prefix_are_those_of_its_groups():
    keys = [bytes([one]) * 32 for one in (3, 1, 2)]
    expected = np.arange(12, dtype=np.uint32).reshape(4, 3)
    found = PrefixSums(keys, expected)
    assert found.expected.tolist() == expected.tolist()
    assert found.salts.reshape(-1).tolist() == salts(keys, *range(4)).tolist()
    assert found.salts[2, 1] == golden(keys[1] + bytes([2, 0, 0, 0]))
    # The twin: another key, or another layer, begins with another one.
    assert len(set(found.salts.reshape(-1).tolist())) == 12
