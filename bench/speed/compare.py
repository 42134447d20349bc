"""build-nanogpt's model and optimizer beside ours, one process, one step of each in turns: `compare.py PEER DATA [N]`.

PEER: a copy of build-nanogpt; DATA: a folder of shards. GPT-2 (124M), B 2, T 1024, float32 on the CPU, N steps of each.
Turns, because the speed of a shared machine drifts by more in a minute than there is between two programs.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.devices import keep_freed_memory

keep_freed_memory()  # of the process, so both have it
import torch  # noqa: E402

from train_gpt2 import (  # noqa: E402
    GPT,
    PRESETS,
    DataLoaderLite,
    GPTConfig,
    TrainConfig,
    choose_loss,
    configure_optimizer,
)

peer, data, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 6
# The part of its script that defines the model; the rest starts a run as soon as it is imported.
source = (peer / "train_gpt2.py").read_text().replace("from hellaswag import", "# ").split("import tiktoken")[0]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "peer_model.py").write_text("master_process = False\n" + source)
    sys.path.insert(0, folder)
    import peer_model


def make(kind: str):
    torch.manual_seed(1337)
    if kind == "ours":
        config = replace(TrainConfig(), **PRESETS["gpt2"], compile=False)
        model = GPT(GPTConfig())
        loss_function = choose_loss(config, torch.device("cpu"), compiled=False)
        return lambda x, y: model(x, y, loss_function), configure_optimizer(model, config), list(model.parameters())
    model = peer_model.GPT(peer_model.GPTConfig(vocab_size=50304))
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type="cpu")
    return torch.compile(model) if "compiled" in kind else model, optimizer, list(model.parameters())


kinds = ["build-nanogpt", "build-nanogpt, compiled", "ours"]
contestants = {kind: make(kind) for kind in kinds}
loader = DataLoaderLite(data, "train", 2, 1024)
seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
for step in range(count + 2):
    x, y = loader.next_batch()
    for kind, (model, optimizer, parameters) in contestants.items():
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seconds[kind].append(time.perf_counter() - began)
    print(step, {kind: round(times[-1], 2) for kind, times in seconds.items()}, flush=True)
for kind, times in seconds.items():
    ratio = statistics.median(a / b for a, b in zip(times[2:], seconds["ours"][2:], strict=True))
    print(f"{kind}: median {statistics.median(times[2:]):.2f} s, {ratio:.3f} times ours")
