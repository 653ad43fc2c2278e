"""The compressors for those who keep torch's DistributedDataParallel: as its communication hook, with a state to save.

    model = DistributedDataParallel(model)
    state = paceline.hooks.compress(model, "int8")              the words of Engine(compression=…)
    …
    torch.save(state.state_dict(), f"compression-{rank}.pt")    one for each rank: residuals are the rank's own

    block codecs (int8, bf16, fp16, sign)    rows to the owners of ranges, and their sums back: all_to_all, all_gather
    topk                                     places and values to all: all_gather
    powersgd                                 the sums of P and of Q: two all_reduce
    not compressed                           one all_reduce

What is compressed is the gradient of a rank, so the result depends on the number of ranks, as that of DDP does (that of
an Engine does not). A bucket is sent when DDP hands it over, and is back when the hook returns.

A parameter whose mean is not finite (an overflow, which GradScaler makes now and then) keeps what it had before the
step, and DDP is given that mean: GradScaler leaves the step out. All ranks have the same mean and so decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.canonical_sum import owner_ranges
from paceline.compression import BlockCompressor, Compression, Compressor, PowerSgd, TopK, compression_of
from paceline.compression.noise import uniform
from paceline.compression.power_sgd import first_factor, matrix_shape, orthonormal
from paceline.compression.topk import largest
from paceline.errors import CheckpointError, ConfigError
from paceline.world.determinism import mix

BACK = -1  # in place of a rank, in the seed of the way back


def compress(model: DistributedDataParallel, compression: Any, *, seed: int = 0) -> CompressionState:
    """Let the model's gradients travel compressed from now on; all ranks say the same."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"paceline.hooks.compress() takes a DistributedDataParallel, not {type(model).__name__}; with an Engine "
            "give compression to that"
        )
    wanted = compression_of(compression)
    if wanted is None:
        raise ConfigError("paceline.hooks.compress(model, None): nothing to compress with; leave the call out")
    state = CompressionState(model, wanted, seed)
    # A lambda: DDP compares a hook's annotations with types, and ours are texts.
    model.register_comm_hook(state, lambda state, bucket: compressed_mean(state, bucket))
    return state


def compressed_mean(state: CompressionState, bucket: Any) -> Future[Tensor]:
    """The hook: the bucket's buffer with the mean over all ranks."""
    with torch.no_grad():
        state.average(bucket.parameters(), bucket.gradients())
    if bucket.is_last():
        state.steps += 1
    done: Future[Tensor] = Future(devices=[] if bucket.buffer().device.type == "cpu" else [bucket.buffer().device])
    done.set_result(bucket.buffer())
    return done


