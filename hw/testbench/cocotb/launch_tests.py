# SPDX-License-Identifier: Apache-2.0
"""cocotb tests that launches leave the right bytes in memory, however the memory behaves."""

from cocotb.triggers import ClockCycles
from kernel_bench import CASE, CONTROL, DONE, IDLE, MANIFEST, START, bench_test
from pauses import at_random, bunches, long_pauses, toggling


@bench_test()
async def two_runs_back_to_back(bench):
    cycles = []
    for _ in range(2):
        bench.place()
        cycles.append(await bench.run())
        bench.check()
    # An export's cycles are its own matter; this project's kernel reads a beat per cycle.
    if MANIFEST["origin"] == "hand":
        assert max(cycles) <= int(CASE["most_cycles"]), f"{cycles} cycles"


@bench_test()
async def random_stalls_on_every_channel(bench):
    bench.watch()
    for seed in (1, 2):
        bench.place()
        for index, channel in enumerate(bench.channels.values()):
            channel.set_pause_generator(at_random(100 * seed + index))
        await bench.run()
        bench.check()


@bench_test()
async def long_and_varying_read_latency(bench):
    bench.watch()
    for seed, longest in ((1, 40), (2, 400)):
        bench.place()
        for index, ((_, part), channel) in enumerate(bench.channels.items()):
            if part == "r":
                channel.set_pause_generator(long_pauses(10 * seed + index, longest, 60))
        await bench.run()
        bench.check()


@bench_test()
async def write_responses_late_and_in_bunches(bench):
    bench.watch()
    for pause, free in ((90, 3), (300, 16)):
        bench.place()
        for (_, part), channel in bench.channels.items():
            if part == "b":
                channel.set_pause_generator(bunches(pause, free))
        await bench.run()
        bench.check()


@bench_test()
async def ready_toggles(bench):
    """Address and data channels are ready every other cycle, then in turns."""
    bench.watch()
    takers = [each for (_, part), each in bench.channels.items() if part in ("ar", "aw", "w")]
    bench.place()
    for channel in takers:
        channel.set_pause_generator(toggling())
    await bench.run()
    bench.check()
    bench.place()
    for index, channel in enumerate(takers):
        channel.set_pause_generator(long_pauses(index, 30, 5))
    await bench.run()
    bench.check()


@bench_test()
async def data_before_its_address(bench):
    """The write address is taken long after the data was offered, then long before it."""
    bench.watch()
    for late in ("aw", "w"):
        bench.place()
        for (_, part), channel in bench.channels.items():
            if part in ("aw", "w"):
                channel.set_pause_generator(bunches(25, 4) if part == late else None)
                channel.pause = False
        await bench.run()
        bench.check()


@bench_test()
async def a_wrong_bit_is_seen(bench):
    """The twin of the equality: without it the checks above could compare nothing."""
    await bench.run()
    for name in ("output", "status"):
        size = CASE[f"golden_{name}"].nbytes
        assert size, f"this launch leaves no {name}"
        for place in (0, size // 2, size - 1):
            address = bench.address_of(name) + place
            byte = bench.memory.read(address, 1)
            bench.memory.write(address, bytes([byte[0] ^ 1]))
            assert bench.differing()[name].tolist() == [place], f"{name}: byte {place} not seen"
            bench.memory.write(address, byte)
    bench.check()


@bench_test()
async def reset_in_mid_launch(bench):
    """Nothing may be left of a launch that reset cut; the bus models are reset with it."""
    for cycles in (30, 120):
        await bench.start()
        await ClockCycles(bench.dut.ap_clk, cycles)
        await bench.reset(16)
        assert await bench.read(CONTROL) & (START | DONE | IDLE) == IDLE
    await bench.set_arguments()
    bench.place()
    await bench.run()
    bench.check()
