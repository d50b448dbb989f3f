#!/usr/bin/env python3
"""Checks the #include lines of every folder against the layering table of docs/design.md.

The table below is that table. Client and server never include each other, simgpu knows nothing of
Penstock, and two third-party libraries are confined as well: abseil to programs (Debian's archives
cannot be linked into a shared object) and Cap'n Proto to control/. Usage: layering_test.py [ROOT]
"""

import os
import re
import sys
import tempfile

ALLOWED = {
    "common": set(),
    "interop": set(),
    "config": {"common"},
    "protocol": {"common"},
    "transport": {"common"},
    "control": {"common"},
    "pool": {"common"},
    "interposer": {"config", "protocol", "transport", "common", "interop"},
    "server": {"config", "protocol", "transport", "control", "pool", "common"},
    "tools": {"config", "protocol", "transport", "control", "pool", "common"},
    "simgpu": {"interop"},
    "samples": set(),
}

# Library include prefix -> the folders that may use it.
CONFINED = {
    "absl/": {"server", "tools", "pool"},
    "capnp/": {"control", "server", "tools"},
    "kj/": {"control", "server", "tools"},
}

SOURCE = re.compile(r"\.(h|cc|c|cu|inc|j2)$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]')


def check(root):
    """Returns one sentence per violation, and the number of include lines read."""
    problems, lines_read = [], 0
    for folder, allowed in ALLOWED.items():
        for place, _, files in os.walk(os.path.join(root, folder)):
            for name in sorted(files):
                if not SOURCE.search(name):
                    continue
                path = os.path.join(place, name)
                with open(path, encoding="utf-8") as source:
                    for number, line in enumerate(source, 1):
                        match = INCLUDE.match(line)
                        if not match:
                            continue
                        lines_read += 1
                        problem = judge(folder, allowed, *match.groups())
                        if problem:
                            where = f"{os.path.relpath(path, root)}:{number}"
                            problems.append(f"{where}: {problem}")
    return problems, lines_read


def judge(folder, allowed, quote, header):
    for prefix, users in CONFINED.items():
        if header.startswith(prefix) and folder not in users:
            return f"{folder}/ may not use the library of <{header}>."
    first = header.split("/")[0]
    if first in ALLOWED and first != folder and first not in allowed:
        return f'{folder}/ may not include "{header}".'
    if folder == "samples":  # samples stand alone, with relative includes of their own
        return None
    if quote == '"' and header.startswith("."):
        return f'"{header}" is not written from the root of the repository.'
    return None


def check_the_checker():
    """A tree with known faults: a checker that finds nothing proves nothing."""
    faults = {
        "interposer/a.cc": '#include "server/worker/session.h"\n#include "protocol/frame.h"\n',
        "server/b.cc": '#include <vector>\n#include "interposer/core/session.h"\n',
        "simgpu/driver/c.cc": '#include "common/log.h"\n#include "interop/table.h"\n',
        "protocol/d.h": '#include "transport/transport.h"\n#include "common/log.h"\n',
        "transport/e.cc": "#include <absl/strings/str_cat.h>\n",
        "common/f.h": '  #  include "../protocol/frame.h"\n',
    }
    with tempfile.TemporaryDirectory() as root:
        for path, text in faults.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        problems, _ = check(root)
    found = sorted(problem.split(":")[0] for problem in problems)
    if found != sorted(faults):
        sys.exit(f"The checker finds faults in ({found}) instead of ({sorted(faults)}).")


def main():
    check_the_checker()
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..")
    problems, lines_read = check(root)
    for problem in problems:
        print(problem)
    if lines_read == 0:
        sys.exit(f"There is not one #include under ({root}).")
    print(f"{lines_read} includes, {len(problems)} against the layering table.")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
