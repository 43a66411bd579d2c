# SPDX-License-Identifier: Apache-2.0
"""Files that commands leave: refused before anything is loaded, whole, and for their owner only."""

import json
import os
import resource
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from command import PLAIN, read_report

import hillinfer
from hillinfer.cli.preflight import Surroundings
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.models.loader import load_model
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import ReportError, make_folders, prepare_report, write_whole
from hillinfer_bench.figures.canvas import new_figure, save_figure
from hillinfer_bench.quality.table import write_report as write_quality
from hillinfer_bench.replay.table import write_report as write_pools
from hillinfer_bench.report.bench_report import write_bench_report

# What is open to others shows where a umask takes nothing; the other is what most users have.
UMASKS = (0o000, 0o022)
# Commands up to an option that names a file; no model and no input is there, which shows later.
OPTIONS = {
    "report": ("generate", "--model", "/no/model", "--prompt", "text", "--report"),
    "timeline": ("generate", "--model", "/no/model", "--prompt", "text", "--pool-timeline"),
    "trace": ("generate", "--model", "/no/model", "--prompt", "text", "--trace"),
    "quality": ("quality", "--model", "/no/model", "--out"),
    "precision": ("precision", "--model", "/no/model", "--out"),
    "pools": ("pools", "--model", "/no/model", "--out"),
    "decode": ("decode", "--model", "/no/model", "--out"),
    "evicpress": ("evicpress", "--model", "/no/model", "--out"),
    "serving": ("serving", "--model", "/no/model", "--out"),
    "hosts": ("hosts", "--model", "/no/model", "--out"),
    "pool-picture": ("pool-picture", "/no/timeline", "--out"),
    "trace-picture": ("trace-picture", "/no/trace", "--out"),
    "store-picture": ("store-picture", "/no/stats", "--out"),
    "documents-picture": ("documents-picture", "/no/plan", "--out"),
    "prune-picture": ("prune-picture", "/no/report", "--out"),
    "session": ("generate", "--model", "/no/model", "--prompt", "text", "--save-session"),
}


def directory(folder):
    (folder / "out.json").mkdir()
    (folder / "out.json" / "taken").touch()
    return folder / "out.json", "is a directory"


def below_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "out.json", "Not a directory"


def nowhere_to_write(folder):
    if os.geteuid() == 0:
        return "/proc/out.json", "No such file or directory"
    (folder / "closed").mkdir(mode=0o500)
    return folder / "closed" / "out.json", "Permission denied"


def pipe(folder):
    os.mkfifo(folder / "out.json")
    return folder / "out.json", "is a pipe"


def device(folder):
    # A name that every command takes, because it is a link.
    (folder / "out.json").symlink_to("/dev/null")
    return folder / "out.json", "is a device"


def listening(folder):
    with socket.socket(socket.AF_UNIX) as heard:
        before = Path.cwd()
        os.chdir(folder)
        heard.bind("out.json")
        os.chdir(before)
    return folder / "out.json", "is a socket"


def too_long(folder):
    return folder / ("x" * 300 + ".json"), "File name too long"


def loop(folder):
    (folder / "out.json").symlink_to(folder / "out.json")
    return folder / "out.json", "Too many levels of symbolic links"


def open_file(folder):
    # Tests have a regular file for standard output.
    (folder / "out.json").symlink_to("/dev/stdout")
    return folder / "out.json", "it stands for an open file"


