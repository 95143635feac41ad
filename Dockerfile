# `pipespec serve` in a container, for CPUs or for NVIDIA GPUs:
#
#   docker build --tag pipespec:0.1.0 .
#   docker build --tag pipespec:0.1.0-cuda --build-arg DEVICE=cuda .
#   docker run --init --publish 127.0.0.1:8000:8000 pipespec:0.1.0
#
# compose.yaml adds an API key, Prometheus and Grafana.
ARG DEVICE=cpu

FROM python:3.11.13-slim-bookworm AS base-cpu
ENV TORCH_INDEX=https://download.pytorch.org/whl/cpu

# torch's wheels bring CUDA's libraries. The driver is the host's: NVIDIA's container toolkit mounts
# what the two variables name. Triton compiles the launchers of its kernels with a C compiler.
FROM python:3.11.13-slim-bookworm AS base-cuda
ENV TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM base-${DEVICE} AS build
WORKDIR /src
RUN python -m venv /opt/pipespec
# torch first and by itself: it decides its own CUDA packages, and is a layer that code does not
# change.
COPY constraints.txt ./
RUN /opt/pipespec/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" \
    "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY benchmarks/data benchmarks/data
COPY conf conf
COPY demo demo
COPY lua lua
COPY pipespec pipespec
RUN /opt/pipespec/bin/pip install --no-cache-dir --constraint constraints.txt '.[grammar,serve]'

FROM base-${DEVICE}
RUN useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/pipespec pipespec
COPY --from=build /opt/pipespec /opt/pipespec
ENV PATH=/opt/pipespec/bin:$PATH
USER pipespec
WORKDIR /var/lib/pipespec
EXPOSE 8000
# 503 while the cluster loads its models.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["pipespec"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
