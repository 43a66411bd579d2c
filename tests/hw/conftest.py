# SPDX-License-Identifier: Apache-2.0
"""Real keys for launches, emulated cards, and which tests are long."""

import pytest

# Files whose tests compile kernels, simulate them for long or ask solvers: `make test-kernels`.
_LONG = {
    "test_cocotb.py",
    "test_csim.py",
    "test_formal.py",
    "test_import_export.py",
    "test_partial_softmax_parts.py",
    "test_proofs.py",
    "test_score_core.py",
    "test_shadow_core.py",
}
# Of these tables `make test` runs the kernels named, because building one takes up to a minute.
_SOME_OF = {
    "[csim-threads-": ("-int4-weight_sum-",),
    # Every key mode with three query heads per KV head, and the default one with eight.
    "[csim-": ("[csim-smollm2-135m-", "[csim-gemma-2b-int4-", "[csim-threads-", "[csim-small-"),
    # The default key mode; the others' RTL comes of the same templates as their csim.
    "[rtl-": ("-int4-", "[rtl-small-"),
    "[pynq-": ("-int4-",),
    # Which rule a kernel has does not concern a card: its RTL is compared for itself with both.
    "[pynq-half-beat-int4-raw_sum-": (),
    # Both rules, and memory with latencies, by what is built anyway. No other kernel's count of
    # cycles comes of other lines of the model.
    "test_cycle_model_rtl.py::test_": ("[half-beat-", "[qwen2.5-0.5b-int4-"),
    "test_long_segments.py::test_": ("[csim]",),
    # RTL behind the real XRT is shown with smaller kernels.
    "test_hw_emu.py::test_the_real_model": ("[hls]",),
    "[xrt-rtl": (),
}


def pytest_collection_modifyitems(items):
    for item in items:
        others = any(
            table in item.nodeid and not any(one in item.nodeid for one in some)
            for table, some in _SOME_OF.items()
        )
        if item.path.name in _LONG or others:
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(scope="session")
def recorded_layer(smollm2_folder):
    """One layer of the real model reading real text: FP16 keys (N, 3, 64), a query, the scaling."""
    from recorded import record_layer

    return record_layer(smollm2_folder)


@pytest.fixture(scope="session")
def cards(tmp_path_factory):
    """Makes the surrounding of an emulated card with an engine, once."""
    from emulated_cards import SMALL, EmulatedCards

    with pytest.MonkeyPatch.context() as patch:
        yield EmulatedCards(SMALL, tmp_path_factory.mktemp, patch.setenv)
