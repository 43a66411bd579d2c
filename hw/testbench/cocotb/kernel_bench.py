# SPDX-License-Identifier: Apache-2.0
"""cocotb tests of any kernel that a manifest describes: hand-written RTL or an HLS export.

The bench is told by the environment: HILLINFER_MANIFEST (JSON of `RtlSource`) and HILLINFER_CASE
(a .npz with the launch's buffers and scalars and what golden makes of them).
"""

import json
import os
import random
from pathlib import Path

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout
from cocotbext.axi import (
    AxiBus,
    AxiLiteBus,
    AxiLiteMaster,
    AxiSlaveRead,
    AxiSlaveWrite,
    SparseMemoryRegion,
)
from cocotbext.axi.axi_channels import AxiARSink, AxiAWSink

# Vitis makes AxLOCK two bits wide; the bus model knows one.
for channel, signal in ((AxiARSink, "arlock"), (AxiAWSink, "awlock")):
    channel._signal_widths = {k: v for k, v in channel._signal_widths.items() if k != signal}

MANIFEST = json.loads(Path(os.environ["HILLINFER_MANIFEST"]).read_text(encoding="utf-8"))
CASE = np.load(os.environ["HILLINFER_CASE"])
CONTROL, GLOBAL, ENABLE, STATUS = 0x00, 0x04, 0x08, 0x0C
START, DONE, IDLE, READY, CONTINUE = 1, 2, 4, 8, 16
FIRST_ADDRESS = 0x1_0000_0000
STRIDE = 0x100_0000
TIMEOUT = (400, "us")


class Bench:
    """A kernel between a control master and one memory behind all bundles."""

    def __init__(self, dut):
        self.dut = dut
        region = SparseMemoryRegion(2**40)
        self.memory = region.mem
        self.channels = []
        for prefix in MANIFEST["bundles"].values():
            bus = AxiBus.from_prefix(dut, prefix)
            for slave, half, parts in (
                (AxiSlaveRead, bus.read, "ar r"),
                (AxiSlaveWrite, bus.write, "aw w b"),
            ):
                port = slave(half, dut.ap_clk, dut.ap_rst_n, region, reset_active_level=False)
                self.channels += [getattr(port, f"{part}_channel") for part in parts.split()]
        self.control = AxiLiteMaster(
            AxiLiteBus.from_prefix(dut, "s_axi_control"), dut.ap_clk, dut.ap_rst_n, False
        )
        self.addresses = {}

    async def reset(self, cycles=8):
        self.dut.ap_rst_n.value = 0
        await ClockCycles(self.dut.ap_clk, cycles)
        self.dut.ap_rst_n.value = 1
        await ClockCycles(self.dut.ap_clk, 4)

    def stall(self, seed):
        """Let every channel pause at random."""
        for index, channel in enumerate(self.channels):
            generator = random.Random(100 * seed + index)
            channel.set_pause_generator(iter(lambda g=generator: g.random() < 0.3, None))

    def place(self):
        """Write the case's buffers into memory, as they are before the launch."""
        names = [name for name in CASE.files if name.startswith("buffer_")]
        for index, name in enumerate(names):
            address = FIRST_ADDRESS + index * STRIDE
            self.addresses[name.removeprefix("buffer_")] = address
            self.memory.write(address, CASE[name].tobytes())

    async def write(self, offset, value):
        await self.control.write_dword(offset, value)

    async def read(self, offset):
        return await self.control.read_dword(offset)

    async def set_arguments(self):
        for name, offset in MANIFEST["arguments"].items():
            if name in self.addresses:
                await self.write(offset, self.addresses[name] & 0xFFFF_FFFF)
                await self.write(offset + 4, self.addresses[name] >> 32)
            else:
                await self.write(offset, int(CASE[f"scalar_{name}"]))

    async def run(self):
        """Start, poll ap_done, continue; return how often ap_done was read."""
        await self.write(CONTROL, START)
        polls = 0
        while not await self.read(CONTROL) & DONE:
            polls += 1
        if MANIFEST["control"] == "ap_ctrl_chain":
            assert await self.read(CONTROL) & DONE, "ap_done must stay until ap_continue"
            await self.write(CONTROL, CONTINUE)
            await ClockCycles(self.dut.ap_clk, 2)
            assert not await self.read(CONTROL) & DONE, "ap_done must fall after ap_continue"
        return polls

    def check(self):
        """Fail where memory is not what golden left; return the bytes compared."""
        compared = 0
        for name in ("output", "status"):
            golden = CASE[f"golden_{name}"]
            address = self.addresses[str(CASE["output_name"]) if name == "output" else name]
            found = np.frombuffer(self.memory.read(address, golden.nbytes), dtype=np.uint8)
            wrong = np.flatnonzero(found != golden.reshape(-1))
            assert not wrong.size, f"{name}: {wrong.size} bytes differ, first at {wrong[:4]}"
            compared += golden.nbytes
        return compared


