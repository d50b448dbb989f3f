#!/usr/bin/env python3
"""`penstock run`: exit status, streams, signals and environment look as if it were not there."""

from harness import *


def _simulate(command, env=None, **options):
    return run([PENSTOCK, "run", "--sim", "--", *command], env or plain_env(), **options)


@case
def exit_status():
    for script, expected in (("exit 0", 0), ("exit 7", 7), ("exit 255", 255),
                             ("kill -KILL $$", 128 + 9), ("kill -SEGV $$", 128 + 11)):
        check_equal(_simulate(["sh", "-c", script]).status, expected, f"The status of ({script})")
    check_equal(_simulate(["/nowhere/program"]).status, 127, "The status of a missing program")
    check_equal(_simulate(["/etc/passwd"]).status, 126, "The status of a file that is no program")
    check_equal(run([PENSTOCK, "run", "--no-such-option", "x"], plain_env()).status, 125,
                "The status of a wrong option")


@case
def streams():
    """stdout is the program's to the byte, stdin reaches it, stderr has our line if nothing is
    configured and no line otherwise."""
    direct = check_ok(run([sample("static", "kernel_printf")], direct_env()), "The sample on simgpu")
    through = _simulate([sample("static", "kernel_printf")], plain_env(PENSTOCK_LOG="trace"))
    check_ok(through, "The sample through penstock run")
    check_equal(through.out, direct.out, "stdout")
    quiet = check_ok(_simulate([sample("static", "vector_add")]), "vector_add")
    check_equal(quiet.err, "", "stderr")
    unconfigured = check_ok(run([PENSTOCK, "run", sample("static", "vector_add")], plain_env()),
                            "vector_add with nothing configured")
    check(len(unconfigured.err.splitlines()) == 1 and "No server is named" in unconfigured.err,
          f"stderr is ({unconfigured.err}).")
    with Scratch() as scratch:
        with open(scratch / "in", "w", encoding="ascii") as file:
            file.write("one\ntwo\n")
        with open(scratch / "in", encoding="ascii") as file:
            echoed = _simulate(["cat"], stdin=file)
    check_equal(echoed.out, "one\ntwo\n", "What cat echoes")


@case
def signals():
    script = 'trap "echo got it; exit 5" TERM; echo ready; while :; do sleep 0.02; done'
    process = start([PENSTOCK, "run", "--sim", "--", "sh", "-c", script], plain_env(),
                    stdout=subprocess.PIPE, text=True)
    check_equal(process.stdout.readline(), "ready\n", "The first line")
    process.terminate()
    out, _ = process.communicate(timeout=20)
    check_equal((out, process.returncode), ("got it\n", 5), "What the program says and returns")


def _processes_that_mention(text):
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if entry.isdigit() and text.encode() in file.read():
                    found.append(int(entry))
        except OSError:
            pass
    return found


@case
def nothing_is_left():
    """The private daemon ends with the program, also when penstock itself is killed."""
    with Scratch() as scratch:
        # The daemon's command line names its port file, which is in TMPDIR: that identifies it.
        env = plain_env(TMPDIR=scratch.path)
        check_ok(_simulate([sample("static", "vector_add")], env), "vector_add")
        check_equal(_processes_that_mention(scratch.path), [], "The processes that are left")
        check_equal(os.listdir(scratch.path), [], "The temporary files that are left")

        process = start([PENSTOCK, "run", "--sim", "--", "sh", "-c", "echo ready; exec sleep 60"], env,
                        stdout=subprocess.PIPE, text=True)
        check_equal(process.stdout.readline(), "ready\n", "The first line")
        below = descendants(process.pid)
        check(_processes_that_mention(scratch.path), "There is no private daemon.")
        process.kill()
        process.wait()
        wait_until(lambda: not _processes_that_mention(scratch.path), 10,
                   "The daemon goes on after penstock is killed.")
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@case
def environment():
    """With a server, penstock becomes the program and sets five variables."""
    with Scratch() as scratch:
        with open(scratch / "key", "w", encoding="ascii") as file:
            file.write("k" * 64)
        env = plain_env(LD_PRELOAD="libm.so.6", LD_LIBRARY_PATH="/somewhere",
                        PENSTOCK_SERVER="ignored:1")
        outcome = run([PENSTOCK, "run", "-n", "3", "--server", "127.0.0.1:9", "--key", scratch / "key",
                       "--", "env"], env)
        check_ok(outcome, "env")
        got = dict(line.split("=", 1) for line in outcome.out.splitlines() if "=" in line)
        for name, expected in (("LD_PRELOAD", f"{INTERPOSER}:libm.so.6"),
                               ("LD_LIBRARY_PATH", f"{LIBRARIES}:/somewhere"),
                               ("PENSTOCK_SERVER", "127.0.0.1:9"), ("PENSTOCK_GPUS", "3"),
                               ("PENSTOCK_KEY_FILE", scratch / "key")):
            check_equal(got.get(name), expected, name)
        named = run([PENSTOCK, "run", "env"], plain_env(PENSTOCK_SERVER="127.0.0.1:8"))
        check("PENSTOCK_SERVER=127.0.0.1:8\n" in named.out, f"env says:\n{named.out}{named.err}")


@case
def gpus():
    """-n N shows the program N devices, also on the simulated GPU; CUDA_VISIBLE_DEVICES chooses of
    them."""
    for count in (1, 3):
        outcome = run([PENSTOCK, "run", "-n", str(count), "--sim", "--", program("device_count")],
                      plain_env())
        check_equal(check_ok(outcome, "device_count").out, f"{count}\n", "The number of devices")
    for visible, count in (("2", 1), ("2,0", 2)):
        outcome = run([PENSTOCK, "run", "-n", "3", "--sim", "--", program("device_count")],
                      plain_env(CUDA_VISIBLE_DEVICES=visible))
        check_equal(check_ok(outcome, f"device_count with devices {visible}").out, f"{count}\n",
                    f"The number of devices of ({visible})")


main()
