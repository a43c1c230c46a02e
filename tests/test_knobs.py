"""The file of --knobs: what it may say, what wins over it, and what is written down of it."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from making import a_world

from ddp_train.buckets import bucket_sizes
from recipe.errors import UserError
from recipe.record.fingerprint import steering_variables
from recipe.settings.config import Config, parse_args
from recipe.settings.flags import names_of
from recipe.settings.knobs import SETTINGS, Knobs, knobs_text, read_knobs
from recipe.settings.presets import preset

FILE = """
[ddp]
bucket_cap_mb = 50
static_graph = true

[ddp.environment]
NCCL_ALGO = "Ring"

[horovod]
num_groups = 4

[horovod.environment]
HOROVOD_CYCLE_TIME = "0.5"
OMPI_MCA_coll_tuned_allreduce_algorithm = "4"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without variables of the shell; those that a test sets go with it."""
    for name in ("NCCL_ALGO", "HOROVOD_CYCLE_TIME", "OMPI_MCA_coll_tuned_allreduce_algorithm"):
        os.environ.pop(name, None)
    monkeypatch.setattr(os, "_exit", sys.exit)


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "knobs.toml"
    path.write_text(text)
    return path


def parse(words: str, path: Path, engine: str = "ddp", size: int = 2) -> Config:
    return parse_args(engine, a_world(size=size), [*words.split(), "--knobs", str(path)])


def test_each_engine_reads_its_own_table(tmp_path: Path) -> None:
    ddp = {"bucket_cap_mb": 50.0, "static_graph": True}
    knobs = read_knobs(write(tmp_path))
    assert knobs["ddp"] == Knobs(ddp, {"NCCL_ALGO": "Ring"})
    assert type(knobs["ddp"].settings["bucket_cap_mb"]) is float  # as the flag gives it
    assert knobs["horovod"].settings == {"num_groups": 4}
    assert knobs.keys() == {"ddp", "horovod"}
    assert read_knobs(write(tmp_path, "")) == {}


def test_a_written_file_reads_back_the_same(tmp_path: Path) -> None:
    knobs = read_knobs(write(tmp_path))
    assert read_knobs(write(tmp_path, knobs_text(knobs))) == knobs
    odd = {"horovod": Knobs({}, {"OMPI_MCA_btl": 'a "quoted" \\ path'})}
    assert read_knobs(write(tmp_path, knobs_text(odd))) == odd


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[ddp", ["Expected ']'"]),
        ("[dpp]", ["unknown field `dpp`", "[ddp] bucket_cap_mb, first_bucket_mb"]),
        ("ddp = 3", ["`$.ddp`"]),
        ("[ddp]\nbucket_cap = 3", ["unknown field `bucket_cap` - at `$.ddp`"]),
        ("[horovod]\nstatic_graph = true", ["unknown field `static_graph` - at `$.horovod`"]),
        ("[ddp]\nbucket_cap_mb = 0", ["ddp.bucket_cap_mb = 0.0:", "above 0"]),
        ("[ddp]\nbucket_cap_mb = nan", ["ddp.bucket_cap_mb = nan:", "above 0"]),
        ("[ddp]\nbucket_cap_mb = true", ["`float | null`, got `bool` - at `$.ddp.bucket_cap_mb`"]),
        ("[ddp]\nstatic_graph = 1", ["`$.ddp.static_graph`"]),
        ("[horovod]\nnum_groups = 2.0", ["`$.horovod.num_groups`"]),
        ("[ddp]\nenvironment = 3", ["`$.ddp.environment`", "[ddp.environment]"]),
        (
            "[horovod.environment]\nHOROVOD_CYCLE_TIM = '1'",
            ["horovod.environment.HOROVOD_CYCLE_TIM", "did you mean HOROVOD_CYCLE_TIME?"],
        ),
        ("[horovod.environment]\nHOROVOD_CYCLE_TIME = 1", ["`str`, got `int`"]),
        ('[ddp.environment]\nNCCL_ALGO = "\\u0000"', ["$.ddp.environment"]),
        ("[horovod.environment]\nHOROVOD_RANK = '1'", ["HOROVOD_RANK"]),
        ("[horovod.environment]\nHOROVOD_TIMELINE = '/t'", ["HOROVOD_TIMELINE"]),
        ("[ddp.environment]\nHOROVOD_CYCLE_TIME = '1'", ["[horovod.environment]"]),
        ("[ddp.environment]\nPATH = '/'", ["ddp.environment.PATH", "in the shell"]),
        ("[ddp.environment]\nNCCL_COMM_ID = 'a:1'", ["NCCL_COMM_ID", "where the ranks meet"]),
        ("[horovod.environment]\nOMPI_MCA_rmaps_base_oversubscribe = '1'", ["in the shell"]),
        ("[ddp.environment]\nTORCH_ALLOW_TF32_CUBLAS_OVERRIDE = '1'", ["what is computed"]),
    ],
)
def test_what_is_refused_names_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=rf"^--knobs {path}: [^\n]*\n?\Z") as refused:
        read_knobs(path)
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_file_that_is_not_there_says_how_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("", tmp_path / "none.toml")
    assert re.fullmatch(".*there is no such file.*--tune.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        # Horovod's table is not DDP's.
        ("", {"bucket_cap_mb": 50.0, "static_graph": True, "num_groups": None}),
        ("--bucket-cap-mb 7 --no-static-graph", {"bucket_cap_mb": 7.0, "static_graph": False}),
        ("--preset tv-v1 --data synthetic", {"bucket_cap_mb": 50.0, "wd": 1e-4}),
    ],
)
def test_flags_win_over_the_file_and_the_file_over_the_preset(
    line: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path)
    assert vars(parse(line, path)).items() >= {**settings, "knobs": str(path)}.items()


def test_variables_are_set_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse("", write(tmp_path), "horovod")
    ring = {"OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
    assert config.knob_variables == {"HOROVOD_CYCLE_TIME": "0.5"} | ring
    assert os.environ["HOROVOD_CYCLE_TIME"] == "0.5" and "NCCL_ALGO" not in os.environ
    assert steering_variables(os.environ).items() >= config.knob_variables.items()
    record = json.loads(json.dumps(asdict(config)))
    assert (record["knob_variables"], record["num_groups"]) == (config.knob_variables, 4)
    for engine, size in (("ddp", 2), ("single", 1)):
        parse("", write(tmp_path), engine, size)
    assert capsys.readouterr().err == "", "nothing of the file is said to have no effect"


def test_the_environment_wins_over_the_file_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    monkeypatch.setenv("OMPI_MCA_coll_tuned_allreduce_algorithm", "4")
    config = parse("", write(tmp_path), "horovod")
    assert os.environ["HOROVOD_CYCLE_TIME"] == "3" and config.knob_variables == {}
    assert capsys.readouterr().err == (
        "warning: HOROVOD_CYCLE_TIME=0.5 of --knobs has no effect: the environment says "
        "HOROVOD_CYCLE_TIME=3\n"
    )


def test_every_knob_but_two_is_the_engines_default_and_none_is_work() -> None:
    changed = {name for name in names_of("speed") if getattr(preset("digits"), name)}
    assert changed == {"gradient_as_bucket_view", "sleeping_poll"}, "the same bits, in less time"
    assert {n for names in SETTINGS.values() for n in names} == {*names_of("speed")} - {
        "knob_variables"
    }
    assert SETTINGS["ddp"]["bucket_cap_mb"] is float and SETTINGS["horovod"]["num_groups"] is int


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"bucket_cap_mb": None}),
        ({"bucket_cap_mb": 5.0}, {"bucket_cap_mb": 5.0}),
        ({"first_bucket_mb": 2.0}, {"bucket_cap_mb_list": [2.0, 25.0]}),
        ({"first_bucket_mb": 2.0, "bucket_cap_mb": 9.0}, {"bucket_cap_mb_list": [2.0, 9.0]}),
    ],
)
def test_bucket_sizes(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert bucket_sizes(Config(**settings)) == arguments
