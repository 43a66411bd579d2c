# SPDX-License-Identifier: Apache-2.0
"""`hillinfer doctor` says what encryption would cost, and how to get it where it is missing."""

import json
import subprocess
import sys

import pytest

from hillinfer.doctor.diagnosis import encryption_finding

PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[1].split(":")
# As in an install without the extra.
for name in ("cryptography", "keyring"):
    sys.modules[name] = None
from hillinfer.doctor.diagnosis import encryption_finding
from hillinfer.errors import HillInferError
from hillinfer.secrecy.key_sources import KeyFile, KeyringEntry
from hillinfer.secrecy.key_table import KeyTable
from pathlib import Path
found = encryption_finding()
said = [found.verdict, found.fix]
for source in (KeyFile(Path(sys.argv[2]) / "key"), KeyringEntry("work")):
    try:
        KeyTable.create(Path(sys.argv[2]) / "keys.json", bytes(16), source)
    except HillInferError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_the_cost_is_measured():
    found = encryption_finding()
    assert found.verdict == "ok"
    assert "AES-256-GCM by " in found.found
    assert "GB/s opening pages" in found.found


def test_a_missing_library_is_optional_and_the_extra_is_named(tmp_path):
    command = [sys.executable, "-c", PROGRAM, ":".join(sys.path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    verdict, fix, key_file, keyring = json.loads(done.stdout)
    assert verdict == "not found"
    assert fix == key_file
    assert "pip install 'hillinfer[encryption]'" in key_file
    assert "pip install 'hillinfer[keyring]'" in keyring


@pytest.mark.parametrize("module", ["key_table", "pages", "store_keys", "cold_pages"])
def test_the_library_is_loaded_where_it_is_used_alone(module):
    program = (
        f"import sys; sys.path[:0] = sys.argv[1].split(':'); import hillinfer.secrecy.{module}"
    )
    program += "; print([name for name in sys.modules if name.startswith('cryptography')])"
    command = [sys.executable, "-c", program, ":".join(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
