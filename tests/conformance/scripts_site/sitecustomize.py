"""For every Python that runs another project's script: torchvision, beside a torch that its operators don't fit.

The wheels of torchvision have operators for boxes that need the CUDA libraries; beside a torch for the CPU they can't
be loaded, and then `import torchvision` fails at their names. No script uses them: here the names are given.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            import torch

            try:
                torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
            except OSError:
                for name in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float limit) -> Tensor")
        return spec


sys.meta_path.insert(0, _BeforeTorchvision())
