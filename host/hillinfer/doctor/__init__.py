# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` looks at and says."""
