# SPDX-License-Identifier: Apache-2.0
"""Stands in for v++, vivado, emconfigutil and xclbinutil: checks what it is given, writes reports.

Run as a program: `vitis_standin.py TOOL ARGUMENTS...`. Environment: STANDIN_RECORD, a file that
every call is added to as a line of JSON; STANDIN_FAULT, what goes wrong.
"""

import argparse
import configparser
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path(__file__).parent / "vitis_reports"
FAULT = os.environ.get("STANDIN_FAULT", "")
VERSIONS = {
    "v++": "\n****** v++ v2022.2 (64-bit)\n  **** SW Build 3671529 on 2022-10-13-17:52:11\n",
    "vivado": "Vivado v2022.2 (64-bit)\nSW Build 3671981 on Fri Oct 14 04:59:54 MDT 2022\n",
    "emconfigutil": "emconfigutil v2022.2 (64-bit)\n",
    "xclbinutil": "XRT Build Version: 2.14.354 (2022.2)\n",
}


def refuse(message):
    sys.exit(f"stand-in: {message}")


def say(report):
    sys.stdout.write((REPORTS / report).read_text())


def put(report, folder, name=None):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(REPORTS / report, folder / (name or report))


def need(*files):
    for file in files:
        if not Path(file).is_file():
            refuse(f"{file} is not there")


def vpp(arguments):
    parser = argparse.ArgumentParser(prog="v++", allow_abbrev=False)
    stage = parser.add_mutually_exclusive_group(required=True)
    for letter, name in (("c", "compile"), ("l", "link"), ("p", "package")):
        stage.add_argument(f"-{letter}", f"--{name}", dest=name, action="store_true")
    parser.add_argument("-t", "--target", choices=["sw_emu", "hw_emu", "hw"], required=True)
    parser.add_argument("--platform", required=True)
    parser.add_argument("-k", "--kernel")
    parser.add_argument("-I", "--include", action="append", default=[])
    parser.add_argument("-g", "--debug", action="store_true")
    parser.add_argument("--save-temps", action="store_true")
    for option in ("--config", "--temp_dir", "--report_dir", "--log_dir", "--package.out_dir"):
        parser.add_argument(option)
    parser.add_argument("-R", "--report_level")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("inputs", nargs="+")
    given = parser.parse_args(arguments)
    need(given.platform, *given.inputs)
    if Path(given.platform).suffix != ".xpfm":
        refuse(f"{given.platform} is no platform")
    if not Path(given.output).parent.is_dir():
        refuse(f"the folder of {given.output} is not there")
    if given.package:
        shutil.copyfile(given.inputs[0], given.output)
        Path(vars(given)["package.out_dir"]).mkdir(exist_ok=True)
    elif given.compile:
        compile_kernel(given)
    else:
        link(given)


def config_of(file):
    need(file)
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    text = "[top]\n" + Path(file).read_text()
    parser.read_string(re.sub(r"^(nk|sp)=([\w.]+)", r"\1.\2=\2", text, flags=re.MULTILINE))
    return parser


def compile_kernel(given):
    config = config_of(given.config)
    if not config["top"]["kernel_frequency"].isdigit():
        refuse("no kernel_frequency")
    (source,) = given.inputs
    folders = [Path(source).parent, *map(Path, given.include)]
    seen, waiting = set(), [Path(source)]
    while waiting:
        text = waiting.pop().read_text()
        if "#line" in text:
            refuse("a line mark")
        for quote, name in re.findall(r'^#include (["<])([^">]+)', text, re.MULTILINE):
            found = [folder / name for folder in folders if (folder / name).is_file()]
            if quote == '"' and not found:
                refuse(f"{name} is not found")
            # Vendor headers must be the vendor's.
            if quote == "<" and found:
                refuse(f"{found[0]} hides Vitis' own header")
            if found and found[0] not in seen:
                seen.add(found[0])
                waiting.append(found[0])
    text = Path(source).read_text()
    if f'extern "C" void {given.kernel}(' not in text:
        refuse(f"{source} has no {given.kernel}")
    if FAULT == "compile":
        say("compile_error.log")
        sys.exit(1)
    say("compile.log")
    place = Path(given.temp_dir) / given.kernel / given.kernel / "solution" / "syn" / "report"
    put(f"{given.kernel}_csynth.xml", place)
    slow = "_slow" if FAULT == "interval" else ""
    put(f"dot_shadow{slow}_csynth.xml", place, "dot_shadow_csynth.xml")
    if given.kernel == "make_shadow":
        put("round_rows_csynth.xml", place)
    pointers = re.findall(r"m_axi port=(\w+) bundle", text)
    write_object(given.output, given.kernel, pointers)


