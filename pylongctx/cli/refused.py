"""Options of llama.cpp that are not here, with the reason and the way out."""

from pylongctx.cli.arguments import Options

KEEP = "with --overflow evict_middle the first tokens of a text stay; /completion of the server has n_keep"
DOWNLOAD = "models are files, or names that pylongctx get lists; Llama.from_pretrained in Python fetches others"
PICTURES = "models read text only"
TENSORS = "whole layers go to devices: -ngl, -ts, -sm"
CORES = "threads are placed by the system: use -t, -tb and taskset"
VECTORS = "control vectors are not supported; LoRA adapters are: --lora"
DRAFT = "there is no second model that drafts; Llama(draft_model=...) guesses from the text"

# names, variable, reason
REFUSED: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (("--keep",), None, KEEP),
    (("-bs", "--backend-sampling"), "LLAMA_ARG_BACKEND_SAMPLING", "tokens are chosen on the CPU"),
    (("--ignore-eos",), None, "forbid the model's end token with -l TOKEN-100"),
    (("--override-kv",), None, "edit the file with gguf-new-metadata"),
    (("-hf", "-hfr", "--hf-repo"), "LLAMA_ARG_HF_REPO", DOWNLOAD),
    (("-hff", "--hf-file"), "LLAMA_ARG_HF_FILE", DOWNLOAD),
    (("-mu", "--model-url"), "LLAMA_ARG_MODEL_URL", DOWNLOAD),
    (("-dr", "--docker-repo"), "LLAMA_ARG_DOCKER_REPO", DOWNLOAD),
    (("-mm", "--mmproj"), "LLAMA_ARG_MMPROJ", PICTURES),
    (("-mmu", "--mmproj-url"), "LLAMA_ARG_MMPROJ_URL", PICTURES),
    (("--image", "--audio", "--video"), None, PICTURES),
    (("-ot", "--override-tensor"), "LLAMA_ARG_OVERRIDE_TENSOR", TENSORS),
    (("-cmoe", "--cpu-moe"), "LLAMA_ARG_CPU_MOE", TENSORS),
    (("-ncmoe", "--n-cpu-moe"), "LLAMA_ARG_N_CPU_MOE", TENSORS),
    (("-dev", "--device"), "LLAMA_ARG_DEVICE", "choose devices with CUDA_VISIBLE_DEVICES, -ts, -sm and -mg"),
    (("--list-devices",), None, "pylongctx rpc-server --list-devices shows them"),
    (("-C", "--cpu-mask"), None, CORES),
    (("-Cr", "--cpu-range"), None, CORES),
    (("--numa",), "LLAMA_ARG_NUMA", "use numactl"),
    (("--control-vector",), None, VECTORS),
    (("--control-vector-scaled",), None, VECTORS),
    (("-md", "--model-draft", "--spec-draft-model"), "LLAMA_ARG_SPEC_DRAFT_MODEL", DRAFT),
    (("--spec-type",), "LLAMA_ARG_SPEC_TYPE", DRAFT),
    (("--draft", "--draft-n", "--draft-max"), "LLAMA_ARG_DRAFT_MAX", DRAFT),
    (("--prompt-cache",), None, "pylongctx chat keeps conversations with /save and /load"),
    (("-cnv", "--conversation", "-i", "--interactive"), None, "conversations are pylongctx chat"),
    (("-no-cnv", "--no-conversation"), None, "prompts without a template are pylongctx complete"),
)

# what pylongctx does anyway
ACCEPTED = ("--no-warmup", "--no-perf", "--log-disable", "--simple-io")


def refuse_options(options: Options) -> None:
    """Let these options be refused with their reasons, and accept those that ask for what is done anyway."""
    for names, variable, reason in REFUSED:
        options.refuse(*names, env=variable, reason=reason)
    for name in ACCEPTED:
        options.accept(name)
