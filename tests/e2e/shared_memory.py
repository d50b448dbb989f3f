#!/usr/bin/env python3
"""Sessions through shared memory: every sample says the same as on simgpu, pinned memory is copied by
nobody on the way, and whoever cannot share is told why or goes over tcp."""

from harness import *


def _lines(outcome):
    return [line for line in outcome.err.splitlines() if line.startswith("penstock")]


def _run(daemon, command, scratch, namespace=None, **more):
    """A program through shared memory; returns its outcome and what PENSTOCK_STATS says."""
    env = client_env(daemon, PENSTOCK_TRANSPORT="shm", PENSTOCK_STATS=scratch / "stats", **more)
    outcome = check_ok(run(command, env, namespace), f"{command} through shared memory")
    return outcome, Stats(scratch / "stats")


@case
def samples(variant):
    with Daemon() as daemon, Scratch() as scratch:
        for name in SAMPLES:
            direct = check_ok(run([sample(variant, name)], direct_env()), f"{name} on simgpu")
            outcome, stats = _run(daemon, [sample(variant, name)], scratch)
            check_equal(outcome.out, direct.out, f"The output of {variant}/{name}")
            check_equal(outcome.err, "", f"stderr of {variant}/{name}")
            check_equal(stats["transport"], "shm", "The transport")
            print(f"{outcome.seconds:6.2f} s through shm {variant}/{name}", flush=True)


@case
def nothing_is_left():
    """After the programs no process or descriptor of a session is left."""
    with Daemon() as daemon, Scratch() as scratch:
        files = f"/proc/{daemon.pid}/fd"
        before = len(os.listdir(files))
        for _ in range(5):
            _run(daemon, [sample("static", "two_streams")], scratch)
        wait_until(lambda: not descendants(daemon.pid), 10, "A worker outlives its program.")
        wait_until(lambda: len(os.listdir(files)) == before, 10, "The daemon keeps descriptors.")


@case
def program_killed():
    """A program that is killed takes its session with it within a moment."""
    with Daemon() as daemon:
        env = client_env(daemon, PENSTOCK_TRANSPORT="shm")
        with Conversation([program("steady")], env) as conversation:
            check_equal(conversation.ask("round"), "right", "The first round")
            check(descendants(daemon.pid), "There is no worker.")
            conversation.kill()
            seconds = wait_until(lambda: not descendants(daemon.pid), 5,
                                 "The worker of a killed program lives on.")
            print(f"The worker ends {seconds:.2f} s after its program.")


@case
def daemon_killed():
    """A program whose server is killed gets an error, not a hang or a SIGBUS."""
    with Daemon() as daemon:
        env = client_env(daemon, PENSTOCK_TRANSPORT="shm")
        with Conversation([program("copy_loop")], env) as conversation:
            conversation.hear()
            daemon.kill_all()
            wait_until(lambda: conversation.hear() == "CUDA_ERROR_DEVICE_UNAVAILABLE", 20,
                       "The program does not see the error.")
            check_equal(conversation.wait(20), 3, "The program's status")


@case
def demanded():
    """Client and server in two network namespaces cannot share memory: what is demanded and cannot be
    had is an error that says why."""
    become_root()
    with TwoHosts() as hosts, Daemon(hosts.server_host, hosts.server) as daemon:
        outcome = run([sample("static", "vector_add")],
                      client_env(daemon, PENSTOCK_TRANSPORT="shm"), hosts.client)
        check_equal(outcome.status, 1, "The program's status")
        lines = _lines(outcome)
        check(len(lines) == 1 and "PENSTOCK_TRANSPORT=shm" in lines[0] and "socket" in lines[0],
              f"The program does not say why:\n{outcome.err}")
    with Daemon(arguments=["--transport", "tcp"]) as daemon:
        outcome = run([sample("static", "vector_add")],
                      client_env(daemon, PENSTOCK_TRANSPORT="shm"))
        check_equal(outcome.status, 1, "The program's status")
        check("the server does not offer it" in outcome.err, f"It says:\n{outcome.err}")


@case
def demanded_by_daemon():
    """A daemon told so serves through shared memory only."""
    with Daemon(arguments=["--transport", "shm"]) as daemon, Scratch() as scratch:
        outcome = run([sample("static", "vector_add")],
                      client_env(daemon, PENSTOCK_TRANSPORT="tcp"))
        check_equal(outcome.status, 1, "The program's status")
        check("shared memory only (--transport shm)" in outcome.err, f"It says:\n{outcome.err}")
        _run(daemon, [sample("static", "vector_add")], scratch)
        check("shared memory only (--transport shm)" in daemon.log(), "The daemon says nothing.")


def _shared_mappings(pid):
    """How many of the client's memory files a worker has mapped; None if we may not look."""
    try:
        with open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as file:
            return sum("memfd:penstock-pinned" in line for line in file)
    except PermissionError:
        return None


@case
def pinned_copies():
    """Pinned memory, used and freed, brings every byte, is copied by nobody on the way, and is soon
    given back by the worker."""
    with Daemon() as daemon, Scratch() as scratch:
        env = client_env(daemon, PENSTOCK_TRANSPORT="shm", PENSTOCK_STATS=scratch / "stats")
        with Conversation([program("pinned_copies")], env) as conversation:
            check_equal(conversation.hear(), "pinned_copies: ok", "What the program says")
            worker, = descendants(daemon.pid)
            if _shared_mappings(worker) is not None:
                wait_until(lambda: conversation.ask("look") == "here" and
                           _shared_mappings(worker) <= 2,  # what the client keeps for staging
                           10, "The worker keeps memory that the program has freed.")
            check_equal(conversation.finish(), 0, "The program's status")
        stats = Stats(scratch / "stats")
        check(stats["bulk_copies"] < 200_000,
              f"The client copies ({stats['bulk_copies']}) bytes of pinned memory.")


@case
def large_copies():
    """Large copies, pinned and pageable, whole and in rows, bring every byte."""
    with Daemon() as daemon, Scratch() as scratch:
        outcome, _ = _run(daemon, [program("large_copies")], scratch)
        print(outcome.out, end="")


main()
