#!/usr/bin/python3
"""Compares the spec with the toolkit's headers and stub, through libclang.

  audit.py --include DIR [--stub libcuda.so]    prints every fault as one sentence; fails if any
  audit.py --include DIR --draft                prints a row for every function that has none

Checked: every function of cuda.h (all versions) and cudaProfiler.h has a row with exactly its
prototype; the versions are those of cudaTypedefs.h; the exported names are those of the stub; the
numbers, enums, handles and structs of types.toml are what they claim, and structs copied as bytes
hold no pointer and have the locked size; a served row never carries a C string, a callback or a
struct with pointers that it does not mark.
"""

import argparse
import re
import struct
import sys
from pathlib import Path

from clang.cindex import Config, CursorKind, Index, TypeKind

import model

HERE = Path(__file__).resolve().parent
Config.set_library_file("libclang-14.so.1")
# The typedef headers name the k-th version of a function without its suffix.
TYPEDEF_HEADERS = ("cudaTypedefs.h", "cudaProfilerTypedefs.h")


def parse(include):
    """cuda.h with every version of every function declared under its exported name."""
    text = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#include <cudaProfiler.h>\n"
    unit = Index.create().parse("audit.cc", args=["-x", "c++", f"-I{include}"],
                                unsaved_files=[("audit.cc", text)])
    errors = [d.spelling for d in unit.diagnostics if d.severity >= 3]
    if errors:
        raise SystemExit(f"cuda.h in {include} does not parse: {errors[0]}.")
    return unit


def declarations(cursor, kind, found):
    for child in cursor.get_children():
        if child.kind in (CursorKind.LINKAGE_SPEC, CursorKind.UNEXPOSED_DECL):
            declarations(child, kind, found)
        elif child.kind == kind and child.spelling.lower().startswith("cu"):
            found[child.spelling] = child
    return found


def header_prototype(cursor):
    return (cursor.result_type.spelling,
            [(model.normalise(p.type.spelling), p.spelling) for p in cursor.get_arguments()])


def typedef_versions(include):
    """base -> "" | ptds | ptsz -> sorted versions."""
    versions = {}
    for header in TYPEDEF_HEADERS:
        for match in re.finditer(r"\*PFN_(cu\w+?)_v(\d+)(?:_(ptds|ptsz))?\)",
                                 (Path(include) / header).read_text()):
            versions.setdefault(match[1], {}).setdefault(match[3] or "", set()).add(int(match[2]))
    return {base: {k: sorted(v) for k, v in table.items()} for base, table in versions.items()}


def pointer_free(kind):
    kind = kind.get_canonical()
    if kind.kind == TypeKind.CONSTANTARRAY:
        return pointer_free(kind.element_type)
    if kind.kind == TypeKind.RECORD:
        return all(pointer_free(f.type) for f in kind.get_fields())
    return kind.kind not in (TypeKind.POINTER, TypeKind.MEMBERPOINTER)


def check_prototypes(spec, functions):
    for name in sorted(set(functions) - {f.symbol for f in spec.functions}
                       - {f.twin for f in spec.functions}):
        yield f"The function {name} has no row."
    for function in spec.functions:
        names = [function.symbol] + ([function.twin] if function.twin else [])
        for name in names:
            if name not in functions:
                yield f"The name {name} is not declared by cuda.h."
                continue
            result, args = header_prototype(functions[name])
            same_names = name == function.twin or [a.name for a in function.args] == [
                n for _, n in args]  # cuda.h names some arguments of twins differently
            if not same_names or function.result != result or \
                    [a.c_type for a in function.args] != [t for t, _ in args]:
                text = ", ".join(f"{t} {n}" for t, n in args)
                yield f"The prototype of {name} differs from cuda.h: {result}({text})."
        if not function.twin:
            twins = [n for n in (f"{function.symbol}_ptds", f"{function.symbol}_ptsz")
                     if n in functions]
            if twins:
                yield f"The row of {function.symbol} hides its per-thread twin {twins[0]}."


def check_versions(spec, versions):
    rows = {}
    for function in spec.functions:
        rows.setdefault(function.base, {}).setdefault("", []).append(function.version)
        if function.twin:
            rows[function.base].setdefault(function.per_thread, []).append(function.twin_version)
    for base in sorted(set(rows) | set(versions)):
        ours = {k: sorted(v) for k, v in rows.get(base, {}).items()}
        if ours != versions.get(base, {}):
            yield f"The versions of {base} are {ours}; cudaTypedefs.h has {versions.get(base)}."
    for base in sorted(rows):
        plain = sorted((f for f in spec.functions if f.base == base), key=lambda f: f.version)
        names = [base] + [f"{base}_v{k}" for k in range(2, len(plain) + 1)]
        if [f.symbol for f in plain] != names:
            yield f"The suffixes of {base} do not grow with the version."


def check_stub(spec, stub):
    ours = {f.symbol for f in spec.functions} | {f.twin for f in spec.functions if f.twin}
    for name in sorted(stub - ours):
        yield f"The toolkit's libcuda.so exports {name}; the spec does not."
    for name in sorted(ours - stub):
        yield f"The spec exports {name}; the toolkit's libcuda.so does not."


