# Tidemill on Ascend NPUs. Build from the repository: docker build -f docker/ascend.Dockerfile -t tidemill:ascend .
# Run it with the host's driver and devices:
#   docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#     -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro \
#     -v "$PWD:/home/tidemill" tidemill:ascend train RECIPE
ARG CANN=9.1.0-910b-ubuntu22.04-py3.12
FROM quay.io/ascend/cann:${CANN}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git openssh-client \
    && rm -rf /var/lib/apt/lists/*

# torch_npu names the torch that it is built for; both are of one release.
ARG TORCH=2.12.0
RUN pip install "torch==${TORCH}" "torch-npu==${TORCH}"

COPY . /opt/tidemill
RUN pip install "/opt/tidemill[all]"

RUN useradd --create-home --uid 1000 --groups HwHiAiUser tidemill \
    || useradd --create-home --uid 1000 tidemill
USER 1000
WORKDIR /home/tidemill
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec tidemill \"$@\"", "tidemill"]
CMD ["--help"]
