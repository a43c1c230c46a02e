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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
TARGETS = ("cpu", "cuda", "test")
# Each builder, and a command that succeeds where it can build. A docker client alone cannot.
BUILDERS = {
    "docker": ["docker", "buildx", "ls"],
    "podman": ["podman", "version"],
    "buildah": ["buildah", "version"],
}
FLAGS: dict[str, Any] = {
    "--builder": {"choices": [*BUILDERS], "help": "default: the first that works"},
    "--base": {"help": "a Debian 12 image (default: debian:bookworm-slim)"},
    "--name": {"default": "imagenet-horovod-ddp", "help": "before the tag's colon"},
    "--pip-config": {"type": Path, "help": "pip.conf for the build only: your index or mirror"},
    "--ca-bundle": {
        "type": Path, "help": "certificates for pip, for the build only: your proxy's"
    },
    "--dry-run": {"action": "store_true", "help": "only print the commands"},
}  # fmt: skip


def main() -> None:
    args = parse_arguments()
    builder = find_builder(args.builder)
    # The one time that everything in the image gets. It is that of the lock's last change, so that
    # a change of the sources leaves the layers of the packages as they are.
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct", str(LOCK))
    if not epoch:
        sys.exit("images: no git history here to take a time from: set SOURCE_DATE_EPOCH=0, say.")
    for target in args.targets or ("cpu", "cuda"):
        command = build_command(builder, target, args, epoch)
        print(f"images: {target}: {shlex.join(command)}", flush=True)
        if not args.dry_run and subprocess.call(command, stdin=subprocess.DEVNULL):
            sys.exit(f"images: {target} failed; see the reason above.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=f"{', '.join(TARGETS)} (default: cpu and cuda)")
    for flag, how in FLAGS.items():
        parser.add_argument(flag, **how)
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"there is no target {min(unknown)!r}: choose from {', '.join(TARGETS)}")
    return args


def find_builder(wanted: str | None) -> str:
    why = []
    for name, check in BUILDERS.items():
        if wanted in (None, name):
            why.append(
                f"`{shlex.join(check)}` fails" if shutil.which(name) else f"no {name} on PATH"
            )
            if shutil.which(name) and subprocess.run(check, capture_output=True).returncode == 0:
                return name
    sys.exit(f"images: {'; '.join(why)}. Start Docker's engine with buildx, or install Podman.")


def git(*words: str) -> str:
    """What git says of this checkout; nothing where it is none, or git is not there."""
    if not shutil.which("git"):
        return ""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip()


def build_command(builder: str, target: str, args: argparse.Namespace, epoch: str) -> list[str]:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.findall(r'(?m)^version = "(.+)"$', project)[0]
    torch = re.findall(r"(?m)^torch==([\w.]+)", LOCK.read_text())[0]
    build_args = {
        "SOURCE_DATE_EPOCH": epoch,
        "VERSION": version,
        "REVISION": git("describe", "--always", "--abbrev=12", "--dirty=+") or "unknown",
        **({"BASE": args.base} if args.base else {}),
    }
    secrets = {"pip_config": args.pip_config, "ca_bundle": args.ca_bundle}
    # In the others, --timestamp also sets the times of all files.
    own = [builder, "build", "--layers", "--timestamp", epoch]
    return [
        *(["docker", "buildx", "build", "--load"] if builder == "docker" else own),
        "--file", str(ROOT / "docker" / "Dockerfile"), "--target", target,
        "--tag", f"{args.name}:{version}-{target}-torch{torch}", "--tag", f"{args.name}:{target}",
        *(word for x in build_args for word in ("--build-arg", f"{x}={build_args[x]}")),
        *(word for x, file in secrets.items() if file
          for word in ("--secret", f"id={x},src={file.resolve()}")),
        str(ROOT),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
