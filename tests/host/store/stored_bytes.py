# SPDX-License-Identifier: Apache-2.0
"""Changes bytes of a store's files as a failing drive would."""


def flip(path, offset, bit=0):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
