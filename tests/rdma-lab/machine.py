"""One virtual machine: a QEMU process and the channels to it.

The kernel log comes by the serial port. Everything of the command comes by virtio ports, which carry
bytes as they are: its output, its errors, a control channel (line by line, both ways) and a tar archive
of the files it leaves in /out. The channels are socket pairs handed to QEMU, so there are no names to
clean up; when the machine is gone, for whatever reason, they end.
"""

import os
import re
import signal
import socket
import subprocess

# What the kernel says when it finds itself in the wrong.
TROUBLE = re.compile(r"WARNING|\bBUG\b|Oops|refcount_t|Call Trace|Kernel panic|general protection")

PORTS = ["stdout", "stderr", "control", "files"]


def acceleration(kernel):
    """KVM where it works; else QEMU's own translation, some 20 times slower.

    Within another machine /dev/kvm may be there and yet run next to nothing. So we start a kernel with
    no file system and see whether it comes so far as to miss it.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "kvm", "-cpu", "host",
               "-m", "256", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
               "-kernel", str(kernel.image), "-append", "console=ttyS0 panic=-1", "-serial", "stdio"]
    try:
        text = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=8).stdout
    except subprocess.TimeoutExpired:
        return "tcg"
    return "kvm" if b"Kernel panic" in text else "tcg"


class Machine:
    """Runs from construction to Kill() or to the guest's own power-off."""

    def __init__(self, number, kernel, initrd, recipe, options, network=None):
        self.number = number
        self.log = bytearray()
        self.channels = {}
        self.begun = None  # when the command started
        self.status = None  # of the command, once it has ended
        self.killed = False
        # By instructions: each takes 4 ns, whatever else the host does meanwhile, and an idle machine
        # skips to its next timer. Its processors then take turns within one thread.
        by_instructions = options.clock == "instructions"
        accel = "tcg" if by_instructions else options.accel
        # On a slow machine the check that timer interrupts come often enough fails, and the kernel panics.
        words = f"console=ttyS0 no_timer_check loglevel={7 if options.kernel_log else 5} panic=-1 " \
                f"lab.recipe={recipe} lab.host={number}"
        # setpriv: no machine outlives the lab, even if the lab is killed.
        command = [
            "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
            "-accel", accel, "-cpu", "host" if accel == "kvm" else "max",
            "-smp", str(options.cpus), "-m", str(options.memory),
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", str(kernel.image), "-initrd", str(initrd), "-append", words,
            "-device", "virtio-serial-pci", "-device", "virtio-rng-pci",
        ]
        if by_instructions:
            command += ["-icount", "shift=2,sleep=off"]
        passed = []

        def channel(name, device):
            ours, theirs = socket.socketpair()
            passed.append(theirs)
            self.channels[name] = ours
            command.extend(["-chardev", f"socket,id={name},fd={theirs.fileno()}", *device])

        channel("console", ["-serial", "chardev:console"])
        for name in PORTS:
            channel(name, ["-device", f"virtserialport,chardev={name},name={name}"])
        if network is not None:
            passed.append(network)
            command += ["-netdev", f"socket,id=wire,fd={network.fileno()}", "-device",
                        f"virtio-net-pci,netdev=wire,host_mtu=9000,mac=52:54:00:00:07:0{number}"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE,
                                        pass_fds=[end.fileno() for end in passed])
        for end in passed:
            end.close()

    def kill(self):
        """As a power cut: no chance to say anything on the wire."""
        self.killed = True
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def complaint(self):
        """What QEMU itself said, if anything."""
        return self.process.stderr.read().decode(errors="replace").strip()

    def trouble(self):
        """The kernel's lines from the first that speaks of a fault, or nothing."""
        lines = self.log.decode(errors="replace").replace("\r", "").splitlines()
        for index, line in enumerate(lines):
            if TROUBLE.search(line):
                return lines[index:index + 60]
        return []
