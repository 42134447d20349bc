"""Draws shakespeare/loss.png, the curve of the default run: `python reference/draw_loss.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from support.files_and_locks import ROOT, atomic_path
from support.plots import smooth
from support.run_files import read_log
from support.shards import tokenize_text
from support.tokenizer import get_tokenizer, measure_text

HERE = Path(__file__).parent
# nanoGPT's README, config/train_shakespeare_char.py: nats per character of its own validation part,
# where the label begins or ends, and the label. The first figure is the one to compare with.
NANOGPT = [
    (1.88, 600, "right", "nanoGPT, three minutes on a CPU, as here: 1.88"),
    (1.47, 0, "left", "nanoGPT, three minutes on an A100: 1.47"),
]


def main() -> None:
    log = read_log(HERE / "shakespeare")
    text = measure_text(tokenize_text(ROOT / "input.txt", "val"), get_tokenizer())
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for stream, style in (("train", "C0-"), ("val", "C1o-")):
        steps, losses = log[stream]
        values = [text.nats_per_character(loss) for loss in losses]
        name = {"train": "training loss", "val": "validation loss"}[stream]
        axes.plot(steps, smooth(values) if stream == "train" else values, style, ms=4, label=name)
    for loss, x, side, label in NANOGPT:
        axes.axhline(loss, color="gray", linestyle=":")
        text_box = dict(facecolor="white", edgecolor="none", pad=1)
        axes.text(x, loss + 0.015, label, ha=side, va="bottom", size=8, bbox=text_box)
    axes.set(xlabel="steps", ylabel="nats per character", ylim=(1.3, 2.6))
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_path(HERE / "shakespeare" / "loss.png") as partial:
        figure.savefig(partial, format="png", dpi=200)


if __name__ == "__main__":
    main()
