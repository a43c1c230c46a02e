"""plan.json as a dict, for what does not read the typed PlanRecord yet."""

from dataclasses import asdict
from typing import Any

import msgspec

from compare.plan.record import PlanRecord


def plan_dict(plan: PlanRecord) -> dict[str, Any]:
    """Return the fields of plan.json, and what follows from them."""
    details = {one.name: {**asdict(one), "environment": one.variables} for one in plan.members()}
    found: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=float)
    return found | {
        "configurations": plan.names,
        "configuration_details": details,
        "pairs": [list(pair) for pair in plan.pairs()],
        "varied": plan.varied,
        "cases": [{"name": case.name, "flags": list(case.flags)} for case in plan.cases],
        "scaling": "weak" if plan.global_batch_size is None else "strong",
    }
