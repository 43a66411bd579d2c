# SPDX-License-Identifier: Apache-2.0
"""Processes that store prompts until they are killed, forked so that they need import nothing."""

import os
import signal
import traceback


class ForkedWriter:
    """A process that writes what it has done, line by line, and never ends by itself.

    Parameters
    ----------
    write
        Called there with a file for its lines.
    """

    def __init__(self, write):
        reading, writing = os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                with os.fdopen(writing, "w", buffering=1) as lines:
                    write(lines)
            except BaseException:
                traceback.print_exc()
            finally:
                # Nothing of the test runs on here.
                os._exit(1)
        os.close(writing)
        self.lines = os.fdopen(reading)

    def kill(self):
        os.kill(self._process, signal.SIGKILL)

    def told(self):
        """Return the lines that were not read yet, once the process is gone."""
        with self.lines:
            rest = self.lines.read().splitlines()
        ended = os.waitpid(self._process, 0)[1]
        assert os.WTERMSIG(ended) == signal.SIGKILL, "it ended before it was killed"
        return rest
