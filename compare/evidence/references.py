"""Published speeds, to draw beside those that were measured."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import UserError, refuse

COLUMNS = ("name", "workers", "images_per_second", "source")


@dataclass(frozen=True)
class Reference:
    """Images per second of all workers that somebody published, by the number of workers."""

    name: str
    source: str
    images_per_second: dict[int, float]


def load_references(path: Path) -> list[Reference]:
    """Read a CSV file with the columns COLUMNS; lines of the same name belong together. UserError
    if it is not such a file."""
    found: dict[str, Reference] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.DictReader(stream)
            if set(lines.fieldnames or ()) != set(COLUMNS):
                raise ValueError(f"the first line must name the columns {','.join(COLUMNS)}")
            for line in lines:
                name, source = line["name"], line["source"]
                workers, speed = int(line["workers"]), float(line["images_per_second"])
                if not (name and source and workers > 0 and 0 < speed < math.inf):
                    raise ValueError("a name, a source and positive numbers are needed")
                speeds = found.setdefault(name, Reference(name, source, {})).images_per_second
                if workers in speeds:
                    raise ValueError(f"{name!r} has a speed of {workers} workers already")
                speeds[workers] = speed
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{path}, line {lines.line_num}: {error}") from None
    refuse((not found, f"{path}: holds no line with a speed"))
    return list(found.values())
