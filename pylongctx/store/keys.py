"""Names of blocks, which identify all tokens up to the end of the block and the identity of their evaluation."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST = 20  # bytes, enough to avoid collisions


def chain(identity: Mapping[str, Any], tokens: NDArray[np.int32], block: int) -> list[str]:
    """Return the names of the whole blocks of a text.

    Parameters
    ----------
    identity : mapping
        Identity of KV entries without the tokens: model, method, settings and adapters.
    tokens : numpy.ndarray
        int32 [n]; tokens after the last whole block get no name.
    block : int
        Tokens per block.

    Returns
    -------
    list of str
        The name of block i is a hash of the identity and of all tokens before ``(i + 1) * block``.

    Examples
    --------
    >>> names = chain({"model": "a"}, np.arange(1000, dtype=np.int32), 512)
    >>> len(names), len(names[0])
    (1, 40)
    """
    name = hashlib.blake2b(json.dumps(dict(identity), sort_keys=True).encode(), digest_size=DIGEST).digest()
    names = []
    for start in range(0, len(tokens) // block * block, block):
        part = np.ascontiguousarray(tokens[start : start + block], "<i4")
        name = hashlib.blake2b(part.tobytes(), key=name, digest_size=DIGEST).digest()
        names.append(name.hex())
    return names
