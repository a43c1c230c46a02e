"""How a command ends: what it tells the user without a traceback, and with which exit code."""

import os
import sys
from collections.abc import Callable

from recipe.errors import UserError


def run_main(
    name: str,
    body: Callable[[], int],
    errors: tuple[type[Exception], ...] = (UserError,),
    exit_code: int = 2,
    interrupted: str = "interrupted",
) -> int:
    """Run a command's body and return its exit code: of `errors`, which the user can set right, one
    message and `exit_code`; after Ctrl-C 130; and 1 if nobody reads what it prints any more."""
    try:
        return body()
    except BrokenPipeError:  # which `errors` may hold
        return 1
    except errors as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exit_code
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head`: whoever reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
