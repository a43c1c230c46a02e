"""At which step, layer and rank two runs diverge, and by how much; on synthetic and real traces."""

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch
from records import a_summary

from compare.evidence.parity import distance_of, ulp_distances
from compare.parity import main

BUFFER = "buffer/bn1.running_mean"
LAYERS = ("conv1.weight", "bn1.weight", "fc.weight")
STEPS, RANKS = (1, 2, 3, 4), (0, 1)
LINE = {
    "kind": "step",
    "time_utc": "2026-11-21T12:00:00Z",
    "epoch": 0,
    "samples_seen": 8,
    "top1": 50.0,
    "top5": 90.0,
    "learning_rate": 0.1,
    "seconds": 1.0,
    "data_seconds": 0.1,
    "images_per_second": 8.0,
}
# Any change to a trace: (step, rank, name) -> function of the array.
Changes = dict[tuple[int, int, str], Any]


def make_run(
    folder: Path,
    changes: Changes | None = None,
    steps: tuple[int, ...] = STEPS,
    ranks: tuple[int, ...] = RANKS,
    losses: dict[int, float] | None = None,
    digest: str | None = "aa",
    trace: bool = True,
    **settings: Any,
) -> Path:
    """Write a run folder whose tensors depend only on step, rank and name; then change some."""
    folder.mkdir(parents=True)
    for step, rank in itertools.product(steps, ranks if trace else ()):
        arrays: dict[str, Any] = {"loss": np.float32(1 / (step + rank + 1))}
        for number, layer in enumerate(LAYERS):
            random = np.random.default_rng([step, number])
            arrays[f"gradient/{layer}"] = random.normal(size=(4, 3)).astype(np.float32)
            arrays[f"weight/{layer}"] = random.normal(size=(4, 3)).astype(np.float32)
        arrays[BUFFER] = np.float32([step, rank])
        arrays["buffer/bn1.num_batches_tracked"] = np.int64(step)
        for (at_step, at_rank, name), change in (changes or {}).items():
            if (at_step, at_rank) == (step, rank):
                arrays[name] = change(np.array(arrays[name]))
        path = folder / f"trace/rank-{rank}/step-{step:06d}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    lines = [
        json.dumps({**LINE, "step": step, "loss": (losses or {}).get(step, 1 / step)}) + "\n"
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"batch_norm": "local", **settings}))
    if digest:
        told = {"steps": max(steps), "weights_sha256": digest, "fingerprint": settings}
        (folder / "summary.json").write_text(json.dumps(asdict(a_summary(**told))))
    return folder


def up(count: int, index: tuple[int, ...] = (1, 2)) -> Any:
    """A change: one element, `count` representable numbers away."""

    def change(values: np.ndarray) -> np.ndarray:
        for _ in range(count):
            values[index] = np.nextafter(values[index], np.float32(np.inf))
        return values

    return change


def put(value: float) -> Any:
    def change(values: np.ndarray) -> np.ndarray:
        values[1, 2] = value
        return values

    return change


@pytest.fixture
def compare(tmp_path, capsys):
    """Make two runs, compare them, and return exit code, text and JSON."""

    def run(a: dict[str, Any], b: dict[str, Any], *flags: str) -> tuple[int, str, dict[str, Any]]:
        folders = [str(make_run(tmp_path / name, **x)) for name, x in (("A", a), ("B", b))]
        code = main([*folders, *flags])
        text = capsys.readouterr().out
        assert main([*folders, *flags, "--json"]) == code
        return code, text, json.loads(capsys.readouterr().out)

    return run