def check_types(spec, unit):
    types = declarations(unit.cursor, CursorKind.TYPEDEF_DECL, {})
    for name, wire in spec.types.scalars.items():
        if name in types:
            kind = types[name].type.get_canonical()
            if kind.get_size() != model.WIRE_SIZES[wire]:
                yield f"The type {name} has {kind.get_size()} bytes, not {wire}."
            if kind.kind == TypeKind.POINTER:
                yield f"The type {name} is a pointer."
        elif name.startswith(("CU", "cu")):
            yield f"The type {name} does not exist."
    for name in spec.types.handles:
        if name not in types or types[name].type.get_canonical().kind != TypeKind.POINTER:
            yield f"The handle type {name} is not a pointer."
    for name, size in spec.types.structs.items():
        if name not in types:
            yield f"The struct {name} does not exist."
            continue
        kind = types[name].type.get_canonical()
        if not pointer_free(kind):
            yield f"The struct {name} holds a pointer and cannot be copied as bytes."
        if kind.get_size() != size:
            yield f"The struct {name} has {kind.get_size()} bytes; types.toml locks {size}."
    for name in spec.types.callbacks:
        kind = types[name].type.get_canonical() if name in types else None
        if not kind or kind.kind != TypeKind.POINTER or \
                kind.get_pointee().kind != TypeKind.FUNCTIONPROTO:
            yield f"The callback type {name} is not a pointer to a function."


def check_marks(spec):
    """A string, a file or a callback must never slip onto the wire as a mere address."""
    for function in spec.functions:
        if not function.has_command or function.wire:
            continue
        for arg in function.args:
            if arg.c_type == "const char*" and arg.role not in ("string", "path", "client"):
                yield f"The string {arg.name} of {function.symbol} is not marked."
            if arg.c_type == "const char*" and arg.role == "string" and \
                    re.search("file|fname|path", arg.name, re.I):
                yield f"The argument {arg.name} of {function.symbol} looks like a path."
            if (re.search(r"fd$|oshandle|shareable", arg.name, re.I)
                    and arg.role not in ("fd", "client")):
                yield f"The descriptor {arg.name} of {function.symbol} is not marked."
            if arg.c_type in spec.types.callbacks and arg.role not in ("callback", "client"):
                yield f"The callback {arg.name} of {function.symbol} is not marked."


def stub_symbols(path):
    """Names of the functions in a shared object's dynamic symbol table."""
    data = Path(path).read_bytes()
    sections, count = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<H", data, 0x3C)[0]
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + 64 * i) for i in range(count)]
    names = set()
    for header in headers:
        if header[1] != 11:  # SHT_DYNSYM
            continue
        strings = headers[header[6]][4]
        for offset in range(header[4], header[4] + header[5], 24):
            name, info, _, section = struct.unpack_from("<IBBH", data, offset)
            if section and info & 15 == 2:
                end = data.index(b"\0", strings + name)
                names.add(data[strings + name:end].decode())
    return names


def draft(spec, functions, versions):
    """Rows for what is missing, with the facts of the headers filled in and the rest refused."""
    twins = ("_ptds", "_ptsz")
    for name, cursor in sorted(functions.items()):
        if name in spec.by_symbol or name.endswith(twins):
            continue
        result, args = header_prototype(cursor)
        base, suffix = re.fullmatch(r"(\w+?)(?:_v(\d+))?", name).groups()
        known = versions.get(base, {}).get("", [0])
        text = ", ".join(f"{t} {n}" for t, n in args)
        print(f"[{name}]\nid = 0x0000  # the next free one of its group")
        print(f'proto = "{result}({text})"\nmode = "unsupported"')
        print(f"version = {known[int(suffix or 1) - 1]}")
        for twin in twins:
            if name + twin in functions:
                print(f'per_thread = "{twin[1:]}"')
        print('reason = "not forwarded yet"\n')


def faults(spec, include, stub=None):
    unit = parse(include)
    functions = declarations(unit.cursor, CursorKind.FUNCTION_DECL, {})
    yield from check_prototypes(spec, functions)
    yield from check_versions(spec, typedef_versions(include))
    yield from check_types(spec, unit)
    yield from check_marks(spec)
    if stub:
        yield from check_stub(spec, stub_symbols(stub))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default=HERE / "spec" / "cuda")
    parser.add_argument("--include", required=True)
    parser.add_argument("--stub")
    parser.add_argument("--draft", action="store_true")
    options = parser.parse_args()
    try:
        spec = model.load(options.spec)
    except model.SpecError as error:
        print(error, file=sys.stderr)
        return 1
    if options.draft:
        functions = declarations(parse(options.include).cursor, CursorKind.FUNCTION_DECL, {})
        draft(spec, functions, typedef_versions(options.include))
        return 0
    found = list(faults(spec, options.include, options.stub))
    print("".join(f"{fault}\n" for fault in found), end="", file=sys.stderr)
    print(f"audit: {len(spec.functions)} rows, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
