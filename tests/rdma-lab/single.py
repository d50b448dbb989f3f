"""One machine with one soft-RoCE device: the transport's suite, whole sessions, and what goes wrong
without a packet being lost.

    single.py [CASE...]
"""

import json
import re

from boot import boot, case, check, check_copies_fail, check_ran, numbers

SAMPLES = ["vector_add", "reduction_shuffle", "two_streams", "constant_symbols", "driver_api_ptx",
           "host_threads", "kernel_printf", "histogram_atomics", "matrix_multiply"]
RDMA = "PENSTOCK_TRANSPORT=rdma"
REPORT_SECONDS = 5  # a process that is gone is noticed at once; the rest is for a slow machine


def _counts(out, label):
    """The statistics of the program with this label."""
    return json.loads(re.search(f"^{label} counts: (.*)$", out, re.MULTILINE)[1])


@case(seconds=60)
def perftest():
    """The device works for others too: one of perftest's programs of each kind."""
    out = yield """
        for program in "ib_send_lat -s 128 -n 1000" "ib_read_bw -s 1048576 -n 20" \
                       "ib_write_bw -s 1048576 -n 20"; do
          timeout 50 $program -R >server 2>&1 &
          lab-listening
          timeout 50 $program -R 10.9.0.1
          wait $!
        done"""
    for line in ("128 +1000", "1048576 +20", "1048576 +20"):
        check(re.search(f"^ {line} ", out, re.MULTILINE), f"a line of results begins with {line}")


@case(seconds=150)
def conformance():
    """The suite that all transports pass."""
    out = yield """
        PENSTOCK_TEST_RDMA=10.9.0.1 PENSTOCK_LOG=error transport_conformance_test"""
    check("All tests passed" in out, "the suite passes")


@case(seconds=120)
def samples():
    """Every sample is right over RDMA, demanded, and nothing is said and nothing left."""
    out = yield "daemon 10.9.0.1\n" + "".join(
        f"run {name} {RDMA} $samples/{name}\n" for name in SAMPLES) + """
        sleep 1
        echo "left: $(rdma resource show qp)"
        sed 's/^/daemon says: /' daemon"""
    for name in SAMPLES:
        check_ran(out, name, "rdma")
    check("says:" not in out, "nobody says anything")
    left = [line for line in out.split("left: ")[1].splitlines() if "type RC" in line]
    check(not left, f"no connected queue pair is left ({left})")


@case(seconds=60)
def counts():
    """A call costs the same over both transports, and a program prints the same. auto means rdma."""
    names = ["matrix_multiply", "vector_add"]
    out = yield "daemon 10.9.0.1\n" + "".join(
        f"run {name}_{kind} PENSTOCK_TRANSPORT={kind} $samples/{name}\n"
        for name in names for kind in ("auto", "tcp"))
    for name in names:
        check_ran(out, f"{name}_auto", "rdma")
        check_ran(out, f"{name}_tcp", "tcp")
        said = [re.findall(f"^{name}_{kind} prints: (.*)$", out, re.MULTILINE) for kind in ("auto", "tcp")]
        check(said[0] == said[1], f"{name} prints the same over both")
        rdma, tcp = (_counts(out, f"{name}_{kind}") for kind in ("auto", "tcp"))
        for count in ("calls", "posted", "local", "functions", "bulk_bytes_sent", "bulk_bytes_received"):
            check(rdma[count] == tcp[count], f"{count} over rdma ({rdma[count]}) is tcp's ({tcp[count]})")
        calls = [stats["round_trips"] - stats["handshake_round_trips"] for stats in (rdma, tcp)]
        check(calls[0] == calls[1], f"round trips of calls over rdma and tcp are the same ({calls})")


