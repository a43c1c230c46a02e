"""Published speeds beside the measured ones."""

import re
import shutil
from pathlib import Path

import pytest
from test_compare_records import make_comparison

from compare import report
from compare.evidence.records import load_comparison
from compare.evidence.references import COLUMNS, load_references
from compare.page.plots import all_plots
from compare.page.report import Report
from recipe.errors import UserError

PUBLISHED = Path(__file__).resolve().parent.parent / "compare/references/resnet50-v100.csv"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_comparison(tmp_path_factory.mktemp("template") / "comparison")


@pytest.fixture
def folder(tmp_path, template):
    return Path(shutil.copytree(template, tmp_path / "comparison"))


def test_published_speeds_are_drawn_beside_the_measured(folder, tmp_path):
    (reference,) = load_references(PUBLISHED)
    assert list(reference.images_per_second) == [4, 8, 16, 32, 64]
    assert "distributed-pytorch" in reference.source
    plots = all_plots(Report(load_comparison(folder), [reference]))
    plot = next(plot for plot in plots if plot.name == "throughput")
    assert plot.x.logarithmic and plot.y.logarithmic
    [line, marks] = [layer for layer in plot.layers if layer.key == reference.name]
    assert line.points == list(reference.images_per_second.items())
    assert marks.texts[0] == f"{reference.name}, 4 workers: 3,003 images/s"
    page = tmp_path / "page.html"
    assert report.main([str(folder), "--html", str(page), "--reference", str(PUBLISHED)]) == 0
    assert reference.source in page.read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name,workers,source\n", "must name the columns name,workers,images_per_second,source"),
        ("", "must name the columns"),
        ("HEADER", "holds no line with a speed"),
        ("HEADER\na,4,fast,b", "line 2: could not convert"),
        ("HEADER\na,4,100,b\na,8,-1,b", "line 3: a name, a source and positive numbers"),
        ("HEADER\na,4,100,", "a name, a source"),
        ("HEADER\na,4,100,b\na,4,90,b", "line 3: 'a' has a speed of 4 workers already"),
        ("HEADER\na,4", "line 2: "),
        ("\xff", "line 0: "),
    ],
)
def test_references_that_cannot_be_read(tmp_path, content, words):
    file = tmp_path / "speeds.csv"
    file.write_bytes(content.replace("HEADER", ",".join(COLUMNS)).encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(words)):
        load_references(file)
    with pytest.raises(UserError, match="cannot be read"):
        load_references(tmp_path / "none.csv")


def test_a_reference_needs_a_plot(folder, capsys):
    for others in (["--no-html"], ["--markdown"], [str(folder), "--html", "both.html"]):
        assert report.main([str(folder), *others, "--reference", str(PUBLISHED)]) == 1
        assert "--reference is drawn in the plots" in capsys.readouterr().err
