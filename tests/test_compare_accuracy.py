"""Accuracy over seeds: whether its intervals cover the truth, what is said of seeds that fail, and
how it is drawn. `python tests/test_compare_accuracy.py` prints the table of docs/statistics.md."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from records import a_plan, edit, lines_of, write_lines
from test_compare_records import make_comparison, make_turns

from compare import report
from compare.evidence.accuracy import (
    POWER,
    SIZES,
    deviation_interval,
    power_of,
    seeds_to_show,
    time_ratio,
)
from compare.evidence.curves import band
from compare.evidence.extension import extension_of
from compare.evidence.paired import (
    Estimate,
    PointDifference,
    point_difference,
    student_quantile,
)
from compare.evidence.record import read_comparison
from compare.evidence.verdicts import NotReached
from compare.page.accuracy import not_reached_text
from compare.page.formats import as_page
from compare.page.learning import learning_plots
from compare.page.plots import draw_plots
from compare.page.report import Report
from compare.page.trainings import read_trainings
from compare.plan.plan import Plan
from compare.plan.plan_file import check_plan
from recipe.errors import UserError

PAGE = Path(__file__).parent.parent / "docs/statistics.md"
Array = NDArray[np.float64]
EXPERIMENTS = 2000  # which show a share of 95 % as 94 to 96 % (two standard errors)
LEAST = 0.94
SEEDS = (3, 5, 10)
# Accuracy, the number of validation images, and the standard deviation over seeds in points: the
# digits, Fashion-MNIST, ImageNet.
DATA = {"digits": (97.5, 360, 0.5), "fashion": (94.0, 10_000, 0.2), "imagenet": (76.0, 50_000, 0.1)}
CORRELATIONS = (-0.5, 0.0, 0.9)  # of two trainings with one seed


# -------------------------------------------------------------------------- whether it is covered


def accuracies(data: str, seeds: int, correlation: float, difference: float) -> tuple[Array, float]:
    """Top-1 in simulated comparisons, percent, [experiments, seeds, 2], whose true mean is higher
    by `difference` points for the first; and by how much one image changes it."""
    top1, images, deviation = DATA[data]
    random = np.random.default_rng(seeds)
    means = (top1 + difference, top1)
    # By a factor of our own: numpy's comes from LAPACK, whose versions differ in its signs.
    second = [correlation, math.sqrt(1 - correlation**2)]
    factor = deviation * np.array([[1, 0], second])
    drawn = means + random.standard_normal((EXPERIMENTS, seeds, 2)) @ factor.T
    # Rounded at random, so that the mean over seeds stays what it is.
    counts = np.floor(drawn * images / 100 + random.random(drawn.shape))
    return 100 * counts / images, 100 / images


def paired(data: str, seeds: int, correlation: float, difference: float) -> list[PointDifference]:
    found, image = accuracies(data, seeds, correlation, difference)
    return [point_difference(own, image) for own in (found[..., 0] - found[..., 1]).tolist()]


def coverage(data: str, seeds: int, correlation: float) -> float:
    """How often the interval contains the true difference."""
    found = paired(data, seeds, correlation, 0.1)
    return fmean(abs(one.mean - 0.1) <= (one.half_width or 0) for one in found)


def coverage_of_two_samples(data: str, seeds: int, correlation: float) -> float:
    """The same of Student's interval for two independent samples."""
    found, _ = accuracies(data, seeds, correlation, 0.1)
    centers, variances = found.mean(axis=1), found.var(axis=1, ddof=1)
    errors = np.sqrt(variances.sum(axis=1) / seeds)
    half_widths = student_quantile(0.95, 2 * seeds - 2) * errors
    return float((abs(centers[:, 0] - centers[:, 1] - 0.1) <= half_widths).mean())


def rows_of_coverage() -> Iterator[str]:
    """The docs' table, in percent."""
    for data in DATA:
        for seeds in SEEDS:
            cells = [
                f"{100 * of_one(data, seeds, correlation):.1f}"
                for of_one in (coverage, coverage_of_two_samples)
                for correlation in CORRELATIONS
            ]
            yield f"| {data} | {seeds} | {' | '.join(cells)} |"


