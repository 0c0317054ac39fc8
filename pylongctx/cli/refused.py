"""Options of llama.cpp that are not supported, with the reason and the alternative."""

from typing import NamedTuple

from pylongctx.cli.arguments import Options

KEEP = "use --overflow evict_middle, which keeps the first tokens of a text, or n_keep in /completion of the server"
DOWNLOAD = "give a file, a name that pylongctx get lists, or -hf user/name"
PICTURES = "only text input is supported"
CORES = "the operating system schedules threads, and idle threads sleep: use -t, -tb, taskset and nice"
VECTORS = "control vectors are not supported; LoRA adapters are: --lora"
DRAFT = "the draft model runs like the model, with its own -td, -ngld and KV cache types; its file is -md FILE"
LOOKUP = "--spec-type ngram-cache reads no files: it counts the tokens of each text"
SIZES = "use --spec-ngram-simple-size-n and the like"
SYNTHETIC = "acceptance is measured, never simulated"
MESSAGES = "log messages are lines on stderr; redirect them with 2> FILE"
FITTING = "--preflight checks against the free memory; --kv-limit leaves memory free"
CHECKPOINTS = "each sequence keeps up to 16 checkpoints automatically, if its model needs them to rewind"
KEPT = "--kv-store keeps cached prefixes on disk; idle sequences keep their KV cache"
UNIFIED = "each of the -np sequences has -c tokens and allocates pages as it grows; --kv-limit bounds their sum"
AGENT = "the chat page has no tools; clients send tools in requests"
PAGES = "pages of --cors-origins may use all methods and headers of the routes"
REUSE = (
    "KV entries computed after another prefix are reused only on request: documents with "
    "--method full,spans=N, or --overflow evict_middle"
)


class Refused(NamedTuple):
    """An option: its names, the reason, its variable, and the values that request the existing behavior."""

    names: str
    reason: str
    variable: str | None = None
    but: tuple[str, ...] = ()


