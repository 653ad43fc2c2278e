"""The scripts of docs/porting.md: where each comes from, and what is changed in it.

A change names a piece of the script that occurs so many times and what stands there instead; whole scripts are in no
file of this repository. Counted are the lines that are new or changed. Changes that only make a script smaller (fewer
samples in a batch, a tiny model) are named apart and don't count.
"""

# ruff: noqa: E501  lines of the scripts, as long as they are there

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from tests.conformance.fetching import NEEDS_OF_DATASETS, Source

GITHUB = "https://github.com"
ACCELERATE = Source("accelerate", "v1.14.0", f"{GITHUB}/huggingface/accelerate")
TRANSFORMERS = Source("transformers", "v5.15.1", f"{GITHUB}/huggingface/transformers")
PEFT = Source("peft", "v0.20.0", f"{GITHUB}/huggingface/peft")
DATASETS = Source("datasets", "5.0.1", f"{GITHUB}/huggingface/datasets")
EVALUATE = Source("evaluate", "v0.4.6", f"{GITHUB}/huggingface/evaluate")
LIGHTNING = Source("pytorch-lightning", "2.6.5", f"{GITHUB}/Lightning-AI/pytorch-lightning")
NANOGPT = Source("nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", f"{GITHUB}/karpathy/nanoGPT")
EXAMPLES = Source("examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", f"{GITHUB}/pytorch/examples")

FOLDERS = {
    ACCELERATE: ("examples",),
    TRANSFORMERS: ("examples/pytorch",),
    PEFT: ("examples/conditional_generation",),
    DATASETS: ("docs/source",),
    EVALUATE: ("metrics/glue", "metrics/accuracy"),
    LIGHTNING: ("examples/fabric/image_classifier",),
    NANOGPT: ("config",),
    EXAMPLES: ("imagenet", "distributed/ddp-tutorial-series"),
}
PACKAGES = (
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "evaluate==0.4.6",
    "lightning-utilities==0.15.3",
    "pillow",
    "scikit-learn",
    "scipy",
    "joblib",
    "threadpoolctl",
    "timm==1.0.30",
    "torchmetrics==1.9.0",
    "torchvision==0.28.0",
    "requests",
    "charset-normalizer",
    "idna",
    "urllib3",
    "certifi",
    *NEEDS_OF_DATASETS,
)


class Change(NamedTuple):
    old: str
    """A piece of the script; … stands for anything in between."""
    new: str
    times: int = 1


@dataclass(frozen=True)
class Script:
    name: str
    source: Source
    path: str
    changes: tuple[Change, ...]
    arguments: tuple[str, ...] = ()
    smaller: tuple[Change, ...] = ()
    beside: tuple[str, ...] = ()
    """Other files of the project that it needs in its folder, unchanged."""
    before: str = ""
    """What the page that it is from has done before."""
    same: str = "(?!)"
    """What it prints that must be the same on any number of workers, as a regular expression."""
    resumed: tuple[str, ...] = ()
    """Arguments with which it goes on from {folder}, where another run has saved; to the same hash."""

    def adapted(self, text: str) -> tuple[str, int]:
        """The script as it is run, and the number of lines that are new or changed in it."""
        small = _replaced(text, self.smaller, self.name)
        ported = _replaced(small, self.changes, self.name)
        before, after = small.splitlines(), ported.splitlines()
        blocks = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        return ported, sum(there - here for tag, _, _, here, there in blocks if tag in ("replace", "insert"))


def _replaced(text: str, changes: tuple[Change, ...], name: str) -> str:
    for change in changes:
        pattern = ".*?".join(re.escape(piece) for piece in change.old.split("…"))
        new = change.new
        text, found = re.subn(pattern, lambda _, new=new: new, text, flags=re.DOTALL)  # type: ignore[misc]
        if found != change.times:
            raise ValueError(f"{name}: {change.old!r} is there {found} times, not {change.times}: another version?")
    return text


def code_of_page(text: str) -> str:
    """The Python of a page of documentation: what stands behind >>> and ... in its training loop."""
    blocks = [block for block in text.split("```py\n")[1:] if "optimizer.step()" in block]
    lines = blocks[0].split("```")[0].splitlines() if len(blocks) == 1 else []
    return "\n".join(line[4:] for line in lines) + "\n"


_SCHEDULE = "accelerator.steps_per_epoch(train_dataloader) * num_epochs"
_ENGINE = Change("from accelerate import Accelerator, DistributedType", "from paceline import Engine as Accelerator")
_NO_CPU = Change("cpu=args.cpu, ", "")
_GLUE_SAME = r"epoch \d: \{.*"
_TRAINER = Change(
    "from transformers.utils import check_min_version",
    "from paceline import Trainer, TrainingArguments\nfrom transformers.utils import check_min_version",
)
_TINY_BATCHES = Change('"batch_size": 16', '"batch_size": 4')

