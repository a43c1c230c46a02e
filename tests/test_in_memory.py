"""Images in memory: the same ones, once a host, and gone with the processes that used them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from launching import rarely
from making import CPU, a_config, a_world, folder_config, write_images

from recipe.config import Config
from recipe.data import in_memory
from recipe.data.batches import data_order_sha256, open_data, training_batches, validation_batches
from recipe.data.image_folder import Listing, list_images
from recipe.data.in_memory import InMemory, available_memory, keep_in_memory
from recipe.errors import UserError, is_lost_peer
from recipe.make_shards import make_shards


@pytest.fixture
def folders(tmp_path: Path) -> Config:
    """Settings that name a training folder of 9 images and a validation folder of 6, as files."""
    root = tmp_path / "images"
    write_images(root / "train", 3)
    write_images(root / "val", 2)
    return folder_config(root, tmp_path / "cache")


@pytest.fixture
def listings(folders: Config) -> list[Listing]:
    assert folders.train_dir and folders.val_dir
    cache = Path(folders.cache_dir)
    return [list_images(Path(folder), cache) for folder in (folders.train_dir, folders.val_dir)]


def all_bytes(listing: Listing) -> list[bytes]:
    return [listing.read(index) for index in range(len(listing))]


def test_the_same_images(listings: list[Listing]) -> None:
    kept = keep_in_memory(listings, a_world())
    for listing, resident in zip(listings, kept, strict=True):
        assert all_bytes(resident) == all_bytes(listing)
        assert resident.name(2) == listing.name(2)
        assert resident.size(2) == listing.size(2) == len(listing.read(2))
        assert resident.classes == listing.classes
        assert resident.labels is listing.labels


@pytest.mark.parametrize("source", ["folder", "shards"])
@pytest.mark.parametrize("workers", [0, 2])
def test_same_order_and_pixels(folders: Config, source: str, workers: int, tmp_path: Path) -> None:
    config = replace(folders, in_memory=True)
    if source == "shards":
        shards = tmp_path / "shards"
        make_shards(Path(folders.data), shards, Path(folders.cache_dir), images_per_shard=4)
        config = replace(config, train_dir=str(shards / "train"), val_dir=str(shards / "val"))
    data = open_data(config)
    plain = open_data(folders)
    assert data_order_sha256(data, config) == data_order_sha256(plain, folders)
    batches = [
        [
            *training_batches(images, folders, a_world(), CPU, workers, 4, 32),
            *validation_batches(images, folders, a_world(), CPU, workers),
        ]
        for images in (plain, data)
    ]
    assert len(batches[0]) == 7 + 2
    for (images, labels), (others, other_labels) in zip(*batches, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_nothing_is_read_from_the_disk_any_more(folders: Config) -> None:
    data = open_data(replace(folders, in_memory=True))
    for file in Path(folders.data).rglob("*.png"):
        file.unlink()
    assert len(list(training_batches(data, folders, a_world(), CPU, 1, 0, 36))) == 9


def test_an_evaluation_reads_the_validation_images_only(folders: Config) -> None:
    data = open_data(replace(folders, in_memory=True, evaluate=True, weights="w.pt"))
    assert isinstance(data.val, InMemory)
    assert not isinstance(data.train, InMemory)


def test_nobody_can_change_it(listings: list[Listing]) -> None:
    kept = keep_in_memory(listings, a_world())[0]
    assert isinstance(kept, InMemory)
    descriptor = kept.memory.descriptor
    for change in (
        lambda: os.pwrite(descriptor, b"x", 200),
        lambda: os.ftruncate(descriptor, 10),
        lambda: os.ftruncate(descriptor, 10**6),
    ):
        with pytest.raises(PermissionError):
            change()


# ---- ranks of one host ----

RANK = """
import os, sys, time
sys.path.insert(0, {tests!r})
from making import *
from test_in_memory import place_and_content
from recipe.data.batches import open_data, training_batches
if __name__ == "__main__":
    rank, root = int(sys.argv[1]), {root!r}
    config = a_config(
        train_dir=root + "/train", val_dir=root + "/val", cache_dir=root + "/cache", in_memory=True
    )
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
    data = open_data(config, a_world(rank, 3))
    if rank == 2:  # a loader worker takes as long to start as a rank
        batches = training_batches(data, config, a_world(rank, 3), CPU, 1, 0, 10**9)
        next(batches)
    print(*place_and_content(data.train), flush=True)
    time.sleep(60)