def test_the_docs_say_how_often_the_interval_covers_the_difference():
    page = PAGE.read_text()
    assert [row for row in rows_of_coverage() if row not in page] == []


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_the_interval_covers_the_true_difference(data, seeds, correlation):
    assert coverage(data, seeds, correlation) >= LEAST


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_equal_and_different_are_seldom_said_wrongly(data, seeds, correlation):
    """Of equal accuracies a difference; of a difference as large as the margin that it is less."""
    margin, error = Plan().top1_margin, 0.05
    different = fmean(one.p_difference() < error for one in paired(data, seeds, correlation, 0))
    at_margin = paired(data, seeds, correlation, margin)
    equal = fmean(one.p_equality(margin) < error / 2 for one in at_margin)
    assert different <= error + 0.01
    assert equal <= error / 2 + 0.007


def test_two_independent_samples_would_miss_where_the_seeds_of_both_go_apart():
    """So pairs are used, also of trainings that differ."""
    apart, alone, together = (coverage_of_two_samples("fashion", 5, one) for one in CORRELATIONS)
    assert apart < 0.92 and together > 0.99
    assert alone == pytest.approx(0.95, abs=0.012)


def test_few_seeds_that_agree_by_chance_still_have_an_interval():
    found = point_difference([0.0, 0.0, 0.0], image=100 / 360)
    assert found.mean == 0 and (found.half_width or 0) > Plan().top1_margin
    assert found.p_equality(Plan().top1_margin) > 0.025
    assert point_difference([0.1, 0.2], image=0.01).half_width is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("deviation", [0.12, 0.3])
def test_so_many_seeds_show_such_a_difference(size, deviation):
    seeds = seeds_to_show(size, deviation)
    random = np.random.default_rng(seeds)
    drawn = random.normal(size, deviation, (EXPERIMENTS, seeds)).tolist()
    shown = fmean(
        one.mean > 0 and one.p_difference() < 0.05
        for one in (point_difference(own, 1e-6) for own in drawn)
    )
    assert shown >= POWER - 0.03
    if seeds > 3:  # the fewest
        assert shown <= POWER + 0.12


def test_the_interval_of_the_standard_deviation_covers_it():
    drawn = np.random.default_rng(5).normal(0, 0.3, (EXPERIMENTS, 5))
    ends = [deviation_interval(own, 4) for own in drawn.std(axis=1, ddof=1).tolist()]
    assert fmean(low <= 0.3 <= high for low, high in ends) == pytest.approx(0.95, abs=0.012)
    of_five = power_of(0.3, 4)
    assert of_five.low < 0.3 < of_five.high
    assert [one.seeds for one in of_five.needed] == sorted(one.seeds for one in of_five.needed)
    assert all(one.fewest <= one.seeds <= one.most for one in of_five.needed)


def times_of(seeds: int, correlation: float, most: float = math.inf) -> tuple[list[Any], float]:
    """Seconds to an accuracy of two trainings that need 12 and 13 epochs of a second, more or less:
    [experiments, seeds, 2], whole epochs whose times scatter by 2 %; infinite of those that need
    more than `most` epochs. And the true ratio's logarithm."""
    random = np.random.default_rng(seeds)
    covariance = np.array([[1, correlation], [correlation, 1]]) * 1.5**2

    def seconds(*shape: int) -> Array:
        epochs = random.multivariate_normal((12, 13), covariance, shape).round().clip(1)
        noise = np.exp(random.normal(0, 0.02, epochs.shape))
        return np.where(epochs > most, math.inf, epochs * noise)

    whole = random.multivariate_normal((12, 13), covariance, 200_000).round().clip(1)
    first, second = np.log(whole).mean(axis=0)
    return seconds(EXPERIMENTS, seeds).tolist(), second - first


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_the_ratio_of_times_is_covered_where_trainings_need_different_epochs(seeds, correlation):
    times, truth = times_of(seeds, correlation)
    found = [time_ratio(own, resolution=1 / 12) for own in times]
    covered = [
        one.low <= math.exp(truth) <= one.high for one in found if one and one.low and one.high
    ]
    assert len(covered) == EXPERIMENTS and fmean(covered) >= LEAST


def test_to_drop_the_seeds_that_fail_would_favour_the_side_that_fails():
    """Of ten seeds, with 14 epochs at most: as if the rest were all. So there is no ratio then."""
    times, truth = times_of(10, 0.0, most=14)
    reached = [[both for both in own if math.isfinite(sum(both))] for own in times]
    found = [time_ratio(own, resolution=1 / 12) for own in reached]
    assert fmean(one.ratio < math.exp(truth) for one in found if one) > 0.6
    assert fmean(time_ratio(own, resolution=1 / 12) is None for own in times) > 0.75


