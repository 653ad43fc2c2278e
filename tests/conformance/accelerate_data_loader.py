"""accelerate's own tests of its data loaders, run on paceline's shards (`others_tests.py` says how).

python -m tests.conformance.accelerate_data_loader                        fetches what it needs, once
python -m tests.conformance.accelerate_data_loader --repository DIR       tests from a clone that is there
"""

from __future__ import annotations

import sys

from tests.conformance.fetching import NEEDS_OF_DATASETS
from tests.conformance.others_tests import OthersTests

SUITE = OthersTests(
    project="accelerate",
    version="v1.15.0",
    repository="https://github.com/huggingface/accelerate",
    folders=("tests",),
    tests="tests/test_data_loader.py",
    plugin="swapped_shards",
    packages=(
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "parameterized==0.9.0",
        "torchdata==0.11.0",
        *NEEDS_OF_DATASETS,
    ),
    deliberate={},
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
