"""Settings that others, and older config.yaml files, have in another form, and what says the same here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

_FORMS = (
    'truncate is weights=[{"level": LEVEL, "upper": UPPER}]; mask is weights=[{"level": LEVEL}] with rejections='
    '[{"level": LEVEL, "lower": LOWER, "upper": UPPER}]; none is weights=[{"level": LEVEL}], with proximal=bypassed '
    'weights=[]; a veto is one more rejection, {"level": "token", "lower": VETO, "veto": true}'
)


def instead_of_correction(correction: object = None, proximal: object = None) -> str:
    """What to write instead of a section `algorithm.correction`. Without its kind: what to write for each kind."""
    if isinstance(correction, Mapping) and "kind" in correction:
        lists = parts_of_correction(cast("Mapping[str, Any]", correction), proximal)
        said = " and ".join(f"{name}={json.dumps(parts)}" for name, parts in lists.items())
        return f"correction is not a setting; the same is {said}"
    return f"correction is not a setting; it is two lists, weights and rejections, and of its kinds {_FORMS}"


def parts_of_correction(correction: Mapping[str, Any], proximal: object) -> dict[str, list[dict[str, Any]]]:
    """The `weights` and `rejections` of a section `correction`, whose defaults are truncate, token and 5."""
    kind, level, upper = (correction.get(*one) for one in (("kind", "truncate"), ("level", "token"), ("upper", 5.0)))
    lower, veto = correction.get("lower") or None, correction.get("veto")
    weight, rejections = {"level": level}, list[dict[str, Any]]()
    if kind == "truncate":
        weight["upper"] = upper
    elif kind == "mask":
        rejections.append({"level": level, **({"lower": lower} if lower else {}), "upper": upper})
    if veto is not None:
        rejections.append({"level": "token", "lower": veto, "veto": True})
    return {"weights": [] if proximal == "bypassed" else [weight], "rejections": rejections}
