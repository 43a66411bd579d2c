# SPDX-License-Identifier: Apache-2.0
"""An attached model behind OpenAI's interface: requests, the scheduler, the inference thread."""
