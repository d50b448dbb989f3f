"""The model of the driver API that the templates see, and its loader.

The spec (spec/cuda/*.toml) holds one row per exported driver function: what cuda.h says (the
prototype) and what it cannot say (the mode, who owns a new handle, how long a buffer is, what may
block). The loader turns rows into the dataclasses below and refuses a spec that contradicts itself,
with one sentence per fault, so that a template never meets an impossible row. It needs neither
libclang nor a CUDA toolkit; audit.py compares the same model with cuda.h.

docs/adding-a-function.md explains the vocabulary with examples.
"""

import ast
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

MODES = ("local", "post", "call", "unsupported")
# What the driver may do to the thread that issues the call:
#   no        returns at once
#   window    an asynchronous operation: may wait when too many are queued, which the bounded stream
#             window of the client excludes
#   reaper    may synchronise; the server hands it to the reaper
#   pending   waits; the server turns it into a query (or a recorded event) asked repeatedly
#   executor  takes long and has no query form; the server runs it on an executor thread
BLOCKS = ("no", "window", "reaper", "pending", "executor")
ROW_KEYS = {"id", "proto", "mode", "version", "per_thread", "reason", "custom", "same_as", "sends",
            "via", "blocks", "delivers", "arg", "wire", "reply", "context"}
SIDES = ("client", "server")
CONTEXTS = ("current", "none")
# Operations of protocol/operations.h: written by hand, each serves many functions.
OPERATIONS = ("launch", "upload", "download", "load_module", "get_function", "list_functions",
              "link_create", "link_add", "link_complete", "link_read", "link_destroy",
              "host_function", "upload_volume", "download_volume")
ROLES = ("in", "out", "inout", "new", "destroyed", "string", "path", "fd", "callback", "client",
         "stream", "allocation", "address", "handle", "context-or-current", "value")


class SpecError(Exception):
    """The spec contradicts itself. The message names the row."""


@dataclass(frozen=True)
class Scalar:
    """A type that travels as one little-endian number (enums too: all of CUDA's are 32 bits)."""
    c_type: str
    wire: str  # a key of WIRE_SIZES


WIRE_SIZES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "f64": 8}
WIRE_C = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "i32": "int32_t", "f32": "float",
          "u64": "uint64_t", "i64": "int64_t", "f64": "double"}
# Wire types that mean more than a number. All are fixed-size; "bytes" and "string" add a tail.
WIRE_SPECIAL = {"handle": "u64", "stream": "u64", "address": "u64", "device": "i32"}


@dataclass
class Types:
    scalars: dict    # C type -> wire number
    handles: dict    # C type -> handle kind
    structs: dict    # C type -> size in bytes; pointer-free, copied as bytes
    callbacks: set


@dataclass
class Arg:
    """One parameter of the C prototype with what the row says about it."""
    name: str
    c_type: str            # as in the prototype, "const char*"
    words: str = ""        # the row's annotation, verbatim
    role: str = ""         # one of ROLES; "device" by default for a CUdevice
    pointee: str = ""      # the type behind the pointer, without const
    nullable: bool = False
    owner: str = ""        # role new: the argument that owns the new handle
    count: str = ""        # arrays: an argument name (number of elements)
    length: str = ""       # buffers: a length expression in bytes
    extent: tuple = ()     # the same, parsed: see parse_length
    access: str = ""       # role address: "reads" or "writes"
    limit: str = ""        # a local check: "zero", "nonzero", "flags 0x3", "between 1 and 4",
                           # "aligned 4"

    @property
    def is_pointer(self):
        return self.c_type.endswith("*")

    @property
    def is_const(self):
        return self.c_type.startswith("const ")

    @property
    def is_section(self):
        """Travels behind the struct: its length is not fixed."""
        return self.role in ("string", "path") or bool(
            self.role in ("in", "out", "inout") and (self.length or self.count))


@dataclass
class Field:
    """A member of a command or reply struct."""
    name: str
    wire: str          # u32, handle, ..., "struct", "bytes" (tail length), "pad"
    c_type: str
    size: int
    offset: int = 0
    count: int = 1     # fixed arrays: "u32[3]"
    arg: str = ""      # the parameter it carries, if derived from one
    nullable: bool = False

    @property
    def alignment(self):
        return 8 if self.wire == "struct" else self.size // self.count

    def describe(self):
        suffix = f"[{self.count}]" if self.count > 1 else ""
        kind = f"struct {self.c_type}" if self.wire == "struct" else self.wire
        return f"{self.offset} {self.name} {kind}{suffix} {self.size}"


