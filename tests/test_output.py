"""Neither a reader that goes nor a name of any bytes ends a command."""

import hashlib
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import BIN, ROOT, SMALL, TRAINERS, rarely, read_json, run, warm_python, words_of
from making import folder_config, write_images
from records import a_plan, edit, lines_of, write_lines
from test_compare_records import make_comparison

from compare import keep
from compare.evidence.record import read_comparison
from compare.plan.plan import Words
from recipe import ancestors
from recipe.data import prepare
from recipe.data.batches import open_data
from recipe.data.shards import open_shards
from recipe.record.fingerprint import comparison_keys

NAME = os.fsdecode(b"name-\xe9")  # in Latin-1
SHOWN = r"name-\udce9"
RECORDED = "results/xeon-2-cores/2026-11-21-engines"
PRINTS = """
from recipe.command import prepare_output
prepare_output()
import os, subprocess, sys
from pathlib import Path
for _ in range(3):
    print("x" * 70_000, "\\u00f6 \\udce9", flush=True)
    print("y" * 70_000, "\\u00f6 \\udce9", file=sys.stderr)
file = open(sys.argv[1], "w")
assert file.fileno() > 2 and not sys.stderr.isatty()
subprocess.run(["sh", "-c", "echo child; echo child >&2; cat"], stdout=None)
file.write("done")
"""
STREAMS = [
    "2>&1 | head -c 10",
    "2>&1 >/dev/null | head -c 10",
    "| true",
    ">/dev/full 2>&1",
    ">&-",
    "2>&-",
    "<&-",
    ">&- 2>&- <&-",
]


