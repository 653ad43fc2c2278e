"""From the first difference to what likely caused it, in words: a pure function of what was recorded.

The order of a step is the argument. Where data and random state are the same and the loss is not, something in forward
is the worker's own; where lanes' gradients are the same and their sum is not, it is the sum. A closer look at the
operators of the item (`first_different_operator.py`) makes it a line of the script.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.verify import comparison as c
from paceline.verify import first_different_operator as o
from paceline.verify.comparison import Difference
from paceline.verify.first_different_operator import DifferentOperator
from paceline.verify.record import Run


@dataclass(frozen=True)
class Cause:
    name: str  # a few words, the same for the same kind of cause
    text: str
    advice: str


def likely_cause(
    found: Difference,
    reference: Run,
    other: Run,
    parted: DifferentOperator | None = None,
    *,
    repeats: bool | None = None,
) -> Cause:
    """`repeats`: whether a second run of the same setting gave what the first one did; None: it was not tried."""
    if found.of_reference:
        other = reference
    if repeats is False:
        return _not_deterministic(found, parted)
    if parted is not None and found.kind in (c.RANDOM, c.LOSS, c.LANE_GRADIENT):
        return _of_operators(found, parted)
    match found.kind:
        case c.START:
            return _of_start(found)
        case c.WRITTEN:
            return _of_writing(found, other)
        case c.DATA:
            return _of_data(found)
        case c.ITEMS | c.STEPS | c.LANES:
            return _of_counts(found)
        case c.RANDOM:
            return _of_random_state(found)
        case c.LOSS:
            return _of_forward(found)
        case c.SHARE:
            return _of_shares(found)
        case c.LANE_GRADIENT:
            return Cause(
                "a backward of its own",
                f"data, random state and loss of {lane(found)} are the same, and its own gradient of {found.name} is "
                "not: an autograd function or hook of the script depends on the worker",
                "look at what writes gradients in backward: register_hook, torch.autograd.Function",
            )
        case c.RATES:
            return Cause(
                "learning rates",
                f"worker {found.workers[0]} has another learning rate, decay or momentum: a schedule that counts the "
                "items of this worker, or depends on the number of workers",
                "take no rate from engine.num_processes: it belongs to the global batch, which lanes make; make the "
                "schedule over engine.steps_per_epoch(loader), and give the scheduler to engine.prepare()",
            )
        case c.GRADIENT:
            return _of_sum(found)
        case c.BUFFER:
            return Cause(
                "unsynchronised buffers",
                f"every lane computed the same, and the buffer {found.name} is another after the step: something "
                "beside the lanes' forward writes it",
                "write buffers in forward alone; the engine gives each lane the step's buffers and keeps the lowest's",
            )
        case _:
            return _of_update(found, reference, other)


def lane(found: Difference) -> str:
    if found.place is None:
        return "the step"
    number, micro_batch, update = found.place
    more = f", micro-batch {micro_batch}" if micro_batch else ""
    return f"lane {number}{more}{f', update {update}' if update else ''}"


def _not_deterministic(found: Difference, parted: DifferentOperator | None) -> Cause:
    if parted is not None and parted.kind in (o.OPERATOR, o.RANDOM):
        what = f"{parted.operators[0]} gave other results for the same inputs"
    elif parted is not None:
        what = f"the runs part at {parted.operators[0]}"
    else:
        what = "no single operator was seen to do so"
    return Cause(
        "a non-deterministic operator",
        f"two runs of one and the same setting differ, so it is not the number of workers: {what}",
        "keep torch.use_deterministic_algorithms(True), which the engine sets and which names operators that have no "
        "deterministic form; a kernel of one's own must add in a fixed order, and seed what it draws",
    )


def _of_operators(found: Difference, parted: DifferentOperator) -> Cause:
    ours, theirs = parted.operators
    at = f"{lane(found)} (worker {found.workers[0]})" if found.workers else lane(found)
    match parted.kind:
        case o.ORDER:
            return Cause(
                "a rank-dependent branch",
                f"{at} ran {theirs} where the reference ran {ours}: a branch that depends on the worker",
                "compute the same on every worker; what one of them does for all, such as printing, must not touch the "
                "loss",
            )
        case o.NUMBER:
            assert parted.left is not None
            assert parted.right is not None
            return Cause(
                "a value that depends on the worker",
                f"{theirs} was called with {parted.right['others']!r} in {at}, and with {parted.left['others']!r} in "
                "the reference: a number that depends on the rank, the workers, or the items that this worker has run",
                "take such numbers from engine.step, which is the same everywhere",
            )
        case o.OUTSIDE:
            return Cause(
                "state outside the engine",
                f"{theirs} read a tensor that is no parameter, no buffer, not in the batch, and another one in {at}: "
                "an unsynchronised buffer that the script keeps from item to item, or numbers drawn from a generator "
                "of its own",
                "register_buffer() what a model keeps, so that each lane begins with the step's; draw from torch, "
                "numpy.random or random, which the engine seeds for every item",
            )
        case o.STATE:
            return Cause(
                "unsynchronised buffers",
                f"{theirs} read {parted.name}, which was another in {at} when it came there",
                "change weights by the optimizer alone, and buffers in forward alone",
            )
        case o.RANDOM:
            assert parted.left is not None
            if parted.left["generator"]:
                return Cause(
                    "random state outside the engine",
                    f"{theirs} draws from a torch.Generator of the script's own, whose state in {at} depends on the "
                    "items that this worker has run",
                    "draw from torch's global generator, which the engine seeds for every item",
                )
            return Cause(
                "seeded by the worker",
                f"{theirs} drew other numbers in {at}, though the engine had seeded the item alike: the script has "
                "seeded or used torch's generator in between, in a way that depends on the worker",
                "leave seeding to Engine(seed=…): it seeds torch, numpy and random for every item",
            )
        case _:
            return Cause(
                "an operator that depends on more than its inputs",
                f"{theirs} gave other results in {at} than in the reference for the same inputs, and each run the same "
                "again: a fused kernel whose result depends on threads, alignment or the length that it is given",
                "choose another implementation of the operator, or fix what it depends on, such as Engine(threads=…)",
            )


def _of_start(found: Difference) -> Cause:
    return Cause(
        "first weights",
        f"{found.name} differs before the first step: the model was built from random numbers of another place, or "
        "from files that the run before has left",
        "create the Engine before the model, which it seeds; give each run its own files by {folder} in the script's "
        "arguments",
    )


def _of_writing(found: Difference, other: Run) -> Cause:
    if found.inside:
        writers = ", ".join(map(str, found.workers))
        return Cause(
            "a weight written between steps on one worker only",
            f"between step {found.step - 1} and {found.step} something wrote {found.name} on worker {writers} of "
            f"{other.workers}, and not alike on the others",
            "let every worker make the same change (`with torch.no_grad(): …` outside of any `if rank == 0`), or leave "
            "it to the optimizer",
        )
    return Cause(
        "a weight written between steps",
        f"between step {found.step - 1} and {found.step} something wrote {found.name}, with values that depend on the "
        "number of workers",
        "compute what is written from what all workers have alike: weights, engine.step, engine.means",
    )


def _of_data(found: Difference) -> Cause:
    ours, theirs = found.more.get("ids", ((), ()))
    if ours != theirs:
        return Cause(
            "data order",
            f"{lane(found)} got samples {_few(theirs)} instead of {_few(ours)}: the order depends on the workers, as "
            "when a sampler shuffles by itself and is not told its epoch (set_epoch)",
            "leave the order to engine.prepare(), or give the sampler a set_epoch(), which the engine calls",
        )
    which = f"samples {_few(theirs)}" if theirs else "its samples"
    return Cause(
        "data that depend on the process",
        f"{lane(found)} got {which}, as in the reference, with other values{f' ({found.name})' if found.name else ''} "
        f"in epoch {found.more.get('epoch', 0)}: the dataset keeps a state of its own in every process, as one that "
        "counts its epochs itself (a missing set_epoch), or draws from a generator of its own",
        "give the dataset a set_epoch(epoch), which the engine calls on every worker, and let it draw from torch, "
        "numpy.random or random, which are seeded for every item",
    )


def _of_counts(found: Difference) -> Cause:
    if found.kind == c.ITEMS:
        return Cause(
            "data order",
            f"{lane(found)} had an item in one run only: the length of the data depends on the workers",
            "give every worker the whole dataset; the engine deals the samples out",
        )
    if found.kind == c.LANES:
        return Cause(
            "lanes",
            f"the jobs have {found.values} lanes, so their global batches are others",
            "let the script leave lanes to the launcher, or fix them at one number",
        )
    assert found.values is not None
    return Cause(
        "another number of steps",
        f"the runs made {found.values[0]} and {found.values[1]} steps: the loop ends by a count of its own, which "
        "depends on how many items this worker has",
        "count steps by engine.step, and end the loop by engine.stop()",
    )


def _of_random_state(found: Difference) -> Cause:
    return Cause(
        "seeded by the worker",
        f"{found.name} stands at another random state after the forward of {lane(found)}, though the engine had seeded "
        "it alike: the script seeds it, or draws more often, depending on the worker",
        "leave seeding to Engine(seed=…): it seeds torch, numpy and random for every item",
    )


def _of_forward(found: Difference) -> Cause:
    return Cause(
        "a forward that depends on the worker",
        f"data, weights and random state of {lane(found)} are the same and its loss is not: a branch on the rank, a "
        "value that the script keeps from item to item (an unsynchronised buffer), or a generator of its own",
        "let forward depend on the batch, the model and torch's, numpy's and random's global generators alone",
    )


def _of_shares(found: Difference) -> Cause:
    assert found.values is not None
    return Cause(
        "averages of averages",
        f"engine.backward() counted {lane(found)} with weight {found.values[1]:g} instead of {found.values[0]:g}: a "
        "weight that depends on the number of workers, or of items on this one, makes a mean of means",
        "give the samples or tokens of the micro-batch as weight=, or leave it out; the engine divides by their sum",
    )


def _of_sum(found: Difference) -> Cause:
    where = ", and the workers of the run disagree about it" if found.inside else ""
    return Cause(
        "the order of the sum",
        f"each lane's own gradient of {found.name} is the same, and their sum is not{where}: gradients are added as "
        "they arrive, or in another order of buckets, averaged once more, or written after the exchange",
        "keep reduction='exact'; leave .grad and collectives of gradients to the engine (clip_grad_norm_, weight=)",
    )


def _of_update(found: Difference, reference: Run, other: Run) -> Cause:
    names = ", ".join(other.about.get("optimizers", ())) or "the optimizer"
    sharded = other.about.get("strategy", "")
    if found.inside:
        return Cause(
            "an update of one worker only",
            f"{found.name} got another update on worker {found.workers[0]} than on others of the same run: {names}, or "
            "a hook of it, depends on the worker",
            "let the update depend on gradients and settings alone, which all workers have alike",
        )
    if sharded != reference.about.get("strategy", ""):
        return Cause(
            "an update that depends on the length of a shard",
            f"every lane's gradient is the same, and {found.name} is another after the update: under {sharded} {names} "
            "sees a part of each tensor, and its update depends on how long that is (or the sum of the gradients, "
            "which no worker has whole there, is another)",
            "use an optimizer that works element by element, or train with strategy='ddp'",
        )
    return Cause(
        "the update",
        f"gradients are the same, and {found.name} is another after the update by {names}: it keeps a state, or draws "
        "numbers, that depend on the worker",
        "let the update depend on gradients and settings alone",
    )


def _few(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:4])) + (", …" if len(ids) > 4 else "")