def rare_steps(seeds: int, evaluations: int, one_more: tuple[float, float]) -> float:
    """How often the interval of a ratio of times contains the truth, if both sides reach the
    accuracy in this evaluation, or with these probabilities in the next one."""
    random, resolution = np.random.default_rng(seeds), 1 / evaluations
    more = random.random((EXPERIMENTS, seeds, 2)) < one_more
    truth = (one_more[1] - one_more[0]) * math.log1p(resolution)
    found = [time_ratio(own, resolution) for own in (evaluations + more).astype(float).tolist()]
    ends = [one.ends for one in found if one and one.ends]
    assert len(ends) == EXPERIMENTS
    return fmean(low <= math.exp(truth) <= high for low, high in ends)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("evaluations", [3, 12, 30])
@pytest.mark.parametrize("one_more", [(0, 0.05), (0, 0.2), (0.1, 0.3), (0, 0.5), (0.1, 0.7)])
def test_the_ratio_of_times_is_covered_where_few_seeds_need_one_evaluation_more(
    seeds, evaluations, one_more
):
    # Within two standard errors of a share of 94 %, the least that was simulated.
    assert rare_steps(seeds, evaluations, one_more) >= LEAST - 0.01


def test_times_that_all_agree_are_known_to_an_evaluation_only():
    equal = [(12.0, 12.0)] * 5
    found = time_ratio(equal, resolution=1 / 12)
    assert found and found.ends and found.ends == pytest.approx((1 / 1.053, 1.053), abs=0.001)
    exact = time_ratio(equal, resolution=None)
    assert exact and exact.ends == (1.0, 1.0)


def test_a_seed_that_fails_is_dropped_only_where_both_sides_are_the_same_training():
    three = [(10.0, 11.0)] * 3
    failed, both_failed = (10.0, math.inf), (math.inf, math.inf)
    whole = time_ratio(three, resolution=0.01)
    assert whole and whole.ratio == pytest.approx(1.1)
    of_others = time_ratio([*three, both_failed], resolution=None)
    assert of_others and of_others.ratios == whole.ratios
    for seconds in ([*three, failed], [*three, both_failed], [failed] * 3):
        assert time_ratio(seconds, resolution=0.01) is None
    for seconds in ([*three, failed], [*three, failed, both_failed], [both_failed] * 3):
        assert time_ratio(seconds, resolution=None) is None


# ------------------------------------------------------------------------------ what a report says


ENGINES = ("ddp-torchrun", "horovod-mpi")
PLAN = a_plan(workers=(2,), blocks=5, target_top1=97.0)
EPOCHS = 6


def accuracy_of(block: int, configuration: str, epoch: int) -> float:
    """Top-1 after an epoch, from 1: the same for both engines; each seed reaches 97 % later than
    the one before it, the last one in the last epoch."""
    return 98.5 - 7 / epoch + 0.1 * (5 - block)


def a_comparison(
    folder: Path,
    plan: Plan = PLAN,
    top1: Callable[[int, str, int], float] = accuracy_of,
    weights: Callable[[int, str], str] = lambda block, configuration: f"{block}" * 64,
    **settings: Any,
) -> Path:
    """A comparison of both engines whose trainings reached this top-1, by block, configuration and
    epoch."""
    make_comparison(folder, plan)
    lines = lines_of(folder)
    for line in lines[1:]:
        name = Path(line["place"]).name.rpartition("-")[0]
        metrics = list[dict[str, Any]]()
        for one in line["metrics"]:
            if one["kind"] == "eval":
                one["top1"] = top1(line["block"], name, one["epoch"] + 1)
                own = {"kind": "epoch", "top1": one["top1"] - 2, "top5": 99.0, "loss": one["loss"]}
                own |= {"seconds": 0.9, "images_per_second": 1000.0}
                metrics.append({**one, **own})
            metrics.append(one)
        line["metrics"] = metrics
        line["settings"].update(settings)
        line["summary"].update(
            top1=metrics[-1]["top1"], weights_sha256=weights(line["block"], name)
        )
    write_lines(folder, lines)
    return folder


def differing(block: int, configuration: str) -> str:
    return f"{block}{configuration[0]}".ljust(64, "0")