_STREAM = """\
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
dataset = load_dataset("text", data_files="text/long.txt", split="train", streaming=True)
dataset = dataset.map(lambda row: tokenizer(row["text"]), remove_columns=["text"]).shuffle(42, buffer_size=20)
"""

SCRIPTS = (
    Script(
        "accelerate `nlp_example.py`",
        ACCELERATE,
        "examples/nlp_example.py",
        (
            _ENGINE,
            _NO_CPU,
            Change("DistributedType.XLA", '"XLA"', 2),
            Change("(len(train_dataloader) * num_epochs) // gradient_accumulation_steps", _SCHEDULE),
        ),
        smaller=(_TINY_BATCHES,),
        same=_GLUE_SAME,
    ),
    Script(
        "accelerate `cv_example.py`",
        ACCELERATE,
        "examples/cv_example.py",
        (
            Change("from accelerate import Accelerator\n", "from paceline import Engine as Accelerator\n"),
            Change("from accelerate.utils import set_seed", "from transformers import set_seed"),
            _NO_CPU,
            Change(
                "steps_per_epoch=len(train_dataloader)", "steps_per_epoch=accelerator.steps_per_epoch(train_dataloader)"
            ),
        ),
        ("--data_dir", "pets"),
        smaller=(
            Change('"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 64'),
            Change("num_workers=4", "num_workers=0", 2),
            Change('"resnet50d", pretrained=True', '"test_resnet", pretrained=False'),
        ),
        same=r"epoch \d: .*",
    ),
    Script(
        "accelerate `by_feature/gradient_accumulation.py`",
        ACCELERATE,
        "examples/by_feature/gradient_accumulation.py",
        (
            _ENGINE,
            _NO_CPU,
            Change(
                "max_length = 128 if accelerator.distributed_type == DistributedType.XLA else None", "max_length = None"
            ),
            Change("accelerator.distributed_type == DistributedType.XLA and", "False and"),
            Change("(len(train_dataloader) * num_epochs)", _SCHEDULE),
        ),
        ("--gradient_accumulation_steps", "2"),
        smaller=(_TINY_BATCHES,),
        same=_GLUE_SAME,
    ),
    Script(
        "accelerate `by_feature/checkpointing.py`",
        ACCELERATE,
        "examples/by_feature/checkpointing.py",
        (
            Change(
                "from accelerate import Accelerator, DataLoaderConfiguration, DistributedType",
                "from paceline import Engine as Accelerator",
            ),
            Change("from accelerate.utils import set_seed", "from transformers import set_seed"),
            Change(
                "    dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=args.use_stateful_dataloader)\n",
                "",
            ),
            Change(
                "cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=dataloader_config",
                "mixed_precision=args.mixed_precision",
            ),
            Change("DistributedType.XLA", '"XLA"', 2),
            Change("(len(train_dataloader) * num_epochs) // gradient_accumulation_steps", _SCHEDULE),
            Change(
                "resume_step // len(train_dataloader)", "resume_step // accelerator.steps_per_epoch(train_dataloader)"
            ),
            Change("accelerator.skip_first_batches(train_dataloader, resume_step)", "train_dataloader"),
            Change("            overall_step += 1\n", "            overall_step = accelerator.step\n"),
            Change(
                "if overall_step % checkpointing_steps == 0:",
                "if accelerator.stepped and overall_step % checkpointing_steps == 0:",
            ),
        ),
        ("--checkpointing_steps", "3"),
        smaller=(_TINY_BATCHES,),
        same=_GLUE_SAME,
        resumed=("--resume_from_checkpoint", "{folder}/step_3"),
    ),
    Script(
        "transformers `run_clm_no_trainer.py`",
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm_no_trainer.py",
        (
            _ENGINE,
            Change("DistributedType.TPU", '"TPU"'),
            Change("from accelerate.logging import get_logger", "from logging import getLogger as get_logger"),
            Change("logger.info(accelerator.state, main_process_only=False)", "logger.info(accelerator.world)"),
            Change(
                "math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)",
                "accelerator.steps_per_epoch(train_dataloader)",
                2,
            ),
            Change("args.num_warmup_steps * accelerator.num_processes", "args.num_warmup_steps"),
            Change("else args.max_train_steps * accelerator.num_processes", "else args.max_train_steps"),
            Change("starting_epoch = resume_step // len(train_dataloader)", "starting_epoch = train_dataloader.epoch"),
            Change("accelerator.skip_first_batches(train_dataloader, resume_step)", "train_dataloader"),
        ),
        (
            *("--train_file", "text/train.txt", "--validation_file", "text/validation.txt"),
            *("--model_name_or_path", "tiny-gpt2", "--block_size", "32", "--seed", "7"),
            *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--num_train_epochs", "2"),
            *("--gradient_accumulation_steps", "1", "--checkpointing_steps", "3"),
        ),
        same=r"epoch \d: perplexity.*",
        resumed=("--resume_from_checkpoint", "{folder}/step_3"),
    ),
    Script(
        "nanoGPT `train.py`",
        NANOGPT,
        "train.py",
        (
            Change("from torch.nn.parallel import DistributedDataParallel as DDP", "import paceline, paceline.data"),
            Change(
                "ddp = int(os.environ.get('RANK', -1)) != -1",
                "ddp, engine = False, paceline.Engine(lanes=gradient_accumulation_steps, device=device)",
            ),
            Change("    master_process = True\n", "    master_process = engine.is_main_process\n"),
            Change(
                "if ddp:\n    model = DDP(model, device_ids=[ddp_local_rank])\n",
                "model, optimizer, loader = engine.prepare(model, optimizer, paceline.data.StepSource(lambda _: get_batch('train'), steps=max_iters + 1))\n",
            ),
            Change("X, Y = get_batch('train') # fetch the very first batch\n", ""),
            Change("if iter_num % eval_interval == 0 and master_process:", "if iter_num % eval_interval == 0:"),
            Change("    for micro_step in range(gradient_accumulation_steps):", "    for X, Y in loader.next_step():"),
            Change(
                "            loss = loss / gradient_accumulation_steps # scale the loss to account for gradient accumulation\n",
                "",
            ),
            Change("        X, Y = get_batch('train')\n        # backward", "        # backward"),
            Change("scaler.scale(loss).backward()", "engine.backward(loss)"),
            Change("        scaler.unscale_(optimizer)\n", ""),
            Change("torch.nn.utils.clip_grad_norm_", "engine.clip_grad_norm_"),
            Change("checkpoint = {…'ckpt.pt'))", "engine.save_state(os.path.join(out_dir, f'step-{iter_num}'))"),
            Change("loss.item() * gradient_accumulation_steps", "loss.item()"),
        ),
        (
            *(
                "--device=cpu",
                "--dtype=float32",
                "--compile=False",
                "--dataset=chars",
                "--gradient_accumulation_steps=4",
            ),
            *("--batch_size=2", "--block_size=16", "--n_layer=2", "--n_head=2", "--n_embd=16", "--dropout=0.1"),
            *("--max_iters=6", "--eval_interval=3", "--eval_iters=2", "--warmup_iters=2", "--lr_decay_iters=6"),
        ),
        beside=("model.py", "configurator.py"),
        same=r"step \d+: train loss .*",
    ),
    Script(
        "pytorch/examples `imagenet/main.py`",
        EXAMPLES,
        "imagenet/main.py",
        (
            Change("import torch.nn.parallel\n", "import paceline\n"),
            Change(
                "def main_worker(gpu, ngpus_per_node, args):\n    global best_acc1\n",
                "def main_worker(gpu, ngpus_per_node, args):\n    global best_acc1, engine\n    engine = paceline.Engine()\n",
            ),
            Change(
                "    if args.evaluate:\n",
                "    model, optimizer, train_loader, val_loader = engine.prepare(model, optimizer, train_loader, val_loader)\n"
                "    if args.evaluate:\n",
            ),
            Change("        loss.backward()\n", "        engine.backward(loss)\n"),
            Change(
                "                # compute output\n                output = model(images)\n",
                "                # compute output\n                output = model(images)\n"
                "                if loader.shadow:\n                    continue\n",
            ),
            Change("    if args.distributed:\n        top1", "    if engine.use_distributed:\n        top1"),
            Change(
                "        if not args.multiprocessing_distributed or…}, is_best)",
                '        engine.save_state(f"epoch-{epoch}")',
            ),
        ),
        (
            "images",
            "-a",
            "resnet18",
            "--no-accel",
            "-j",
            "0",
            "--epochs",
            "1",
            "-b",
            "2",
            "--lr",
            "0.01",
            "--seed",
            "3",
        ),
        same=r" \* +Acc@1.*",
        smaller=(
            Change("RandomResizedCrop(224)", "RandomResizedCrop(32)"),
            Change("Resize(256)", "Resize(40)"),
            Change("CenterCrop(224)", "CenterCrop(32)"),
        ),
    ),
    Script(
        "pytorch/examples `ddp-tutorial-series/multigpu_torchrun.py`",
        EXAMPLES,
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        (
            Change("from torch.nn.parallel import DistributedDataParallel as DDP", "from paceline import Engine"),
            Change(
                '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n    init_process_group(backend="nccl")\n',
                "    global engine; engine = Engine()\n",
            ),
            Change('self.gpu_id = int(os.environ["LOCAL_RANK"])', "self.gpu_id = engine.device"),
            Change(
                "self.model = DDP(self.model, device_ids=[self.gpu_id])",
                "self.model, self.optimizer, self.train_data = engine.prepare(self.model, self.optimizer, self.train_data)",
            ),
            Change("        loss.backward()\n", "        engine.backward(loss)\n"),
            Change("b_sz = len(next(iter(self.train_data))[0])", "b_sz = self.train_data.batch_size"),
            Change("self.model.module.state_dict()", "engine.state_dict()"),
            Change("torch.save(snapshot, self.snapshot_path)", "engine.save(snapshot, self.snapshot_path)"),
            Change("if self.gpu_id == 0 and epoch", "if epoch"),
            Change("    destroy_process_group()\n", ""),
        ),
        ("3", "2", "--batch_size", "4"),
        smaller=(Change("MyTrainDataset(2048)", "MyTrainDataset(70)"),),
        beside=("datautils.py",),
    ),
    Script(
        "Lightning Fabric `image_classifier/train_fabric.py`",
        LIGHTNING,
        "examples/fabric/image_classifier/train_fabric.py",
        (
            Change("from lightning.fabric import Fabric, seed_everything", "from paceline import Engine"),
            Change("    fabric = Fabric()\n", "    fabric = Engine(seed=hparams.seed)\n"),
            Change("    seed_everything(hparams.seed)  # instead of torch.manual_seed(...)\n", ""),
            Change("fabric.rank_zero_first(local=False)", "fabric.main_process_first()"),
            Change("fabric.is_global_zero", "fabric.is_main_process", 2),
            Change("    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)\n", ""),
            Change(
                "model, optimizer = fabric.setup(model, optimizer)",
                "model, optimizer, train_loader, test_loader = fabric.prepare(model, optimizer, train_loader, test_loader)",
            ),
            Change(
                "                test_loss += ",
                "                if test_loader.shadow:\n                    continue\n                test_loss += ",
            ),
            Change("fabric.all_gather(test_loss).sum()", "fabric.reduce(torch.tensor(test_loss))"),
            Change(
                'fabric.save(path="mnist_cnn.pt", state=model.state_dict())',
                'fabric.save(fabric.state_dict(), "mnist_cnn.pt")',
            ),
        ),
        ("--batch-size", "4", "--epochs", "2", "--save-model"),
        same=r"Test set: .*",
    ),
    Script(
        "transformers `run_clm.py`",
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm.py",
        (_TRAINER,),
        (
            *("--train_file", "text/train.txt", "--validation_file", "text/validation.txt"),
            *("--model_name_or_path", "tiny-gpt2", "--block_size", "32", "--seed", "7", "--do_train", "--do_eval"),
            *("--per_device_train_batch_size", "2", "--num_train_epochs", "2", "--output_dir", "out"),
        ),
        same=r" *(eval_accuracy|eval_loss|perplexity) .*",
    ),
    Script(
        "transformers `run_glue.py`",
        TRANSFORMERS,
        "examples/pytorch/text-classification/run_glue.py",
        (_TRAINER,),
        (
            *("--train_file", "pairs/train.csv", "--validation_file", "pairs/validation.csv"),
            *("--model_name_or_path", "bert-base-cased", "--max_seq_length", "16", "--do_train", "--do_eval"),
            *("--per_device_train_batch_size", "2", "--num_train_epochs", "2", "--output_dir", "out"),
        ),
        same=r" *(eval_accuracy|eval_loss) .*",
    ),
    Script(
        "the training loop of the `datasets` documentation over a shuffled stream",
        DATASETS,
        "docs/source/stream.mdx",
        (
            Change("import torch\n", "import torch\nfrom paceline import Engine\nengine = Engine()\n"),
            Change(
                "for epoch in range(3):\n",
                "model, optimizer, dataloader = engine.prepare(model, optimizer, dataloader)\nfor epoch in range(3):\n",
            ),
            Change("        if i == 5:\n            break\n", ""),
            Change("loss.backward()", "engine.backward(loss)"),
            Change(
                "        if i % 10 == 0:\n",
                "        if engine.stepped and engine.step % 5 == 0:\n            break\n        if i % 10 == 0:\n",
            ),
        ),
        before=_STREAM,
    ),
    Script(
        "peft `peft_lora_seq2seq_accelerate_fsdp.py`",
        PEFT,
        "examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py",
        (
            Change("from accelerate import Accelerator\n", "from paceline import Engine as Accelerator\n"),
            Change("(len(train_dataloader) * num_epochs)", _SCHEDULE),
            Change("    if getattr(accelerator.state,", "    if getattr(accelerator.config,"),
            Change("            loss.backward()\n", "            accelerator.backward(loss)\n"),
            Change("model.save_pretrained(peft_model_id)", "accelerator.save_model(model, peft_model_id)"),
        ),
        smaller=(Change("batch_size = 8", "batch_size = 2"),),
        same=r"accuracy=.*|eval_preds.*",
    ),
)
