"""What blocks of turns conclude: speeds from turns, the square and its interaction, damaged blocks,
and comparisons of many runs."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from records import (
    a_plan,
    drop_runs,
    edit,
    lines_of,
    make_turns,
    verdicts_of,
    with_plan,
    write_lines,
)
from test_compare_records import edit_fingerprint, make_comparison

from compare import report
from compare.evidence.paired import Estimate
from compare.evidence.record import Record, read_comparison
from compare.evidence.rows import speed_rows
from compare.evidence.turns import Purpose
from compare.evidence.verdicts import interaction
from compare.page.formats import as_markdown, as_page, as_text
from compare.page.labels import labels_of
from compare.page.plots import draw_plots
from compare.page.report import WARNINGS, Report, SideBySide, notices
from compare.page.sentences import correction_text, interval_text, sentence, support
from compare.page.tables import ratio_cell

SQUARE = ("ddp-torchrun", "horovod-gloo", "ddp-mpi", "horovod-mpi")
PAIRS = (
    ("ddp-torchrun", "horovod-gloo"),
    ("ddp-mpi", "horovod-mpi"),
    ("ddp-mpi", "ddp-torchrun"),
    ("horovod-mpi", "horovod-gloo"),
)
SPEEDS = {"ddp-torchrun": 100.0, "horovod-gloo": 100.0, "ddp-mpi": 106.0, "horovod-mpi": 90.0}


INTERVAL = r", 95 % interval [\d.]+ to [\d.]+, 10 blocks"
EQUALLY_FAST = r"are tied: equally fast within \d\.\d % \(speed ratio [\d.]+"
SENTENCES = (
    rf"DDP over Gloo and Horovod over Gloo {EQUALLY_FAST}{INTERVAL}\)",
    rf"DDP over MPI trained 1\.1\d+ times as fast as Horovod over MPI{INTERVAL}",
    rf"DDP over MPI trained 1\.0\d+ times as fast as DDP over Gloo{INTERVAL}",
    rf"Horovod over Gloo trained 1\.1\d+ times as fast as Horovod over MPI{INTERVAL}",
)


def by_turns(
    folder: Path, blocks: int = 10, noise: float = 0.005, names: tuple[str, ...] = SQUARE
) -> Path:
    """Write a comparison measured by turns: one block of whole runs, and `blocks` of turns."""
    plan = a_plan(
        configurations=names,
        judged_pairs=PAIRS if names == SQUARE else (),
        workers=(2,),
        blocks=1,
    )
    make_comparison(folder, plan)
    return make_turns(folder, {name: SPEEDS[name] for name in names}, blocks, noise=noise)


@pytest.fixture(scope="module")
def square(tmp_path_factory) -> Record:
    return read_comparison(by_turns(tmp_path_factory.mktemp("square") / "compare-1"))


def edit_blocks(folder: Path, **changes: Any) -> Path:
    """Change the turns of a comparison's blocks: each field by what a function makes of the turn,
    and of its block's number; return the folder."""
    lines = lines_of(folder)
    for line in lines:
        if line["line"] == "block":
            number = line["block"]["number"]
            for turn in line["block"]["turns"]:
                turn |= {name: made(turn, number) for name, made in changes.items()}
    write_lines(folder, lines)
    return folder


