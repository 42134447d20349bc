"""How much fits into a GPU's memory, found by trying."""

from collections.abc import Callable, Iterable

import torch

from support.cli import InputError
from support.distributed import Distributed


def largest_that_fits(sizes: Iterable[int], try_step: Callable[[int], None], reserve: int, dist: Distributed) -> int:
    """The first of `sizes`, largest first, with which try_step(size) does not run out of memory on any rank.

    reserve: bytes to hold meanwhile, for what training will need and the try does not. Raises InputError if none fits.
    """
    reserved = torch.empty(reserve, dtype=torch.uint8, device=dist.device)
    for size in sizes:
        try:
            try_step(size)
            fits = 1.0
        except torch.OutOfMemoryError:
            fits = 0.0
        torch.cuda.empty_cache()
        if dist.sum(torch.tensor(fits)).item() == dist.world_size:
            return size
    del reserved
    raise InputError("not one sequence fits into the GPU's memory: shorten --seq-len or train a smaller model")
