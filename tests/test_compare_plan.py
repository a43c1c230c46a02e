"""Plans: files, flags and hosts, what they make of the trainers' commands, and what is refused."""

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import needs
import psutil
import pytest
from making import write_program

from compare import run as run_module
from compare.evidence.record import Record
from compare.plan.blocks import balanced
from compare.plan.configurations import CONFIGURATIONS, ENGINES
from compare.plan.environment import (
    ROOT,
    is_here,
    is_only_here,
    most_on_a_host,
    placement,
    read_hostfile,
    read_hosts,
    set_variables,
    slurm_hosts,
    ssh_flags,
    ssh_remedy,
    ssh_words,
    used_hosts,
)
from compare.plan.plan import OwnConfiguration, Plan, Run, Share, Words
from compare.plan.plan_file import (
    PLANS,
    PlanRecord,
    check_plan,
    plan_of_record,
    plan_record,
    plan_table,
    read_plan_file,
)
from compare.run import main, make_plan, parse_options
from recipe.errors import UserError
from recipe.settings.config import parse_args
from recipe.settings.flags import FLAGS, names_of
from recipe.training.optimizers import learning_rate
from recipe.world import World


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to be in, on a machine that has every tool."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "check_tools", lambda plan: None)
    return tmp_path


def plan_of(*words: str) -> Plan:
    return make_plan(parse_options(list(words), ""))


def dry_run(*words: str) -> list[list[str]]:
    """The words of each whole run's command."""
    flags = ["--dry-run", "--no-warm-up", *([] if "--measure" in words else ["--measure", "runs"])]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([*words, *flags]) == 0
    lines = output.getvalue().splitlines()
    return [shlex.split(line) for line in lines if not line.startswith(("unset ", "export "))]


def plan_file(folder: Path, text: str) -> str:
    (folder / "plan.toml").write_text(text)
    return "plan.toml"


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_a_flag_that_the_trainers_refuse_is_refused_before_anything_is_shown(
    how: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*how, "--", "--bath-size", "3"]) == 2
    told = capfd.readouterr()
    assert told.out == "" and list(here.iterdir()) == []
    assert "--bath-size 3: write --batch-size 3\ncorrected: python" in told.err
    with pytest.raises(SystemExit) as ended:
        main([*how, "--", "--batch-size", "many"])
    told = capfd.readouterr()
    assert ended.value.code == 2 and told.out == "" and list(here.iterdir()) == []
    words = told.err.replace("│", " ").split()  # of a box, whose lines a long path breaks
    assert "--help" in words and words[words.index("--help") - 1] == "--"


FILE = """
question = "Which?"
time = "a minute"
configurations = ["ddp-torchrun", "ddp-fp16", "horovod-tuned"]
pairs = [["ddp-fp16", "ddp-torchrun"]]
workers = [4, 2]
measure = "runs"
blocks = 5
seed = 7
order_seed = 3
margin = "2.5 %"
timeout = 60
flags = "--arch resnet18 --data '/a b'"
no_phases = true

[configuration.ddp-fp16]
base = "ddp-torchrun"
flags = "--fp16-allreduce --threads 1"

[configuration.horovod-tuned]
base = "horovod-gloo"
environment = { HOROVOD_CYCLE_TIME = "2", HOROVOD_FUSION_THRESHOLD = "1 000" }

[case.a]
flags = "--precision bf16"

[case.b]
"""


def builtins_of(plan: PlanRecord) -> dict[str, Any]:
    """A plan as a line of its record holds it."""
    return dict(json.loads(json.dumps(msgspec.to_builtins(plan, enc_hook=float))))


def test_a_file_says_all_that_a_plan_holds(here):
    plan = plan_of(plan_file(here, FILE))
    expected = {
        "configurations": ("ddp-torchrun", "ddp-fp16", "horovod-tuned"),
        "workers": (2, 4),
        "blocks": 5,
        "seed": 7,
        "timeout": 60,
        "measure": "runs",
        "margin": 0.025,
        "order_seed": 3,
        "no_phases": True,
    }
    assert {name: getattr(plan, name) for name in expected} == expected
    assert plan.trainer_arguments[:4] == ("--arch", "resnet18", "--data", "/a b")
    assert plan.cases == ["a", "b"]
    record = plan_of_record(builtins_of(plan_record(plan, "2026-11-21T12:00:00+00:00")))
    assert (record.question, record.plan_file) == ("Which?", "plan.toml")
    assert record.pairs() == [("ddp-fp16", "ddp-torchrun")]
    assert record.varied == ["fp16_allreduce", "threads"]
    assert record.known()["horovod-tuned"].controller == "gloo"
    assert len(record.runs()) == 3 * 2 * 2 * 5
    run = next(run for run in plan.runs() if run.cell == "a/ddp-fp16-2")
    ends = ["--precision", "bf16", "--fp16-allreduce", "--threads", "1"]
    assert run.command(Path("logs"))[-5:] == ends  # the nearer to the run, the later; it wins