PLACES = (
    *(directory, below_a_file, nowhere_to_write, pipe, device, listening, too_long, loop),
    open_file,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_place_that_takes_no_file_is_refused_before_loading(command, tmp_path, name, place):
    file, said = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    line = command(*OPTIONS[name], file).error_line()
    assert f"choose another {OPTIONS[name][-1]}" in line or name == "session"
    if name == "session":
        assert "cannot save the session" in line
    else:
        assert said in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", OPTIONS)
def test_a_place_that_takes_a_file_is_not_refused(command, tmp_path, name):
    # The twin: what is refused then is the model or the input.
    line = command(*OPTIONS[name], tmp_path / "new" / "out.json").error_line()
    assert "choose another" not in line
    assert "/no/" in line
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_system_without_room_is_seen_before(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(HillInferError, match="File too large; choose another --report"):
            prepare_report(tmp_path / "run.json", "--report")
        assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    prepare_report(tmp_path / "run.json", "--report")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--report", "--trace"),
        ("--report", "--pool-timeline"),
        ("--pool-timeline", "--trace"),
        ("--prompt-file", "--report"),
        ("--prompt-file", "--trace"),
        ("--report", "--save-session"),
    ],
)
def test_two_options_do_not_share_a_file(command, tmp_path, document, one, other):
    file = document if one == "--prompt-file" else tmp_path / "same"
    (tmp_path / "link").symlink_to(tmp_path)
    prompt = () if one == "--prompt-file" else ("--prompt", "text")
    before = document.read_bytes()
    line = command(
        *("generate", "--model", "/no/model", *prompt, one, file),
        *(other, tmp_path / "link" / file.name),
    ).error_line()
    assert f"{one} and {other} both name" in line
    assert document.read_bytes() == before


WRITTEN = ("--report", "--trace", "--pool-timeline", "--save-session")
KEPT = ("--save-session", "--session", "--model")


@pytest.fixture
def generate(command):
    """Answer with a model that is never looked for, because the places are what is tested."""

    def located(name, say):
        raise SettingsError("the places are good")

    def run(*arguments):
        asked = ("generate", "--prompt", "text", "--question", "who?", *arguments)
        return command(*asked, around=Surroundings(locate=located))

    return run


@pytest.mark.parametrize(
    ("option", "kept"), [(one, other) for one in WRITTEN for other in KEPT if one != other]
)
def test_nothing_is_written_into_what_another_option_names(generate, tmp_path, option, kept):
    folder = tmp_path / "kept"
    folder.mkdir()
    inside = folder / "model.safetensors"
    if kept != "--save-session":
        inside.write_bytes(b"weights")
    (tmp_path / "folder").symlink_to(folder)
    (tmp_path / "file").symlink_to(inside)
    before = sorted(tmp_path.rglob("*"))
    for place in (
        *(inside, folder / "new" / "out", tmp_path / "folder" / "out", tmp_path / "file"),
        tmp_path / "elsewhere" / ".." / "kept" / "out",
    ):
        line = generate(kept, folder, option, place).error_line()
        assert f"{option} {place} would change {folder}, which {kept} names" in line
        assert f"choose another {option}" in line
    assert generate(kept, tmp_path / "folder", option, inside).error_line().count("would change")
    assert sorted(tmp_path.rglob("*")) == before
    if kept != "--save-session":
        assert inside.read_bytes() == b"weights"
    # The twin: beside it there is room.
    line = generate(kept, folder, option, tmp_path / "kept-too" / "out").error_line()
    assert ("session.json is missing" if kept == "--session" else "the places are good") in line


@pytest.mark.parametrize("name", ["quality", "precision", "pools", "decode"])
def test_no_measure_is_written_into_a_model(command, tmp_path, name):
    inside = tmp_path / "config.json"
    inside.write_bytes(b"weights")
    options = ["--out", "--trace"] if name == "decode" else ["--out"]
    for option in options:
        line = command(name, "--model", tmp_path, option, inside).error_line()
        assert f"{option} {inside} would change {tmp_path}, which --model names" in line
    assert inside.read_bytes() == b"weights"


@pytest.mark.parametrize("setting", ["trace", "pool_timeline"])
def test_a_link_in_the_place_of_an_output_is_replaced(tiny_folder, cold_dir, tmp_path, setting):
    (tmp_path / "target").write_text("somebody's")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    loaded = load_model(str(tiny_folder))
    changes = {setting: tmp_path / "link", "cold_dir": cold_dir}
    with hillinfer.attach(loaded.model, **changes) as hill:
        hill.new_cache().close()
    assert (tmp_path / "target").read_text() == "somebody's"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text()
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o600


