"""Methods of llama_cpp.Llama that come in a later release: each says so, and the way out."""

from typing import Any, NoReturn

CHAT = "format the prompt with the model's template and use create_completion"
EMBEDDINGS = "use llama_cpp.Llama(embedding=True)"


def _later(name: str, way_out: str) -> NoReturn:
    raise NotImplementedError(f"{name} comes in a later release of pylongctx; until then: {way_out}")


class Later:
    """What a program written for llama_cpp.Llama may call and this version does not have."""

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_chat_completion", CHAT)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_chat_completion_openai_v1", CHAT)

    def create_embedding(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("create_embedding", EMBEDDINGS)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("embed", EMBEDDINGS)

    def pooling_type(self) -> str:
        """Not in this version."""
        _later("pooling_type", EMBEDDINGS)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Not in this version."""
        _later("from_pretrained", "download the file with huggingface-cli and pass its path to Llama")