REFUSED = (
    Refused("--keep", KEEP, but=("0",)),
    Refused("-bs --backend-sampling", "tokens are chosen on the CPU", "LLAMA_ARG_BACKEND_SAMPLING"),
    Refused("--ignore-eos", "forbid the end token with -l TOKEN-100; requests have ignore_eos"),
    Refused("-hft --hf-token", "set the variable HF_TOKEN, or run hf auth login"),
    Refused("-mu --model-url", DOWNLOAD, "LLAMA_ARG_MODEL_URL"),
    Refused("-dr --docker-repo", DOWNLOAD, "LLAMA_ARG_DOCKER_REPO"),
    Refused("-cl --cache-list", "pylongctx get lists downloaded models"),
    Refused("--completion-bash", "pylongctx completion bash prints the script"),
    Refused("-mm --mmproj", PICTURES, "LLAMA_ARG_MMPROJ"),
    Refused("-mmu --mmproj-url", PICTURES, "LLAMA_ARG_MMPROJ_URL"),
    Refused("--mmproj-auto", PICTURES, "LLAMA_ARG_MMPROJ_AUTO"),
    Refused("--mmproj-offload", PICTURES, "LLAMA_ARG_MMPROJ_OFFLOAD"),
    Refused("-mmdev --mmproj-device", PICTURES, "MTMD_BACKEND_DEVICE"),
    Refused("--image --audio --video", PICTURES),
    Refused("--image-min-tokens", PICTURES, "LLAMA_ARG_IMAGE_MIN_TOKENS"),
    Refused("--image-max-tokens", PICTURES, "LLAMA_ARG_IMAGE_MAX_TOKENS"),
    Refused("--mtmd-batch-max-tokens", PICTURES, "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    Refused("--video-fps", PICTURES, "LLAMA_ARG_VIDEO_FPS"),
    Refused("--video-timestamp-interval", PICTURES, "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    Refused("--video-ffmpeg-dir", PICTURES, "LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    Refused("-dev --device", "choose devices with CUDA_VISIBLE_DEVICES, -ts, -sm and -mg", "LLAMA_ARG_DEVICE"),
    Refused("--list-devices", "pylongctx rpc-server --list-devices shows them"),
    Refused("-nr --no-repack", "--deterministic keeps weights in the layout of the file"),
    Refused("--no-host", "-ot PATTERN=CPU chooses the weights that stay in host memory", "LLAMA_ARG_NO_HOST"),
    Refused(
        "-lzm --lazy-mode", "tensors above 4 GiB are loaded on demand, others are not", "LLAMA_ARG_LAZY_MODE", ("auto",)
    ),
    Refused("-fitt --fit-target", FITTING, "LLAMA_ARG_FIT_TARGET"),
    Refused("-fitc --fit-ctx", FITTING, "LLAMA_ARG_FIT_CTX"),
    Refused("--check-tensors", "evaluation raises an error when logits are not finite"),
    Refused("-C --cpu-mask", CORES),
    Refused("-Cr --cpu-range", CORES),
    Refused("--cpu-strict", CORES, but=("0",)),
    Refused("--prio", CORES, but=("0",)),
    Refused("--poll", CORES, but=("0",)),
    Refused("-Cb --cpu-mask-batch", CORES),
    Refused("-Crb --cpu-range-batch", CORES),
    Refused("--cpu-strict-batch", CORES, but=("0",)),
    Refused("--prio-batch", CORES, but=("0",)),
    Refused("--poll-batch", CORES, but=("0",)),
    Refused("--numa", "use numactl", "LLAMA_ARG_NUMA"),
    Refused("--control-vector", VECTORS),
    Refused("--control-vector-scaled", VECTORS),
    Refused("--control-vector-layer-range", VECTORS),
    Refused("-hfd -hfrd --hf-repo-draft --spec-draft-hf", DRAFT, "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    Refused("--draft --draft-n --draft-max", "use --spec-draft-n-max", "LLAMA_ARG_DRAFT_MAX", ("0",)),
    Refused("--draft-min --draft-n-min", "use --spec-draft-n-min", "LLAMA_ARG_DRAFT_MIN", ("0",)),
    Refused("--spec-draft-cpu-mask -Cd --cpu-mask-draft", DRAFT),
    Refused("--spec-draft-cpu-range -Crd --cpu-range-draft", DRAFT),
    Refused("--spec-draft-cpu-strict --cpu-strict-draft", DRAFT),
    Refused("--spec-draft-prio --prio-draft", DRAFT),
    Refused("--spec-draft-poll --poll-draft", DRAFT),
    Refused("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", DRAFT),
    Refused("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", DRAFT),
    Refused("--spec-draft-prio-batch --prio-batch-draft", DRAFT),
    Refused("--spec-draft-poll-batch --poll-batch-draft", DRAFT),
    Refused("--spec-draft-override-tensor -otd --override-tensor-draft", DRAFT),
    Refused("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", DRAFT, "LLAMA_ARG_SPEC_DRAFT_CPU_MOE"),
    Refused(
        "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft", DRAFT, "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE"
    ),
    Refused("--spec-synth-len", SYNTHETIC, "LLAMA_ARG_SPEC_SYNTH_LEN"),
    Refused("--spec-synth-rates", SYNTHETIC, "LLAMA_ARG_SPEC_SYNTH_RATES"),
    Refused("--spec-draft-p-split --draft-p-split", DRAFT, "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    Refused("--spec-draft-backend-sampling", DRAFT, "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"),
    Refused("--spec-draft-device -devd --device-draft", DRAFT),
    *(Refused(f"--spec-ngram-{name}", SIZES) for name in ("size-n", "size-m", "min-hits")),
    Refused("-lcs --lookup-cache-static", LOOKUP),
    Refused("-lcd --lookup-cache-dynamic", LOOKUP),
    Refused("--prompt-cache", "pylongctx chat keeps conversations with /save and /load"),
    Refused("-cnv --conversation -i --interactive", "use pylongctx chat for conversations"),
    Refused("-no-cnv --no-conversation", "use pylongctx complete for prompts without a template"),
    Refused("--perf", "every answer of the server has its timings; pylongctx bench measures"),
    Refused("--log-file", MESSAGES, "LLAMA_ARG_LOG_FILE"),
    Refused("--log-jsonl", MESSAGES, "LLAMA_ARG_LOG_JSONL"),
    Refused("--log-colors", "messages have no colors", "LLAMA_ARG_LOG_COLORS", ("off", "auto")),
    Refused("--log-prefix", MESSAGES, "LLAMA_ARG_LOG_PREFIX"),
    Refused("--log-timestamps", MESSAGES, "LLAMA_ARG_LOG_TIMESTAMPS"),
    Refused("-kvu --kv-unified", UNIFIED, "LLAMA_ARG_KV_UNIFIED"),
    Refused("--kv-unified-per-slot", UNIFIED, "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    Refused("-ctxcp --ctx-checkpoints --swa-checkpoints", CHECKPOINTS, "LLAMA_ARG_CTX_CHECKPOINTS"),
    Refused("-cms --checkpoint-min-step", CHECKPOINTS, "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    Refused("-cram --cache-ram", KEPT, "LLAMA_ARG_CACHE_RAM", ("0",)),
    Refused("--cache-idle-slots", KEPT, "LLAMA_ARG_CACHE_IDLE_SLOTS"),
    Refused("-sp --special", "control tokens are not part of the text; /completion returns them in tokens"),
    Refused("--warmup", "there is no warmup run"),
    *(
        Refused(f"--{name}", DOWNLOAD)
        for name in (
            *("embd-gemma-default", "fim-qwen-1.5b-default", "fim-qwen-3b-default", "fim-qwen-7b-default"),
            *("fim-qwen-7b-spec", "fim-qwen-14b-spec", "fim-qwen-30b-default", "gpt-oss-20b-default"),
            *("gpt-oss-120b-default", "vision-gemma-4b-default", "vision-gemma-12b-default"),
        )
    ),
)

SERVER = (
    Refused("-nocb --no-cont-batching", "batching is always continuous; -np 1 answers requests one after the other"),
    Refused("--cache-reuse", REUSE, "LLAMA_ARG_CACHE_REUSE", ("0",)),
    Refused("--embd-normalize", "the embeddings of /v1/embeddings always have L2 norm 1", but=("2",)),
    Refused("--cors-methods", PAGES, "LLAMA_ARG_CORS_METHODS"),
    Refused("--cors-headers", PAGES, "LLAMA_ARG_CORS_HEADERS"),
    Refused("--cors-credentials", "keys are sent in headers, never in cookies", "LLAMA_ARG_CORS_CREDENTIALS"),
    Refused("--ui-config --webui-config", "the chat page keeps its settings in the browser", "LLAMA_ARG_UI_CONFIG"),
    Refused(
        "--ui-config-file --webui-config-file",
        "the chat page keeps its settings in the browser",
        "LLAMA_ARG_UI_CONFIG_FILE",
    ),
    Refused("--ui-mcp-proxy --webui-mcp-proxy", AGENT, "LLAMA_ARG_UI_MCP_PROXY"),
    Refused("--tools", AGENT, "LLAMA_ARG_TOOLS"),
    Refused("--tools-runtime", AGENT, "LLAMA_ARG_TOOLS_RUNTIME"),
    Refused("--mcp-servers-config", AGENT, "LLAMA_ARG_MCP_SERVERS_CONFIG"),
    Refused("--mcp-servers-json", AGENT, "LLAMA_ARG_MCP_SERVERS_JSON"),
    Refused("-ag --agent", AGENT, "LLAMA_ARG_AGENT"),
    Refused(
        "--threads-http", "one thread reads requests, and each running request has its own", "LLAMA_ARG_THREADS_HTTP"
    ),
    Refused("--media-path", PICTURES),
    Refused(
        "--models-preset",
        "--models takes folders and files; all models share the options of the server",
        "LLAMA_ARG_MODELS_PRESET",
    ),
    Refused(
        "--reasoning-budget",
        "reasoning is not counted separately: -n bounds the answer; for 0 use --reasoning off",
        "LLAMA_ARG_THINK_BUDGET",
        ("-1",),
    ),
    Refused("--reasoning-budget-message", "there is no reasoning budget", "LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    Refused("--no-reasoning-preserve", "templates receive the client's reasoning_content: leave it out of requests"),
    Refused(
        "--skip-chat-parsing",
        "--reasoning-format none leaves reasoning in the text; calls are parsed only if a request has tools",
        "LLAMA_ARG_SKIP_CHAT_PARSING",
    ),
    Refused("-sps --slot-prompt-similarity", "a request always takes the sequence with its longest cached prefix"),
    Refused("--lora-init-without-apply", "adapters of the server are applied from the start"),
    Refused(
        "--sleep-idle-seconds", "a single model stays loaded; --models with --models-max unloads models", but=("-1",)
    ),
    Refused("--log-prompts-dir", "verbose in a request returns its prompt; --kv-store keeps the first words of texts"),
)

# default behavior of pylongctx
ACCEPTED = (
    *("--no-warmup", "--no-perf", "--log-disable", "--simple-io", "--repack", "--no-mmproj", "--no-mmproj-auto"),
    *("--no-mmproj-offload", "--no-log-jsonl", "--no-log-prefix", "--no-log-timestamps", "-no-kvu", "--no-kv-unified"),
    *("--no-cache-idle-slots", "--no-spec-draft-backend-sampling"),
)
ACCEPTED_SERVER = (
    *("--metrics", "--props", "-cb", "--cont-batching", "--no-cors-credentials", "--no-ui-mcp-proxy"),
    *("--no-webui-mcp-proxy", "-no-ag", "--no-agent", "--reasoning-preserve", "--no-skip-chat-parsing"),
)
# options with a value that have no effect in llama.cpp either
WITHOUT_EFFECT = ("-dt", "--defrag-thold")


def refuse_options(options: Options) -> None:
    """Refuse these options with their reasons, and accept those that request the existing behavior."""
    _refuse(options, REFUSED, ACCEPTED)
    options.accept(*WITHOUT_EFFECT, value=True)


def refuse_server_options(options: Options) -> None:
    """Do the same for the additional options of llama-server."""
    _refuse(options, SERVER, ACCEPTED_SERVER)


def _refuse(options: Options, refused: tuple[Refused, ...], accepted: tuple[str, ...]) -> None:
    for one in refused:
        options.refuse(*one.names.split(), env=one.variable, reason=one.reason, but=one.but)
    for name in accepted:
        options.accept(name)
