"""The tokenizer object of llama_cpp, which maps str to token ids and back."""

from pylongctx.engine.model import Model


class LlamaTokenizer:
    """The tokenizer of a loaded model.

    Examples
    --------
    >>> tokenizer = llm.tokenizer()
    >>> tokenizer.decode(tokenizer.encode("Who is the thief?", add_bos=False)).strip()
    'Who is the thief?'
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the token ids of UTF-8 bytes."""
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens."""
        return self._model.detokenize(tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the token ids of a string."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return self.detokenize(tokens).decode("utf-8", "ignore")
