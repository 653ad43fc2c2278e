"""The user's optimizer on pieces: the same bits as on whole parameters, or a clear refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.optim.piece_state import gather_state, scatter_state
from paceline.optim.range_optimizer import check_elementwise, optimizer_on
from paceline.sharding.flat_layout import BLOCK, FlatLayout, Piece, joined, part_of

Make = Callable[[Any], Optimizer]
optim = torch.optim


class Lion(Optimizer):
    """As people write their own: an attribute beside the groups, state made in the first step."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.decay = decay
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * self.decay)
                p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


class NormalizedSgd(Optimizer):
    """Divides by the norm of the whole gradient, as LAMB and LARS do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class Noisy(NormalizedSgd):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class Lookahead(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Idle(NormalizedSgd):
    def step(self, closure: Any = None) -> None:
        pass


MAKERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "Adam amsgrad maximize": lambda p: optim.Adam(p, amsgrad=True, maximize=True, weight_decay=0.1),
    "Adam fused amsgrad": lambda p: optim.Adam(p, amsgrad=True, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "NAdam": lambda p: optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam foreach": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p, t0=2),
    "Rprop": lambda p: optim.Rprop(p),
    "a custom one": lambda p: Lion(p, lr=1e-2),
}
elementwise = pytest.mark.parametrize("name", MAKERS)


def parameters(seed: int = 0) -> list[Parameter]:
    """Several blocks with a tail, a bias, a scalar, and one whose memory is not in logical order."""
    torch.manual_seed(seed)
    weight, bias, scalar, image = torch.randn(5, BLOCK - 3), torch.randn(7), torch.randn(()), torch.randn(3, 4, 5, 6)
    return [Parameter(v) for v in (weight, bias, scalar, image.to(memory_format=torch.channels_last))]


def gradients(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn_like(p) for p in parameters()]


class OnPieces:
    """What a server or a shard does with an optimizer, in short."""

    def __init__(self, optimizer: Optimizer, parameters: list[Parameter], parts: int = 2) -> None:
        layout = FlatLayout.of((str(place), p) for place, p in enumerate(parameters))
        self.parameters = parameters
        self.cuts = [layout.split(place, parts) for place in range(len(parameters))]
        self.pieces = [
            [Parameter(part_of(p, cut).clone()) for cut in cuts] for p, cuts in zip(parameters, self.cuts, strict=True)
        ]
        place_of = {id(p): place for place, p in enumerate(parameters)}
        states: dict[Tensor, dict[str, Any]] = {}
        for place, p in enumerate(parameters):
            scattered = scatter_state(optimizer.state.get(p, {}), p.shape, self.cuts[place])
            states |= dict(zip(self.pieces[place], scattered, strict=True))
        groups = [
            [piece for p in group["params"] for piece in self.pieces[place_of[id(p)]]]
            for group in optimizer.param_groups
        ]
        self.on_pieces = optimizer_on(optimizer, groups, states)

    def step(self, gradients: list[Tensor]) -> None:
        for pieces, cuts, gradient in zip(self.pieces, self.cuts, gradients, strict=True):
            for piece, cut in zip(pieces, cuts, strict=True):
                piece.grad = part_of(gradient, cut).clone()
        self.on_pieces.step()

    def weights(self) -> list[Tensor]:
        return [
            joined([piece.detach() for piece in pieces], tuple(p.shape))
            for pieces, p in zip(self.pieces, self.parameters, strict=True)
        ]

    def state(self, place: int) -> dict[str, Any]:
        states = [self.on_pieces.state.get(piece, {}) for piece in self.pieces[place]]
        return gather_state(states, self.cuts[place], self.parameters[place], str(place))


def step_whole(optimizer: Optimizer, parameters: list[Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name])
        and (one[name].dtype, one[name].stride()) == (other[name].dtype, other[name].stride())
        if isinstance(one[name], Tensor)
        else one[name] == other[name] and type(one[name]) is type(other[name])
        for name in one
    )


# -- pieces give the bits of whole parameters --------------------------------------------------------------------------


@elementwise
def test_pieces_get_the_bits_of_whole_parameters(name: str) -> None:
    whole = parameters()
    optimizer = MAKERS[name](whole)
    pieces = OnPieces(optimizer, whole)
    for seed in range(7):
        pieces.step(gradients(seed))
        step_whole(optimizer, whole, gradients(seed))
    for place, (parameter, weights) in enumerate(zip(whole, pieces.weights(), strict=True)):
        assert torch.equal(parameter, weights), f"parameter {place} of {name}"


@elementwise
def test_state_gathered_from_pieces_is_that_of_the_whole_parameter(name: str) -> None:
    whole = parameters()
    optimizer = MAKERS[name](whole)
    pieces = OnPieces(optimizer, whole)
    for seed in range(3):
        pieces.step(gradients(seed))
        step_whole(optimizer, whole, gradients(seed))
    for place, parameter in enumerate(whole):
        assert same_state(pieces.state(place), dict(optimizer.state[parameter])), f"parameter {place} of {name}"


@elementwise
def test_state_scattered_in_the_middle_of_training_goes_on_with_the_same_bits(name: str) -> None:
    whole = parameters()
    optimizer = MAKERS[name](whole)
    for seed in range(3):
        step_whole(optimizer, whole, gradients(seed))
    pieces = OnPieces(optimizer, whole, parts=3)
    for seed in range(3, 6):
        pieces.step(gradients(seed))
        step_whole(optimizer, whole, gradients(seed))
    assert all(map(torch.equal, whole, pieces.weights()))


@elementwise
def test_the_start_up_test_accepts_what_works_element_by_element(name: str) -> None:
    check_elementwise(MAKERS[name](parameters()))


def test_every_group_keeps_its_own_settings() -> None:
    whole = parameters()
    groups = [{"params": whole[:1], "lr": 1e-3, "betas": (0.5, 0.6)}, {"params": whole[1:], "weight_decay": 0.5}]
    optimizer = optim.AdamW(groups, lr=1e-2)
    check_elementwise(optimizer)
    pieces = OnPieces(optimizer, whole)
    for seed in range(3):
        pieces.step(gradients(seed))
        step_whole(optimizer, whole, gradients(seed))
    assert all(map(torch.equal, whole, pieces.weights()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_start_up_test_takes_the_precision_of_the_parameters(dtype: torch.dtype) -> None:
    check_elementwise(optim.AdamW([Parameter(torch.randn(3, dtype=dtype))]))


# -- an optimizer on pieces has its own everything --------------------------------------------------------------------


def test_an_optimizer_on_pieces_has_the_class_and_attributes_of_the_original_and_leaves_it_alone() -> None:
    optimizer = Lion([Parameter(torch.ones(3))], lr=0.5, decay=0.0)
    before = copy.deepcopy(optimizer.state_dict())
    piece = Parameter(torch.ones(2))
    on_pieces = optimizer_on(optimizer, [[piece]])
    assert isinstance(on_pieces, Lion)
    piece.grad = torch.ones(2)
    on_pieces.step()
    on_pieces.param_groups[0]["lr"] = 0.25
    assert (on_pieces.calls, optimizer.calls, on_pieces.decay) == (1, 0, 0.0)
    assert piece.tolist() == [0.5, 0.5]
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["params"][0].tolist() == [1, 1, 1]


def test_an_optimizer_on_pieces_does_not_step_the_original_when_a_scheduler_has_wrapped_its_step() -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = optim.SGD([parameter], lr=1.0)
    optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(3)
    piece = Parameter(torch.ones(2))
    piece.grad = torch.ones(2)
    optimizer_on(optimizer, [[piece]]).step()
    assert (parameter.tolist(), piece.tolist()) == ([1, 1, 1], [0, 0])


def test_a_tensor_as_learning_rate_is_not_shared_with_the_optimizer_on_pieces() -> None:
    optimizer = optim.AdamW([Parameter(torch.ones(3))], lr=torch.tensor(1.0))
    on_pieces = optimizer_on(optimizer, [[Parameter(torch.ones(2))]])
    on_pieces.param_groups[0]["lr"].fill_(5.0)
    assert float(optimizer.param_groups[0]["lr"]) == 1.0


def test_hooks_stay_with_the_users_optimizer() -> None:
    seen: list[Optimizer] = []
    optimizer = optim.SGD([Parameter(torch.ones(3))], lr=1.0)
    optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    optimizer_on(optimizer, [[Parameter(torch.ones(2))]]).step()
    assert seen == []


def test_a_group_without_pieces_is_left_out_of_the_optimizer_on_pieces() -> None:
    optimizer = optim.SGD([{"params": [Parameter(torch.ones(1))], "lr": 1.0}, {"params": [Parameter(torch.ones(1))]}])
    on_pieces = optimizer_on(optimizer, [[], [Parameter(torch.ones(1))]])
    assert [group["lr"] for group in on_pieces.param_groups] == [1e-3]


def test_a_piece_without_gradient_is_not_touched() -> None:
    pieces = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
    on_pieces = optimizer_on(optim.AdamW([Parameter(torch.ones(4))], weight_decay=0.5), [pieces])
    pieces[0].grad = torch.ones(2)
    on_pieces.step()
    assert pieces[0].tolist() != [1, 1]
    assert pieces[1].tolist() == [1, 1]


# -- what can't run on ranges ------------------------------------------------------------------------------------------


def refusal(optimizer: Optimizer) -> str:
    with pytest.raises(ConfigError) as caught:
        check_elementwise(optimizer)
    return str(caught.value)


def matrices() -> list[Parameter]:
    return [Parameter(torch.randn(4, 6))]


def test_lbfgs_is_refused_because_it_needs_a_closure() -> None:
    assert refusal(optim.LBFGS(matrices())) == (
        "optimizer LBFGS can't run on ranges of parameters, which are spread over servers or workers: its step() needs "
        "a closure, to run forward and backward again inside the update. Train with strategy='ddp', where every worker "
        "updates whole parameters"
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.Adafactor(p), "a parameter cut into pieces another update"),
        (lambda p: optim.SparseAdam(p), "raised RuntimeError: SparseAdam does not support dense gradients"),
        (lambda p: NormalizedSgd(p), "a parameter cut into pieces another update"),
        (lambda p: Noisy(p), "a parameter cut into pieces another update"),
        (lambda p: Idle(p), "did not change the parameters in its param_groups"),
        (lambda p: Lookahead(optim.SGD(p)), "wraps another optimizer, its attribute 'inner'"),
    ],
)
def test_an_optimizer_whose_elements_know_each_other_is_refused_by_name(make: Make, reason: str) -> None:
    optimizer = make(matrices())
    text = refusal(optimizer)
    assert text.startswith(f"optimizer {type(optimizer).__name__} can't run on ranges")
    assert reason in text


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused_because_it_takes_matrices_only() -> None:
    assert "one-dimensional pieces raised" in refusal(optim.Muon(matrices()))


def test_one_group_that_is_not_elementwise_is_enough() -> None:
    class Mixed(NormalizedSgd):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / p.grad.norm() if group["normalized"] else p.grad)

    plain, normalized = matrices(), matrices()
    check_elementwise(Mixed([{"params": plain, "normalized": False}]))
    groups = [{"params": plain, "normalized": False}, {"params": normalized, "normalized": True}]
    assert "another update" in refusal(Mixed(groups))


def test_the_start_up_test_touches_nothing_of_the_users() -> None:
    model = nn.Linear(3, 2)
    optimizer = Lion(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.random.get_rng_state()
    check_elementwise(optimizer)
    assert torch.equal(random, torch.random.get_rng_state())
    assert optimizer.state_dict() == before[1]
    assert optimizer.calls == 0
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())


def test_a_schedule_that_starts_at_zero_does_not_hide_what_an_optimizer_does() -> None:
    check_elementwise(optim.AdamW(matrices(), lr=0.0))
    check_elementwise(optim.AdamW(matrices(), lr=torch.tensor(0.0)))
    assert "another update" in refusal(NormalizedSgd(matrices(), lr=0.0))


def test_every_piece_is_one_dimensional_but_that_of_a_scalar() -> None:
    assert part_of(torch.ones(2, 3), Piece(0, 0, 6)).shape == (6,)
    assert part_of(torch.ones(()), Piece(0, 0, 1)).shape == ()


class LateGlobal(torch.optim.SGD):
    """Finds a step size from all elements, and uses it only later than a trial lasts."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + sum(float(p.grad.abs().sum()) for p in group["params"])
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_elements_together_is_refused_even_if_it_shows_later() -> None:
    with pytest.raises(ConfigError, match=r"its step\(\) finds 'seen' from all elements of its parameters together"):
        check_elementwise(LateGlobal([Parameter(torch.randn(5, 5))], lr=0.1))


