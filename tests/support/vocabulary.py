"""A tokenizer of words for tests of tasks, that needs no model."""

import re

import numpy as np

PIECE = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")
COUNTED = re.compile(r"\s*(?:\w+|[^\w\s])(?:\s+\Z)?")  # space at the end is not a token of its own


class Words:
    """Every word or mark is a token, with the space before it; nothing is lost."""

    def __init__(self, n_bos=0, piece=PIECE):
        self._piece = piece
        self.bos = [0] * n_bos
        self.overhead = n_bos
        self._pieces = [""]
        self._ids = {"": 0}

    def tokenize(self, text):
        found = self._piece.findall(text)
        for piece in found:
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
        return [self._ids[piece] for piece in found]

    def detokenize(self, tokens):
        return "".join(self._pieces[token] for token in tokens)

    def tokens(self, sample):
        if not isinstance(sample.prompt, str):
            return sample.prompt
        return np.array([*self.bos, *self.tokenize(sample.prompt + sample.prefix)], np.int32)


def total(vocabulary, sample):
    """Return the tokens of prompt and answer."""
    return len(vocabulary.tokens(sample)) + sample.max_tokens
