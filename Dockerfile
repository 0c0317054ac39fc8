# The server in a container: docker build -t pylongctx . && docker run -p 127.0.0.1:8080:8080 -v models:/models pylongctx

# the wheel for every CPU of this architecture, as make wheel packs it
FROM python:3.12-slim-bookworm AS build
# any version of these will do
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel

FROM python:3.12-slim-bookworm
RUN --mount=type=bind,from=build,source=/src/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/pylongctx-*.whl)[server]" \
    && useradd --create-home --uid 1000 pylongctx \
    && install --directory --owner pylongctx --group pylongctx --mode 700 /models
# model files are named from here; models that are fetched by name go to /models/models
ENV LCTX_CACHE=/models
WORKDIR /models
VOLUME /models
USER 1000
EXPOSE 8080
# without a key: the route needs none
HEALTHCHECK --interval=30s --timeout=10s --start-period=300s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["pylongctx", "serve", "--host", "0.0.0.0", "--port", "8080"]
CMD ["smollm2-135m", "--method", "longheads", "-c", "16384"]