async def started(dut):
    bench = Bench(dut)
    cocotb.start_soon(Clock(dut.ap_clk, 3332, unit="ps").start())
    await bench.reset()
    bench.place()
    await bench.set_arguments()
    return bench


@cocotb.test()
async def registers_hold_what_is_written(dut):
    bench = await started(dut)
    for name, offset in MANIFEST["arguments"].items():
        words = (0, 4) if name in bench.addresses else (0,)
        for word in words:
            for value in (0xFFFF_FFFF, 0x0123_4567, 0):
                await bench.write(offset + word, value)
                assert await bench.read(offset + word) == value, (name, word)
    assert await bench.read(CONTROL) & (START | DONE | IDLE) == IDLE


@cocotb.test()
async def two_runs_back_to_back(dut):
    bench = await started(dut)
    for _ in range(2):
        bench.place()
        await with_timeout(bench.run(), *TIMEOUT)
        bench.check()


@cocotb.test()
async def random_stalls_on_every_channel(dut):
    bench = await started(dut)
    for seed in (1, 2):
        bench.place()
        bench.stall(seed)
        await with_timeout(bench.run(), *TIMEOUT)
        bench.check()


@cocotb.test()
async def a_wrong_bit_is_seen(dut):
    """The twin of the equality: without it the checks above could compare nothing."""
    bench = await started(dut)
    await with_timeout(bench.run(), *TIMEOUT)
    address = bench.addresses["status"]
    byte = bench.memory.read(address, 1)[0]
    bench.memory.write(address, bytes([byte ^ 1]))
    try:
        bench.check()
    except AssertionError:
        return
    raise AssertionError("a flipped bit was not seen")


@cocotb.test()
async def interrupt_of_done(dut):
    bench = await started(dut)
    await bench.write(GLOBAL, 1)
    await bench.write(ENABLE, 1)
    await bench.write(CONTROL, START)
    await with_timeout(RisingEdge(dut.interrupt), *TIMEOUT)
    assert await bench.read(STATUS) & 1
    await bench.write(STATUS, 1)
    if MANIFEST["control"] == "ap_ctrl_chain":
        await bench.write(CONTROL, CONTINUE)
    await ClockCycles(dut.ap_clk, 4)
    assert not int(dut.interrupt.value)
    bench.check()


@cocotb.test()
async def reset_in_mid_launch(dut):
    """Nothing may be left of a launch that reset cut; the bus models are reset with it."""
    bench = await started(dut)
    for cycles in (30, 120):
        await bench.write(CONTROL, START)
        await ClockCycles(dut.ap_clk, cycles)
        await bench.reset(16)
        assert await bench.read(CONTROL) & (START | DONE | IDLE) == IDLE
    await bench.set_arguments()
    bench.place()
    await with_timeout(bench.run(), *TIMEOUT)
    bench.check()