def test_flags_win_over_the_file(here):
    name = plan_file(here, FILE)
    plan = plan_of(
        name,
        "--workers",
        "1",
        "--seed",
        "8",
        "--configurations",
        "ddp-torchrun",
        "horovod-tuned",
        "--case",
        "c=--arch alexnet",
        "--no-phases",
        "--",
        "--arch",
        "vgg16",
    )
    assert (plan.workers, plan.seed, plan.no_phases) == ((1,), 8, True)
    assert plan.pairs() == [("ddp-torchrun", "horovod-tuned")]  # the file's pair is gone
    assert plan.cases == ["c"]
    assert plan.trainer_arguments[4:6] == ("--arch", "vgg16")
    plan = plan_of(name, "--define", "ddp-fp16=ddp-mpirun --x", "--pairs", "ddp-fp16:horovod-tuned")
    assert plan.known()["ddp-fp16"].launcher == "mpirun"
    assert plan.pairs() == [("ddp-fp16", "horovod-tuned")]


def test_configurations_that_are_left_out_take_their_goals_and_margins_with_them(here):
    goals = """
[goals]
"ddp-torchrun:ddp-fp16" = 0.9
"ddp-torchrun:horovod-tuned" = 0.8
ddp-fp16 = 100
horovod-tuned = 50

[margins]
"ddp-fp16:ddp-torchrun" = "1%"
"""
    words = [plan_file(here, FILE + goals), "--configurations", "ddp-torchrun", "horovod-tuned"]
    plan = plan_of(*words)
    assert plan.goals == {"ddp-torchrun:horovod-tuned": 0.8, "horovod-tuned": 50}
    assert plan.margins == {}
    null = plan_of(words[0], "--null")
    assert null.goals == null.margins == {} and ("ddp-fp16", "ddp-fp16-again") in null.pairs()
    with pytest.raises(UserError, match="--goals ddp-fp16: ddp-fp16: there is no such name"):
        plan_of(*words, "--goals", "ddp-fp16=100")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block = 3", ["no key block", "did you mean blocks?"]),
        ("blocks = '3'", ["blocks = '3'", "expected `int"]),
        ("blocks = 0", ["blocks = 0", ">= 1"]),
        ("workers = [1, 'two']", ["workers[1] = 'two'", "expected `int`"]),
        ("workers = []", ["workers = []", "length >= 1"]),
        ("blocks = ", ["Invalid value (at"]),
        ("configurations = ['ddp-torchrn']", ["ddp-torchrn", "did you mean ddp-torchrun?"]),
        ("[configuration.x]\nbase = 'horovod'", ["configuration x", "horovod:", "horovod-"]),
        ("[configuration.x]\nflags = '--a'", ["configuration[...]", "missing", "`base`"]),
        (
            "[configuration.x]\nbase = 'ddp-torchrun'\nenvironment = { A = 1 }",
            ["configuration[...].environment", "expected `str`, got `int`"],
        ),
        (
            "[configuration.x]\nbase = 'ddp-torchrun'\nenviron = {}",
            ["no key environ", "did you mean environment?"],
        ),
        ("[configuration.ddp-torchrun]\nbase = 'ddp-torchrun'", ["is a ready one"]),
        ("[configuration.x]\nbase = 'ddp-torchrun'\nflags = '--seed 1'", ["x: sets a seed"]),
        ("[case.'a/b']", ["'a/b'", "folder"]),
        ('flags = "--a \'b"', ["--a 'b", "quotation"]),
        ("flags = '--log-dir x'", ["--log-dir cannot be passed", "--out"]),
        ("[case.a]\nflags = '--test-only'", ["--test-only cannot be passed"]),
        ("until_interval = '2'", ["until_interval = '2'", "2%"]),
        ("until_interval = '200%'", ["until_interval = '200%'", "between"]),
        ("margin = '0%'", ["margin = '0%'", "between"]),
        ("minutes = 0", ["minutes = 0", "> 0"]),
        ("measure = 'turn'", ["measure = 'turn'"]),
        ("measure = 'runs'\nfull_runs = 2", ["full-runs 2", "measure runs", "blocks"]),
        ("blocks = 3\nminutes = 5", ["blocks 3", "leave --minutes out"]),
        ("pairs = [['ddp-torchrun']]", ["pairs[0]", "length 2"]),
        ("pairs = [['ddp-torchrun', 'horovod-gloo']]", ["horovod-gloo: there is no"]),
        ("pairs = [['ddp-torchrun', 'ddp-torchrun']]", ["null"]),
        ("null = true\npairs = [['ddp-torchrun', 'horovod-mpi']]", ["null", "pairs"]),
        ("control = '3%'", ["--control 3%", "--null"]),
        ("null = true\ncontrol = 3", ["control = 3", "percentage"]),
        ("global_batch_size = 64", ["global-batch-size", "global-learning-rate"]),
        ("hosts = 'a:2,b'", ["'b'", "name:N"]),
        (
            "[side.a]\ncommand = 'a'\ncopies = 2\n[side.b]\ncommand = 'b'\ncopies = 1",
            ["there is no key copies"],
        ),
        ("turns = 5", ["there is no key turns; did you mean rounds?"]),
        ("hostfile = 'nowhere'", ["hostfile nowhere", "cannot be read"]),
        ("[goals]\n'a:b' = 'x'", ['[goals] "a:b" = "x": expected `float`, got `str`']),
        ("workers = [4]\n[side.a]\ncommand = 'a'", ["workers = [4]: is for this project's"]),
        ("flags = '--lr 1'\n[side.a]\ncommand = 'a'", ['flags = "--lr 1": is', "write {flags}"]),
        ("no_phases = true\n[side.a]\ncommand = 'a'", ["no_phases = true: is for this"]),
        (
            "[side.a]\ncommand = 'a'\n[configuration.x]\nbase = 'ddp-torchrun'",
            ["[configuration.x]: is for this project's trainers"],
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_one_message_with_file_and_key(here, capsys, text, words):
    assert main([plan_file(here, text), "--dry-run"]) == 2
    told = capsys.readouterr()
    message = told.err.replace("\\'", "'")
    assert told.out == "" and message.startswith("compare/run.py: plan.toml")
    assert "Traceback" not in message and all(word in message for word in words)
    assert not (here / "runs").exists()


READY = sorted(path.stem for path in PLANS.glob("*.toml"))
OF_SIDES = [name for name in READY if "[side." in (PLANS / f"{name}.toml").read_text()]
OF_TRAINERS = sorted({*READY} - {*OF_SIDES, "accuracy"})


@pytest.mark.parametrize("name", [*OF_TRAINERS, pytest.param("accuracy", marks=needs.needs_timm)])
def test_a_ready_plan_can_be_run_and_says_what_it_answers(here, name):
    plan = plan_of(name)
    assert plan.question and plan.question.endswith("?")
    assert plan.plan_file == f"compare/plans/{name}.toml"
    whole = len([words for words in dry_run(name, "--measure", plan.measure) if words[0] != "#"])
    assert whole == len(plan.runs()) >= 1
    runs = {
        (run.cell, run.arguments): run for run in plan.runs()
    }  # of all blocks one: they differ in their seed
    for run in runs.values():
        words = run.command(Path("logs"))
        flags = words[words.index("--log-dir") :]
        world = World(0, run.workers, 0, run.workers, "torchrun", "here")
        config = parse_args(run.configuration.engine, world, flags)  # ends the process if wrong
        assert config.name == run.name and config.keep_checkpoints == 0


@pytest.mark.parametrize("name", OF_SIDES)
def test_the_sides_of_a_ready_plan_train_alike(here, name):
    """Those of a pair have the same command, and their trainers take its flags."""
    plan = plan_of(name)
    assert plan.question and plan.question.endswith("?")
    trainers = {engine.trainer: name for name, engine in ENGINES.items()}
    commands = {side.name: list(side.command) for side in plan.members()}
    for words in commands.values():
        at = words.index("benchmarks/programs/trainer.py") + 1
        ranks = int(words[words.index("-np") + 1])
        world = World(0, ranks, 0, ranks, "mpirun", "here")
        parse_args(trainers[words[at]], world, words[at + 1 :])  # ends the process if wrong
    assert all(commands[first] == commands[second] for first, second in plan.pairs())


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("square", "2026-11-23-square-short-turns"),
        ("null-test", "2026-11-22-null-test-by-turns"),
        ("ladder", "2026-11-23-ladder"),
    ],
)
def test_a_ready_plan_still_trains_what_was_recorded(name: str, record: str) -> None:
    """Else what the README says of it is of another training."""
    earlier = {
        "ddp-gloo": "ddp-torchrun",
        "horovod-mpirun-gloo": "horovod-gloo",
        "horovod-mpirun-mpi": "horovod-mpi",
    }  # when launchers differed
    written = Record.open(ROOT / "results/xeon-2-cores" / record).written
    settings = {run.configuration: run.config.flags for run in written if run.block == 1}
    for run in plan_of(name).block(1):
        own = re.sub("-again$|-delayed$", "", run.configuration.name)
        recorded = settings[earlier.get(own, own)]
        world = World(0, run.workers, 0, run.workers, "torchrun", "here")
        config = vars(parse_args(run.configuration.engine, world, list(run.arguments)))
        fields = [name for name in names_of("work", "speed") if name in recorded]
        now = {name: config[name] for name in fields}
        assert json.loads(json.dumps(now)) == {name: recorded[name] for name in fields}