@case(seconds=60)
def copies():
    """The client copies pageable memory once and pinned memory not at all, whatever the size."""
    sizes = [300_007, 3_000_001]
    out = yield "daemon 10.9.0.1\n" + "".join(
        f"run {kind}_{size} {RDMA} $programs/host_copies {kind} {size}\n"
        for kind in ("pinned", "pageable") for size in sizes) + f"""
        run large {RDMA} $programs/large_copies"""
    for size in sizes:
        for kind, per_byte in (("pinned", 0), ("pageable", 1)):
            label = f"{kind}_{size}"
            check_ran(out, label, "rdma", "ok")
            copied = _counts(out, label)["bulk_copies"]
            check(copied == per_byte * 2 * size,
                  f"({copied}) bytes are copied of twice ({size}) of {kind} memory")
    check_ran(out, "large", "rdma", "ok")


@case(seconds=60)
def packing():
    """Launches with pauses leave at once, each in a packet; of a storm, at least 8 share one."""
    idle, storm = 100, 2000
    out = yield f"""
        daemon 10.9.0.1
        run none {RDMA} $programs/launch_pace 0 0
        run idle {RDMA} $programs/launch_pace {idle} 20
        run storm {RDMA} $programs/launch_pace {storm} 0"""
    packets = {}
    for label in ("none", "idle", "storm"):
        check_ran(out, label, "rdma", "launches")
        packets[label] = _counts(out, label)["packets_sent"]
    paced, packed = packets["idle"] - packets["none"], packets["storm"] - packets["none"]
    print(f"packing: {idle} idle launches take {paced} packets, {storm} at once take {packed}")
    check(0.95 * idle <= paced <= 1.2 * idle, f"({idle}) idle launches take as many packets ({paced})")
    check(packed <= storm / 8, f"({storm}) launches at once take at most an eighth ({packed})")


@case(seconds=60)
def trouble():
    """What fails before the connection stands ends in tcp with one warning, or, if RDMA is demanded,
    in an error. The rail's address is none of this host's."""
    nowhere = "PENSTOCK_RDMA_RAILS=10.66.0.1"
    out = yield f"""
        daemon 10.9.0.1
        run warned {nowhere} $samples/constant_symbols
        run demanded {nowhere} {RDMA} $samples/constant_symbols
        run tcp PENSTOCK_TRANSPORT=tcp $samples/constant_symbols
        daemon 10.9.0.1 --transport tcp
        run server_tcp $samples/constant_symbols"""
    for label in ("warned", "tcp", "server_tcp"):
        check_ran(out, label, "tcp")
    said = re.findall("warned says: .*", out)
    check(len(said) == 1 and "over tcp instead of RDMA" in said[0], f"one warning comes ({said})")
    check("demanded: status 1," in out, "the program that demands RDMA fails")
    check(re.search("demanded says: .*RDMA is demanded", out), "its error says so")
    check("tcp says" not in out, "who asks for tcp, on either side, is not told of RDMA")


@case(seconds=60)
def memlock():
    """64 KiB of locked memory, as an ordinary user: a message that names the limit, and tcp."""
    out = yield f"""
        if [ $(id -u) = 0 ]; then
          rm key
          ulimit -l 64
          exec setpriv --reuid 1000 --regid 1000 --clear-groups -- /bin/sh -e /tmp/case-memlock
        fi
        echo "user $(id -u), memlock $(ulimit -l)"
        daemon 10.9.0.1
        run auto $samples/constant_symbols
        run demanded {RDMA} $samples/constant_symbols"""
    check("user 1000, memlock 64\n" in out, "user and limit are as meant")
    check_ran(out, "auto", "tcp")
    check(re.search("auto says: .*over tcp instead of RDMA.*(memlock|locked)", out),
          "the warning names the limit")
    check("demanded: status 1," in out, "the program that demands RDMA fails")
    check(re.search("demanded says: .*(memlock|locked)", out), "its error names the limit")


