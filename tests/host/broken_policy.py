# SPDX-License-Identifier: Apache-2.0
"""A pool policy that fails when it is told to."""

from hillinfer.kv.pool_policies import PoolPolicy


class BrokenPolicy(PoolPolicy):
    """Raises when it ranks, as often as `failures` says."""

    failures = 0

    def worth(self, rows):
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("a broken policy")
        return super().worth(rows)
