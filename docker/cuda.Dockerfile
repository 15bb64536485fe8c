# Tidemill on NVIDIA GPUs. Build from the repository: docker build -f docker/cuda.Dockerfile -t tidemill:cuda .
# Run: docker run --gpus all --ipc=host -v "$PWD:/home/tidemill" tidemill:cuda train RECIPE
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH

# Triton compiles kernels at run time, so a compiler and Python's headers are here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

ARG TORCH=2.11.0
RUN pip install "torch==${TORCH}" --index-url https://download.pytorch.org/whl/cu129

COPY . /opt/tidemill
RUN pip install "/opt/tidemill[all]"

RUN (userdel --remove ubuntu || true) && useradd --create-home --uid 1000 tidemill
USER 1000
WORKDIR /home/tidemill
ENTRYPOINT ["tidemill"]
CMD ["--help"]
