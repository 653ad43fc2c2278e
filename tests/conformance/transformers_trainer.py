"""transformers' own tests of its Trainer, run on paceline's (`others_tests.py` says how).

python -m tests.conformance.transformers_trainer                          fetches what it needs, once
python -m tests.conformance.transformers_trainer --repository DIR         tests from a clone that is there
python -m tests.conformance.transformers_trainer --only test_trainer_data.py
"""

from __future__ import annotations

import sys

from tests.conformance.fetching import NEEDS_OF_DATASETS
from tests.conformance.others_tests import OthersTests

_DDP = "looks into what Accelerate gives to DDP; ddp_static_graph is refused: leave it out, paceline sums gradients"
_OPTIMIZER_FILE = (
    "looks for optimizer.pt, scheduler.pt, training_args.bin; resume from the workers' parts, in safetensors"
)
DELIBERATE = {
    "TrainerDDPKwargsTest::test_ddp_static_graph_false_reaches_accelerator": _DDP,
    "TrainerDDPKwargsTest::test_ddp_static_graph_none_preserves_default": _DDP,
    "TrainerDDPKwargsTest::test_ddp_static_graph_true_reaches_accelerator": _DDP,
    "TrainerCheckpointSaveTest::test_save_checkpoints": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_load_best_model_at_end": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_load_best_model_from_safetensors": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_save_best_checkpoint": _OPTIMIZER_FILE,
    "TrainerBestModelTest::test_best_model_checkpoint_behavior": (
        "counts the files in output_dir, where metrics.jsonl and training_arguments.json are too; list checkpoint-*"
    ),
    "TrainerLoggingTest::test_logging_inf_nan_filter": "a NaN ends the training; set on_nonfinite='continue' or 'skip'",
    "TrainerResumeTrainingTest::test_can_resume_training": (
        "compares speeds in log_history; and True without a checkpoint starts at step 0: name one to get an error"
    ),
    "TrainerResumeTrainingTest::test_resume_training_with_different_batch_size": (
        "the bits would not continue; write train(…, accept=['batch size'])"
    ),
    "JITCheckpointTest::test_integration_with_trainer": (
        "looks for a callback of transformers; a signal saves in any case, enable_jit_checkpoint may stay"
    ),
    "TrainerDataloaderTest::test_in_order_is_forwarded": "dataloader_in_order=False is refused: leave it out",
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
