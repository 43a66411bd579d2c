#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs those of Debian's packages that are missing. Needs root, or sudo without a question; else
# it says what to install.
# Usage: install_packages.sh WHAT PACKAGE..., WHAT being what needs them.
set -eu
what=$1
shift
missing=""
for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" ||
        missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "$what needs Debian's packages$missing, or their like, and this system has no apt-get" >&2
    exit 2
fi
run=""
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "$what needs these packages: sudo apt-get install$missing" >&2
        exit 2
    fi
    run="sudo -n"
fi
echo "installing$missing"
$run apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $missing