# -- Distances -------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, st.integers(0, 50))
def test_ulps_count_steps_between_representable_numbers(value, count):
    a = np.float32([value])
    b = a.copy()
    with np.errstate(over="ignore"):  # beyond the least number is -infinity
        for _ in range(count):
            b = np.nextafter(b, np.float32(-np.inf))
    if np.isfinite(b).all():
        assert ulp_distances(a, b) == count == ulp_distances(b, a)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulps_of_every_width_and_across_zero(dtype):
    tiny = np.nextafter(dtype(0), dtype(1))
    assert ulp_distances(np.array([tiny]), np.array([-tiny])) == 2
    assert ulp_distances(np.array([dtype(0.0)]), np.array([dtype(-0.0)])) == 0
    most = np.finfo(dtype).max
    # From the least to the largest: of 64 bits more than an int64 holds.
    bits = np.dtype(dtype).itemsize * 8
    exponents = 2 ** {16: 5, 32: 8, 64: 11}[bits]
    finite = 2**bits - 2 * (2**bits // (2 * exponents)) - 1  # with a single zero
    assert int(ulp_distances(np.array([most]), np.array([-most]))[0]) == finite - 1


@settings(max_examples=50)
@given(st.lists(FLOATS, min_size=1, max_size=6), st.lists(FLOATS, min_size=6, max_size=6))
def test_distance_is_symmetric_and_bounded(a, b):
    x, y = np.float32(a), np.float32(b[: len(a)])
    ulps, relative, values = distance_of(x, y)
    assert (ulps, relative) == distance_of(y, x)[:2]
    assert 0 <= relative <= 2
    assert (ulps == 0) == bool((x == y).all())
    assert bool(values) == (x.tobytes() != y.tobytes())


def test_relative_distance_is_a_share_of_the_largest_value():
    ulps, relative, values = distance_of(np.float32([100, 0]), np.float32([100, 1e-3]))
    assert relative == pytest.approx(1e-5) and ulps > 10**8
    assert values == "0 against 0.00100000005"
    assert distance_of(np.int64(7), np.int64(4))[0] == 3


def test_nan_and_infinity_equal_only_themselves():
    nan, inf, most = np.nan, np.inf, np.finfo(np.float32).max
    assert not distance_of(np.float32([nan, inf, 1]), np.float32([nan, inf, 1]))[2]
    payload = np.array([0x7FC00001], np.int32).view(np.float32)
    ulps, _, values = distance_of(np.float32([nan]), payload)
    assert values and ulps == 0
    for a, b in ((nan, 1), (1, nan), (inf, most), (inf, -inf), (nan, inf)):
        assert distance_of(np.float32([0, a]), np.float32([0, b]))[:2] == (inf, inf), (a, b)
    assert distance_of(np.float32([inf, 1]), np.float32([inf, 1.5]))[1] == pytest.approx(1 / 3)


# -- Two recorded runs -----------------------------------------------------------------------------


SEVERAL = {
    (4, 0, "gradient/conv1.weight"): up(9),
    (3, 0, "gradient/fc.weight"): up(2),
    (3, 1, "gradient/bn1.weight"): up(5),  # comes before fc in the forward pass
    (3, 0, "weight/bn1.weight"): up(1),
}
NEAR = {(2, 0, "gradient/fc.weight"): up(4), (3, 0, "weight/fc.weight"): up(40)}
LATER = {(4, 1, "loss"): up(2, ()), (4, 0, "weight/fc.weight"): up(3)}
INFINITE = "--max-ulps 999999999999 --relative 1e30"
WITHIN = "within the tolerance"


@pytest.mark.parametrize(
    ("changes", "flags", "verdict", "first", "hint"),
    [
        ({}, "", "bit-equal", None, ""),
        (SEVERAL, "", "diverged", ("gradient", 3, "bn1.weight", [1], 5), "gradient 3 backward"),
        (
            {(2, rank, "gradient/bn1.weight"): up(1) for rank in RANKS},
            "",
            "diverged",
            ("gradient", 2, "bn1.weight", [0, 1], 1),
            "gradient 2 backward",
        ),
        (
            {(3, 1, "loss"): up(1, ()), **LATER},
            "",
            "diverged",
            ("loss", 3, "", [1], 1),
            "loss 3 data",
        ),
        (
            {(3, 1, "weight/fc.weight"): up(1), **LATER},
            "",
            "diverged",
            ("weight", 3, "fc.weight", [1], 1),
            "weight 3 optimizer",
        ),
        (
            {(3, 1, BUFFER): up(1, (0,))},
            "",
            "diverged",
            ("buffer", 3, BUFFER[7:], [1], 1),
            "buffer 3 BatchNorm",
        ),
        # Buffers never feed back into training: the loss has another cause.
        (
            {(3, 1, BUFFER): up(1, (0,)), **LATER},
            "",
            "diverged",
            ("buffer", 3, BUFFER[7:], [1], 1),
            "loss 4 data",
        ),
        # Either tolerance is enough; the hint still names what differed first.
        (NEAR, "--max-ulps 40", WITHIN, None, "gradient 2 backward"),
        (NEAR, "--max-ulps 39", "diverged", ("weight", 3, "fc.weight", [0], 40), "gradient 2 back"),
        (NEAR, "--relative 1e-4", WITHIN, None, "gradient 2 backward"),
        (
            NEAR,
            "--relative 1e-9 --max-ulps 4",
            "diverged",
            ("weight", 3, "fc.weight", [0], 40),
            "gradient 2 backward",
        ),
        (
            {(2, 1, "gradient/fc.weight"): put(math.nan)},
            INFINITE,
            "diverged",
            ("gradient", 2, "fc.weight", [1], None),
            "gradient 2 backward",
        ),
        (
            {(2, 1, "gradient/fc.weight"): put(math.inf)},
            INFINITE,
            "diverged",
            ("gradient", 2, "fc.weight", [1], None),
            "gradient 2 backward",
        ),
    ],
)
def test_verdict_first_divergence_and_hint(compare, changes, flags, verdict, first, hint):
    code, text, record = compare({}, {"changes": changes}, *flags.split())
    assert (code, record["verdict"]) == (verdict == "diverged", verdict)
    names = ("kind", "step", "layer", "ranks", "ulps")
    found = record["first_divergence"]
    assert (found and tuple(found[name] for name in names)) == first
    kind, step, part = hint.split() if hint else ("", "", "")
    start = f"{kind} differs first, in step {step}: look at the " if hint else ""
    assert record["hint"].startswith(start + part)
    assert f"Result: {verdict} (" in text and (not hint or f"Hint: {record['hint']}" in text)


def test_the_table_and_the_first_divergence_as_text(compare):
    _, text, record = compare({}, {"changes": SEVERAL})
    first, kind = record["first_divergence"], record["kinds"]["gradient"]
    assert (kind["beyond"], kind["tensors"] - kind["bit_equal"], kind["ulps"]) == (3, 3, 9)
    assert kind["tensors"] == len(STEPS) * len(RANKS) * len(LAYERS)
    assert "First divergence: gradient, step 3, layer bn1.weight, rank 1: " in text
    assert f"{first['values']} (5 ulps, {first['relative']:.2e} relative)" in text


def test_zeros_of_either_sign_are_equal_but_not_bit_equal(compare):
    name = (2, 0, "gradient/fc.weight")
    code, _, record = compare({"changes": {name: put(0.0)}}, {"changes": {name: put(-0.0)}})
    assert code == 0 and record["verdict"] == WITHIN and not record["hint"]
    kind = record["kinds"]["gradient"]
    assert (kind["tensors"] - kind["bit_equal"], kind["ulps"], kind["first_step"]) == (1, 0, None)


def test_uncompared_steps_and_different_settings_are_noted(compare):
    code, text, record = compare(
        {"steps": (1, 2, 3), "ranks": (0,), "arch": "resnet18", "tensor_steps": 1},
        {"steps": (2, 3, 4), "arch": "resnet50", "tensor_steps": 1},
    )
    assert code == 0 and record["compared"] == "2 steps (2 to 3) of rank 0"
    assert record["notes"] == [
        "not compared: 1 steps (1 to 1) of rank 0: only A has them",
        "not compared: 3 steps (2 to 4) of rank 0, 1: only B has them",
        "not compared: final weights: 3 steps against 4 steps",
        "the settings differ: arch: 'resnet18' against 'resnet50'",
    ]
    assert "\n".join(record["notes"]) in text


@pytest.mark.parametrize("change", [lambda values: None, lambda values: values[:2]])
def test_another_model_is_one_message(tmp_path, refusal, change):
    make_run(tmp_path / "A")
    make_run(tmp_path / "B", {(2, 0, "gradient/fc.weight"): change})
    told = "step 2, rank 0: tensor gradient/fc"
    assert told in refusal(main, [str(tmp_path / "A"), str(tmp_path / "B")])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 2000,
        '{"steps": 1}',
        '{"fingerprint": []}',
        '{"fingerprint": "x"}',
    ],
)
def test_a_damaged_summary_is_one_message(tmp_path, refusal, text):
    for name in ("A", "B"):
        make_run(tmp_path / name)
        (tmp_path / name / "summary.json").write_text(text)
    (tmp_path / "A/trace/rank-x").mkdir()  # no rank's folder
    (tmp_path / "A/trace/rank-x/step-y.npz").write_text("")
    told = refusal(main, [str(tmp_path / "A"), str(tmp_path / "B")])
    assert str(tmp_path / "A/summary.json") in told


