"""Chat templates and vocabularies from the source package of llama-cpp-python that the library was built from."""

import functools
import re
import tarfile
from pathlib import Path

from needs import lacks

ROOT = Path(__file__).resolve().parents[2]
VOCABS = ("llama-spm", "llama-bpe", "qwen2", "phi-3")


def tarball() -> Path:
    """Return the package; the test is skipped where the build has taken a tree instead."""
    caches = "".join(cache.read_text() for cache in ROOT.glob("build/*/CMakeCache.txt"))
    named = [Path(name) for name in re.findall(r"^LCTX_UPSTREAM_TARBALL:\w+=(.+)$", caches, re.MULTILINE)]
    found = [path for path in [*ROOT.glob("build/*/download/*.tar.gz"), *named] if path.is_file()]
    if not found:
        lacks("build", "the source package of llama-cpp-python is not in build/")
    return found[0]


@functools.cache
def files(folder: Path) -> Path:
    """Extract vocabularies and templates into a folder, once."""
    wanted = re.compile(r".*/models/(templates/[^/]+\.jinja|ggml-vocab-(" + "|".join(VOCABS) + r")\.gguf)$")
    with tarfile.open(tarball()) as archive:
        for member in archive:
            if wanted.match(member.name):
                (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    return folder


@functools.cache
def option_source() -> str:
    """Return the source of llama.cpp's options."""
    with tarfile.open(tarball()) as archive:
        (member,) = [name for name in archive.getnames() if name.endswith("common/arg.cpp")]
        return archive.extractfile(member).read().decode()


@functools.cache
def vocab_source() -> str:
    """Return the source that chooses the expressions of a vocabulary."""
    with tarfile.open(tarball()) as archive:
        (member,) = [name for name in archive.getnames() if name.endswith("llama.cpp/src/llama-vocab.cpp")]
        return archive.extractfile(member).read().decode()


def vocabularies(folder: Path) -> list[Path]:
    """Extract all vocabularies that have texts (.inp) with their tokens (.out), with both beside them."""
    wanted = re.compile(r".*/models/(ggml-vocab-[^/]+\.gguf(?:\.inp|\.out)?)$")
    with tarfile.open(tarball()) as archive:
        for member in archive:
            if found := wanted.match(member.name):
                (folder / found[1]).write_bytes(archive.extractfile(member).read())
    return sorted(path for path in folder.glob("*.gguf") if path.with_name(f"{path.name}.inp").exists())
