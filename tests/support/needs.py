"""What a test needs in addition to the package: a skip names its group, and ``LCTX_REQUIRE`` makes it a failure.

``LCTX_REQUIRE=stock,server`` makes skips in these groups fail, ``LCTX_REQUIRE=all`` those in any group.
"""

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

GROUPS = {
    "stock": "llama-cpp-python with its library: unpatched llama.cpp, and the API that we follow",
    "server": "the extra server, and its clients openai, ollama, httpx, psutil",
    "plot": "the extra plot",
    "cluster": "the extra cluster",
    "eval": "the extra eval: jieba, nltk, rapidfuzz, rouge, wonderwords",
    "train": "the extra train: torch, sentencepiece, protobuf",
    "peers": "the extra test-peers: lm-eval, langchain-community, guidance, llama-index",
    "page": "selenium, chromium and chromedriver",
    "axe": "axe-core of npm: npm install -g axe-core",
    "build": "a library built in build/, its source package, and what builds and packs it",
    "wheel": "a wheel for every x86-64 CPU in dist/: make wheel",
    "older": "an older package of llama-cpp-python: python patches/refresh.py prove",
    "harness": "a library built with LCTX_HARNESS=ON",
    "cuda": "nvcc, cuobjdump, nvdisasm and the headers of cuBLAS",
    "vulkan": "a library built with GGML_VULKAN=ON and LCTX_HARNESS=ON, and a Vulkan device: make vulkan-check",
    "tools": "programs of llama.cpp: make tools",
}


def required() -> set[str]:
    """Return the groups of which no test may be skipped.

    Raises
    ------
    pytest.UsageError
        ``LCTX_REQUIRE`` names an unknown group.
    """
    named = set(filter(None, os.environ.get("LCTX_REQUIRE", "").split(",")))
    if unknown := named - {*GROUPS, "all"}:
        raise pytest.UsageError(f"LCTX_REQUIRE: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return set(GROUPS) if "all" in named else named


def lacks(group: str, what: str = "") -> NoReturn:
    """Skip the test, or the file when it is being imported; fail when the group is required."""
    reason = f"{group}: {what or 'not there'} (needs {GROUPS[group]})"
    if group in required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def need(group: str, *modules: str) -> ModuleType:
    """Import modules and return the last; without them the test lacks the group."""
    try:
        return [importlib.import_module(name) for name in modules][-1]
    except ImportError as reason:
        lacks(group, str(reason))


def newest_patched() -> Path | None:
    """Return the newest patched llama.cpp that a build has left, None when none has."""
    build = Path(__file__).resolve().parents[2] / "build"
    stamps = sorted(build.glob("*/upstream/*/stamp"), key=lambda path: path.stat().st_mtime)
    return stamps[-1].parent / "llama.cpp" if stamps else None


def patched_upstream() -> Path:
    """Return the newest patched llama.cpp; without one the test lacks a build."""
    return newest_patched() or lacks("build", "no build has patched llama.cpp (build/*/upstream)")
