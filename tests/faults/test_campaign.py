"""The campaign in short: each fault once with each engine, of which `make test` has a few. `make
faults` has the other launchers, and many trials of each."""

import random
import re
from pathlib import Path

import pytest
from campaign import DDP, RESTARTS, SCENARIOS, Result, Start, attempt, lacking, markdown
from launching import ROOT, read_json
from needs import skip_if_missing

OFTEN = [("signal-launcher", DDP), ("restart", RESTARTS[0])]
SHORT = [
    pytest.param(
        name,
        start,
        marks=[
            *([pytest.mark.cluster] if scenario.on_hosts else ()),
            *([pytest.mark.full] if (name, start) not in OFTEN else ()),
        ],
    )
    for name, scenario in SCENARIOS.items()
    for start in {engine: (launcher, engine) for launcher, engine in scenario.starts}.values()
]


@pytest.mark.launch
@pytest.mark.parametrize(("name", "start"), SHORT)
def test_a_training_survives(name: str, start: Start, tmp_path: Path) -> None:
    is_on_hosts = SCENARIOS[name].on_hosts
    skip_if_missing(lacking(name), "several hosts" if is_on_hosts else "a small disk")
    seed = random.SystemRandom().randrange(10**6)
    result = attempt(name, start, 1, seed, tmp_path)
    assert not result.problem, f"--seed {seed}: {result}"


def test_each_fault_has_its_promise() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert [name for name in SCENARIOS if f"`{name}`" not in page] == []


def test_the_page_names_the_newest_campaign_and_its_trials() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    newest = max((ROOT / "results").glob("*/*-faults"), key=lambda folder: folder.name)
    trials = [Result(**trial) for trial in read_json(newest / "campaign.json")["trials"]]
    assert f"../{newest.relative_to(ROOT)}/table.md" in page and f"{len(trials)} trials" in page
    # Other modules set how far tabulate pads cells.
    table, made = (
        [re.sub("[ -]+", " ", line) for line in text.splitlines()]
        for text in ((newest / "table.md").read_text(), markdown(trials))
    )
    assert table == made
