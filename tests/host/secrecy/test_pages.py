# SPDX-License-Identifier: Apache-2.0
"""Pages come back as they were sealed, at their place and with their key, or not at all."""

import numpy as np
import pytest

from hillinfer.drive.files import aligned_buffer
from hillinfer.native.library import native_library
from hillinfer.secrecy.library import (
    PackagedPages,
    SystemPages,
    WrongTagError,
    aes_gcm,
    derived,
    page_engine,
    wrong_tag,
)
from hillinfer.secrecy.pages import CipherRate, PageCipher, PageLayout, Place

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
HERE, ELSEWHERE = Place(b"p" * 16, 0, 1), Place(b"p" * 16, 0, 2)
# Three pages of one group, three of another, behind two that are not sealed one by one.
LAYOUT = PageLayout(2, np.array([0, 0, 0, 1, 1, 1], np.uint8), 2)
FIRST, SECOND = 2 * 4096, 5 * 4096


ENGINES = {"packaged": PackagedPages(), "system": SystemPages()}


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "system" and not native_library().has_page_cipher:
        pytest.skip("the system has no libcrypto of version 3")
    return ENGINES[request.param]


def pages(count, seed=0):
    data = aligned_buffer(count * 4096)
    data[:] = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8)
    return data


def opened(cipher, at, sealed, key=KEY, place=HERE, engine=None):
    """Return what another reader makes of sealed pages and of what lies beside them."""
    reader = PageCipher(key, place, LAYOUT, cipher.epochs, engine)
    reader.take_tags(np.frombuffer(cipher.tags, np.uint8))
    data = aligned_buffer(sealed.nbytes)
    data[:] = sealed
    reader.open(at, data)
    return data


def test_what_was_sealed_is_opened(engine):
    cipher, data = PageCipher.begun(KEY, HERE, LAYOUT, engine), pages(3)
    kept = data.copy()
    sealed = cipher.seal(FIRST, data)
    assert np.array_equal(data, kept)
    assert not np.array_equal(sealed, data)
    assert sealed.ctypes.data % 4096 == 0
    # By whichever reads it.
    for other in (engine, PackagedPages(), page_engine()):
        assert np.array_equal(opened(cipher, FIRST, sealed, engine=other), data)
    # Any pages of it alone.
    assert np.array_equal(opened(cipher, FIRST + 4096, sealed[4096:8192]), data[4096:8192])


def test_equal_pages_are_sealed_to_different_bytes():
    data = pages(1).repeat(1)
    three = np.concatenate([data] * 3)
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    one, two, three = cipher.seal(FIRST, three).reshape(3, -1)
    again = PageCipher.begun(KEY, HERE, LAYOUT).seal(FIRST, data)
    found = {sealed.tobytes() for sealed in (one, two, three, again)}
    assert len(found) == 4


@pytest.mark.parametrize("bit", [0, 4095 * 8 + 7, 4096 * 8, 3 * 4096 * 8 - 1])
def test_a_flipped_bit_of_a_page_is_found(engine, bit):
    cipher = PageCipher.begun(KEY, HERE, LAYOUT, engine)
    sealed = cipher.seal(FIRST, pages(3))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongTagError, match=f"page {bit // 8 // 4096}"):
        opened(cipher, FIRST, sealed, engine=engine)


@pytest.mark.parametrize("byte", [0, 15, 16, 47])
def test_a_flipped_bit_of_a_tag_is_found(engine, byte):
    cipher = PageCipher.begun(KEY, HERE, LAYOUT, engine)
    sealed = cipher.seal(FIRST, pages(3))
    tags = bytearray(cipher.tags)
    tags[byte] ^= 16
    reader = PageCipher(KEY, HERE, LAYOUT, cipher.epochs, engine)
    reader.take_tags(np.frombuffer(tags, np.uint8))
    with pytest.raises(WrongTagError):
        reader.open(FIRST, sealed)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (OTHER_KEY, HERE),
        (KEY, ELSEWHERE),
        (KEY, Place(b"q" * 16, 0, 1)),
        (KEY, Place(b"p" * 16, 1, 1)),
    ],
    ids=["key", "extent", "store", "drive"],
)
def test_another_key_or_place_opens_nothing(key, place):
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    sealed = cipher.seal(FIRST, pages(3))
    with pytest.raises(WrongTagError):
        opened(cipher, FIRST, sealed, key, place)


def test_pages_that_changed_places_are_found_with_their_tags():
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    sealed = cipher.seal(FIRST, pages(2))
    swapped = np.concatenate([sealed[4096:], sealed[:4096]])
    tags = cipher.tags[16:32] + cipher.tags[:16] + cipher.tags[32:]
    reader = PageCipher(KEY, HERE, LAYOUT, cipher.epochs)
    reader.take_tags(np.frombuffer(tags, np.uint8))
    with pytest.raises(WrongTagError):
        reader.open(FIRST, swapped)


