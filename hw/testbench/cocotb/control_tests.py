# SPDX-License-Identifier: Apache-2.0
"""cocotb tests of s_axi_control: the register map, the control protocol, interrupts, its bus."""

import cocotb
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout
from kernel_bench import (
    CONTINUE,
    CONTROL,
    DONE,
    ENABLE,
    GLOBAL,
    IDLE,
    INTERRUPT,
    IS_CHAIN,
    MANIFEST,
    READY,
    RESTART,
    START,
    STATUS,
    TIMEOUT,
    bench_test,
)
from pauses import at_random

ALL = START | DONE | IDLE | READY
DONE_BIT, READY_BIT = 1, 2
# An exported kernel may take its next launch while this one runs: ap_ctrl_chain allows that.
IS_ONE_AT_A_TIME = IS_CHAIN and MANIFEST["origin"] == "hand"
# Far longer than the kernel takes to answer.
LATE = 30


async def ended(bench):
    """Wait for the end of a launch without reading the control register."""
    await with_timeout(RisingEdge(bench.dut.interrupt), *TIMEOUT)
    bench.count()
    await ClockCycles(bench.dut.ap_clk, 4)


async def let_go(bench):
    """Give the kernel its ap_continue, where its protocol has one."""
    if IS_CHAIN:
        await bench.write(CONTROL, CONTINUE)
    await ClockCycles(bench.dut.ap_clk, 4)


@bench_test()
async def registers_hold_what_is_written(bench):
    for name, offset in MANIFEST["arguments"].items():
        words = (0, 4) if name in bench.addresses else (0,)
        for word in words:
            for value in (0xFFFF_FFFF, 0x0123_4567, 0):
                await bench.write(offset + word, value)
                assert await bench.read(offset + word) == value, (name, word)
    assert await bench.read(CONTROL) & ALL == IDLE


@bench_test()
async def arguments_do_not_share_registers(bench):
    words = [
        offset + word
        for name, offset in MANIFEST["arguments"].items()
        for word in ((0, 4) if name in bench.addresses else (0,))
    ]
    for word in words:
        await bench.write(word, 0x0100_0001 * word)
    for word in words:
        assert await bench.read(word) == 0x0100_0001 * word, hex(word)


@bench_test()
async def strobes_write_single_bytes(bench):
    offset = next(iter(MANIFEST["arguments"].values()))
    await bench.write(offset, 0x4433_2211)
    await bench.control.write(offset + 1, b"\xaa")
    assert await bench.read(offset) == 0x4433_AA11
    await bench.control.write(offset + 2, b"\xbb\xcc")
    assert await bench.read(offset) == 0xCCBB_AA11
    await bench.control.write(offset, b"\xdd\xee\xff")
    assert await bench.read(offset) == 0xCCFF_EEDD
    # The upper bytes of the control registers alone start and enable nothing.
    for register in (CONTROL, GLOBAL, ENABLE):
        await bench.control.write(register + 1, b"\xff\xff\xff")
    assert await bench.read(CONTROL) & ALL == IDLE
    assert not await bench.read(GLOBAL)
    assert not await bench.read(ENABLE)


@bench_test()
async def address_before_data_and_data_before_address(bench):
    bench.watch()
    offset = next(iter(MANIFEST["arguments"].values()))
    for late, value in (("w", 0x1357_9BDF), ("aw", 0x2468_ACE0)):
        channel, other = bench.control_channels[late], {"w": "AW", "aw": "W"}[late]
        valid = getattr(bench.dut, f"s_axi_control_{other}VALID")
        ready = getattr(bench.dut, f"s_axi_control_{other}READY")
        channel.pause = True
        write = cocotb.start_soon(bench.write(offset, value))
        offered = taken = 0
        for _ in range(LATE):
            await RisingEdge(bench.dut.ap_clk)
            offered += int(valid.value)
            taken += int(valid.value) & int(ready.value)
            assert not int(bench.dut.s_axi_control_BVALID.value), "answered half a write"
        assert offered, f"{other} was not offered"
        assert taken <= 1, f"{other} was taken {taken} times"
        channel.pause = False
        await with_timeout(write, *TIMEOUT)
        assert await bench.read(offset) == value


@bench_test()
async def responses_wait(bench):
    """A master that takes its time gets the word that was read when it asked."""
    bench.watch()
    offset = next(iter(MANIFEST["arguments"].values()))
    await bench.write(offset, 0x1111_1111)
    for late in ("r", "b"):
        bench.control_channels[late].pause = True
    read = cocotb.start_soon(bench.read(offset))
    await ClockCycles(bench.dut.ap_clk, LATE)
    write = cocotb.start_soon(bench.write(offset, 0x2222_2222))
    await ClockCycles(bench.dut.ap_clk, LATE)
    assert int(bench.dut.s_axi_control_RVALID.value)
    assert int(bench.dut.s_axi_control_BVALID.value)
    assert not read.done()
    assert not write.done()
    for late in ("r", "b"):
        bench.control_channels[late].pause = False
    assert await with_timeout(read, *TIMEOUT) == 0x1111_1111
    await with_timeout(write, *TIMEOUT)
    assert await bench.read(offset) == 0x2222_2222


