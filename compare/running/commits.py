"""Sides that run a commit: each commit has a git worktree, which is there while run.py runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from compare.plan.environment import COMMITS
from compare.plan.plan import OwnScript, Plan
from recipe.errors import UserError


class GitError(UserError):
    """git refused a command, with this reason."""


def git(folder: str, *words: str) -> str:
    """Return what a git command prints in a folder. GitError if git refuses it; UserError if git is
    not installed."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, errors="replace")
    except FileNotFoundError:
        raise UserError("a commit as a side needs git, which is not installed") from None
    if done.returncode:
        raise GitError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout.strip()


def repository_of(own: OwnScript) -> str:
    """Return a folder in the repository of a side's commit."""
    return os.path.expanduser(own.directory or ".")


def full_name(commit: str, folder: str = ".") -> str:
    """Return the full name of a commit of the repository that a folder is in; raises UserError."""
    try:
        git(folder, "rev-parse", "--show-toplevel")
    except GitError as error:
        raise UserError(
            f"commit {commit}: {Path(folder).absolute()} has no git work tree ({error}); start "
            "run.py in one, or give the side a directory in one"
        ) from None
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except GitError:
        raise UserError(
            f"commit {commit}: there is no such commit, branch or tag in the repository of "
            f"{Path(folder).absolute()}; `git log --all --oneline` lists them (after a shallow "
            "clone first `git fetch --unshallow`)"
        ) from None


def with_full_names(plan: Plan) -> Plan:
    """Return the plan with the full names of its sides' commits, which stay when a branch moves."""
    sides = {
        name: replace(own, commit=full_name(own.commit, repository_of(own))) if own.commit else own
        for name, own in plan.side.items()
    }
    return replace(plan, side=sides)


def worktrees_of(plan: Plan) -> dict[Path, tuple[str, list[str]]]:
    """Return the worktrees that a plan's sides need, each with a folder of its repository and the
    words of git that make it."""
    return {
        (path := Path.cwd() / COMMITS / own.commit[:12]): (
            repository_of(own),
            ["worktree", "add", "--force", "--detach", str(path), own.commit],
        )
        for own in plan.side.values()
        if own.commit
    }


@contextmanager
def worktrees(plan: Plan) -> Iterator[None]:
    """Make the worktrees that a plan's sides need, and remove them at the end."""
    needed = worktrees_of(plan)
    ignore = COMMITS / ".gitignore"
    try:
        for path, (folder, words) in needed.items():
            remove(path, folder)  # what a killed run.py has left, perhaps changed
            ignore.write_text("*\n")
            try:
                git(folder, *words)
            except GitError as error:
                raise UserError(f"the worktree {path} cannot be made: {error}") from None
        if any(git(folder, "status", "--porcelain", "-uno") for folder, _ in needed.values()):
            print("note: uncommitted changes are not part of a commit's side", file=sys.stderr)
        yield
    finally:
        for path, (folder, _) in needed.items():
            remove(path, folder)
        ignore.unlink(missing_ok=True)


def remove(path: Path, folder: str) -> None:
    """Remove a worktree, if it is there, with all that is in it."""
    with suppress(GitError):
        git(folder, "worktree", "remove", "--force", str(path))
    shutil.rmtree(path, ignore_errors=True)
