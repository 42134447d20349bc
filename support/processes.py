"""Processes that work beside this one: they end with it, and their results come in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from support.cli import InputError
from support.tokenizer import bpe_files

@contextmanager
def processes(count: int, stop: bool = False) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block, or with this process, however it ends.

    stop: in the middle of what they do then; only for tasks with small results, see concurrent.futures.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, initializer=begin_process)
    try:
        pool.submit(bpe_files).result()  # start them now: a fork copies one thread, and soon there are more
        yield pool
    except BrokenProcessPool:
        raise InputError("a worker was killed, for want of memory perhaps: run the same command again to go on; "
                         "fewer --workers need less") from None
    finally:
        for child in set(multiprocessing.active_children()) - others if stop else ():
            child.terminate()
        pool.shutdown(cancel_futures=True)


def begin_process() -> None:
    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent


def in_order(pool: ProcessPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator[tuple]:
    """(item, function(item)) of every item, in order, with `ahead` more under way or waiting to be asked for."""
    pending: deque = deque()
    for item in items:
        pending.append((item, pool.submit(function, item)))
        if len(pending) > ahead:
            item, future = pending.popleft()
            yield item, future.result()
    while pending:
        item, future = pending.popleft()
        yield item, future.result()