def test_the_plan_of_several_values_in_the_docs_judges_each_against_the_default(here: Path) -> None:
    [text] = re.findall(
        r"^```toml\n(configurations = .*?)^```",
        (ROOT / "docs/comparing.md").read_text(),
        re.M | re.S,
    )
    plan = plan_of(plan_file(here, text))
    default, *values = plan.members()
    assert plan.pairs() == [(value.name, default.name) for value in values]
    assert len({tuple(value.environment.items()) for value in values}) == len(values) > 1


def test_other_images_are_trained_by_their_own_recipe(here: Path) -> None:
    """And not by the one of the digits."""
    for words, preset in {
        "--data IMAGENET": "goyal-90",
        "--data fashion-mnist": "fashion-quick",
        "--train-dir a --val-dir b": "goyal-90",
        "--data IMAGENET --preset tv-v1": "tv-v1",
        "--epochs 1": "digits-resnet18",
    }.items():
        runs = plan_of("square", "--", *words.split()).block(1)
        assert {run.config.preset for run in runs} == {preset}


def test_the_ready_plans_are_listed_with_question_and_time(capsys):
    assert main(["--list-plans"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in READY:
        index = lines.index(name)
        assert lines[index + 1].strip().endswith("?")
        assert re.fullmatch(r" +(up to \d+ minutes|.* on 2 cores)", lines[index + 2])


# Strong scaling


STRONG = ("--global-batch-size", "96", "--global-learning-rate", "0.3", "--blocks", "1")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--batches-per-allreduce", "2"),
        ("--warmup-epochs", "0"),
        ("--data", "synthetic", "--preset", "tv-v1"),  # whose learning rate does not warm up
    ],
)
def test_all_numbers_of_workers_train_with_the_same_batch_and_rate(more):
    """By the trainers' own arithmetic, at each point of the training."""
    found = []
    for run in plan_of(*STRONG, "--workers", "1", "2", "4", "--", *more).runs():
        words = run.command(Path("logs"))
        world = World(0, run.workers, 0, run.workers, "torchrun", "here")
        config = parse_args("ddp", world, words[words.index("--log-dir") :])
        scale = run.workers * config.batches_per_allreduce
        assert config.batch_size * scale == 96
        assert ("--warmup-method" in words) == (config.warmup_epochs > 0)
        found.append([learning_rate(config, config.epochs * i / 50, scale) for i in range(51)])
        assert max(found[-1]) == pytest.approx(0.3, rel=1e-2)  # looked at in 51 points
        assert found[-1] == pytest.approx(found[0])


