#!/usr/bin/env python3
"""Programs that mean harm beside one that does not: each gets errors or loses its session, with one
line in the log, while the other program's results stay right to the byte and the daemon goes on."""

import threading

from harness import *

HERE = os.path.dirname(os.path.abspath(__file__))
RECORDED = os.path.join(HERE, "..", "fuzz", "corpus", "worker")
HOSTILE = program("hostile_client")


class Tenant:
    """A program in a session of its own that works all the time and checks every byte."""

    def __init__(self, daemon):
        self._talk = Conversation([program("steady")], client_env(daemon))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.rounds, self.trouble = 0, None

    def _work(self):
        try:
            while not self._stop.is_set():
                answer = self._talk.ask("round")
                if answer != "right":
                    self.trouble = f"The tenant says ({answer!r})."
                    return
                self.rounds += 1
        except Exception as error:  # the main thread reports it
            self.trouble = f"The tenant: {error}"

    def __enter__(self):
        self._talk.__enter__()
        check_equal(self._talk.ask("round"), "right", "The tenant's first answer")
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self._stop.set()
        self._thread.join(PROGRAM_LIMIT_S)
        self._talk.__exit__(kind, None, None)
        if kind is None:
            check(self.trouble is None, self.trouble)
            check(self.rounds > 0, "The tenant did nothing meanwhile.")
            print(f"The tenant was right {self.rounds} times.")


def log_lines(daemon, words):
    return [line for line in daemon.log().splitlines() if words in line]


def beside_a_tenant(attack, **options):
    """Runs attack(daemon) beside a tenant; afterwards the daemon is the same process, serves another
    program, and nothing but the tenant's worker is left."""
    with Daemon(**options) as daemon:
        with Tenant(daemon) as tenant:
            before = set(descendants(daemon.pid))
            attack(daemon)
            done = tenant.rounds
            wait_until(lambda: tenant.rounds > done or tenant.trouble, PROGRAM_LIMIT_S,
                       "The tenant does not go on.")
            wait_until(lambda: set(descendants(daemon.pid)) <= before, 10,
                       "Workers of the attack are left.")
        check(daemon.process.poll() is None, "The daemon has ended.")
        crashed = [line for line in log_lines(daemon, "killed by signal")
                   if "killed by signal 9" not in line]
        check(not crashed, f"A worker has crashed: {crashed}")
        check_ok(run([sample("static", "vector_add")], client_env(daemon)), "A program afterwards")


def hostile(daemon, *arguments, limit_s=PROGRAM_LIMIT_S):
    outcome = check_ok(run([HOSTILE, daemon.address, *arguments], plain_env(), limit_s=limit_s),
                       f"The attack ({arguments[0]})")
    print(outcome.out, end="")
    return outcome


@case
def garbage():
    """Each session of garbage ends with one line that says why, and the names that the client gives
    are plain text in it."""
    def attack(daemon):
        hostile(daemon, "garbage", "12")
        wait_until(lambda: len(log_lines(daemon, "breaks the protocol")) >= 12, 10,
                   "The log has no line for each session.")
        check_equal(len(log_lines(daemon, "breaks the protocol")), 12, "The number of lines")
        check("\x1b" not in daemon.log(), "The log holds control characters of a client.")

    beside_a_tenant(attack)


@case
def mutated_sessions():
    """They get far enough to be ended for many reasons, and none by a crash."""
    def attack(daemon):
        hostile(daemon, "mutate", "60", RECORDED)
        reasons = {line.partition("breaks the protocol: ")[2]
                   for line in log_lines(daemon, "breaks the protocol")}
        print("\n".join(sorted(reasons)))
        check(len(reasons) >= 8, f"All sessions end for ({len(reasons)}) reasons.")

    beside_a_tenant(attack)


@case
def huge_counts():
    beside_a_tenant(lambda daemon: hostile(daemon, "counts"))


@case
def ids_of_others():
    beside_a_tenant(lambda daemon: hostile(daemon, "ids"))


@case
def floods():
    """Calls without end, with connections without end at the same time."""
    def attack(daemon):
        both = [threading.Thread(target=hostile, args=(daemon, mode)) for mode in
                ("flood", "connections")]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()

    beside_a_tenant(attack)


@case
def half_a_frame():
    """Whoever stops in the middle of a frame holds up himself."""
    def attack(daemon):
        with Conversation([HOSTILE, daemon.address, "half"], plain_env()) as half:
            check_equal(half.hear(), "waiting", "Its first line")
            time.sleep(0.5)
            half.kill()

    beside_a_tenant(attack)


@case
def kernels_out_of_bounds():
    """Reads and writes where nothing is, where others' memory is, and where the worker is."""
    def attack(daemon):
        for mode in ("read", "write", "others", "host"):
            outcome = check_ok(run([program("malicious_kernel"), mode], client_env(daemon)), mode)
            check_equal(outcome.out, f"{mode}: cudaErrorIllegalAddress\n", "What it gets")

    beside_a_tenant(attack)


@case
def kernel_without_end():
    """A kernel that spins costs time, but nobody's results; killed, its worker goes at once."""
    def attack(daemon):
        with Conversation([program("malicious_kernel"), "spin"], client_env(daemon)) as spin:
            check_equal(spin.hear(), "spinning", "Its first line")
            time.sleep(1)
            spin.kill()

    beside_a_tenant(attack)


@case
def kernel_that_prints():
    """What overflows the device's buffer takes the place of the oldest: lines are lost, the first one
    that comes may have lost its beginning, and all others are whole."""
    def attack(daemon):
        outcome = check_ok(run([program("malicious_kernel"), "printf"], client_env(daemon)),
                           "The program")
        lines = outcome.out.splitlines()
        check_equal(lines[-1], "printf: cudaSuccess", "Its last line")
        check(len(lines) > 1000, f"Only ({len(lines)}) lines come.")
        wrong = [line for line in lines[1:-1] if not re.fullmatch(
            r"block \d+ thread \d+ says \d+: a line that is repeated until nobody can hear it any "
            r"more", line)]
        check(not wrong, f"({len(wrong)}) lines are torn, the first is ({wrong[:1]}).")

    beside_a_tenant(attack)


@case
def isolation():
    """What the kernel says of a running worker."""
    with Daemon() as daemon, Tenant(daemon):
        workers = descendants(daemon.pid)
        check_equal(len(workers), 1, "The number of workers")
        with open(f"/proc/{workers[0]}/status", encoding="utf-8") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        check_equal(status["Seccomp"].strip(), "2", "Seccomp")
        check_equal(status["NoNewPrivs"].strip(), "1", "NoNewPrivs")
        for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            check_equal(int(status[kind], 16), 0, kind)
        if os.geteuid() == 0:
            check_equal(int(status["CapBnd"], 16), 0, "CapBnd")
            uids = status["Uid"].split()
            check(len(set(uids)) == 1 and int(uids[0]) != 0, f"The user ids are ({uids}).")
            targets = {os.path.realpath(f"/proc/{workers[0]}/fd/{fd}")
                       for fd in os.listdir(f"/proc/{workers[0]}/fd")}
            foreign = [name for name in targets if name.endswith((".pem", "/key", "/port"))]
            check(not foreign, f"The worker holds ({foreign}).")


main()
