#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs XRT and what the emulated card is built with from Debian's packages, where they are
# missing. Needs root, or sudo without a question; else it says what to install.
# Usage: install_xrt.sh [auto|vitis|own [PYTHON]], the first as hw_emu.py --emulator. Vitis has an XRT
# of its own. PYTHON is the interpreter that pyxrt is built for, python3 unless given.
set -eu
emulator=${1:-auto}
if [ "$emulator" = auto ] && command -v v++ >/dev/null; then
    emulator=vitis
fi
if [ "$emulator" = vitis ]; then
    echo "hw_emu is Vitis' own, with the XRT of XILINX_XRT (${XILINX_XRT:-not set}): no packages needed"
    exit 0
fi
packages="libxrt1 libxrt-dev unzip uuid-dev libprotobuf-dev protobuf-compiler g++"
# What pyxrt is compiled with. Debian has it for Debian's interpreters; others bring their own, and
# where they do not, building pyxrt says so.
headers=$("${2:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')
case $headers in
    /usr/include/*) [ -f "$headers/Python.h" ] || packages="$packages ${headers##*/}-dev" ;;
esac
missing=""
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" ||
        missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "hw_emu needs Debian's packages$missing, or their like, and this system has no apt-get" >&2
    exit 2
fi
run=""
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "hw_emu needs these packages: sudo apt-get install$missing" >&2
        exit 2
    fi
    run="sudo -n"
fi
echo "installing$missing"
$run apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $missing
