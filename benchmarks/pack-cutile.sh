#!/usr/bin/env bash
# Packs cuTile's compiler from the installed packages of `cuda-tile[tileiras]`, for a machine that cannot install them:
# four files of 220 MB become one archive of 53 MiB (some minutes). Usage: benchmarks/pack-cutile.sh FOLDER [PYTHON]
#
# There, with the wheel of cuda-tile for its Python in the same folder:
#   tar -xJf FOLDER/cutile.tar.xz -C /tmp && python3 -m zipfile -e FOLDER/cuda_tile-*.whl /tmp/cutile/python
#   export PATH=/tmp/cutile/bin:$PATH LD_LIBRARY_PATH=/tmp/cutile/lib:${LD_LIBRARY_PATH-} PYTHONPATH=.:/tmp/cutile/python
set -euo pipefail
folder=${1:?folder}
python=${2:-.venv/bin/python}
root=$("$python" -c "import nvidia.cu13; print(nvidia.cu13.__path__[0])")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder" "$work"/cutile/{bin,lib,nvvm/libdevice}
cp "$root"/bin/{tileiras,ptxas} "$work/cutile/bin/"
cp "$root/lib/libnvvm.so.4" "$work/cutile/lib/"
cp "$root/nvvm/libdevice/libdevice.10.bc" "$work/cutile/nvvm/libdevice/"
strip -s "$work"/cutile/bin/* "$work/cutile/lib/libnvvm.so.4"
tar --sort=name --owner=0 --group=0 -C "$work" -cf - cutile |
    xz --x86 --lzma2=preset=9e,dict=256MiB,lc=4,lp=0,pb=0 -c >"$folder/cutile.tar.xz"
ls -l "$folder"
