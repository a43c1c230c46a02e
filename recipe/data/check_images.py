"""Read and decode every image of a data set, as training does, and list those that are bad.

    python -m recipe.data.check_images DIR
    python -m recipe.data.check_images DIR --json FILE

DIR is what --data, --train-dir or --val-dir name: class folders or shards, or a folder with train/
and val/ of either. Files are decoded whole, shards checked against their checksums too. The exit
code is 0 if training can use all of it, and 1 if an image is bad, or more of them than training
lets pass have bytes left over. It begins at once, since it needs no torch, and uses all cores.
"""

import functools
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from json import dumps
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tyro.conf import Positional

from recipe.command import run_tool
from recipe.data.decoding import ONE_IN, decode, suspect
from recipe.data.image_folder import PASSED_OVER, SPLIT_NAMES, Listing
from recipe.data.shards import open_images
from recipe.errors import UserError
from recipe.files import write_json
from recipe.settings.config import home_path
from recipe.settings.flags import DataFlags

# Decoders work beside each other in threads; one in two may wait for the file system.
THREADS_PER_CORE = 2
IMAGES_AHEAD = 500  # of each thread, so that an interruption need not wait for millions


def fault_of(listing: Listing, index: int) -> tuple[str, str, str] | None:
    """What is wrong with an image: "bad" or "suspect", its name, and why; None if nothing is."""
    name = listing.name(index)
    try:
        _, left_over = decode(listing.read(index), name)
    except UserError as error:
        return "bad", name, str(error)
    return ("suspect", name, str(suspect(name, left_over))) if left_over else None


def faults_of(listing: Listing) -> list[tuple[str, str, str]]:
    """The images of `listing` with which something is wrong, in order; each is told when found."""
    faults = []
    threads = THREADS_PER_CORE * len(os.sched_getaffinity(0))
    window = threads * IMAGES_AHEAD
    with (
        ThreadPoolExecutor(threads) as pool,
        tqdm(desc=str(listing.root), total=len(listing), unit="image", disable=None) as bar,
    ):
        for start in range(0, len(listing), window):
            indices = range(start, min(start + window, len(listing)))
            for fault in pool.map(functools.partial(fault_of, listing), indices):
                bar.update()
                if fault is not None:
                    faults.append(fault)
                    bar.write(f"{fault[0]}: {fault[2]}", file=sys.stderr)
    return faults


def check_images(
    folder: Positional[Path], json: Path | None = None, cache_dir: str = DataFlags.cache_dir
) -> list[str]:
    """Check a data set; returns a line about it, or UserError if training cannot use it.

    Args:
        folder: The images.
        json: A file for all that is wrong; -: standard output.
        cache_dir: For the folder's listing.
    """
    inner = {
        path.name
        for path in folder.glob("*")
        if path.is_dir() and not PASSED_OVER.match(os.fsencode(path.name))
    }
    parts = sorted(inner & {"train", "val"}) if inner <= SPLIT_NAMES else []
    cache = Path(home_path("--cache-dir", cache_dir))
    listings = [open_images(folder / part, cache) for part in parts or [""]]
    faults = [faults_of(listing) for listing in listings]
    told: dict[str, Any] = {
        "images": sum(map(len, listings)),
        "left_out": [f"{one.root}: {one.left_out}" for one in listings if one.left_out],
        "bad": [],
        "suspect": [],
    }
    for kind, name, reason in itertools.chain(*faults):
        told[kind].append({"image": name, "reason": reason})
    is_printed = json == Path("-")
    try:
        if is_printed:
            print(dumps(told, indent=2))
        elif json is not None:
            write_json(json, told)
    except OSError as error:
        raise UserError(f"--json {json}: cannot be written ({error.strerror})") from error
    summary = (
        f"{folder}: {told['images']:,} images, {len(told['bad']):,} bad, "
        f"{len(told['suspect']):,} that may be damaged"
        + "".join(f"; {line}" for line in told["left_out"])
    )
    if told["bad"] or any(
        len(found) > len(listing) // ONE_IN for listing, found in zip(listings, faults, strict=True)
    ):
        raise UserError(
            f"{summary}. Bring good copies back, or remove them; --bad-images replace trains "
            "without."
        )
    return [] if is_printed else [summary]


main = functools.partial(
    run_tool, "python -m recipe.data.check_images", check_images, __doc__, exit_code=1,
    interrupted="interrupted: nothing was written",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
