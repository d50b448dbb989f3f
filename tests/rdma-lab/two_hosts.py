"""Two machines, the daemon on host 2 and programs on host 1: samples, the rules of order, cuts between
the two, and a host that loses power.

    two_hosts.py [CASE...]
"""

import re

from boot import boot, case, check, check_copies_end_well, check_copies_fail, check_ran, numbers

RDMA = "PENSTOCK_TRANSPORT=rdma"
# Each side gives the other up after so long without a way to it. To notice that the way is gone takes
# up to a second until something is sent, and one for its repetitions; the rest is for a slow machine.
PEER_TIMEOUT = 4
REPORT_SECONDS = PEER_TIMEOUT + 8


def _hosts(name, client, server=""):
    """The scripts of both: host 2 serves from before the client's script until after it."""
    return f"""
        address=10.7.0.2
        export PENSTOCK_RDMA_PEER_TIMEOUT={PEER_TIMEOUT * 1000}
        sever() {{ tc qdisc replace dev eth0 root netem loss 100%; lab-host signal {name}-cut; }}
        heal() {{ tc qdisc del dev eth0 root; }}
        lab-host await {name}-serving
        trap 'lab-host signal {name}-done; lab-host await {name}-over' EXIT
        {client}""", f"""
        printf '[transport]\\npeer-timeout-ms = {PEER_TIMEOUT * 1000}\\n' >config
        daemon 10.7.0.2 --config config --log info
        lab-host signal {name}-serving
        {server}
        lab-host await {name}-done
        sed 's/^/daemon says: /' daemon
        sleep 0.5
        lab-host signal {name}-over"""


@case(seconds=90)
def samples():
    """Programs are right across two kernels."""
    names = ["vector_add", "two_streams"]
    out = yield _hosts("samples", "\n".join(f"run {name} {RDMA} $samples/{name}" for name in names))
    for name in names:
        check_ran(out, name, "rdma")


@case(seconds=120)
def order():
    """Memory that a copy fills and the next one reads, without synchronisation between; and a copy
    behind a kernel that still reads its target does not overtake it."""
    programs = {"turnaround_alloc": "pinned_turnaround 2 alloc",
                "turnaround_register": "pinned_turnaround 2 register",
                "behind_kernel_alloc": "copy_behind_kernel alloc",
                "behind_kernel_pageable": "copy_behind_kernel pageable"}
    out = yield _hosts("order", "\n".join(f"run {label} {RDMA} $programs/{program}"
                                          for label, program in programs.items()))
    for label in programs:
        check_ran(out, label, "rdma", "ok")


@case(seconds=60)
def short_cut():
    """Nothing gets through for two seconds: the session goes on, and no error comes."""
    out = yield _hosts("short_cut", f"""
        copy {RDMA}
        sever
        sleep 2
        heal
        await_rounds 2
        finish""")
    check_copies_end_well(out)


@case(seconds=90)
def long_cut():
    """The cut lasts. The server ends the session of a program that is killed meanwhile, and that of
    one that lives, which gets an error; all within the time set. Then the next program is served."""
    out = yield _hosts("long_cut", f"""
        copy {RDMA}
        killed=$copies
        mkdir other
        cd other
        copy {RDMA}
        sever
        kill -9 $killed
        echo "at cut_here $(now)"
        wait $copies && echo "copies: status 0" || echo "copies: status $?"
        echo "at told_here $(now)"
        tail -n 1 copies
        sed 's/^/copies say: /' copies.err
        lab-host await long_cut-reported
        heal
        run after {RDMA} $samples/constant_symbols""", """
        lab-host await long_cut-cut
        echo "at cut_there $(now)"
        await_line daemon "Session 1 .*ends after" 60
        await_line daemon "Session 2 .*ends after" 60
        echo "at told_there $(now)"
        lab-host signal long_cut-reported""")
    at = numbers(out, "at")
    for place in ("here", "there"):
        took = at[f"told_{place}"] - at[f"cut_{place}"]
        check(PEER_TIMEOUT - 1 < took < REPORT_SECONDS,
              f"with a limit of {PEER_TIMEOUT} s the cut is reported {place} in ({took:.1f} s)")
    check_copies_fail(out)
    # Only what host 1 sends is lost: the server may notice first, and its farewell arrive.
    check(re.search("copies say: .*(out of reach|closed the connection)", out), "a line says why")
    check(len(re.findall("daemon says: .*out of reach", out)) >= 2, "the server says so of both sessions")
    check_ran(out, "after", "rdma")


@case(seconds=60)
def power_loss():
    """The server's host loses power in the middle of copies: the program gets an error in time."""
    client, server = _hosts("power_loss", f"""
        trap - EXIT
        copy {RDMA}
        lab-host kill 2
        echo "at killed $(now)"
        wait $copies && echo "copies: status 0" || echo "copies: status $?"
        echo "at told $(now)"
        tail -n 1 copies
        sed 's/^/copies say: /' copies.err""")
    out = yield client, server
    at = numbers(out, "at")
    took = at["told"] - at["killed"]
    check(took < REPORT_SECONDS, f"with a limit of {PEER_TIMEOUT} s the end is reported in ({took:.1f} s)")
    check_copies_fail(out)
    check("copies say: " in out, "and a line that says why")


boot("two-hosts", [samples, order, short_cut, long_cut, power_loss], "--memory", 1024)
