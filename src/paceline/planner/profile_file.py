"""A model's profile as JSON: how the process that runs a script hands it to the one that plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline.planner.model_profile import ModelProfile, PassProfile, Stretch, Variant, Work
from paceline.sharding.bucket import GradientSpec

_PLAIN = (
    "name", "names", "frozen_bytes", "buffer_bytes", "state_bytes", "units", "how", "blocks", "update", "samples",
    "unit", "units_per_sample", "lanes", "accumulate",
)  # fmt: skip


def to_json(profile: ModelProfile) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in _PLAIN} | {
        "specs": [[list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in profile.specs],
        "passes": [
            {"variant": [variant.samples, variant.precision, variant.recomputed, variant.compiled]} | _pass(one)
            for variant, one in profile.passes.items()
        ],
    }


def _pass(one: PassProfile) -> dict[str, Any]:
    return {
        "forward": _work(one.forward),
        "backward": [[_work(stretch.work), list(stretch.ready), stretch.peak_bytes] for stretch in one.backward],
        "saved_bytes": one.saved_bytes,
        "peak_bytes": one.peak_bytes,
        "forward_peak_bytes": one.forward_peak_bytes,
        "input_bytes": one.input_bytes,
        "read_again": sorted(one.read_again),
        "used": list(one.used),
        "measured_s": one.measured_s,
    }


def _work(work: Work) -> list[list[Any]]:
    return [[*key, count] for key, count in work.items()]


def from_json(told: Mapping[str, Any]) -> ModelProfile:
    plain = {name: told[name] for name in _PLAIN}
    plain["names"] = tuple(plain["names"])
    plain["units"] = tuple(tuple(unit) for unit in plain["units"])
    specs = tuple(
        GradientSpec(tuple(shape), getattr(torch, dtype), torch.device("cpu")) for shape, dtype in told["specs"]
    )
    passes = {Variant(*one["variant"]): _pass_of(one) for one in told["passes"]}
    return ModelProfile(specs=specs, passes=passes, **plain)


def _pass_of(told: Mapping[str, Any]) -> PassProfile:
    return PassProfile(
        samples=told["variant"][0],
        forward=_work_of(told["forward"]),
        backward=tuple(Stretch(_work_of(work), tuple(ready), peak) for work, ready, peak in told["backward"]),
        saved_bytes=told["saved_bytes"],
        peak_bytes=told["peak_bytes"],
        input_bytes=told["input_bytes"],
        read_again=frozenset(told["read_again"]),
        forward_peak_bytes=told["forward_peak_bytes"],
        used=tuple(told["used"]),
        measured_s=told["measured_s"],
    )


def _work_of(rows: list[list[Any]]) -> Work:
    return Counter({(flops, moved, dtype): count for flops, moved, dtype, count in rows})
