"""Names of blocks: each says what all tokens up to the end of the block are, and for what they were evaluated."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST = 20  # bytes: no two texts ever share a name


def chain(identity: Mapping[str, Any], tokens: NDArray[np.int32], block: int) -> list[str]:
    """Return the names of the whole blocks of a text.

    Parameters
    ----------
    identity : mapping
        What rows depend on beside the tokens: the model, the method, the settings, the adapters.
    tokens : numpy.ndarray
        int32 [n]; those behind the last whole block have no name.
    block : int
        Tokens of a block.

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
