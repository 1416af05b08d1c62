# infir2 on a CPU.   docker build -f docker/cpu.Dockerfile -t infir2:cpu .   docker run --rm infir2:cpu env check
FROM python:3.11.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/infir2

# torch alone is most of the image, so it is a layer of its own that a change of the code does not rebuild
COPY constraints.txt .
# --build-arg TORCH_INDEX=... : PyTorch's index of CPU wheels; without it torch brings its CUDA libraries along
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} $(grep '^torch==' constraints.txt) -c constraints.txt

COPY pyproject.toml README.md LICENSE ./
COPY infir2_cli infir2_cli
COPY infir2_core infir2_core
COPY templates templates
RUN pip install . -c constraints.txt

WORKDIR /work
ENTRYPOINT ["infir2"]
