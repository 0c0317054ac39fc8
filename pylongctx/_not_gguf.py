"""Why a file is not a model that can be loaded, and the way out."""

from pathlib import Path

MAGIC = b"GGUF"
HEAD = 512  # bytes that are looked at
CONVERT = "convert it with convert_hf_to_gguf.py of llama.cpp, or fetch one with pylongctx get"
CUT = "corrupted or incomplete"  # what llama.cpp says of a file that ends too early
FETCH = "pylongctx get lists models that can be fetched"


def why_not_gguf(path: str) -> str:
    """Return what a path is when it is not a GGUF file, and what to do; empty for one that begins as such a file.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.gguf").write_bytes(b"")
    ...     print(why_not_gguf(f"{folder}/a.gguf"))
    it is empty; pylongctx get lists models that can be fetched
    """
    if Path(path).is_dir():
        files = sorted(file.name for file in Path(path).glob("*.gguf"))
        return f"it is a folder; name {'one of ' if len(files) > 1 else ''}{', '.join(files[:8]) or 'a .gguf file'}"
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if head.startswith(MAGIC):
        return ""
    if not head:
        return f"it is empty; {FETCH}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return f"it is a safetensors file; {CONVERT}"
    if head.startswith(b"PK") or head.startswith(b"\x80\x02"):
        return f"it is a checkpoint of PyTorch; {CONVERT}"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return f"it is a model of llama.cpp's format before GGUF; {CONVERT}"
    if head.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file; git lfs pull fetches that"
    if head.lstrip()[:1] == b"<":
        return f"it is a page of HTML, perhaps of a download that failed; {FETCH}"
    return f"it begins with {head[:4]!r}, not with GGUF; {FETCH}"


def load_failure(path: str, said: str) -> str:
    """Return why a GGUF file cannot be loaded, from what llama.cpp said: one line where the file is cut off.

    Examples
    --------
    >>> load_failure("a.gguf", "llama_model_load: error loading model: unknown architecture")
    'llama_model_load: error loading model: unknown architecture'
    """
    if CUT not in said:
        return said
    reason = said.splitlines()[0].rpartition("error loading model: ")[2].partition(", model is ")[0]
    return f"{path} is damaged or incomplete: {reason}; its size is {Path(path).stat().st_size} bytes: fetch it again"
