"""Options of llama.cpp that are not here, with the reason and the way out."""

from typing import NamedTuple

from pylongctx.cli.arguments import Options

KEEP = "with --overflow evict_middle the first tokens of a text stay; /completion of the server has n_keep"
DOWNLOAD = "models are files, names that pylongctx get lists, or -hf user/name"
PICTURES = "models read text only"
CORES = "threads are placed by the system, and sleep when nothing is to do: use -t, -tb, taskset and nice"
VECTORS = "control vectors are not supported; LoRA adapters are: --lora"
DRAFT = "there is no second model that drafts; Llama(draft_model=...) guesses from the text"
MESSAGES = "messages are lines on stderr, for the shell to keep: 2> FILE"
FITTING = "--preflight asks what fits, and takes what is free; --kv-limit keeps memory free"
CHECKPOINTS = "a sequence keeps up to 16 checkpoints by itself, where its model needs them to go back"
KEPT = "--kv-store keeps what was read, on disk; idle sequences keep theirs"
UNIFIED = "each of the -np sequences has -c tokens, and pages are taken as texts grow: --kv-limit bounds all of them"
AGENT = "the chat page has no tools; clients bring theirs in requests"
PAGES = "pages of --cors-origins may use every method and header that the routes have"
REUSE = (
    "rows that have read another text are taken over only where you say so: documents with "
    "--method full,spans=N, or --overflow evict_middle"
)


class Refused(NamedTuple):
    """An option: its names, why it is refused, its variable, and the values that ask for what is done anyway."""

    names: str
    reason: str
    variable: str | None = None
    but: tuple[str, ...] = ()


