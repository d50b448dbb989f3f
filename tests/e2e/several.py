#!/usr/bin/env python3
"""GPUs of several servers in one program: two daemons with two simulated GPUs each. What the program
prints is compared with the same program on four GPUs in one place."""

from harness import *


class Two:
    """Two daemons, their pool file, and a program's environment with all of it."""

    def __init__(self, settings=("", ""), **env):
        self._scratch = Scratch()
        self._settings = settings
        self._env = {"SIMGPU_DEVICES": "2", **env}
        self.daemons = []

    def __enter__(self):
        self._scratch.__enter__()
        for number, settings in enumerate(self._settings):
            path = self._scratch / f"daemon{number}.toml"
            with open(path, "w", encoding="ascii") as file:
                file.write(settings)
            daemon = Daemon(arguments=("--config", path), **self._env)
            self.daemons.append(daemon.__enter__())
        self.pool = self._scratch / "pool.toml"
        with open(self.pool, "w", encoding="ascii") as file:
            for number, daemon in enumerate(self.daemons):
                file.write(f'[[server]]\nname = "server{number}"\naddress = "{daemon.address}"\n')
        return self

    def __exit__(self, *arguments):
        for daemon in self.daemons:
            daemon.__exit__(*arguments)
        self._scratch.__exit__(*arguments)

    def env(self, gpus="4", **more):
        env = client_env(self.daemons[0], PENSTOCK_GPUS=gpus, PENSTOCK_CONFIG=str(self.pool), **more)
        del env["PENSTOCK_SERVER"]
        return env


def _same(mode, **env):
    local = check_ok(run([program("several_servers"), mode], direct_env(SIMGPU_DEVICES="4")),
                     "On one machine")
    with Two() as two:
        remote = check_ok(run([program("several_servers"), mode], two.env(**env)), "On two servers")
    check_equal(remote.out, local.out, "What it prints")
    return remote.out


@case
def count():
    check_equal(_same("count"), "4 devices, 4 addresses, 4 uuids\n", "What it prints")


@case
def copies():
    check_equal(_same("copies"), "copies between 4 devices are done\n", "What it prints")


@case
def ring():
    check(_same("ring").endswith("as it should\n"), "The word is wrong, on one machine as well.")


@case
def addresses():
    check_equal(_same("addresses"), "10000 allocations, 0 overlaps\n", "What it prints")


@case
def symbols():
    _same("symbols")


@case
def pinned():
    check("DIFFERENT" not in _same("pinned"), "The data changes on its way, on one machine as well.")


@case
def pinned_shm():
    """The memory belongs to the first server's shared memory, and the other one copies."""
    check("DIFFERENT" not in _same("pinned", PENSTOCK_TRANSPORT="shm"), "The data changes.")


@case
def threads():
    _same("threads")


@case
def strays():
    _same("strays")


@case
def survive():
    """One server goes; what is on the other one stays."""
    with Two() as two:
        with Conversation([program("several_servers"), "survive"], two.env()) as talk:
            check_equal(talk.hear(), "ready", "Its first line")
            two.daemons[1].kill_all()
            check_equal(talk.ask("go"), "device 0: cudaSuccess 1", "Device 0")
            check_equal(talk.hear(), "device 1: cudaSuccess 2", "Device 1")
            check("cudaErrorDevicesUnavailable" in talk.hear(), "Device 2 does not say that it is gone.")
            check("cudaErrorDevicesUnavailable" in talk.hear(), "Device 3 does not say that it is gone.")


@case
def choice():
    """Servers are asked in the order of the file, each for what is missing."""
    slots = '[pool]\nslots-per-gpu = 1\n'
    with Two(settings=(slots, slots)) as two:
        def devices(gpus, **env):
            outcome = run([program("device_count")], two.env(gpus, **env))
            return outcome.out.strip() or outcome.err

        for gpus, seen in (("1", "1"), ("2", "2"), ("3", "3"), ("4", "4"), ("all", "4")):
            check_equal(devices(gpus), seen, f"The number of devices for ({gpus})")
        check("asks for more GPUs (5) than 2 servers offer (4)" in devices("5"), "Five are there.")
        check('(PENSTOCK_GPUS=many) is neither "all"' in devices("many"), "Many are there.")
        holder = start([program("device_memory"), "say:here", "read"], two.env("3"),
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        check_equal(holder.stdout.readline(), "here\n", "The holder's line")
        check_equal(devices("1"), "1", "What is left")
        check("only (1) are free on 2 servers" in devices("2"), "Two are left.")
        check_equal(devices("all"), "1", "All that is left")
        holder.kill()
        holder.wait()
        # A server that is not there is passed over, as long as the others have enough.
        two.daemons[0].kill_all()
        check_equal(devices("2"), "2", "What the second server has")
        check("only (2) are free" not in devices("3"), "A server that is gone is called full.")


@case
def listed():
    """Several addresses do without a file."""
    with Two() as two:
        env = two.env(PENSTOCK_SERVER=",".join(daemon.address for daemon in two.daemons))
        check_equal(run([program("device_count")], env).out, "4\n", "The number of devices")


if __name__ == "__main__":
    main()