def test_an_older_writers_page_and_tag_are_not_those_of_a_newer_one():
    """The older one wrote the same place with the same key, and was not published."""
    published = PageCipher.begun(KEY, HERE, LAYOUT)
    first = published.seal(FIRST, pages(3))
    older, newer = published.go_on(), published.go_on()
    replayed = older.seal(SECOND, pages(3, 1))
    right = newer.seal(SECOND, pages(3, 2))
    assert np.array_equal(opened(newer, SECOND, right), pages(3, 2))
    # What was published before opens under both.
    assert np.array_equal(opened(newer, FIRST, first), pages(3))
    reader = PageCipher(KEY, HERE, LAYOUT, newer.epochs)
    reader.take_tags(np.frombuffer(older.tags, np.uint8))
    with pytest.raises(WrongTagError):
        reader.open(SECOND, replayed)


def test_no_page_is_sealed_twice_in_an_epoch():
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    cipher.seal(FIRST, pages(2))
    for at, count in ((FIRST, 1), (FIRST + 4096, 2)):
        with pytest.raises(ValueError, match="a nonce would repeat"):
            cipher.seal(at, pages(count))
    cipher.seal(FIRST + 2 * 4096, pages(1))
    # A reader has no epoch of its own.
    reader = PageCipher(KEY, HERE, LAYOUT, cipher.epochs)
    reader.take_tags(np.frombuffer(cipher.tags, np.uint8))
    with pytest.raises(ValueError, match="go_on"):
        reader.seal(SECOND, pages(1))


def test_tags_of_what_is_published_stay_the_same_bytes():
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    cipher.seal(FIRST, pages(3))
    before = cipher.tags
    other = cipher.go_on()
    other.seal(SECOND, pages(3))
    assert other.tags[:48] == before[:48]
    assert other.tags[48:] != before[48:]
    assert other.epochs[:16] == cipher.epochs[:16]


@pytest.mark.parametrize("at", [0, 4096, 2 * 4096 + 1, 6 * 4096])
def test_what_is_no_run_of_its_pages_is_refused(at):
    cipher = PageCipher.begun(KEY, HERE, LAYOUT)
    with pytest.raises(ValueError, match="no whole pages of the extent"):
        cipher.seal(at, pages(3))


# From the revised GCM specification of McGrew and Viega: test cases 14 and 16.
ZEROS = bytes(32), bytes(12), bytes(16), b""
SIXTEEN = (
    bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2),
    bytes.fromhex("cafebabefacedbaddecaf888"),
    bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    ),
    bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2"),
)


@pytest.mark.parametrize(
    ("given", "sealed"),
    [
        (ZEROS, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
        (
            SIXTEEN,
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
            "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
            "76fc6ece0f4e1768cddf8853bb2d551b",
        ),
    ],
    ids=["14", "16"],
)
def test_the_cipher_is_aes_256_gcm(given, sealed):
    key, nonce, text, about = given
    assert aes_gcm(key).encrypt(nonce, text, about).hex() == sealed
    wrong = bytearray.fromhex(sealed)
    wrong[0] ^= 1
    with pytest.raises(wrong_tag()):
        aes_gcm(key).decrypt(nonce, bytes(wrong), about)


def test_keys_are_derived_by_hkdf():
    """RFC 5869, test case 1, whose first 32 bytes are those of a key."""
    found = derived(bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derived(bytes([0x0B] * 22), bytes(range(13)), b"another") != found


def test_pages_are_sealed_as_the_library_seals_them(engine):
    """The nonce is the page's number, big-endian, and nothing is associated."""
    data, tags = pages(2), np.zeros((2, 16), np.uint8)
    sealed = data.copy()
    engine.seal(KEY, 300, sealed, tags)
    for number in range(2):
        page = slice(number * 4096, (number + 1) * 4096)
        expected = aes_gcm(KEY).encrypt((300 + number).to_bytes(12, "big"), data[page].data, None)
        assert sealed[page].tobytes() + tags[number].tobytes() == expected
    engine.open(KEY, 300, sealed, tags)
    assert np.array_equal(sealed, data)
    engine.seal(KEY, 300, sealed, tags)
    with pytest.raises(WrongTagError, match="page 301"):
        engine.open(KEY, 301, sealed[4096:], tags[:1])


def test_tags_are_as_many_as_pages(engine):
    with pytest.raises((ValueError, IndexError)):
        engine.seal(KEY, 0, pages(2), np.zeros((1, 16), np.uint8))


def test_the_rate_is_measured(engine):
    rate = CipherRate.measured(engine)
    assert rate.seal > 1e6
    assert rate.open > 1e6
    assert rate.library == engine.name