def piped(words: str, *, locale: str = "") -> subprocess.CompletedProcess[str]:
    """Run a shell's pipe, whose exit code is that of its first command."""
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    if locale:
        environ |= {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = f"set -o pipefail; {words}"
    return subprocess.run(
        ["bash", "-c", script], input="", capture_output=True, text=True, env=environ, cwd=ROOT
    )


@pytest.mark.parametrize("streams", STREAMS)
def test_what_nobody_reads_ends_nothing(streams: str, tmp_path: Path) -> None:
    program = f"{sys.executable} -c {shlex.quote(PRINTS)} {tmp_path}/file {streams}"
    assert piped(program).returncode == 0
    assert (tmp_path / "file").read_text() == "done"


@pytest.mark.parametrize(("locale", "letter"), [("C.UTF-8", "ö"), ("POSIX", r"\xf6")])
def test_what_has_no_place_in_the_encoding_is_shown(
    locale: str, letter: str, tmp_path: Path
) -> None:
    program = f"{sys.executable} -c {shlex.quote(PRINTS)} {tmp_path}/file"
    done = piped(program, locale=locale)
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        assert text.count(rf" {letter} \udce9") == 3 and text.endswith("child\n")


@pytest.mark.parametrize(
    ("command", "streams"),
    [
        ("ddp_train/train.py --help", "| head -1"),
        ("compare/run.py square --dry-run --workers 1", "| true"),
        (f"compare/report.py {RECORDED} --no-html", "| head -1"),
        ("benchmarks/run.py --help", "| true"),
        ("-m recipe.data.prepare check --help", "| true"),
    ],
)
def test_commands_whose_output_is_not_read(command: str, streams: str) -> None:
    done = piped(f"{sys.executable} {command} {streams}")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_full_disk_under_what_a_command_prints() -> None:
    """A text that was to go into a file is not whole: the exit code says so."""
    done = piped(f"{sys.executable} compare/report.py {RECORDED} --csv >/dev/full")
    assert done.returncode == 1
    assert (
        "compare/report.py: not all that it printed was written ([Errno 28] No space left"
        in done.stderr
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose folder, classes and files have names that are not UTF-8, and one that is."""
    root = tmp_path_factory.mktemp("images") / NAME
    for part in ("train", "val"):
        write_images(root / part, 16)
        (root / part / "b").rename(root / part / NAME)
        (root / part / "c" / "0.png").rename(root / part / "c" / f"{NAME}.png")
        (root / part / "c").rename(root / part / "größe")
    return root


def flags(images: Path, log_dir: Path, name: str = NAME) -> list[str]:
    # No epoch ends in nine steps of so small batches: mpirun aborts after ten unread lines.
    settings = f"{SMALL} --batch-size 2 --epochs 1 --max-steps 3 --keep-checkpoints 1"
    places = ["--data", str(images), "--log-dir", str(log_dir), "--name", name]
    return [*settings.split(), *places, "--cache-dir", str(log_dir / "cache")]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "engine", "locale", "streams"),
    [
        ("python", "ddp", "POSIX", "| head -1"),
        rarely("torchrun", "ddp", "POSIX", "| head -1"),
        ("horovodrun --gloo", "horovod", "", "2>&1 | head -1"),
        rarely("python", "ddp", "", "2>&-"),
        rarely("torchrun", "ddp", "", ">&- 2>&- <&-"),
        rarely("horovodrun --mpi", "horovod", "", "| head -1"),
        rarely("mpirun", "horovod", "", "| head -1"),
    ],
)
def test_a_training_on_names_that_are_not_utf_8(
    launcher: str, engine: str, locale: str, streams: str, images: Path, tmp_path: Path
) -> None:
    """It ends well, goes on though nobody reads what it says, and is read back; in a locale without
    UTF-8, too."""
    log_dir = tmp_path / NAME
    environ = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": locale} if locale else {}
    # A locale, and streams that are closed, count when Python starts.
    python = warm_python() if launcher.startswith("horovodrun") else sys.executable
    words = [*words_of(launcher, TRAINERS[engine], python=python), *flags(images, log_dir)]
    words += ["--profile-steps", "2"]
    assert SHOWN in run(words, UCX_ODD=NAME, **environ).checked().output
    again = shlex.join([*words, "--resume", "auto", "--max-steps", "9", "--epochs", "19"])
    command = ["bash", "-c", f"set -o pipefail; {again} {streams}"]
    run(command, UCX_ODD=NAME, **environ).checked()
    folder = log_dir / NAME
    assert read_json(folder / "summary.json")["steps"] == 9
    assert (folder / "profile/rank-0.json").stat().st_size > 1000
    told = read_json(folder / "environment.json")
    assert NAME in told["command"] and told["variables"]["UCX_ODD"] == NAME
    assert read_json(folder / "config.json")["name"] == NAME
    assert not list((folder / "checkpoints").glob("set-aside*/best.pt"))


@pytest.mark.parametrize("make", [os.pipe, pty.openpty])
def test_a_reader_that_stops_keeps_no_rank_waiting(make: Callable[[], tuple[int, int]]) -> None:
    """Nor a terminal that is halted, and those who share it wait as before."""
    reader, writer = make()
    prints = "for _ in range(9): print('x' * 70_000)"
    code = f"from recipe.ancestors import own_world\nown_world()\n{prints}"
    words = [sys.executable, "-c", code]
    subprocess.run(words, stdout=writer, stderr=writer, cwd=ROOT, check=True)
    assert os.get_blocking(writer) and os.read(reader, 3) == b"xxx"
    for descriptor in (reader, writer):
        os.close(descriptor)


@pytest.fixture
def as_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output as a command finds it, not pytest's."""
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)


@pytest.mark.usefixtures("as_started")
def test_data_of_such_names(images: Path, tmp_path: Path) -> None:
    """Listed, agreed on, packed into shards, and checked."""
    config = folder_config(images, tmp_path / "cache")
    data = open_data(config)
    facts = comparison_keys("ddp", config, data, torch.device("cpu"))
    digest = hashlib.sha256()  # in any locale
    for part in (data.train, data.val):
        digest.update(b"a\0" + "größe".encode() + b"\0name-\xe9")
        digest.update(part.paths.tobytes() + part.labels.tobytes())
    assert facts["names, labels and classes of the images"] == digest.hexdigest()[:12]
    assert (
        prepare.main(["shards", str(images), str(tmp_path / NAME), "--cache-dir", str(tmp_path)])
        == 0
    )
    shards = open_shards(tmp_path / NAME / "train")
    assert shards.classes == data.train.classes and NAME in shards.classes
    (broken := images / "val" / NAME / f"{NAME}.png").write_bytes(b"no image")
    told = tmp_path / f"{NAME}.json"
    assert prepare.main(["check", str(images / "val"), "--json", str(told)]) == 1
    broken.unlink()
    assert [found["image"] for found in read_json(told)["bad"]] == [str(broken)]


@pytest.mark.usefixtures("as_started")
def test_a_report_on_such_names(tmp_path: Path) -> None:
    """What a comparison has recorded is read, shown in each form, and kept."""
    folder = tmp_path / NAME
    make_comparison(folder, a_plan(trainer_arguments=Words(("--data", NAME))))
    run_folder = folder / "block-1/ddp-torchrun-1"
    command = f"torchrun --name {NAME}"
    write_lines(folder, [{**line, "command": command} for line in lines_of(folder)])
    edit(run_folder / "environment.json", command=["train.py", NAME])
    edit(run_folder / "config.json", data=NAME)
    for form in ("--csv", "--markdown", "--json"):
        words = ["compare/report.py", str(folder), form, "--html", str(tmp_path / "page")]
        assert SHOWN in run([sys.executable, *words]).checked().output
        assert SHOWN in (tmp_path / "page").read_text("utf-8")
    place = ["--machine", "m", "--question", "q", "--results", str(tmp_path / "results")]
    assert keep.main([str(folder), *place]) == 0
    (kept,) = (tmp_path / "results/m").iterdir()
    assert read_comparison(kept).complete[0].command == command
    assert read_comparison(kept).plan.trainer_arguments == ("--data", NAME)


@pytest.mark.parametrize("name", [b"fourteen bytes" + "ö".encode(), b"name-\xe9) S 1 2"])
def test_a_process_of_such_a_name(name: bytes, tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of it, and cuts the first one inside a character."""
    program = os.path.join(os.fsencode(tmp_path), name)
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "60"]) as process:
        assert name[:15] in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert (ancestors.start_time(process.pid) or "").isdecimal()
        process.kill()
    assert ancestors.start_time(process.pid) is None
