"""TrainingArguments: from Python, flags and YAML; what is wrong is one line, with the nearest right name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import TrainingArguments
from paceline.errors import ConfigError
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.trainer.argument_fields import SupportedFields, UnsupportedFields
from paceline.trainer.engine_setup import advice_to_compile, build_engine


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'learning_rte' is not a training argument; did you mean 'learning_rate'\?"):
        TrainingArguments(learning_rte=1.0)


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("no_cuda", True, "use_cpu", True),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
    ],
)
def test_old_spellings_are_taken_with_a_hint(old: str, value: Any, new: str, expected: Any) -> None:
    with pytest.warns(UserWarning, match=f"{old} is called {new} now"):
        assert getattr(TrainingArguments(**{old: value}), new) == expected


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.1), (5, 5)])
@pytest.mark.parametrize("order", [1, -1])
def test_a_warmup_ratio_counts_where_warmup_steps_is_0(steps: int, expected: float, order: int) -> None:
    given = dict([("warmup_steps", steps), ("warmup_ratio", 0.1)][::order])
    with pytest.warns(UserWarning, match=f"taken as warmup_steps=0.1|warmup_steps={steps} is given too, and is taken"):
        assert TrainingArguments(**given).warmup_steps == expected


def test_on_a_gpu_models_of_blocks_are_told_of_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.trainer.engine_setup.find_spec", lambda name: name)
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3)))
    plain, compiled = (TrainingArguments(output_dir=str(tmp_path), torch_compile=wanted) for wanted in (False, True))
    assert "torch_compile=True trains" in advice_to_compile(plain, "cuda", blocks)
    assert advice_to_compile(plain, "cpu", blocks) == ""
    assert advice_to_compile(compiled, "cuda", blocks) == ""
    assert advice_to_compile(plain, "cuda", torch.nn.Linear(2, 2)) == ""


def test_arguments_that_are_gone_say_what_is_instead() -> None:
    with pytest.warns(UserWarning, match="logging_dir is gone and has no effect: logs go to output_dir"):
        TrainingArguments(logging_dir="x")


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(UnsupportedFields)])
def test_every_field_that_is_not_supported_is_refused_when_set(name: str) -> None:
    default = UnsupportedFields.__dataclass_fields__[name].default
    other = {bool: lambda: not default, str: lambda: "other"}.get(type(default), lambda: _other(name))()
    with pytest.raises(ConfigError, match=f"{name}=.* is not supported: .+"):
        TrainingArguments(**{name: other})


def _other(name: str) -> Any:
    if name.endswith("config"):
        return {"a": 1}
    if name == "optim_target_modules":
        return ["all"]
    return True if name.startswith(("ddp", "hub_private")) else "other"


def test_every_field_says_in_a_line_what_it_is_for() -> None:
    for item in dataclasses.fields(TrainingArguments):
        assert "help" in item.metadata, item.name
        assert "\n" not in item.metadata["help"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both set; choose one"),
        ({"strategy": "zero2", "fsdp": "full_shard"}, "strategy says zero2, fsdp says fsdp; give one of them"),
        ({"fsdp": "no_shard", "deepspeed": {"zero_optimization": {"stage": 3}}}, "fsdp says ddp, deepspeed says zero3"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "stage is 4; choose 0, 1, 2 or 3"),
        ({"deepspeed": {"optimizer": {}}}, "deepspeed: 'optimizer' is not supported"),
        ({"deepspeed": {"gradient_clipping": 2.0}}, "gradient_clipping is 2.0, but max_grad_norm=1.0; say it once"),
        (
            {"deepspeed": {"zero_optimization": {"overlap_comm": False}}},
            "zero_optimization.overlap_comm=False would have",
        ),
        ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": 5e8}}}, "no effect: set ddp_bucket_cap_mb"),
        ({"deepspeed": {"zero_optimization": {"sub_group_size": 1e9}}}, "no effect: it has no meaning here; leave it"),
        ({"deepspeed": {"steps_per_print": 2000}}, "deepspeed: steps_per_print=2000 would have no effect: set logging"),
        ({"deepspeed": {"train_batch_size": 64}}, "train_batch_size=64 would have no effect: it follows from per_dev"),
        (
            {"deepspeed": {"fp16": {"enabled": True, "loss_scale": 128}}, "fp16": True},
            "fp16.loss_scale=128 would have no effect: it is always 0",
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}},
            "offload_optimizer.ratio=0.3 would have no effect",
        ),
        (
            {"fsdp": "full_shard", "fsdp_config": {"backward_prefetch": "backward_pre"}},
            "fsdp_config: backward_prefetch='backward_pre' would have no effect: it is always 'NO_PREFETCH'",
        ),
        ({"fsdp": "full_shard", "fsdp_config": {"min_num_params": 100}}, "min_num_params=100 would have no effect"),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"transformer_layer_cls_to_wrap": "Block"}},
            "transformer_layer_cls_to_wrap has no meaning with zero2",
        ),
        ({"save_strategy": "best"}, "save_strategy='best' looks at evaluations; set eval_strategy"),
        ({"load_best_model_at_end": True}, "eval_strategy is 'no' and save_strategy 'steps'; make them the same"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
            "save_steps=4 is no multiple of eval_steps=3",
        ),
        ({"learning_rate": "fast"}, "learning_rate='fast': expected a finite number, got str"),
        ({"max_steps": 1.5}, "max_steps=1.5: expected a whole number, got float"),
        ({"eval_strategy": "sometimes"}, "eval_strategy='sometimes' is not known here; choose one of no, steps, epoch"),
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' is not known here; choose one of adamw_torch, adamw_torch_fused"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: it is at least 1"),
        ({"dataloader_prefetch_factor": 2}, "needs loader processes; set dataloader_num_workers"),
    ],
)
def test_what_contradicts_itself_is_one_clear_line(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "strategy", "offload"),
    [
        ({}, None, None),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp", None),
        ({"fsdp": True}, "fsdp", None),
        ({"fsdp": "shard_grad_op"}, "zero2", None),
        ({"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}, "zero2", None),
        ({"deepspeed": '{"zero_optimization": {"stage": 1}}'}, "zero1", None),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
            "zero2",
            "optimizer",
        ),
        (
            {"strategy": "zero3", "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}},
            "zero3",
            None,
        ),
    ],
)
def test_strategies_in_the_words_of_others(given: dict[str, Any], strategy: str | None, offload: str | None) -> None:
    choice = TrainingArguments(**given).choice
    assert (choice.strategy, choice.offload) == (strategy, offload)


def test_keys_that_say_what_is_done_anyway_are_taken() -> None:
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": "true", "reduce_bucket_size": "auto"}
    given = {"zero_optimization": zero, "steps_per_print": "auto", "fp16": {"enabled": False, "loss_scale_window": 7}}
    assert TrainingArguments(deepspeed=given).choice.strategy == "zero2"
    fsdp = {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": "false"}
    assert TrainingArguments(fsdp="full_shard", fsdp_config=fsdp).choice.strategy == "zero2"


def test_classes_to_wrap_are_the_units_of_fsdp(tmp_path: Path) -> None:
    config = {"transformer_layer_cls_to_wrap": ["Block", "Head"]}
    arguments = TrainingArguments(str(tmp_path), fsdp="full_shard", fsdp_config=config, use_cpu=True)
    assert arguments.choice.units == ("Block", "Head")
    with build_engine(arguments) as engine:
        assert engine.config.strategy.config == FsdpConfig(units=("Block", "Head"))


@dataclasses.dataclass
class WithLists(TrainingArguments):
    sizes: list[int] = dataclasses.field(default_factory=list, metadata={"help": "of layers"})
    rates: list[float] | None = dataclasses.field(default=None, metadata={"help": "of layers"})
    kind: torch.dtype = dataclasses.field(default=torch.float32, metadata={"help": "a type of its own"})


def test_lists_of_a_derived_class_hold_what_their_annotation_says() -> None:
    made = WithLists(sizes=[32, 64], rates=[0.5, 1])
    assert (made.sizes, made.rates, made.kind) == ([32, 64], [0.5, 1], torch.float32)
    flags = WithLists.from_command_line(["--sizes", "3,4", "--rates=0.1,2"])
    assert (flags.sizes, flags.rates) == ([3, 4], [0.1, 2])
    with pytest.raises(ConfigError, match="sizes='x': expected a whole number"):
        WithLists(sizes=["x"])


# -- flags and YAML ----------------------------------------------------------------------------------------------------


def test_every_field_is_a_flag_in_both_spellings_and_a_yaml_key(tmp_path: Path) -> None:
    values = {"lr_scheduler_kwargs": {"num_cycles": 2}, "report_to": ["tensorboard", "wandb"], "save_total_limit": 3}
    text = {"lr_scheduler_kwargs": '{"num_cycles": 2}', "report_to": "tensorboard,wandb", "save_total_limit": "3"}
    for name, value in values.items():
        flag = name.replace("_", "-")
        for argv in ([f"--{flag}", text[name]], [f"--{name}={text[name]}"]):
            assert getattr(TrainingArguments.from_command_line(argv), name) == value
    for item in dataclasses.fields(SupportedFields):
        file = tmp_path / f"{item.name}.yaml"
        default = getattr(SupportedFields(), item.name)
        file.write_text(f"{item.name}: {_yaml(default)}\n")
        assert getattr(TrainingArguments.from_yaml(file), item.name) == getattr(TrainingArguments(), item.name)


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("learning_rate: 1e-4\nmax_steps: 7\nbf16: true\noutput_dir: runs/a\n")
    found = TrainingArguments.from_command_line(["--config", str(file), "--max-steps", "9", "--no-bf16"])
    assert (found.learning_rate, found.max_steps, found.bf16, found.output_dir) == (1e-4, 9, False, "runs/a")
    assert found.weight_decay == 0.0


def test_a_typo_in_yaml_is_named_with_the_file_and_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("learning_rat: 1e-4\n")
    with pytest.raises(
        ConfigError, match=r"job.yaml: 'learning_rat' is not a training argument; did you mean 'learning_r"
    ):
        TrainingArguments.from_command_line(["--config", str(file)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_steps: [1, 2]\n", "max_steps=[1, 2]: expected a whole number, got list"),
        ("- a\n- b\n", "expected a key for each argument, got a list"),
        ("a: b: c\n", "is not YAML: mapping values are not allowed here"),
        ("x: !!python/object/apply:os.getcwd []\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_yaml_that_is_wrong_is_one_line_with_the_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TrainingArguments.from_yaml(file)
    assert str(caught.value).startswith(str(file))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_that_are_wrong_are_one_line() -> None:
    for argv, text in (
        (["--lerning-rate", "1"], "did you mean 'learning_rate'?"),
        (["--max-steps"], "command line: --max-steps needs a value"),
        (["--max-steps", "many"], "max_steps='many': expected a whole number"),
        (["7"], "'7' belongs to no flag"),
    ):
        with pytest.raises(ConfigError) as caught:
            TrainingArguments.from_command_line(argv)
        assert text in str(caught.value)


@pytest.mark.job
def test_an_error_names_the_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from paceline import TrainingArguments\n\nTrainingArguments(fp16=True, bf16=True)\n")
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert shown.stderr.splitlines() == ["paceline: train.py:3: ConfigError: fp16 and bf16 are both set; choose one"]


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        TrainingArguments.from_command_line(["--help"])
    shown = capsys.readouterr().out
    for item in dataclasses.fields(TrainingArguments):
        assert f"--{item.name.replace('_', '-')}" in shown


def test_a_class_of_ones_own_has_more_flags() -> None:
    @dataclasses.dataclass
    class Own(TrainingArguments):
        width: int = 64

    assert Own.from_command_line(["--width", "128", "--max_steps", "3"]).width == 128


def test_values_go_to_json_and_back(tmp_path: Path) -> None:
    import json

    arguments = TrainingArguments(str(tmp_path), lr_scheduler_kwargs={"num_cycles": 2}, eval_strategy="epoch")
    again = TrainingArguments(**json.loads(arguments.to_json_string()))
    assert again == arguments


@pytest.mark.job
def test_importing_paceline_imports_neither_torch_nor_yaml() -> None:
    code = "import sys, paceline; print([m for m in ('torch', 'yaml', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_tables_in_the_docs_have_every_field_with_its_help() -> None:
    text = (Path(__file__).parents[2] / "docs" / "concepts" / "trainer.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for item in dataclasses.fields(TrainingArguments):
        help = item.metadata["help"].removeprefix("ours: ")
        assert rows.get(item.name, f"no row for {item.name}").endswith(f"| {help} |")


@dataclasses.dataclass
class WithDefaults(TrainingArguments):
    eval_strategy: str = "epoch"  # type: ignore[assignment]
    save_strategy: str = "best"  # type: ignore[assignment]


def test_a_default_in_a_derived_class_is_read_as_the_field_is(tmp_path: Path) -> None:
    args = WithDefaults(str(tmp_path), metric_for_best_model="accuracy")
    assert args.greater_is_better
    assert (args.eval_strategy.value, args.save_strategy.value) == ("epoch", "best")  # type: ignore[attr-defined]
