"""transformers' own tests of its Trainer, run on paceline's.

    python -m tests.conformance.transformers_trainer                          fetches what it needs, once
    python -m tests.conformance.transformers_trainer --repository DIR         tests from a clone that is there
    python -m tests.conformance.transformers_trainer --only test_trainer_data.py

They are fetched by version into a cache and never copied into this repository; where they, or the packages that they
need, can't be had, it says so and runs nothing. Every test runs twice, without a network: with transformers' Trainer,
which says what can pass here at all, and with ours (`swapped_trainer.py`). It fails if a test that passes with theirs
neither passes with ours nor stands in DELIBERATE, or stands there and passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.conformance.swapped_trainer import WHOSE

VERSION = "v5.15.1"
REPOSITORY = "https://github.com/huggingface/transformers"
PACKAGES = ("accelerate==1.15.0", "datasets==5.2.0", "parameterized==0.9.0")
_THEIR_NEEDS = ("pyarrow", "dill", "multiprocess", "xxhash", "pandas", "psutil")
_LEFT_OUT = ("distributed", "test_data_collator.py")  # more processes of Accelerate's; no Trainer in it
ROOT = Path(__file__).parents[2]

_ACCELERATE = "accelerator_config is refused: there is no Accelerate below"
_DDP = "ddp_static_graph is refused: gradients are not summed by DistributedDataParallel"
_LOGGER = "looks into transformers' logger; ours is a Python warning"
_OPTIMIZER_FILE = "looks for optimizer.pt, scheduler.pt, training_args.bin: that state is in the workers' parts"
DELIBERATE = {
    "TrainerAcceleratorConfigTest::test_accelerate_config_from_dataclass_grad_accum": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_empty": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_from_dataclass": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_from_dict": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_from_dict_grad_accum_num_steps": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_from_partial": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_from_yaml": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_config_not_instantiated": _ACCELERATE,
    "TrainerAcceleratorConfigTest::test_accelerator_custom_state": _ACCELERATE,
    "TrainerDDPKwargsTest::test_ddp_static_graph_false_reaches_accelerator": _DDP,
    "TrainerDDPKwargsTest::test_ddp_static_graph_none_preserves_default": _DDP,
    "TrainerDDPKwargsTest::test_ddp_static_graph_true_reaches_accelerator": _DDP,
    "TrainerCallbackTest::test_duplicate_callback_warning": _LOGGER,
    "StatefulCallbackTest::test_missing_stateful_callback_warning": _LOGGER,
    "TrainerCheckpointSaveTest::test_save_checkpoints": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_load_best_model_at_end": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_load_best_model_from_safetensors": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_save_best_checkpoint": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_best_model_checkpoint_behavior": "counts the files in output_dir; ours has logs there",
    "TrainerBestModelTest::test_metric_for_best_model_behavior": "save_strategy='best' without a metric looks at loss",
    "TrainerGradientCheckpointingTest::test_gradient_checkpointing": "a model without blocks is refused",
    "TrainerLoggingTest::test_log_level": "log_level is refused: paceline prints",
    "TrainerLoggingTest::test_logging_inf_nan_filter": "logging_nan_inf_filter is refused: a NaN ends the training",
    "TrainerEvaluationTest::test_eval_use_gather_object": "eval_use_gather_object is refused: it travels by pickle",
    "TrainerMetricsTest::test_mem_metrics": "skip_memory_metrics is refused: peak memory is in every log",
    "TrainerResumeTrainingTest::test_can_resume_training": "compares speeds in log_history, which no two runs share",
    "TrainerResumeTrainingTest::test_resume_training_with_different_batch_size": "needs accept=['batch size']",
    "TrainerInterruptedTrainingTest::test_resume_batch_order": "a buffer that grows is refused on resume",
    "JITCheckpointTest::test_integration_with_trainer": "a signal saves in any case, without a callback",
    "TrainerDataloaderTest::test_dataloader_without_dataset": "a loader that is no DataLoader is refused",
    "TrainerDataloaderTest::test_in_order_is_forwarded": "dataloader_in_order=False is refused: bits depend on order",
    "TrainerDataloaderTest::test_train_and_eval_dataloaders": "total_batch_size is Accelerate's",
    "TestTrainingArguments::test_debug_option_parsing": "debug is refused: on_nonfinite finds a NaN",
    "TestTrainingArguments::test_enum_coercions": "hub_strategy is refused: nothing is uploaded during a training",
    "TestTrainingArguments::test_kubeflow_auto_enable": "there is no report to Kubeflow",
    "TestTrainingArguments::test_torch_empty_cache_steps_requirements": "1.0 is taken as 1, and 'none' as None",
}
"""Tests that pass with transformers' Trainer and can't with ours, each with its reason."""


class MissingError(Exception):
    """Something from outside is missing."""


def _run(what: str, command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise MissingError(f"{what}: {told[-1] if told else error}") from error


def fetch_tests(repository: str, cache: Path) -> Path:
    """A folder with transformers' tests of that version."""
    folder = cache / f"transformers-{VERSION}"
    if (folder / "tests" / "trainer").is_dir():
        return folder
    clone = cache / "clone"
    git = ["git", "-C", str(clone)]
    if not clone.is_dir():
        wanted = ["--depth=1", "--filter=blob:none", "--sparse", f"--branch={VERSION}"]
        _run("transformers' tests can't be had", ["git", "clone", "-q", *wanted, repository, str(clone)])
    _run("transformers' tests can't be had", [*git, "sparse-checkout", "set", "tests/trainer", "tests/fixtures"])
    clone.rename(folder)
    return folder