"""


def place_and_content(images: InMemory) -> list[int]:
    """Device, inode and number of names of the memory, and the digest of an image."""
    status = os.fstat(images.memory.descriptor)
    return [status.st_dev, status.st_ino, status.st_nlink, zlib.crc32(images.read(5))]


@pytest.mark.usefixtures("own_job")
@pytest.mark.parametrize("late", [0, rarely(1)])
def test_ranks_and_a_loader_worker_share_it(folders: Config, tmp_path: Path, late: int) -> None:
    """Whoever comes late; nothing is left of it when they are killed. Rank 0 is this process."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(Path(__file__).parent), root=folders.data))
    before = set(os.listdir("/dev/shm"))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "3" if rank == late else "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2)
    ]
    children: list[psutil.Process] = []
    try:
        outputs = [rank.stdout for rank in ranks if rank.stdout is not None]
        assert [output.readline() for output in outputs] == ["ready\n"] * 2
        time.sleep(1 if late == 0 else 0)
        data = open_data(replace(folders, in_memory=True), a_world(0, 3))
        assert isinstance(data.train, InMemory)
        _, inode, links, _ = own = place_and_content(data.train)
        assert links == 0  # of no name
        told = [list(map(int, output.readline().split())) for output in outputs]
        assert told == [own] * 2  # the same memory, the same bytes
        children = [c for rank in ranks for c in psutil.Process(rank.pid).children(recursive=True)]
        using = [child for child in children if maps(child.pid, str(inode))]
        assert len(using) == 1, "the loader worker maps it, too"
        assert {name for name in os.listdir("/dev/shm") if "images" in name} <= before
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def maps(pid: int, inode: str) -> bool:
    return any(line.split()[4] == inode for line in Path(f"/proc/{pid}/maps").open())


@pytest.fixture
def own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of its own: other tests may run at the same time."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"test-{os.getpid()}-{time.time_ns()}")


@pytest.mark.usefixtures("own_job")
def test_a_rank_whose_first_rank_fails_leaves_the_word_to_it(
    listings: list[Listing], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []
    connected = threading.Event()
    user_of = in_memory._user_of

    def and_tell(peer: socket.socket) -> int:
        connected.set()
        return user_of(peer)

    def second_rank() -> None:
        try:
            keep_in_memory(listings, a_world(1, 2))
        except Exception as error:
            raised.append(error)

    monkeypatch.setattr(in_memory, "_user_of", and_tell)
    thread = threading.Thread(target=second_rank)
    with in_memory._listen():  # and then closed, as by a first rank that ends
        thread.start()
        assert connected.wait(30)
    thread.join(30)
    (error,) = raised
    assert is_lost_peer(error)


@pytest.mark.usefixtures("own_job")
def test_two_jobs_of_one_name(listings: list[Listing]) -> None:
    with in_memory._listen(), pytest.raises(UserError, match="another run on this host"):
        keep_in_memory(listings, a_world(0, 2))


@pytest.mark.usefixtures("own_job")
def test_ranks_that_cannot_meet(listings: list[Listing], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "FIRST_RANK_TIMEOUT_S", 0.1)
    with pytest.raises(UserError, match="leave --in-memory out"):
        keep_in_memory(listings, a_world(1, 2))


# ---- what does not fit ----


def test_refused_where_it_does_not_fit(
    listings: list[Listing], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 8 * 16 + sum(map(len, all_bytes(listings[0]) + all_bytes(listings[1])))
    monkeypatch.setattr(in_memory, "available_memory", lambda: int(needed / 0.8) + 1)
    keep_in_memory(listings, a_world())
    monkeypatch.setattr(in_memory, "available_memory", lambda: int(needed / 0.8) - 1)
    with pytest.raises(UserError, match=r"--in-memory: the 15 images take .* GB, and here has"):
        keep_in_memory(listings, a_world())


def test_refused_by_the_system(listings: list[Listing], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(UserError, match=r"Function not implemented.*Leave --in-memory out"):
        keep_in_memory(listings, a_world())


def test_image_that_cannot_be_read(listings: list[Listing]) -> None:
    Path(listings[1].name(3)).unlink()
    with pytest.raises(UserError, match="no such file any more"):
        keep_in_memory(listings, a_world())


def test_available_memory(tmp_path: Path) -> None:
    free = psutil.virtual_memory().total
    cgroups, own = tmp_path / "cgroup", tmp_path / "own"

    def limit(place: str, maximum: str, used: int, cache: int) -> None:
        folder = cgroups / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{maximum}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(
            f"anon 5\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}\nshmem 3\n"
        )

    own.write_text("0::/job_7/step_0\n")
    limit("job_7/step_0", "max", 10**6, 0)
    assert available_memory(cgroups, own) > free / 100
    limit("job_7", "5000000", 3000000, 1000001)  # the level above counts, too
    assert available_memory(cgroups, own) == 3000001
    limit("job_7/step_0", "4000000", 3000000, 0)
    assert available_memory(cgroups, own) == 1000000
    limit("job_7/step_0", "4000000", 5000000, 0)
    assert available_memory(cgroups, own) == 0
    own.write_text("0::/\n")  # as a container sees itself
    limit(".", "2000000", 500000, 0)
    assert available_memory(cgroups, own) == 1500000
    assert available_memory(tmp_path / "none", tmp_path / "neither") > 0


def test_synthetic_data_is_not_read(folders: Config) -> None:
    assert open_data(a_config(data="synthetic", in_memory=True)).is_synthetic
