"""transformers' own tests of its Trainer, run on paceline's (`others_tests.py` says how).

python -m tests.conformance.transformers_trainer                          fetches what it needs, once
python -m tests.conformance.transformers_trainer --repository DIR         tests from a clone that is there
python -m tests.conformance.transformers_trainer --only test_trainer_data.py
"""

from __future__ import annotations

import sys

from tests.conformance.others_tests import NEEDS_OF_DATASETS, OthersTests

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
    "TrainerLoggingTest::test_log_level": "log_level is refused: paceline's logger has its own level",
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

SUITE = OthersTests(
    project="transformers",
    version="v5.15.1",
    repository="https://github.com/huggingface/transformers",
    folders=("tests/trainer", "tests/fixtures"),
    tests="tests/trainer",
    plugin="swapped_trainer",
    packages=("accelerate==1.15.0", "datasets==5.2.0", "parameterized==0.9.0", *NEEDS_OF_DATASETS),
    deliberate=DELIBERATE,
    left_out=("distributed", "test_data_collator.py"),  # more processes of Accelerate's; no Trainer in it
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
