"""Imported once by the process that ranks are forked from: each would need seconds for this."""

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
import tyro  # noqa: F401

import train_gpt2  # noqa: F401
from support.tokenizer import get_tokenizer

get_tokenizer()
