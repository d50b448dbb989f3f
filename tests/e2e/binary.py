#!/usr/bin/env python3
"""The interposer as a file: what it needs and what it shows. It must load into any container."""

from harness import *

MAY_NEED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
NEWEST_GLIBC = (2, 34)


def _tool(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@case
def needed():
    found = set(re.findall(r"\(NEEDED\).*\[(.*)\]", _tool("readelf", "-dW", INTERPOSER)))
    check("libc.so.6" in found, f"readelf shows no libc among ({found}).")
    check(found <= MAY_NEED, f"The interposer needs ({sorted(found - MAY_NEED)}).")


@case
def glibc():
    symbols = _tool("readelf", "--dyn-syms", "-W", INTERPOSER)
    versions = {tuple(map(int, version.split(".")))
                for version in re.findall(r"@GLIBC_([0-9.]+)", symbols)}
    check(versions, "readelf shows no versioned symbol.")
    newer = {line.split()[-2] if line.endswith(")") else line.split()[-1]
             for line in symbols.splitlines()
             for version in re.findall(r"@GLIBC_([0-9.]+)", line)
             if tuple(map(int, version.split("."))) > NEWEST_GLIBC}
    check(not newer, f"These symbols are newer than glibc {NEWEST_GLIBC}: {sorted(newer)}.")
    print("newest:", ".".join(map(str, max(versions))))


def _exports(path):
    return set(_tool("nm", "-D", "--defined-only", "--format=just-symbols", path).split())


@case
def exports():
    """Exactly the names of the toolkit's stub, not one of our own."""
    names = {name.split("@")[0] for name in _exports(INTERPOSER)}
    stub = {name for name in _exports(CUDA_STUB) if name.startswith("cu")}
    check(len(stub) > 600, f"The stub ({CUDA_STUB}) has only ({len(stub)}) names.")
    check_equal((sorted(stub - names), sorted(names - stub)), ([], []), "(missing, surplus)")


main()
