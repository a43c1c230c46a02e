"""What compare/parity.py shows: as text, and as JSON."""

import dataclasses
import json
import math
import textwrap
from typing import Any

from tabulate import tabulate

from compare.evidence.parity import KindResult, Parity, Place, numbered
from compare.evidence.traces import KINDS

WIDTH = 100  # columns


def text_report(parity: Parity) -> str:
    """Return the result for a terminal, at most 100 columns wide."""
    lines = wrapped(f"{parity.a} against {parity.b}: {parity.compared}", "")
    for missing in parity.not_compared:
        lines += wrapped(f"not compared: {missing}", "    ")
    rows = [
        [
            name,
            f"{kind.tensors:,}",
            f"{kind.bit_equal:,}",
            f"{kind.unequal:,}",
            f"{kind.beyond:,}" if kind.judged else "not judged",
            distance_text(kind.most_ulps.distance.ulps) if kind.most_ulps else "0",
            distance_text(kind.most_relative.distance.relative) if kind.most_relative else "0",
        ]
        for name, kind in in_order(parity.kinds)
    ]
    headers = ["kind", "tensors", "bit-equal", "unequal", "beyond", "most ulps",
               "most relative"]  # fmt: skip
    alignment = ("left", *["right"] * 6)
    table = tabulate(rows, headers, disable_numparse=True, colalign=alignment)
    lines += ["", *table.splitlines(), ""]
    for name, kind in in_order(parity.kinds):
        if kind.most_ulps and kind.most_relative:
            where = place_text(kind.most_ulps, "ulps")
            lines += wrapped(f"{name}, most ulps: {where}", "")
            elsewhere = place_text(kind.most_relative, "relative")
            if elsewhere != where:
                lines += wrapped(f"{name}, most relative: {elsewhere}", "")
    if parity.final_weights:
        lines += wrapped(f"final weights of the whole runs: {parity.final_weights}", "")
    for setting in parity.settings:
        lines += wrapped(f"the settings differ: {setting}", "")
    lines += [line for sentence in parity.why for line in wrapped(sentence, "")]
    if first := first_divergence(parity):
        name, place = first
        if not parity.exact:
            where = place_text(place, "ulps")
            lines += wrapped(f"First beyond the tolerance: {name}, {where}", "")
        else:
            lines += wrapped(f"First divergence: {name}, {place_text(place, 'ulps')}", "")
    tolerance = "" if parity.exact else f" ({parity.max_ulps} ulps or {parity.relative:g} relative)"
    lines += wrapped(f"Result: {parity.verdict}{tolerance}", "")
    return "\n".join(lines)


def first_divergence(parity: Parity) -> tuple[str, Place] | None:
    """Return kind and place of the first difference beyond the tolerance: by step, in a step by
    what is computed first."""
    places = [
        (name, kind.first_beyond)
        for name, kind in in_order(parity.kinds)
        if kind.judged and kind.first_beyond
    ]
    return min(places, key=lambda named: named[1].step, default=None)


def in_order(kinds: dict[str, KindResult]) -> list[tuple[str, KindResult]]:
    order = {name: number for number, name in enumerate(KINDS)}
    return sorted(kinds.items(), key=lambda item: order.get(item[0], len(order)))


def distance_text(distance: float | None) -> str:
    if distance is None:
        return "no number"
    return f"{distance:,}" if isinstance(distance, int) and distance < 10**6 else f"{distance:.2e}"


def place_text(place: Place, measured: str) -> str:
    """Return where two tensors differ, by how much, and how large their values are."""
    where = [f"step {place.step}"]
    if place.layer:
        where.append(f"layer {place.layer}")
    if place.ranks != [-1]:
        where.append(f"{numbered('rank', place.ranks)}")
    text = ", ".join(where)
    distance = place.distance
    if distance.problem:
        return f"{text}: {distance.problem}"
    element = distance.most_ulps if measured == "ulps" else distance.most_absolute
    assert element is not None
    at = f" at {list(element.index)}" if element.index else ""
    text += f": {element.a:.9g} against {element.b:.9g}{at} ({distance_text(distance.ulps)} ulps"
    text += f" at most, {distance.relative:.2e} relative"
    if element.index:
        text += f"; largest values {distance.magnitude_a:.3g} and {distance.magnitude_b:.3g}"
    return text + ")"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    ",
        break_on_hyphens=False,
    )  # fmt: skip


def json_report(parity: Parity) -> str:
    """Return the result as JSON; a distance that no number can say is null, NaN a string."""
    record = dataclasses.asdict(parity)
    record["verdict"], record["diverged"] = parity.verdict, parity.diverged
    first = first_divergence(parity)
    record["first_divergence"] = (
        {"kind": first[0], **dataclasses.asdict(first[1])} if first else None
    )

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(record), indent=2, allow_nan=False)
