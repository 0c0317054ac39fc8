"""Models from huggingface.co, downloaded with the package huggingface_hub into the cache that it shares."""

import fnmatch
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pylongctx.catalog.entry import OFFLINE, CatalogEntry, Progress, check_sha256, sha256_of

AnyPath = str | os.PathLike[str]
QUANTS = ("Q4_K_M", "Q8_0")  # default quantizations, in order of preference
FIRST_SHARD = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")


def from_pretrained(
    cls: Any,
    /,
    repo_id: str,
    filename: str | None,
    additional_files: list[str] | None = None,
    local_dir: AnyPath | None = None,
    local_dir_use_symlinks: bool | Literal["auto"] = "auto",
    cache_dir: AnyPath | None = None,
    **kwargs: Any,
) -> Any:
    """Open a Llama on a model from huggingface.co; needs the package huggingface_hub and a network.

    Parameters
    ----------
    repo_id : str
        The repository.
    filename : str
        Its GGUF file, the first one of a split model; or a glob pattern that matches one file.
    additional_files : list of str
        Additional files to download, such as the other files of a split model.
    local_dir, cache_dir : str
        Where files are stored, see huggingface_hub.
    local_dir_use_symlinks : bool or str
        No effect, as in huggingface_hub.
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


def by_quant(repo: str, file: str | None = None) -> str:
    """Return the file of a model that is named as in llama.cpp's ``-hf``; it is downloaded if missing.

    ``repo`` is ``user/name:quant``, or ``user/name``: then it is ``file``, else Q4_K_M, else Q8_0, else the only file.
    Raises ValueError when no file matches, or several do, and what ``from_pretrained`` raises.

    Examples
    --------
    >>> by_quant("Qwen/Qwen3-0.6B-GGUF:Q8_0")  # doctest: +SKIP
    """
    name, _, quant = repo.partition(":")
    if name.count("/") != 1:
        raise ValueError(f"a repository must be user/name or user/name:quant, not {repo!r}")
    if file is not None and quant:
        raise ValueError(f"{repo} names a quantization and {file} a file: leave out one of them")
    hub = _package()
    with _connected(name):
        names = hub.HfApi().list_repo_files(name)
        first, *others = _shards(_chosen(name, names, quant, file), names)
        path = _fetch(hub, name, first, None, None)
        for other in others:
            _fetch(hub, name, other, None, None)
    return path


def _chosen(repo: str, names: list[str], quant: str, file: str | None) -> str:
    """Return the model file, the first one of a split model."""
    if file is not None:
        if file not in names:
            raise ValueError(f"{repo} has no file {file}; it has {', '.join(names)}")
        return file
    models = [one for one in names if one.endswith(".gguf") and "mmproj" not in one]
    models = [one for one in models if FIRST_SHARD.fullmatch(one) or "-of-0" not in one]
    for wanted in [quant] if quant else QUANTS:
        word = re.compile(rf"(?:^|[-_./]){re.escape(wanted)}(?:[-_./]|$)", re.IGNORECASE)
        if len(found := [one for one in models if word.search(one)]) == 1:
            return found[0]
    if not quant and len(models) == 1:
        return models[0]
    asked = f"no single file of {quant}" if quant else f"no single file of {' or '.join(QUANTS)}"
    raise ValueError(f"{repo} has {asked}; choose one of {', '.join(models) or 'no .gguf file'}")


def _shards(first: str, names: list[str]) -> list[str]:
    """Return a file, or all files of a split model for its first one."""
    split = FIRST_SHARD.fullmatch(first)
    if split is None:
        return [first]
    others = sorted(one for one in names if one.startswith(f"{split[1]}-") and one.endswith(f"-of-{split[2]}.gguf"))
    return [first, *(one for one in others if one != first)]


def cached(repo_id: str, filename: str, revision: str) -> Path | None:
    """Return a downloaded file; None when it is missing or huggingface_hub is not installed.

    Examples
    --------
    >>> cached("no/such-model", "model.gguf", "0" * 40) is None
    True
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    found = hub.try_to_load_from_cache(repo_id, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


def download(repo_id: str, filename: str, revision: str) -> Path:
    """Download one file of one commit into huggingface_hub's cache if it is missing, as ``from_pretrained`` does.

    Examples
    --------
    >>> commit = "23749fefcc72300e3a2ad315e1317431b06b590a"
    >>> download("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", commit)  # doctest: +SKIP
    """
    hub = _package()
    with _connected(repo_id):
        return Path(hub.hf_hub_download(repo_id, filename, revision=revision))


def _package() -> Any:
    try:
        import huggingface_hub as hub
    except ImportError as reason:
        raise ImportError(
            "models from huggingface.co need the package huggingface-hub: pip install huggingface-hub"
        ) from reason
    return hub


@contextmanager
def _connected(repo_id: str) -> Iterator[None]:
    """Turn exceptions of huggingface_hub and its HTTP client into ConnectionError, except argument errors."""
    try:
        yield
    except Exception as reason:
        if isinstance(reason, ValueError) and not isinstance(reason, OSError):
            raise
        raise ConnectionError(f"{repo_id} cannot be downloaded from huggingface.co ({reason})") from reason


def _download(
    repo_id: str,
    filename: str | None,
    additional_files: list[str] | None,
    local_dir: AnyPath | None,
    cache_dir: AnyPath | None,
) -> str:
    """Download a model and return its path."""
    hub = _package()
    if not filename:
        raise ValueError("from_pretrained needs the name of a GGUF file, or a pattern such as '*q8_0.gguf'")
    patterns = [filename, *(additional_files or [])]
    try:
        with _connected(repo_id):
            names = hub.HfApi().list_repo_files(repo_id)
            paths = [_fetch(hub, repo_id, _match(names, pattern), local_dir, cache_dir) for pattern in patterns]
    except ConnectionError as reason:
        raise ConnectionError(f"{reason}. Offline, pass the path of a file to Llama") from reason
    return paths[0]


def _match(names: list[str], pattern: str) -> str:
    found = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files match {pattern!r}: {found or names}")
    return found[0]


def _fetch(hub: Any, repo_id: str, name: str, local_dir: AnyPath | None, cache_dir: AnyPath | None) -> str:
    path = PurePosixPath(name)
    folder = None if str(path.parent) == "." else str(path.parent)
    found: str = hub.hf_hub_download(repo_id, path.name, subfolder=folder, local_dir=local_dir, cache_dir=cache_dir)
    return found


@dataclass(frozen=True, kw_only=True)
class HubEntry(CatalogEntry):
    """A file of a repository."""

    repo_id: str
    revision: str  # its commit

    @property
    def origin(self) -> str:
        """The site of its source."""
        return "Hugging Face"

    @property
    def source(self) -> str:
        """The repository."""
        return f"{self.repo_id} at {self.revision[:7]}"

    def path(self) -> Path | None:
        """Return the file in the cache; None if it is missing or huggingface_hub is not installed."""
        return cached(self.repo_id, self.file, self.revision)

    def fetch(self, progress: Progress | None = None) -> Path:
        """Download the file with huggingface_hub, which shows progress and resumes interrupted downloads."""
        try:
            path = download(self.repo_id, self.file, self.revision)
        except ConnectionError as reason:
            raise ConnectionError(f"{self.name}: {reason}. {OFFLINE}") from reason
        try:
            check_sha256(sha256_of(path), self.sha256, self.file)
        except ValueError:
            path.resolve().unlink()  # the target of the cache's symlink
            path.unlink(missing_ok=True)
            raise
        return path