@case(seconds=60)
def no_rdma_core():
    """A device but no rdma-core, on the client or on the server: a message that names the package, and
    tcp. A mount namespace hides the libraries."""
    out = yield f"""
        cp -a /usr/lib/x86_64-linux-gnu bare
        rm -r bare/libibverbs* bare/librdmacm*
        mkdir without
        for program in penstock penstockd; do
          cat >without/$program <<@
#!/bin/sh
exec unshare -m sh -ec 'mount --bind $PWD/bare /usr/lib/x86_64-linux-gnu; exec "\$0" "\$@"' \
  $(command -v $program) "\$@"
@
        done
        chmod +x without/*
        daemon 10.9.0.1
        path=$PATH
        PATH=$PWD/without:$path
        run client_auto $samples/constant_symbols
        run client_demands {RDMA} $samples/constant_symbols
        daemon 10.9.0.1
        PATH=$path
        run server_auto $samples/constant_symbols
        run server_demands {RDMA} $samples/constant_symbols
        daemon 10.9.0.1
        run with_it $samples/constant_symbols"""
    for side in ("client", "server"):
        check_ran(out, f"{side}_auto", "tcp")
        said = re.findall(f"{side}_auto says: .*", out)
        check(len(said) == 1 and re.search("over tcp instead of RDMA.*package libibverbs1", said[0]),
              f"one warning names the package missing on the {side} ({said})")
        check(f"{side}_demands: status 1," in out, "the program that demands RDMA fails")
        check(re.search(f"{side}_demands says: .*package libibverbs1", out), "its error names it too")
    check_ran(out, "with_it", "rdma")


@case(seconds=60)
def killed():
    """kill -9 of one side in the middle of copies: the other says so at once, and the next program is
    served as if nothing had been."""
    out = yield f"""
        daemon 10.9.0.1 --log info
        copy {RDMA}
        echo "at client_killed $(now)"
        kill -9 $copies
        await_line daemon "Session 1 .*ends" 30
        echo "at client_reported $(now)"
        wait $copies || true
        run after_client {RDMA} $samples/constant_symbols
        copy {RDMA}
        worker=$(sed -n 's/.*Session 3 begins.*(worker \\([0-9]*\\)).*/\\1/p' daemon)
        echo "at worker_killed $(now)"
        kill -9 $worker
        wait $copies && echo "copies: status 0" || echo "copies: status $?"
        echo "at worker_reported $(now)"
        tail -n 1 copies
        sed 's/^/copies say: /' copies.err
        run after_worker {RDMA} $samples/constant_symbols
        sed 's/^/daemon says: /' daemon"""
    at = numbers(out, "at")
    for who in ("client", "worker"):
        took = at[f"{who}_reported"] - at[f"{who}_killed"]
        check(took < REPORT_SECONDS, f"the end of the {who} is reported in ({took:.1f} s)")
        check_ran(out, f"after_{who}", "rdma")
    check_copies_fail(out)
    check(re.search("daemon says: .*Session 3 .*killed by signal 9", out), "the daemon says what happened")


@case(seconds=90)
def device_removed():
    """`rdma link del` under a listening server, with a session in mid-copy: the removal ends, the
    program gets an error, the daemon lives and says something, and new sessions go over tcp until the
    device is back."""
    out = yield f"""
        daemon 10.9.0.1 --log info
        copy {RDMA} PENSTOCK_RDMA_PEER_TIMEOUT=2000
        echo "at removed $(now)"
        timeout 40 rdma link del rxe0
        echo "at gone $(now)"
        wait $copies && echo "copies: status 0" || echo "copies: status $?"
        echo "at told $(now)"
        tail -n 1 copies
        sed 's/^/copies say: /' copies.err
        run without $samples/constant_symbols
        kill -0 $(cat /tmp/daemon.pid) && echo "the daemon lives"
        rdma link add rxe0 type rxe netdev d0
        run again {RDMA} $samples/constant_symbols
        sed 's/^/daemon says: /' daemon"""
    at = numbers(out, "at")
    check(at["gone"] - at["removed"] < 20, "the removal comes to its end")
    check(at["told"] - at["removed"] < 30, "the program is told in time")
    check_copies_fail(out)
    check("the daemon lives" in out, "the daemon lives")
    check(re.search("daemon says: .*Session 1 ", out), "its log speaks of the session")
    check_ran(out, "without", "tcp")
    check_ran(out, "again", "rdma")


boot("single", [perftest, conformance, samples, counts, copies, packing, trouble, memlock, no_rdma_core,
                killed, device_removed])
