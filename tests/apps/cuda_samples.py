#!/usr/bin/env python3
"""Builds programs of NVIDIA's cuda-samples and runs each directly on the simulated GPU, through tcp and
through shared memory, and prints what came out as a table for docs/compatibility.md.

  tests/apps/cuda_samples.py CHECKOUT WORK [NAME...]

CHECKOUT is a checkout of github.com/NVIDIA/cuda-samples, which stays as it is; WORK gets copies of its
folders and what is built. A program is right where it ends with status 0 and, but for lines with times
in them, prints the same as directly; what it prints otherwise is counted (a device says of itself what
is not served yet). Not part of the tests: the sources are not ours.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

BUILD = Path(os.environ.get("PENSTOCK_BUILD", Path(__file__).resolve().parents[2] / "build"))

# name: (arguments, replacements in sources, kernels that are compiled to a fat binary beside
# it). A vector-wide interpreter is slow, so sizes and repetitions are cut, never what is computed.
SAMPLES = {
    "vectorAdd": ([], [], []),
    "vectorAddDrv": ([], [], ["vectorAdd_kernel"]),
    "matrixMul": ([], [("int nIter = 300", "int nIter = 3")], []),
    "matrixMulDrv": ([], [], ["matrixMul_kernel"]),
    "simpleStreams": ([], [("16 * 1024 * 1024", "256 * 1024")], []),
    "asyncAPI": ([], [("16 * 1024 * 1024", "1024 * 1024")], []),
    "simpleCallback": ([], [], []),
    "simpleAtomicIntrinsics": ([], [], []),
    "deviceQuery": ([], [], []),
    "deviceQueryDrv": ([], [], []),
    "simplePrintf": ([], [], []),
    "simpleAssert": ([], [], []),
    "clock": ([], [], []),
    "fp16ScalarProduct": ([], [], []),
    "simpleTemplates": ([], [], []),
    "simpleMultiCopy": ([], [("1 << 22", "1 << 18")], []),
    "simpleMultiGPU": ([], [("1048576 * 32", "1048576")], []),
    "simpleOccupancy": ([], [], []),
    "simpleVoteIntrinsics": ([], [], []),
    "simpleCooperativeGroups": ([], [], []),
    "simplePitchLinearTexture": ([], [], []),
    "simpleTexture": ([], [], []),
    "simpleSurfaceWrite": ([], [], []),
    "simpleZeroCopy": ([], [], []),
    "simpleP2P": ([], [], []),
    "simpleDrvRuntime": ([], [], ["vectorAdd_kernel"]),
    "simpleHyperQ": ([], [], []),
    "mergeSort": ([], [("4 * 1048576", "64 * 1024")], []),
    "inlinePTX": ([], [], []),
    "reduction": (["--n=65536"], [("testIterations = 100", "testIterations = 2")], []),
    "shfl_scan": ([], [], []),
    "sortingNetworks": ([], [("1048576", "16384"), ("numIterations = 1", "numIterations = 1")], []),
    "threadFenceReduction": (["--n=65536"], [("testIterations = 100", "testIterations = 2")], []),
    "histogram": ([], [("64 * 1048576", "1048576"), ("numRuns     = 16", "numRuns     = 1")], []),
    "dct8x8": ([], [], []),
    "radixSortThrust": (["-n=65536"], [], []),
    "reductionMultiBlockCG": ([], [("1 << 25", "1 << 18")], []),
    "ptxjit": ([], [], ["ptxjit_kernel"]),
    "simpleCudaGraphs": ([], [], []),
    "StreamPriorities": ([], [], []),
    "transpose": ([], [("NUM_REPS   100", "NUM_REPS   2"), ("NUM_REPS 100", "NUM_REPS 2")], []),
    "alignedTypes": ([], [("50000000", "500000"), ("NUM_ITERATIONS 32", "NUM_ITERATIONS 1")], []),
}
LIMIT_S = 300
TIMES = re.compile(r"(\d\.\d+ *(ms|msec|s|sec|GB/s|GFlop/s|MB/s|MElements/s))|[Tt]ime|[Tt]hroughput|GB/s|"
                   r"GFlop|[Bb]andwidth|elapsed|clock|msec|iterations|memcopy|kernel:|streamed|0x[0-9a-f]+|[Rr]andom|seed", re.A)


def build(name, checkout, work):
    _, changes, kernels = SAMPLES[name]
    source, target = next(checkout.glob(f"Samples/*/{name}"), None), work / name
    if source is None:
        return "not in this checkout"
    if (target / name).exists():
        return ""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for path in [*target.rglob("*.cu"), *target.rglob("*.cpp"), *target.rglob("*.cuh"),
                 *target.rglob("*.h")]:
        text = path.read_text(encoding="utf-8", errors="replace")
        for old, new in changes:
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    flags = ["-O2", "-std=c++17", "-I", checkout / "Common", "-I", target, "-arch=compute_75", "-w"]
    sources = [path for path in sorted([*target.glob("*.cu"), *target.glob("*.cpp")])
               if path.stem not in kernels]
    commands = [["nvcc", *flags, "-o", target / name, *sources, "-lcuda"]]
    for kernel in kernels:
        for kind in ("fatbin", "ptx"):
            commands.append(["nvcc", f"-{kind}", "-I", checkout / "Common", "-arch=compute_75", "-o",
                             target / f"{kernel}64.{kind}", target / f"{kernel}.cu"])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1][:120]
    return ""


def run(name, work, environment):
    began = time.monotonic()
    try:
        done = subprocess.run([f"./{name}", *SAMPLES[name][0]], cwd=work / name, env=environment,
                              capture_output=True, text=True, errors="replace", timeout=LIMIT_S,
                              check=False)
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = None, "", f"not done after {LIMIT_S} s"
    return status, out, err, time.monotonic() - began


def verdict(outcome, direct):
    status, out, err, seconds = outcome
    if status is None:
        return err
    if status != direct[0]:
        unserved = re.findall(r"(cu\w+) is not supported", err)
        return f"status {status}" + (f", {unserved[0]}" if unserved else "")
    keep = lambda text: [line for line in text.splitlines() if not TIMES.search(line)]
    here, there = keep(out), keep(direct[1])
    others = len([line for line in here if line not in there])
    text = f"right ({seconds:.1f} s)" if status == 0 else "the same"
    return text + (f", {others} other lines" if others else ", other order" if here != there else "")


def main():
    checkout, work, names = Path(sys.argv[1]), Path(sys.argv[2]).resolve(), sys.argv[3:]
    work.mkdir(parents=True, exist_ok=True)
    port_file = work / "port"
    port_file.unlink(missing_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    daemon = subprocess.Popen([BUILD / "bin/penstockd", "--listen", "127.0.0.1:0", "--driver", "sim",
                               "--port-file", port_file, "--parent-pid-dies"], env=clean,
                              stderr=open(work / "daemon.log", "w", encoding="utf-8"))
    while not port_file.exists():
        time.sleep(0.05)
    remote = {**clean, "LD_PRELOAD": str(BUILD / "lib/penstock/libcuda.so.1"),
              "PENSTOCK_SERVER": f"127.0.0.1:{port_file.read_text().strip()}", "PENSTOCK_LOG": "info"}
    routes = {"directly": {**clean, "LD_LIBRARY_PATH": str(BUILD / "lib/penstock/simgpu")},
              "tcp": {**remote, "PENSTOCK_TRANSPORT": "tcp"},
              "shm": {**remote, "PENSTOCK_TRANSPORT": "shm"}}
    print("| program | directly on the simulated GPU | through tcp | through shared memory |\n"
          "|---|---|---|---|", flush=True)
    try:
        for name in names or SAMPLES:
            trouble = build(name, checkout, work)
            if trouble:
                print(f"| {name} | not built: {trouble} | | |", flush=True)
                continue
            outcomes = {route: run(name, work, env) for route, env in routes.items()}
            direct = outcomes["directly"]
            for route, outcome in outcomes.items():
                (work / name / f"{route}.txt").write_text(outcome[1] + "\n---- stderr\n" + outcome[2])
            first = f"right ({direct[3]:.1f} s)" if direct[0] == 0 else \
                f"status {direct[0]}" if direct[0] is not None else direct[2]
            print(f"| {name} | {first} | {verdict(outcomes['tcp'], direct)} | "
                  f"{verdict(outcomes['shm'], direct)} |", flush=True)
    finally:
        daemon.terminate()
        daemon.wait()


main()