@dataclass
class Layout:
    fields: list
    size: int

    @property
    def tails(self):
        return [f for f in self.fields if f.wire in ("bytes", "string", "array")]

    def describe(self):
        return "; ".join(f.describe() for f in self.fields) + f"; size {self.size}"


@dataclass
class Function:
    symbol: str            # exported name, with its _v2 if any
    id: int
    group: str             # the spec file's stem
    mode: str
    result: str
    args: list
    version: int           # CUDA version that introduced it, as in cudaTypedefs.h
    per_thread: str = ""   # "", "ptds" or "ptsz"
    reason: str = ""
    custom: tuple = ()
    same_as: str = ""      # same body as that row: an older name, prototype equal or narrower
    sends: str = ""        # generated client half that sends that row's command; an argument that
                           # only that row has is 0 (the default stream, no flags)
    via: tuple = ()        # hand-written client half that sends these rows' commands or operations
    blocks: str = "no"
    delivers: bool = False
    context: str = "current"
    cpp: str = ""          # name in C++: CuMemAlloc for the oldest served version, see name_rows
    command: Layout = None
    reply: Layout = None
    wire: dict = field(default_factory=dict)
    reply_wire: dict = field(default_factory=dict)

    @property
    def base(self):
        return re.sub(r"_v\d+$", "", self.symbol)

    @property
    def twin(self):
        return f"{self.symbol}_{self.per_thread}" if self.per_thread else ""

    @property
    def twin_version(self):
        """Per-thread default streams came with CUDA 7.0."""
        return max(self.version, 7000)

    @property
    def log_name(self):
        """How counters and logs name it: the base name for the main version."""
        return "cu" + self.cpp.removeprefix("Cu")

    @property
    def arguments(self):
        return [a.name for a in self.args]

    @property
    def served(self):
        return self.mode != "unsupported"

    @property
    def has_command(self):
        return self.mode in ("post", "call") and not self.same_as and not self.sends and (
            not self.via or bool(self.wire))

    @property
    def hand_written_client(self):
        return self.served and not self.same_as and (
            self.mode == "local" or "client" in self.custom)

    @property
    def generated_client(self):
        return self.served and not self.same_as and not self.hand_written_client

    @property
    def hand_written_server(self):
        return self.has_command and "server" in self.custom

    @property
    def main(self):
        """Has a body, and so an enumerator of its own."""
        return not self.same_as

    @property
    def prototype(self):
        return ", ".join(f"{a.c_type} {a.name}" for a in self.args)

    @property
    def types(self):
        return ", ".join(a.c_type for a in self.args)

    def arg(self, name):
        return next((a for a in self.args if a.name == name), None)


@dataclass
class Spec:
    types: Types
    functions: list        # in the order of groups, then of ids
    groups: list
    by_symbol: dict

    def group(self, name):
        return [f for f in self.functions if f.group == name]


def fail(symbol, sentence):
    raise SpecError(f"{symbol}: {sentence}")


# ---- prototypes -------------------------------------------------------------------------------


def normalise(c_type):
    """One spelling for a type: "const char *" and "char const*" both become "const char*"."""
    c_type = re.sub(r"\s*\*\s*", "*", " ".join(c_type.split()))
    return re.sub(r"\*const$", "*", c_type)


def parse_prototype(symbol, proto):
    match = re.fullmatch(r"\s*([\w ]+?)\s*\((.*)\)\s*", proto, re.S)
    if not match:
        fail(symbol, f"The prototype ({proto}) is not RESULT(TYPE NAME, ...).")
    args = []
    if match[2].strip() not in ("", "void"):
        for text in match[2].split(","):
            part = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", text, re.S)
            if not part:
                fail(symbol, f"The parameter ({text.strip()}) has no type or no name.")
            args.append(Arg(name=part[2], c_type=normalise(part[1])))
    names = [a.name for a in args]
    if len(set(names)) != len(names):
        fail(symbol, "Two parameters have the same name.")
    return match[1], args


# ---- argument vocabulary ----------------------------------------------------------------------


