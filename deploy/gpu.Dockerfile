# syntax=docker/dockerfile:1
# An image in which `make gpu` runs: CUDA's compiler and headers, PyTorch and ONNX Runtime for GPUs, and this checkout.
#
#     docker build --file deploy/gpu.Dockerfile --tag mod-export-gpu .       # from the root of the checkout
#     docker run --rm --gpus all --volume "$PWD"/build/gpu:/mod-export/build/gpu mod-export-gpu
#
# Results are in build/gpu, and the page too (gpu.md); every run continues the last one. The image has about 15 GB.

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ make python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /mod-export
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY mod_export mod_export
COPY models models
COPY export_configs export_configs
COPY benchmarks benchmarks
# `make` sees no driver while an image is built, so it has to be told which ONNX Runtime to install.
RUN make demo-install PYTHON=python3.12 ORT=ort-gpu
CMD ["make", "gpu", "PYTHON=python3.12", "ORT=ort-gpu", "ARGS=--results build/gpu --docs build/gpu"]