def text_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert report.main([str(folder), "--no-html"]) == 0
    return " ".join(capsys.readouterr().out.split())


def report_of(folder: Path) -> Report:
    return Report(read_comparison(folder))


def test_bit_equal_trainings_are_not_tested_and_only_their_times_differ(tmp_path, capsys):
    folder = a_comparison(tmp_path / "c")
    lines = lines_of(folder)
    for line in lines[1:]:
        if "horovod" in line["place"]:
            for one in line["metrics"]:
                if one["kind"] == "eval":
                    one["train_seconds_so_far"] *= 1.2 + 0.01 * line["block"]
    write_lines(folder, lines)
    found = report_of(folder)
    [time], [accuracy] = found.times, found.accuracies
    assert (time.decision, accuracy.decision) == ("faster", "identical")
    assert time.speed and time.speed.ratio == pytest.approx(1.23, abs=0.001)
    assert accuracy.points and accuracy.points.values == (0.0,) * 5
    assert [row["reached"] for row in found.accuracy] == [5, 5]
    epochs = [row["epochs_to_target"] for row in found.accuracy]
    assert epochs[0] == epochs[1] and epochs[0][1] < epochs[0][2]
    text = text_of(folder, capsys)
    for words in (
        "DDP over Gloo reached 97 % top-1 1.23",
        "Final top-1 is the same in each of 5 seeds: the weights are identical.",
        "there is nothing to test",
    ):
        assert words in text
    assert "reached 97 % top-1 1.23" in found.headline[0]


def test_trainings_that_differ_are_tested_by_seed(tmp_path, capsys):
    def lower(block: int, configuration: str, epoch: int) -> float:
        less = 0.0 if configuration == ENGINES[0] else 0.5 + 0.02 * block
        return accuracy_of(block, configuration, epoch) - less

    found = report_of(a_comparison(tmp_path / "lower", top1=lower, weights=differing))
    [accuracy] = found.accuracies
    assert accuracy.decision == "higher" and accuracy.points
    assert accuracy.points.mean == pytest.approx(0.56)
    assert "ended 0.56 points of top-1 above" in " ".join(found.headline)

    def near(block: int, configuration: str, epoch: int) -> float:
        more = 0.02 * (block % 3) if configuration == ENGINES[0] else 0.0
        return accuracy_of(block, configuration, epoch) + more

    folder = a_comparison(tmp_path / "near", top1=near, weights=differing)
    lines = lines_of(folder)
    for line in lines[1:]:
        for one in line["metrics"]:
            one.update({"num_images": 10_000} if one["kind"] == "eval" else {})
    write_lines(folder, lines)
    [accuracy] = report_of(folder).accuracies
    assert accuracy.decision == "equal" and accuracy.power
    assert "equally accurate within 0.0" in text_of(folder, capsys)
    edit(folder / "plan.json", top1_margin=0.01)
    [accuracy] = report_of(folder).accuracies
    assert accuracy.decision in ("undecided", "higher")


def test_a_seed_that_never_reached_the_accuracy_is_named_and_gives_no_ratio(tmp_path, capsys):
    def fails(block: int, configuration: str, epoch: int) -> float:
        has_failed = (block, configuration) == (3, ENGINES[1])
        return min(96.0 if has_failed else 100.0, accuracy_of(block, configuration, epoch))

    folder = a_comparison(tmp_path / "c", top1=fails, weights=differing)
    found = report_of(folder)
    [time] = found.times
    assert time.speed is None and time.decision == "undecided"
    assert [row["reached"] for row in found.accuracy] == [5, 4]
    assert [math.isinf(row["seconds_to_target"][2]) for row in found.accuracy] == [False, True]
    text = text_of(folder, capsys)
    for words in (
        "no ratio of times to 97 % top-1",
        "did not reach it with seed 44",
        "horovod-mpi did not reach 97 % in 6 epochs (at most 96.00 %): its time to it is more than",
        "4 of 5",
    ):
        assert words.lower() in text.lower()
    assert "never" in as_page([found])
    by_name = {plot.name: plot for plot in draw_plots(found)}
    marks = [layer for layer in by_name["time-to-accuracy"].layers if layer.kind == "diamond"]
    assert sum(layer.hollow for layer in marks if len(layer.points) == 1) == 1


