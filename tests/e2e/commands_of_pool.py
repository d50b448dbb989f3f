#!/usr/bin/env python3
"""The commands about a pool: ls, status, env, config check, drain and resume; and what SIGTERM does."""

import json

from harness import *
from several import Two

SLOTS = '[pool]\nslots-per-gpu = 2\nmemory-per-slot = "256 MiB"\n'


def _ask(two, *words, status=0):
    outcome = run([PENSTOCK, *words, "--config", two.pool], plain_env())
    check_equal(outcome.status, status, f"The status of ({' '.join(map(str, words))}): {outcome.err}")
    return outcome


def _json(two, *words, **expected):
    return json.loads(_ask(two, *words, "-o", "json", **expected).out)


def _holder(two, gpus, *words):
    holder = Conversation([program("device_memory"), *words, "say:here", "read"], two.env(gpus))
    holder.__enter__()
    for _ in words:
        holder.hear()
    check_equal(holder.hear(), "here", "The holder's line")
    return holder


@case
def ls():
    with Two(settings=(SLOTS, ""), SIMGPU_MEMORY="1GiB") as two:
        holder = _holder(two, "3", "alloc:10")
        servers = _json(two, "ls")
        check_equal([(server["name"], server["state"], server["sessions"]) for server in servers],
                    [("server0", "up", 1), ("server1", "up", 1)], "The servers")
        check_equal([[(gpu["ordinal"], gpu["slots_taken"], gpu["slots"], gpu["slot_memory"] >> 20,
                       gpu["sessions"], gpu["path"]) for gpu in server["gpus"]] for server in servers],
                    [[(0, 1, 2, 256, 1, "1 tcp"), (1, 1, 2, 256, 1, "1 tcp")],
                     [(0, 0, 0, 0, 1, "1 tcp"), (1, 0, 0, 0, 0, "")]], "Their GPUs")
        lines = _ask(two, "ls").out.splitlines()
        check_equal(lines[0].split(), ["SERVER", "STATE", "GPU", "MODEL", "MEMORY", "SLOTS",
                                       "SESSIONS", "PATH"], "The heading")
        check("256 MiB a slot" in lines[1] and "1/2" in lines[1], f"The first line is ({lines[1]}).")
        holder.finish()
        two.daemons[1].kill_all()
        gone = _ask(two, "ls", status=1)
        check("server1  down" in gone.out, f"It shows ({gone.out}).")
        check("The server (server1) is not heard" in gone.err, f"It says ({gone.err}).")


@case
def status():
    with Two(settings=(SLOTS, ""), SIMGPU_MEMORY="1GiB") as two:
        check_equal(_ask(two, "status").out, "No program uses the pool.\n", "An empty pool")
        holder = _holder(two, "2", "alloc:10", "alloc:20")
        sessions = _json(two, "status")
        check_equal(len(sessions), 1, "The number of sessions")
        session = sessions[0]
        check_equal((session["server"], session["pid"], session["program"], session["gpus"],
                     session["path"]),
                    ("server0", holder.pid, "device_memory", [0, 1], "tcp"), "The session")
        check_equal(session["memory"] >> 20, 30, "Its memory in MiB")
        check(session["calls"] > 2 and session["bytes_received"] > 0 and session["bytes_sent"] > 0,
              f"Its numbers are ({session}).")
        check("device_memory" in _ask(two, "status").out, "The table lacks the program.")
        holder.finish()
        wait_until(lambda: not _json(two, "status"), 5, "The session stays in the list.")


@case
def drain():
    with Two(settings=(SLOTS, SLOTS), SIMGPU_MEMORY="1GiB") as two:
        holder = _holder(two, "1")
        check_equal(_ask(two, "drain", "server0").out,
                    "server0 takes no new programs; 1 are still there.\n", "What drain says")
        check_equal(_json(two, "ls")[0]["state"], "draining", "The state")
        # New programs go to the other one, and those that are there go on.
        other = _holder(two, "1")
        check_equal([session["server"] for session in _json(two, "status")], ["server0", "server1"],
                    "Where programs are")
        alone = run([program("device_count")],
                    client_env(two.daemons[0]))
        check("server draining" in alone.err, f"A program that has no other server is told ({alone.err}).")
        other.finish()
        holder.finish()
        _ask(two, "resume", "server0")
        check_equal(run([program("device_count")], client_env(two.daemons[0])).out, "1\n",
                    "After resume")
        wrong = _ask(two, "drain", "server7", status=1)
        check_equal(wrong.err, "penstock: The pool has no server (server7).\n", "A name that is none")