class CompressionState:
    """What a rank keeps between steps, by name of parameter: residuals, those of the way back, factors, velocities."""

    KINDS = ("residuals", "back", "q", "velocities")

    def __init__(self, model: DistributedDataParallel, compression: Compression, seed: int) -> None:
        self._group = model.process_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._compression, self._seed = compression, seed
        self._parameters = dict(model.module.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._compressors = {
            name: compression.compressor(name, tuple(parameter.shape)) for name, parameter in self._parameters.items()
        }
        self.steps = 0
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in self.KINDS}
        self._staged: list[tuple[str, str, Tensor]] = []  # kind, name, and what is kept if the name's mean is finite

    def state_dict(self) -> dict[str, Any]:
        return {
            "compression": str(self._compression),
            "rank": self._rank,
            "ranks": self._ranks,
            "steps": self.steps,
            **{kind: {name: t.clone() for name, t in kept.items()} for kind, kept in self._kept.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        mine = {"compression": str(self._compression), "rank": self._rank, "ranks": self._ranks}
        told = [
            f"{name} was {saved.get(name)!r}, is {value!r}" for name, value in mine.items() if saved.get(name) != value
        ]
        strangers = [name for kind in self.KINDS for name in saved.get(kind, {}) if name not in self._parameters]
        told += [f"the model has no parameter {strangers[0]!r}"] if strangers else []
        if told:
            raise CheckpointError(f"the state of compression is not this rank's: {'; '.join(told)}")
        self.steps = int(saved["steps"])
        self._kept = {kind: beside(self._parameters, saved[kind]) for kind in self.KINDS}

    # -- a bucket ----------------------------------------------------------------------------------------------------

    def average(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Each gradient becomes the mean over all ranks."""
        by_compressor: dict[Compressor | None, dict[str, Tensor]] = {}
        begun = self.steps >= self._compression.start_after
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._names[id(parameter)]
            compressor = self._compressors[name] if begun and gradient.dtype == torch.float32 else None
            by_compressor.setdefault(compressor, {})[name] = gradient
        for compressor, named in by_compressor.items():
            if compressor is None:
                self._average_whole(named)
            elif isinstance(compressor, PowerSgd):
                self._average_low_rank(compressor, named)
            elif isinstance(compressor, TopK):
                self._average_sparse(compressor, named)
            else:
                self._average_blocks(compressor, named)
            if compressor is not None:
                self._keep_staged(named)

    def _keep_staged(self, means: Mapping[str, Tensor]) -> None:
        finite = torch.stack([mean.isfinite().all() for mean in means.values()]).tolist()  # a GPU is asked once
        is_finite = dict(zip(means, finite, strict=True))
        for kind, name, tensor in self._staged:
            if is_finite[name]:
                self._kept[kind][name] = tensor
        self._staged = []

    def _average_whole(self, named: Mapping[str, Tensor]) -> None:
        for name, mean in self._mean_of(named).items():
            named[name].copy_(mean)

    def _with_residual(self, kind: str, name: str, flat: Tensor) -> Tensor:
        kept = self._kept[kind].get(name)
        return flat.clone() if kept is None else flat + kept

    def _stage_residual(self, kind: str, name: str, tensor: Tensor) -> None:
        if self._compression.feedback:
            self._staged.append((kind, name, tensor))

    # -- block codecs ------------------------------------------------------------------------------------------------

    def _average_blocks(self, codec: BlockCompressor, named: Mapping[str, Tensor]) -> None:
        """Every parameter's rows are cut into a range for each rank, in whatever buckets they come."""
        payloads = {name: self._encoded(codec, name, gradient.reshape(-1)) for name, gradient in named.items()}
        ranges = {name: owner_ranges(len(rows), self._ranks, block=1) for name, rows in payloads.items()}

        def lengths(rank: int) -> list[int]:
            return [ranges[name][rank][1] - ranges[name][rank][0] for name in payloads]

        sent = torch.cat([rows[slice(*ranges[n][rank])] for rank in range(self._ranks) for n, rows in payloads.items()])
        own = sum(lengths(self._rank))
        arrived = sent.new_empty((self._ranks * own, codec.row_bytes))
        per_rank = [sum(lengths(rank)) for rank in range(self._ranks)]
        dist.all_to_all_single(arrived, sent, [own] * self._ranks, per_rank, group=self._group)
        of_ranks = [torch.split(part, lengths(self._rank)) for part in arrived.view(self._ranks, own, codec.row_bytes)]
        sums = [
            self._summed(codec, name, [parts[place] for parts in of_ranks], ranges[name][self._rank][0], named[name])
            for place, name in enumerate(payloads)
        ]
        most = max(per_rank)
        padded = sent.new_zeros((most, codec.row_bytes))
        padded[:own] = torch.cat(sums)
        everyone = [torch.empty_like(padded) for _ in range(self._ranks)]
        dist.all_gather(everyone, padded, group=self._group)
        of_ranks = [torch.split(part[: per_rank[rank]], lengths(rank)) for rank, part in enumerate(everyone)]
        for place, gradient in enumerate(named.values()):
            rows = torch.cat([of_ranks[rank][place] for rank in range(self._ranks)])
            values = _decoded(codec, rows, _partial(codec, gradient.numel(), 0, len(rows)))
            gradient.copy_(values.view(-1)[: gradient.numel()].view_as(gradient))

    def _encoded(self, codec: BlockCompressor, name: str, flat: Tensor) -> Tensor:
        wanted = self._with_residual("residuals", name, flat)
        values = torch.nn.functional.pad(wanted, (0, -wanted.numel() % codec.block)).view(-1, codec.block)
        partial = _partial(codec, flat.numel(), 0, len(values))
        rows = codec.split(values, partial, self._noise(codec, name, self._rank, 0, values), None)
        self._stage_residual("residuals", name, values.view(-1)[: flat.numel()])
        return rows

    def _summed(
        self, codec: BlockCompressor, name: str, parts: Sequence[Tensor], start: int, gradient: Tensor
    ) -> Tensor:
        """The mean of the own range of a parameter, encoded; in the order of ranks."""
        partial = _partial(codec, gradient.numel(), start, len(parts[0]))
        total = _decoded(codec, parts[0], partial)
        for rows in parts[1:]:
            total.add_(_decoded(codec, rows, partial))
        total = self._with_residual("back", name, total.div_(self._ranks))
        rows = codec.split(total, partial, self._noise(codec, name, BACK, start, total), None)
        self._stage_residual("back", name, total)
        return rows

    def _noise(self, codec: BlockCompressor, name: str, rank: int, start: int, values: Tensor) -> Tensor | None:
        if not codec.draws:
            return None
        seed = mix(self._seed, "compression", name, self.steps, rank)
        return uniform(seed, start * codec.block, values.numel(), values.device).view_as(values)

    # -- topk --------------------------------------------------------------------------------------------------------

    def _average_sparse(self, topk: TopK, named: Mapping[str, Tensor]) -> None:
        steps = self.steps - self._compression.start_after
        sent = torch.cat([self._sparse(topk, name, gradient.reshape(-1), steps) for name, gradient in named.items()], 1)
        everyone = [torch.empty_like(sent) for _ in range(self._ranks)]
        dist.all_gather(everyone, sent, group=self._group)
        start = 0
        for gradient in named.values():
            stop = start + topk.count(gradient.numel(), steps)
            total = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            for places, values in everyone:
                total.index_add_(0, places[start:stop], values[start:stop].view(total.dtype))
            gradient.copy_(total.div_(self._ranks).view_as(gradient))
            start = stop

    def _sparse(self, topk: TopK, name: str, flat: Tensor, steps: int) -> Tensor:
        if topk.momentum:
            kept = self._kept["velocities"].get(name)
            flat = flat.clone() if kept is None else (kept * topk.momentum).add_(flat)
            self._staged.append(("velocities", name, flat))
        wanted = self._with_residual("residuals", name, flat)
        seed = mix(self._seed, "topk", name, self.steps, self._rank)
        places = largest(wanted, topk.count(wanted.numel(), steps), seed)
        sent = torch.stack([places.to(torch.int32), wanted[places].view(torch.int32)])
        if topk.momentum:
            flat.index_fill_(0, places, 0)
        self._stage_residual("residuals", name, wanted.index_fill_(0, places, 0))
        return sent

    # -- powersgd ----------------------------------------------------------------------------------------------------

    def _average_low_rank(self, powersgd: PowerSgd, named: Mapping[str, Tensor]) -> None:
        matrices, shapes = {}, {name: matrix_shape(tuple(g.shape)) for name, g in named.items()}
        begun = dict(self._kept["q"])
        for name, gradient in named.items():
            matrices[name] = self._with_residual("residuals", name, gradient.reshape(-1)).view(shapes[name])
            if name not in begun:
                first = first_factor(shapes[name][1], powersgd.rank, mix(self._seed, "powersgd", name))
                begun[name] = first.to(gradient.device)
        left = self._mean_of({name: begun[name] @ m.t() for name, m in matrices.items()})
        left = {name: orthonormal(p) for name, p in left.items()}
        mine = {name: left[name] @ m for name, m in matrices.items()}
        right = self._mean_of(mine)
        for name, gradient in named.items():
            self._staged.append(("q", name, right[name].clone()))  # of its own: `right` is a part of all
            gradient.copy_((left[name].t() @ right[name]).view_as(gradient))
            lost = matrices[name].addmm_(left[name].t(), mine[name], alpha=-1)
            self._stage_residual("residuals", name, lost.view(-1))

    def _mean_of(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By one all_reduce: what is in a bucket of DDP has one dtype and one device."""
        flat = torch.cat([factor.reshape(-1) for factor in factors.values()]).div_(self._ranks)
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [factor.numel() for factor in factors.values()])
        return {name: part.view_as(factors[name]) for name, part in zip(factors, parts, strict=True)}


def beside(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what was saved, each on its parameter's device: a file may have been read with map_location="cpu"."""
    return {name: tensor.to(parameters[name].device, copy=True) for name, tensor in saved.items()}


def _decoded(codec: BlockCompressor, rows: Tensor, partial: Sequence[tuple[int, int]]) -> Tensor:
    out = torch.empty((len(rows), codec.block), dtype=torch.float32, device=rows.device)
    codec.decode(rows, partial, out)
    return out


def _partial(codec: BlockCompressor, elements: int, start: int, rows: int) -> list[tuple[int, int]]:
    """The last row of a parameter, if it is not full and among those from `start` on."""
    last, there = divmod(elements, codec.block)
    return [(last - start, there)] if there and start <= last < start + rows else []