def parse_length(symbol, expression):
    """A length in bytes as a tree: ("name", n), ("number", n), ("add", a, b), ("mul", a, b), or
    ("pitched", pitch, width, height) for rows apart by a pitch. Anything else is refused."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        fail(symbol, f"The length ({expression}) is not an expression.")

    def convert(node, top=False):
        if isinstance(node, ast.Name):
            return ("name", node.id)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return ("number", node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            word = "add" if isinstance(node.op, ast.Add) else "mul"
            return (word, convert(node.left), convert(node.right))
        if (top and isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                and node.func.id == "pitched" and len(node.args) == 3 and not node.keywords):
            return ("pitched", *(convert(argument) for argument in node.args))
        fail(symbol, f"The length ({expression}) uses more than +, *, numbers and pitched().")

    return convert(tree, top=True)


def length_names(tree):
    if tree[0] == "name":
        return [tree[1]]
    return [name for part in tree[1:] if isinstance(part, tuple) for name in length_names(part)]


def apply_words(symbol, arg, words):
    """Fills an Arg from its annotation: comma-separated phrases, the first one names the role."""
    arg.words = words
    for phrase in (p.strip() for p in re.split(r",(?![^()]*\))", words)):
        word, _, rest = phrase.partition(" ")
        if word in ROLES and not rest:
            if arg.role:
                fail(symbol, f"The argument ({arg.name}) has two roles ({arg.role}, {word}).")
            arg.role = word
        elif word == "device" and rest.split(" ", 1)[0] in ("reads", "writes"):
            arg.role = "address"
            arg.access, _, arg.length = rest.partition(" ")
            if not arg.length:
                fail(symbol, f"The argument ({arg.name}) has no length.")
            arg.extent = parse_length(symbol, arg.length)
        elif word == "nullable" and not rest:
            arg.nullable = True
        elif word == "owned" and rest.startswith("by "):
            arg.owner = rest.removeprefix("by ")
        elif word == "count" and rest:
            arg.count = rest
        elif word == "bytes" and rest:
            arg.length = rest
            arg.extent = parse_length(symbol, rest)
        elif word in ("zero", "nonzero") and not rest:
            arg.limit = word
        elif word == "flags" and re.fullmatch(r"0x[0-9a-f]+", rest):
            arg.limit = phrase
        elif word == "between" and re.fullmatch(r"-?\d+ and -?\d+", rest):
            arg.limit = phrase
        elif word == "aligned" and rest in ("2", "4", "8", "16"):
            arg.limit = phrase
        else:
            fail(symbol, f"The annotation of {arg.name} has an unknown phrase ({phrase}).")


def default_role(arg, types):
    """What an unannotated argument is; "" if the row has to say."""
    if arg.c_type == "CUstream":
        return "stream"
    if arg.c_type in types.handles:
        return "handle"
    if arg.c_type == "CUdevice":
        return "device"
    if arg.c_type == "CUdeviceptr":
        return ""
    if arg.c_type in types.scalars:
        return "value"
    return ""


def check_args(function, types):
    """The rules of one post or call row whose layout is derived from its arguments."""
    symbol = function.symbol
    for arg in function.args:
        if arg.is_pointer:
            arg.pointee = arg.c_type[:-1].removeprefix("const ")
        if not arg.role:
            arg.role = default_role(arg, types)
        if not arg.role:
            fail(symbol, f"The argument ({arg.name}, {arg.c_type}) needs an annotation.")
        for name in ([arg.count] if arg.count else []) + ([arg.owner] if arg.owner else []):
            if not function.arg(name):
                fail(symbol, f"The annotation of {arg.name} names no argument ({name}).")
        if arg.extent:
            for name in length_names(arg.extent):
                if not function.arg(name):
                    fail(symbol, f"The annotation of {arg.name} names no argument ({name}).")
        if function.mode == "post" and arg.role in ("out", "inout"):
            fail(symbol, f"A posted row cannot have an output ({arg.name}).")
        if arg.role in ("out", "inout", "new") and (not arg.is_pointer or arg.is_const):
            fail(symbol, f"The argument ({arg.name}, {arg.c_type}) cannot be an output.")
        if arg.role == "new" and arg.pointee not in types.handles:
            fail(symbol, f"The argument ({arg.name}) points to no handle ({arg.pointee}).")
        if arg.role == "string" and arg.c_type != "const char*":
            fail(symbol, f"The argument ({arg.name}, {arg.c_type}) is not a string.")
        if arg.role in ("in", "out", "inout") and not arg.length:
            known = (arg.pointee in types.scalars or arg.pointee in types.structs
                     or arg.pointee == "CUdeviceptr")
            if not known:
                fail(symbol, f"The argument ({arg.name}) would copy {arg.pointee or 'void'} as "
                             "bytes, and that type is not known to be free of pointers.")
        if arg.role == "inout" and arg.is_section:
            fail(symbol, f"The argument ({arg.name}) is an array and cannot be inout.")
        if arg.role in ("handle", "destroyed") and arg.c_type not in types.handles:
            fail(symbol, f"The argument ({arg.name}, {arg.c_type}) is no handle.")
        if arg.role == "context-or-current" and arg.c_type != "CUcontext":
            fail(symbol, f"The argument ({arg.name}, {arg.c_type}) is no context.")
        # What only the client can do: mint and forget records of objects.
        if arg.role in ("new", "destroyed", "allocation", "client", "path", "fd", "callback") and \
                "client" not in function.custom:
            fail(symbol, f"The argument ({arg.name}) of role {arg.role} needs a hand-written client "
                         "half.")
        if arg.role in ("new", "destroyed") and "server" not in function.custom and \
                (arg.pointee or arg.c_type) not in ("CUstream", "CUevent"):
            fail(symbol, f"The argument ({arg.name}) of role {arg.role} needs a hand-written server "
                         "half.")


# ---- wire layouts -----------------------------------------------------------------------------


def lay_out(symbol, fields, may_be_empty=False):
    """Gives every field its natural offset, the largest first, with explicit padding."""
    placed, offset, pads = [], 0, 0
    fields = sorted(fields, key=lambda item: -item.alignment)  # stable: the row's order within
    for item in fields:
        alignment = item.alignment
        if offset % alignment:
            gap = alignment - offset % alignment
            placed.append(Field(f"padding{pads}", "pad", "uint8_t", gap, offset, gap))
            pads += 1
            offset += gap
        item.offset = offset
        offset += item.size
        placed.append(item)
    if not fields and not may_be_empty:
        placed, offset = [Field("padding0", "pad", "uint8_t", 8, 0, 8)], 8  # C++ has no empty struct
    if offset % 8:
        gap = 8 - offset % 8
        placed.append(Field(f"padding{pads}", "pad", "uint8_t", gap, offset, gap))
        offset += gap
    names = [f.name for f in placed]
    if len(set(names)) != len(names):
        fail(symbol, "Two wire fields have the same name.")
    return Layout(placed, offset)


def number(name, wire, **more):
    return Field(name, wire, WIRE_C[WIRE_SPECIAL.get(wire, wire)],
                 WIRE_SIZES[WIRE_SPECIAL.get(wire, wire)], **more)


def section(name, wire, **more):
    """The length of what follows the struct: name_bytes, or name_count of an array."""
    return Field(f"{name}_{'count' if wire == 'array' else 'bytes'}", wire, "uint32_t", 4, **more)


def explicit_fields(symbol, table, types):
    fields = []
    for name, word in table.items():
        match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", word)
        wire, count = (match[1], int(match[2] or 1)) if match else ("", 1)
        if wire in ("bytes", "string"):
            fields.append(section(name, wire))
        elif wire in WIRE_SIZES or wire in WIRE_SPECIAL:
            item = number(name, wire)
            item.size *= count
            item.count = count
            fields.append(item)
        elif wire in types.structs:
            fields.append(Field(name, "struct", wire, types.structs[wire]))
        else:
            fail(symbol, f"The wire field ({name}) has an unknown type ({word}).")
    return fields


def command_fields(function, types):
    fields = []
    for arg in function.args:
        common = {"arg": arg.name, "nullable": arg.nullable}
        if arg.role == "value":
            fields.append(number(arg.name, types.scalars[arg.c_type], **common))
        elif arg.role in ("handle", "destroyed", "context-or-current"):
            fields.append(number(arg.name, "handle", **common))
        elif arg.role in ("stream", "device"):
            fields.append(number(arg.name, arg.role, **common))
        elif arg.role in ("address", "allocation"):
            fields.append(number(arg.name, "address", **common))
        elif arg.role == "new":
            fields.append(number(arg.name, "handle", **common))
        elif arg.role in ("string", "path"):
            fields.append(section(arg.name, "string" if arg.role == "string" else "bytes",
                                  **common))
        elif arg.role in ("in", "inout"):
            if arg.is_section:
                fields.append(section(arg.name, "array" if arg.count else "bytes", **common))
            elif arg.pointee in types.scalars:
                fields.append(number(arg.name, types.scalars[arg.pointee], **common))
            else:
                fields.append(Field(arg.name, "struct", arg.pointee, types.structs[arg.pointee],
                                    **common))
        elif arg.role == "out" and arg.is_section:
            # How much the program has room for.
            fields.append(section(arg.name, "capacity", **common))
        elif arg.role in ("out", "client"):
            pass  # carried by the reply, or not at all
        else:
            fail(function.symbol, f"The argument ({arg.name}) of role {arg.role} has no wire form; "
                                  "say so with wire.* and a hand-written client half.")
    return fields


def reply_fields(function, types):
    fields = []
    for arg in function.args:
        common = {"arg": arg.name, "nullable": arg.nullable}
        if arg.role in ("out", "inout"):
            if arg.is_section:
                fields.append(section(arg.name, "array" if arg.count else "bytes", **common))
            elif arg.pointee in types.handles:
                fields.append(number(arg.name, "handle", **common))
            elif arg.pointee == "CUdeviceptr":
                fields.append(number(arg.name, "address", **common))
            elif arg.pointee in types.scalars:
                fields.append(number(arg.name, types.scalars[arg.pointee], **common))
            else:
                fields.append(Field(arg.name, "struct", arg.pointee, types.structs[arg.pointee],
                                    **common))
    return fields


# ---- rows -------------------------------------------------------------------------------------


def load_row(symbol, row, group, types):
    unknown = set(row) - ROW_KEYS
    if unknown:
        fail(symbol, f"The row has unknown keys ({', '.join(sorted(unknown))}).")
    for key in ("id", "proto", "mode", "version"):
        if key not in row:
            fail(symbol, f"The row has no {key}.")
    result, args = parse_prototype(symbol, row["proto"])
    function = Function(
        symbol=symbol, id=row["id"], group=group, mode=row["mode"], result=result, args=args,
        version=row["version"], per_thread=row.get("per_thread", ""),
        reason=row.get("reason", ""), custom=tuple(row.get("custom", ())),
        same_as=row.get("same_as", ""), sends=row.get("sends", ""),
        via=tuple(row.get("via", ())), blocks=row.get("blocks", "no"),
        delivers=row.get("delivers", False), context=row.get("context", "current"), wire=row.get("wire", {}), reply_wire=row.get("reply", {}))
    if function.mode not in MODES:
        fail(symbol, f"The mode ({function.mode}) is none of {', '.join(MODES)}.")
    if function.blocks not in BLOCKS:
        fail(symbol, f"The word after blocks ({function.blocks}) is none of {', '.join(BLOCKS)}.")
    if function.context not in CONTEXTS:
        fail(symbol, f"The context ({function.context}) is none of {', '.join(CONTEXTS)}.")
    if function.per_thread not in ("", "ptds", "ptsz"):
        fail(symbol, f"The word after per_thread ({function.per_thread}) is not ptds or ptsz.")
    if not 0 < function.id < 0x8000:
        fail(symbol, f"The id ({function.id:#x}) is zero or belongs to the operations (0x8000).")
    for side in function.custom:
        if side not in SIDES:
            fail(symbol, f"The side ({side}) in custom is none of {', '.join(SIDES)}.")
    if (function.mode == "unsupported") != bool(function.reason):
        fail(symbol, "A reason belongs to an unsupported row, and only to one.")
    if function.mode == "unsupported" and (function.custom or function.same_as or function.sends
                                           or function.via or "arg" in row or "blocks" in row):
        fail(symbol, "An unsupported row says only why.")
    if bool(function.same_as) + bool(function.sends) + bool(function.via) > 1:
        fail(symbol, "A row can have one of same_as, sends and via.")
    if function.same_as and (function.custom or "blocks" in row or "arg" in row):
        fail(symbol, "The body of a row with same_as is described there.")
    if function.sends and function.custom:
        fail(symbol, "A row with sends is generated.")
    if function.via and "client" not in function.custom:
        fail(symbol, "A row with via needs a hand-written client half.")
    if function.mode == "local" and (function.custom or function.via or function.wire):
        fail(symbol, "A local row is always hand-written in the client and sends nothing.")
    for name, words in row.get("arg", {}).items():
        arg = function.arg(name)
        if not arg:
            fail(symbol, f"The row annotates an argument ({name}) that the prototype lacks.")
        apply_words(symbol, arg, words)
    if function.mode == "post":
        if "blocks" not in row and not function.same_as and not function.sends:
            fail(symbol, "A posted row must say what blocks.")
        if function.blocks in ("pending", "executor"):
            fail(symbol, f"A posted row cannot block ({function.blocks}).")
        if function.reply_wire:
            fail(symbol, "A posted row has no reply.")
    if (function.wire or function.reply_wire) and set(function.custom) != set(SIDES):
        fail(symbol, "A row with its own wire layout needs both halves hand-written.")
    if function.has_command:
        if not function.wire:
            check_args(function, types)
        function.command = lay_out(symbol, explicit_fields(symbol, function.wire, types)
                                   if function.wire else command_fields(function, types))
        function.reply = lay_out(symbol, explicit_fields(symbol, function.reply_wire, types)
                                 if function.wire or function.reply_wire
                                 else reply_fields(function, types), may_be_empty=True)
    return function


def load_types(path):
    table = tomllib.loads(Path(path).read_text())
    scalars = {name: wire for wire, names in table["scalar"].items() for name in names}
    scalars |= {name: "u32" for name in table["enum"]["names"]}
    unknown = set(scalars.values()) - set(WIRE_SIZES)
    if unknown:
        raise SpecError(f"types.toml: The wire number ({unknown.pop()}) does not exist.")
    return Types(scalars, dict(table["handle"]), dict(table["struct"]),
                 set(table["callback"]["names"]))


def widens(narrow, wide):
    return narrow == wide or (narrow, wide) == ("unsigned int", "size_t")


def check_references(functions, by_symbol):
    for function in functions:
        for target in filter(None, (function.same_as, function.sends, *function.via)):
            if target in OPERATIONS and target in function.via:
                continue
            other = by_symbol.get(target)
            if not other:
                fail(function.symbol, f"The row that it names ({target}) does not exist.")
            if other.same_as or not other.served:
                fail(function.symbol, f"The row that it names ({target}) has no body of its own.")
            if target != function.same_as and not other.has_command:
                fail(function.symbol, f"The row that it names ({target}) has no command.")
        if function.same_as:
            other = by_symbol[function.same_as]
            if len(function.args) != len(other.args) or function.mode != other.mode or \
                    bool(function.per_thread) > bool(other.per_thread) or not all(
                        widens(a.c_type, b.c_type) for a, b in zip(function.args, other.args)):
                fail(function.symbol, f"The row after same_as ({other.symbol}) has another prototype "
                                      "or mode.")
        if function.sends:
            check_sends(function, by_symbol[function.sends])


def check_sends(function, other):
    if other.custom and "client" in other.custom:
        fail(function.symbol, f"The client half of {other.symbol} is hand-written; so must this be.")
    for arg in other.args:
        mine = function.arg(arg.name)
        if mine and mine.c_type != arg.c_type:
            fail(function.symbol, f"The argument ({arg.name}) has another type in {other.symbol}.")
        if not mine and arg.role not in ("stream", "value", "context-or-current"):
            fail(function.symbol, f"The row lacks an argument ({arg.name}) of {other.symbol}.")
    extra = set(function.arguments) - set(other.arguments)
    if extra:
        fail(function.symbol, f"The arguments ({', '.join(sorted(extra))}) are not in "
                              f"{other.symbol}.")


def name_rows(functions):
    """The C++ name of a row: CuMemAlloc for the oldest served generation of cuMemAlloc (or the
    oldest at all), the suffixed name for the others, with _v1 spelled out."""
    by_base = {}
    for function in functions:
        by_base.setdefault(function.base, []).append(function)
    for base, rows in by_base.items():
        rows.sort(key=lambda f: f.version)
        main = next((f for f in rows if f.served and f.main), rows[0])
        for function in rows:
            name = base if function is main else function.symbol
            if name == base and function is not main:
                name += "_v1"
            function.cpp = "Cu" + name.removeprefix("cu")


def load_rows(tables, types):
    """tables: (group name, {symbol: row}) in order."""
    functions, ids, by_symbol = [], {}, {}
    for group, rows in tables:
        for symbol, row in rows.items():
            if symbol in by_symbol:
                fail(symbol, "The function has two rows.")
            function = load_row(symbol, row, group, types)
            if function.id in ids:
                fail(symbol, f"The id ({function.id:#06x}) is already that of "
                             f"{ids[function.id]}.")
            ids[function.id] = symbol
            by_symbol[symbol] = function
            functions.append(function)
    check_references(functions, by_symbol)
    name_rows(functions)
    functions.sort(key=lambda f: f.id)
    groups = list(dict.fromkeys(f.group for f in functions))
    return Spec(types, functions, groups, by_symbol)


def load(directory):
    directory = Path(directory)
    types = load_types(directory / "types.toml")
    tables = []
    for path in sorted(directory.glob("*.toml")):
        if path.name == "types.toml":
            continue
        try:
            tables.append((path.stem, tomllib.loads(path.read_text())))
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{path.name}: {error}.") from error
    return load_rows(tables, types)