@bench_test()
async def a_launch_over_a_stalled_control_port(bench):
    bench.watch()
    for index, channel in enumerate(bench.control_channels.values()):
        channel.set_pause_generator(at_random(index, 0.6))
    await bench.set_arguments()
    for _ in range(2):
        bench.place()
        await bench.run()
        bench.check()


@bench_test()
async def ready_is_cleared_by_reading(bench):
    await bench.write(GLOBAL, 1)
    await bench.write(ENABLE, DONE_BIT)
    await bench.start()
    await ended(bench)
    first, second = await bench.read(CONTROL), await bench.read(CONTROL)
    assert first & (READY | DONE) == READY | DONE, hex(first)
    assert not second & READY, hex(second)
    # ap_done is cleared by reading in the other protocol.
    assert bool(second & DONE) == IS_CHAIN, hex(second)
    await let_go(bench)
    assert await bench.read(CONTROL) & ALL == IDLE
    bench.check()


@bench_test(skip=not IS_ONE_AT_A_TIME)
async def start_is_read_back_until_ready(bench):
    await bench.start()
    assert await bench.read(CONTROL) & (START | IDLE | DONE) == START
    await with_timeout(bench.done(), *TIMEOUT)
    assert not await bench.read(CONTROL) & START
    await let_go(bench)
    bench.check()


@bench_test(skip=not IS_ONE_AT_A_TIME)
async def nothing_starts_before_continue(bench):
    await bench.start()
    await with_timeout(bench.done(), *TIMEOUT)
    bench.check()
    bench.place()
    before = bench.memory.read(bench.address_of("status"), 64)
    await bench.start()
    await ClockCycles(bench.dut.ap_clk, 400)
    assert bench.memory.read(bench.address_of("status"), 64) == before, "ran before ap_continue"
    await bench.write(CONTROL, CONTINUE)
    bench.mark()
    await with_timeout(bench.done(), *TIMEOUT)
    bench.check()


@bench_test(skip=not IS_ONE_AT_A_TIME)
async def auto_restart_runs_again_after_continue(bench):
    await bench.start(RESTART)
    for _ in range(2):
        await with_timeout(bench.done(), *TIMEOUT)
        bench.check()
        bench.place()
        await bench.write(CONTROL, CONTINUE | RESTART)
        bench.mark()
        await ClockCycles(bench.dut.ap_clk, 4)
        assert await bench.read(CONTROL) & (RESTART | START | IDLE) == RESTART | START
    # Without the bit the launch that runs is the last.
    await bench.write(CONTROL, 0)
    await with_timeout(bench.done(), *TIMEOUT)
    bench.check()
    await let_go(bench)
    assert await bench.read(CONTROL) & (START | DONE | IDLE | RESTART) == IDLE


@bench_test()
async def interrupts_of_done_and_ready(bench):
    for enabled in (0, DONE_BIT, READY_BIT, DONE_BIT | READY_BIT):
        await bench.write(GLOBAL, 1)
        await bench.write(ENABLE, enabled)
        assert await bench.read(ENABLE) == enabled
        bench.place()
        await bench.start()
        if enabled:
            await with_timeout(RisingEdge(bench.dut.interrupt), *TIMEOUT)
        # A kernel may be ready for its next launch before it is done with this one.
        await with_timeout(bench.done(), *TIMEOUT)
        bench.check()
        await let_go(bench)
        assert await bench.read(STATUS) == enabled
        assert bool(await bench.read(CONTROL) & INTERRUPT) == bool(enabled)
        # Each bit falls where a one is written to it, and the line with the last one.
        for bit in (DONE_BIT, READY_BIT):
            if enabled & bit:
                assert int(bench.dut.interrupt.value)
                await bench.write(STATUS, bit)
                assert not await bench.read(STATUS) & bit
        assert not int(bench.dut.interrupt.value)


@bench_test()
async def interrupts_need_the_global_enable(bench):
    await bench.write(GLOBAL, 0)
    await bench.write(ENABLE, DONE_BIT)
    await bench.start()
    await with_timeout(bench.done(), *TIMEOUT)
    await let_go(bench)
    assert await bench.read(STATUS) == DONE_BIT
    assert not int(bench.dut.interrupt.value)
    await bench.write(GLOBAL, 1)
    await ClockCycles(bench.dut.ap_clk, 2)
    assert int(bench.dut.interrupt.value)
    # A one that is written toggles.
    for level in (0, 1, 0):
        await bench.write(STATUS, DONE_BIT)
        await ClockCycles(bench.dut.ap_clk, 2)
        assert int(bench.dut.interrupt.value) == level
    bench.check()
