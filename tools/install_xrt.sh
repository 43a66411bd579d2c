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
# shellcheck disable=SC2086
exec sh "$(dirname "$0")/install_packages.sh" hw_emu $packages