# Hosts


def test_a_worker_has_the_same_threads_at_any_number_of_workers(monkeypatch):
    """Those of the fullest host."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    words = ("--configurations", "ddp-mpirun", "--workers", "2", "4", "--hosts")
    for hosts, given, threads in (
        ("a:2,b:2", [], ["--threads", "4"]),
        ("a:4,b:2", [], ["--threads", "2"]),
        ("a:4,b:2", ["--threads=3"], ["--threads=3"]),
        ("a:4,b:2", ["--threads", "3"], ["--threads", "3"]),
    ):
        made = plan_of(*words, hosts, "--", *given).trainer_arguments
        assert made == (*threads, "--keep-checkpoints", "0")


def test_a_server_that_gets_no_slot_here_makes_its_run_leave_this_host():
    server = CONFIGURATIONS["parameter-server"]
    assert Run(1, server, 2, 42, hosts="localhost:2,b:2").leaves_this_host


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # The trainers refuse their flags, whichever engine and number of workers it is.
        (["--", "--epochs", "0"], ["the trainers refuse", "--epochs 0: must be at least 1"]),
        (["--define", "x=horovod-mpi --num-groups 0"], ["--num-groups 0: must be at least 1"]),
        (
            ["--configurations", "horovod-mpi", "--workers", "2", "3", "--", "--use-adasum"],
            ["needs a power-of-two number of workers, and there are 3"],
        ),
        # There is no such plan.
        (["scalling"], ["did you mean scaling?"]),
        (["nowhere.toml"], ["nowhere.toml: [Errno 2] No such file"]),
        # Strong scaling would be unequal.
        ([*STRONG, "--workers", "5"], ["cannot be shared equally by 5 workers"]),
        ([*STRONG, "--", "--batches-per-allreduce=64"], ["give a multiple of 128"]),
        ([*STRONG, "--", "-b", "8"], ["-b cannot be passed", "--global-batch-size sets it"]),
        ([*STRONG, "--", "--base-lr", "1"], ["--global-learning-rate sets it"]),
        ([*STRONG, "--case", "a=--base_lr=1"], ["--base_lr=1 cannot be passed"]),
        ([*STRONG, "--", "--lr-warmup-method", "gradual"], ["needs a linear one"]),
        ([*STRONG, "--", "--use-adasum"], ["does not fit --global-batch-size"]),
        (["--global-batch-size", "0"], ["global_batch_size = '0'", ">= 1"]),
        # Hosts cannot be used.
        (["--hosts", "a:2,b:1", "--workers", "3"], ["ddp-torchrun", "would be 2 on a, 1 on b"]),
        (["--hosts", "slurm"], ["inside salloc"]),
        (
            ["--hosts", "a:1,b:1", "--workers", "3", "--configurations", "ddp-mpirun"],
            ["2 ranks, but the plan"],
        ),
        (["--hosts", "a:1,b:1", "--configurations", "parameter-server"], ["2 ranks, but the plan"]),
        (["--hosts", "a:1,a:1"], ["each host once"]),
        (["--hosts", "a:1", "--hostfile", "x"], ["give one"]),
        (["--blocks", "3", "--until-interval", "5%"], ["--blocks 3", "leave --until-interval out"]),
        # A goal is of sides that there are, and a number.
        (
            ["--configurations", "ddp-torchrun", "horovod-mpi", "--goals", "ddp-torchrun:c=1"],
            ["--goals ddp-torchrun:c: c: there is no such name"],
        ),
        (["--goals", "ddp-torchrun=fast"], ["--goals ddp-torchrun=fast: 'fast' is no"]),
        (["--goals", "a:b>=1.02"], ["--goals a:b>=1.02: a goal is the least", "in a:b=1.02"]),
        (["--goals", "a:b<=1"], ["--goals a:b<=1: a goal is the least ratio", "SECOND:FIRST=0.98"]),
        (["--goals", "ddp-gloo=-3"], ["--goals ddp-gloo=-3: give a number above 0"]),
    ],
)
def test_what_cannot_be_run_is_refused_with_one_message(words, told, here, capfd):
    assert main(["--dry-run", *words]) == 2
    output = capfd.readouterr()
    assert output.out == "" and all(word in " ".join(output.err.split()) for word in told)


def test_in_an_allocation_all_launchers_fill_the_same_hosts(tmp_path, monkeypatch):
    """Two nodes of two tasks, which a made-up scontrol spells out."""
    write_program(tmp_path / "scontrol", "echo a; echo b\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    plan = plan_of(
        "--hosts",
        "slurm",
        "--workers",
        "2",
        "3",
        "--configurations",
        "ddp-srun",
        "horovod-srun",
        "horovod-mpirun",
    )
    assert plan.hosts == "a:2,b:2"
    assert plan_record(plan, "").hosts is None, "the next block may get other nodes"
    commands = {run.name: shlex.join(run.command(Path("x"))) for run in plan.runs()}
    for name, words in {
        "ddp-srun-3": "--nodes 2 --nodelist a,b --ntasks-per-node 2 --distribution block python",
        "ddp-srun-2": "--export=ALL .*--nodelist a ",
        "horovod-srun-2": "--mpi=pmix .*--export=ALL,SLURM_PMIX_FENCE=ring ",
    }.items():
        assert re.search(words, commands[name]), name
    assert "--mpi=pmix" not in commands["ddp-srun-2"]
    monkeypatch.setenv("SLURM_MPI_TYPE", "cray_shasta")
    assert "--mpi=pmix" not in plan.runs()[0].command(Path("x"))


# Orders


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_over_the_blocks_nothing_is_oftener_early_than_another(number):
    things = list("abcde"[:number])
    orders = [balanced(things, block, "a seed") for block in range(1, 2 * number + 1)]
    places = Counter((thing, place) for order in orders for place, thing in enumerate(order))
    assert set(places.values()) == {2}
    neighbours = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(neighbours.values()) == {2}
    for forwards, backwards in zip(orders[::2], orders[1::2], strict=True):
        assert forwards == backwards[::-1]
    assert orders[:4] == [balanced(things, block, "a seed") for block in (1, 2, 3, 4)]
    assert any(balanced(things, 1, seed) != orders[0] for seed in range(20))


def test_what_is_judged_stands_side_by_side_and_alternates():
    """With several numbers of workers, too: a fixed order once had one engine first throughout."""
    pairs = (("ddp-mpirun", "ddp-torchrun"), ("horovod-gloo", "horovod-mpi"))
    plan = Plan(
        configurations=("ddp-torchrun", "horovod-mpi", "ddp-mpirun", "horovod-gloo"),
        judged_pairs=pairs,
        workers=(1, 2, 4),
        measure="runs",
        blocks=6,
    )
    blocks = [plan.block(number) for number in range(1, 7)]
    for workers, (first, second) in itertools.product(plan.workers, pairs):
        orders = [[r.configuration.name for r in block if r.workers == workers] for block in blocks]
        assert all(abs(o.index(first) - o.index(second)) == 1 for o in orders)
        assert sum(o.index(first) < o.index(second) for o in orders) == 3
    for block in blocks:
        assert len(list(itertools.groupby(run.workers for run in block))) == 3


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize(
    ("number", "pairs"),
    [
        (2, []),
        (3, []),
        (4, []),
        (4, [(0, 1), (2, 3)]),
        (4, [(0, 1), (1, 2), (2, 3)]),
        (5, [(0, 1), (2, 3), (3, 4)]),
        (6, [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_no_side_of_a_pair_is_oftener_at_the_edge_of_a_block_than_the_other(number, pairs, null):
    """There a side has two turns in a row."""
    names = list(CONFIGURATIONS)[:number]
    judged = tuple((names[first], names[second]) for first, second in pairs)
    plan = Plan(
        configurations=names, judged_pairs=judged, null=null, order_seed=4, control=Share(0.03)
    )
    orders = [
        [run.configuration.name for run in plan.in_order(block, "", 2)] for block in range(1, 721)
    ]
    at_the_edge = Counter(name for order in orders for name in (order[0], order[-1]))
    followers = Counter(pair for order in orders for pair in itertools.pairwise(order))
    for first, second in plan.pairs():
        assert at_the_edge[first] == at_the_edge[second] > 0
        assert followers[first, second] == followers[second, first] > 0


# Small parts


def test_varied_settings_bear_the_names_of_the_configuration():
    flags = "-b 8 --no-cuda --weight_decay=1 --static-graph --lr-min -1 --opt-level O1"
    own = OwnConfiguration("ddp-torchrun", Words(flags.split()))
    plan = Plan(configurations=("ddp-torchrun", "own"), configuration={"own": own})
    assert plan.varied == ["batch_size", "cuda", "wd", "static_graph", "lr_min", "opt_level"]
    assert "precision" in FLAGS["opt_level"].decides  # a run records the precision


def test_flags_that_the_trainers_no_longer_know_are_read_but_do_not_train() -> None:
    """Those of a recorded plan: its report needs its runs, but not their settings."""
    flags = Words(("--of-an-older-version", "3", "--seed=5"))
    plan = Plan(trainer_arguments=flags, global_batch_size=64, global_learning_rate=0.1)
    check_plan(plan)
    first, *_ = plan.runs()
    assert first.seed is None
    with pytest.raises(UserError, match=r"flags: .*\n +--of-an-older-version 3: leave it out"):
        _ = first.config


def test_a_pair_may_have_a_margin_of_its_own() -> None:
    words = ["--configurations", "ddp-torchrun", "horovod-mpi", "horovod-gloo"]
    plan = plan_of(*words, "--margins", "ddp-torchrun:horovod-mpi=1%")
    assert [plan.margin_of(pair) for pair in plan.pairs()] == [0.01, 0.03]
    with pytest.raises(UserError, match="--margins horovod-mpi:horovod-gloo: there is no such"):
        plan_of(*words, "--margins", "horovod-mpi:horovod-gloo=1%")


RECORDED = sorted((ROOT / "results").glob("*/*/record.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_recorded_plan_reads_back_with_its_runs(path: Path, tmp_path: Path) -> None:
    plan, copy = Record.open(path.parent).plan, tmp_path / "plan.json"
    copy.write_text(json.dumps(plan_table(plan)))  # as the report's page has it
    asked = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    asked |= {"left_out": (), "blocks_there": 0}
    asked |= {"order_seed": None}  # who repeats a comparison draws another order
    if plan.blocks is not None:
        asked |= {"until_interval": 0.015, "minutes": 10.0}
    for file in (path, copy):
        again = make_plan(parse_options([str(file)], ""))
        assert again == Plan(**asked | {"plan_file": str(file)})


@pytest.mark.parametrize(
    ("kept", "told"),
    [(-9, "line 14 is cut off or damaged; .*: head -n 13 "), (99, "line 1 is .*; give another ")],
)
def test_a_cut_off_record_tells_which_lines_hold_a_plan(tmp_path, kept, told):
    whole = ROOT / "results/xeon-amx-2-cores/2026-11-25-stock-1/record.jsonl"
    path = tmp_path / "record.jsonl"
    path.write_text(whole.read_text()[:kept])
    with pytest.raises(UserError, match=f"record.jsonl: {told}"):
        read_plan_file(str(path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"workers": [1, "2"]}, "workers[1] = '2': expected `int`"),
        ({"created_utc": None}, "object missing required field `created_utc`"),
        ({"configurations": ["ddp-torchrun", "mine"]}, "--configurations mine: there is no such"),
        ({"pairs": [["ddp-torchrun"]]}, "pairs[0] = ['ddp-torchrun']"),
        ({"case": {"a": {"flags": 3}}}, "case[...].flags"),
        ({"blocks": 10**12}, "blocks = 1000000000000"),
        ({"format": 3}, "format is 3, and this version reads 5"),
        ({"environment": None}, "object missing required field `environment`"),
        (
            {"question": "Which?\nDDP won."},
            "question = 'Which?\\nDDP won.': holds a control character",
        ),
        ({"case": {"A\x1b[2J": {}}}, "'A"),
    ],
)
def test_a_plan_that_cannot_be_read_names_its_field(change, told):
    table = builtins_of(plan_record(Plan(), "")) | change
    table = {key: value for key, value in table.items() if value is not None}
    with pytest.raises(UserError, match=re.escape(told)):
        plan_of_record(table)


@pytest.mark.parametrize(
    "name", ["data-parallel", "pipeline", "rpc-pipeline", "parameter-server", "ddp-with-rpc"]
)
def test_rungs_that_share_a_batch_or_have_servers_take_no_turns(name, here):
    with pytest.raises(UserError, match=f"^{name}: some of its ranks do not train"):
        plan_of("--configurations", name, "fsdp")
    plan_of("--configurations", name, "fsdp", "--measure", "runs")


# Hosts and their slots, however the user names them


HOSTFILES = sorted((ROOT / "hostfiles").glob("*.txt"))


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=4\nnode2 slots=2\n",
        "# the cluster\nnode1 slots=4\n\nnode2   slots = 2  # small\n",
        "node1:4\nnode2:2",  # MPICH
    ],
)
def test_every_form_of_a_hostfile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    words = ("--configurations", "ddp-mpirun", "--hostfile", str(path), "--workers", "6")
    assert plan_of(*words).hosts == read_hostfile(path) == "node1:4,node2:2"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node1 slots=4\nnode2 slots=x", "'node2:x' does not name one host"),
        ("-F/home/me/ssh_config slots=2", "'-F/home/me/ssh_config:2' does not name one host"),
        ("node1 slots=0", "node1:0"),
        ("node1", "'node1'"),
        ("node1 slots=2 max_slots=4", "max_slots"),
        ("node1:4:2", "node1:4:2"),
        ("\n# nothing\n", "nothing"),
        ("node1:2\nnode1:2", "each host once"),
    ],
)
def test_a_hostfile_that_cannot_be_meant(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=f"--hostfile {path}:.*{told}"):
        read_hostfile(path)


def test_hosts_are_filled_in_their_order() -> None:
    assert read_hosts("a:4, b:2") == {"a": 4, "b": 2}
    assert placement(5, "a:4,b:2") == {"a": 4, "b": 1}
    assert placement(4, "a:4,b:2") == {"a": 4}
    assert used_hosts(4, "a:4,b:2") == "a:4"
    assert used_hosts(5, "a:4,b:2") == "a:4,b:2"
    assert most_on_a_host(5, "a:4,b:2") == 4
    assert most_on_a_host(3, "a:4,b:2") == 3
    assert most_on_a_host(3, None) == 3


def test_what_runs_here() -> None:
    assert is_only_here(8, None)
    assert is_only_here(2, "localhost:2,elsewhere:2")
    assert not is_only_here(3, "localhost:2,elsewhere:2")


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("node0.cluster", True),
        ("node0", True),  # its short name
        ("login", True),  # another name for its address
        ("192.0.2.7", True),
        ("127.0.1.1", True),
        ("node0.elsewhere", False),
        ("node1", False),
        ("192.0.2.8", False),
        ("nowhere", False),
        ("a..b", False),
    ],
)
def test_this_host_by_each_of_its_names(
    host: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node0.cluster")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node0.cluster")
    own = [SimpleNamespace(address="192.0.2.7")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    known = {"login": "192.0.2.7", "node0.elsewhere": "192.0.2.8", "node1": "192.0.2.8"}
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: real(known.get(name, name), port))
    assert is_here.__wrapped__(host) is here


def test_hosts_of_a_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = r'[ "$*" = "show hostnames rack[1-3]" ] && printf "rack1\nrack2\nrack3\n"'
    monkeypatch.setenv("SLURM_JOB_NODELIST", "rack[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2),2")
    write_program(tmp_path / "scontrol", names)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_hosts() == "rack1:4,rack2:4,rack3:2"
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")  # another job's
    with pytest.raises(UserError, match=r"names 3 nodes, but SLURM_TASKS_PER_NODE=4\(x2\) is of 2"):
        slurm_hosts()
    write_program(tmp_path / "scontrol", "echo Invalid hostlist >&2; exit 1")
    with pytest.raises(UserError, match=r"rack\[1-3\].*Invalid hostlist"):
        slurm_hosts()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="No such file or directory: 'scontrol'"):
        slurm_hosts()
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    with pytest.raises(UserError, match="with --ntasks-per-node"):
        slurm_hosts()


@pytest.mark.parametrize("path", HOSTFILES, ids=lambda path: path.name)
def test_ready_hostfiles_are_read_by_horovod_and_by_us(path: Path) -> None:
    """Horovod's reader dies on comments and blank lines; Open MPI's is tested by the cluster
    tests."""
    name = "horovod.runner.common.util.hosts"
    horovod_hosts = pytest.importorskip(name, reason=needs.HOROVOD)
    assert horovod_hosts.parse_host_files(str(path)) == read_hostfile(path)


def test_mpirun_never_asks_for_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    name, ours = "OMPI_MCA_plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10"
    assert set_variables()[name] == ours
    monkeypatch.setenv(name, "-p 2222")
    assert set_variables()[name] == ssh_flags() == f"-p 2222 {ours}"
    assert ssh_words("a", "true") == ["ssh", "-p", "2222", *ours.split(), "--", "a", "true"]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("ssh: Could not resolve hostname nod0: Name or service not known", "/etc/hosts"),
        ("Host key verification failed.", "log in once"),
        ("root@node1: Permission denied (publickey).", "ssh-copy-id node1"),
        ("ssh: connect to host node1 port 22: Connection refused", "start sshd on node1"),
        ("ssh: connect to host node1 port 22: Connection timed out", "firewall"),
        ("ssh: connect to host node1 port 22: No route to host", "node1 is down"),
        ("something else", "ssh -v node1"),
    ],
)
def test_what_ssh_says_has_a_remedy(message: str, remedy: str) -> None:
    assert remedy in ssh_remedy("node1", message)
