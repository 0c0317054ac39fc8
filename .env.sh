cd /tmp/wt7-memory; source .venv/bin/activate; export PATH=/tmp/wt7-memory/.venv/bin:/work/main/.venv/bin:$PATH CCACHE_DIR=/root/.cache/ccache LLAMA_CPP_LIB_PATH=/tmp/up/stock/bin
