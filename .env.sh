cd /tmp/wt7-int; source .venv/bin/activate; export PATH=/tmp/wt7-int/.venv/bin:/work/main/.venv/bin:$PATH CCACHE_DIR=/root/.cache/ccache LLAMA_CPP_LIB_PATH=/tmp/up/stock/bin
