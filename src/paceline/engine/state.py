"""The state of a job, described once: checkpoints, the in-memory checkpoint and joining workers all read it here.

    entry                         every worker has            checkpoint    in-memory checkpoint    joining worker
    models, optimizers            its part, or all of it      x             x, if trained           from the copy
    `_plain_entries`: step, …     all of it                   x             (survivors have it)     from a survivor
    compression: residuals        of its lanes, its ranges    x             x                       from the copy
    place in the data             of its lanes                x             x, of streams           from a survivor
    settings of groups, buffers   all of it                   x             (survivors have it)     from a survivor
    buffers of lanes apart        of its lanes                x             x                       from the copy
    registered                    all of it                   x             (survivors have it)     from a survivor
    bases                         built, or in the models     a reference   (in the models)         (in the models)
    extra                         what the script gives       x
    shared                        `engine.share_with_joiners`                                       from a survivor

Of a step that is lost after its update survivors put settings and own numbers back themselves (`TrainStep.lose`).
A new thing with a state is one more line in `_plain_entries`. Bases are those of adapters (`adapted_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.load import Checkpoint, full_tree
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.tree import DEEPEST, SMALL
from paceline.engine.adapted_models import (
    Reference,
    are_references,
    base_parameters,
    check_base,
    other_base,
    reference_to_base,
)
from paceline.engine.facts import check_same_job
from paceline.engine.loop import PreparedLoader
from paceline.engine.replicas import plain_name
from paceline.engine.step import TrainStep
from paceline.errors import CheckpointError, PacelineError
from paceline.input_file import cause_of
from paceline.mesh.full_tensors import FullTensors
from paceline.sharding.local_shard import LocalShard
from paceline.world.determinism import mix, seed_everything

NUMBERS = "optimizers_own_numbers"
LocalShardOf = Callable[[Tensor], Tensor | LocalShard]
Told = Callable[[Any], list[Any]]  # what every worker says, in rank order
Alike = Callable[[Callable[[], Any]], Any]  # an operation of all workers, done again if one is lost in it


@dataclass(frozen=True)
class Entry:
    """Plain values that every worker has alike."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass(frozen=True)
