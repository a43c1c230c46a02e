"""What run.py and its siblings tell the user without a traceback."""


class UserError(Exception):
    """Something that the user can set right."""