REFUSED = (
    Refused("--keep", KEEP, but=("0",)),
    Refused("-bs --backend-sampling", "tokens are chosen on the CPU", "LLAMA_ARG_BACKEND_SAMPLING"),
    Refused("--ignore-eos", "forbid the model's end token with -l TOKEN-100; requests have ignore_eos"),
    Refused("-hft --hf-token", "the variable HF_TOKEN and hf auth login are read"),
    Refused("-mu --model-url", DOWNLOAD, "LLAMA_ARG_MODEL_URL"),
    Refused("-dr --docker-repo", DOWNLOAD, "LLAMA_ARG_DOCKER_REPO"),
    Refused("-cl --cache-list", "pylongctx get lists the models that are here"),
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
    Refused("-nr --no-repack", "--deterministic keeps weights as they are in the file"),
    Refused("--no-host", "-ot PATTERN=CPU says which weights stay in memory of the host", "LLAMA_ARG_NO_HOST"),
    Refused(
        "-lzm --lazy-mode", "tables above 4 GiB are read on demand, others are not", "LLAMA_ARG_LAZY_MODE", ("auto",)
    ),
    Refused("-fitt --fit-target", FITTING, "LLAMA_ARG_FIT_TARGET"),
    Refused("-fitc --fit-ctx", FITTING, "LLAMA_ARG_FIT_CTX"),
    Refused("--check-tensors", "a weight that is no number is named by the token that it spoils"),
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
    Refused("-md --model-draft --spec-draft-model", DRAFT, "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    Refused("-hfd -hfrd --hf-repo-draft --spec-draft-hf", DRAFT, "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    Refused("--spec-type", DRAFT, "LLAMA_ARG_SPEC_TYPE", ("none",)),
    Refused("--spec-default", DRAFT),
    Refused("--draft --draft-n --draft-max", DRAFT, "LLAMA_ARG_DRAFT_MAX", ("0",)),
    Refused("--draft-min --draft-n-min", DRAFT, "LLAMA_ARG_DRAFT_MIN", ("0",)),
    Refused("--spec-draft-type-k -ctkd --cache-type-k-draft", DRAFT, "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"),
    Refused("--spec-draft-type-v -ctvd --cache-type-v-draft", DRAFT, "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"),
    Refused("--spec-draft-threads -td --threads-draft", DRAFT),
    Refused("--spec-draft-threads-batch -tbd --threads-batch-draft", DRAFT),
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
    Refused("--spec-draft-n-max", DRAFT, "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    Refused("--spec-draft-n-min", DRAFT, "LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    Refused("--spec-synth-len", DRAFT, "LLAMA_ARG_SPEC_SYNTH_LEN"),
    Refused("--spec-synth-rates", DRAFT, "LLAMA_ARG_SPEC_SYNTH_RATES"),
    Refused("--spec-draft-p-split --draft-p-split", DRAFT, "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    Refused("--spec-draft-p-min --draft-p-min", DRAFT, "LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    Refused("--spec-draft-backend-sampling", DRAFT, "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"),
    Refused("--spec-draft-device -devd --device-draft", DRAFT),
    Refused("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", DRAFT, "LLAMA_ARG_N_GPU_LAYERS_DRAFT"),
    *(Refused(f"--spec-ngram-{name}", DRAFT) for name in ("size-n", "size-m", "min-hits")),
    *(Refused(f"--spec-ngram-mod-{name}", DRAFT) for name in ("n-min", "n-max", "n-match")),
    *(
        Refused(f"--spec-ngram-{kind}-{name}", DRAFT)
        for kind in ("simple", "map-k", "map-k4v")
        for name in ("size-n", "size-m", "min-hits")
    ),
    Refused("-lcs --lookup-cache-static", DRAFT),
    Refused("-lcd --lookup-cache-dynamic", DRAFT),
    Refused("--prompt-cache", "pylongctx chat keeps conversations with /save and /load"),
    Refused("-cnv --conversation -i --interactive", "conversations are pylongctx chat"),
    Refused("-no-cnv --no-conversation", "prompts without a template are pylongctx complete"),
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
    Refused("-sp --special", "control tokens are no text of an answer; /completion has them in tokens"),
    Refused("--warmup", "nothing is evaluated before it is asked for"),
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
    Refused("-nocb --no-cont-batching", "sequences are evaluated together; -np 1 answers one request after the other"),
    Refused("--cache-reuse", REUSE, "LLAMA_ARG_CACHE_REUSE", ("0",)),
    Refused("--embd-normalize", "vectors of /v1/embeddings have length 1", but=("2",)),
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
    Refused("--threads-http", "one thread reads requests, and each that runs has one", "LLAMA_ARG_THREADS_HTTP"),
    Refused("--media-path", PICTURES),
    Refused(
        "--models-preset",
        "--models names folders and files; all have the options of the server",
        "LLAMA_ARG_MODELS_PRESET",
    ),
    Refused(
        "--reasoning-budget",
        "thoughts are not counted apart: -n bounds an answer; 0 is --reasoning off",
        "LLAMA_ARG_THINK_BUDGET",
        ("-1",),
    ),
    Refused("--reasoning-budget-message", "there is no budget of thoughts", "LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    Refused(
        "--no-reasoning-preserve", "a template gets reasoning_content as the client sends it: leave it out of requests"
    ),
    Refused(
        "--skip-chat-parsing",
        "--reasoning-format none leaves thoughts in the text; without tools in a request no call is read",
        "LLAMA_ARG_SKIP_CHAT_PARSING",
    ),
    Refused("-sps --slot-prompt-similarity", "a request takes the sequence that has most of its beginning"),
    Refused("--lora-init-without-apply", "adapters of the server are in use from its start"),
    Refused(
        "--sleep-idle-seconds", "a server of one model keeps it; --models with --models-max frees others", but=("-1",)
    ),
    Refused("--log-prompts-dir", "verbose in a request shows its prompt; --kv-store keeps the first words of texts"),
)

# what pylongctx does anyway
ACCEPTED = (
    *("--no-warmup", "--no-perf", "--log-disable", "--simple-io", "--repack", "--no-mmproj", "--no-mmproj-auto"),
    *("--no-mmproj-offload", "--no-log-jsonl", "--no-log-prefix", "--no-log-timestamps", "-no-kvu", "--no-kv-unified"),
    *("--no-cache-idle-slots", "--no-spec-draft-backend-sampling"),
)
ACCEPTED_SERVER = (
    *("--metrics", "--props", "-cb", "--cont-batching", "--no-cors-credentials", "--no-ui-mcp-proxy"),
    *("--no-webui-mcp-proxy", "-no-ag", "--no-agent", "--reasoning-preserve", "--no-skip-chat-parsing"),
)
# which have a value, and no effect in llama.cpp either
WITHOUT_EFFECT = ("-dt", "--defrag-thold")


def refuse_options(options: Options) -> None:
    """Let these options be refused with their reasons, and accept those that ask for what is done anyway."""
    _refuse(options, REFUSED, ACCEPTED)
    options.accept(*WITHOUT_EFFECT, value=True)


def refuse_server_options(options: Options) -> None:
    """Do the same with what llama-server has beside them."""
    _refuse(options, SERVER, ACCEPTED_SERVER)


def _refuse(options: Options, refused: tuple[Refused, ...], accepted: tuple[str, ...]) -> None:
    for one in refused:
        options.refuse(*one.names.split(), env=one.variable, reason=one.reason, but=one.but)
    for name in accepted:
        options.accept(name)
