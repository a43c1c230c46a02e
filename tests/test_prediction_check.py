"""The check of the prediction: what is held out stays out, and the table is the record's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from launching import ROOT

from benchmarks import checked, prediction
from benchmarks.checked import FIT, Point, Record
from compare.prediction.inputs import Inputs
from recipe.errors import UserError


def record(held_out_factor: float = 1.0) -> Record:
    """Steps of 0.1 s a worker, those held out by this factor longer."""
    planned = prediction.Settings(
        models=("resnet18",), engines=("ddp",), transports=("mpi",)
    ).points()
    points = []
    for point in planned:
        seconds = 0.1 * point.workers * (1.0 if point.role == FIT else held_out_factor)
        figures = {"step_seconds": seconds, "low_seconds": seconds, "high_seconds": seconds}
        shares = {"data": 0.0, "forward": 0.4, "backward": 0.5, "optimizer": 0.1, "other": 0.0}
        phases = {f"{name}_seconds": share * seconds for name, share in shares.items()}
        points.append(replace(point, **figures, phases=phases, turns=3))
    inputs = Inputs(
        engine="ddp", transport="mpi", arch="resnet18", batch_size=8, gradient_bytes=(1e6, 1e6),
        ready_seconds=(0.01, 0.05), data_seconds=0.0, forward_seconds=0.04, backward_seconds=0.05,
        optimizer_seconds=0.01,
    )  # fmt: skip
    links = {f"{place} ddp-mpi": (1e-4, 1e-9) for place in ("within", "between")}
    return Record("2026-11-25", {"cores": 2}, points, {"resnet18 ddp-mpi": inputs}, links)


def test_one_worker_is_as_measured_and_what_is_held_out_enters_no_prediction() -> None:
    found, others = checked.check(record()), checked.check(record(held_out_factor=3))
    assert found[0].error == pytest.approx(0)
    assert [one.predicted for one in found] == [one.predicted for one in others]
    assert {one.point.workers for one in found if one.point.role == FIT} == {1, 2}


def test_the_table_is_written_from_the_record(tmp_path: Path) -> None:
    one = record()
    one.points[3] = replace(one.points[3], step_seconds=None, failed="no such luck")
    checked.write(tmp_path, one)
    (text,) = prediction.run(prediction.Settings(), table=tmp_path)
    assert "no such luck" in text and (tmp_path / "table.md").read_text() == f"{text}\n"
    assert text.count("\n| resnet18") == len(checked.check(one)) + 2


def test_recorded_tables_are_what_the_points_give() -> None:
    page = (ROOT / "docs" / "prediction.md").read_text()
    folders = sorted((ROOT / "results").glob("*/*-prediction"), key=lambda one: one.name)
    assert f"({Path('..') / folders[-1].relative_to(ROOT)}/table.md)" in page
    for folder in folders:
        text = checked.show(checked.read(folder))
        assert (folder / "table.md").read_text() == f"{text}\n"
    median, worst, inside = re.findall(r"([\d.]+)%", text.splitlines()[0])[:3]
    said = f"error is {median} % in the median (goal 8 %) and {float(worst):.0f} % at worst"
    assert said in page and f"; {inside} % are inside" in page


def test_hosts_need_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prediction.namespaces, "missing_tools", lambda *_: ["root"])
    with pytest.raises(UserError, match=r"needs root: .*--hosts without numbers"):
        prediction.measure(prediction.Settings(out=tmp_path))


def test_a_point_has_one_side_at_all_rates() -> None:
    planned: list[Point] = prediction.Settings().points()
    assert len({point.key for point in planned}) == len(planned) == 144
    sides = {(prediction.group_of(one), prediction.name_of(one)) for one in planned}
    assert len(sides) == 2 * 4 * (6 + 3)
