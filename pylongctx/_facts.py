"""Facts of an open Llama: its method and memory, the sizes of its model, its vocabulary."""

import numpy as np
from numpy.typing import NDArray

from pylongctx._context import KVUsage, OffloadUsage
from pylongctx._saving import Saving
from pylongctx._tokenizer import LlamaTokenizer
from pylongctx.methods import Method, parse


class Facts(Saving):
    """What Llama tells without running."""

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        spec = self._session.context.method
        return parse(spec) if spec else None

    def kv_usage(self) -> KVUsage:
        """Return the KV memory: ``bytes``, ``peak_bytes``, ``full_bytes``, ``rows`` int32 [n_layer, n_head_kv]."""
        return self._session.context.kv_usage()

    def offload_usage(self) -> OffloadUsage:
        """Return how the pages of ``kv_offload="host"`` were read since the model was loaded."""
        return self._session.context.offload_usage()

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return which tokens a KV head still holds, and what its queries think of them.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` when ``evict_every`` is not below it, where one is enough to stay);
            with scissorhands a count; with h2o and tova a float's bits (``scores.view(numpy.float32)``).

        Raises
        ------
        IndexError
            When the model has no such layer or head.
        """
        shape = self.kv_usage().rows.shape
        if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise IndexError(f"the model has {shape[0]} layers of at most {shape[1]} KV heads, not ({layer}, {head})")
        return self._session.context.held_rows(layer, head)

    def n_ctx(self) -> int:
        """Return the context window in tokens."""
        return self._session.context.n_ctx

    def n_embd(self) -> int:
        """Return the width of the model."""
        return int(self._model.info.n_embd)

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return int(self._model.info.n_vocab)

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token, -1 for none."""
        return int(self._model.info.token_bos)

    def token_eos(self) -> int:
        """Return the end-of-sequence token, -1 for none."""
        return int(self._model.info.token_eos)

    def token_nl(self) -> int:
        """Return the newline token, -1 for none."""
        return int(self._model.info.token_nl)

    # ---- vocabulary ----

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes; ``special`` reads the texts of special tokens as such."""
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens; a space right after a leading BOS token is dropped."""
        return self._model.detokenize(tokens, special)

    def tokenizer(self) -> LlamaTokenizer:
        """Return an object with ``encode`` and ``decode`` on str."""
        return LlamaTokenizer(self._model)
