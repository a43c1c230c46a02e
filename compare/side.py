"""`from compare.side import Side`, where this project is installed. A script that is to be a side
in any environment writes `from comparison_side import Side` (compare/for_scripts/)."""

from compare.for_scripts.comparison_side import Side

__all__ = ["Side"]
