"""Sides that run a commit: each commit has a git worktree, which is there while run.py runs."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from compare.for_scripts.comparison_side import run_git, work_tree_of
from compare.plan.environment import COMMITS
from compare.plan.plan import OwnScript, Plan
from recipe.errors import UserError


class GitError(UserError):
    """git refused a command, with this reason."""


def git(folder: str, *words: str) -> str:
    """Return what a git command prints in a folder. GitError if git refuses it; UserError if git is
    not installed."""
    try:
        done = run_git(folder, *words)
    except FileNotFoundError:
        raise UserError("a commit as a side needs git, which is not installed") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        named = [line for line in lines if line.startswith(("fatal:", "error:"))]
        raise GitError([*lines, *named][-1])
    return done.stdout.strip()


def repository_of(own: OwnScript) -> str:
    """Return a folder in the repository of a side's commit."""
    return os.path.expanduser(own.directory or ".")


def full_name(commit: str, folder: str = ".") -> str:
    """Return the full name of a commit of the repository that a folder is in; raises UserError."""
    try:
        git(folder, "rev-parse", "--show-toplevel")
    except GitError as error:
        if owned := re.search("dubious ownership in repository at '(.*)'", str(error)):
            raise UserError(
                f"commit {commit}: {owned[1]} belongs to another user, so git does not read it; if "
                f"you trust it: git config --global --add safe.directory {shlex.quote(owned[1])}"
            ) from None
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
            # Twice: git may have locked the place, if it was killed before.
            ["worktree", "add", "--force", "--force", "--detach", str(path), own.commit],
        )
        for own in plan.side.values()
        if own.commit
    }


@contextmanager
def worktrees(plan: Plan) -> Iterator[None]:
    """Make the worktrees that a plan's sides need, and remove them at the end. What a killed run.py
    has left, of these or other commits, is removed first."""
    needed = worktrees_of(plan)
    for path in left():
        tree = work_tree_of(str(path.resolve()))
        remove(path, tree.repository if tree else ".")
    ignore = COMMITS / ".gitignore"
    try:
        for path, (folder, words) in needed.items():
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
        if not left():
            ignore.unlink(missing_ok=True)


def left() -> list[Path]:
    """Return the worktrees that are there."""
    return [path for path in COMMITS.iterdir() if path.is_dir()]


def remove(path: Path, folder: str) -> None:
    """Remove a worktree, if it is there, with all that is in it. `folder`: one of its repository,
    or the repository itself."""
    shutil.rmtree(path, ignore_errors=True)  # git would leave one that has submodules
    with suppress(GitError):  # it knows of none
        git(folder, "worktree", "remove", "--force", "--force", str(path.absolute()))
