"""Debian's own kernel, unpacked into the build folder and never installed.

The package is the one that `linux-image-amd64` depends on, so the machine runs what a Debian user runs.
Only the modules that a verbs machine can need are unpacked; `depmod` then says in which order they load.
"""

import pathlib
import re
import shutil
import subprocess

# crc32_generic first: rdma_rxe needs it and modules.dep does not say so ("failed to init crc32").
MODULES = [
    "virtio_pci", "virtio_console", "virtio_net",
    "crc32_generic", "udp_tunnel", "ip6_udp_tunnel", "ib_core", "ib_uverbs", "rdma_rxe",
    "configfs", "ib_cm", "iw_cm", "rdma_cm", "rdma_ucm",
    "dummy", "veth", "bridge", "sch_netem",
]

FOLDERS = ["crypto", "drivers/char", "drivers/infiniband", "drivers/net", "drivers/virtio", "arch",
           "fs/configfs", "lib", "net"]


class Kernel:
    """A kernel image, and its modules in the order in which they are to be loaded."""

    def __init__(self, folder):
        self.folder = folder
        (self.image,) = folder.glob("boot/vmlinuz-*")
        (self.modules_folder,) = folder.glob("lib/modules/*")
        self.release = self.modules_folder.name

    def modules(self):
        """The module files in load order, each after those it needs."""
        needs = {}
        for line in (self.modules_folder / "modules.dep").read_text().splitlines():
            path, _, rest = line.partition(":")
            needs[path] = rest.split()
        by_name = {pathlib.Path(path).stem.replace("-", "_"): path for path in needs}
        builtin = {pathlib.Path(path).stem.replace("-", "_")
                   for path in (self.modules_folder / "modules.builtin").read_text().split()}
        order = []

        def add(path):
            for need in needs[path]:
                add(need)
            if path not in order:
                order.append(path)

        for name in MODULES:
            if name not in builtin:
                add(by_name[name])
        return [self.modules_folder / path for path in order]


def _package():
    """The name of the kernel package that linux-image-amd64 stands for at present."""
    text = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], check=True,
                          capture_output=True, text=True).stdout
    names = re.findall(r"Depends: (linux-image-\S+)", text)
    if not names:
        raise RuntimeError("apt-cache knows no dependency of linux-image-amd64; "
                           "run apt-get update.")
    return names[0]


def fetch(folder, say):
    """The kernel in this folder, fetched and unpacked if it is not there yet."""
    if folder.exists():
        return Kernel(folder)
    package = _package()
    work = folder.with_suffix(".new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    say(f"fetching {package}")
    subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package],
                   cwd=work, check=True, stdout=subprocess.DEVNULL)
    (archive,) = work.glob("*.deb")
    say("unpacking the kernel")
    wanted = ["./boot/vmlinuz-*", "./lib/modules/*/modules.*"]
    wanted += [f"./lib/modules/*/kernel/{name}" for name in FOLDERS]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpack:
        subprocess.run(["tar", "-x", "-C", work, "--wildcards", *wanted], stdin=unpack.stdout, check=True)
    if unpack.returncode != 0:
        raise RuntimeError(f"{archive.name} cannot be unpacked.")
    archive.unlink()
    (modules_folder,) = work.glob("lib/modules/*")
    depmod = shutil.which("depmod") or "/sbin/depmod"
    subprocess.run([depmod, "-b", work, modules_folder.name], check=True)
    work.rename(folder)
    return Kernel(folder)
