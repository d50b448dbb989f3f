#!/usr/bin/env python3
"""What one end's violent death does to the other, and to third parties."""

from harness import *


@case
def program_killed_in_launch_storm():
    """Its worker and its memory are gone within 2 s; the other program notices nothing."""
    with Daemon() as daemon, Conversation([program("steady")], client_env(daemon)) as steady:
        check_equal(steady.ask("round"), "right", "The steady program's answer")
        free_before = int(steady.ask("free"))
        workers_before = set(descendants(daemon.pid))
        with Conversation([program("launch_storm")], client_env(daemon)) as storm:
            check_equal(storm.hear(), "storming", "The storm's first line")
            workers = set(descendants(daemon.pid)) - workers_before
            check(workers, "The storm has no worker process of its own.")
            check_equal(steady.ask("round"), "right", "The steady program's answer in the storm")
            storm.kill()
        took = wait_until(lambda: not any(alive(pid) for pid in workers), 2,
                          "The dead program's worker lives on after 2 s.")
        print(f"The worker is gone after {took:.2f} s.")
        check(int(steady.ask("free")) >= free_before, "The dead program's memory is not free.")
        for _ in range(5):
            check_equal(steady.ask("round"), "right", "The steady program's answer afterwards")
        check_equal(steady.finish(), 0, "The steady program's status")


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
