#!/usr/bin/env python3
"""Choosing what carries a session, on a host without RDMA: what is demanded and cannot be had is an
error that says why, and nobody is told of RDMA who has none."""

from harness import *

# Where the host has RDMA devices these tests have nothing to say: tests/rdma-lab has them.
if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
    print("This host has RDMA devices.")
    sys.exit(0)

VECTOR_ADD = sample("static", "vector_add")


def _refused(outcome, *words):
    check_equal(outcome.status, 1, "The program's status")
    lines = [line for line in outcome.err.splitlines() if line.startswith("penstock")]
    check(len(lines) == 1, f"Penstock does not say one line:\n{outcome.err}")
    for word in words:
        check(word in lines[0], f"The line lacks ({word}):\n{lines[0]}")


@case
def demanded():
    """RDMA is demanded by the client, which has no device."""
    with Daemon() as daemon:
        _refused(run([VECTOR_ADD], client_env(daemon, PENSTOCK_TRANSPORT="rdma")),
                 "RDMA is demanded", "no RDMA device", "PENSTOCK_TRANSPORT")
        _refused(run([PENSTOCK, "run", "--transport", "rdma", "--server", daemon.address, "--",
                      VECTOR_ADD], client_env(daemon)), "RDMA is demanded")


@case
def demanded_by_daemon():
    """The daemon serves over RDMA only; the client has no device."""
    with Daemon(arguments=["--transport", "rdma"]) as daemon:
        _refused(run([VECTOR_ADD], client_env(daemon)), "RDMA only", "--transport rdma")


@case
def silent():
    """On one machine auto means shared memory. Neither it nor tcp says anything, or takes a step more
    than it needs."""
    with Daemon() as daemon, Scratch() as scratch:
        for kind, taken, round_trips in (("auto", "shm", 4), ("tcp", "tcp", 3), ("", "shm", 4)):
            outcome = run([VECTOR_ADD], client_env(daemon, PENSTOCK_TRANSPORT=kind,
                                                   PENSTOCK_STATS=scratch / "stats"))
            check_ok(outcome, f"vector_add with transport ({kind})")
            check_equal(outcome.err, "", "stderr")
            with open(scratch / "stats", encoding="ascii") as file:
                stats = json.load(file)
            check_equal(stats["transport"], taken, "The transport")
            check_equal(stats["handshake_round_trips"], round_trips, "The round trips of the handshake")
            check_equal(stats["packets_sent"], 0, "The packets of RDMA")


@case
def wrong_values():
    """A setting that means nothing is an error that names it, on both sides."""
    with Daemon() as daemon:
        for name, value in (("PENSTOCK_TRANSPORT", "bogus"), ("PENSTOCK_TRANSPORT", "RDMA"),
                            ("PENSTOCK_RDMA_RAILS", "gpu7"), ("PENSTOCK_RDMA_RAILS", "10.0.0.1,"),
                            ("PENSTOCK_RDMA_RAILS", "10.0.0.1," * 4 + "10.0.0.1"),
                            ("PENSTOCK_RDMA_TIMEOUT", "soon"), ("PENSTOCK_RDMA_TIMEOUT", "0"),
                            ("PENSTOCK_RDMA_PEER_TIMEOUT", "99")):
            _refused(run([VECTOR_ADD], client_env(daemon, **{name: value})), name)
    with Scratch() as scratch:
        for text, words in (('kind = "bogus"', "(bogus)"), ("rails = 5", "transport.rails (5)"),
                            ("rails = 0", "transport.rails (0)"),
                            ('rdma-addresses = ["gpu7"]', "(gpu7)"),
                            ('rdma-addresses = "10.0.0.1"', "a list of texts"),
                            ("control-traffic-class = 256", "(256)"),
                            ("retry-count = 7", "transport.retry-count (7)"),
                            ("peer-timeout-ms = 1", "transport.peer-timeout-ms (1)"),
                            ("rail = 1", "Key (rail) is not known")):
            with open(scratch / "settings", "w", encoding="ascii") as file:
                file.write(f"[transport]\n{text}\n")
            outcome = run([PENSTOCKD, "--config", scratch / "settings"], plain_env(), limit_s=10)
            check_equal(outcome.status, 2, f"The daemon's status with ({text})")
            check(words in outcome.err, f"The daemon does not say ({words}):\n{outcome.err}")


main()