def test_runs_with_different_final_weights_have_diverged(compare, tmp_path):
    code, _, record = compare({}, {"digest": "bb"})
    assert code == 1 and record["final_weights"] == "different"
    # Digests have no distance: with a tolerance they do not count.
    assert main([str(tmp_path / "A"), str(tmp_path / "B"), "--max-ulps", "1"]) == 0


def test_without_traces_losses_are_compared(compare):
    untraced = {"trace": False, "losses": {3: math.nextafter(1 / 3, 1)}, "digest": None}
    code, _, record = compare({}, untraced)
    first, notes = record["first_divergence"], record["notes"]
    assert (code, first["kind"], first["step"], first["ulps"]) == (1, "loss", 3, 1)
    assert notes[0].startswith("not compared: gradients, weights and buffers of each step: no tr")
    assert notes[-1].endswith("final weights: 4 steps against no summary.json yet")
    assert (set(record["kinds"]), record["hint"], record["final_weights"]) == ({"loss"}, "", None)


# -- The ranks of one run --------------------------------------------------------------------------


def test_ranks_that_agree(tmp_path, capsys):
    run = make_run(tmp_path / "run", ranks=(0, 1, 2))
    assert main(["--ranks", str(run)]) == 0
    text = capsys.readouterr().out
    assert "not compared: loss, buffer: each rank has its own" in text
    assert "run, rank 0 against its other ranks: 4 steps (1 to 4) of rank 1, 2" in text


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("gradient/fc.weight", {}, 1),
        ("gradient/fc.weight", {"use_adasum": True}, 0),
        ("weight/fc.weight", {"use_adasum": True}, 1),
    ],
)
def test_a_rank_that_differs_is_named(tmp_path, capsys, name, settings, code):
    run = make_run(tmp_path / "run", {(3, 2, name): up(1)}, ranks=(0, 1, 2), **settings)
    assert main(["--ranks", str(run), "--json"]) == code
    first = json.loads(capsys.readouterr().out)["first_divergence"]
    found = first and (first["step"], first["ranks"], f"{first['kind']}/{first['layer']}")
    assert found == ((3, [2], name) if code else None)


