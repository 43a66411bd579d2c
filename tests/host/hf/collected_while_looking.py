# SPDX-License-Identifier: Apache-2.0
"""A program that looks for another thread's use of a cache while garbage lets a third one go on."""

import gc
import inspect
import threading
import time

from hillinfer.hf.engine import Use

# Objects that are made before garbage is collected: one of these numbers is met while frames are
# listed.
MOST_OBJECTS = 30
COLLECT_SELDOM = 700

begun, asked, over = (threading.Event() for _ in range(3))


class Garbage:
    """Goes only when it is collected, and gives the interpreter's lock away then."""

    def __init__(self):
        self.own = self

    def __del__(self):
        asked.set()
        time.sleep(0.01)


def begin_threads():
    while not over.is_set():
        asked.wait()
        asked.clear()
        threading.Thread(target=int).start()


def use_a_cache(uses):
    uses.append(Use(inspect.currentframe()))
    begun.set()
    over.wait()


def main():
    uses = []
    threading.Thread(target=use_a_cache, args=(uses,), daemon=True).start()
    threading.Thread(target=begin_threads, daemon=True).start()
    begun.wait()
    for count in range(1, MOST_OBJECTS):
        gc.collect()
        Garbage()
        gc.set_threshold(gc.get_count()[0] + count)
        assert uses[0].is_under_way
        gc.set_threshold(COLLECT_SELDOM)
    assert gc.isenabled()
    over.set()
    print("looked")


main()
