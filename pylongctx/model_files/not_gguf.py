"""Diagnosis of files that are not loadable models."""

from pathlib import Path

MAGIC = b"GGUF"
HEAD = 512  # bytes to inspect
CONVERT = "convert it with convert_hf_to_gguf.py of llama.cpp, or download a model with pylongctx get"
CUT = "corrupted or incomplete"  # llama.cpp's message about a truncated file
FETCH = "pylongctx get lists models to download"


def why_not_gguf(path: str) -> str:
    """Describe a path that is not a GGUF file, and the way out; empty for a file that begins like GGUF.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.gguf").write_bytes(b"")
    ...     print(why_not_gguf(f"{folder}/a.gguf"))
    it is empty; pylongctx get lists models to download
    """
    if Path(path).is_dir():
        files = sorted(file.name for file in Path(path).glob("*.gguf"))
        return f"it is a folder; give {'one of ' if len(files) > 1 else ''}{', '.join(files[:8]) or 'a .gguf file'}"
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if head.startswith(MAGIC):
        return ""
    if not head:
        return f"it is empty; {FETCH}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return f"it is a safetensors file; {CONVERT}"
    if head.startswith(b"PK") or head.startswith(b"\x80\x02"):
        return f"it is a PyTorch checkpoint; {CONVERT}"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return f"it is a model in a llama.cpp format older than GGUF; {CONVERT}"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run git lfs pull"
    if head.lstrip()[:1] == b"<":
        return f"it is an HTML page, perhaps from a failed download; {FETCH}"
    return f"it begins with {head[:4]!r}, not with GGUF; {FETCH}"


def load_failure(path: str, said: str) -> str:
    """Return why a GGUF file cannot be loaded, from llama.cpp's log; a single line for a truncated file.

    Examples
    --------
    >>> load_failure("a.gguf", "llama_model_load: error loading model: unknown architecture")
    'llama_model_load: error loading model: unknown architecture'
    """
    if CUT not in said:
        return said
    reason = said.splitlines()[0].rpartition("error loading model: ")[2].partition(", model is ")[0]
    return f"{path} is damaged or incomplete: {reason}; it has {Path(path).stat().st_size} bytes: download it again"
