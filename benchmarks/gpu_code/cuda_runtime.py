"""Libraries in the place of CUDA's runtime and cuBLAS, with which ONNX Runtime's CUDA provider opens sessions anywhere.

The provider links to them. Here every function reports success and does nothing, and memory of the device is the
host's. So the provider says which nodes it takes, copies weights, plans its memory and creates its kernels, but what it
computes is not defined. The libraries are made from the names that the provider's own file asks for.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

HEAD = """\
#include <stdlib.h>
#include <string.h>
/* What a caller takes for a handle, a stream or an event. */
static char handle[65536];
"""
FUNCTIONS = """\
int cudaMalloc(void **p, size_t n) { *p = malloc(n ? n : 1); return 0; }
int cudaMallocHost(void **p, size_t n) { *p = malloc(n ? n : 1); return 0; }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { *p = malloc(n ? n : 1); return 0; }
int cudaFree(void *p) { free(p); return 0; }
int cudaFreeHost(void *p) { free(p); return 0; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { memcpy(to, from, n); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) { memcpy(to, from, n); return 0; }
int cudaMemset(void *p, int value, size_t n) { memset(p, value, n); return 0; }
int cudaMemsetAsync(void *p, int value, size_t n, void *stream) { memset(p, value, n); return 0; }
int cudaMemGetInfo(size_t *free, size_t *all) { *free = *all = (size_t)1 << 36; return 0; }
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *n) { *n = 0; return 0; }
int cudaDriverGetVersion(int *n) { *n = 13000; return 0; }
int cudaRuntimeGetVersion(int *n) { *n = 13000; return 0; }
int cudaDeviceGetAttribute(int *n, int what, int device) { *n = ATTRIBUTES; return 0; }
void **__cudaRegisterFatBinary(void *binary) { return (void **)handle; }
"""
ATTRIBUTES = {1: 1024, 10: 32, 16: 132, 75: 9}
"""Threads of a block, threads of a warp, multiprocessors and compute capability, as an H100 has them; others are 0."""
WRITES_A_HANDLE = (
    "cublasCreate_v2", "cublasLtCreate", "cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaEventCreate",
    "cudaEventCreateWithFlags",
)  # fmt: skip
RETURNS_TEXT = ("cudaGetErrorString", "cudaGetErrorName", "cublasGetStatusName", "cublasGetStatusString")
NAME = re.compile(r"(\w+)\(")
WRITTEN = {NAME.search(line)[1]: line for line in FUNCTIONS.splitlines()}  # type: ignore[index]  # All match.
DRIVER = "libcuda.so.1"


def make_libraries(provider: Path, folder: Path) -> list[Path]:
    """Compiles a library for each that `provider` asks for and that this system does not have, and returns their paths.

    Args:
        provider: libonnxruntime_providers_cuda.so.
        folder: where the libraries are put; a process finds them through LD_LIBRARY_PATH.

    Raises:
        subprocess.CalledProcessError: readelf, nm or gcc failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for library, names in _asked_for(provider).items():
        source, versions = folder / f"{library}.c", folder / f"{library}.map"
        source.write_text(HEAD + "\n".join(_function(name) for name in sorted(names)) + "\n", encoding="utf-8")
        # Names carry the version of their library, except those of the driver.
        tag = "" if library == DRIVER else f"{library} "
        versions.write_text(f"{tag}{{ global: *; }};\n", encoding="utf-8")
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
        subprocess.run([*command, "-o", str(folder / library), str(source)], check=True)
        made.append(folder / library)
    return made


def _function(name: str) -> str:
    if name in WRITTEN:
        value = " : ".join(f"what == {number} ? {value}" for number, value in ATTRIBUTES.items())
        return WRITTEN[name].replace("ATTRIBUTES", f"{value} : 0")
    if name in WRITES_A_HANDLE:
        return f"int {name}(void **p) {{ *p = handle; return 0; }}"
    if name in RETURNS_TEXT:
        return f'const char *{name}(int status) {{ return "no CUDA is here"; }}'
    return f"int {name}() {{ return 0; }}"


def _asked_for(provider: Path) -> dict[str, set[str]]:
    """Returns library -> names of its functions, for the libraries of CUDA that a file links to."""
    dynamic = _lines("readelf", "--dynamic", "--wide", str(provider))
    needed = [line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line]
    asked: dict[str, set[str]] = {name: set() for name in needed if name.startswith(("libcu", "libnv"))}
    by_version: dict[str, set[str]] = defaultdict(set)
    for line in _lines("nm", "--dynamic", "--undefined-only", str(provider)):
        name, _, version = line.split()[-1].partition("@")
        if not version and name.startswith("cu"):
            version = DRIVER
        by_version[version].add(name)
    return {library: by_version[library] for library in asked}


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