def test_the_best_of_a_training_that_failed_is_not_rounded_up():
    for best, told in ((64.1, "64.10"), (96.999, "96.99")):
        run = NotReached("", 2, 1, 42, "ddp-torchrun", 97.0, best, 6.0, 100.0)
        assert f"(at most {told} %)" in not_reached_text(run)


def test_where_both_sides_fail_alike_the_other_seeds_tell_the_ratio(tmp_path, capsys):
    def fails(block: int, configuration: str, epoch: int) -> float:
        return min(96.0 if block == 3 else 100.0, accuracy_of(block, configuration, epoch))

    folder = a_comparison(tmp_path / "c", top1=fails)
    [time] = report_of(folder).times
    assert time.speed and time.speed.blocks == 4
    assert "so the other seeds tell the ratio" in text_of(folder, capsys)


def test_an_end_at_the_accuracy_is_a_result_and_no_difference_of_settings(tmp_path, capsys):
    """With --desired-acc seeds and sides may end in different epochs."""
    plan = a_plan(workers=(2,), blocks=5)

    def ended(folder: Path, **settings: Any) -> Report:
        a_comparison(folder, plan, weights=differing, **settings)
        lines = lines_of(folder)
        for line in lines[1:]:
            batch = 64
            epochs = 4 + line["block"] % 2 + ("horovod" in line["place"])
            line["metrics"] = [one for one in line["metrics"] if one["step"] <= 12 * epochs]
            line["summary"].update(
                epochs=epochs, steps=12 * epochs, samples_seen=12 * epochs * batch
            )
        write_lines(folder, lines)
        return report_of(folder)

    found = ended(tmp_path / "desired", desired_acc=95.5)
    [time], [accuracy] = found.times, found.accuracies
    assert time.target_top1 == 95.5 and time.speed and not time.differences
    [epochs] = [fact for fact in found.facts if fact.field == "epochs"]
    assert epochs.is_varied and "epochs" in as_page([found])
    assert accuracy.decision == "undecided" and accuracy.points is accuracy.power is None
    assert "are not compared: trainings ended when they had reached 95.5 %" in text_of(
        tmp_path / "desired", capsys
    )
    [verdict] = ended(tmp_path / "settings").verdicts
    assert {fact.field for fact in verdict.differences} >= {"epochs", "steps"}


def with_failures(folder: Path, *places: tuple[int, str]) -> Path:
    """A comparison in which these trainings, by block and configuration, failed."""
    lines = lines_of(folder)
    for index, line in enumerate(lines):
        place = line.get("place", "")
        name = Path(place).name.rpartition("-")[0]
        if line["line"] == "run" and (line["block"], name) in places:
            lines[index] = {
                "line": "failure",
                "place": place,
                "block": line["block"],
                "outcome": {**line["outcome"], "status": "failed", "exit_code": 1},
                "folder": f"{place}.failed",
                "output": "loss is nan",
            }
    write_lines(folder, lines)
    return folder


BY_TURNS = {"measure": "turns", "workers": (2,), "full_runs": 5, "blocks": 3}


def by_turns(folder: Path, *failures: tuple[int, str], **plan: Any) -> Path:
    """A comparison by turns with five full runs of each engine, of which these failed."""
    a_comparison(folder, a_plan(**{**BY_TURNS, **plan}), weights=differing)
    make_turns(folder, {ENGINES[0]: 100, ENGINES[1]: 95})
    return with_failures(folder, *failures)


def test_trainings_that_fail_beside_turns_are_not_dropped(tmp_path, capsys):
    """The seeds that are left would be those with which both sides learnt."""
    plan = {"target_top1": 97.0, "top1_goals": LOSS}
    complete = report_of(by_turns(tmp_path / "complete", **plan))
    [time], [accuracy] = complete.times, complete.accuracies
    assert time.speed and time.obstacle is accuracy.obstacle is None
    folder = by_turns(tmp_path / "c", (2, ENGINES[1]), (4, ENGINES[1]), **plan)
    found = report_of(folder)
    [time], [accuracy] = found.times, found.accuracies
    assert time.speed is None and accuracy.points is None and accuracy.decision == "undecided"
    text = text_of(folder, capsys)
    both = "Horovod over MPI and DDP over Gloo"
    failed = "the training of Horovod over MPI with seed 43 failed; the training of Horovod over"
    assert f"no ratio of times to 97 % top-1 between {both}: {failed}" in text
    assert f"no verdict on the accuracy of {both}: {failed}" in text
    assert "fewer than" not in " ".join(found.headline)
    assert report.main([str(folder), "--no-html", "--check"]) == 3
    assert "no verdict: the training of" in capsys.readouterr().out.splitlines()[-1]


