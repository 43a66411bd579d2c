# SPDX-License-Identifier: Apache-2.0
"""`hillinfer documents`: forms of stored documents, and where they lie."""
