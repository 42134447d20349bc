"""An example of a changed model: attention stays within a document, which begins at token 50256.

    python examples/document_mask.py --data my_shards --log-dir log_masked --resume

It takes the flags of train_gpt2.py and resumes as exactly, but only with this script: train_gpt2.py
would continue without the mask. Its checkpoints load in transformers and sample.py, which have no
such mask: there, a single document gets the same logits, but several in one window attend to each
other."""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import train_gpt2
from support import cli
from support.hellaswag import Packing


class DocumentGPT(train_gpt2.GPT):
    """A GPT-2 in which each token attends to itself and to earlier tokens of its document."""

    def hidden(self, idx: Tensor, packing: Packing | None = None) -> Tensor:
        if packing is None:  # HellaSwag gives its own
            document = (idx == train_gpt2.EOT).cumsum(1)  # (B, T) number, such as 0 0 0 1 1 2
            same_document = document[:, :, None] == document[:, None, :]  # (B, T, T)
            mask = same_document.tril()[:, None]  # causal, the same for all heads: (B, 1, T, T)
            packing = Packing(torch.arange(idx.size(1), device=idx.device), mask)
        return super().hidden(idx, packing)


def main(args: list[str] | None = None) -> int:
    train_gpt2.GPT = DocumentGPT  # from here on train_gpt2.py builds, restores and evaluates it
    return train_gpt2.main(args)


if __name__ == "__main__":
    cli.run(main)
