#!/usr/bin/python3
"""Writes the generated files: one Jinja2 template per output, the model of model.py as its data.

  generate.py --out DIR          writes everything below DIR, touching only files that changed
  generate.py --list             prints the outputs, relative to DIR
  generate.py --check-lock       compares every wire layout with wire.lock
  generate.py --update-lock      adds new ids to wire.lock; refuses to change an old one
  generate.py --coverage FILE    writes the ledger (docs/coverage.md); --check compares instead

Generated files are never committed, so a change of the spec reviews as rows. The ledger is the
exception: it is a document, and a test keeps it current.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import jinja2

import model

HERE = Path(__file__).resolve().parent

# Output file -> template. All outputs lie in one folder of the build tree.
OUTPUTS = {
    "functions.gen.h": "functions.h.j2",
    "commands.gen.h": "commands.h.j2",
    "custom_client.gen.h": "custom_client.h.j2",
    "proc_table.gen.inc": "proc_table.inc.j2",
    "libcuda.gen.map": "libcuda.map.j2",
    "custom_server.gen.h": "custom_server.h.j2",
    "handlers.gen.h": "handlers.h.j2",
    "handlers.gen.cc": "handlers.cc.j2",
    "driver.gen.h": "driver.h.j2",
    "driver.gen.cc": "driver.cc.j2",
    "mock_driver.gen.h": "mock_driver.h.j2",
    "mock_driver.gen.cc": "mock_driver.cc.j2",
}


def refuse(sentence):
    """For templates: what they cannot express."""
    raise model.SpecError(sentence)


def body_params(function):
    """Parameters of the C++ body: those of C, and whether the twin was called."""
    params = [f"{a.c_type} {a.name}" for a in function.args]
    return ", ".join(params + (["bool per_thread"] if function.twin else []))


def body_arguments(function, target, per_thread):
    return ", ".join(function.arguments + ([per_thread] if target.twin else []))


def environment():
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"),
                             undefined=jinja2.StrictUndefined, trim_blocks=True,
                             lstrip_blocks=True, keep_trailing_newline=True)
    env.filters["hex"] = lambda value: f"0x{value:04x}"
    env.globals |= {"fail": refuse, "body_params": body_params, "body_arguments": body_arguments}
    return env


def index_slots(spec):
    """The dense index of functions: (first index by group number, function or None by index)."""
    largest = {}
    for function in spec.functions:
        group, number = divmod(function.id, 256)
        largest[group] = max(largest.get(group, 0), number)
    first, slots, by_id = [], [], {f.id: f for f in spec.functions}
    for group in range(max(largest) + 1):
        first.append(len(slots))
        slots += [by_id.get(group << 8 | n + 1) for n in range(largest.get(group, 0))]
    return first, slots


def proc_entries(spec):
    """(base, per_thread, version, symbol) of every exported name, as cuGetProcAddress searches."""
    entries = []
    for function in spec.functions:
        entries.append((function.base, 0, function.version, function.symbol))
        if function.twin:
            entries.append((function.base, 1, function.twin_version, function.twin))
    return sorted(entries)


def exported_symbols(spec):
    return sorted([f.symbol for f in spec.functions] + [f.twin for f in spec.functions if f.twin])


def render(spec, template, **values):
    first, slots = index_slots(spec)
    return environment().get_template(template).render(
        spec=spec, proc_entries=proc_entries(spec), symbols=exported_symbols(spec),
        group_first=first, slots=slots, **values)


def all_outputs(spec):
    """Output file -> (template, values for it alone)."""
    outputs = {output: (template, {}) for output, template in OUTPUTS.items()}
    for group in spec.groups:
        outputs[f"entries_{group}.gen.cc"] = ("entries.cc.j2", {"group": group})
        if any(f.has_command for f in spec.group(group)):
            outputs[f"handlers_{group}.gen.cc"] = ("handlers_group.cc.j2", {"group": group})
    return outputs


def render_all(spec):
    """Output path -> text."""
    return {output: render(spec, template, **values)
            for output, (template, values) in all_outputs(spec).items()}


def write_if_changed(path, text):
    path = Path(path)
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- wire.lock --------------------------------------------------------------------------------


def layout_hash(function):
    """A digest of what both sides must agree on: the members, their order, offsets and sizes."""
    if not function.has_command:
        return "-"
    text = f"{function.command.describe()} -> {function.reply.describe()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lock_lines(spec):
    return {f.id: (f.symbol, layout_hash(f)) for f in spec.functions}


def read_lock(path):
    lock = {}
    for line in Path(path).read_text().splitlines():
        if line and not line.startswith("#"):
            number, symbol, digest = line.split()
            lock[int(number, 16)] = (symbol, digest)
    return lock


def lock_faults(spec, lock):
    """What makes this spec incompatible with the locked one, as sentences."""
    current, faults = lock_lines(spec), []
    for number, (symbol, digest) in sorted(lock.items()):
        if number not in current:
            faults.append(f"The id ({number:#06x}) of {symbol} is gone; ids are append-only.")
        elif current[number][0] != symbol:
            faults.append(f"The id ({number:#06x}) of {symbol} is now that of "
                          f"{current[number][0]}.")
        elif digest not in ("-", current[number][1]):
            faults.append(f"The wire layout of {symbol} changed under the same id ({number:#06x}); "
                          "give it a new one.")
    return faults


def unlocked(spec, lock):
    return [symbol for number, (symbol, digest) in lock_lines(spec).items()
            if lock.get(number) != (symbol, digest)]


def lock_text(spec, lock):
    merged = dict(lock) | lock_lines(spec)
    head = ("# Wire layouts by id: the digest of a call's command and reply structs, - where there\n"
            "# is none yet. Ids are append-only and a layout never changes under its id. Written by\n"
            "# generate.py --update-lock, which only adds.\n")
    return head + "".join(f"0x{number:04x} {symbol} {digest}\n"
                          for number, (symbol, digest) in sorted(merged.items()))


# ---- command line -----------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default=HERE / "spec" / "cuda")
    parser.add_argument("--lock", default=HERE / "wire.lock")
    parser.add_argument("--out")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check-lock", action="store_true")
    parser.add_argument("--update-lock", action="store_true")
    parser.add_argument("--coverage")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        spec = model.load(options.spec)
    except model.SpecError as error:
        print(error, file=sys.stderr)
        return 1
    if options.list:
        print("\n".join(all_outputs(spec)))
    if options.out:
        for output, text in render_all(spec).items():
            write_if_changed(Path(options.out) / output, text)
    if options.check_lock or options.update_lock:
        lock = read_lock(options.lock) if Path(options.lock).exists() else {}
        faults = lock_faults(spec, lock)
        if options.check_lock and not faults:
            faults = [f"{symbol} is not in wire.lock as it is now; run generate.py --update-lock."
                      for symbol in unlocked(spec, lock)]
        print("".join(f"{fault}\n" for fault in faults), end="", file=sys.stderr)
        if faults:
            return 1
        if options.update_lock:
            write_if_changed(options.lock, lock_text(spec, lock))
    if options.coverage:
        text = render(spec, "coverage.md.j2")
        if not options.check:
            write_if_changed(options.coverage, text)
        elif not Path(options.coverage).exists() or Path(options.coverage).read_text() != text:
            print(f"The ledger ({options.coverage}) is out of date; run codegen/generate.py "
                  "--coverage docs/coverage.md.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
