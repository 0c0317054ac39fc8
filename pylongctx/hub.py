"""Models from huggingface.co, by the package huggingface_hub."""

import fnmatch
import os
from pathlib import PurePosixPath
from typing import Any, Literal

Path = str | os.PathLike[str]


def from_pretrained(
    cls: Any,
    /,
    repo_id: str,
    filename: str | None,
    additional_files: list[str] | None = None,
    local_dir: Path | None = None,
    local_dir_use_symlinks: bool | Literal["auto"] = "auto",
    cache_dir: Path | None = None,
    **kwargs: Any,
) -> Any:
    """Open a Llama on a model from huggingface.co; needs the package huggingface_hub and a network.

    Parameters
    ----------
    repo_id : str
        The repository.
    filename : str
        Its GGUF file, of several the first; or a glob pattern that one file matches.
    additional_files : list of str
        More files to download, such as the other ones of a split model.
    local_dir, cache_dir : str
        Where files go, see huggingface_hub.
    local_dir_use_symlinks : bool or str
        Without effect, as in huggingface_hub.
    **kwargs
        The other parameters of Llama.

    Raises
    ------
    ImportError
        When huggingface_hub is not installed.
    ConnectionError
        When the site cannot be reached.
    ValueError
        When no file matches, or several.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> Llama.from_pretrained("bartowski/SmolLM2-135M-Instruct-GGUF", "*Q8_0.gguf", n_ctx=0)  # doctest: +SKIP
    """
    return cls(_download(repo_id, filename, additional_files, local_dir, cache_dir), **kwargs)


def _download(
    repo_id: str,
    filename: str | None,
    additional_files: list[str] | None,
    local_dir: Path | None,
    cache_dir: Path | None,
) -> str:
    """Return the path of a model that was downloaded."""
    try:
        import huggingface_hub as hub
    except ImportError as reason:
        raise ImportError("from_pretrained needs the package huggingface-hub: pip install huggingface-hub") from reason
    if not filename:
        raise ValueError("from_pretrained needs the name of a GGUF file, or a pattern such as '*q8_0.gguf'")
    patterns = [filename, *(additional_files or [])]
    try:
        names = hub.HfApi().list_repo_files(repo_id)
        paths = [_fetch(hub, repo_id, _match(names, pattern), local_dir, cache_dir) for pattern in patterns]
    except OSError as reason:  # what requests and huggingface_hub raise
        raise ConnectionError(
            f"{repo_id} cannot be loaded from huggingface.co ({reason}). Offline, pass the path of a file to Llama"
        ) from reason
    return paths[0]


def _match(names: list[str], pattern: str) -> str:
    found = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files match {pattern!r}: {found or names}")
    return found[0]


def _fetch(hub: Any, repo_id: str, name: str, local_dir: Path | None, cache_dir: Path | None) -> str:
    path = PurePosixPath(name)
    folder = None if str(path.parent) == "." else str(path.parent)
    found: str = hub.hf_hub_download(repo_id, path.name, subfolder=folder, local_dir=local_dir, cache_dir=cache_dir)
    return found
