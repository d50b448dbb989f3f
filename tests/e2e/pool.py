#!/usr/bin/env python3
"""Slots: what a program gets of a shared GPU, and what happens when no slot is free."""

import tomllib

from harness import *

MIB = 1 << 20
SLOT = 256 * MIB


class Shared(Daemon):
    """A daemon with [pool] settings."""

    def __init__(self, settings, **env):
        self._folder = Scratch().__enter__()
        path = self._folder / "penstockd.toml"
        with open(path, "w", encoding="ascii") as file:
            file.write(settings)
        super().__init__(arguments=("--config", path), SIMGPU_MEMORY="1GiB", **env)

    def __exit__(self, *arguments):
        self._folder.__exit__()
        return super().__exit__(*arguments)


def _memory(daemon, *words, **env):
    outcome = run([program("device_memory"), *words], client_env(daemon, **env))
    return check_ok(outcome, "device_memory").out.splitlines()


@case
def memory():
    """The slot is the device, as far as a program can see: to the byte, in every way to allocate."""
    with Shared('[pool]\nslots-per-gpu = 2\nmemory-per-slot = "256 MiB"\n') as daemon:
        check_equal(_memory(daemon, "info"), [f"{SLOT} {SLOT} {SLOT}"], "An empty slot")
        check_equal(_memory(daemon, "alloc:257", "alloc:256", "info", "alloc:1", "free", "sync", "info"),
                    ["alloc:257 CUDA_ERROR_OUT_OF_MEMORY", "alloc:256 CUDA_SUCCESS",
                     f"0 {SLOT} {SLOT}", "alloc:1 CUDA_ERROR_OUT_OF_MEMORY", "free CUDA_SUCCESS",
                     "sync CUDA_SUCCESS", f"{SLOT} {SLOT} {SLOT}"], "Linear memory")
        # Freed, then at once allocated again: the free is still under way, and the program has not
        # to know.
        check_equal(_memory(daemon, "alloc:200", "free", "alloc:200", "free", "alloc:256"),
                    ["alloc:200 CUDA_SUCCESS", "free CUDA_SUCCESS", "alloc:200 CUDA_SUCCESS",
                     "free CUDA_SUCCESS", "alloc:256 CUDA_SUCCESS"], "Memory that is just freed")
        check_equal(_memory(daemon, "async:200", "alloc:57", "alloc:56", "free", "free", "sync",
                            "alloc:256"),
                    ["async:200 CUDA_SUCCESS", "alloc:57 CUDA_ERROR_OUT_OF_MEMORY",
                     "alloc:56 CUDA_SUCCESS", "free CUDA_SUCCESS", "free CUDA_SUCCESS",
                     "sync CUDA_SUCCESS", "alloc:256 CUDA_SUCCESS"], "Pool memory")
        check_equal(_memory(daemon, "churn:200", "info"),
                    ["churn:200 CUDA_SUCCESS", f"{SLOT} {SLOT} {SLOT}"], "Memory in stream order")


