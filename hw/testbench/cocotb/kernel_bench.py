# SPDX-License-Identifier: Apache-2.0
"""Connects a kernel, described by a manifest, to a control master and a memory in cocotb.

The bench is told by the environment: HILLINFER_MANIFEST (JSON of `RtlSource`), HILLINFER_CASE (a
.npz with the launch's buffers and scalars and what golden makes of them) and HILLINFER_LAUNCHES
(a file to which each compared launch adds a line of JSON).
"""

import json
import os
from functools import wraps
from pathlib import Path

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout
from cocotb.utils import get_sim_time
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
LAUNCHES = Path(os.environ["HILLINFER_LAUNCHES"])
IS_CHAIN = MANIFEST["control"] == "ap_ctrl_chain"
CONTROL, GLOBAL, ENABLE, STATUS = 0x00, 0x04, 0x08, 0x0C
START, DONE, IDLE, READY, CONTINUE, RESTART, INTERRUPT = 1, 2, 4, 8, 16, 128, 512
FIRST_ADDRESS = 0x1_0000_0000
STRIDE = 0x100_0000
PERIOD_PS = 3332
# A launch that takes so much longer than its beats hangs.
TIMEOUT = (40 * int(CASE["most_cycles"]) * PERIOD_PS, "ps")
# Bursts that the bus models take before they answer.
OUTSTANDING = 16
# What a channel's sender must keep while it waits.
PAYLOAD = {"AR": ("ADDR", "LEN"), "AW": ("ADDR", "LEN"), "W": ("DATA", "LAST"),
           "R": ("DATA", "RESP"), "B": ("RESP",)}  # fmt: skip


class Bench:
    """A kernel between a control master and one memory behind all bundles."""

    def __init__(self, dut, test):
        self.dut = dut
        self.test = test
        region = SparseMemoryRegion(2**40)
        self.memory = region.mem
        self.channels = {}
        for bundle, prefix in MANIFEST["bundles"].items():
            bus = AxiBus.from_prefix(dut, prefix)
            for slave, half, parts in (
                (AxiSlaveRead, bus.read, "ar r"),
                (AxiSlaveWrite, bus.write, "aw w b"),
            ):
                port = slave(half, dut.ap_clk, dut.ap_rst_n, region, reset_active_level=False)
                for part in parts.split():
                    channel = getattr(port, f"{part}_channel")
                    channel.queue_occupancy_limit = OUTSTANDING
                    self.channels[bundle, part] = channel
        self.control = AxiLiteMaster(
            AxiLiteBus.from_prefix(dut, "s_axi_control"), dut.ap_clk, dut.ap_rst_n, False
        )
        writes, reads = self.control.write_if, self.control.read_if
        self.control_channels = {
            **{part: getattr(writes, f"{part}_channel") for part in ("aw", "w", "b")},
            **{part: getattr(reads, f"{part}_channel") for part in ("ar", "r")},
        }
        self.addresses = {}
        self.started = self.cycles = 0

    async def reset(self, cycles=8):
        self.dut.ap_rst_n.value = 0
        await ClockCycles(self.dut.ap_clk, cycles)
        self.dut.ap_rst_n.value = 1
        await ClockCycles(self.dut.ap_clk, 4)

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

    async def start(self, flags=0):
        await self.write(CONTROL, START | flags)
        self.mark()

    def mark(self):
        """Cycles count from here."""
        self.started = get_sim_time("ps")

    def count(self):
        """Cycles count until here."""
        self.cycles = round((get_sim_time("ps") - self.started) / PERIOD_PS)

    async def done(self):
        """Poll ap_done; cycles count from the write of ap_start to the read of ap_done."""
        while not await self.read(CONTROL) & DONE:
            pass
        self.count()
        for name, channel in self.channels.items():
            assert channel.empty(), f"ap_done while {name} has something to say"

    async def run(self):
        """Start, poll ap_done, continue; return the cycles."""
        await self.start()
        await with_timeout(self.done(), *TIMEOUT)
        if IS_CHAIN:
            assert await self.read(CONTROL) & DONE, "ap_done must stay until ap_continue"
            await self.write(CONTROL, CONTINUE)
            await ClockCycles(self.dut.ap_clk, 2)
            assert not await self.read(CONTROL) & DONE, "ap_done must fall after ap_continue"
        return self.cycles

    def address_of(self, name):
        """Where golden's `output` or `status` lies in memory."""
        return self.addresses[str(CASE["output_name"]) if name == "output" else name]

    def differing(self):
        """Return where memory is not what golden left: byte numbers of output and of status."""
        wrong = {}
        for name in ("output", "status"):
            golden = CASE[f"golden_{name}"]
            found = self.memory.read(self.address_of(name), golden.nbytes)
            found = np.frombuffer(found, dtype=np.uint8)
            wrong[name] = np.flatnonzero(found != golden.reshape(-1))
        return wrong

    def check(self):
        """Note the launch, and fail where memory is not what golden left."""
        wrong = self.differing()
        # Tuples of a score buffer, bytes of a shadow; status beats.
        width = 4 if str(CASE["output_name"]) == "scores" else 1
        mismatches = (
            np.unique(wrong["output"] // width).size + np.unique(wrong["status"] // 64).size
        )
        row = {"test": self.test, "tokens": int(CASE["tokens"]), "mismatches": mismatches,
               "cycles": self.cycles}  # fmt: skip
        with LAUNCHES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for name, bytes_ in wrong.items():
            assert not bytes_.size, f"{name}: {bytes_.size} bytes differ, first at {bytes_[:4]}"

    def watch(self):
        """Fail the test where a sender takes back or changes what it offers."""
        pairs = [(prefix, part) for prefix in MANIFEST["bundles"].values() for part in PAYLOAD
                 if part in ("AR", "AW", "W")]  # fmt: skip
        for prefix, part in [*pairs, ("s_axi_control", "R"), ("s_axi_control", "B")]:
            cocotb.start_soon(self._watch(f"{prefix}_{part}", PAYLOAD[part]))

    async def _watch(self, channel, payload):
        valid, ready = (getattr(self.dut, f"{channel}{end}") for end in ("VALID", "READY"))
        fields = [getattr(self.dut, f"{channel}{name}") for name in payload]
        waiting = None
        while True:
            await RisingEdge(self.dut.ap_clk)
            now = [int(each.value) for each in fields] if int(valid.value) else None
            if waiting is not None and int(self.dut.ap_rst_n.value):
                assert now == waiting, f"{channel} changed while it waited"
            waiting = now if now is not None and not int(ready.value) else None


def bench_test(**options):
    """Make a cocotb test of a function of a bench after reset, its arguments and buffers set."""

    def decorate(function):
        @wraps(function)
        async def test(dut):
            bench = Bench(dut, function.__name__)
            cocotb.start_soon(Clock(dut.ap_clk, PERIOD_PS, unit="ps").start())
            await bench.reset()
            bench.place()
            await bench.set_arguments()
            await function(bench)

        return cocotb.test(**options)(test)

    return decorate
