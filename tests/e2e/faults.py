#!/usr/bin/env python3
"""What one end's violent death does to the other, and to third parties."""

from harness import *


STORM_BYTES = (256 + 4) << 20  # what launch_storm allocates


def watch_storm_die(env, about_to_storm=lambda: None, has_ended=lambda: True):
    """Two programs on one device, one killed in a launch storm. The other one's results are right
    all the time, and it sees the dead one's memory come back within 2 s."""
    with Conversation([program("steady")], env) as steady:
        def free():
            return int(steady.ask("free"))

        check_equal(steady.ask("round"), "right", "The steady program's answer")
        free_before = free()
        about_to_storm()
        with Conversation([program("launch_storm")], env) as storm:
            check_equal(storm.hear(), "storming", "The storm's first line")
            check_equal(steady.ask("round"), "right", "The steady program's answer in the storm")
            taken = free_before - free()
            check(taken >= STORM_BYTES,
                  f"The other program sees ({taken}) bytes of the storm's ({STORM_BYTES}).")
            storm.kill()
        took = wait_until(lambda: free() >= free_before and has_ended(), 2,
                          "What the dead program held is not free after 2 s.")
        print(f"The memory is back after {took:.2f} s.")
        for _ in range(5):
            check_equal(steady.ask("round"), "right", "The steady program's answer afterwards")
        check_equal(steady.finish(), 0, "The steady program's status")


@case
def program_killed_in_launch_storm():
    """... through one daemon, where the dead one's worker must end too."""
    with Daemon() as daemon:
        before, workers = set(), set()

        def note_workers():
            before.update(descendants(daemon.pid))

        def has_ended():
            workers.update(set(descendants(daemon.pid)) - before)
            return not any(alive(pid) for pid in workers)

        watch_storm_die(client_env(daemon), note_workers, has_ended)


@case
def program_killed_on_shared_simgpu():
    """... directly on a simulated GPU that the two share by its name."""
    with Scratch() as scratch:
        watch_storm_die(direct_env(SIMGPU_SHARED=scratch / "ledger"))


@case
def shared_memory_is_full():
    """The sum of all sessions' memory is bounded by the device, and each of them sees it."""
    with Daemon(SIMGPU_MEMORY="384M") as daemon, \
            Conversation([program("launch_storm")], client_env(daemon)) as storm:
        check_equal(storm.hear(), "storming", "The first program's first line")
        second = run([program("launch_storm")], client_env(daemon))
        check("CUDA_ERROR_OUT_OF_MEMORY" in second.out + second.err,
              f"The second program says:\n{second.out}{second.err}")
        storm.kill()
    with Daemon(SIMGPU_MEMORY="384M") as daemon, \
            Conversation([program("launch_storm")], client_env(daemon)) as storm:
        check_equal(storm.hear(), "storming", "The first program's first line")
        # Another daemon's devices are others.
        with Daemon(SIMGPU_MEMORY="384M") as other, \
                Conversation([program("launch_storm")], client_env(other)) as second:
            check_equal(second.hear(), "storming", "The other daemon's program")


@case
def daemon_killed_in_copy():
    """The program gets an error within 10 s, and never wrong data."""
    with Daemon() as daemon, Conversation([program("copy_loop")], client_env(daemon)) as copies:
        for _ in range(2):
            check_equal(copies.hear(), "copying", "What the program says")
        time.sleep(0.05)  # into the next round; wherever this falls, the answer must be the same
        daemon.kill_all()
        began = time.monotonic()
        line = "copying"
        while line == "copying":
            line = copies.hear(10)
        status = copies.wait(10)
        check(line.startswith("CUDA_ERROR_"), f"The program says ({line}).")
        check_equal(status, 3, "The program's status")
        check(time.monotonic() - began < 10, "The error takes longer than 10 s.")
        print(f"{line} after {time.monotonic() - began:.2f} s")


@case
def no_daemon():
    """Nobody listens: the program gets an error at once, and one line says why."""
    with Daemon() as daemon:
        env = client_env(daemon)
    outcome = run([sample("static", "vector_add")], env, limit_s=30)
    check(outcome.status == 1, f"The program ends with status ({outcome.status}).")
    check(daemon.address in outcome.err, f"stderr does not name the address:\n{outcome.err}")


@case
def wrong_key():
    """A client without the right key is refused, with an error and not a hang."""
    become_root()
    with TwoHosts() as hosts, Daemon(hosts.server_host, hosts.server) as daemon, Scratch() as scratch:
        with open(scratch / "key", "w", encoding="ascii") as file:
            file.write("0" * 64)
        for env in (client_env(daemon, PENSTOCK_KEY_FILE=scratch / "key"),
                    client_env(daemon, PENSTOCK_KEY_FILE="")):
            outcome = run([sample("static", "vector_add")], env, hosts.client, limit_s=30)
            check(outcome.status == 1, f"The program ends with status ({outcome.status}).")
        check_ok(run([sample("static", "vector_add")], client_env(daemon), hosts.client),
                 "The program with the right key")


main()
