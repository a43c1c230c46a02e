"""Which step, layer and rank two runs part at, and by how much, on made-up traces and real ones."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch

from compare.evidence.parity import measure, ulp_distances
from compare.parity import main

LAYERS = ("conv1.weight", "bn1.weight", "fc.weight")
STEPS, RANKS = (1, 2, 3, 4), (0, 1)
# Any change to a trace: (step, rank, name) -> function of the array.
Changes = dict[tuple[int, int, str], Any]


def make_run(
    folder: Path,
    changes: Changes | None = None,
    steps: tuple[int, ...] = STEPS,
    ranks: tuple[int, ...] = RANKS,
    losses: dict[int, float] | None = None,
    digest: str | None = "aa",
    fingerprint: dict[str, Any] | None = None,
    trace: bool = True,
) -> Path:
    """Write a run folder whose tensors depend on step, rank and name alone; then change some."""
    folder.mkdir(parents=True)
    for step in steps:
        for rank in ranks:
            arrays = {"loss": np.float32(1 / (step + rank + 1))}
            for number, layer in enumerate(LAYERS):
                random = np.random.default_rng([step, number])
                arrays[f"gradient/{layer}"] = random.normal(size=(4, 3)).astype(np.float32)
                arrays[f"weight/{layer}"] = random.normal(size=(4, 3)).astype(np.float32)
            arrays["buffer/bn1.running_mean"] = np.float32([step, rank])
            arrays["buffer/bn1.num_batches_tracked"] = np.int64(step)
            for (at_step, at_rank, name), change in (changes or {}).items():
                if (at_step, at_rank) == (step, rank):
                    arrays[name] = change(np.array(arrays[name]))
                    if arrays[name] is None:
                        del arrays[name]
            if trace:
                path = folder / f"trace/rank-{rank}/step-{step:06d}.npz"
                path.parent.mkdir(parents=True, exist_ok=True)
                np.savez(path, **arrays)
    with (folder / "metrics.jsonl").open("w") as metrics:
        metrics.write('{"kind": "event", "name": "start"}\n')
        for step in steps:
            loss = {**{s: 1 / s for s in STEPS}, **(losses or {})}[step]
            line = {"kind": "step", "step": step, "loss": loss, "top1": 10.0 * step}
            metrics.write(json.dumps(line) + "\n")
    (folder / "config.json").write_text(json.dumps({"batch_norm": "local"}))
    if digest:
        summary = {"steps": max(steps), "weights_sha256": digest, "fingerprint": fingerprint or {}}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def up(count: int, index: tuple[int, ...] = (1, 2)) -> Any:
    """A change: one element, `count` representable numbers away."""

    def change(values: np.ndarray) -> np.ndarray:
        for _ in range(abs(count)):
            towards = np.float32(math.copysign(np.inf, count))
            values[index] = np.nextafter(values[index], towards)
        return values

    return change


def put(value: float, index: tuple[int, ...] = (1, 2)) -> Any:
    def change(values: np.ndarray) -> np.ndarray:
        values[index] = value
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
def test_ulps_count_the_numbers_between(value, count):
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
    one, other = measure(x, y), measure(y, x)
    assert (one.ulps, one.relative, bool(one.what)) == (
        other.ulps,
        other.relative,
        bool(other.what),
    )
    assert one.relative is not None and 0 <= one.relative <= 2
    assert (one.ulps == 0) == bool((x == y).all())


def test_relative_distance_is_of_the_largest_value():
    distance = measure(np.float32([100, 0]), np.float32([100, 1e-3]))
    assert distance.relative == pytest.approx(1e-5)
    assert distance.ulps is not None and distance.ulps > 10**8
    assert distance.what == "0 against 0.00100000005 at [1], largest values 100 and 100"


def test_nan_and_infinity_are_equal_to_their_like_only():
    nan, inf = np.nan, np.inf
    assert not measure(np.float32([nan, inf, 1]), np.float32([nan, inf, 1])).what
    payload = np.array([0x7FC00001], np.int32).view(np.float32)
    assert measure(np.float32([nan]), payload).what
    assert measure(np.float32([nan]), payload).ulps == 0
    most = np.finfo(np.float32).max
    for a, b in ((nan, 1), (1, nan), (inf, most), (inf, -inf), (nan, inf)):
        distance = measure(np.float32([0, a]), np.float32([0, b]))
        assert distance.ulps is None and not distance.within(10**12, 1e9), (a, b)
    beside = measure(np.float32([inf, 1]), np.float32([inf, 1.5]))
    assert beside.relative == pytest.approx(1 / 3)


def test_integers_differ_by_their_difference():
    assert measure(np.int64(7), np.int64(4)).ulps == 3
    assert not measure(np.int64(7), np.float32(7)).same_tensor
    assert not measure(np.zeros(3), np.zeros((3, 1))).same_tensor


# -- Two recorded runs -----------------------------------------------------------------------------


def test_equal_runs_are_bit_equal(compare):
    code, text, record = compare({}, {})
    assert code == 0 and record["verdict"] == "bit-equal"
    assert record["first_divergence"] is None and not record["why"]
    assert record["kinds"]["gradient"]["tensors"] == len(STEPS) * len(RANKS) * len(LAYERS)
    assert "ranks 0, 1, steps 1 to 4" in record["compared"]
    assert "Result: bit-equal" in text


def test_the_first_divergence_is_named_by_step_layer_and_rank(compare):
    changes = {
        (4, 0, "gradient/conv1.weight"): up(9),
        (3, 1, "gradient/fc.weight"): up(2),
        (3, 1, "gradient/bn1.weight"): up(5),  # comes before fc in the forward pass
        (3, 0, "weight/bn1.weight"): up(1),
    }
    code, text, record = compare({}, {"changes": changes})
    first = record["first_divergence"]
    assert code == 1 and record["verdict"] == "diverged"
    assert (first["kind"], first["step"], first["layer"], first["ranks"]) == (
        "gradient", 3, "bn1.weight", [1],
    )  # fmt: skip
    assert first["distance"]["ulps"] == 5
    assert "at [1, 2]" in first["distance"]["what"]
    largest = record["kinds"]["gradient"]["most_ulps"]
    assert (largest["step"], largest["layer"], largest["distance"]["ulps"]) == (
        4, "conv1.weight", 9,
    )  # fmt: skip
    kind = record["kinds"]["gradient"]
    assert (kind["unequal"], kind["beyond"], kind["tensors"] - kind["bit_equal"]) == (3, 3, 3)
    assert "First divergence: gradient, step 3, layer bn1.weight, rank 1" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_layer_that_differs_on_all_ranks_names_them(compare):
    changes = {(2, rank, "gradient/bn1.weight"): up(1) for rank in RANKS}
    _, text, record = compare({}, {"changes": changes})
    assert record["first_divergence"]["ranks"] == [0, 1]
    assert "layer bn1.weight, ranks 0, 1" in text


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("loss", up(1, ()), "losses differ first, in step 3, with equal weights before it"),
        ("gradient/fc.weight", up(1), "gradients differ first, in step 3, with equal losses"),
        ("weight/fc.weight", up(1), "weights differ first, in step 3, with equal gradients"),
        ("buffer/bn1.running_mean", up(1, (0,)), "buffers differ from step 3 on"),
    ],
)
def test_the_cause_is_said_in_a_sentence(compare, name, change, said):
    changes = {(3, 1, name): change, (4, 1, "loss"): up(2, ()), (4, 0, "weight/fc.weight"): up(3)}
    code, text, record = compare({}, {"changes": changes})
    assert code == 1
    assert said in record["why"][0] and said in " ".join(text.split())


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (("x", "x"), "with equal initial weights"),
        (("x", "y"), "the initial weights differ, too"),
        ((None, "y"), "of the weights before it nothing is recorded"),
    ],
)
def test_what_is_known_of_the_weights_before_the_first_step(compare, starts, said):
    prints = [{"initial_weights_sha256": start} if start else {} for start in starts]
    changed = {"changes": {(1, 0, "loss"): up(1, ())}, "fingerprint": prints[1]}
    _, _, record = compare({"fingerprint": prints[0]}, changed)
    assert said in record["why"][0]


def test_tolerances(compare, tmp_path, capsys):
    """Within either tolerance is within; the sentence still tells what differed first."""
    changes = {(2, 0, "gradient/fc.weight"): up(4), (3, 0, "weight/fc.weight"): up(40)}
    code, _, record = compare({}, {"changes": changes}, "--max-ulps", "40")
    assert code == 0 and record["verdict"] == "within the tolerance"
    assert "gradients differ first, in step 2" in record["why"][0]
    folders = [str(tmp_path / name) for name in "AB"]
    assert main([*folders, "--max-ulps", "39"]) == 1
    assert "First beyond the tolerance: weight, step 3" in capsys.readouterr().out
    assert main([*folders, "--relative", "1e-4"]) == 0
    assert main([*folders, "--relative", "1e-9"]) == 1
    assert main([*folders, "--relative", "1e-9", "--max-ulps", "4"]) == 1


def test_zeros_of_either_sign_are_equal_but_not_bit_equal(compare):
    name = (2, 0, "gradient/fc.weight")
    code, _, record = compare({"changes": {name: put(0.0)}}, {"changes": {name: put(-0.0)}})
    assert code == 0 and record["verdict"] == "equal, but for the sign of zeros"
    kind = record["kinds"]["gradient"]
    assert kind["tensors"] - kind["bit_equal"] == 1 and kind["unequal"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_beyond_any_tolerance(compare, value):
    changes = {(2, 1, "gradient/fc.weight"): put(value)}
    flags = ("--max-ulps", "999999999999", "--relative", "1e30")
    code, text, record = compare({}, {"changes": changes}, *flags)
    first = record["first_divergence"]
    assert code == 1 and (first["step"], first["layer"]) == (2, "fc.weight")
    assert first["distance"]["ulps"] is None and str(value) in first["distance"]["what"]
    assert f"against {value}" in text


def test_other_steps_and_ranks_are_said_not_to_be_compared(compare):
    code, text, record = compare(
        {"steps": (1, 2, 3), "ranks": (0,)}, {"steps": (2, 3, 4), "ranks": (0, 1)}
    )
    assert code == 0
    assert "rank 0, steps 2, 3" in record["compared"]
    said = " | ".join(record["not_compared"])
    assert "rank 1: in B only" in said
    assert "step 1: in A only" in said and "step 4: in B only" in said
    assert text.count("not compared: ") == len(record["not_compared"])


@pytest.mark.parametrize("change", [lambda values: None, lambda values: values[:2]])
def test_another_model_is_a_divergence(compare, change):
    changes = {(2, 0, "gradient/fc.weight"): change}
    code, _, record = compare({}, {"changes": changes}, "--relative", "9")
    assert code == 1
    assert "do not hold the same tensors" in record["why"][0]
    assert record["first_divergence"]["layer"] == "fc.weight"


def test_runs_that_part_after_the_trace_have_diverged(compare, tmp_path, capsys):
    code, _, record = compare({}, {"digest": "bb"})
    assert code == 1 and record["final_weights"] == "different"
    assert "parted later" in record["why"][0]
    # A digest knows no distance: with a tolerance it does not judge.
    assert main([str(tmp_path / "A"), str(tmp_path / "B"), "--max-ulps", "1"]) == 0


def test_what_differs_in_the_settings_is_said(compare):
    changes = {(2, 0, "gradient/fc.weight"): up(1)}
    _, text, record = compare(
        {"fingerprint": {"arch": "resnet18", "trace_steps": 1}},  # its former name
        {"fingerprint": {"arch": "resnet50", "tensor_steps": 1}, "changes": changes},
    )
    assert "may be all of the cause" in record["why"][-1]
    assert record["settings"] == ["arch: 'resnet18' against 'resnet50'"]
    assert "the settings differ: arch" in text


# -- Without traces --------------------------------------------------------------------------------


def test_without_traces_it_says_so_and_compares_what_there_is(compare):
    code, text, record = compare({}, {"trace": False, "losses": {3: math.nextafter(1 / 3, 1)}})
    assert code == 1
    assert "B has no trace" in record["not_compared"][0] and "not compared: gradients" in text
    assert set(record["kinds"]) == {"loss", "top1"}
    first = record["first_divergence"]
    assert (first["kind"], first["step"], first["distance"]["ulps"]) == ("loss", 3, 1)
    assert "only traces can tell" in record["why"][0]


def test_without_traces_the_final_weights_are_judged_by_their_digest(compare):
    code, _, record = compare({"trace": False}, {"trace": False, "digest": "bb"})
    assert code == 1 and record["verdict"] == "diverged"
    assert record["kinds"]["loss"]["bit_equal"] == len(STEPS)


def test_a_run_that_has_not_ended_has_no_final_weights(compare, tmp_path):
    code, _, record = compare({"trace": False}, {"trace": False, "digest": None})
    assert code == 0 and record["final_weights"] is None
    assert "B has no summary.json" in record["not_compared"][-1]
    with (tmp_path / "B/metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "step", "st')  # being written
    assert main([str(tmp_path / "A"), str(tmp_path / "B")]) == 0


# -- The ranks of one run --------------------------------------------------------------------------


def test_ranks_that_agree(tmp_path, capsys):
    run = make_run(tmp_path / "run", ranks=(0, 1, 2))
    assert main(["--ranks", str(run)]) == 0
    text = capsys.readouterr().out
    # Losses and BatchNorm's statistics are each rank's own.
    assert "not judged" in text and "not compared: loss" in text
    assert "rank 0 against ranks 1, 2" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gradient/fc.weight", "gradients of the ranks"),
        ("weight/fc.weight", "weights of the ranks"),
    ],
)
def test_a_rank_that_differs_is_named(tmp_path, capsys, name, said):
    run = make_run(tmp_path / "run", {(3, 2, name): up(1)}, ranks=(0, 1, 2))
    assert main(["--ranks", str(run), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    first = record["first_divergence"]
    assert (first["step"], first["ranks"], first["layer"]) == (3, [2], "fc.weight")
    assert said in record["why"][0] and "step 3" in record["why"][0]


def test_buffers_are_judged_where_the_ranks_share_them(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text(json.dumps({"batch_norm": "sync"}))
    assert main(["--ranks", str(run)]) == 1


# -- Mistakes --------------------------------------------------------------------------------------


def broken(folder: Path) -> list[str]:
    path = folder / "A/trace/rank-1/step-000002.npz"
    path.write_bytes(path.read_bytes()[:-300])
    return ["A", "B"]


def flipped(folder: Path) -> list[str]:
    path = folder / "B/trace/rank-1/step-000002.npz"
    content = bytearray(path.read_bytes())
    middle = content.index(b"gradient/fc.weight.npy") + 180
    content[middle] ^= 255
    path.write_bytes(content)
    return ["A", "B"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (lambda folder: ["A"], "1 run folder(s) given"),
        (lambda folder: ["A", "C"], "C: there is no such run folder"),
        (lambda folder: ["A", "empty"], "metrics.jsonl cannot be read"),
        (lambda folder: ["A", "later"], "no step of a rank in common"),
        (lambda folder: ["A", "B", "--steps", "3"], "--steps: only without run folders"),
        (lambda folder: ["A", "B", "--ranks", "A"], "leave the other folders out"),
        (lambda folder: ["--ranks", "single"], "traces of 1 rank(s)"),
        (lambda folder: ["--", "--log-dir", "x"], "--log-dir cannot be passed"),
        (lambda folder: ["--", "--max-steps=9"], "--max-steps cannot be passed"),
        (broken, "A/trace/rank-1/step-000002.npz cannot be read"),
        (flipped, "B/trace/rank-1/step-000002.npz cannot be read"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    for name, arguments in {
        "A": {}, "B": {}, "later": {"steps": (9,), "losses": {9: 1.0}}, "single": {"ranks": (0,)}
    }.items():  # fmt: skip
        make_run(tmp_path / name, **arguments)
    (tmp_path / "empty").mkdir()
    assert main(words(tmp_path)) == 2
    shown = capsys.readouterr()
    assert said in shown.err and len(shown.err.splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize("flag", [("--max-ulps", "-1"), ("--relative", "nan"), ("--workers", "0")])
def test_numbers_out_of_range_are_refused(flag):
    with pytest.raises(SystemExit) as ended:
        main([*flag])
    assert ended.value.code == 2


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
def test_both_engines_compute_the_same_live(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"--workers 2 --steps 3 --json --out live -- {TINY}"
    assert main(words.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "bit-equal" and "steps 1 to 3" in record["compared"]
    assert all(
        record["kinds"][kind]["tensors"] for kind in ("loss", "gradient", "weight", "buffer")
    )
    for run in ("ddp-torchrun-2", "horovod-mpi-2"):
        assert main(["--ranks", f"live/{run}"]) == 0


@pytest.mark.launch
@pytest.mark.full
def test_another_seed_and_another_rate_are_told_apart(tmp_path, capsys):
    """A real divergence, with its cause: not only made-up ones."""
    for name, flags in {"a": "", "seed": "--seed 7", "rate": "--base-lr 0.02"}.items():
        flags = f"{TINY} {flags} --log-dir {tmp_path} --name {name} --max-steps 2 --tensor-steps 2"
        done = launch("python", "ddp", flags, ranks=1)
        assert done.returncode == 0, done.output
    assert main([str(tmp_path / "a"), str(tmp_path / "seed"), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["first_divergence"]["kind"], record["first_divergence"]["step"]) == ("loss", 1)
    assert main([str(tmp_path / "a"), str(tmp_path / "rate"), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert "weights differ first, in step 1, with equal gradients" in record["why"][0]
    assert any(setting.startswith("base_lr") for setting in record["settings"])