def test_accuracy_is_decided_when_all_full_runs_have_ended(tmp_path):
    folder = by_turns(tmp_path / "c", target_top1=97.0)
    write_lines(folder, [one for one in lines_of(folder) if one.get("block") != 5])
    found = report_of(folder)
    [time], [accuracy], [verdict] = found.times, found.accuracies, found.verdicts
    assert verdict.is_finished and not time.is_finished and accuracy.obstacle
    assert (time.decision, accuracy.decision) == ("undecided", "undecided")


def test_more_turns_are_not_said_to_decide_the_times_of_whole_trainings(tmp_path):
    found = report_of(by_turns(tmp_path / "c", target_top1=97.0))
    speed = Estimate(1.2, 1.0, 1.44, (1.2,) * 5, error=0.05, degrees=4)
    found.verdicts = []
    found.times = [replace(found.times[0], speed=speed, decision="undecided")]
    assert extension_of(found.record, found.times) and found.next_step == ("", "")


def test_pairs_and_cases_without_a_target_keep_their_verdicts(tmp_path):
    """Of two cases one ends at an accuracy."""
    cases = {"ended": ("--desired-acc", "95.5"), "whole": ()}
    plan = a_plan(cases, workers=(2,), blocks=5)
    folder = a_comparison(tmp_path / "c", plan, weights=differing)
    lines = lines_of(folder)
    for line in lines[1:]:
        if "ended" in line["place"]:
            line["settings"]["desired_acc"] = 95.5
    write_lines(folder, lines)
    found = report_of(folder)
    assert [time.case for time in found.times] == ["ended"]
    asked = {one.case: one.target_top1 for one in found.asked}
    assert asked == {"ended": 95.5, "whole": None}
    by_case = {one.case: one.ended_at for one in found.accuracies}
    assert by_case == {"ended": (95.5,), "whole": ()}


def test_final_accuracies_are_not_compared_if_one_side_ended_at_an_accuracy(tmp_path, capsys):
    plan = a_plan(workers=(2,), blocks=5)
    folder = a_comparison(tmp_path / "c", plan, weights=differing)
    lines = lines_of(folder)
    for line in lines[1:]:
        if "horovod" in line["place"]:
            line["settings"]["desired_acc"] = 95.5
            line["summary"].update(epochs=5, steps=60, samples_seen=60 * 64)
            line["metrics"] = [one for one in line["metrics"] if one["step"] <= 60]
    write_lines(folder, lines)
    found = report_of(folder)
    [accuracy] = found.accuracies
    assert not found.times and accuracy.ended_at == (95.5,) and accuracy.points is None
    assert {"epochs", "steps"} <= {fact.field for fact in accuracy.differences}


def test_one_seed_and_null_tests_say_nothing_of_accuracy_over_seeds(tmp_path):
    for name, plan in {
        "one": a_plan(blocks=1, workers=(2,)),
        "null": a_plan(configurations=ENGINES[:1], null=True, workers=(2,)),
    }.items():
        found = report_of(make_comparison(tmp_path / name, plan))
        assert (found.times, found.accuracies, found.accuracy) == ([], [], [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"blocks": 1, "target_top1": 97.0}, "--target-top1: needs whole runs"),
        ({"blocks": 2, "top1_goals": {"ddp-torchrun:horovod-mpi": 0.0}}, "at least 3 seeds"),
        (
            {"target_top1": 97.0, "trainer_arguments": ("--data", "synthetic")},
            "--target-top1: on random images",
        ),
        ({"measure": "turns", "top1_margin": 0.5}, "--top1-margin: needs whole runs"),
        ({"null": True, "target_top1": 97.0}, "and no --null"),
        (
            {"target_top1": 97.0, "trainer_arguments": ("--desired-acc", "95")},
            "--target-top1: the trainers' --desired-acc ends",
        ),
    ],
)
def test_fields_without_effect_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        check_plan(a_plan(**fields))


# --------------------------------------------------------------------------------------- the goals


LOSS = {"horovod-mpi:ddp-torchrun": -0.2}  # that it may have
GAIN = {"ddp-torchrun:horovod-mpi": 0.1}  # that it must have


