"""Compression in numpy: the weights that a replay gives, and a model that holds what was kept."""

from dataclasses import dataclass, replace

import numpy as np
from model_oracle import Model, WatchedModel
from oracle import Full, Segment
from oracle_evict import Evicting, Layer, Run
from oracle_rules import Kvzip, Rule

from pylongctx.engine.compress import ReplayPiece


@dataclass(frozen=True)
class Given(Rule):
    """After the first ``evict_every`` rows the heads of a layer hold these."""

    chosen: np.ndarray
    evict_every: int
    window, recent = 0, 0

    def kept_by_heads(self, low, high, held, p, open_row):
        return (self.chosen, self.chosen) if p < self.evict_every else (held, held)


@dataclass(frozen=True)
class CompressedModel(Model):
    """The oracle of a model whose layers hold the rows ``kept [n_layer, n_head_kv, n]`` of the first ones."""

    kept: np.ndarray
    layers: list[Layer]

    def evict(self, layer: Layer) -> Run:
        kept = np.zeros((layer.k.shape[1], len(layer.k)), dtype=bool)
        kept[:, : self.kept.shape[-1]] = self.kept[len(self.layers)]
        self.layers.append(layer)
        return replace(layer, method=Evicting(layer.method.base, Given(kept, self.kept.shape[-1]))).run()


@dataclass(frozen=True)
class Replayed(Full):
    """Full attention, where queries of a replay read their own piece of the text and its first rows."""

    n: int
    piece: ReplayPiece

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(p + 1)
        own = (keys < 8) | (keys >= self.n) | (keys >= self.piece.first) & (keys < self.piece.end)
        keys = keys[own | (p < self.n)]
        return keys, p - keys

    def segments(self, p: int) -> list[Segment]:
        if p < self.n:
            return super().segments(p)
        first = self.piece.first
        return [Segment(*rows, p) for rows in ((0, min(8, first)), (first, self.piece.end), (self.n, p + 1))]


def largest_weights(
    model: Model, base, text: list[int], pieces: list[ReplayPiece], by_pieces: bool = False
) -> np.ndarray:
    """Return the largest weight of every row of a text in its replays, ``[n_layer, n_head_kv, n]``."""
    scores = []
    for piece in pieces:
        watched, read = WatchedModel.watch(model), Replayed(len(text), piece) if by_pieces else base
        watched.logits([*text, *piece.tokens.tolist()], Evicting(read, Kvzip(len(text), 1.0)))
        scores.append([run.scores[1, :, : len(text)] for run in watched.runs])
    return np.max(scores, axis=0)
