# SPDX-License-Identifier: Apache-2.0
"""HillInfer as a model of EleutherAI's evaluation harness, and tasks that need no network."""
