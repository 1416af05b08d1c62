# infir2 on an NVIDIA GPU.   docker build -f docker/cuda.Dockerfile -t infir2:cuda .
#                            docker run --rm --gpus all --ipc host -v $PWD:/work infir2:cuda env check
# torch's own wheels carry the CUDA libraries; the host brings only the driver.
FROM python:3.11.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles a small C launcher the moment a kernel is used
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/infir2

COPY constraints.txt .
RUN pip install $(grep '^torch==' constraints.txt) -c constraints.txt

COPY pyproject.toml README.md LICENSE ./
COPY infir2_cli infir2_cli
COPY infir2_core infir2_core
COPY templates templates
RUN pip install . -c constraints.txt

WORKDIR /work
ENTRYPOINT ["infir2"]