class JobState:
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    step: TrainStep
    loader: PreparedLoader | None
    shared: Sequence[tuple[Callable[[], Any], Callable[[Any], None]]]
    registered: Sequence[Any]  # `engine.register_for_checkpointing`
    facts: Callable[[], Mapping[str, Any]]  # a call: the in-memory checkpoint of every step does without
    seed: int
    whole: FullTensors = field(default_factory=FullTensors)  # of what tensor parallelism has sharded

    def _plain_entries(self) -> list[Entry]:
        step, schedulers = self.step, self.schedulers

        def put_step(number: int) -> None:
            step.step = number

        def put_left_out(number: int) -> None:
            step.left_out_steps = number

        def put_scale(scale: dict[str, Any] | None) -> None:
            if step.loss_scale is not None and scale is not None:
                step.loss_scale.load_state_dict(scale)

        def put_schedulers(states: Sequence[dict[str, Any]]) -> None:
            for scheduler, saved in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(saved)

        def put_numbers(of_optimizers: Sequence[dict[str, float]]) -> None:
            for optimizer, numbers in zip(self.optimizers, of_optimizers, strict=True):
                vars(optimizer).update(numbers)

        def put_registered(states: Sequence[Any]) -> None:
            if len(states) != len(self.registered):
                raise ValueError(f"{len(states)} were registered there, {len(self.registered)} here")
            for thing, saved in zip(self.registered, states, strict=True):
                thing.load_state_dict(saved)

        return [
            Entry("step", lambda: step.step, put_step),
            Entry("left_out_steps", lambda: step.left_out_steps, put_left_out),
            Entry("loss_scale", lambda: step.loss_scale and step.loss_scale.state_dict(), put_scale),
            Entry("schedulers", lambda: [scheduler.state_dict() for scheduler in schedulers], put_schedulers),
            Entry(NUMBERS, lambda: step.changed_numbers, put_numbers),
            Entry("registered", lambda: [thing.state_dict() for thing in self.registered], put_registered),
        ]

    # -- a checkpoint ------------------------------------------------------------------------------------------------

    def collected(self, told: Told, alike: Alike, *, is_main: bool, extra: Any = None) -> dict[str, Any]:
        """This worker's tree; all workers call it. What is not tensors comes from the main one."""
        step, loader = self.step, self.loader
        data = None if loader is None else loader.source.merged(told(loader.state_dict()))
        bases = self._bases(alike)
        tree: dict[str, Any] = {
            "models": _local_models(self.models, self._saved, bases),
            "optimizers": [self.whole.saved_state(o, step.strategies.local_state(o)) for o in self.optimizers],
            "compression": step.strategies.compression_state(),
            **self._lane_buffers(),
        }
        if is_main:
            mine = {
                "job": dict(self.facts()),
                "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
                "parameter_names": [_names_of(self.models, optimizer) for optimizer in self.optimizers],
                "data": data,
                "extra": extra,
                "bases": bases,
            }
            tree |= _saved_here(mine | {entry.name: entry.get() for entry in self._plain_entries()})
        return tree

    def _lane_buffers(self) -> dict[str, Any]:
        """Where workers never agree, lanes begin with lane 0's after a resume: that promises no bits."""
        state = self.step.buffers.local_state() if self.step.strategies.lanes_apart else None
        return {} if state is None else {"lane_buffers": state}

    def _load_lane_buffers(self, state: Any) -> None:
        self.step.buffers.load(full_tree(state), self.step.own_lanes)

    def one_model(self, place: int) -> dict[str, Any]:
        """Of that one model's part alone."""
        return {"models": _local_models([self.models[place]], self._saved, [()])}

    def _saved(self, weights: Tensor) -> Tensor | LocalShard:
        return self.whole.saved(weights, self.step.strategies.local_shard(weights))

    def full_tensor(self, weights: Tensor) -> Tensor:
        return self.whole.full(weights, self.step.strategies.full_tensor(weights))

    def _bases(self, alike: Alike) -> list[Reference]:
        """For each model; of a base in shards every worker reads the others', so all of them are here."""
        if not any(map(base_parameters, self.models)):
            return [{} for _ in self.models]
        found: list[Reference] = alike(lambda: [reference_to_base(model, self.full_tensor) for model in self.models])
        return found

    def put_back(self, checkpoint: Checkpoint, accept: Sequence[str], told: Told, alike: Alike) -> None:
        """All workers do so; nothing is changed unless all of it fits. A damaged file is found when it is read."""
        tree, folder, step = checkpoint.tree, checkpoint.folder, self.step
        if "imported" in checkpoint.manifest.about:
            self._begin_with(checkpoint, told, alike)
            return
        changed = check_same_job(folder, tree["job"], self.facts(), accept)
        prepared = {"models": self.models, "optimizers": self.optimizers, "schedulers": self.schedulers}
        _check_fits(folder, tree, prepared, self.whole)
        self._check_bases(checkpoint, told, alike)
        if self.loader is not None and tree["data"] is not None:
            place = partial(self.loader.load_state_dict, changed=changed)
            _load_one(folder, "place in the data", place, full_tree(tree["data"]))
        for entry in self._plain_entries():  # first: strategies load their optimizers for the step that comes next
            if entry.name == NUMBERS and entry.name not in tree:  # of an earlier version
                continue
            # Checkpoints of earlier versions have nothing registered.
            saved = tree.get(entry.name, []) if entry.name == "registered" else tree[entry.name]
            _load_one(folder, entry.name.replace("_", " "), entry.put, full_tree(saved))
        self._load_models(checkpoint)
        for optimizer, saved in zip(self.optimizers, tree["optimizers"], strict=True):
            _load_one(folder, "optimizer", partial(self._load_optimizer, optimizer), saved)
        kept = {} if "compression" in changed else tree.get("compression", {})  # of another compressor nothing fits
        _load_one(folder, "compression's residuals", step.strategies.load_compression, kept)
        _load_one(folder, "lanes' buffers", self._load_lane_buffers, tree.get("lane_buffers"))
        seed_everything(mix(self.seed, "between", step.step, 0))

    def _begin_with(self, checkpoint: Checkpoint, told: Told, alike: Alike) -> None:
        """Of what other tools have saved the weights, and if it is there the optimizer's state; the rest is as new."""
        tree, folder = checkpoint.tree, checkpoint.folder
        _check_fits(folder, tree, {"models": self.models}, self.whole)
        states = _by_names(folder, tree, self.models, self.optimizers) if tree["optimizers"] else []
        self.put_back_weights(checkpoint, told, alike)
        for optimizer, saved in zip(self.optimizers, states, strict=bool(states)):
            _load_one(folder, "optimizer", partial(self._load_optimizer, optimizer), saved)
        if self.loader is not None:  # so it is meant that an optimizer with a history begins with these data
            self.loader.set_epoch(self.loader.source.epoch)
        seed_everything(mix(self.seed, "between", self.step.step, 0))

    def put_back_weights(self, checkpoint: Checkpoint, told: Told, alike: Alike) -> None:
        _check_fits(checkpoint.folder, checkpoint.tree, {"models": self.models}, self.whole)
        self._check_bases(checkpoint, told, alike)
        self._load_models(checkpoint)

    def _check_bases(self, checkpoint: Checkpoint, told: Told, alike: Alike) -> None:
        saved = _bases_of(checkpoint.tree)
        if any(saved):
            pairs = list(zip(saved, self.models, strict=True))
            found = alike(lambda: [other_base(base, model, self.full_tensor) for base, model in pairs])
            check_base(checkpoint.folder, [text for texts in told(found) for text in texts])

    def _load_models(self, checkpoint: Checkpoint) -> None:
        load_full, part = self.step.strategies.load_full, self.whole.part
        for model, saved in zip(self.models, checkpoint.tree["models"], strict=True):
            _load_one(checkpoint.folder, "model", partial(_load_model, model, load_full, part=part), saved)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        self.step.load(optimizer, self.whole.state_part(optimizer, saved))

    # -- the in-memory checkpoint, and joining workers ---------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        """This worker's part. Settings of groups are plain, and in step with the schedulers: every worker has them."""
        strategies, skipped = self.step.strategies, [_names_untrained(model, self.optimizers) for model in self.models]
        states = [strategies.local_state(optimizer) for optimizer in self.optimizers]
        return {
            "models": _local_models(self.models, strategies.local_shard, skipped),
            "optimizers": [
                {name: value for name, value in state.items() if name != "param_groups"} for state in states
            ],
            **self.residuals(),
            **self._lane_buffers(),
        }

    def residuals(self) -> dict[str, Any]:
        """Of them what compression keeps: of lanes, so it is with one worker alone under every strategy."""
        return {"compression": self.step.strategies.compression_state()}

    def put_residuals(self, tensors: Mapping[str, Any]) -> None:
        self.step.strategies.load_compression(tensors["compression"])

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        """What is not trained every worker has, as the body left it; one that joins gets it in `plain`."""
        for number, (model, saved) in enumerate(zip(self.models, tensors["models"], strict=True)):
            others = _untrained(model, self.optimizers)
            known = others if plain is None else plain["others"][number]
            _load_model(model, self.step.strategies.load_full, {**saved, **{name: known[name] for name in others}})
        for optimizer, saved in zip(self.optimizers, tensors["optimizers"], strict=True):
            self.step.load(optimizer, {**saved, "param_groups": _groups_of(optimizer)})
        self.put_residuals(tensors)
        self._load_lane_buffers(tensors.get("lane_buffers"))

    def plain(self) -> dict[str, Any]:
        """What every worker has, for those that join."""
        loader = self.loader
        return {
            **{entry.name: entry.get() for entry in self._plain_entries()},
            "groups": [_groups_of(optimizer) for optimizer in self.optimizers],
            "shared": [give() for give, _ in self.shared],
            "others": [_untrained(model, self.optimizers) for model in self.models],
            "left early": loader is not None and loader.left_early and not loader.in_loop,
        }

    def put_plain(self, plain: Mapping[str, Any]) -> None:
        for entry in self._plain_entries():
            entry.put(plain[entry.name])
        for optimizer, groups in zip(self.optimizers, plain["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in settings.items() if name != "params"})
        for (_, take), given in zip(self.shared, plain["shared"], strict=True):
            take(given)

    def place(self, *, step_done: bool) -> Any:
        """In the data: when the step that the loop is in is done, or as it begins."""
        item = self.step.item_done() if step_done else None
        return None if self.loader is None else self.loader.source.state_after(item)


def _saved_here(tree: Any, depth: int = 0) -> Any:
    """A tree that one worker alone has: it writes its tensors whole. What all have is cut among them."""
    if isinstance(tree, Tensor):
        return tree if tree.nbytes <= SMALL else LocalShard.all_here(tree)
    if depth > DEEPEST:  # it is refused where it is written
        return tree
    if isinstance(tree, dict):
        return {key: _saved_here(value, depth + 1) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return (tuple if isinstance(tree, tuple) else list)(_saved_here(value, depth + 1) for value in tree)
    return tree


def _local_models(
    models: Sequence[nn.Module], local_shard: LocalShardOf, skipped: Sequence[Container[str]]
) -> list[dict[str, Any]]:
    """The models' states as this worker can save them, without some names; tied weights are one object."""
    known: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = local_shard(value)
        return known[id(value)]

    return [
        {
            plain: once(value)
            for name, value in model.state_dict(keep_vars=True).items()
            if (plain := plain_name(name)) not in without
        }
        for model, without in zip(models, skipped, strict=True)
    ]


def _names_untrained(model: nn.Module, optimizers: Sequence[Optimizer]) -> set[str]:
    """Of buffers, and of weights that no optimizer holds."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    state = model.state_dict(keep_vars=True)
    return {plain_name(name) for name, value in state.items() if id(value) not in trained}


def _untrained(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    names = _names_untrained(model, optimizers)
    return {
        plain: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in model.state_dict(keep_vars=True).items()
        if (plain := plain_name(name)) in names
    }


def _bases_of(tree: Mapping[str, Any]) -> list[Reference]:
    """Checkpoints of earlier versions hold the bases themselves."""
    return tree.get("bases") or [{} for _ in tree["models"]]


def _names_of(models: Sequence[nn.Module], optimizer: Optimizer) -> list[str]:
    """Of its parameters, by number: the model's place and the name in it. Other formats know them by name."""
    known = {
        id(parameter): f"{place}/{plain_name(name)}"
        for place, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    return [known.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """As in its state_dict, which a sharded strategy guards: parameters by number."""
    number = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return [{**group, "params": [number[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


_PARTS = {
    "job": dict, "step": int, "left_out_steps": int, "models": list, "optimizers": list, "schedulers": list,
    "loss_scale": dict | None, "data": dict | None, "extra": object,
}  # fmt: skip
"""Of every checkpoint that was ever written; what came later may be missing in one."""


def check_whole(checkpoint: Checkpoint) -> None:
    """That a checkpoint is of a job at all: its parts are there, each of its kind. Whose job it is is asked later."""
    tree = checkpoint.tree
    wrong = [name for name, kind in _PARTS.items() if not isinstance(tree.get(name, _PARTS), kind)]
    if not wrong:
        wrong += ["models"] * any(not isinstance(model, dict) for model in tree["models"])
        wrong += ["bases"] * (not are_references(tree.get("bases", []), len(tree["models"])))
        wrong += ["optimizers"] * any(not _is_optimizer(state) for state in tree["optimizers"])
        wrong += ["schedulers"] * any(not isinstance(state, dict) for state in tree["schedulers"])
        wrong += [name for name in ("step", "left_out_steps") if tree[name] < 0]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder}/{MANIFEST} is not of a job: its {wrong[0]!r} is missing, or no such thing"
        )


def _is_optimizer(state: Any) -> bool:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return (
        isinstance(groups, list)
        and isinstance(state.get("state"), dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    )


def _check_fits(
    folder: Path, tree: Mapping[str, Any], prepared: Mapping[str, Sequence[Any]], whole: FullTensors
) -> None:
    """That the state is one of these objects; before anything is loaded."""
    for kind, things in prepared.items():
        if len(tree[kind]) != len(things):
            raise CheckpointError(f"{folder} holds {len(tree[kind])} {kind}, this job prepared {len(things)}")
    for saved, base, model in zip(tree["models"], _bases_of(tree), prepared["models"], strict=True):
        state = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
        mine = {name: value for name, value in state.items() if name not in base}
        saved = _with_ties(model, saved)
        missing, unknown = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
        told = [f"it has no {name!r}" for name in missing[:1]] + [f"the model has no {name!r}" for name in unknown[:1]]
        for name in [name for name in mine if name in saved]:
            if (
                isinstance(mine[name], Tensor)
                and not name.endswith("_extra_state")
                and (there := getattr(saved[name], "shape", None)) != (here := whole.shape(mine[name]))
                and not _is_loaded_by_model(model, mine[name], saved[name])
            ):
                what = f"a {type(saved[name]).__name__}" if there is None else str(tuple(there))
                fixed = (
                    ""
                    if isinstance(mine[name], nn.Parameter)
                    else " (a model of buffers that grow needs its own load_state_dict)"
                )
                told.append(f"{name!r} is {what} there and {tuple(here)} here{fixed}")
        if told:
            more = len(missing) + len(unknown) - 2
            rest = f" and {more} more names" if more > 0 else ""
            raise CheckpointError(f"the checkpoint in {folder} is of another model: {'; '.join(told[:3])}{rest}")
    if "optimizers" not in prepared:
        return
    for kind, optimizer in zip(tree.get("kinds", ()), prepared["optimizers"], strict=False):
        if kind != type(optimizer).__name__:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another optimizer: {kind} there, {type(optimizer).__name__} here"
            )
    for saved, optimizer in zip(tree["optimizers"], prepared["optimizers"], strict=True):
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another optimizer: its groups have {theirs} parameters, here {ours}"
            )


def _with_ties(model: nn.Module, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with all names of a tensor that has several: in files of others it may have one alone."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(plain_name(name))
    tied = [same for same in names.values() if len(same) > 1 and any(name in saved for name in same)]
    there = {name: next(saved[other] for other in same if other in saved) for same in tied for name in same}
    return {**there, **saved}


def _by_names(
    folder: Path, tree: Mapping[str, Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """The state of an imported optimizer, which is known by names, as these optimizers number and group theirs.

    Settings are those of this job, which begins: a learning rate at the end of a schedule may be 0.
    """
    told = f"the optimizer's state in {folder} does not fit"
    try:
        saved = tree["optimizers"][0]
        number = {name: place for place, name in enumerate(tree["parameter_names"][0])}
        settings = {place: list(group) for group in saved["param_groups"] for place in group["params"]}
        of_names = {name: (settings[place], saved["state"].get(place)) for name, place in number.items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{told}: it can't be understood: {cause_of(error)}") from error
    found = []
    for optimizer in optimizers:
        names, kind = _names_of(models, optimizer), type(optimizer).__name__
        if missing := [name for name in names if name not in of_names]:
            raise CheckpointError(f"{told}: it has no group with {missing[0].partition('/')[2]!r}; {_WITHOUT}")
        known = {"initial_lr", "param_names", *(key for group in optimizer.param_groups for key in group)}
        if odd := [key for name in names for key in of_names[name][0] if key not in known]:
            raise CheckpointError(f"{told}: it is of another optimizer, {kind} has no setting {odd[0]!r}; {_WITHOUT}")
        states = {place: of_names[name][1] for place, name in enumerate(names)}
        there = {place: state for place, state in states.items() if state is not None}
        found.append({"state": there, "param_groups": _groups_of(optimizer)})
    return found


_WITHOUT = "import the weights alone with --no-optimizer"


def _load_model(
    model: nn.Module,
    load_full: Callable[[Tensor, Tensor], None],
    state: Mapping[str, Any],
    part: Callable[[Tensor, Any], Any] = lambda _, full: full,
) -> None:
    """One tensor after another: all of them together may not fit into memory. `part`: what of one is this worker's."""
    done: set[int] = set()
    others: dict[str, Any] = {}
    state = _with_ties(model, state)
    for name, value in model.state_dict(keep_vars=True).items():
        if plain_name(name) not in state:  # of a base, which is there
            continue
        saved = state[plain_name(name)]
        is_other = not isinstance(value, Tensor) or name.endswith("_extra_state")  # get_extra_state() may return one
        if is_other or _is_loaded_by_model(model, value, saved):
            others[name] = full_tree(saved)
        elif id(value) not in done:
            done.add(id(value))
            load_full(value, full_tree(part(value, saved)))
    if others:
        model.load_state_dict(others, strict=False)


def _is_loaded_by_model(model: nn.Module, value: Tensor, saved: Any) -> bool:
    """A buffer that has another size than the saved one, in a model that says by itself how it is loaded."""
    by_itself = type(model).load_state_dict is not nn.Module.load_state_dict
    is_buffer = not isinstance(value, nn.Parameter)
    return by_itself and is_buffer and getattr(saved, "shape", value.shape) != value.shape


def _load_one(folder: Path, kind: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except PacelineError:  # some are ValueErrors or RuntimeErrors too, and say more
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the {kind} in {folder} does not fit this job's: {cause_of(error)}") from error
