"""Profiles of several runs, ranks and engines are merged into one valid file, on one clock."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from launching import launch, read_json

from compare.evidence.profiles import BYTES, read_exchange
from compare.timeline import main

BASE_NS = 1_790_857_026_000_000_000  # of the Unix clock, as torch writes it
TIMELINE = "horovod-timeline.json"
Event = dict[str, Any]


def torch_trace(start_us: float, pid: int, steps: int = 2, gpu: bool = False) -> Event:
    """A trace as torch.profiler writes it: steps of 100 us, in each an operator and an arrow."""
    named = {"process_name": "python", "process_labels": "CPU"}
    events: list[Event] = [
        {
            "ph": "M",
            "name": name,
            "pid": pid,
            "tid": 0,
            "ts": start_us,
            "args": {"labels" if "labels" in name else "name": text},
        }
        for name, text in named.items()
    ]
    events.append(
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": pid,
            "ts": start_us,
            "args": {"name": f"thread {pid} (python)"},
        }
    )
    if gpu:
        events.append(
            {
                "ph": "M",
                "name": "process_labels",
                "pid": 0,
                "tid": 0,
                "ts": start_us,
                "args": {"labels": "GPU 0"},
            }
        )
    for step in range(steps):
        ts = start_us + 100 * step
        common = {"pid": pid, "tid": pid}
        events += [
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": "aten::add",
                "ts": ts + 10.125,
                "dur": 5.5,
                **common,
            },
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "ts": ts,
                "dur": 100.0,
                **common,
            },
            {"ph": "s", "id": step, "cat": "ac2g", "name": "ac2g", "ts": ts + 11, **common},
            {
                "ph": "f",
                "id": step,
                "cat": "ac2g",
                "name": "ac2g",
                "ts": ts + 20,
                "bp": "e",
                "pid": 0 if gpu else pid,
                "tid": 7 if gpu else pid,
            },
        ]
        if gpu:
            events += [
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "add",
                    "ts": ts + 20,
                    "dur": 30,
                    "pid": 0,
                    "tid": 7,
                },
                {
                    "ph": "X",
                    "cat": "gpu_user_annotation",
                    "name": f"ProfilerStep#{step}",
                    "ts": ts + 20,
                    "dur": 80 if step + 1 < steps else 400,
                    "pid": 0,
                    "tid": 7,
                },
            ]
    events += [
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "ts": start_us - 1,
            "dur": 100.0 * steps + 2,
        },
        {
            "ph": "i",
            "s": "g",
            "name": "Record Window End",
            "pid": "",
            "tid": "",
            "ts": start_us + 100 * steps,
        },
    ]
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": events}


def horovod_timeline(start_us: int) -> list[Event]:
    """Horovod's timeline of two tensors; it began 1 ms before `start_us`."""

    def tensor(pid: int, name: str, at: int) -> list[Event]:
        return [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
            {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": at, "pid": pid},
            {"ph": "X", "name": "1", "ts": at + 1, "pid": pid, "dur": 0},
            {"ph": "E", "ts": at + 2, "pid": pid},
            {"ph": "B", "name": "ALLREDUCE", "ts": at + 3, "pid": pid},
            {"ph": "B", "name": "MPI_ALLREDUCE", "ts": at + 3, "pid": pid},
            {"ph": "E", "ts": at + 9, "pid": pid},
            {"ph": "E", "ts": at + 9, "pid": pid, "args": {"dtype": "float32", "shape": "[3]"}},
        ]

    first = {"start_time_since_epoch_in_micros": BASE_NS // 1000 + start_us - 1000}
    return [
        {"name": "process_name", "ph": "M", "pid": 0, "args": first},
        {"ph": "i", "name": "CYCLE_START", "ts": 1000, "s": "g"},
        *tensor(1, "allreduce.fc.weight", 1030),
        *tensor(2, "allreduce.conv1.weight", 1140),
    ]


def make_run(
    folder: Path, start_us: int, ranks: int = 2, horovod: bool = False, **more: Any
) -> Path:
    profile = folder / "profile"
    profile.mkdir(parents=True)
    for rank in range(ranks):
        trace = torch_trace(start_us + rank, 4000 + rank, **more)
        (profile / f"rank-{rank}.json").write_text(json.dumps(trace))
    if horovod:
        text = json.dumps(horovod_timeline(start_us))
        (profile / "horovod-timeline.json").write_text(text)
    return folder


def merged(runs: list[Path]) -> Event:
    out = runs[0].parent / "merged.json"
    assert main([*map(str, runs), "-o", str(out)]) == 0
    trace = read_json(out)
    check_format(trace)
    return trace


def check_format(trace: Event) -> None:
    """Assert what Perfetto's importer and the Trace Event Format need: integer process and thread
    numbers, a name for each, sorted times, spans that nest, and arrows in pairs."""
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    events = trace["traceEvents"][len(metadata) :]
    named = defaultdict(list)
    for event in metadata:
        named[event["name"]].append((event["pid"], event["tid"]))
    assert named["process_name"] == named["process_sort_index"]
    numbers = [pid for pid, _ in named["process_name"]] + [tid for _, tid in named["thread_name"]]
    assert len(set(numbers)) == len(numbers), "each is used once"
    assert {event["pid"] for event in events} <= {pid for pid, _ in named["process_name"]}
    assert {(event["pid"], event["tid"]) for event in events} <= {*named["thread_name"]}
    begins = [round(event["ts"] * 1000) for event in events]
    assert begins[0] >= 0 and begins == sorted(begins)
    ends: dict[int, list[int]] = defaultdict(list)  # of the spans that are open on a thread
    arrows: dict[tuple[str, int], str] = defaultdict(str)
    for event, begin in zip(events, begins, strict=True):
        assert event["ph"] in "Xisf" and isinstance(event["name"], str), event
        if event["ph"] in "sf":
            arrows[event["cat"], event["id"]] += event["ph"]
        elif event["ph"] == "X":
            outer, end = ends[event["tid"]], begin + round(event["dur"] * 1000)
            while outer and outer[-1] <= begin:
                outer.pop()
            assert begin <= end and (not outer or end <= outer[-1]), event
            outer.append(end)
    assert set(arrows.values()) <= {"sf"}, arrows


def processes(trace: Event) -> dict[str, int]:
    """Process numbers by name, in the order in which Perfetto shows them."""
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    places = [e["args"]["sort_index"] for e in metadata if e["name"] == "process_sort_index"]
    assert places == sorted(places)
    return {e["args"]["name"]: e["pid"] for e in metadata if e["name"] == "process_name"}


def threads(trace: Event, pid: int) -> dict[str, int]:
    return {
        event["args"]["name"]: event["tid"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == pid
    }


def find(trace: Event, name: str, process: str | None = None) -> list[Event]:
    pid = processes(trace)[process] if process else None
    named = [event for event in trace["traceEvents"] if event["name"] == name]
    return [event for event in named if pid in (None, event["pid"])]


def test_ranks_and_horovod_s_timeline_share_a_clock(tmp_path):
    trace = merged([make_run(tmp_path / "hvd", 5000, horovod=True)])
    names = ["hvd, rank 0, CPU", "hvd, rank 0, Horovod", "hvd, rank 1, CPU"]
    assert list(processes(trace)) == names
    tensors = threads(trace, processes(trace)["hvd, rank 0, Horovod"])
    assert set(tensors) == {"allreduce.fc.weight", "allreduce.conv1.weight", "cycles"}
    assert "thread 4000 (python)" in threads(trace, processes(trace)["hvd, rank 0, CPU"])
    step = find(trace, "ProfilerStep#0", "hvd, rank 0, CPU")[0]["ts"]
    assert trace["baseTimeNanoseconds"] + round(step * 1000) == BASE_NS + 5000 * 1000
    (operator, _) = find(trace, "aten::add", "hvd, rank 0, CPU")
    begins = [event["ts"] - step for event in (operator, *find(trace, "NEGOTIATE_ALLREDUCE"))]
    assert begins == pytest.approx([10.125, 30, 140])
    (span, _), (inner, _) = find(trace, "ALLREDUCE"), find(trace, "MPI_ALLREDUCE")
    assert span["dur"] == 6 and span["args"] == {"dtype": "float32", "shape": "[3]"}
    assert (inner["ts"], inner["tid"]) == (span["ts"], span["tid"])
    assert span["tid"] == tensors["allreduce.fc.weight"]
    assert len(find(trace, "rank 1 is ready")) == 2


def test_a_gpu_is_a_process_of_its_own_and_arrows_of_two_ranks_are_not_mixed(tmp_path):
    trace = merged([make_run(tmp_path / "ddp", 5000, gpu=True)])
    names = [f"ddp, rank {rank}, {device}" for rank in (0, 1) for device in ("CPU", "GPU 0")]
    assert list(processes(trace)) == names
    assert len(find(trace, "add", "ddp, rank 0, GPU 0")) == 2
    ids = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(ids) == 4 == len(set(ids))


def test_runs_are_aligned_at_their_first_profiled_step(tmp_path):
    runs = [make_run(tmp_path / "ddp", 5000), make_run(tmp_path / "hvd", 9_000_000, horovod=True)]

    def begins(trace: Event) -> list[int]:
        lanes = [f"{name}, rank 0, CPU" for name in ("ddp", "hvd")]
        return [find(trace, "ProfilerStep#0", lane)[0]["ts"] for lane in lanes]

    trace = merged(runs)
    first, second = begins(trace)
    assert first == second
    assert trace["otherData"]["hvd"] == {"shifted_by_nanoseconds": -8_995_000_000}
    # Horovod's timeline and the other rank are shifted with their run.
    assert find(trace, "NEGOTIATE_ALLREDUCE")[0]["ts"] - second == pytest.approx(30)
    assert find(trace, "ProfilerStep#0", "hvd, rank 1, CPU")[0]["ts"] - second == 1


def test_a_span_without_its_begin_or_its_end_is_left_out(tmp_path):
    run = make_run(tmp_path / "hvd", 5000, horovod=True)
    events = horovod_timeline(5000)
    events.insert(2, {"ph": "E", "ts": 1001, "pid": 1})
    (run / "profile/horovod-timeline.json").write_text(json.dumps(events[:-1]))
    trace = merged([run])
    assert (len(find(trace, "ALLREDUCE")), len(find(trace, "MPI_ALLREDUCE"))) == (1, 2)


def test_the_place_of_the_merged_file_and_the_names_of_its_runs(tmp_path):
    runs = [make_run(tmp_path / block / "ddp-2", 5000, ranks=1) for block in ("b-1", "b-2")]
    for given, place, names in (
        (runs[:1], runs[0], ["ddp-2"]),
        (runs, tmp_path, ["b-1/ddp-2", "b-2/ddp-2"]),
    ):
        assert main([str(run) for run in given]) == 0
        trace = read_json(place / "timeline.json")
        assert list(processes(trace)) == [f"{name}, rank 0, CPU" for name in names]


def test_with_damaged_times_of_gradients_only_the_list_is_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "hvd", 5000, horovod=True)
    (run / "profile/gradients-rank-0.json").write_text('{"elements": {}, "steps": [{}]}')
    assert main([str(run)]) != 0
    assert (run / "timeline.json").exists()
    [error] = capsys.readouterr().err.splitlines()
    assert "gradients-rank-0.json" in error


@pytest.mark.parametrize(
    ("words", "file", "text", "said"),
    [
        ("none", "", "", "contains no profile"),
        (".", "", "", "profile/rank-*.json"),
        ("run run", "", "", "each once"),
        ("run -o run/profile/rank-0.json", "", "", "outside of profile"),
        ("run -o run/x.txt", "", "", "ends in .json"),
        ("run -o no/x.json", "", "", "No such file or directory"),
        ("run", "rank-1.json", '{"traceEvents": [', "rank-1.json cannot be read"),
        ("run", "rank-0.json", '{"traceEvents": []}', "baseTimeNanoseconds"),
        *(
            ("run", "rank-0.json", text, "rank-0.json cannot be read")
            for text in (
                "[" * 2000,
                '{"baseTimeNanoseconds": 1, "traceEvents": [5]}',
                '{"baseTimeNanoseconds": 1, "traceEvents": [{"name": "x", "ph": "X", "ts": "1"}]}',
                '{"baseTimeNanoseconds": 1, "traceEvents": [{"name": "process_labels", "pid": 1}]}',
            )
        ),
        ("run", "rank-0.json", json.dumps(torch_trace(0, 1, steps=0)), "contains no step"),
        ("run", TIMELINE, '[{"ph": "i", "name": "x", "ts": 1}]', "lacks its start time"),
        ("run", TIMELINE, '[{"ph": "i", "name": "x", ', "is incomplete, or lacks its start"),
        ("run", TIMELINE, "[1, 2]", "is incomplete, or lacks its start"),
        ("run", TIMELINE, "[" * 2000, "is incomplete, or lacks its start"),
    ],
)
def test_a_mistake_or_a_damaged_profile_is_one_message_and_nothing_is_written(
    tmp_path, monkeypatch, refusal, words, file, text, said
):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", 5000, horovod=True, ranks=1 + (file == "rank-1.json"))
    if file:
        (run / "profile" / file).write_text(text)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert said in refusal(main, words.split())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.launch
@pytest.mark.full
def test_real_profiles_of_both_engines(tmp_path, capsys):
    """The clocks of torch and of Horovod agree: each step's allreduces lie within that step."""
    flags = (
        "--arch shufflenet_v2_x0_5 --train-crop-size 16 --val-crop-size 16 --val-resize-size 16 "
        f"--batch-size 12 --threads 1 --keep-checkpoints 0 --max-steps 10 --profile-steps 3 "
        f"--log-dir {tmp_path}"
    )
    for launcher, engine in (("torchrun", "ddp"), ("horovodrun --mpi", "horovod")):
        launch(launcher, engine, f"{flags} --name {engine}").checked()
    trace = merged([tmp_path / "ddp", tmp_path / "horovod"])
    assert list(processes(trace)) == [
        "ddp, rank 0, CPU",
        "ddp, rank 0, DDP's buckets",
        "ddp, rank 1, CPU",
        "horovod, rank 0, CPU",
        "horovod, rank 0, Horovod",
        "horovod, rank 1, CPU",
    ]
    first, second = (
        min(find(trace, "ProfilerStep#1", f"{run}, rank {rank}, CPU")[0]["ts"] for rank in (0, 1))
        for run in ("ddp", "horovod")
    )
    assert first == second
    timeline = threads(trace, processes(trace)["horovod, rank 0, Horovod"])
    tensors = {name: tid for name, tid in timeline.items() if name.startswith("allreduce.")}
    figures = tensors.pop("allreduce.figures", None)  # figures that the ranks exchange
    assert "allreduce.fc.weight" in tensors
    spans = [event for event in find(trace, "ALLREDUCE") if event["cat"] == "horovod"]
    for number in (1, 2, 3):
        (step,) = find(trace, f"ProfilerStep#{number}", "horovod, rank 0, CPU")
        end = step["ts"] + step["dur"]
        within = [e for e in spans if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end]
        assert {event["tid"] for event in within} - {figures} == set(tensors.values()), number
    out = capsys.readouterr().out
    for name in ("ddp", "horovod"):
        assert f"\n{name}\n" in out
        steps = read_exchange(tmp_path / name)
        assert len(steps) == 3
        for messages in steps:
            assert sum(message.gradients for message in messages) == len(tensors)
            assert all(m.ready <= m.met and m.ready <= m.began <= m.ended for m in messages)
            elements = read_json(tmp_path / name / "profile/gradients-rank-0.json")["elements"]
            sent = sum(message.megabytes for message in messages)
            assert sent == pytest.approx(sum(elements.values()) * BYTES / 1e6)
