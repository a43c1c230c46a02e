"""The report: what it says, what it refuses to say, and that it asks nothing of the machine."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from launching import read_json
from records import a_plan, drop_runs, edit, fail_run, lines_of, write_lines
from test_compare_records import edit_fingerprint, make_comparison, make_square

from compare import report
from compare.evidence.goals import Goal
from compare.evidence.paired import Estimate
from compare.evidence.record import read_comparison
from compare.evidence.rows import speed_rows, training_rows
from compare.evidence.stopping import reason_to_end
from compare.page.chart import INK, Plot, shortened
from compare.page.formats import as_page
from compare.page.headline import OF_ENGINES, headline, headline_of_occasions
from compare.page.plots import draw_plots
from compare.page.report import Report
from compare.plan.configurations import Configuration

ROOT = Path(__file__).resolve().parent.parent


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
    return as_page([Report(read_comparison(folder))])


def are_in_order(text: str, *words: str) -> bool:
    """Whether all these stand in the text, each first behind the ones before."""
    places = [text.index(one) for one in words]
    return places == sorted(places)


def test_unequal_weights_are_told(folder, capsys):
    text = report_text(folder, capsys)
    assert "bit-equal" not in text
    assert "The trainings of each pair ended with identical weights (3 blocks)." in text
    edit(folder / "block-2/horovod-mpi-2/summary.json", weights_sha256="f" * 64)
    text = report_text(folder, capsys)
    for words in ("bit-equal in only 2 of 3 blocks", "2 of 3 equal", "of 1 of 2 pairs ended"):
        assert words in text


def fail_first(folder: Path, place: str) -> None:
    """Have a run failed once before it was made."""
    failed = {"place": place, "block": 1, "outcome": {"status": "failed"}}
    failed |= {"folder": f"{place}.failed-1", "output": "an error"}
    first, *others = lines_of(folder)
    write_lines(folder, [first, {"line": "failure", **failed}, *others])


def test_failed_and_missing_runs_are_said(folder, capsys):
    drop_runs(folder, "block-3/horovod-mpi-1")
    fail_first(folder, "block-2/horovod-mpi-2")
    text = report_text(folder, capsys)
    for words in (
        "block-3/horovod-mpi-1: not run",
        "2 of 3",
        "nothing is decided between DDP over Gloo and Horovod over MPI yet",
        "horovod-mpi-2: failed, and was run again",
    ):
        assert words in text


def test_a_ladder_says_what_each_rung_costs_and_whether_it_trains_the_same(tmp_path, capsys):
    names = ("ddp-torchrun", "zero-optimizer", "data-parallel", "parameter-server")
    folder = make_comparison(tmp_path / "compare-1", a_plan(configurations=names, workers=(2,)))
    own = {
        "data-parallel": {"world_size": 1, "weights_sha256": "c" * 64},
        "parameter-server": {"rung": {"staleness": 0.75, "largest_staleness": 2}},
    }
    lines = lines_of(folder)
    for line in lines[1:]:
        fields = own.get(Path(line["place"]).name.removesuffix("-2"), {})
        line["summary"].update(network_bytes_per_step=2.5e6, **fields)
        line["environment"].update(world_size=fields.get("world_size", 2))
    write_lines(folder, lines)
    rows = json.loads(written([str(folder), "--json"], capsys))["trainings"]
    assert {row["network_bytes_per_step"] for row in rows} == {2.5e6}
    assert [row["weights"] for row in rows] == ["equal", "equal", "0 of 3 equal", "equal"]
    assert [row["staleness"] for row in rows] == [None, None, None, 0.75]
    text = report_text(folder, capsys)
    assert re.search(r"parameter-server +2 +400 .* 2\.5 +0\.75", text)
    assert "bubble, %" not in text, "none of them is a pipeline"
    fail_run(folder, "block-1/ddp-torchrun-2")
    after = training_rows(read_comparison(folder))[2]
    assert after["weights"] == "0 of 2 equal"  # in block 1 there is nothing to compare with


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "does not exist"),
        (".", "holds no record.jsonl"),
        ("failed", "nothing was measured: block-3/horovod-mpi-1 failed; see"),
    ],
)
def test_nothing_to_report_is_one_message_and_exit_code_1(tmp_path, template, name, words, refusal):
    if name == "failed":
        folder = shutil.copytree(template, tmp_path / name)
        for line in lines_of(folder)[1:]:
            fail_run(folder, line["place"], exit_code=1)
    assert words in refusal(report.main, [str(tmp_path / name)], code=1)


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


def test_the_report_needs_no_torch_and_no_horovod(folder):
    blocked = {"torch", "torchvision", "horovod", "mpi4py", "matplotlib"}
    ended = run_blocked(blocked, [str(folder)])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "missing", ["jinja2", "msgspec", "scipy", "numpy", "tabulate", "tyro", "psutil"]
)
def test_a_missing_package_is_one_line_that_says_what_to_install(folder, missing):
    ended = run_blocked({missing}, [str(folder)])
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    _, remedy = line.split(f"this needs {missing}: pip install ")
    assert missing in remedy or missing == "numpy"  # which scipy brings


def test_the_page_asks_nothing_of_the_outside_and_keeps_its_order(folder):
    text = page_of(folder)
    asking = r"(?:src|href|data|srcset|action|poster|background)=|<(?:link|iframe|img|object|embed)"
    assert not re.findall(rf"<[^>]*\s{asking}", text)
    assert not re.findall("@import|fetch\\(|XMLHttpRequest|WebSocket|://", text)
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Results",
        "Plots",
        "Learning curves",
        "What was equal",
        "Commands",
        "Environment",
        "How to reproduce",
        "What this does not show",
    ]
    assert are_in_order(text, "times as fast as", "What was equal")
    plots = re.findall(r"<svg[^>]*>", text)
    assert len(plots) == 8
    assert all('role="img"' in plot and re.search('aria-label="[^"]{30}', plot) for plot in plots)


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
    plan = a_plan(configurations=names, workers=(1, 2, 4, 8), blocks=50)
    assert len(page_of(make_comparison(tmp_path / "compare-1", plan))) < 1_000_000


def test_csv_holds_a_line_for_each_planned_run_with_its_units(folder, capsys):
    fail_run(folder, "block-1/ddp-torchrun-2", exit_code=3)
    lines = {line["folder"]: line for line in csv_lines(folder, capsys)}
    assert len(lines) == 12
    one = lines["block-2/horovod-mpi-1"]
    summary = read_json(folder / "block-2/horovod-mpi-1/summary.json")
    assert float(one["images_per_second"]) == summary["images_per_second"]
    assert float(one["forward_seconds_per_step"]) == summary["phases"]["forward_seconds"]
    assert (one["block"], one["workers"], one["gpu_watts"]) == ("2", "1", "")
    failed = lines["block-1/ddp-torchrun-2"]
    told = [failed[name] for name in ("status", "exit_code", "images_per_second")]
    assert told == ["failed", "3", ""]


def test_markdown_fits_into_an_issue(folder, capsys):
    edit_fingerprint(folder / "block-2/horovod-mpi-2", "batch_norm", "a|b <i>c</i> *d*")
    text = written([str(folder), "--markdown"], capsys)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 6
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    for words in (
        "- At 1 worker DDP over Gloo trained",
        "a\\|b \\<i>c\\</i> \\*d\\*",
        "What this does not show",
        "GPUs.",
    ):
        assert words in text


def test_json_is_json_even_of_a_training_that_diverged(folder, capsys):
    edit(folder / "block-1/ddp-torchrun-1/summary.json", loss=float("nan"), tomorrow=1)
    text = written([str(folder), "--json"], capsys)
    value = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert value["phases"] and value["trainings"] and len(value["runs"]) == 12
    assert value["verdicts"][0]["decision"] == "faster" and value["verdicts"][0]["speed"]["low"] > 1
    differences = [row["configuration"] for row in value["phases"] if "−" in row["configuration"]]
    assert differences == ["ddp-torchrun − horovod-mpi"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--csv", "--json"], "--csv and --json: ask for one at a time"),
        (["--html", ""], "--html: name a file"),
        ([".", "--svg", "plots"], "several comparisons have no plots"),
        (["--html", "page.html", "--no-html"], "exclude each other"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(folder, arguments, words, refusal):
    assert words in refusal(report.main, [str(folder), *arguments], code=1)


def test_plots_become_files_that_are_well_formed(folder, tmp_path, capsys):
    written([str(folder), "--svg", str(tmp_path / "plots")], capsys)
    texts = {path.stem: path.read_text() for path in (tmp_path / "plots").iterdir()}
    for text in texts.values():
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.get("aria-label", "")) > 30
        assert "var(" not in text and "currentColor" not in text
    assert texts.keys() == {
        "verdict",
        "throughput",
        "drift",
        "step-breakdown",
        "time-to-accuracy",
        "learning-top1",
        "learning-top5",
        "learning-loss",
    }


def test_two_comparisons_stand_side_by_side_without_a_verdict(folder, tmp_path, capsys):
    other = make_comparison(tmp_path / "after", a_plan(workers=(2,)), ratio=1.5)
    edit(other / "plan.json", created_utc="2026-11-22T12:00:00+00:00")
    lines = lines_of(other)
    for line in lines[1:]:
        line["environment"].update(cpu_model="A Processor 9001")
    write_lines(other, lines)
    page = tmp_path / "both.html"
    text = written([str(folder), str(other), "--html", str(page)], capsys)
    for pattern in (
        "Speed of A",
        "Speed of B",
        "so none is given",
        r"cpu_model +A Processor 9000 +A Processor 9001",
        r"B: .*after\n\nAt 2 workers DDP",  # each one's own verdicts stay
    ):
        assert re.search(pattern, text)
    assert "so none is given" in page.read_text() and "A Processor 9001" in page.read_text()
    value = json.loads(written([str(folder), str(other), "--json"], capsys))
    assert len(value["comparisons"]) == 2


SHARED = "2 ranks shared a GPU: this checks correctness; speeds mean nothing, and none is judged."


def share_gpu(folder: Path, configurations: tuple[str, ...] = (), workers: int = 2) -> None:
    """Have the ranks of the runs of these configurations, or of all, shared a GPU."""
    lines = lines_of(folder)
    for line in lines[1:]:
        sides = line.get("sides", {line.get("place", "").split("/")[-1].rpartition("-")[0]: line})
        for name, side in sides.items():
            is_meant = side["environment"]["world_size"] == workers
            if is_meant and name in (configurations or (name,)):
                side["environment"] |= {"device": "cuda", "ranks_per_gpu": 2}
    write_lines(folder, lines)


def test_where_ranks_share_a_gpu_each_form_says_so_first_and_no_speed_is_judged(
    square, capsys, tmp_path
):
    edit(square / "plan.json", goals={"ddp-mpi:horovod-mpi": 1.01})
    share_gpu(square)
    text = report_text(square, capsys)
    assert text.startswith(f"{SHARED}\n") and "no verdict on the speeds of DDP over MPI and" in text
    assert not re.search("as fast as|tied|undecided|interval [0-9]", text)
    assert "The trainings of each pair ended with identical weights (1 block)." in text
    markdown = written([str(square), "--markdown"], capsys)
    assert re.match(rf"### .*\n\n\*\*Gate: not judged\.\*\*\n+\*\*{SHARED}\*\*", markdown)
    page = page_of(square)
    assert page.index(SHARED) < page.index("no verdict on the speeds")
    assert f'<p class="take alarm">{SHARED}' in page
    assert report.main([str(square), "--check", "--no-html"]) == 3
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"Gate: not judged: .*: goal ddp-mpi / \S+ ≥ 1\.010: .*ranks share a GPU", told)
    value = json.loads(written([str(square), "--json"], capsys))
    assert value["headline"][0] == SHARED and value["next_step"] == ""
    assert {verdict["speed"] for verdict in value["verdicts"]} == {None}
    other = Path(shutil.copytree(square, tmp_path / "other"))
    edit(other / "plan.json", created_utc="2026-11-22T12:00:00+00:00")
    both = written([str(square), str(other), "--no-html"], capsys)
    assert both.startswith(f"A: {SHARED}\n\nB: {SHARED}\n") and "Over occasions" not in both


def test_where_ranks_share_a_gpu_unequal_weights_are_in_the_headline(square):
    share_gpu(square)
    lines = lines_of(square)
    [one] = [line for line in lines if line.get("place") == "block-1/ddp-mpi-2"]
    one["summary"]["weights_sha256"] = "0" * 64
    write_lines(square, lines)
    caution, *others = Report(read_comparison(square)).headline
    told = "At 2 workers the final weights of DDP over MPI and DDP over Gloo are not bit-equal"
    assert caution == SHARED and any(sentence.startswith(told) for sentence in others), others


def test_a_comparison_of_ranks_that_share_a_gpu_needs_no_second_block(square):
    """Unless it is asked for: more would decide nothing."""
    edit(square / "plan.json", blocks=None)
    assert read_comparison(square).unfinished
    share_gpu(square)
    assert not read_comparison(square).unfinished
    edit(square / "plan.json", blocks=7)
    assert read_comparison(square).unfinished


def test_ranks_that_share_a_gpu_do_not_keep_the_others_measuring():
    """One block of them is enough; the time of a single worker ends as it does alone."""
    plan = a_plan(measure="turns", blocks=None, rounds=4, minutes=15.0)

    def group(**own: Any) -> SimpleNamespace:
        nothing = {"estimates": {}, "disturbed_seconds": 0.0, "block_seconds": 20.0, "case": ""}
        return SimpleNamespace(**nothing, **own)

    sharing = group(num_blocks=1, ranks_per_gpu=2, used_seconds=30.0)
    for seconds, ends in ((100.0, False), (16 * 60.0, True)):
        alone = group(num_blocks=int(seconds / 20), ranks_per_gpu=None, used_seconds=seconds)
        ratios = (0.9, 1.1) * (alone.num_blocks // 2)
        alone.estimates = {("ddp-torchrun", "horovod-mpi"): Estimate(1.0, 0.5, 2.0, ratios)}
        assert bool(reason_to_end(plan, [alone, sharing])) == ends


def test_ranks_that_share_a_gpu_are_not_compared_with_ranks_that_do_not(folder, capsys):
    share_gpu(folder, ("ddp-torchrun",))
    text = report_text(folder, capsys)
    assert "ranks_per_gpu: 2 (ddp-torchrun), absent (horovod-mpi)" in text
    assert "no verdict on DDP over Gloo and Horovod over MPI: the runs differ" in text
    # A single worker shares with nobody: its verdict stays.
    assert text.startswith(f"At 2 workers: {SHARED}")
    assert re.search("At 1 worker DDP over Gloo trained .* times as fast", text)


def test_without_a_path_it_is_the_newest_under_runs(folder, tmp_path, monkeypatch, capsys, refusal):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "runs/compare-20261122-120000")
    assert "trained 1." in written([], capsys)
    assert [path.parent.name[-8:] for path in tmp_path.rglob("report.html")] == ["2-120000"]
    shutil.rmtree(tmp_path / "runs")
    assert "make one with `make compare`" in refusal(report.main, [], code=1)


def test_warnings_stand_by_the_verdict_unless_no_verdict_uses_the_run(folder, capsys):
    edit(folder / "plan.json", warnings=["Horovod was built without NCCL"])
    edit(folder / "block-2/horovod-mpi-2/outcome.json", other_load=1.7)
    fail_first(folder, "block-1/horovod-mpi-2")
    near = ("Horovod was built without NCCL", "other processes kept 1.7")
    aside = ("Runs that failed or were disturbed (not used for speed)", "failed, and was run again")
    assert are_in_order(report_text(folder, capsys), *near, *aside)
    assert are_in_order(page_of(folder), *near, "<h2>Results", *aside)


def test_what_is_measured_by_turns_stands_apart_from_whole_trainings(square, capsys):
    text, page = report_text(square, capsys), page_of(square)
    assert are_in_order(
        text, "Engine and transport, 2 workers", "Speed, by turns", "Whole trainings, one each"
    )
    assert re.search(r"ddp-torchrun +2 +\d+ \(\d+–\d+\) .* 6\n", text)
    assert re.search(r"DDP / Horovod( +\d\.\d{3} \(\d\.\d{3}–\d\.\d{3}\)){3}", text)
    headline = text.splitlines()[-1]
    assert written([str(square)], capsys).splitlines()[-1] == headline
    figures = r"\d\.\d+ \(\d\.\d+ to \d\.\d+\) times as fast as"
    assert re.fullmatch(
        rf"Over Gloo DDP trained {figures} Horovod; over MPI DDP trained {figures} Horovod; "
        rf"DDP over MPI trained {figures} DDP over Gloo; "
        rf"Horovod over MPI trained {figures} Horovod over Gloo\.",
        headline,
    )
    assert are_in_order(page, headline, "Engine and transport", "What was equal")
    assert "Speed over the experiment" in page and "by turns" in page
    lines = csv_lines(square, capsys)
    turns = [line for line in lines if line["measured_by"] == "turn"]
    assert len(turns) == 6 * (6 + 2) * 4 and len(lines) == len(turns) + 4
    # Those without exchange, and the last round: others kept the cores busy.
    assert sum(line["counts"] == "0" for line in turns) == 6 * (2 + 1) * 4


def plots_of(folder: Path) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw_plots(Report(read_comparison(folder)))}


def test_disturbed_trainings_are_shown_and_marked(square, capsys):
    def lines() -> list[str]:
        layers = plots_of(square)["time-to-accuracy"].layers
        return [layer.key for layer in layers if layer.kind == "line"]

    names = ["DDP over Gloo", "DDP over MPI", "Horovod over Gloo", "Horovod over MPI"]
    assert sorted(lines()) == names and "*" not in report_text(square, capsys)
    edit(square / "block-1/horovod-mpi-2/outcome.json", other_load=1.7)
    assert sorted(lines()) == [*names[:3], "Horovod over MPI, disturbed"]
    text = report_text(square, capsys)
    assert "Whole trainings, one each (* disturbed by other processes)" in text
    assert re.search(r"horovod-mpi +2( +\d\.\d\*){3} +97\.50", text)
    assert re.search(r"ddp-mpi +2( +\d\.\d){3} +97\.50", text)


def test_the_speeds_of_the_blocks_stand_apart_on_an_axis_that_ends_with_the_last(square):
    drift = plots_of(square)["drift"]
    assert [text for _, text in drift.x.ticks] == [*"123456"] and drift.x.high == 6.5
    for layer in drift.layers:
        places = [place for place, _ in layer.points]
        gaps = [place for place in places if math.isnan(place)]
        assert len(gaps) == 6  # one behind each block
        assert all(abs(place - round(place)) < 0.5 for place in places if not math.isnan(place))


def test_undecided_pairs_look_different_in_the_plot_and_beside_it(square):
    edit(square / "plan.json", margin=0.0001)
    lines = lines_of(square)
    for line in (line for line in lines if line["line"] == "block"):
        for turn in line["block"]["turns"]:  # the two engines over MPI, by chance
            if turn["side"].endswith("-mpi"):
                turn["seconds"] *= 1.5 if (line["block"]["number"] + len(turn["side"])) % 2 else 1
    write_lines(square, lines)
    plot = plots_of(square)["verdict"]
    decisions = [row.value for row in plot.rows]
    hollow = {
        layer.points[0][1] for layer in plot.layers if layer.kind == "diamond" and layer.hollow
    }
    assert "undecided" in decisions
    assert hollow == {at for at, decision in enumerate(decisions) if decision == "undecided"}
    assert page_of(square).count('class="verdict open"') == len(hollow)


def test_whiskers_of_speed_are_the_range_over_blocks(square):
    [row, *_] = speed_rows(read_comparison(square))
    bars = [layer for layer in plots_of(square)["throughput"].layers if layer.colour == INK]
    assert [x for x, _ in bars[0].points] == [row["lowest"], row["highest"]]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_tables_fit_into_the_terminal(square, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", "1000")
    whole = report_text(square, capsys)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = report_text(square, capsys)
    lines = [line for line in text.splitlines() if re.search(r"  |^-", line.strip())]
    assert len(lines) > 20 and max(map(len, lines)) <= columns
    assert {*re.findall(r"[−+±]?\d[\d.]*", whole)} == {*re.findall(r"[−+±]?\d[\d.]*", text)}


def test_a_text_without_any_room_is_an_ellipsis():
    assert [shortened("images/s", width) for width in (-1, 0, 200)] == ["…", "…", "images/s"]


def a_speed(ratio: float, width: float = 1.25) -> Estimate:
    return Estimate(ratio, ratio / width, ratio * width, (ratio,) * 3, 0.05, 2)


OWN = {"first_label": "A over MPI", "second_label": "B over MPI", "decision": "faster"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "Over MPI A trained 1.25 (1.00 to 1.56) times as fast as B."),
        (
            {"decision": "slower", "speed": a_speed(0.8)},
            "Over MPI B trained 1.25 (1.00 to 1.56) times as fast as A.",
        ),
        ({"second_label": "B"}, "A over MPI trained 1.25 (1.00 to 1.56) times as fast as B."),
        (
            {"decision": "equal"},
            "A over MPI and B over MPI are tied: equally fast within 57 % (1.00 to 1.56).",
        ),
        (
            {"decision": "undecided"},
            "Undecided: over MPI A trained 1.00 to 1.56 times as fast as B.",
        ),
        (
            {"decision": "undecided", "speed": a_speed(1.25, 1.1), "family": 4},
            "Undecided: over MPI A trained 1.14 to 1.38 times as fast as B, before the correction "
            "for 4 verdicts.",
        ),
        (
            {"decision": "undecided", "speed": a_speed(1.001, 1.01), "family": 4},
            "Undecided: over MPI A trained 0.991 to 1.011 times as fast as B, before the "
            "correction for 4 verdicts.",
        ),
        ({"is_finished": False}, "Nothing is decided yet: the measurement is not finished."),
        (
            {"is_null_test": True, "second_label": "A over MPI, again"},
            "A difference was shown between A over MPI and itself (1.00 to 1.56).",
        ),
        (
            {"is_null_test": True, "decision": "undecided"},
            "No difference was shown between A over MPI and itself, as it should be "
            "(1.00 to 1.56).",
        ),
        (
            {"speed": None, "second_label": "my own"},
            "No verdict on A over MPI and my own: no block was completed by both.",
        ),
        (
            {"first_label": "a", "second_label": "b", "workers": 0},
            "a trained 1.25 (1.00 to 1.56) times as fast as b.",
        ),
        (  # no name, though it begins as one
            {"first_label": "u", "second_label": "b", "workers": 0, "decision": "undecided"},
            "Undecided: u trained 1.00 to 1.56 times as fast as b.",
        ),
    ],
)
def test_the_headline_of_one_pair(folder, fields, words):
    verdict, _ = Report(read_comparison(folder)).verdicts
    assert headline([replace(verdict, **{**OWN, "speed": a_speed(1.25), **fields})], []) == [words]


def test_the_headline_tells_all_pairs_or_counts_them(folder):
    verdict, other = Report(read_comparison(folder)).verdicts
    assert re.fullmatch(
        "At 1 worker DDP over Gloo trained .* Horovod over MPI; at 2 workers DDP .*",
        headline([verdict, other], [])[0],
    )
    pair = replace(verdict, speed=a_speed(1.25), **OWN)
    wide = replace(pair, decision="undecided", speed=a_speed(1.1, 1.5))
    decided, open_ = headline([pair, wide, replace(wide, speed=a_speed(1.0))], [])
    assert decided == "Over MPI A trained 1.25 (1.00 to 1.56) times as fast as B."
    assert open_.startswith("2 of 3 pairs undecided: over MPI A trained 0.73 to 1.65 times ")
    many = [*[pair] * 6, wide, replace(pair, decision="equal")]
    assert headline(many, []) == ["8 pairs: 6 different, 1 undecided, 1 equal."]


def test_the_headline_tells_a_goal_in_place_of_its_pair(folder):
    verdict, _ = Report(read_comparison(folder)).verdicts
    goal = Goal(question="", name="ddp-torchrun:horovod-mpi", least=1.2, speed=a_speed(1.25))
    reached = replace(goal, decision="reached")
    assert headline([verdict], [reached]) == [
        "Goal ddp-torchrun / horovod-mpi ≥ 1.200: reached, 1.250 (1.000 to 1.562)."
    ]
    assert headline([], [reached] * 7 + [goal])[0] == "8 goals: 7 reached, 1 undecided."
    beside = replace(goal, least=0.9, family=3)  # its interval says more than its verdict
    assert headline([], [beside]) == [
        "Goal ddp-torchrun / horovod-mpi ≥ 0.900: undecided, 1.250 (1.000 to 1.562), before the "
        "correction for 3 goals."
    ]


def test_the_headline_of_occasions_tells_each_pair_and_no_interaction():
    def row(second: str, ratio: float) -> dict[str, Any]:
        names = {"first_label": "A over MPI", "second_label": second, "case": "", "workers": 2}
        return {**names, "found": (a_speed(1.0),) * 2, "pooled": a_speed(ratio, 1.1)}

    interaction = {**row("that over Gloo", 2.0), "first_label": f"{OF_ENGINES} over MPI"}
    rows = [row("B over MPI", 1.25), row("A over Gloo", 0.5), row("C", 1.0), interaction]
    assert headline_of_occasions(rows) == (
        "Over 2 occasions: over MPI A trained 1.25 (1.14 to 1.38) times as fast as B; A over Gloo "
        "trained 2.00 (1.82 to 2.20) times as fast as A over MPI; A over MPI trained 0.909 to "
        "1.100 times as fast as C."
    )
    assert headline_of_occasions([row("B", 1.25)] * 8).endswith("; and 2 more in the table.")
    all_three = row("B", 1.25) | {"found": (a_speed(1.0),) * 3}
    two = row("C", 1.25) | {"found": (a_speed(1.0), None, a_speed(1.0))}
    assert headline_of_occasions([all_three, two]) == (
        "Over 3 occasions: A over MPI trained 1.25 (1.14 to 1.38) times as fast as B; A over MPI "
        "trained 1.25 (1.14 to 1.38) times as fast as C on 2 of them."
    )
    assert headline_of_occasions([]) == ""


CASES = a_plan(
    configurations=("ddp-torchrun", "tuned"),
    defined=(
        Configuration(
            "tuned",
            "horovod",
            "horovodrun",
            "gloo",
            flags=("--fp16-allreduce",),
            environment={"HOROVOD_CYCLE_TIME": "1"},
        ),
    ),
    cases={"resnet50": ("--arch", "resnet50"), "vgg16": ("--arch", "vgg16")},
    trainer_arguments=("--data", "synthetic"),
    margin=0.02,
    seed=7,
    question="What do 16 bits on the wire bring?",
)


def test_cases_are_told_apart(tmp_path, capsys):
    folder = make_comparison(tmp_path / "compare-1", CASES)
    text, page = report_text(folder, capsys), page_of(folder)
    assert re.search(r"^resnet50 +tuned +2 ", text, re.MULTILINE)
    assert are_in_order(text, CASES.question, "resnet50, 2 workers:", "vgg16, 1 worker:")
    for words in ("Training throughput, resnet50", "Training throughput, vgg16", CASES.question):
        assert words in page
    assert {line["case"] for line in csv_lines(folder, capsys)} == {"resnet50", "vgg16"}
