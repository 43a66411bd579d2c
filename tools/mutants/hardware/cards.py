# SPDX-License-Identifier: Apache-2.0
"""Faults around the kernels: what a card is called, what it is worth, what the simulation sees."""

from __future__ import annotations

from mutants.mutant import Mutant

_SPECS = "tests/host/cli/test_specs.py"
_FIGURES = "sw_model/hillinfer_model/card_figures.py"
_LEVELS = "tests/hw/test_logic_levels.py"
_SKEW = "tests/hw/test_skew.py"
_MADE = "tests/host/devices/test_made_shadows.py"
_CAST = "tests/host/devices/test_cast_rows.py"
_RESUMED = "tests/host/sessions/test_devices.py"

CARDS: tuple[Mutant, ...] = (
    Mutant(
        "shell-names-refused",
        "PYNQ takes a card only where it is called as the platform of the xclbin.",
        "plugins/hillinfer_pynq/hillinfer_pynq/front.py",
        "if self.device.name not in platforms:",
        "if self.device.name != platforms[0]:",
        ("tests/hw/test_pynq.py::test_a_card_that_names_its_shell_is_worked_with",),
    ),
    Mutant(
        "any-shell-accepted",
        "PYNQ takes a card with another version of the shell.",
        "plugins/hillinfer_pynq/hillinfer_pynq/front.py",
        "if self.device.name not in platforms:",
        "if self.device.name[:12] not in (name[:12] for name in platforms):",
        ("tests/hw/test_pynq.py::test_a_card_that_names_its_shell_is_worked_with",),
    ),
    Mutant(
        "an-interrupted-launch-answers-for-the-next",
        "PYNQ's answer to a launch that Ctrl-C ended is taken for that of the next one.",
        "plugins/hillinfer_pynq/hillinfer_pynq/front_process.py",
        "if name is None or own == name:",
        "if name is None or own in self._asked:",
        ("tests/host/devices/test_pynq_answers.py",),
    ),
    Mutant(
        "a-citation-of-no-section",
        "A comment cites a section that the page does not have.",
        "hw/hls/split.h",
        "(scoring contract, section 9)",
        "(scoring contract, section 19)",
        ("tests/test_citations.py::test_every_citation_names_what_it_is_about",),
    ),
    Mutant(
        "polls-in-no-time",
        "The end of a launch is seen at once, however seldom the host looks.",
        _FIGURES,
        "beside = costs.start + copies + costs.poll / 2",
        "beside = costs.start + copies",
        (f"{_SPECS}::test_a_launch_costs_what_its_parts_do",),
    ),
    Mutant(
        "scores-of-one-head",
        "In scope kv_head the scores of one head come back.",
        _FIGURES,
        "sets = spec.kv_heads if scope is Scope.KV_HEAD else 1",
        "sets = 1",
        (f"{_SPECS}::test_a_kernel_takes_what_the_bytes_leave_of_the_bus",),
    ),
    Mutant(
        "levels-through-registers",
        "The longest path is counted through registers.",
        "tools/hillinfer_hw/logic_levels.py",
        "if not (lut or carry or read or _MUX.fullmatch(kind)):",
        'if not (lut or carry or read or _MUX.fullmatch(kind) or kind == "FDRE"):',
        (f"{_LEVELS}::test_what_has_a_clock_ends_a_path[FDRE]",),
    ),
    Mutant(
        "no-skew",
        "What a pipelined loop writes leaves in the round that writes it.",
        "hw/testbench/threads/pipelines.h",
        "const int64_t due = round + skew;",
        "const int64_t due = round + skew * 0;",
        (f"{_SKEW}::test_an_exponent_may_come_as_late_as_a_delay_can_be[int4]",),
    ),
    Mutant(
        "distances-not-watched",
        "Reads nearer than a DEPENDENCE pragma says are not told.",
        "hw/testbench/threads/pipelines.h",
        "if (rounds < DISTANCE) {",
        "if (rounds < 0 * DISTANCE) {",
        (f"{_SKEW}::test_a_distance_that_is_not_kept_is_told",),
    ),
    Mutant(
        "rows-of-others-in-the-own-file",
        "Groups that lie in files of others are read from the cold pool's own.",
        "host/hillinfer/shadow/segments.py",
        "if (self.placement.of(layer, groups) != OWN_FILE).any():",
        "if (self.placement.of(layer, groups) != OWN_FILE).all():",
        (f"{_MADE}::test_rows_lie_where_the_drive_has_them",),
    ),
    Mutant(
        "rows-of-the-first-segment",
        "Every segment of a launch of make_shadow is made of the rows of the first.",
        "host/hillinfer/devices/device.py",
        "query=first,",
        "query=0,",
        (f"{_MADE}::test_the_device_makes_what_the_host_codes",),
    ),
    Mutant(
        "made-without-probe-tokens",
        "The host keeps no probe tokens of a shadow that the device makes.",
        "host/hillinfer/devices/device_shadows.py",
        "resident.probes.take(shadow, 0, tokens)",
        "resident.probes.take(shadow, 0, 0)",
        (f"{_MADE}::test_what_a_device_makes_of_rows_changes_no_output",),
    ),
    Mutant(
        "loads-over-what-is-scored",
        "What the next launch scores is loaded over what this one scores.",
        "host/hillinfer/devices/device_scorer.py",
        "own = slots[step:] if piece % 2 and len(slots) > 1 else slots[:step]",
        "own = slots[:step]",
        (f"{_MADE}::test_what_comes_from_the_drive_is_loaded_beside_scoring",),
    ),
    Mutant(
        "nothing-ahead",
        "Every launch waits for its own loads.",
        "host/hillinfer/devices/device_scorer.py",
        "overlaps = len(self.shadows.staging) > 1",
        "overlaps = False",
        (f"{_MADE}::test_what_comes_from_the_drive_is_loaded_beside_scoring",),
    ),
    Mutant(
        "statistics-of-the-first-segment",
        "Keys of every segment are cast with the statistics of the launch's first.",
        "host/hillinfer/devices/device.py",
        "statistics=index * block,",
        "statistics=0 * block,",
        (f"{_CAST}::test_keys_that_a_device_casts_change_no_output",),
    ),
    Mutant(
        "keys-given-count-as-read",
        "Keys that the host hands over count as bytes that the device read of the drive.",
        "host/hillinfer/devices/device_shadows.py",
        "self.read_bytes += sum(one.drive_bytes for one in rows)",
        "self.read_bytes += sum(one.byte_count for one in rows)",
        (f"{_CAST}::test_keys_that_a_device_casts_change_no_output[padded heads]",),
    ),
    Mutant(
        "half-beats-in-the-plane",
        "Rows of keys that the host hands over begin in the middle of beats.",
        "host/hillinfer/devices/slots.py",
        "round_up(FP16_BYTES * width, BEAT_BYTES) // FP16_BYTES",
        "width",
        (f"{_CAST}::test_rows_of_keys_that_end_within_a_beat_are_cast",),
    ),
    Mutant(
        "no-descriptor-ends-the-answer",
        "A host without descriptors cannot hand over keys, and the answer ends.",
        "host/hillinfer/devices/slots.py",
        "        except OSError as error:\n"
        '            raise DeviceError(f"keys cannot be handed over: {error}") from error',
        "        except TimeoutError as error:\n"
        '            raise DeviceError(f"keys cannot be handed over: {error}") from error',
        (f"{_CAST}::test_keys_that_cannot_be_handed_over_lose_the_device",),
    ),
    Mutant(
        "waiting-for-ever",
        "Segments of sessions count as waiting for rows when they have them or are gone.",
        "host/hillinfer/shadow/segments.py",
        "self._waiting_bytes -= self._waiting.pop(resident.slot, 0)",
        "self._waiting.pop(resident.slot, 0)",
        (f"{_RESUMED}::test_segments_that_wait_for_rows_give_their_room_back",),
    ),
    Mutant(
        "rows-in-staging",
        "Codes on the drive are loaded into slots whose rows a kernel would cast.",
        "host/hillinfer/devices/device_shadows.py",
        "staging = 0 if self.takes_rows else min(STAGING_SLOTS, device.slots // 2)",
        "staging = min(STAGING_SLOTS, device.slots // 2)",
        (f"{_CAST}::test_what_the_device_has_no_room_for_the_host_scores",),
    ),
    Mutant(
        "rows-for-a-core",
        "A processor core is given rows that it cannot cast.",
        "host/hillinfer/settings.py",
        '_CODE_DEVICES = frozenset({"nvme", "core", "pynq"})',
        '_CODE_DEVICES = frozenset({"nvme", "pynq"})',
        (f"{_CAST}::test_devices_that_cast_nothing_are_refused_by_name[core]",),
    ),
    Mutant(
        "a-cleared-cache-loses-the-card",
        "Whoever clears a cache takes the folder of claims away, and nobody makes it again.",
        "host/hillinfer/devices/xrt/process.py",
        "            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)",
        "            pass",
        (
            "tests/host/devices/test_memory_claims.py"
            "::test_a_cache_that_is_cleared_meanwhile_is_made_again",
        ),
    ),
    Mutant(
        "claims-out-of-reach-end-the-run",
        "A file of claims that cannot be opened ends the run, not the card's part in it.",
        "host/hillinfer/devices/xrt/process.py",
        """            raise DeviceError(
                f"the card's memory cannot be shared: {self._path}: {error.strerror}"
            ) from error""",
        "            raise",
        (
            "tests/host/devices/test_card_without_memory.py"
            "::test_claims_out_of_reach_lose_the_card_and_not_the_run",
        ),
    ),
    Mutant(
        "measured-segments-count",
        "Segments that a device scored to be measured count as those of the run.",
        "host/hillinfer/rates/profiling.py",
        "        shadows.count_anew()\n        return cost",
        "        shadows.launches = shadows.scored_tokens = 0\n        return cost",
        (
            "tests/host/rates/test_profiling.py"
            "::test_sharing_leaves_nothing_behind_and_needs_a_device",
        ),
    ),
    Mutant(
        "a-refused-card-is-kept",
        "Where no claims can be kept, the process that has the card stays.",
        "host/hillinfer/devices/opening.py",
        "    except SettingsError:\n        worker.close()\n        raise",
        "    except SettingsError:\n        raise",
        (
            "tests/host/devices/test_card_without_memory.py"
            "::test_a_card_is_let_go_where_no_claims_can_be_kept",
        ),
    ),
    Mutant(
        "a-launch-that-hears-for-ever",
        "What libraries say after a simulated launch is swallowed.",
        "hw/testbench/hearing.cpp",
        "    std::cout.rdbuf(usual);",
        "",
        ("tests/hw/test_csim.py::test_what_others_print_during_a_launch_is_no_complaint",),
    ),
)