def test_the_square_parts_engine_and_transport(square):
    assert [*labels_of(square).values()] == [
        "DDP over Gloo",
        "Horovod over Gloo",
        "DDP over MPI",
        "Horovod over MPI",
    ]
    verdicts = verdicts_of(square)
    assert [verdict.decision for verdict in verdicts] == ["equal", "faster", "faster", "slower"]
    for verdict, pattern in zip(verdicts, SENTENCES, strict=True):
        assert re.fullmatch(rf"At 2 workers {pattern}\.", sentence(verdict))
    assert {verdict.family for verdict in verdicts} == {4}
    told = interaction(square, square.groups[0], verdicts)
    assert told and told.low and 1.1 < told.low < told.ratio < 1.25
    assert verdicts[2].equal_weights  # of the full runs
    assert "corrected by Holm's method" in correction_text(square, verdicts)
    # An interaction needs pairs that connect the square.
    two = (("ddp-mpi", "horovod-mpi"), ("ddp-mpi", "ddp-torchrun"))
    triangle = (*two, ("ddp-torchrun", "horovod-mpi"))  # nothing is known of the fourth corner
    for pairs in (two, triangle):
        record = with_plan(square, {"judged_pairs": pairs})
        assert interaction(record, record.groups[0], verdicts_of(record)) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks": 12}, "10 of 12 blocks"),
        ({"blocks": 10}, ""),
        ({"blocks": None, "until_interval": 0.001, "minutes": 10}, "7.5 of 10 minutes are used"),
        ({"blocks": None, "until_interval": 0.1, "minutes": 10}, ""),
        # Ten blocks of 40 s, and four full runs of 12.5 s; another block would end after 8.17 min.
        ({"blocks": None, "until_interval": 0.001, "minutes": 8.1}, ""),
        ({"blocks": None, "until_interval": 0.001, "minutes": 8.2}, "7.5 of 8.2 minutes are used"),
    ],
)
def test_an_unfinished_measurement_is_named(square, plan, words):
    comparison = with_plan(square, plan)
    told = "\n".join(dict(notices(comparison)).get(WARNINGS, []))
    assert ("is not finished" in told) == bool(words) and words in told
    verdicts = verdicts_of(comparison)  # whoever may stop where it suits, finds differences
    assert ({one.decision for one in verdicts} == {"undecided"}) == bool(words)
    assert ("nothing is decided between" in sentence(verdicts[1])) == bool(words)
    assert ("CPU time per image" in " ".join(support(verdicts[1]))) != bool(words)
    assert {row["planned_blocks"] for row in speed_rows(comparison)} == {plan["blocks"]}


def test_a_round_in_which_one_turn_was_disturbed_is_named_by_that_turn(tmp_path):
    folder = by_turns(tmp_path / "compare-1", blocks=1)
    edit_blocks(folder, other_load=lambda turn, _: 0.5 * (turn["side"] == "ddp-mpi"))
    told = dict(notices(read_comparison(folder)))[WARNINGS]
    assert any("up to 0.50 cores busy" in line for line in told)


def test_each_point_of_speed_over_the_experiment_is_a_turn_that_counts(tmp_path):
    """No turn without exchange, of a trial, or that others disturbed, though their rounds count."""
    folder = by_turns(tmp_path / "compare-1", blocks=3, names=SQUARE[2:])
    lines = lines_of(folder)
    for line in lines:
        if line["line"] == "block":
            turns = line["block"]["turns"]
            others = ({"purpose": "trial"}, {"purpose": "disturbed", "other_load": 0.9})
            turns += [turns[0] | other for other in others]
    write_lines(folder, lines)
    comparison = read_comparison(folder)
    assert comparison.problem == ""
    assert {turn.purpose for turn in comparison.groups[0].turns[0].turns} == {*get_args(Purpose)}
    [plot] = [one for one in draw_plots(Report(comparison)) if one.name == "drift"]
    # The last round of each block was disturbed.
    drawn = [[x for x, _ in layer.points if math.isfinite(x)] for layer in plot.layers]
    assert [*map(len, drawn)] == [3 * 5] * 2


def test_at_one_number_of_workers_throughput_is_bars_with_ranges(square):
    [plot] = [one for one in draw_plots(Report(square)) if one.name == "throughput"]
    assert [row.name for row in plot.rows] == [*labels_of(square).values()]
    bars, lines = plot.layers[::2], plot.layers[1::2]
    for drawn, line, row in zip(bars, lines, speed_rows(square), strict=True):
        (start, _), _, (end, _) = drawn.points
        [(low, _), (high, _)] = line.points
        assert start == 0 and 0 < low < end == row["images_per_second"] < high


