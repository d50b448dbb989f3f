"""Whole sessions over soft-RoCE: the client library, the daemon and its isolated workers.

    sessions.py CASE
"""

import json
import re
import sys

from cases import check, lab

# daemon ADDRESS [OPTION...]; program NAME [VARIABLE=VALUE...] writes /tmp/out and /tmp/stats.
HELPERS = """
printf 0123456789abcdef0123 >/tmp/key
export PENSTOCK_KEY_FILE=/tmp/key
daemon() {
  address=$1
  shift
  penstockd --driver sim --listen $address:14833 --key-file /tmp/key "$@" 2>/tmp/daemon &
  lab-listening 14833
}
program() {
  name=$1
  shift
  rm -f /tmp/stats
  status=0
  env PENSTOCK_STATS=/tmp/stats "$@" timeout 200 penstock run --server $address:14833 -- \\
    /build/bin/samples/static/$name >/tmp/out 2>/tmp/err || status=$?
  echo "$name: status $status, $(grep transport /tmp/stats), $(tail -n 1 /tmp/out)"
  sed "s/^/$name says: /" /tmp/err
}
"""
SAMPLES = ["vector_add", "reduction_shuffle", "two_streams", "constant_symbols", "driver_api_ptx",
           "host_threads", "kernel_printf", "histogram_atomics", "matrix_multiply"]


def _session(recipe, script, *options):
    status, out, _ = lab(recipe, *options, "--", "sh", "-ec", HELPERS + script)
    check(status == 0, f"the lab's status ({status}) is 0")
    return out


def _ran(out, name, transport):
    check(re.search(f'{name}: status 0, *"transport": "{transport}"', out),
          f"{name} runs over {transport}")


def samples():
    """Every sample is right over RDMA, demanded, and nothing is said and nothing left."""
    out = _session("single", "daemon 10.9.0.1\n" + "".join(
        f"program {name} PENSTOCK_TRANSPORT=rdma\n" for name in SAMPLES) +
        "sleep 2; echo \"left: $(rdma resource show qp)\"; cat /tmp/daemon", "--timeout", 500)
    for name in SAMPLES:
        _ran(out, name, "rdma")
    check("says:" not in out and "penstockd" not in out, "nobody says anything")
    left = [line for line in out.split("left: ")[1].splitlines() if "type RC" in line]
    check(not left, f"no connected queue pair is left ({left})")


def counts():
    """A call costs the same over both transports, and a program says the same. Pageable memory is
    copied once over RDMA, whatever its size: vector_add moves three arrays of 1,000,003 floats."""
    show = "echo \"said: $(cat /tmp/out)\"; echo \"stats: $(tr -d '\\n' </tmp/stats)\"\n"
    out = _session("single", "daemon 10.9.0.1\n" + "".join(
        f"program {name} PENSTOCK_TRANSPORT={kind}\n{show}"
        for name in ("matrix_multiply", "vector_add") for kind in ("auto", "tcp")) +
        "echo large: $(PENSTOCK_TRANSPORT=rdma timeout 60 penstock run --server $address:14833 -- "
        "/build/bin/e2e/large_copies)", "--timeout", 170)
    every = [json.loads(text) for text in re.findall("^stats: (.*)$", out, re.MULTILINE)]
    check([stats["transport"] for stats in every] == 2 * ["rdma", "tcp"], "auto means rdma here")
    check(len(set(re.findall("^said: (.*)$", out, re.MULTILINE))) == 2, "both say the same")
    for rdma, tcp in (every[:2], every[2:]):
        for count in ("calls", "posted", "local", "functions", "bulk_bytes_sent",
                      "bulk_bytes_received"):
            check(rdma[count] == tcp[count],
                  f"{count} over rdma ({rdma[count]}) is tcp's ({tcp[count]})")
        calls = [stats["round_trips"] - stats["handshake_round_trips"] for stats in (rdma, tcp)]
        check(calls[0] == calls[1], f"round trips of calls over rdma and tcp are the same ({calls})")
    copied = every[2]["bulk_copies"]
    check(copied == 3 * 4 * 1_000_003, f"({copied}) bytes are copied, each once")
    check("large: large_copies: ok" in out, "large copies bring every byte")


def two_hosts():
    """Two kernels: the daemon on one, the program on the other."""
    status, out, _ = lab(
        "two-hosts", "--timeout", 500, "--peer", HELPERS + "daemon 10.7.0.2; sleep 450", "--", "sh",
        "-ec", HELPERS + "address=10.7.0.2; sleep 6; program vector_add; program two_streams")
    check(status == 0, f"the lab's status ({status}) is 0")
    _ran(out, "vector_add", "rdma")
    _ran(out, "two_streams", "rdma")


def trouble():
    """What fails before the connection stands ends in tcp with one warning, or, if RDMA is demanded,
    in an error. The rail's address is none of this host's."""
    out = _session("single", """
        daemon 10.9.0.1
        program vector_add PENSTOCK_RDMA_RAILS=10.66.0.1
        program two_streams PENSTOCK_RDMA_RAILS=10.66.0.1 PENSTOCK_TRANSPORT=rdma
        program constant_symbols PENSTOCK_TRANSPORT=tcp
        kill $!; wait
        daemon 10.9.0.1 --transport tcp
        program driver_api_ptx
        cat /tmp/daemon""", "--timeout", 500)
    _ran(out, "vector_add", "tcp")
    said = re.findall("vector_add says: .*", out)
    check(len(said) == 1 and "over tcp instead of RDMA" in said[0], f"one warning comes ({said})")
    check("two_streams: status 1" in out, "the program that demands RDMA fails")
    check(re.search("two_streams says: .*RDMA is demanded", out), "its error says so")
    _ran(out, "constant_symbols", "tcp")
    check("constant_symbols says" not in out, "who asks for tcp is not told of RDMA")
    _ran(out, "driver_api_ptx", "tcp")
    check("driver_api_ptx says" not in out, "a server without RDMA is no trouble")


def memlock():
    """64 KiB of locked memory, as an ordinary user: a message that names the limit, and tcp."""
    out = _session("single", """
        daemon 10.9.0.1
        program vector_add
        program two_streams PENSTOCK_TRANSPORT=rdma""",
                   "--user", 1000, "--memlock", 65536, "--timeout", 500)
    _ran(out, "vector_add", "tcp")
    check(re.search("vector_add says: .*over tcp instead of RDMA.*(memlock|locked)", out),
          "the warning names the limit")
    check("two_streams: status 1" in out, "the program that demands RDMA fails")


if __name__ == "__main__":
    {each.__name__: each for each in (samples, counts, two_hosts, trouble, memlock)}[sys.argv[1]]()