def with_loss(loss: float) -> Callable[[int, str, int], float]:
    """Horovod ends so many points below DDP, more or less."""

    def top1(block: int, configuration: str, epoch: int) -> float:
        less = 0.0 if configuration == ENGINES[0] else loss + 0.02 * (block % 3)
        return accuracy_of(block, configuration, epoch) - less

    return top1


@pytest.mark.parametrize(
    ("goals", "loss", "weights", "code", "words"),
    [
        (LOSS, 0.0, None, 0, "≥ −0.20 points: reached, 0.00 points, as the weights are identical"),
        (GAIN, 0.0, None, 1, "≥ +0.10 points: not reached, 0.00 points"),
        (LOSS, 0.0, differing, 0, "≥ −0.20 points: reached, −0.0"),
        (LOSS, 0.5, differing, 1, "≥ −0.20 points: not reached, −0.5"),
        (LOSS, 0.18, differing, 2, "≥ −0.20 points: undecided, −0.2"),
        (GAIN, 0.5, differing, 0, "≥ +0.10 points: reached, +0.5"),
    ],
)
def test_the_gate_judges_accuracy(goals, loss, weights, code, words, tmp_path, capsys):
    own = {"weights": weights} if weights else {}
    top1 = with_loss(loss) if weights else accuracy_of
    folder = a_comparison(
        tmp_path / "c", a_plan(workers=(2,), blocks=5, top1_goals=goals), top1, **own
    )
    lines = lines_of(folder)
    for line in lines[1:]:
        for one in line["metrics"]:
            one.update({"num_images": 10_000} if one["kind"] == "eval" else {})
    write_lines(folder, lines)
    assert report.main([str(folder), "--no-html", "--check"]) == code
    said = capsys.readouterr().out
    assert words in said.splitlines()[-1]
    assert "top-1 of" in as_page([report_of(folder)])


def test_a_goal_of_accuracy_is_not_judged_where_trainings_ended_at_an_accuracy(tmp_path, capsys):
    plan = a_plan(workers=(2,), blocks=5, top1_goals=LOSS)
    folder = a_comparison(tmp_path / "c", plan, weights=differing, desired_acc=97.0)
    assert report.main([str(folder), "--no-html", "--check"]) == 3
    assert "--desired-acc ended the trainings" in capsys.readouterr().out.splitlines()[-1]


def test_goals_of_accuracy_are_there_before_there_are_seeds(tmp_path, capsys):
    plan = a_plan(workers=(2,), blocks=1, measure="runs", top1_goals=LOSS)
    folder = a_comparison(tmp_path / "c", plan)
    edit(folder / "plan.json", blocks=None)
    assert report.main([str(folder), "--no-html", "--check"]) == 3
    assert "has no goals" not in capsys.readouterr().out


def test_the_goals_of_both_directions_are_one_pair():
    both = LOSS | {"ddp-torchrun:horovod-mpi": -0.2}
    assert a_plan(top1_goals=both).pairs() == [("horovod-mpi", "ddp-torchrun")]
    with pytest.raises(UserError, match="--top1-goals nowhere:ddp-torchrun: nowhere: there is no"):
        check_plan(a_plan(top1_goals={"nowhere:ddp-torchrun": -0.2}))


def test_noise_alone_seldom_reaches_or_misses_a_goal_of_accuracy():
    at_goal = paired("fashion", 5, 0.0, -0.2)
    assert fmean(one.p_difference(-0.2) < 0.05 for one in at_goal) <= 0.06


# --------------------------------------------------------------------------------------- the plots


def test_a_band_ends_where_the_first_seed_ends():
    curves = [[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)], [(0.5, 0.0), (2.5, 40.0)]]
    found = band(curves)
    assert [x for x, _ in found.median] == [1.0, 2.0, 2.5]
    assert found.lowest[0] == (1.0, 10.0) and found.highest[0] == (1.0, 10.0)
    assert found.lowest[1] == (2.0, 20.0) and found.highest[1] == (2.0, 30.0)
    assert found.median[1] == (2.0, 25.0)
    assert band(curves[:1]).median == curves[0]
    assert band([curves[0], []]) == band([]) == ([], [], [])