def write_object(path, kernel, pointers):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xo.json", json.dumps({"kernel": kernel, "pointers": pointers}))


def link(given):
    config = config_of(given.config)
    kernels = {}
    for path in given.inputs:
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read("xo.json"))
        kernels[found["kernel"]] = found["pointers"]
    connectivity = config["connectivity"]
    wanted = {}
    for kernel, pointers in kernels.items():
        name, count, instance = connectivity.pop(f"nk.{kernel}").split(":")
        if (name, count) != (kernel, "1"):
            refuse(f"nk of {kernel}")
        wanted |= {f"sp.{instance}.{pointer}": pointer for pointer in pointers}
    if set(connectivity) != set(wanted):
        refuse(f"connectivity is {set(connectivity) ^ set(wanted)} off")
    if {value.split(":")[1] for value in connectivity.values()} != {"bank0"}:
        refuse("another bank")
    if FAULT in ("overflow", "place_check", "system_clock"):
        say(f"link_{FAULT}.log")
        if FAULT == "overflow":
            run = Path(given.temp_dir) / "link/vivado/vpl/prj/prj.runs/impl_1"
            put("impl_runme_overflow.log", run, "runme.log")
        sys.exit(1)
    if FAULT == "hang":
        # A child of its own, as Vivado is one of v++.
        child = subprocess.Popen(["sleep", "600"])
        print(f"processes {os.getpid()} {child.pid}", flush=True)
        child.wait()
    if FAULT == "killed":
        print("INFO: [v++ 60-629] Linking for hardware target", flush=True)
        os.kill(os.getpid(), 9)
    say("link_scaled.log" if FAULT == "scaled" else "link.log")
    if given.target == "hw":
        link_reports(Path(given.report_dir) / "link" / "imp")
    if FAULT != "no_output":
        frequency = int(config["top"]["kernel_frequency"]) - (20 if FAULT == "clock" else 0)
        write_xclbin(given, list(kernels), frequency)


def link_reports(folder):
    timing = {"slack": "impl_1_timing_failed.rpt", "hold": "impl_1_hold_failed.rpt"}
    name = "impl_1_hw_bb_locked_timing_summary_routed.rpt"
    if FAULT != "no_timing":
        put(timing.get(FAULT, name), folder, name)
    cells = "impl_1_full_util_overflow.rpt" if FAULT == "cells" else "impl_1_full_util_routed.rpt"
    put(cells, folder, "impl_1_full_util_routed.rpt")
    put("impl_1_kernel_util_routed.rpt", folder)


def write_xclbin(given, kernels, frequency):
    from uuid import UUID

    from hillinfer.devices.xrt.xclbin import HARDWARE, HW_EMU, SectionKind, Xclbin
    from hillinfer_hw.xclbin_sections import (
        KernelInstance,
        MemoryBank,
        MemoryType,
        pack_banks,
        pack_instances,
    )

    clocks = [(frequency, 1, b"DATA_CLK"), (500, 2, b"KERNEL_CLK")]
    instances = [KernelInstance(name, f"{name}_1", 0x1800000) for name in kernels]
    sections = {
        SectionKind.BITSTREAM: b"bits" * 1000,
        SectionKind.MEM_TOPOLOGY: pack_banks([MemoryBank("bank0", MemoryType.DDR4, 4 << 30, 0)]),
        SectionKind.IP_LAYOUT: pack_instances(instances),
        SectionKind.CLOCK_FREQ_TOPOLOGY: struct.pack("<h", len(clocks))
        + b"".join(struct.pack("<HB5x128s", *clock) for clock in clocks),
    }
    platform = "xilinx_u200_gen3x16" if FAULT == "platform" else Path(given.platform).stem
    mode = HARDWARE if given.target == "hw" else HW_EMU
    Path(given.output).write_bytes(Xclbin(platform, UUID(int=5), mode, sections).pack())


