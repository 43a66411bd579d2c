# SPDX-License-Identifier: Apache-2.0
"""Why the system refused something, and what its user can do about it, in words."""

from __future__ import annotations

import errno
import os
import resource

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What says something about this process and not about the file that was asked for.
SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_RIGHTS = frozenset({errno.EACCES, errno.EPERM})


def reason_of(error: OSError) -> str:
    """Return why a call failed, which the error itself does not always say."""
    if error.strerror:
        return error.strerror
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def way_out(error: OSError, otherwise: str) -> str:
    """Return what to do about an error.

    Parameters
    ----------
    error
        Of any call.
    otherwise
        What helps where another file or directory does: `choose another --cold-dir`.
    """
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"raise the limit on open files, {limit} now, with ulimit -n {max(4096, 2 * limit)}"
    if error.errno == errno.ENFILE:
        return "the machine has too many open files: end other programs, or raise fs.file-max"
    if error.errno in (errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN):
        return "the machine or this process is out of memory: end other programs, or raise ulimit"
    if error.errno in _RIGHTS:
        return f"take the right to use it, or {otherwise}"
    if error.errno == errno.EROFS:
        return f"it is mounted read-only: mount it for writing, or {otherwise}"
    if error.errno in FULL:
        return f"free space on the drive or {otherwise}"
    if error.errno in (errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
        return otherwise
    return f"check the drive or {otherwise}"