def test_buffers_count_if_the_ranks_share_them(tmp_path):
    assert main(["--ranks", str(make_run(tmp_path / "run", batch_norm="sync"))]) == 1


# -- Mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["A"], "1 run folder(s) given"),
        (["A", "C"], "C/metrics.jsonl cannot be read"),
        (["A", "later"], "no step of a rank in common"),
        (["A", "B", "--steps", "3"], "leave them out with run folders"),
        (["A", "B", "--", "--seed", "3"], "leave them out with run folders"),
        (["A", "B", "--ranks", "A"], "2 run folder(s) given"),
        (["--ranks", "single"], "no traces of two ranks"),
        (["--", "--log-dir", "x"], "--log-dir cannot be passed"),
        (["--configurations", "ddp", "horovod-mpi"], "--configurations ddp: there is no such"),
        (["A", "B", "--max-ulps", "-1"], "finite numbers"),
        (["A", "B", "--relative", "nan"], "finite numbers"),
        (["--workers", "0"], "give positive whole numbers"),
        (
            ["--configurations", "ddp-torchrun", "ddp-torchrun", "--out", "A/metrics.jsonl"],
            "Not a directory",
        ),
        (["cut", "A"], "cut/trace/rank-1/step-000002.npz cannot be read"),
        (["A", "flipped"], "flipped/trace/rank-1/step-000002.npz cannot be read"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, monkeypatch, refusal, words, said):
    monkeypatch.chdir(tmp_path)
    step = "trace/rank-1/step-000002.npz"
    whole = (make_run(tmp_path / "A") / step).read_bytes()
    middle = whole.index(b"gradient/fc.weight.npy") + 180
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for name, content in {"B": whole, "cut": whole[:-300], "flipped": flipped}.items():
        (make_run(tmp_path / name) / step).write_bytes(content)
    make_run(tmp_path / "later", steps=(9,))
    make_run(tmp_path / "single", ranks=(0,))
    assert said in refusal(main, words)


def test_a_failed_run_shows_its_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--workers 1 --configurations ddp-torchrun ddp-torchrun -- --no-such-flag"
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert "ddp-torchrun-1 failed" in error and "no-such-flag" in error


# -- Real runs -------------------------------------------------------------------------------------

TINY = (
    "--arch shufflenet_v2_x0_5 --train-crop-size 16 --val-crop-size 16 --val-resize-size 16 "
    "--batch-size 12 --threads 1 --keep-checkpoints 0"
)


@pytest.mark.launch
@pytest.mark.full
def test_another_seed_and_another_rate_have_different_causes(tmp_path, capsys):
    """Real divergences, each with its cause."""
    records = {}
    for name, flags in {"a": "", "seed": "--seed 7", "rate": "--base-lr 0.02"}.items():
        flags = f"{TINY} {flags} --log-dir {tmp_path} --name {name} --max-steps 2 --tensor-steps 2"
        launch("python", "ddp", flags, ranks=1).checked()
        code = main([str(tmp_path / "a"), str(tmp_path / name), "--json"])
        assert code == (name != "a")
        records[name] = json.loads(capsys.readouterr().out)
    first = records["seed"]["first_divergence"]
    assert (first["kind"], first["step"]) == ("loss", 1)
    assert records["rate"]["hint"].startswith("weight differs first, in step 1")
    assert any("settings differ: base_lr" in note for note in records["rate"]["notes"])