def test_learning_curves_show_median_and_range_over_seeds(tmp_path):
    found = report_of(a_comparison(tmp_path / "c"))
    plots = {plot.name: plot for plot in draw_plots(found)}
    names = {"time-to-accuracy", "learning-top1", "learning-top5", "learning-loss"}
    assert names <= plots.keys()
    assert {plots[name].section for name in names} == {"Learning curves"}
    top1 = plots["learning-top1"]
    areas = [layer for layer in top1.layers if layer.kind == "area"]
    assert len(areas) == 4  # of training and validation of both engines
    [lowest, highest] = [[y for x, y in areas[-1].points if x == 6.0][at] for at in (0, 1)]
    assert (lowest, highest) == pytest.approx((accuracy_of(5, "", 6), accuracy_of(1, "", 6)))
    lines = [layer for layer in top1.layers if layer.kind == "line" and layer.texts]
    assert lines[-1].points[-1] == pytest.approx((6.0, accuracy_of(3, "", 6)))
    assert "median of 5 seeds" in lines[-1].texts[0]
    assert "Z" not in lines[-1].path(lines[-1].points)
    assert all(f'id="{name}"' in as_page([found]) for name in names)


def run_folders(root: Path) -> list[Path]:
    """Folders of trainings as a trainer writes them: both engines, three seeds each."""
    make_comparison(root, a_plan(workers=(2,)))
    return sorted(path.parent for path in root.glob("block-*/*/summary.json"))


def test_report_draws_the_learning_curves_of_any_trainings(tmp_path, capsys):
    folders = run_folders(tmp_path / "c")
    trainings = read_trainings(folders)
    assert {one.label: len(one.runs) for one in trainings} == {
        "DDP over Gloo": 3,
        "Horovod over MPI": 3,
    }
    assert [plot.name for plot in learning_plots(trainings)][-1] == "learning-loss"
    words = [str(folder) for folder in folders]
    page = tmp_path / "page.html"
    assert report.main([*words, "--html", str(page)]) == 0
    assert report.main([*words, "--svg", str(tmp_path / "svg")]) == 0
    text = capsys.readouterr().out
    assert "97.50" in text and "Horovod over MPI" in text
    assert "Learning curves" in page.read_text()
    assert {path.stem for path in (tmp_path / "svg").iterdir()} == {
        "time-to-accuracy",
        "learning-top1",
        "learning-top5",
        "learning-loss",
    }
    assert report.main(words) == 0  # beside the folders that they have in common
    assert (tmp_path / "c/learning-curves.html").exists()


def test_trainings_of_other_settings_are_named_by_them(tmp_path):
    folders = run_folders(tmp_path / "c")[:2]
    config = json.loads((folders[1] / "config.json").read_text())
    environment = (folders[0] / "environment.json").read_text()
    (folders[1] / "environment.json").write_text(environment)
    (folders[1] / "config.json").write_text(json.dumps({**config, "batch_size": 64}))
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary["fingerprint"]["batch_size"] = 64
    summary["samples_seen"] *= 2
    summary["images_per_second"] *= 2
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    assert [one.label for one in read_trainings(folders)] == [
        "DDP over Gloo, batch_size 32",
        "DDP over Gloo, batch_size 64",
    ]


def test_trainings_on_other_software_are_other_trainings(tmp_path):
    folders = [one for one in run_folders(tmp_path / "c") if "ddp" in one.name]
    environment = json.loads((folders[1] / "environment.json").read_text())
    (folders[1] / "environment.json").write_text(json.dumps({**environment, "torch": "9.9"}))
    labels = {one.label: len(one.runs) for one in read_trainings(folders)}
    assert labels == {
        f"DDP over Gloo, torch {environment['torch']}": 2,
        "DDP over Gloo, torch 9.9": 1,
    }


def test_a_training_counts_as_one_seed_only(tmp_path):
    folders = run_folders(tmp_path / "c")
    with pytest.raises(UserError, match="is given 2 times"):
        read_trainings([folders[0], folders[0]])
    copied = shutil.copytree(folders[0], tmp_path / "again")
    with pytest.raises(UserError, match="also with seed 42"):
        read_trainings([folders[0], copied])


def test_a_training_that_goes_on_is_one_message(tmp_path, refusal):
    folder = run_folders(tmp_path / "c")[0]
    (folder / "summary.json").unlink()
    assert "the training has not ended" in refusal(report.main, [str(folder)], code=1)
    other = run_folders(tmp_path / "d")[0]
    assert "leave out --csv" in refusal(report.main, [str(other), "--csv"], code=1)


if __name__ == "__main__":
    print(*rows_of_coverage(), sep="\n")
