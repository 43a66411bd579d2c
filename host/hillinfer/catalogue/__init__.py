# SPDX-License-Identifier: Apache-2.0
"""What is known of stored documents: what their forms lose, how often asked, what they lie as."""
