"""The table of docs/concepts/loop.md, rule by rule: what people write in a loop's body, and what it means here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from paceline import Engine
from paceline.errors import ConfigError, LoopError, NonFiniteLossError
from tests.engine.loops import prepared, vectors


def test_step_acts_once_per_step_and_grad_is_empty_between_items() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        seen = []
        for x, y in loader:
            before = model.weight.detach().clone()
            assert model.weight.grad is None
            engine.backward(F.mse_loss(model(x), y))
            has_gradient = model.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
            seen.append((has_gradient, not torch.equal(before, model.weight), engine.stepped, engine.step))
        assert seen == [
            (False, False, False, 0), (False, False, False, 0), (False, False, False, 0), (True, True, True, 1),
            (False, False, False, 1), (False, False, False, 1), (False, False, False, 1), (True, True, True, 2),
        ]  # fmt: skip


def test_the_gradient_is_that_of_the_whole_global_batch() -> None:
    with Engine(lanes=4, accumulate=2) as engine:
        model, optimizer, loader = prepared(engine)
        x, y = vectors().tensors
        expected = torch.autograd.grad(F.mse_loss(model(x), y), model.weight)[0]
        for batch, target in loader:
            engine.backward(F.mse_loss(model(batch), target))
            if engine.world.size == 1 and model.weight.grad is not None:
                torch.testing.assert_close(model.weight.grad, expected)
            optimizer.step()
        assert engine.step == 1


def test_unequal_token_counts_weigh_by_tokens_not_by_micro_batches() -> None:
    """Averaging the averages would be off by far more than the tolerance."""
    tokens = [3, 17, 1, 40]
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=4, batch_size=1)
        x, y = vectors(4).tensors
        losses = F.mse_loss(model(x), y, reduction="none").squeeze(1)
        weights = torch.tensor(tokens, dtype=torch.float32)
        expected = torch.autograd.grad((losses * weights).sum() / weights.sum(), model.weight, retain_graph=True)[0]
        average_of_averages = torch.autograd.grad(losses.mean(), model.weight)[0]
        for count, (batch, target) in zip(tokens, loader, strict=True):
            engine.backward(F.mse_loss(model(batch), target), weight=count)
            if model.weight.grad is not None:
                torch.testing.assert_close(model.weight.grad, expected)
                assert not torch.allclose(model.weight.grad, average_of_averages, rtol=0.05)
            optimizer.step()


def test_stepping_only_every_few_batches_is_an_error_that_names_accumulate() -> None:
    with Engine(lanes=1) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"step 1 has its gradient.*Engine\(accumulate=k\)"):
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y))
                if number % 2:
                    optimizer.step()


def test_an_item_left_without_backward_counts_as_empty_with_a_warning() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        x, y = vectors(8).tensors
        expected = torch.autograd.grad(F.mse_loss(model(x[4:]), y[4:]), model.weight)[0]
        with pytest.warns(UserWarning, match="lane 0 of step 1 was left without"):
            for number, (batch, target) in enumerate(loader):
                if number == 0:
                    continue
                engine.backward(F.mse_loss(model(batch), target))
                torch.testing.assert_close(model.weight.grad, expected)
                optimizer.step()
        assert engine.step == 1


def test_a_step_whose_last_item_is_left_out_still_acts_once() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        before = model.weight.detach().clone()
        with pytest.warns(UserWarning, match="lane 1 of step 1"):
            for number, (x, y) in enumerate(loader):
                if number == 1:
                    continue
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
        assert engine.step == 2
        assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_prepared_scheduler_steps_with_the_optimizer(scheduler_first: bool) -> None:
    with Engine(lanes=4) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(vectors(), batch_size=4)
        if scheduler_first:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule)
        else:
            model, optimizer, loader = engine.prepare(model, optimizer, loader)
            schedule = engine.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
        assert schedule.get_last_lr() == [0.25]


def test_a_scheduler_that_was_not_prepared_may_not_count_items() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)  # its rate changes between steps alone
        with pytest.raises(LoopError, match=r"count of a StepLR changed inside step 1 .*Hand the scheduler to"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                schedule.step()


def test_a_scheduler_that_was_not_prepared_may_count_steps_and_epochs() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        steps, epochs = (torch.optim.lr_scheduler.StepLR(optimizer, 4) for _ in range(2))
        for _ in range(2):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                if engine.stepped:
                    steps.step()
            epochs.step()
        assert (steps.last_epoch, epochs.last_epoch, engine.step) == (4, 2, 4)


def test_an_item_knows_its_lane() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        assert engine.lane is None
        lanes = []
        for x, y in loader:
            lanes.append(engine.lane)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert lanes == [0, 1, 2, 3]
        assert engine.lane is None


def test_a_learning_rate_changed_inside_a_step_is_an_error() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"the learning rate changed inside step 1 .*engine\.prepare"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.9


def test_the_learning_rate_may_follow_the_step() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + engine.step)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert engine.step == 2


def test_mean_is_over_the_global_batch() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        x, y = vectors().tensors
        expected = F.mse_loss(model(x[:16]), y[:16]).item()
        for batch, target in loader:
            loss = F.mse_loss(model(batch), target)
            engine.mean("loss", loss)
            engine.backward(loss)
            optimizer.step()
            if engine.step == 1 and engine.stepped:
                assert engine.means["loss"] == pytest.approx(expected, rel=1e-6)
                break


@pytest.mark.parametrize("call", ["reduce", "gather_for_metrics", "barrier", "weights_hash"])
def test_collectives_inside_a_step_raise_and_name_the_caller(call: str) -> None:
    with Engine(lanes=2) as engine:
        model, _, loader = prepared(engine)
        argument = [] if call in ("barrier", "weights_hash") else [torch.ones(1)]
        with pytest.raises(LoopError, match=rf"engine\.{call}\(\) at test_loop_rules\.py:\d+ was called inside step 1"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                getattr(engine, call)(*argument)


def test_clipping_applies_to_the_summed_gradient() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        norms = []
        for x, y in loader:
            engine.backward(10 * F.mse_loss(model(x), y))
            if model.weight.grad is not None:
                whole = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            norms.append(engine.clip_grad_norm_(0.5))
            if model.weight.grad is not None:
                clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            optimizer.step()
        assert all(math.isnan(norm) for norm in norms[:3])
        assert norms[3] == pytest.approx(whole, rel=1e-5)
        assert clipped == pytest.approx(0.5, rel=1e-4)


def test_torchs_own_clipping_is_an_error_that_names_ours() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"gradient of 'weight' was changed.*engine\.clip_grad_norm_"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()


def test_several_losses_add_up_when_all_but_the_last_hold_back() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        x, y = vectors(8).tensors
        both = F.mse_loss(model(x), y) + model(x).abs().mean()
        expected = torch.autograd.grad(both, model.weight)[0]
        for batch, target in loader:
            engine.backward(F.mse_loss(model(batch), target), last=False)
            engine.backward(model(batch).abs().mean())
            if model.weight.grad is not None:
                torch.testing.assert_close(model.weight.grad, expected)
            optimizer.step()


def test_a_second_backward_without_last_false_is_an_error() -> None:
    with Engine(lanes=2) as engine:
        model, _, loader = prepared(engine)
        with pytest.raises(LoopError, match="last=False"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                engine.backward(F.mse_loss(model(x), y))


def test_a_backward_after_a_step_in_one_item_is_an_error() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"after optimizer\.step\(\) in the same item.*engine\.update"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                engine.backward(F.mse_loss(model(x), y))


def test_two_optimizers_may_share_one_backward() -> None:
    with Engine(lanes=2) as engine:
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.Adam(model[1].parameters(), lr=0.1)
        model, first, second, loader = engine.prepare(model, first, second, DataLoader(vectors(), batch_size=4))
        before = [p.detach().clone() for p in model.parameters()]
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            first.step()
            second.step()
        assert engine.step == 4
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_step_before_backward_and_step_twice_are_errors() -> None:
    with Engine(lanes=1) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"optimizer\.step\(\) was called before engine\.backward\(\)"):
            for _ in loader:
                optimizer.step()
    with Engine(lanes=1) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match="called twice in step 1"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.step()


def test_a_closure_is_refused_with_the_closure_form_named() -> None:
    with Engine(lanes=1) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match=r"engine\.update"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step(lambda: 0.0)


def test_update_and_backward_do_not_mix_in_one_item() -> None:
    with Engine(lanes=1) as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.raises(LoopError, match="can't be mixed"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                engine.update(optimizer, lambda batch: F.mse_loss(model(batch[0]), batch[1]))


def test_update_gives_the_bits_of_the_loop() -> None:
    def hash_with(closure: bool) -> str:
        with Engine(lanes=4) as engine:
            model, optimizer, loader = prepared(engine)
            for x, y in loader:
                if closure:
                    engine.update(optimizer, lambda batch: F.mse_loss(model(batch[0]), batch[1]))
                else:
                    engine.backward(F.mse_loss(model(x), y))
                    optimizer.step()
            assert engine.step == 2
            return engine.weights_hash()

    assert hash_with(True) == hash_with(False)


def test_stop_ends_the_loop_after_the_step() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=64)
        items = 0
        for x, y in loader:
            items += 1
            if items == 2:
                engine.stop()
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        assert (items, engine.step) == (4, 1)


def test_a_break_inside_a_step_forbids_what_needs_everybody() -> None:
    with Engine(lanes=4) as engine:
        model, _, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            break
        with pytest.raises(LoopError, match=r"left its training loop inside step 1.*engine\.stop\(\)"):
            engine.weights_hash()


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_sampler": True}])
@pytest.mark.parametrize(("samples", "lanes", "accumulate"), [(70, 4, 2), (64, 4, 1), (33, 3, 2), (97, 1, 3)])
def test_len_is_how_often_the_body_runs(samples: int, lanes: int, accumulate: int, options: dict[str, Any]) -> None:
    with Engine(lanes=lanes, accumulate=accumulate) as engine:
        if "batch_sampler" in options:
            options = {"batch_sampler": BatchSampler(range(samples), 4, drop_last=False), "batch_size": 1}
        model, optimizer, loader = prepared(engine, samples=samples, **options)
        steps = engine.steps_per_epoch(loader)
        for epoch in range(2):
            bodies = 0
            for x, y in engine.progress(loader):
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                bodies += 1
            assert (bodies, engine.step) == (len(loader), steps * (epoch + 1))


def test_a_length_that_depends_on_the_number_of_workers_is_spoken_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    for lanes, accumulate, said in ((2, 2, 1), (1, 2, 0), (1, 1, 0)):
        with Engine(lanes=lanes, accumulate=accumulate) as engine:
            _, _, loader = prepared(engine)
            assert len(loader) == len(loader) == 8
        assert capsys.readouterr().out.count("paceline: len(loader) is 8 on this worker") == said


def test_the_length_of_a_whole_epoch_stays_in_the_middle_of_one() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped:
                break
        assert (loader.position, len(loader)) == (16, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_with_step_and_lane(bad: float) -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        before = model.weight.detach().clone()
        with pytest.raises(NonFiniteLossError, match=rf"the loss of step 1 is {bad} in lane 2"):
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y) * (bad if number == 2 else 1.0))
                optimizer.step()
        assert torch.equal(before, model.weight)


def test_a_loss_that_is_not_finite_can_be_left_out() -> None:
    with Engine(lanes=2, on_nonfinite="skip") as engine:
        model, optimizer, loader = prepared(engine)
        with pytest.warns(UserWarning, match="the loss of step 1 is nan in lane 1; the step is skipped"):
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y) * (math.nan if number == 1 else 1.0))
                optimizer.step()
        assert engine.step == 3
        assert model.weight.isfinite().all()


def test_a_step_without_weight_is_left_out_with_a_warning() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        before = model.weight.detach().clone()
        with pytest.warns(UserWarning, match="step 1 is skipped: the weights"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y), weight=0)
                optimizer.step()
        assert engine.step == 0
        assert torch.equal(before, model.weight)


def test_a_parameter_that_no_lane_used_keeps_no_gradient_and_is_not_decayed() -> None:
    with Engine(lanes=2) as engine:
        model = nn.ModuleDict({"used": nn.Linear(8, 1), "unused": nn.Linear(8, 1)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = model["unused"].weight.detach().clone()
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model["used"](x), y))
            assert model["unused"].weight.grad is None
            optimizer.step()
        assert torch.equal(before, model["unused"].weight)


def test_a_parameter_unfrozen_between_steps_is_trained_from_then_on() -> None:
    with Engine(lanes=2) as engine:
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
        before = model[0].weight.detach().clone()
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                assert torch.equal(before, model[0].weight)
                model[0].requires_grad_(True)
        assert not torch.equal(before, model[0].weight)


def test_the_model_is_the_users_own_object() -> None:
    with Engine() as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared_model, prepared_optimizer, _ = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
        assert prepared_model is model
        assert prepared_optimizer is optimizer


def test_a_global_batch_that_cannot_be_cut_is_refused_with_the_nearest_that_can() -> None:
    text = r"global_batch_size=30 .*4 lanes × 2 .*nearest that can: 24 or 32"
    with Engine(lanes=4, accumulate=2, global_batch_size=30) as engine, pytest.raises(ConfigError, match=text):
        prepared(engine)
    with Engine(lanes=4, accumulate=2, global_batch_size=32) as engine:
        _, _, loader = prepared(engine)
        assert loader.source.facts()["batch size"] == 4


def test_backward_outside_the_loop_says_where_it_belongs() -> None:
    with Engine() as engine:
        model, _, _ = prepared(engine)
        with pytest.raises(LoopError, match="inside `for batch in loader`"):
            engine.backward(model(torch.ones(1, 8)).sum())


def test_a_loop_broken_inside_a_step_cannot_be_followed_by_another() -> None:
    with Engine(lanes=4) as engine:
        model, _, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            break
        with pytest.raises(LoopError, match=r"inside step 1, so it can't start another"):
            next(iter(loader))


def test_a_stopped_loop_can_be_followed_by_another() -> None:
    with Engine(lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=64)
        steps = []
        for epoch in range(2):
            for x, y in loader:
                if epoch == 0:
                    engine.stop()
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
            steps.append(engine.step)
        assert steps == [1, 4]  # the second loop finishes the epoch


def test_a_break_after_update_counts_the_step() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        for _ in range(2):
            for _batch in loader:
                engine.update(optimizer, lambda batch: F.mse_loss(model(batch[0]), batch[1]))
                break
        assert (engine.step, loader.position) == (2, 16)


def test_a_gradient_left_over_from_before_the_loop_is_not_part_of_the_step() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=8)
        x, y = vectors(8).tensors
        expected = torch.autograd.grad(F.mse_loss(model(x), y), model.weight)[0]
        (1e3 * model(x).sum()).backward()
        for batch, target in loader:
            engine.backward(F.mse_loss(model(batch), target))
            if model.weight.grad is not None:
                torch.testing.assert_close(model.weight.grad, expected)
            optimizer.step()


def test_a_step_that_is_left_out_leaves_the_buffers_alone() -> None:
    with Engine(lanes=2, on_nonfinite="skip") as engine:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
        data = vectors()
        data.tensors[0][0] = math.nan
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        with pytest.warns(UserWarning, match="the loss of step 1 is nan in lane 0"):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
        assert engine.step == 3
        assert model[0].running_mean.isfinite().all()


def test_a_scheduler_stepped_once_an_epoch_is_not_stepped_for_an_item_left_out() -> None:
    with Engine(lanes=2) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = DataLoader(vectors(), batch_size=4)
        model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule)
        with pytest.warns(UserWarning, match="lane 1 of step 1"):
            for number, (x, y) in enumerate(loader):
                if number == 1:
                    continue
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [0.5]


def test_an_evaluation_loader_keeps_its_sampler_and_drop_last() -> None:
    with Engine() as engine:
        chosen = engine.prepare(DataLoader(vectors(), batch_size=4, sampler=[3, 1, 2, 9, 8]))
        x, _ = vectors().tensors
        assert torch.equal(torch.cat([batch for batch, _ in chosen]), x[[3, 1, 2, 9, 8]])
        dropped = engine.prepare(DataLoader(vectors(30), batch_size=4, drop_last=True))
        assert sum(len(batch) for batch, _ in dropped) == 28
