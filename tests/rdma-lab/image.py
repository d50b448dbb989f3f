"""The machine's file system: a cpio archive that the kernel unpacks into memory.

The kernel takes several archives one after the other, later files over earlier ones. So there are two:
a base (tools, verbs libraries, modules), made once, and an overlay with what one run needs. Every file
keeps the path it has on the build machine, so run paths and dlopen work as they do there.
"""

import hashlib
import os
import pathlib
import re
import stat
import subprocess

LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = ["dev", "etc", "lab", "out", "proc", "root", "run", "sys", "tmp", "var/run"]

# dash as the shell: busybox's own prefers its ip and tc, which know nothing of our needs, to any file.
TOOLS = ["busybox", "dash", "ip", "tc", "rdma", "setpriv", "ibv_devinfo",
         "ib_send_lat", "ib_send_bw", "ib_read_lat", "ib_read_bw", "ib_write_lat", "ib_write_bw"]
# Opened at run time, so that ldd does not name them.
LIBRARIES = ["libibverbs.so.1", "librdmacm.so.1", "libgcc_s.so.1", "libibverbs/librxe-rdmav34.so"]
LIBRARY_FOLDER = pathlib.Path("/usr/lib/x86_64-linux-gnu")

TEXTS = {
    "etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n10.7.0.1 host1\n10.7.0.2 host2\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class Archive:
    """Writes a cpio archive in the kernel's format ("newc"), everything owned by root."""

    def __init__(self, path):
        self._file = open(path, "wb")
        self._names = set()
        self._count = 0

    def _entry(self, name, mode, data=b""):
        if name in self._names:
            return
        self._names.add(name)
        self._count += 1
        encoded = name.encode() + b"\0"
        fields = [self._count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
        self._file.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))

    def folder(self, name):
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            self._entry("/".join(parts[:count]), stat.S_IFDIR | 0o755)

    def link(self, name, target):
        self._parent(name)
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def text(self, name, content, mode=0o644):
        self._parent(name)
        self._entry(name, stat.S_IFREG | mode, content.encode())

    def file(self, source, name):
        """Copies a file; `name` is its absolute or relative path in the machine."""
        name = _in_machine(name)
        self._parent(name)
        self._entry(name, stat.S_IFREG | (os.stat(source).st_mode & 0o777),
                    pathlib.Path(source).read_bytes())

    def close(self):
        self._entry("TRAILER!!!", 0)
        self._file.write(bytes(-self._file.tell() % 512))
        self._file.close()

    def _parent(self, name):
        if "/" in name:
            self.folder(name.rpartition("/")[0])


def _in_machine(path):
    """An archive name: relative, and through usr/ where Debian's /bin and /lib are links."""
    name = os.path.normpath(str(path)).lstrip("/")
    head, _, rest = name.partition("/")
    return f"{LINKS[head]}/{rest}" if head in LINKS else name


def _shared_libraries(paths):
    """What the dynamic linker would load for these programs: absolute paths, as they are named."""
    libraries = set()
    paths = [str(path) for path in paths]
    if paths:
        # ldd says so and fails for a static program or a script; that is no trouble here.
        text = subprocess.run(["ldd", *paths], capture_output=True, text=True).stdout
        libraries.update(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", text, re.MULTILINE))
    return sorted(libraries)


def _tool(name):
    for folder in ("/usr/bin", "/usr/sbin", "/bin", "/sbin"):
        if os.access(f"{folder}/{name}", os.X_OK):
            return pathlib.Path(folder, name)
    raise RuntimeError(f"The tool {name} is not installed; run scripts/setup.")


def base(folder, kernel, guest, say):
    """The base archive, made once for this kernel, these tools and these scripts."""
    tools = [_tool(name) for name in TOOLS]
    libraries = [LIBRARY_FOLDER / name for name in LIBRARIES]
    for library in libraries:
        if not library.exists():
            raise RuntimeError(f"The library {library} is not installed; run scripts/setup.")
    modules = kernel.modules()
    scripts = sorted(guest.iterdir())
    seal = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for path in [*tools, *libraries, *modules]:
        seal.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    for path in scripts:
        seal.update(path.name.encode() + path.read_bytes())
    target = folder / f"base-{seal.hexdigest()[:16]}.cpio"
    if target.exists():
        return target

    say("making the base image")
    work = folder / "base.new"
    archive = Archive(work)
    for name, link in LINKS.items():
        archive.folder(link)
        archive.link(name, link)
    for name in FOLDERS:
        archive.folder(name)
    for name, content in TEXTS.items():
        archive.text(name, content)
    for path in [*tools, *libraries, *_shared_libraries([*tools, *libraries])]:
        archive.file(path, path)
    archive.file("/etc/libibverbs.d/rxe.driver", "etc/libibverbs.d/rxe.driver")
    applets = subprocess.run([tools[0], "--list"], check=True, capture_output=True, text=True).stdout
    for applet in applets.split():
        if applet not in TOOLS and applet not in ("sh", "ash"):
            archive.link(f"usr/bin/{applet}", "/usr/bin/busybox")
    archive.link("usr/bin/sh", "dash")
    for index, path in enumerate(modules):
        archive.file(path, f"lab/modules/{index:02}-{path.name}")
    for path in scripts:
        archive.file(path, "init" if path.name == "init" else f"usr/bin/{path.name}")
    archive.close()
    for old in folder.glob("base-*.cpio"):
        old.unlink()
    work.rename(target)
    return target


def default_files(build, commands):
    """What a run takes along from the build unasked: our programs, libraries and samples, and each
    program in bin/ that a command names."""
    words = set(re.findall(r"[\w.+-]+", " ".join(commands)))
    files = []
    for path in sorted(build.glob("bin/*")):
        if path.is_file() and (path.name in words or not re.search("test|bench", path.name)):
            files.append(path)
    for pattern in ("bin/samples/**/*", "bin/e2e/*", "lib/penstock/**/*"):
        files += [path for path in sorted(build.glob(pattern)) if path.is_file()]
    return files


def overlay(target, build, commands, added, script, environment):
    """Writes the archive of one run. `added` holds "FILE" or "FILE:DESTINATION"."""
    pairs = [(path, path) for path in default_files(build, commands)]
    for item in added:
        source, _, destination = item.partition(":")
        source = pathlib.Path(source).absolute()
        if not source.is_file():
            raise RuntimeError(f"The file to add ({source}) does not exist.")
        pairs.append((source, destination or source))
    archive = Archive(target)
    archive.link("build", str(build))
    archive.text("lab/command", script, 0o755)
    archive.text("lab/environment", environment)
    for source, destination in pairs:
        archive.file(source, destination)
    for library in _shared_libraries(source for source, _ in pairs):
        if not library.startswith(str(build)):
            archive.file(library, library)
    archive.close()
