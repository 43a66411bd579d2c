# SPDX-License-Identifier: Apache-2.0
"""Whether io_uring can be tested here, asked of the kernel and not of what is tested."""

import ctypes
import errno
import os
import re

SKIP = "io_uring is not permitted here (or Linux is older than 6.1)"


def kernel_permits_rings():
    """Ask with a bad pointer: a kernel that permits rings looks at it, one that does not won't."""
    library = ctypes.CDLL(None, use_errno=True)
    assert library.syscall(425, 1, None) == -1
    number = re.match(r"(\d+)\.(\d+)", os.uname().release)
    release = tuple(int(part) for part in number.groups())
    return ctypes.get_errno() == errno.EFAULT and release >= (6, 1)
