"""What the parent of workers that run other projects' scripts imports once."""

import datasets  # noqa: F401
import evaluate  # noqa: F401
import torchvision  # noqa: F401
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer  # noqa: F401