@case
def terminate():
    """SIGTERM lets programs finish; a second one does not."""
    with Daemon() as daemon:
        with Conversation([program("device_memory"), "say:here", "read", "alloc:1"],
                          client_env(daemon)) as holder:
            check_equal(holder.hear(), "here", "The holder's line")
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: "no new programs; 1 sessions have 30 s" in daemon.log(), 5,
                       "The daemon says nothing.")
            refused = run([program("device_count")], client_env(daemon))
            check("server draining" in refused.err, f"A new program is told ({refused.err}).")
            check(alive(daemon.pid), "The daemon does not wait.")
            check_equal(holder.ask("go"), "read CUDA_SUCCESS", "The holder's answer")
            check_equal(holder.hear(), "alloc:1 CUDA_SUCCESS", "The holder's work")
        wait_until(lambda: daemon.process.poll() == 0, 5, "The daemon does not end after its last session.")
    with Daemon() as daemon:
        with Conversation([program("device_memory"), "say:here", "read"], client_env(daemon)) as holder:
            check_equal(holder.hear(), "here", "The holder's line")
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: "no new programs" in daemon.log(), 5, "The daemon says nothing.")
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: daemon.process.poll() is not None, 5, "The second one does not end it.")


@case
def key():
    """The control plane is behind the same door: without the key nobody gets an answer."""
    with Scratch() as scratch:
        for name, text in (("key", "a" * 64), ("wrong", "b" * 64)):
            with open(scratch / name, "w", encoding="ascii",
                      opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
        with Daemon(arguments=("--key-file", scratch / "key")) as daemon:
            def ask(*words):
                return run([PENSTOCK, *words, "--server", daemon.address], plain_env())

            right = ask("ls", "--key", scratch / "key")
            check("Simulated GPU" in right.out, f"With the key it says ({right.out}{right.err}).")
            for words in (("ls",), ("status",), ("ls", "--key", scratch / "wrong")):
                outcome = ask(*words)
                check(outcome.status == 1 and "key" in outcome.err, f"Without it says ({outcome.err}).")
            for words in (("drain",), ("drain", "--key", scratch / "wrong")):
                outcome = ask(*words, daemon.address)
                check(outcome.status == 1 and "key" in outcome.err, f"Without it says ({outcome.err}).")
            check("is drained" not in daemon.log(), "A stranger drains the server.")


@case
def environment():
    with Two() as two:
        lines = _ask(two, "env", "-n", "3").out
        outcome = run(["sh", "-c", f"{lines}\nexec {program('device_count')}"],
                      plain_env(PENSTOCK_TRANSPORT="tcp"))
        check_equal((outcome.out, outcome.err), ("3\n", ""), "A program in that environment")
        names = [line.split("=")[0] for line in lines.splitlines()]
        check_equal(names, ["export LD_PRELOAD", "export LD_LIBRARY_PATH", "export TRITON_LIBCUDA_PATH",
                            "export PENSTOCK_CONFIG", "export PENSTOCK_GPUS"], "The variables")


@case
def config():
    with Two() as two:
        right = _json(two, "config", "check")
        check_equal([server["address"] for server in right["servers"]],
                    [daemon.address for daemon in two.daemons], "The addresses")
        check("is right." in _ask(two, "config", "check").out, "It does not say that it is right.")
        with open(two.pool, "a", encoding="ascii") as file:
            file.write('slots = 3\n')
        wrong = _ask(two, "config", "check", status=1)
        check("pool.toml:7: Key (slots) is not known." in wrong.err, f"It says ({wrong.err}).")
        program_says = run([program("device_count")], two.env())
        check("pool.toml:7: Key (slots) is not known." in program_says.err,
              f"A program says ({program_says.err}).")


@case
def daemon_reads_pool():
    """One file for all: the daemon takes its part by its name."""
    with Scratch() as scratch:
        pool = scratch / "pool.toml"
        with open(pool, "w", encoding="ascii") as file:
            file.write('[[server]]\nname = "other"\naddress = "192.0.2.1:1"\n[[server]]\nname = "mine"\n'
                       'address = "127.0.0.1:0001"\ngpus = [1]\nslots-per-gpu = 3\n'
                       'memory-per-slot = "128 MiB"\n')
        with Daemon(arguments=("--pool", pool, "--name", "mine"), SIMGPU_DEVICES="2") as daemon:
            servers = json.loads(run([PENSTOCK, "ls", "-o", "json", "--server", daemon.address],
                                     plain_env()).out)
            check_equal([(gpu["ordinal"], gpu["slots"], gpu["slot_memory"] >> 20)
                         for gpu in servers[0]["gpus"]], [(1, 3, 128)], "What it offers")
        outcome = run([PENSTOCKD, "--driver", "sim", "--pool", pool, "--name", "third"], plain_env())
        check("has no server of the name (third)" in outcome.err, f"It says ({outcome.err}).")


if __name__ == "__main__":
    main()