def fetch_packages(cache: Path) -> Path:
    """A folder with the packages that the tests need and this project does not."""
    folder = cache / "packages"
    if not folder.is_dir():
        partial = cache / "packages.partial"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial)]
        _run("packages can't be had", [*pip, *PACKAGES, *_THEIR_NEEDS])
        partial.rename(folder)
    return folder


def outcomes(tests: Path, packages: Path, whose: str, only: list[str], report: Path) -> dict[str, str]:
    """Test → passed, failure, error or skipped, with a line that says why."""
    trainer = tests / "tests" / "trainer"
    report.unlink(missing_ok=True)
    wanted = [str(trainer / name) for name in only] or [str(trainer)]
    ignored = [f"--ignore={trainer / name}" for name in _LEFT_OUT]
    options = ["-q", "--tb=line", "--timeout=120", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tests}"]
    environment = os.environ | {
        WHOSE: whose,
        # Not this repository itself: its package `tests` would hide theirs.
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", Path(__file__).parent, tests, packages))),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    plugin = ["-p", "swapped_trainer"]
    command = [sys.executable, "-m", "pytest", *plugin, *options, *ignored, f"--junitxml={report}", *wanted]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors"], cwd=tests, env=environment, capture_output=True
    )
    if not report.exists():
        raise MissingError(f"pytest did not run: {(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
    return dict(_read(report))


def _read(report: Path) -> list[tuple[str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rsplit('.', 1)[-1]}::{case.get('name')}"
        result = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                result = f"{child.tag}: {(child.get('message') or '').splitlines()[:1]}"
        found.append((name, result))
    return found


def complaints(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """What is not as it should be, one line each."""
    found = []
    for name in sorted(name for name, result in theirs.items() if result == "passed"):
        result = ours.get(name, "missing")
        if result == "passed" and name in DELIBERATE:
            found.append(f"{name} passes: take it out of DELIBERATE")
        elif result != "passed" and name not in DELIBERATE:
            found.append(f"{name}: {result}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=REPOSITORY, help="a clone of transformers, or where there is one")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "paceline-conformance")
    parser.add_argument("--only", nargs="*", default=[], help="files of tests/trainer")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        tests, packages = fetch_tests(options.repository, options.cache), fetch_packages(options.cache)
        both = [
            outcomes(tests, packages, whose, options.only, options.cache / f"{whose}.xml")
            for whose in ("transformers", "paceline")
        ]
    except MissingError as error:
        print(f"transformers' trainer tests: NOT RUN: {error}")
        return 0
    theirs, ours = both
    found = complaints(theirs, ours)
    passing = [name for name, result in theirs.items() if result == "passed"]
    good = sum(ours.get(name) == "passed" for name in passing)
    deliberate = sum(name in DELIBERATE for name in passing)
    print("\n".join(found))
    print(
        f"transformers' trainer tests {VERSION}: of {len(passing)} that pass with its own Trainer {good} pass with "
        f"paceline's, {deliberate} fail deliberately, {len(found)} are neither"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
