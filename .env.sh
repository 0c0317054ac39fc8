cd /tmp/wt7-gpu; source .venv/bin/activate; export PATH=/tmp/wt7-gpu/.venv/bin:/work/main/.venv/bin:$PATH CCACHE_DIR=/root/.cache/ccache LLAMA_CPP_LIB_PATH=/tmp/up/stock/bin