@case
def full():
    """Three programs on two slots: the third ends with 75, gets an error, or waits, as it is told."""
    with Shared("[pool]\nslots-per-gpu = 2\n") as daemon:
        holders = [start([program("device_memory"), "say:here", "read"], client_env(daemon),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                   for _ in range(2)]
        for holder in holders:
            check_equal(holder.stdout.readline(), "here\n", "The holder's line")
        refused = run([program("device_memory"), "say:here"], client_env(daemon))
        check_equal((refused.status, refused.out),
                    (1, "cuInit gives CUDA_ERROR_DEVICE_UNAVAILABLE\n"), "A third program")
        check("No slot is free on any GPU of this server (1 GPUs of 2 slots)." in refused.err,
              f"It says ({refused.err}).")
        command = [PENSTOCK, "run", "--server", daemon.address]
        ended = run([*command, "--", program("device_memory"), "say:here"], plain_env())
        check_equal((ended.status, ended.out), (75, ""), "A third program of penstock run")
        waiting = start([*command, "--wait", "--", program("device_memory"), "say:here", "alloc:1"],
                        plain_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        check("Waiting for a GPU" in waiting.stderr.readline(), "It does not say that it waits.")
        check(waiting.poll() is None, "It does not wait.")
        holders[0].kill()
        out, _ = waiting.communicate(timeout=30)
        check_equal((waiting.returncode, out), (0, "here\nalloc:1 CUDA_SUCCESS\n"),
                    "The third program, after one of the others was killed")
        for holder in holders:
            holder.kill()
            holder.wait()


@case
def spread():
    """Programs go to the GPU with the fewest; one that asks for two gets two different ones."""
    with Shared('[pool]\ngpus = [1, 2]\nslots-per-gpu = 2\nmemory-per-slot = "256MiB"\n',
                SIMGPU_DEVICES="3") as daemon:
        check_equal(run([program("device_count")], client_env(daemon)).out, "1\n",
                    "What a program sees that asks for nothing")
        check_equal(run([program("device_count")], client_env(daemon, PENSTOCK_GPUS="2")).out, "2\n",
                    "What a program sees that asks for two")
        three = run([program("device_count")], client_env(daemon, PENSTOCK_GPUS="3"))
        check("asks for more GPUs (3) than this server offers (2)" in three.err,
              f"A program that asks for three is told ({three.err}).")


@case
def settings():
    for text, complaint in (
            ("[pool]\nslots-per-gpu = 0\n", "pool.slots-per-gpu (0) is not between 1 and 64"),
            ('[transport]\nrails = "x"\n', "penstockd.toml:2: Value of rails"),
            ("[pool]\nslots = 2\n", "penstockd.toml:2: Key (slots) is not known."),
            ('[pool]\n\nmemory-per-slot = "much"\n', 'penstockd.toml:3: Value of memory-per-slot'),
            ("[pool]\ngpus = [7]\n", "offers GPU (7), and this server has (1)"),
            ("[pool]\ngpus = [0, 0]\n", "offers GPU (0) twice"),
            ('[pool]\nslots-per-gpu = 5\nmemory-per-slot = "256MiB"\n', "cannot hold (5) slots")):
        with Scratch() as scratch:
            path = scratch / "penstockd.toml"
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            outcome = run([PENSTOCKD, "--listen", "127.0.0.1:0", "--driver", "sim", "--config", path],
                          plain_env(SIMGPU_MEMORY="1GiB"))
        check(outcome.status != 0 and complaint in outcome.err, f"({text}) gives ({outcome.err}).")


@case
def example():
    """The settings that --help shows are settings that the daemon takes, as they stand."""
    shown = check_ok(run([PENSTOCKD, "--help"], plain_env()), "penstockd --help").out
    text = shown[shown.index("\nConfiguration file"):].split("\n", 2)[2]
    check_equal(set(tomllib.loads(text)["pool"]), {"gpus", "slots-per-gpu", "memory-per-slot"},
                "The keys of the example's [pool]")
    with Scratch() as scratch:
        path, key = scratch / "penstockd.toml", scratch / "key"
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        with open(key, "w", encoding="ascii") as file:
            file.write("0123456789abcdef")
        os.chmod(key, 0o600)
        with Daemon(arguments=("--config", path, "--key-file", key), SIMGPU_MEMORY="64GiB",
                    SIMGPU_DEVICES="2") as daemon:
            check_equal(_memory(daemon, "info", PENSTOCK_KEY_FILE=str(key)),
                        [" ".join([str(16 << 30)] * 3)], "A slot of the example")


@case
def leak_free():
    """After many sessions that are killed wherever they are, every slot and process is back."""
    with Shared('[pool]\nslots-per-gpu = 3\nmemory-per-slot = "256 MiB"\n') as daemon:
        idle = len(descendants(daemon.pid))
        for round_ in range(30):
            programs = [start([program("device_memory"), "alloc:200", "async:56", "say:here", "read"],
                              client_env(daemon, PENSTOCK_WHEN_FULL="wait"), stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                        for _ in range(3)]
            for index, each in enumerate(programs):
                if (round_ + index) % 3 == 0:
                    each.stdout.readline()
                time.sleep(0.003 * (round_ % 7))
                each.kill()
            for each in programs:
                each.wait()
        wait_until(lambda: len(descendants(daemon.pid)) == idle, 20, "Workers are left.")
        lines = _memory(daemon, "info")
        check_equal(lines, [f"{SLOT} {SLOT} {SLOT}"], "The slot")
        holders = [start([program("device_memory"), "alloc:256", "read"], client_env(daemon),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                   for _ in range(3)]
        for holder in holders:
            check_equal(holder.stdout.readline(), "alloc:256 CUDA_SUCCESS\n", "A slot's whole memory")
            holder.kill()
            holder.wait()



@case
def random_kills(count="150"):
    """Programs come and go, most of them killed at some moment, by a signal to them or to their worker.
    Afterwards memory, slots, descriptors and processes are what they were. The count can be given."""
    import random

    random.seed(4)
    with Shared('[pool]\nslots-per-gpu = 8\nmemory-per-slot = "100 MiB"\n') as daemon:
        def descriptors():
            return len(os.listdir(f"/proc/{daemon.pid}/fd"))

        def quiet():
            return not descendants(daemon.pid)

        _memory(daemon, "info")  # what the first session brings into being stays
        wait_until(quiet, 10, "A worker stays.")
        before = descriptors()
        running, begun = [], 0
        while begun < int(count) or running:
            while begun < int(count) and len(running) < 6:
                words = ["alloc:30", "async:20", "churn:10", "info", "read"]
                random.shuffle(words)
                running.append(start([program("device_memory"), *words, "read"],
                                     client_env(daemon, PENSTOCK_WHEN_FULL="wait",
                                                PENSTOCK_TRANSPORT=random.choice(["tcp", "shm"])),
                                     stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL))
                begun += 1
            time.sleep(random.random() * 0.05)
            victim = random.choice(running)
            way = random.random()
            workers = descendants(daemon.pid)
            if way < 0.2 and workers:
                try:
                    os.kill(random.choice(workers), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            elif way < 0.4:
                victim.stdin.close()  # it ends by itself
            else:
                victim.kill()
            for program_ in running[:]:
                if program_.stdin.closed or way >= 0.4 and program_ is victim:
                    program_.wait(PROGRAM_LIMIT_S)
                    running.remove(program_)
        wait_until(quiet, 10, f"({len(descendants(daemon.pid))}) workers stay.")
        check(descriptors() <= before, f"The daemon had ({before}) descriptors and has ({descriptors()}).")
        # Eight slots of 100 MiB, each whole.
        holders = [Conversation([program("device_memory"), "alloc:100", "say:here", "read"],
                                client_env(daemon)) for _ in range(8)]
        for holder in holders:
            check_equal((holder.hear(), holder.hear()), ("alloc:100 CUDA_SUCCESS", "here"),
                        "A program on a slot")
        for holder in holders:
            holder.__exit__()


main()