def vivado(arguments):
    parser = argparse.ArgumentParser(prog="vivado", allow_abbrev=False)
    parser.add_argument("-mode", choices=["batch"], required=True)
    for option in ("-nojournal", "-notrace"):
        parser.add_argument(option, action="store_true")
    for option in ("-log", "-source"):
        parser.add_argument(option, required=True)
    given = parser.parse_args(arguments)
    need(given.source)
    import tkinter

    # A real Tcl runs the script over commands that check and record.
    tcl, calls = tkinter.Tcl(), []
    registers = []

    def command(name, answer=""):
        def call(*words):
            calls.append((name, *words))
            return answer

        tcl.createcommand(name, call)

    tcl.eval("namespace eval ipx {}")
    for name in ("create_project", "update_compile_order", "current_fileset", "get_property"):
        command(name)
    for name in ("package_project", "get_user_parameters", "remove_user_parameter"):
        command(f"ipx::{name}", "core" if name == "package_project" else "")
    for name in ("associate_bus_interfaces", "add_memory_map", "add_address_block"):
        command(f"ipx::{name}", name)
    tcl.createcommand("ipx::add_register", lambda *words: registers.append(words[-2]) or words[-2])
    tcl.createcommand("ipx::get_bus_interfaces", lambda bus, *words: bus)
    tcl.createcommand("ipx::add_bus_parameter", lambda *words: " of ".join(words[-2:]))
    for name in ("add_register_parameter", "create_xgui_files"):
        command(f"ipx::{name}", name)
    for name in ("update_checksums", "check_integrity", "save_core"):
        command(f"ipx::{name}")
    command("set_property")
    tcl.createcommand("add_files", lambda *words: need(*tcl.splitlist(words[-1])))
    tcl.createcommand("package_xo", lambda *words: package_xo(registers, calls, words))
    tcl.eval(Path(given.source).read_text())


def package_xo(registers, calls, words):
    options = dict(zip(words[1::2], words[2::2], strict=True))
    need(options["-kernel_xml"])
    root = ElementTree.parse(options["-kernel_xml"]).getroot()
    kernel = root.find("kernel")
    if kernel.get("name") != options["-kernel_name"]:
        refuse("kernel.xml is of another kernel")
    if kernel.get("hwControlProtocol") != "ap_ctrl_chain":
        refuse("another control protocol")
    ports = {port.get("name") for port in kernel.iter("port")}
    own = [arg.get("name") for arg in kernel.iter("arg")]
    if registers != ["CTRL", "GIER", "IP_IER", "IP_ISR", *own]:
        refuse(f"registers {registers}")
    clocked = {call[2] for call in calls if call[0].endswith("associate_bus_interfaces")}
    if not ports <= clocked:
        refuse(f"no clock for {ports - clocked}")
    said = {call[3] for call in calls if call[:3] == ("set_property", "value", "AXI4")}
    masters = {port.get("name") for port in kernel.iter("port") if port.get("mode") == "master"}
    if said != {f"PROTOCOL of {port}" for port in masters}:
        refuse(f"the protocol of {said}, not of {masters}")
    pointers = [arg for arg in kernel.iter("arg") if arg.get("addressQualifier") == "1"]
    if not {arg.get("port") for arg in pointers} <= ports:
        refuse("a pointer on no port")
    write_object(
        options["-xo_path"], kernel.get("name"), [pointer.get("name") for pointer in pointers]
    )


def emconfigutil(arguments):
    parser = argparse.ArgumentParser(prog="emconfigutil")
    parser.add_argument("--platform", required=True)
    parser.add_argument("--od", required=True)
    given = parser.parse_args(arguments)
    need(given.platform)
    (Path(given.od) / "emconfig.json").write_text("{}\n")


def xclbinutil(arguments):
    from dataclasses import replace

    from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin

    parser = argparse.ArgumentParser(prog="xclbinutil")
    parser.add_argument("--force", action="store_true")
    for option in ("--input", "--output", "--add-section"):
        parser.add_argument(option, required=True)
    given = parser.parse_args(arguments)
    need(given.input)
    kind, form, file = given.add_section.split(":")
    need(file)
    if form != "RAW":
        refuse(form)
    xclbin = Xclbin.read(Path(given.input))
    sections = {**xclbin.sections, SectionKind[kind]: Path(file).read_bytes()}
    if FAULT == "rewritten":
        sections[SectionKind.BITSTREAM] += b"x"
    Path(given.output).write_bytes(replace(xclbin, sections=sections).pack())


def main():
    tool, *arguments = sys.argv[1:]
    if arguments in (["--version"], ["-version"]):
        sys.stdout.write(VERSIONS[tool])
        return
    with Path(os.environ["STANDIN_RECORD"]).open("a") as record:
        record.write(json.dumps([tool, *arguments]) + "\n")
    {"v++": vpp, "vivado": vivado, "emconfigutil": emconfigutil, "xclbinutil": xclbinutil}[tool](
        arguments
    )


if __name__ == "__main__":
    main()