def test_a_model_file_is_not_replaced_and_its_folder_takes_files(generate, tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    line = generate("--model", model, "--report", model).error_line()
    assert f"--report {model} would change {model}, which --model names" in line
    line = generate("--model", model, "--report", tmp_path / "run.json").error_line()
    assert "the places are good" in line
    assert model.read_bytes() == b"weights"


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "~nobody-of-this-name/model", "no/model"])
def test_the_name_of_a_model_is_no_folder(generate, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    line = generate("--model", name, "--report", Path(name) / "run.json").error_line()
    assert "the places are good" in line


@pytest.mark.parametrize(
    "name",
    ["pool-picture", "trace-picture", "store-picture", "documents-picture", "prune-picture"],
)
def test_a_picture_does_not_replace_what_it_shows(command, tmp_path, name):
    file = tmp_path / "file"
    file.write_text("of a run")
    (tmp_path / "link").symlink_to(file)
    for out in (file, tmp_path / "link"):
        line = command(name, file, "--out", out).error_line()
        assert f"FILE and --out both name {out}: give each a file of its own" in line
    assert file.read_text() == "of a run"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_that_is_a_standard_stream_is_not_replaced(tmp_path, number):
    file = tmp_path / "log.txt"
    file.write_text("a text")
    (tmp_path / "link").symlink_to(file)
    before = os.dup(number)
    try:
        with file.open("a") as log:
            os.dup2(log.fileno(), number)
        for place in (file, tmp_path / "link", Path("/dev/fd", str(number))):
            with pytest.raises(ReportError, match="it stands for an open file; choose another --o"):
                prepare_report(place, "--out")
        # A closed one is no file at all.
        os.close(number)
        prepare_report(file, "--out")
    finally:
        os.dup2(before, number)
        os.close(before)
    prepare_report(file, "--out")
    assert file.read_text() == "a text"


def test_links_of_the_system_are_not_replaced(tmp_path):
    with (tmp_path / "open").open("w") as own:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{own.fileno()}")
        (tmp_path / "chain").symlink_to("link")
        for place in (tmp_path / "link", tmp_path / "chain", f"/dev/fd/{own.fileno()}"):
            with pytest.raises(ReportError, match="it stands for an open file"):
                prepare_report(Path(place), "--report")
    # The twin: a link of a user's own is replaced, wherever it leads.
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        (tmp_path / "shared").symlink_to(shared.name)
        (tmp_path / "own").symlink_to("nothing")
        for place in (
            tmp_path / "own",
            tmp_path / "shared",
            shared.name,
            f"/proc/self/root{tmp_path}/open",
        ):
            prepare_report(Path(place), "--report")


def test_links_of_the_system_that_lead_nowhere_are_not_replaced(tmp_path):
    # A process that has ended, and that nobody has waited for, has no program any more.
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        nowhere = Path(f"/proc/{ended.pid}/exe")
        assert nowhere.is_symlink()
        assert not nowhere.exists()
        (tmp_path / "link").symlink_to(nowhere)
        for place in (nowhere, tmp_path / "link"):
            with pytest.raises(ReportError, match="it stands for an open file"):
                prepare_report(place, "--report")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777], ids=oct)
def test_folders_are_their_owners_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        make_folders(tmp_path / "a" / "b" / "c")
        write_whole(tmp_path / "d" / "e" / "file", b"text")
    finally:
        os.umask(before)
    assert modes(tmp_path) == {}
    with pytest.raises(NotADirectoryError):
        make_folders(tmp_path / "d" / "e" / "file")


