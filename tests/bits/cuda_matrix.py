"""Workers that share one GPU: five models in two precisions, each with one hash however it is trained.

    python -m tests.bits.cuda_matrix [--jobs 4] [--device cuda:0] [--no-kills]

1, 2 and 3 workers under ddp, zero2, zero3 and fsdp, and under each of them once with a worker killed. NCCL refuses two
workers on one device, so they talk through gloo. Prints a row for each model and precision; exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.bits.fuzz import Case, Leg, Outcome, judge
from tests.bits.fuzz_models import ARCHITECTURES
from tests.workers import _CONTEXT

MODELS = ("llama", "t5", "vit", "mobilenet", "mixture")
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
PRECISIONS = ("fp32", "bf16")


def case_of(model: str, precision: str) -> Case:
    return Case(
        seed=1, architecture=model, layers=(), width=0, input=ARCHITECTURES[model][1], tied=False, optimizer="AdamW",
        settings={"lr": 0.01, "fused": True}, precision=precision, lanes=4, samples=75, clip=0.5, noise=True,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-kills", dest="kills", action="store_false")
    asked = parser.parse_args()
    vars(sys.modules["__main__"])["__spec__"] = None  # as in tests.bits.fuzz
    _CONTEXT.set_forkserver_preload(["tests.preload", "tests.bits.fuzz", "transformers.models.t5.modeling_t5"])
    begun = time.monotonic()
    runs = []
    for model in MODELS:
        for precision in PRECISIONS:
            job = case_of(model, precision)
            for strategy in STRATEGIES:
                leg = Leg(strategy=strategy, backend="gloo", bucket_mib=0.005)
                runs += [replace(job, legs=(replace(leg, workers=workers),)) for workers in (1, 2, 3)]
                if asked.kills:
                    killed = replace(job, legs=(replace(leg, workers=3),), kill="kill:rank=1,step=2,phase=backward")
                    runs.append(killed)
    with ThreadPoolExecutor(asked.jobs) as pool:
        outcomes = list(pool.map(lambda case: judge(case, asked.device), runs))
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for case, outcome in zip(runs, outcomes, strict=True):
        rows[str(case.architecture), case.precision].append(outcome)
        if outcome.kind != "same":
            print(f"{case} {case.kill or ''}: {outcome.kind}\n{outcome.text[-1500:]}")
    for (model, precision), found in rows.items():
        print(f"{model:10s} {precision}: {sum(o.kind == 'same' for o in found)} of {len(found)} the hash of one worker")
    print(f"{len(runs)} runs in {time.monotonic() - begun:.0f} s")
    return 0 if all(outcome.kind == "same" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
