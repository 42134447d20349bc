"""What the frequencies of tokens, and of pairs of tokens, achieve on a text: losses to set beside a model's."""

import numpy as np

from support.tokenizer import VOCAB_SIZE


def numbered(v: np.ndarray, w: np.ndarray, V: int) -> np.ndarray:
    """A number for each pair of tokens (v, w), (n,) uint32."""
    return v.astype(np.uint32) * np.uint32(V) + w.astype(np.uint32)


def frequencies(train: np.ndarray, v: np.ndarray, w: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray]:
    """p(w) and p(w|v), w's probability by itself and after v, by the counts n of `train`; each (n,), as v and w are.

    Smoothed by Witten and Bell's method (1991, method C; Chen & Goodman 1998, "An Empirical Study of Smoothing
    Techniques for Language Modeling", section 2.5), for which nothing need be tuned: tokens that were never seen get as
    much weight as there are different ones that were, shared out by the next simpler distribution.

        p(w)   = (n(w)  + T / V)       / (N + T)          N tokens, T different ones
        p(w|v) = (n(vw) + T(v) * p(w)) / (n(v) + T(v))    after v: n(v) tokens, T(v) different ones; if none, p(w)
    """
    n = np.bincount(train, minlength=V)
    T = np.count_nonzero(n)
    p = ((n + T / V) / (len(train) + T))[w]
    pairs, n_pairs = np.unique(numbered(train[:-1], train[1:], V), return_counts=True)
    place = np.searchsorted(pairs, numbered(v, w, V)).clip(max=len(pairs) - 1)
    n_vw = np.where(pairs[place] == numbered(v, w, V), n_pairs[place], 0)
    n_v = np.bincount(train[:-1], minlength=V)[v]
    T_v = np.bincount(pairs // np.uint32(V), minlength=V)[v]
    return p, np.where(n_v > 0, (n_vw + T_v * p) / np.maximum(n_v + T_v, 1), p)


def frequency_losses(train: np.ndarray, val: np.ndarray, V: int = VOCAB_SIZE) -> tuple[float, float]:
    """Mean cross-entropies in nats of val's tokens but the first: by the frequencies of tokens, and of pairs."""
    pairs, times = np.unique(numbered(val[:-1], val[1:], V), return_counts=True)  # sorted, they are soon found
    p, p_pair = frequencies(train, *np.divmod(pairs, np.uint32(V)), V)
    return -float(times @ np.log(p)) / (len(val) - 1), -float(times @ np.log(p_pair)) / (len(val) - 1)
