# SPDX-License-Identifier: Apache-2.0
"""Where the XRT library is, and of which version."""

import json

import pytest

from hillinfer.doctor.cards import find_xrt_library


def install(folder, version="2.13.0"):
    """A library as packages install it: a name for the loader, and a file with the version."""
    folder.mkdir(parents=True)
    file = folder / f"libxrt_coreutil.so.{version}"
    file.write_bytes(b"")
    if version != "2":
        (folder / "libxrt_coreutil.so.2").symlink_to(file.name)
    return folder


@pytest.fixture(autouse=True)
def _no_setup(monkeypatch):
    monkeypatch.delenv("XILINX_XRT", raising=False)


def test_none(tmp_path):
    assert find_xrt_library(str(tmp_path), folders=(f"{tmp_path}/*/lib",)) is None
    assert find_xrt_library(folders=()) is None


def test_the_prefix_of_setup_sh_has_the_version_of_the_build(tmp_path):
    folder = install(tmp_path / "xrt" / "lib")
    (tmp_path / "xrt" / "version.json").write_text(json.dumps({"BUILD_VERSION": "2.13.466"}))
    assert find_xrt_library(str(tmp_path / "xrt"), folders=()) == f"2.13.466 in {folder}"


def test_the_prefix_comes_from_the_variable(tmp_path, monkeypatch):
    folder = install(tmp_path / "xrt" / "lib")
    monkeypatch.setenv("XILINX_XRT", str(tmp_path / "xrt"))
    assert find_xrt_library(folders=()) == f"2.13.0 in {folder}"


def test_the_prefix_comes_before_other_folders(tmp_path):
    own, other = install(tmp_path / "a" / "lib"), install(tmp_path / "b" / "lib", "2.18.0")
    assert find_xrt_library(str(tmp_path / "a"), (str(other),)) == f"2.13.0 in {own}"
    assert find_xrt_library(str(tmp_path / "none"), (str(other),)) == f"2.18.0 in {other}"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"BUILD_VERSION"', "\xff"])
def test_without_a_readable_version_json_the_file_says_it(tmp_path, content):
    folder = install(tmp_path / "xrt" / "lib", "2.14.354")
    if content is not None:
        (tmp_path / "xrt" / "version.json").write_text(content, encoding="latin-1")
    assert find_xrt_library(str(tmp_path / "xrt"), folders=()) == f"2.14.354 in {folder}"


def test_a_library_that_is_no_link_has_the_version_of_its_interface(tmp_path):
    folder = install(tmp_path / "lib", "2")
    assert find_xrt_library(folders=(str(folder),)) == f"2 in {folder}"


def test_folders_are_patterns(tmp_path):
    folder = install(tmp_path / "x86_64-linux-gnu")
    assert find_xrt_library(folders=(f"{tmp_path}/*-linux-gnu",)) == f"2.13.0 in {folder}"


def test_a_link_that_leads_nowhere_is_no_library(tmp_path):
    folder = install(tmp_path / "lib")
    (folder / "libxrt_coreutil.so.2.13.0").unlink()
    assert find_xrt_library(folders=(str(folder),)) is None
