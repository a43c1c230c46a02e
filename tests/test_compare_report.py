"""The report: what it says, what it refuses to say, and that it asks nothing of the machine."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs
from records import a_plan, make_turns
from test_compare_records import edit, edit_fingerprint, make_comparison, make_square

from compare import report
from compare.evidence.records import load_comparison
from compare.evidence.rows import speed_rows, training_rows
from compare.evidence.verdicts import judge
from compare.page.html import render_page
from compare.page.report import Report
from compare.plan.configurations import Configuration
from compare.plan.options import make_plan, parse_options
from compare.plan.plan import Plan, Words
from compare.plan.plan_file import plan_words
from compare.plan.record import plan_record, read_plan, write_plan

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("world_size", "batch_size", "batches_per_allreduce", "precision", "arch")


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    return make_comparison(tmp_path_factory.mktemp("template") / "comparison")


@pytest.fixture
def square(tmp_path):
    """Two engines over two transports each, measured by turns."""
    return make_square(tmp_path / "compare-square")


@pytest.fixture
def folder(tmp_path, template):
    return Path(shutil.copytree(template, tmp_path / "runs/compare-20261121-120000"))


def written(arguments: list[str], capsys) -> str:
    assert report.main(arguments) == 0
    return capsys.readouterr().out


def report_text(folder: Path, capsys) -> str:
    return written([str(folder), "--no-html"], capsys)


def csv_lines(folder: Path, capsys) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(written([str(folder), "--csv"], capsys))))


def page_of(folder: Path) -> str:
    return render_page(Report(load_comparison(folder)))


def test_the_verdict_names_the_faster_one(folder, capsys):
    text = report_text(folder, capsys)
    assert re.search(
        r"At 2 workers DDP \(torchrun, Gloo\) trained 1\.\d+ times as fast as Horovod "
        r"\(horovodrun, MPI\), 95 % interval 1\.\d+ to 1\.\d+, 3 blocks\.",
        text,
    )
    assert "Final weights bit-equal in 3 of 3 blocks." in text
    verdict = judge(load_comparison(folder))[1]
    assert verdict.speed.low < 1.1 < verdict.speed.high or abs(verdict.speed.ratio - 1.1) < 0.03


@pytest.mark.parametrize("field", CHECKED)
def test_a_fingerprint_that_contradicts_the_run_makes_it_unreadable(folder, capsys, field):
    edit_fingerprint(folder / "block-2/horovod-mpi-2", field, "something else")
    text = report_text(folder, capsys)
    assert re.search(
        rf"block-2/horovod-mpi-2: unreadable: .*summary\.json: {field} .*'something else'",
        text,
    )
    assert "At 1 worker DDP (torchrun, Gloo) trained" in text


def test_a_fingerprint_field_that_one_engine_lacks_forbids_the_verdict(folder, capsys):
    edit_fingerprint(folder / "block-1/ddp-torchrun-1", "new_policy", "on")
    assert "new_policy: on (ddp-torchrun), absent (horovod-mpi)" in report_text(folder, capsys)


def test_unequal_weights_are_told_with_the_largest_gap_of_the_losses(folder, capsys):
    run = folder / "block-2/horovod-mpi-2"
    edit(run / "summary.json", weights_sha256="f" * 64)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"step": 17,' in line)
    line = json.loads(lines[at])
    lines[at] = json.dumps({**line, "loss": line["loss"] + 0.25})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = report_text(folder, capsys)
    assert "bit-equal in only 2 of 3 blocks" in text
    assert "differ by at most 0.25 (step 17 of 72, block 2)" in text
    assert "2 of 3 equal" in text


def test_failed_and_missing_runs_are_said(folder, capsys):
    for file in ("summary.json", "outcome.json"):
        (folder / "block-3/horovod-mpi-1" / file).unlink()
    (folder / "block-2/horovod-mpi-2.failed-1").mkdir()
    text = report_text(folder, capsys)
    assert "block-3/horovod-mpi-1: not run" in text and "2 of 3" in text
    assert "horovod-mpi-2.failed-1: failed, and was run again" in text
    assert "too few for an interval" in text  # two blocks are left of three


def test_a_ladder_says_what_each_rung_costs_and_whether_it_trains_the_same(tmp_path, capsys):
    names = ("ddp-torchrun", "zero-optimizer", "data-parallel", "parameter-server")
    folder = make_comparison(tmp_path / "compare-1", a_plan(configurations=names, workers=(2,)))
    for run in folder.glob("block-*/*"):
        edit(run / "summary.json", network_bytes_per_step=2.5e6)
    for rung in folder.glob("block-*/data-parallel-2"):
        edit(rung / "summary.json", world_size=1, weights_sha256="c" * 64)
        edit(rung / "environment.json", world_size=1)
    for server in folder.glob("block-*/parameter-server-2"):
        edit(server / "summary.json", rung={"staleness": 0.75, "largest_staleness": 2})
    rows = json.loads(written([str(folder), "--json"], capsys))["trainings"]
    assert {row["network_bytes_per_step"] for row in rows} == {2.5e6}
    assert [row["has_firsts_weights"] for row in rows] == [True, True, False, True]
    assert [row["staleness"] for row in rows] == [None, None, None, 0.75]
    text = report_text(folder, capsys)
    assert re.search(r"parameter-server +2 +400 .* 2\.5 +0\.75 +equal", text)
    assert "bubble, %" not in text, "none of them is a pipeline"
    edit(folder / "block-1/ddp-torchrun-2/outcome.json", status="failed")
    unknown = training_rows(load_comparison(folder))[1]
    assert unknown.has_firsts_weights is None  # in block 1 there is nothing to compare with


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "does not exist"), (".", "holds no plan.json"), ("failed", "(12 failed); see")],
)
def test_nothing_to_report_is_one_message_and_exit_code_1(tmp_path, template, name, words, capsys):
    for path in Path(shutil.copytree(template, tmp_path / "a/failed")).glob(
        "block-*/*/outcome.json"
    ):
        edit(path, status="failed", exit_code=1)
    assert report.main([str(tmp_path / ("a/failed" if name == "failed" else name))]) == 1
    said = capsys.readouterr()
    assert said.out == "" and words in said.err and len(said.err.splitlines()) == 1


BLOCKER = """
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
sys.argv = ["report.py", *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def run_blocked(blocked: set[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    program = BLOCKER.format(
        blocked=blocked, arguments=arguments, script=str(ROOT / "compare/report.py")
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_report_needs_no_torch_no_horovod_no_tyro_and_its_table_no_jinja(folder):
    blocked = {"torch", "torchvision", "horovod", "mpi4py", "tyro", "matplotlib"}
    ended = run_blocked(blocked, [str(folder)])
    assert ended.returncode == 0, ended.stderr
    assert run_blocked({"jinja2"}, [str(folder), "--no-html"]).returncode == 0
    ended = run_blocked({"jinja2"}, [str(folder)])
    assert ended.returncode == 1
    assert "--no-html" in ended.stderr and "Traceback" not in ended.stderr


def test_the_page_asks_nothing_of_the_outside_and_keeps_its_order(folder):
    text = page_of(folder)
    asking = r"(?:src|href|data|srcset|action|poster|background)=|<(?:link|iframe|img|object|embed)"
    assert not re.findall(rf"<[^>]*\s{asking}", text)
    assert not any(word in text for word in ("@import", "fetch(", "XMLHttpRequest", "WebSocket"))
    assert "://" not in text
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Results", "Plots", "What was equal", "Commands", "Environment", "How to reproduce",
        "What this does not show",
    ]  # fmt: skip
    assert text.index("times as fast as") < text.index("What was equal")
    plots = re.findall(r"<svg[^>]*>", text)
    assert len(plots) == 5
    assert all('role="img"' in plot and re.search('aria-label="[^"]{30}', plot) for plot in plots)


def test_imagenets_hours_are_told_of_imagenets_images_alone(folder, capsys):
    assert "90 epochs" not in written([str(folder), "--price-per-hour", "2", "--no-html"], capsys)
    for path in folder.glob("block-*/*/summary.json"):
        edit_fingerprint(path.parent, "num_classes", 1000)
        edit(path.parent / "config.json", train_crop_size=176)
    text = written([str(folder), "--price-per-hour", "2", "--no-html"], capsys)
    assert re.search(r"90 +90\n.*epochs, +epochs,\n.*hours +cost", text)
    for path in folder.glob("block-*/*/config.json"):
        edit(path, train_crop_size=20)
    assert "90 epochs" not in written([str(folder), "--markdown"], capsys)


def test_what_is_unequal_is_red_on_the_page(folder):
    assert 'class="unequal"' not in page_of(folder)
    edit_fingerprint(folder / "block-2/horovod-mpi-2", "threads", 7)
    text = page_of(folder)
    assert re.search(r'<tr class="unequal"><th scope="row">threads</th>.*7 \(horovod-mpi\)', text)
    assert '<p class="alarm">At 2 workers no verdict' in text


def test_hostile_text_is_escaped(folder):
    edit(folder / "block-1/ddp-torchrun-1/environment.json", cpu_model="<script>alert(1)</script>")
    (folder / "block-1/ddp-torchrun-1/command.txt").write_text("torchrun <b>&</b>\n")
    text = page_of(folder)
    assert "<b>" not in text and text.count("<script") == 1  # the page's own


def test_a_thousand_runs_stay_under_a_megabyte(tmp_path):
    names = ("ddp-torchrun", "ddp-mpirun", "horovod-mpi", "horovod-gloo", "horovod-mpirun")
    plan = a_plan(configurations=names, workers=(1, 2, 4, 8), phase_steps=0, blocks=50)
    assert len(page_of(make_comparison(tmp_path / "compare-1", plan))) < 1_000_000


def test_csv_holds_a_line_for_each_planned_run_with_its_units(folder, capsys):
    edit(folder / "block-1/ddp-torchrun-2/outcome.json", status="failed", exit_code=3)
    lines = csv_lines(folder, capsys)
    assert len(lines) == 12
    one = next(line for line in lines if line["folder"] == "block-2/horovod-mpi-1")
    summary = json.loads((folder / "block-2/horovod-mpi-1/summary.json").read_text())
    assert float(one["images_per_second"]) == summary["images_per_second"]
    assert float(one["forward_seconds_per_step"]) == summary["phases"]["forward_seconds"]
    assert (one["block"], one["workers"], one["gpu_watts"]) == ("2", "1", "")
    failed = next(line for line in lines if line["folder"] == "block-1/ddp-torchrun-2")
    assert (failed["status"], failed["exit_code"], failed["images_per_second"]) == (
        "failed", "3", "",
    )  # fmt: skip


def test_markdown_fits_into_an_issue(folder, capsys):
    edit_fingerprint(folder / "block-2/horovod-mpi-2", "batch_norm", "a|b <i>c</i> *d*")
    text = written([str(folder), "--markdown"], capsys)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    assert "- At 1 worker DDP (torchrun, Gloo) trained" in text
    assert "a\\|b \\<i>c\\</i> \\*d\\*" in text
    assert "What this does not show" in text and "GPUs." in text


def test_json_is_json_even_of_a_training_that_diverged(folder, capsys):
    edit(folder / "block-1/ddp-torchrun-1/summary.json", loss=float("nan"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = written([str(folder), "--json"], capsys)
    value = json.loads(text, parse_constant=refuse)
    assert value["phases"] and value["trainings"] and len(value["runs"]) == 12
    assert value["verdicts"][0]["decision"] == "faster" and value["verdicts"][0]["speed"]["low"] > 1
    assert not (folder / "report.html").exists()
    assert [row["configuration"] for row in value["phases"] if row["is_difference"]] == [
        "ddp-torchrun − horovod-mpi", "ddp-torchrun − horovod-mpi",
    ]  # fmt: skip


def test_formats_go_to_files_beside_the_table(folder, tmp_path, capsys):
    names = {"--csv": "a.csv", "--markdown": "a.md", "--json": "deep/a.json"}
    flags = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    text = written([str(folder), *flags], capsys)
    assert "ddp-torchrun" in text and "a.csv" in text
    assert all((tmp_path / name).stat().st_size > 500 for name in names.values())
    assert not (folder / "report.html").exists()  # it was not among what was asked for
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--csv", "--json"], "cannot both go to the terminal"),
        (["--json", "."], "is a folder"),
        (["--svg", "-"], "give it a FOLDER"),
        (["--html", "page.html", "--no-html"], "exclude each other"),
        (["--price-per-hour", "nan"], "write a number"),
        (["--price-per-hour", "-1"], "write a number"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(folder, arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main([str(folder), *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_plots_become_files_that_are_well_formed(folder, tmp_path, capsys):
    written([str(folder), "--svg", str(tmp_path / "plots")], capsys)
    files = sorted((tmp_path / "plots").iterdir())
    for path in files:
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.get("aria-label", "")) > 30
        assert "var(" not in path.read_text() and "currentColor" not in path.read_text()
    assert {path.stem for path in files} == {
        "verdict", "throughput", "drift", "step-breakdown", "time-to-accuracy",
    }  # fmt: skip


def test_two_comparisons_stand_side_by_side_without_a_verdict(folder, tmp_path, capsys):
    other = make_comparison(tmp_path / "after", a_plan(workers=(2,)), ratio=1.5)
    for path in other.glob("*/*/environment.json"):
        edit(path, cpu_model="A Processor 9001")
    page = tmp_path / "both.html"
    text = written([str(folder), str(other), "--html", str(page)], capsys)
    ours, theirs = (
        next(r for r in speed_rows(load_comparison(f)) if (r.configuration, r.workers) == (
            "ddp-torchrun", 2)) for f in (folder, other)
    )  # fmt: skip
    line = next(line for line in text.splitlines() if re.match(r"ddp-torchrun +2", line))
    assert f"{theirs.images_per_second / ours.images_per_second:.3f}" in line
    assert re.search(r"ddp-torchrun +1 +[\d,]+ +– +–", text)  # only the first has one worker
    assert "unpaired" in text and "there is no verdict" in text
    assert re.search(r"cpu_model +A Processor 9000 +A Processor 9001", text)
    assert re.search(r"B: .*after\n\nAt 2 workers DDP", text)  # each one's own verdicts stay
    assert "unpaired" in page.read_text() and "A Processor 9001" in page.read_text()
    value = json.loads(written([str(folder), str(other), "--json"], capsys))
    assert len(value["comparisons"]) == 2 and len(value["side_by_side"]) == 4


def test_without_a_comparison_the_recorded_one_is_shown_and_said(
    tmp_path, template, monkeypatch, capsys
):
    recorded = tmp_path / "results/a-machine/2026-11-21-engines"
    shutil.copytree(template, recorded)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = written([], capsys)
    assert text.startswith("Not measured here")
    assert "make compare" in text and "2026-11-21-engines" in text and "trained 1." in text
    assert not (recorded / "report.html").exists()  # a record stays as it is
    own = shutil.copytree(template, tmp_path / "elsewhere/runs/compare-20261122-120000")
    assert "Not measured here" not in written([], capsys)
    assert (own / "report.html").exists()


def test_warnings_stand_by_the_verdict_unless_no_verdict_uses_the_run(folder, capsys):
    edit(folder / "plan.json", warnings=["Horovod was built without NCCL"])
    edit(folder / "block-2/horovod-mpi-2/outcome.json", other_load=1.7)
    edit(folder / "phases/horovod-mpi-2/outcome.json", other_load=1.9)
    text, page = report_text(folder, capsys), page_of(folder)
    aside = "Runs that do not affect the speed verdicts"
    for words in ("Horovod was built without NCCL", "other processes kept 1.7"):
        assert words in text and text.index(words) < text.index(aside)
        assert page.index(words) < page.index("<h2>Results")
    assert text.index(aside) < text.index("other processes kept 1.9")
    assert page.index("<h2>Results") < page.index(aside) < page.index("other processes kept 1.9")


def test_what_is_measured_by_turns_stands_apart_from_whole_trainings(square, capsys):
    text, page = report_text(square, capsys), page_of(square)
    speed, whole = text.index("Speed, by turns"), text.index("Whole trainings, one each")
    assert text.index("Engine and transport, 2 workers") < speed < whole
    assert re.search(r"ddp-torchrun +2 +\d+ \(\d+–\d+\) .* 6\n", text)
    assert re.search(r"DDP / Horovod( +\d\.\d{3} \(\d\.\d{3}–\d\.\d{3}\)){3}", text)
    assert text.splitlines()[-1] == "At 2 workers, not beaten: DDP over MPI."
    assert page.index("not beaten: DDP over MPI") < page.index("Engine and transport") < page.index(
        "What was equal")  # fmt: skip
    assert "Speed over the experiment" in page and "by turns" in page
    lines = csv_lines(square, capsys)
    turns = [line for line in lines if line["measured_by"] == "turn"]
    assert len(turns) == 6 * 6 * 4 and len(lines) == len(turns) + 4
    assert sum(line["counts"] == "0" for line in turns) == 6 * 4  # others kept the cores busy


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        (("faster",), ["At 2 workers, not beaten: a."]),
        (("slower",), ["At 2 workers, not beaten: b."]),
        (("equal",), []),
        (("undecided",), []),
        (("faster", "undecided"), ["At 2 workers, not beaten: a or c."]),
        (("faster", "slower"), ["At 2 workers, not beaten: a or c."]),
        (("undecided", "faster"), ["At 2 workers, not beaten: a or b."]),
        (("faster", "faster", "slower"), ["At 2 workers, not beaten: none."]),
    ],
)
def test_what_was_not_beaten_is_listed(folder, decisions, words):
    """Of a against b, b against c, and a against c."""
    whole = judge(load_comparison(folder))[1]
    report = Report(load_comparison(folder))
    report.verdicts = [
        replace(
            whole, first=first, second=second, first_label=first, second_label=second,
            decision=decision,
        )
        for (first, second), decision in zip(("ab", "bc", "ac"), decisions, strict=False)
    ]  # fmt: skip
    assert report.not_beaten == words


CASES = a_plan(
    configurations=("ddp-torchrun", "tuned"),
    defined=(Configuration("tuned", "horovod", "horovodrun", "gloo", flags=("--fp16-allreduce",),
                           environment={"HOROVOD_CYCLE_TIME": "1"}),),
    cases={"resnet50": ("--arch", "resnet50"), "vgg16": ("--arch", "vgg16")},
    trainer_arguments=("--data", "synthetic"), phase_steps=0, margin=0.02, seed=7,
    question="What do 16 bits on the wire bring?",
)  # fmt: skip


def test_cases_are_told_apart(tmp_path, capsys):
    folder = make_comparison(tmp_path / "compare-1", CASES)
    text, page = report_text(folder, capsys), page_of(folder)
    assert re.search(r"^resnet50 +tuned +2 ", text, re.MULTILINE)
    assert text.index("resnet50, 2 workers:") < text.index("vgg16, 1 worker:")
    assert "Training throughput, resnet50" in page and "Training throughput, vgg16" in page
    assert CASES.question in text and CASES.question in page
    assert {line["case"] for line in csv_lines(folder, capsys)} == {"resnet50", "vgg16"}


@pytest.mark.parametrize("plan", [
    a_plan(),
    CASES,
    a_plan(workers=(2,), null=True, blocks=8),
    a_plan(configurations=("ddp-torchrun", "ddp-mpirun", "horovod-mpi"),
         judged_pairs=(("ddp-mpirun", "horovod-mpi"),), trainer_arguments=("--epochs", "1")),
    a_plan(global_batch_size=64, global_learning_rate=0.1, until_interval=0.02, blocks=None),
    Plan(minutes=7.5, full_runs=2),
    structs.replace(CASES, named_hosts="a:1,b:1", network_interface="eth0", phase_steps=40,
                    timeout=60),
])  # fmt: skip
def test_the_command_to_reproduce_makes_the_same_plan(plan, tmp_path):
    # What run.py adds to every plan's arguments stands in its record, too.
    arguments = Words((*plan.trainer_arguments, "--threads", "1", "--keep-checkpoints", "0"))
    plan = structs.replace(plan, trainer_arguments=arguments, question=None)
    write_plan(tmp_path / "plan.json", plan_record(plan, "2026-11-21T12:00:00+00:00"))
    record = read_plan(tmp_path / "plan.json")
    again = make_plan(parse_options(plan_words(record), "about\n\nexamples"))
    assert plan_record(again, "2026-11-21T12:00:00+00:00") == record


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Of two runs: what a page is made of, in a fifth of the time."""
    return make_comparison(
        tmp_path_factory.mktemp("small") / "runs", a_plan(workers=(1,), blocks=1)
    )


@pytest.fixture(scope="module")
def small_turns(tmp_path_factory):
    plan = a_plan(workers=(1,), blocks=1, phase_steps=0)
    folder = make_comparison(tmp_path_factory.mktemp("turns") / "runs", plan)
    return make_turns(folder, {"ddp-torchrun": 100, "horovod-mpi": 95}, blocks=1, rounds=2)


RUN = "block-1/ddp-torchrun-1"
ANY_SHAPE = [
    None, "text", {"a": None},
    *(pytest.param(value, marks=pytest.mark.full) for value in (-1, 1e400, [], {}, [None])),
]  # fmt: skip


@pytest.mark.parametrize("value", ANY_SHAPE)
@pytest.mark.parametrize(("kind", "file"), [
    ("small", f"{RUN}/summary.json"), ("small", f"{RUN}/environment.json"),
    ("small", f"{RUN}/config.json"), ("small", "plan.json"),
    ("small_turns", "turns/1-workers/block-1/block.json"),
])  # fmt: skip
def test_a_record_of_any_shape_is_no_traceback(kind, file, value, request, capsys):
    """Each field in turn: the report is made, or one message says which file is to blame."""
    folder = request.getfixturevalue(kind)
    path = folder / file
    original = path.read_text()
    for field in json.loads(original):
        edit(path, **{field: value})
        if report.main([str(folder)]) == 1:
            error = capsys.readouterr().err
            assert len(error.splitlines()) == 1, field
        path.write_text(original)