def test_blocks_whose_ratios_resemble_those_before_are_named(tmp_path):
    def drifting(turn: dict[str, Any], number: int) -> float:
        return turn["seconds"] * (1 - 0.05 * number * (turn["side"] == "ddp-torchrun"))

    folder = by_turns(tmp_path / "compare-1", blocks=12)
    assert "resembles" not in str(notices(read_comparison(folder)))
    told = dict(notices(read_comparison(edit_blocks(folder, seconds=drifting))))[WARNINGS]
    [line] = [line for line in told if "ddp-torchrun / horovod-gloo" in line]
    assert re.search(r"resembles the one before \(lag-1 correlation 0\.[6-9]", line)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(1.002, 1.012, "1.002 to 1.012"), (1.0004, 1.045, "1.0004 to 1.0450"), (0.9, 1.3, "0.90 to")],
)
def test_a_bound_of_an_interval_never_rounds_to_1(low, high, shown):
    estimate = Estimate(math.sqrt(low * high), low, high, (1.0,) * 6)
    assert shown in interval_text(estimate)
    assert f"{low:.4f}" in ratio_cell(estimate).aside or low != 1.0004


def test_a_comparison_that_was_extended_says_so_and_is_wider(square):
    extended = with_plan(square, {"blocks": 3}, {"blocks": 5}, {"blocks": 10})
    verdicts, before = verdicts_of(extended), verdicts_of(square)
    assert "98.75 % interval" in sentence(verdicts[1])
    assert verdicts[1].speed.relative_half_width > before[1].speed.relative_half_width
    assert "extended 2 times" in correction_text(extended, verdicts)


def test_blocks_of_another_machine_or_version_are_not_pooled(tmp_path):
    folder = by_turns(tmp_path / "compare-1", blocks=4)
    for side in SQUARE:
        where = folder / "turns/2-workers/block-3" / side / "environment.json"
        edit(where, torch="3.0", cpu_model="Another")
    comparison = read_comparison(folder)
    verdict = verdicts_of(comparison)[0]
    assert [fact.field for fact in verdict.differences] == ["cpu_model", "torch"]
    assert verdict.speed is None
    assert "torch changed between blocks: " in as_text([Report(comparison)])


def test_a_side_with_another_setting_forbids_the_verdict(tmp_path):
    folder = by_turns(tmp_path / "compare-1", blocks=3)
    for number in (1, 2, 3):
        edit(folder / f"turns/2-workers/block-{number}/ddp-mpi/config.json", precision="bf16")
    report = Report(read_comparison(folder))
    differences = [[fact.field for fact in verdict.differences] for verdict in report.verdicts]
    assert differences == [[], ["precision"], ["precision"], []]
    page = as_page([report])
    assert "1 thing differed that must be equal: precision" in page
    assert "Everything that was recorded" not in page


def test_whole_runs_of_blocks_that_differ_are_not_pooled(tmp_path):
    folder = make_comparison(tmp_path / "compare-1", a_plan(workers=(2,)))
    for path in folder.glob("block-2/*"):
        edit_fingerprint(path, "learning_rates_sha256", "c" * 64)
    [verdict] = verdicts_of(read_comparison(folder))
    assert [fact.field for fact in verdict.differences] == ["learning_rates_sha256"]


def test_beside_whole_runs_stands_all_that_a_verdict_rests_on(square, tmp_path):
    plan = a_plan(configurations=SQUARE[:2], workers=(2,))
    folder = make_comparison(tmp_path / "compare-2", plan)
    edit_fingerprint(folder / "block-2/horovod-gloo-2", "learning_rates_sha256", "c" * 64)
    edit(folder / "plan.json", warnings=["Horovod was built without NCCL"])
    both = [Report(square), Report(read_comparison(folder))]
    assert SideBySide(both).differences["measured by"] == ["turns", "runs"]
    for text in (as_text(both), as_markdown(both), as_page(both)):
        for words in ("corrected by Holm", "learning_rates_sha256: ", "was built without NCCL"):
            assert words in text


def test_a_comparison_without_whole_runs_has_a_report(tmp_path, capsys):
    """As `run.py --full-runs 0` leaves it."""
    folder = by_turns(tmp_path / "compare-1")
    edit(folder / "plan.json", full_runs=0)
    drop_runs(folder)
    for flags in ([], ["--json"], ["--markdown"], ["--csv"]):
        assert report.main([str(folder), *flags]) == 0
    assert "DDP over MPI trained" in capsys.readouterr().out