class Evaluates(torch.optim.SGD):
    def eval(self) -> None: ...


def test_an_optimizer_that_changes_weights_for_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its eval\(\) changes parameters too"):
        check_elementwise(Evaluates([Parameter(torch.randn(5, 5))], lr=0.1))


class OnlyInDouble(torch.optim.SGD):
    """Elementwise in fp32 alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype == torch.float64 and p.grad is not None:
                    p.grad.mul_(p.grad.abs().max())
        return super().step(closure)


def test_every_precision_of_a_group_is_tried() -> None:
    both = [Parameter(torch.randn(5)), Parameter(torch.randn(5, dtype=torch.float64))]
    check_elementwise(OnlyInDouble(both[:1], lr=0.1))
    with pytest.raises(ConfigError, match="cut into pieces"):
        check_elementwise(OnlyInDouble(both, lr=0.1))


class Decays(optim.SGD):
    """Counts in an attribute, or in its groups, and divides by that."""

    def __init__(self, params: Any, *, where: str, matters: bool = True) -> None:
        super().__init__(params, lr=0.1)
        self.made, self.where, self.matters = 0, where, matters

    def step(self, closure: Any = None) -> Any:
        self.made += self.where == "an attribute"
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + (self.where == "a group")
            for p in group["params"]:
                if p.grad is not None and self.matters:
                    p.grad.div_(max(1, self.made, group["made"]))
        return super().step(closure)


@pytest.mark.parametrize("where", ["an attribute", "a group"])
def test_what_is_told_its_settings_must_not_count_by_itself(where: str) -> None:
    optimizer = Decays([Parameter(torch.ones(6, 5))], where=where)
    check_elementwise(optimizer)
    with pytest.raises(ConfigError, match=r"its step\(\) changes 'made' and goes on from that, and a server tells"):
        check_elementwise(optimizer, is_told_settings=True)
    assert optimizer.made == 0
    assert "made" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    "make",
    [lambda p: Decays(p, where="an attribute", matters=False), lambda p: Lion(p, lr=0.1), optim.Adam, optim.NAdam],
)
def test_a_count_that_changes_no_update_is_no_harm(make: Make) -> None:
    check_elementwise(make([Parameter(torch.ones(6, 5))]), is_told_settings=True)
