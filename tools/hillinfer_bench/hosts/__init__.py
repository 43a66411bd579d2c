# SPDX-License-Identifier: Apache-2.0
"""Many hosts with a store each: a router before real replicas, and a model of a fleet."""
