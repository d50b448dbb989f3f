#!/usr/bin/env python3
"""A vector addition and a reduction in a library of the Python world, for a program under `penstock run`:

  penstock run --sim -- python tests/apps/python_programs.py cupy|numba

The libraries are not installed by scripts/setup; docs/compatibility.md says which versions ran and how.
On the simulated GPU, which runs PTX alone, cupy is told to compile to PTX (CUPY_COMPILE_WITH_PTX=1, and
CUPY_ACCELERATORS= because its own reductions come as machine code and newer PTX), and numba's step to
machine code is left out here.
"""

import sys

import numpy as np

COUNT = 1000


def with_cupy():
    import cupy

    left, right = cupy.arange(COUNT, dtype=cupy.float32), cupy.full(COUNT, 2, dtype=cupy.float32)
    check("a sum of vectors", cupy.asnumpy(left + right), np.arange(COUNT, dtype=np.float32) + 2)
    check("a reduction", float((left * right).sum()), float(COUNT * (COUNT - 1)))
    kernel = cupy.RawKernel("extern \"C\" __global__ void add(const float* x, float* y, int n) {"
                            "int i = blockDim.x * blockIdx.x + threadIdx.x; if (i < n) y[i] += x[i]; }",
                            "add")
    kernel((8,), (128,), (left, right, np.int32(COUNT)))
    check("a kernel of one's own", cupy.asnumpy(right), np.arange(COUNT, dtype=np.float32) + 2)


def with_numba():
    from cuda.core import ObjectCode
    from numba import cuda
    from numba.cuda import codegen

    codegen.CUDACodeLibrary.get_cubin = lambda self, cc=None: ObjectCode.from_ptx(
        self.get_asm_str(cc=cc).encode() + b"\0")

    @cuda.jit
    def add(left, right, result):
        i = cuda.grid(1)
        if i < result.size:
            result[i] = left[i] + right[i]

    @cuda.jit
    def total(values, result):
        i = cuda.grid(1)
        if i < values.size:
            cuda.atomic.add(result, 0, values[i])

    left, right = np.arange(COUNT, dtype=np.float32), np.full(COUNT, 2, dtype=np.float32)
    result, summed = np.zeros_like(left), np.zeros(1, dtype=np.float32)
    add[8, 128](left, right, result)
    check("a sum of vectors", result, left + 2)
    total[8, 128](left, summed)
    check("a reduction", float(summed[0]), float(COUNT * (COUNT - 1) / 2))


def check(what, got, expected):
    if not np.array_equal(got, expected):
        sys.exit(f"{what}: ({got}) instead of ({expected})")
    print(f"{what}: right")


{"cupy": with_cupy, "numba": with_numba}[sys.argv[1]]()
