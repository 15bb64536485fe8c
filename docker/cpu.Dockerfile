# Tidemill on processors. Build from the repository: docker build -f docker/cpu.Dockerfile -t tidemill:cpu .
FROM python:3.12-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# A compiler: torch.compile and the sampling kernel of the processor use it at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=2.13.0
RUN pip install "torch==${TORCH}" --index-url https://download.pytorch.org/whl/cpu

COPY . /opt/tidemill
RUN pip install "/opt/tidemill[all]" \
    && useradd --create-home --uid 1000 tidemill
USER 1000
WORKDIR /home/tidemill
ENTRYPOINT ["tidemill"]
CMD ["--help"]
