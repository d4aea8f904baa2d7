#!/bin/sh
# Builds llama-server for this machine's own processor, from the llama.cpp inside llama-cpp-python's source distribution:
# the same sources as the library that Paceline runs on, and like it without AMX. Ready-made builds leave out newer
# instructions, and are too easy an opponent.
#
#   sh build_llama_server.sh FOLDER       makes FOLDER/bin/llama-server; needs a C++ compiler, python3 with venv, PyPI
#
# About ten minutes on two cores. FOLDER/work (sources, objects, a virtual environment with cmake) may be removed then.
set -eu
VERSION=0.3.36

[ $# -eq 1 ] || { echo "usage: sh $0 FOLDER" >&2; exit 2; }
mkdir -p "$1/work" "$1/bin"
folder=$(cd "$1" && pwd)
cd "$folder/work"

[ -x venv/bin/ninja ] || { python3 -m venv venv && venv/bin/pip install --quiet cmake ninja scikit-build-core; }
PATH="$folder/work/venv/bin:$PATH"
archive="llama_cpp_python-$VERSION.tar.gz"
[ -f "$archive" ] || pip download --quiet --no-binary :all: --no-deps --no-build-isolation "llama-cpp-python==$VERSION"
[ -d "llama_cpp_python-$VERSION" ] || tar xzf "$archive"

# As `make install` compiles the library: older GCCs make illegal instructions of AMX code.
without=
if c++ -march=native -dM -E -x c++ /dev/null 2>/dev/null | grep -q __AMX_TILE__; then
    without="-mno-amx-tile -mno-amx-int8"
fi

# Nothing is fetched while it builds: no web page, and no HTTPS, for which it would look for OpenSSL.
cmake -S "llama_cpp_python-$VERSION/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DCMAKE_C_FLAGS="${CFLAGS:-} $without" -DCMAKE_CXX_FLAGS="${CXXFLAGS:-} $without" \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
nice cmake --build build --target llama-server -j "${JOBS:-2}"
cp build/bin/llama-server "$folder/bin/"
"$folder/bin/llama-server" --version
