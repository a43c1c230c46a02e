#!/usr/bin/env python3
"""Build the images: python docker/build.py cpu cuda

It works with Docker (buildx), Podman or Buildah, whichever is installed, and tags its images with
the project's version, the target and the lock's torch: imagenet-horovod-ddp:0.1.0-cpu-torch2.14.1.
imagenet-horovod-ddp:cpu is the last build.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("cpu", "cuda", "test")
# Each builder, and a command that succeeds where it can build. A docker client alone cannot.
BUILDERS = {
    "docker": ["docker", "buildx", "ls"],
    "podman": ["podman", "version"],
    "buildah": ["buildah", "version"],
}


class Problem(Exception):
    """What is wrong and what to do, for the user."""


def main() -> int:
    args = parse_arguments()
    try:
        builder = find_builder(args.builder)
        epoch = source_date_epoch()
        for target in args.targets or ("cpu", "cuda"):
            command = build_command(builder, target, args, epoch)
            print(f"images: {target}: {shlex.join(command)}", flush=True)
            if not args.dry_run and subprocess.call(command, stdin=subprocess.DEVNULL):
                raise Problem(f"{target} failed; see the reason above.")
    except Problem as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=f"{', '.join(TARGETS)} (default: cpu and cuda)")
    parser.add_argument("--builder", choices=list(BUILDERS), help="default: the first that works")
    parser.add_argument("--base", help="a Debian 12 image (default: debian:bookworm-slim)")
    parser.add_argument("--name", default="imagenet-horovod-ddp", help="before the tag's colon")
    parser.add_argument(
        "--pip-config", type=Path, help="pip.conf for the build only: your index or mirror"
    )
    parser.add_argument(
        "--ca-bundle", type=Path, help="certificates for pip, for the build only: your proxy's"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"there is no target {min(unknown)!r}: choose from {', '.join(TARGETS)}")
    return args


def find_builder(wanted: str | None) -> str:
    why = []
    for name, check in BUILDERS.items():
        if wanted not in (None, name):
            continue
        if not shutil.which(name):
            why.append(f"{name} is not on PATH")
        elif subprocess.call(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            why.append(f"`{shlex.join(check)}` fails")
        else:
            return name
    raise Problem(f"{'; '.join(why)}. Start Docker's engine with buildx, or install Podman.")


def source_date_epoch() -> str:
    """The one time that everything in the image gets. It is that of the lock's last change, so that
    a change of the sources leaves the layers of the packages as they are."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    found = output_of(["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "requirements.lock"])
    if not found:
        raise Problem("no git history here to take a time from: set SOURCE_DATE_EPOCH=0, say.")
    return found


def pinned(pattern: str, file: str) -> str:
    """The version in the line of a file of the project that is like `pattern`."""
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match, f"{file} has no line like {pattern}"
    return match[1]


def output_of(command: list[str]) -> str:
    """What a command prints; nothing when it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def build_command(builder: str, target: str, args: argparse.Namespace, epoch: str) -> list[str]:
    version = pinned(r'^version = "(.+)"$', "pyproject.toml")
    torch = pinned(r"^torch==([\w.]+)", "requirements.lock")
    revision = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+"]
    build_args = {
        "SOURCE_DATE_EPOCH": epoch,
        "VERSION": version,
        "REVISION": output_of(revision) or "unknown",
        **({"BASE": args.base} if args.base else {}),
    }
    if builder == "docker":
        command = ["docker", "buildx", "build", "--load"]
    else:  # in these, --timestamp also sets the times of all files
        command = [builder, "build", "--layers", "--timestamp", epoch]
    command += ["--file", str(ROOT / "docker" / "Dockerfile"), "--target", target]
    for tag in (f"{version}-{target}-torch{torch}", target):
        command += ["--tag", f"{args.name}:{tag}"]
    for name, value in build_args.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, file in (("pip_config", args.pip_config), ("ca_bundle", args.ca_bundle)):
        if file:
            command += ["--secret", f"id={name},src={file.resolve()}"]
    return [*command, str(ROOT)]


if __name__ == "__main__":
    sys.exit(main())
