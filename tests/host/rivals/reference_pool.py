# SPDX-License-Identifier: Apache-2.0
"""Selections, pools and reads in plain Python: what the rivals' bytes are held against."""

from collections import OrderedDict

PAGE, GAP = 4096, 8192


class ReferencePool:
    """A least-recently-used pool of one layer and sequence, unit by unit."""

    def __init__(self, slots):
        self.slots = slots
        self.held = OrderedDict()

    def fill(self, units):
        """Take units as they leave the tail while a prompt is read."""
        for unit in units if self.slots else []:
            if len(self.held) == self.slots:
                self.held.popitem(last=False)
            self.held[unit] = None

    def misses(self, units):
        """Return the units that are not there; all of them are there afterwards, if they fit."""
        missing = [unit for unit in units if unit not in self.held]
        # What was found stays until it was attended to.
        room = self.slots - (len(units) - len(missing))
        for unit in units:
            if unit in self.held:
                self.held.move_to_end(unit)
        for unit in missing[-room:] if room else []:
            if len(self.held) == self.slots:
                self.held.popitem(last=False)
            self.held[unit] = None
        return missing


def wire_bytes(units, unit_bytes, first_byte=0, read_unit=PAGE):
    """Bytes of the file's read units that units touch, and of gaps of up to 8 KiB between them."""
    read, reached = 0, None
    for unit in sorted(units):
        start = (first_byte + unit * unit_bytes) // read_unit * read_unit
        end = -(-(first_byte + (unit + 1) * unit_bytes) // read_unit) * read_unit
        if reached is None or start > reached + GAP:
            read += end - start
        else:
            read += max(0, end - reached)
        reached = end
    return read


def spilled(length, recent):
    """Tokens that left the tail: groups go as the token comes that would not fit."""
    return max(0, -(-(length - recent - 64) // 64)) * 64


def pages(byte_count):
    """Round up to whole pages."""
    return -(-byte_count // PAGE) * PAGE


def scatter_bytes(unit_bytes, region_bytes):
    """The buffer that reads go through; units of whole pages, larger than a gap, need none."""
    if unit_bytes % PAGE == 0 and unit_bytes > GAP:
        return 0
    return max(min(2 << 20, region_bytes), pages(unit_bytes)) + 2 * PAGE