class TestWriteWhole:
    def test_what_was_there_is_replaced(self, tmp_path):
        file = tmp_path / "run.json"
        file.write_text("another run's")
        file.chmod(0o644)
        seen = file.open()
        write_whole(file, b"new")
        assert file.read_bytes() == b"new"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        # Whoever had it open still has all of it.
        assert seen.read() == "another run's"
        seen.close()
        assert list(tmp_path.iterdir()) == [file]

    def test_a_link_is_replaced_and_what_it_names_stays(self, tmp_path):
        other = tmp_path / "other"
        other.write_text("not ours")
        (tmp_path / "run.json").symlink_to(other)
        write_whole(tmp_path / "run.json", b"new")
        assert other.read_text() == "not ours"
        assert not (tmp_path / "run.json").is_symlink()

    def test_what_fails_leaves_what_was_there(self, tmp_path):
        file = tmp_path / "run.json"
        file.write_text("another run's")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_whole(file, bytes(200))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert file.read_text() == "another run's"
        assert list(tmp_path.iterdir()) == [file]


def modes(folder):
    """Return what is below a folder and is not for its owner alone."""
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in folder.rglob("*")
        if stat.S_IMODE(path.lstat().st_mode) != (0o700 if path.is_dir() else 0o600)
    }


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_what_generate_and_the_pictures_leave_is_for_their_owner(
    forked, tiny_folder, cold_dir, document, tmp_path, umask
):
    left = tmp_path / "left"
    left.mkdir(mode=0o700)
    files = {
        "--report": left / "a" / "deep" / "run.json",
        "--pool-timeline": left / "b" / "deep" / "pools.csv",
        "--trace": left / "c" / "deep" / "trace.json",
        "--save-session": left / "d" / "deep" / "session",
    }
    for option, file in files.items():
        if option == "--pool-timeline":
            make_folders(file.parent)
            # One that was there before, for everybody.
            file.write_text("")
            file.chmod(0o666)
    ended = forked(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *("--max-new-tokens", 6, "--dram-budget", "64MiB", "--threads", 1, "--question", "who?"),
        *PLAIN,
        *(str(word) for pair in files.items() for word in pair),
        umask=umask,
    )
    assert ended.status == 0, ended
    pictures = (
        ("pool-picture", files["--pool-timeline"], "--out", left / "e" / "deep" / "pools.png"),
        ("trace-picture", files["--trace"], "--out", left / "f" / "deep" / "trace.svg"),
    )
    # Drawing takes seconds to import, and what writes is that of the report.
    for arguments in pictures if umask == 0 else ():
        ended = forked(*arguments, umask=umask)
        assert ended.status == 0, ended
    names = {path.name for path in left.rglob("*")}
    assert names >= {"run.json", "pools.csv", "trace.json", "session"}
    assert (names >= {"pools.png", "trace.svg"}) == (umask == 0)
    assert modes(left) == {}
    assert read_report(files["--report"])["finish"] is not None


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_what_measurements_leave_is_for_their_owner(tmp_path, umask):
    left = tmp_path / "left"
    left.mkdir(mode=0o700)
    before = os.umask(umask)
    try:
        write_quality(left / "a" / "b" / "quality.json", [], {})
        write_pools(left / "c" / "pools.json", [], {})
        write_bench_report(left / "d" / "bench.json", {"rows": []})
        save_figure(new_figure(1, 1), left / "e" / "picture.png")
    finally:
        os.umask(before)
    assert len([path for path in left.rglob("*") if path.is_file()]) == 4
    assert modes(left) == {}
    assert json.loads((left / "d" / "bench.json").read_text()) == {"rows": []}


def test_modes_for_others_are_seen(tmp_path):
    # The twin: what the tests above look for is found.
    file = tmp_path / "left" / "run.json"
    file.parent.mkdir(mode=0o755)
    file.touch(mode=0o644)
    assert modes(tmp_path) == {"left": "0o755", "left/run.json": "0o644"}
